"""The process on every node of a job: `python -m tiltyard.slurm.node_agent RUN_FOLDER`.

On the first node it starts the trainer (`tiltyard resume`), forwards Slurm's signals, and at the end writes the job's
outcome (job_outcome.py) to RUN/job/verdict. The job's script reads it, because only the script is sure to have Slurm's
commands. In a job of several nodes the agents first start one Ray together (ray_nodes.py).

The trials of a sweep have agents too, in Slurm and in other queues. A trial may be another program than Tiltyard, and
the agents let the sweep check once a minute which trials to stop early.
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
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, DiskError, TiltyardError, UseError
from tiltyard.failures import FailureClass, retry
from tiltyard.processes.lifetime import die_with
from tiltyard.run import atomic, checkpoint
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.history import History
from tiltyard.run.lock import Lock
from tiltyard.run.logs import last_error
from tiltyard.run.status import STATUS, write_status
from tiltyard.slurm import COUNTS, FOLDER, JOB_VARIABLE, RESUBMITTED, STOP, TASK, VERDICT
from tiltyard.slurm.commands import output_of
from tiltyard.slurm.job_outcome import Counts, Outcome, TrainerExit, decide_outcome, lead_needed
from tiltyard.slurm.job_state import current_job

if TYPE_CHECKING:
    from tiltyard.slurm.ray_nodes import RayNode

POLL_SECONDS = 0.5
LOG_DELAY = 2.0  # seconds until srun has copied the trainer's last lines to the job's log
HEAD_LOSS_DELAY = 5.0  # seconds that Ray needs to notice that a part of its head is gone
SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class JobRecord:
    """The run folder as one start of a job reads and writes it."""

    def __init__(self, run: Run) -> None:
        self.run, self.folder = run, run.folder / FOLDER
        self.task = atomic.read_json(self.folder / TASK)
        self.job = current_job() or os.environ.get(JOB_VARIABLE, "").rpartition("-")[2]
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)

    def claim(self) -> bool:
        """Record this job as the run's: a script that was submitted by hand or again has another id.

        False for a trial that has since been given to another job.
        """
        job, own_array = self.run.status().get("job") or {}, os.environ.get(JOB_VARIABLE)
        if own_array is not None and job.get("array") != own_array:
            again = f"{self.run.id} was submitted again as {job.get('array')}"
            sys.stdout.write(f"{own_array} has nothing to do: {again}\n")
            return False
        where = f"job {self.job} started on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
        self.log("started", f"{where}, restart {self.restart}" if self.restart else where)
        if current_job() and job.get("id") != self.job:
            self.write_status(job={**job, "id": self.job})
        (self.folder / RESUBMITTED).unlink(missing_ok=True)
        return True

    def conclude(self, outcome: Outcome, reason: str, counts: Counts) -> None:
        """Write counts, state and event, and last the verdict for the job's script."""
        state = self.run.status()["state"]
        if outcome in ("requeue", "late"):
            retry(lambda: atomic.write_json(self.folder / COUNTS, asdict(counts)))
        if outcome == "requeue":
            self.write_status(state="queued", reason="")
            self.log("requeued", reason)
        elif outcome == "failed" and state != "failed":
            self.write_status(state="failed", reason=f"{reason}; see logs/job-{self.job}.out")
            self.log("failed", reason)
        elif outcome in ("late", "stopped") and (reason or state != "stopped"):
            reason = reason or ("asked to stop" if self.stop_requested() else f"job {self.job} was ended from outside")
            self.write_status(state="stopped", reason=reason)
            self.log("stopped", reason)
        retry(lambda: atomic.write_text(self.folder / VERDICT, f"{self.job} {self.restart} {outcome}\n"))

    def counts(self) -> Counts:
        try:
            found = atomic.read_json(self.folder / COUNTS)
            return Counts(**{name: int(value) for name, value in found.items()})
        except (OSError, ValueError, TypeError):
            return Counts()

    def saved_env_steps(self) -> int | None:
        """Env steps of the newest checkpoint; for another program the last recorded ones, None if it records none."""
        if self.task.get("program"):
            return History(self.run).env_steps
        return max((each.env_steps for each in checkpoint.list_checkpoints(self.run)), default=0)

    def save_seconds(self) -> float:
        """How long recent saves took at most; 0 if unknown."""
        try:
            return atomic.number(atomic.read_json(self.run.folder / STATUS).get("save_seconds")) or 0.0
        except (OSError, ValueError):
            return 0.0

    def stop_requested(self) -> bool:
        return (self.folder / STOP).exists()

    def last_error(self) -> str:
        """The trainer's error message, which srun copies to the job's log a moment later."""
        log, until = self.run.folder / "logs" / f"job-{self.job}.out", time.monotonic() + LOG_DELAY
        while not (message := last_error(log)) and log.exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return message

    def write_status(self, **changes: Any) -> None:
        """Change the run's status, unless another process holds the run's lock."""

        def change() -> None:
            with Lock.acquire(self.run):
                write_status(self.run, **changes)

        try:
            retry(change)
        except (DiskError, UseError) as error:
            sys.stdout.write(f"{error.message}\n")

    def log(self, kind: str, sentence: str) -> None:
        """Add an event to the run, and print it to the job's log, which is enough if the disk fails."""
        try:
            log_event(self.run, kind, sentence, job=self.job, restart=self.restart)
        except DiskError as error:
            sys.stdout.write(f"{error.message}\n")
        sys.stdout.write(f"{sentence}\n")
        sys.stdout.flush()


