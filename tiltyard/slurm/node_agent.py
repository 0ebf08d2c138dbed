"""What runs on every node of a job: `python -m tiltyard.slurm.node_agent RUN_FOLDER`.

On the first node it starts the trainer, hands on what Slurm signals, and says at the end what becomes of the job. Where
there are several nodes, all agents together start one Ray before that (ray_nodes.py).

    trainer ended with             verdict
    0                              done
    75 after SIGUSR2 (limit near)  requeue; unless nothing was learned twice, it was often enough, or somebody said stop
    75 after SIGTERM               stopped: cancelled, or preempted, and then Slurm itself queues the job again
    75 after both                  late: requeue if Slurm says that the limit came before the end of the save
    anything, Ray's head gone      requeue, `slurm.retry` times; then failed
    killed by a signal             the trainer is started again inside the job, `slurm.retry` times; then failed
    anything else                  failed

The verdict is written to RUN/job/verdict, which the job's script reads: it alone is sure to have Slurm's commands.
Trials of sweeps have agents as well, in jobs of Slurm and in others: a trial may be any other program, and where a plan
ends trials early, agents look once a minute who falls behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, TiltyardError, UseError
from tiltyard.processes.child import die_with, killed_by
from tiltyard.run import atomic, checkpoint, metrics
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.logs import last_error
from tiltyard.run.status import write_status
from tiltyard.slurm import COUNTS, FOLDER, JOB_VARIABLE, RESUBMITTED, STOP, TASK, VERDICT
from tiltyard.slurm.commands import environment
from tiltyard.slurm.job_state import current_job

if TYPE_CHECKING:
    from tiltyard.slurm.ray_nodes import RayNode

TICK = 0.5  # seconds between looks at the clock
ECHO = 2.0  # seconds until the trainer's last words are in the job's log
NOTICE = 5.0  # seconds that Ray takes to see that a part of its head is gone
STILL = 2  # jobs in a row without a new checkpoint after which going on is of no use
Word = Literal["done", "requeue", "late", "stopped", "failed", "again"]


@dataclass(frozen=True)
class Counts:
    """What is counted from job to job."""

    requeues: int = 0
    still: int = 0
    """jobs in a row that ended where they began"""
    heads: int = 0
    """times that Ray's head was lost"""


@dataclass(frozen=True)
class End:
    """How a trainer ended, and what was asked of it before."""

    code: int
    asked: str | None
    stop: bool
    """whether somebody typed `tiltyard stop`"""
    began: int | None
    ended: int | None
    """env steps of the newest checkpoint, at the start and at the end of the job; None where nobody knows"""
    tries_left: int
    lost: str = ""
    """how Ray's head was lost"""
    near: bool = False
    """whether the time limit was near before anything else was asked"""


def judge(end: End, counts: Counts, requeues: int, retry: int = 0) -> tuple[Word, str, Counts]:
    """What becomes of the job, in a word and in a sentence, and the counts from here on."""
    if end.lost and (end.stop or end.asked == "SIGTERM"):  # Slurm ends Ray's processes along with the others
        end = replace(end, code=EXIT_RESUMABLE)
    elif end.lost:
        if counts.heads >= retry:
            return "failed", f"{end.lost}, and slurm.retry = {retry} are used up", counts
        return "requeue", f"{end.lost}: back into the queue", replace(counts, heads=counts.heads + 1)
    near_limit, ended = end.near or end.asked == "SIGUSR2", end.asked == "SIGTERM"
    if end.code == EXIT_DONE:
        return "done", "", counts
    if end.code > 0 and end.code != EXIT_RESUMABLE:
        return "failed", f"the trainer ended with exit code {end.code}", counts
    if end.stop or ((ended or end.code == EXIT_RESUMABLE) and not near_limit):
        return "stopped", "", counts
    if not near_limit:
        how = f"the trainer {killed_by(-end.code, explained=True)}"
        if end.tries_left > 0:
            return "again", f"{how}; it is started again inside the job", counts
        return "failed", f"{how}, and was started again often enough", counts
    still = end.ended is not None and end.ended <= (end.began or 0)
    counts = replace(counts, still=counts.still + 1 if still else 0)
    if counts.still >= STILL:
        return "failed", f"no progress: {counts.still} jobs in a row ended at env step {end.ended:,}", counts
    if counts.requeues >= requeues:
        return "stopped", f"the time limit was reached, and slurm.requeues = {requeues} are used up", counts
    counts = replace(counts, requeues=counts.requeues + 1)
    times = f"({counts.requeues} of at most {requeues} times)"
    if ended:
        return "late", f"ended while it saved, near its time limit; if it was that, back into the queue {times}", counts
    at = "" if end.ended is None else f" at env step {end.ended:,}"
    return "requeue", f"the time limit is near: saved{at}, back into the queue {times}", counts