class Agent:
    """The first node's agent, for one start of a job."""

    def __init__(self, run: Run) -> None:
        self.run, self.record = run, JobRecord(run)
        self.asked: str | None = None  # SIGUSR2 or SIGTERM, once one has come
        self._near = False  # the time limit
        self.ray: RayNode | None = None
        self._lost = ""  # how Ray's head was lost
        self._reported: set[str] = set()  # events of other nodes
        self._limit, self._began = _end_time(), time.time()
        self._last_judged = time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._near |= number == signal.SIGUSR2 and self.asked is None
        if self.asked != "SIGTERM":  # SIGTERM leaves less time and wins over SIGUSR2
            self.asked = "SIGUSR2" if number == signal.SIGUSR2 else "SIGTERM"

    def work(self) -> int:
        """Run the trainer until this start of the job is over; returns the exit code."""
        if not self.record.claim():
            return EXIT_DONE
        if self.record.task["nodes"] == 1:
            return self._run_trainer(os.environ)
        from tiltyard.slurm.ray_nodes import RayNode  # imports torch

        self.ray = RayNode(self.run.folder, self.record.task)
        try:
            return self._run_trainer(self.ray.lead(self.run.experiment().engine.learners))
        except TiltyardError as error:
            if self.asked == "SIGTERM":  # it ended Ray's processes too
                self.record.conclude("stopped", "", self.record.counts())
                return EXIT_RESUMABLE
            self.record.conclude("failed", error.message, self.record.counts())
            return EXIT_FAILED
        finally:
            self.ray.end()

    def _run_trainer(self, environment: Mapping[str, str]) -> int:
        """Run the trainer, again after a crash, and conclude the job."""
        record = self.record
        requeues, retry = int(record.task["requeues"]), int(record.task["retry"])
        began, tries, code = record.saved_env_steps(), retry, EXIT_FAILED
        while True:
            if record.stop_requested() or self.asked == "SIGTERM":
                code = EXIT_RESUMABLE  # stopped before it began
            else:
                code = self._run_once(environment)
                if self.ray is not None and code not in (EXIT_DONE, EXIT_RESUMABLE) and not self._lost:
                    # A dying head may end the trainer before it exits itself.
                    self._lost = self.ray.lost(timeout=HEAD_LOSS_DELAY)
            stop, ended = record.stop_requested(), record.saved_env_steps()
            failure = self._failure(code)
            end = TrainerExit(code, self.asked, stop, began, ended, tries, self._lost, self._near, failure)
            outcome, reason, counts = decide_outcome(end, record.counts(), requeues, retry)
            if outcome != "again":
                break
            tries -= 1
            record.log("warning", reason)
        if outcome == "failed" and code > 0 and not end.lost and self.run.status()["state"] != "failed":
            error = record.last_error()
            reason = f"{reason}: {error}" if error else reason
        record.conclude(outcome, reason, counts)
        if outcome in ("done", "requeue"):
            return EXIT_DONE
        return EXIT_RESUMABLE if outcome in ("late", "stopped") else max(code, EXIT_FAILED)

    def _failure(self, code: int) -> FailureClass | None:
        """The class of the failure that made the trainer stop; None for a stop on request, which is always recorded."""
        status = self.run.status()
        if code == EXIT_RESUMABLE and status["state"] != "stopped":
            return "retried in place"
        return status.get("failure")

    def _run_once(self, environment: Mapping[str, str]) -> int:
        """One trainer from start to exit. First or later, it continues from the newest checkpoint."""
        attempt = self.run.status()["attempt"]
        parent = os.getpid()

        def prepare() -> None:
            # Some sites signal every process of a step; SIGUSR2 would kill one that has no handler yet.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            die_with(parent)

        code = self._wait_for(
            subprocess.Popen(self._command(), preexec_fn=prepare, env=environment, stdin=subprocess.DEVNULL)
        )
        task = self.record.task
        if task["overrides"] and self.run.status()["attempt"] != attempt:
            task["overrides"] = []  # they are part of the run's own settings now
            retry(lambda: atomic.write_json(self.record.folder / TASK, task))
        return code

    def _command(self) -> list[str]:
        task = self.record.task
        if task.get("program"):
            return [sys.executable, "-m", "tiltyard.sweep.external_program", str(self.run.folder)]
        words = [*(["--trust-code"] if task["trust_code"] else []), *task["overrides"]]
        return [sys.executable, "-m", "tiltyard", "resume", str(self.run.folder), "--here", "--plain", *words]

    def _wait_for(self, trainer: subprocess.Popen[bytes]) -> int:
        """Forward signals until the trainer exits. SIGUSR2 is repeated: a trainer that is starting ignores it."""
        sent = None
        while True:
            if self.asked is None and (reason := self._limit_near()):
                self.asked, self._near = "SIGUSR2", True
                self.record.log("warning", f"{reason}; the agent requests the last save itself")
            if self.asked is None and self.record.stop_requested():
                self.asked = "SIGUSR2"
            if self.asked == "SIGUSR2" or self.asked != sent:
                trainer.send_signal(signal.SIGUSR2 if self.asked == "SIGUSR2" else signal.SIGTERM)
                sent = self.asked
            if self.ray is not None:
                self._poll_ray(self.ray, trainer)
            self._judge_sweep()
            try:
                return trainer.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue

    def _poll_ray(self, ray: RayNode, trainer: subprocess.Popen[bytes]) -> None:
        """Log other nodes' events; kill the trainer if Ray's head is lost, as it can no longer even save."""
        for sentence in ray.poll_events(self._reported):
            self.record.log("warning", sentence)
        if not self._lost and trainer.poll() is None and (lost := ray.lost()):
            self._lost = lost
            trainer.kill()

    def _judge_sweep(self) -> None:
        """Where a sweep stops trials early: let it compare them now and then. A trial to stop finds a file."""
        every = float(self.record.task.get("judge") or 0.0)
        if every and time.monotonic() - self._last_judged >= every:
            self._last_judged = time.monotonic()
            command = [sys.executable, "-m", "tiltyard.sweep.tick", str(self.run.folder.parent), "--judge", str(every)]
            threading.Thread(target=subprocess.run, args=(command,), daemon=True).start()

    def _limit_near(self) -> str:
        """Why the run must be saved now: recent saves took so long that Slurm's signal would come too late, or half of
        `slurm.lead` has passed without it. Otherwise empty. The limit may have moved, so Slurm is asked."""
        if self._limit is None:
            return ""
        lead, saving = float(self.record.task["lead"]), self.record.save_seconds()
        needed = lead_needed(lead, saving, self._limit - self._began)
        earlier = needed > lead and not self.record.task.get("lead_set")
        margin = needed if earlier else lead / 2
        if time.time() <= self._limit - margin:
            return ""
        self._limit = _end_time(job=self.record.job) or self._limit
        if time.time() <= self._limit - margin:
            return ""
        return f"saving took up to {saving:.0f} s" if earlier else "no signal came before the time limit"


def _end_time(job: str = "") -> float | None:
    """When the time limit is reached: as set at the job's start or, with a job id, as Slurm reports it now."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if job:
        command = ["env", "SLURM_TIME_FORMAT=%s", "squeue", "--noheader", f"--jobs={job}", "--format=%e"]
        text = (output_of(command, 10) or "").strip()
    return float(text) if text.isdecimal() else None


def main() -> int:
    """The exit code of this node's agent."""
    run = Run(Path(sys.argv[1]))
    if os.environ.get("SLURM_PROCID", "0") == "0":
        try:
            return Agent(run).work()
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # a signal while Python exits would change the exit code
    task = atomic.read_json(run.folder / FOLDER / TASK)
    if task["nodes"] > 1:
        from tiltyard.slurm.ray_nodes import RayNode

        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        RayNode(run.folder, task).serve()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