class Agent:
    """The first node's agent: one start of one job."""

    HEARD = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)

    def __init__(self, run: Run) -> None:
        self.run, self.folder = run, run.folder / FOLDER
        self.task = atomic.read_json(self.folder / TASK)
        self.job = current_job() or os.environ.get(JOB_VARIABLE, "").rpartition("-")[2]
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.asked: str | None = None
        self._near = False  # the time limit
        self.ray: RayNode | None = None
        self._lost = ""  # how Ray's head was
        self._news: set[str] = set()
        self._limit = _end_time()
        self._looks = time.monotonic()  # when this agent last looked who falls behind
        for number in self.HEARD:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._near |= number == signal.SIGUSR2 and self.asked is None
        if self.asked != "SIGTERM":  # which leaves less time, and comes after the other if both come
            self.asked = "SIGUSR2" if number == signal.SIGUSR2 else "SIGTERM"

    # -- the whole of it

    def work(self) -> int:
        """See the run through this start of the job; returns the exit code."""
        if not self._take_up():
            return EXIT_DONE
        if self.task["nodes"] == 1:
            return self._see_through(os.environ)
        from tiltyard.slurm.ray_nodes import RayNode  # brings torch along

        self.ray = RayNode(self.run.folder, self.task)
        try:
            more = self.ray.lead(self.run.experiment().engine.learners)
            kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            return self._see_through({**kept, **more})
        except TiltyardError as error:
            self._conclude("failed", error.message, self._counts())
            return EXIT_FAILED
        finally:
            self.ray.end()

    def _see_through(self, environment: Mapping[str, str]) -> int:
        began, tries, code = self._saved(), int(self.task["retry"]), EXIT_FAILED
        while True:
            if self._stop_wanted() or self.asked == "SIGTERM":
                code = EXIT_RESUMABLE  # before it began
            else:
                code = self._train(environment)
                if self.ray is not None and code not in (EXIT_DONE, EXIT_RESUMABLE) and not self._lost:
                    self._lost = self.ray.lost(timeout=NOTICE)  # it may end the trainer before it ends itself
            end = End(code, self.asked, self._stop_wanted(), began, self._saved(), tries, self._lost, self._near)
            word, sentence, counts = judge(end, self._counts(), int(self.task["requeues"]), int(self.task["retry"]))
            if word != "again":
                break
            tries -= 1
            self._tell("warning", sentence)
        if word == "failed" and code > 0 and not end.lost and self.run.status()["state"] != "failed":
            said = self._last_error()
            sentence = f"{sentence}: {said}" if said else sentence
        self._conclude(word, sentence, counts)
        if word in ("done", "requeue"):
            return EXIT_DONE
        return EXIT_RESUMABLE if word in ("late", "stopped") else max(code, EXIT_FAILED)

    def _take_up(self) -> bool:
        """Say in the folder which job has the run now: a script that was submitted by hand or again has another id.
        False for a trial that has been given to another job since."""
        job, mine = self.run.status().get("job") or {}, os.environ.get(JOB_VARIABLE)
        if mine is not None and job.get("array") != mine:
            sys.stdout.write(f"{mine} has nothing to do: {self.run.id} was submitted again as {job.get('array')}\n")
            return False
        where = f"job {self.job} started on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
        self._tell("started", f"{where}, restart {self.restart}" if self.restart else where)
        if current_job() and job.get("id") != self.job:
            self._write_status(job={**job, "id": self.job})
        (self.folder / RESUBMITTED).unlink(missing_ok=True)
        return True

    def _conclude(self, word: Word, sentence: str, counts: Counts) -> None:
        state = self.run.status()["state"]
        if word in ("requeue", "late"):
            atomic.write_json(self.folder / COUNTS, asdict(counts))
        if word == "requeue":
            self._write_status(state="queued", reason="")
            self._tell("requeued", sentence)
        elif word == "failed" and state != "failed":
            self._write_status(state="failed", reason=f"{sentence}; see logs/job-{self.job}.out")
            self._tell("failed", sentence)
        elif word in ("late", "stopped") and (sentence or state != "stopped"):
            said = sentence or ("asked to stop" if self._stop_wanted() else f"job {self.job} was ended from outside")
            self._write_status(state="stopped", reason=said)
            self._tell("stopped", said)
        atomic.write_text(self.folder / VERDICT, f"{self.job} {self.restart} {word}\n")

    def _last_error(self) -> str:
        """What the trainer gave as its reason, which srun brings into the job's log a moment later."""
        log, until = self.run.folder / "logs" / f"job-{self.job}.out", time.monotonic() + ECHO
        while not (said := last_error(log)) and log.exists() and time.monotonic() < until:
            time.sleep(TICK)
        return said

    # -- the trainer

    def _train(self, environment: Mapping[str, str]) -> int:
        """One trainer from its start to its end. First or later, it goes on from what is there."""
        attempt = self.run.status()["attempt"]
        parent = os.getpid()

        def prepare() -> None:
            # Some sites signal every process of a step, and one that does not listen yet would be ended by it.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            die_with(parent)

        trainer = subprocess.Popen(
            self._command(),
            preexec_fn=prepare,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        code = self._wait_for(trainer)
        if self.task["overrides"] and self.run.status()["attempt"] != attempt:
            self.task = {**self.task, "overrides": []}  # they are part of the run's own settings now
            atomic.write_json(self.folder / TASK, self.task)
        return code

    def _command(self) -> list[str]:
        if self.task.get("program"):
            return [sys.executable, "-m", "tiltyard.sweep.external_program", str(self.run.folder)]
        trusted = ["--trust-code"] if self.task["trust_code"] else []
        words = [*trusted, *self.task["overrides"]]
        return [sys.executable, "-m", "tiltyard", "resume", str(self.run.folder), "--here", "--plain", *words]

    def _wait_for(self, trainer: subprocess.Popen[bytes]) -> int:
        """Hand on what is asked until the trainer has ended. SIGUSR2 again and again: a trainer that starts is deaf."""
        handed = None
        while True:
            if self.asked is None and self._limit_near():
                self.asked, self._near = "SIGUSR2", True
                self._tell("warning", "no signal came before the time limit; the agent asks for the last save itself")
            if self.asked is None and self._stop_wanted():
                self.asked = "SIGUSR2"
            if self.asked == "SIGUSR2" or self.asked != handed:
                trainer.send_signal(signal.SIGUSR2 if self.asked == "SIGUSR2" else signal.SIGTERM)
                handed = self.asked
            if self.ray is not None:
                self._look_after(self.ray, trainer)
            self._see_who_falls_behind()
            try:
                return trainer.wait(TICK)
            except subprocess.TimeoutExpired:
                continue

    def _look_after(self, ray: RayNode, trainer: subprocess.Popen[bytes]) -> None:
        """What other nodes have to say; a trainer without a head can do nothing more, not even save."""
        for sentence in ray.poll_events(self._news):
            self._tell("warning", sentence)
        if not self._lost and trainer.poll() is None and (lost := ray.lost()):
            self._lost = lost
            trainer.kill()

    def _see_who_falls_behind(self) -> None:
        """Where the sweep ends trials early: have it judge them now and then. Whoever is to end finds a file."""
        every = float(self.task.get("judge") or 0.0)
        if every and time.monotonic() - self._looks >= every:
            self._looks = time.monotonic()
            command = [sys.executable, "-m", "tiltyard.sweep.tick", str(self.run.folder.parent), "--judge", str(every)]
            threading.Thread(target=subprocess.run, args=(command,), daemon=True).start()

    def _limit_near(self) -> bool:
        """Whether half of the lead is gone and nobody has said so. A limit may have been moved: Slurm is asked then."""
        margin = float(self.task["lead"]) / 2
        if self._limit is not None and time.time() > self._limit - margin:
            self._limit = _end_time(ask=self.job) or self._limit
            return time.time() > self._limit - margin
        return False

    # -- words on disk

    def _counts(self) -> Counts:
        try:
            found = atomic.read_json(self.folder / COUNTS)
            return Counts(**{name: int(value) for name, value in found.items()})
        except (OSError, ValueError, TypeError):
            return Counts()

    def _saved(self) -> int | None:
        """Env steps of the newest checkpoint; of another program, which need not record any, the last recorded."""
        if self.task.get("program"):
            return max((int(record["env_steps"]) for record in metrics.read(self.run)), default=None)
        return max((each.env_steps for each in checkpoint.list_checkpoints(self.run)), default=0)

    def _stop_wanted(self) -> bool:
        return (self.folder / STOP).exists()

    def _write_status(self, **changes: Any) -> None:
        """Change the run's status, unless somebody else holds the run: then it is theirs to say."""
        try:
            with Lock.acquire(self.run):
                write_status(self.run, **changes)
        except UseError as error:
            sys.stdout.write(f"{error.message}\n")

    def _tell(self, kind: str, sentence: str) -> None:
        log_event(self.run, kind, sentence, job=self.job, restart=self.restart)
        sys.stdout.write(f"{sentence}\n")
        sys.stdout.flush()


def _end_time(ask: str = "") -> float | None:
    """When the time limit is reached: as Slurm said at the start or, with a job's id, as it says now."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if ask:
        try:
            command = ["squeue", "--noheader", f"--jobs={ask}", "--format=%e"]
            told = {**environment(), "SLURM_TIME_FORMAT": "%s"}
            text = subprocess.run(command, env=told, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None
    return float(text) if text.isdecimal() else None


def main() -> int:
    """The exit code of this node's agent."""
    run = Run(Path(sys.argv[1]))
    if os.environ.get("SLURM_PROCID", "0") == "0":
        try:
            return Agent(run).work()
        finally:
            for number in Agent.HEARD:
                signal.signal(number, signal.SIG_IGN)  # while Python ends there is nobody to hear them
    task = atomic.read_json(run.folder / FOLDER / TASK)
    if task["nodes"] > 1:
        from tiltyard.slurm.ray_nodes import RayNode

        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        RayNode(run.folder, task).serve()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
