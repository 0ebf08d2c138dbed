"""The driver's side of the workers: sends commands, receives answers, replaces workers that die or hang.

A replacement gets the commands that its predecessor had not answered, so that every command is answered; episodes that
were running in the dead worker are lost, and an event says so. Only heartbeats are polled: the fork server reports
exits, and answers are lines in a pipe. The inference server is not replaced: its end is raised here with its cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiltyard.engines.local import INFERENCE_SERVER, PRELOAD, WORKER
from tiltyard.engines.local.hang_location import STACK_BYTES, hang_location
from tiltyard.engines.local.shared_memory import SharedMemory, make_memory
from tiltyard.envs.watchdog import IDLE, RESETTING, STEPPING
from tiltyard.errors import DivergedError, EnvError, TiltyardError
from tiltyard.processes import fork_server
from tiltyard.processes.exit_reason import killed_by
from tiltyard.run.checkpoint import read_tree

POLL_SECONDS = 0.5  # between two checks of the heartbeats
EXIT_POLL_SECONDS = 0.05  # between two checks for exits while the driver learns
SUSPENDED_SECONDS = 10 * POLL_SECONDS  # a select that takes longer means that the whole job was suspended
MAX_FAILURES = 5  # of one worker in a row, without a filled slot
CLOSE_SECONDS = 3.0  # that workers have to finish their rollout and close their envs
HINT = "`tiltyard resume` continues; `tiltyard fork` with engine.inference=worker runs without an inference server"


@dataclass
class _InferenceServer:
    """Its process, the socket for requests of workers, and the file for its error report."""

    requests: socket.socket
    report: int
    pid: int | None = None


@dataclass
class _WorkerProcess:
    """One worker: its process, its pipes, and the commands that it has not answered yet."""

    number: int
    pid: int | None = None
    commands: int = -1
    answers: int = -1
    stack: int = -1
    text: bytes = b""
    pending: deque[dict[str, Any]] = field(default_factory=deque)
    error_report: dict[str, Any] | None = None
    ready: bool = False
    failures: int = 0
    beat: int = -1
    beat_since: float = field(default_factory=time.monotonic)
    kill_reason: str = ""
    """set when it is killed for hanging"""

    def release(self) -> None:
        """Close its pipes and files."""
        for fd in (self.commands, self.answers, self.stack):
            if fd >= 0:
                os.close(fd)
        self.commands = self.answers = self.stack = -1


class WorkerPool:
    """Workers 0 .. count - 1. `task` is what all of them are given."""

    def __init__(
        self,
        count: int,
        task: dict[str, Any],
        shared: SharedMemory,
        *,
        step_timeout: float,
        reset_timeout: float,
        restarts: int,
    ) -> None:
        self.shared, self._task = shared, task
        self._timeouts = {STEPPING: step_timeout, RESETTING: reset_timeout}
        self._restarts_left = restarts
        self.events: list[str] = []
        self.restarts = 0
        self.episodes_begun = [0] * count
        self._fork_server = fork_server.standby.take(PRELOAD)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fork_server, selectors.EVENT_READ, None)
        self.workers = [_WorkerProcess(number) for number in range(count)]
        self._starting: deque[_WorkerProcess | _InferenceServer] = deque()
        self._checked = 0.0
        self._late_answers: list[tuple[int, dict[str, Any]]] = []  # of workers that are gone
        self._inference_server = self._start_inference_server() if shared.batched else None
        for worker in self.workers:
            self._start(worker)

    # ------------------------------------------------------------------------------------------ messages

    def send(self, number: int, command: dict[str, Any]) -> None:
        """Send a command. If the worker dies before it answers, its replacement gets the command again."""
        worker = self.workers[number]
        worker.pending.append(command)
        if worker.ready:
            _write(worker, command)

    def is_busy(self, number: int) -> bool:
        """Whether a worker has not answered all commands."""
        return bool(self.workers[number].pending)

    def answers(self, timeout: float | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """(worker, answer) as they arrive: at least one, unless the timeout passes."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if until is None else min(POLL_SECONDS, max(0.0, until - time.monotonic()))
            start = time.monotonic()
            # The fork server last: an exit replaces the worker and its pipes.
            ready = sorted(self._selector.select(left), key=lambda each: each[0].data is None)
            if time.monotonic() - start > SUSPENDED_SECONDS:  # no env could return in that time
                for worker in self.workers:
                    worker.beat_since = time.monotonic()
            found = [answer for key, _ in ready for answer in self._recv(key.data)]
            self._check_heartbeats()
            found += self._late_answers
            self._late_answers = []
            yield from found
            if found or (until is not None and time.monotonic() >= until):
                return

    def check_processes(self) -> None:
        """Replace workers that died, while the driver learns. Cheap: may be called very often."""
        now = time.monotonic()
        if now - self._checked > EXIT_POLL_SECONDS:
            self._checked = now
            if select.select([self._fork_server], [], [], 0)[0]:
                self._handle_events()

    def _recv(self, worker: _WorkerProcess | None) -> list[tuple[int, dict[str, Any]]]:
        if worker is None:
            self._handle_events()
            return []
        got = os.read(worker.answers, 1 << 20)
        if not got:  # closed: the fork server will report its exit
            self._selector.unregister(worker.answers)
            os.close(worker.answers)
            worker.answers = -1
            return []
        *lines, worker.text = (worker.text + got).split(b"\n")
        return [answer for line in lines for answer in self._handle(worker, json.loads(line))]

    def _handle(self, worker: _WorkerProcess, answer: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        if "ready" in answer:
            worker.ready = True
            for each in worker.pending:
                _write(worker, each)
            return []
        if "error" in answer:
            worker.error_report = answer
            return []
        worker.pending.popleft()
        if "filled" in answer:
            worker.failures = 0
            self.episodes_begun[worker.number] += len(answer["episodes"])
        return [(worker.number, answer)]

    # ------------------------------------------------------------------------------------------ starts and exits

    def _start_inference_server(self) -> _InferenceServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report = make_memory(1)  # grows with what is written; nothing reads it before the end, so a pipe could block
        task = {**self._task, "run": INFERENCE_SERVER, "name": "tiltyard-a0", "number": 0}
        self._fork_server.fork(task, [self.shared.fd, theirs.fileno(), report])
        theirs.close()
        server = _InferenceServer(ours, report)
        self._starting.append(server)
        return server

    def _start(self, worker: _WorkerProcess) -> None:
        commands_end, commands = os.pipe2(os.O_CLOEXEC)
        answers, answers_end = os.pipe2(os.O_CLOEXEC)
        stack = make_memory(STACK_BYTES)
        begun = self.episodes_begun[worker.number]
        task = {
            **self._task,
            "run": WORKER,
            "name": f"tiltyard-w{worker.number}",
            "number": worker.number,
            "skip_episodes": 0 if self.restarts == 0 else begun + self.restarts,
        }
        requests = [] if self._inference_server is None else [self._inference_server.requests.fileno()]
        self._fork_server.fork(task, [commands_end, answers_end, self.shared.fd, stack, *requests])
        os.close(commands_end)
        os.close(answers_end)
        worker.commands, worker.answers, worker.stack, worker.text = commands, answers, stack, b""
        worker.pid, worker.ready, worker.error_report, worker.kill_reason = None, False, None, ""
        worker.beat_since = time.monotonic()
        self.shared.beats[worker.number, 1] = IDLE  # not what its predecessor was doing
        self._selector.register(answers, selectors.EVENT_READ, worker)
        self._starting.append(worker)

    def _handle_events(self) -> None:
        while (event := self._fork_server.poll_events()) is not None:
            if "started" in event:
                self._starting.popleft().pid = event["started"]
                continue
            if self._inference_server is not None and self._inference_server.pid == event["exited"]:
                raise _server_error(self._inference_server, event["status"])
            worker = next((each for each in self.workers if each.pid == event["exited"]), None)
            if worker is not None:
                self._replace(worker, event["status"])

    def _replace(self, worker: _WorkerProcess, status: int) -> None:
        while worker.answers >= 0 and _readable(worker):  # slots that it filled before it died are valid
            self._late_answers += self._recv(worker)
        if worker.error_report is not None and worker.error_report["lost"]:  # it lost the inference server
            self._release(worker)
            worker.ready = False
            return
        cause = _cause(worker, status)
        self._release(worker)
        worker.failures += 1
        self._restarts_left -= 1
        if worker.failures > MAX_FAILURES or self._restarts_left < 0:
            raise self._given_up(worker, cause)
        self.restarts += 1
        lost = self.shared.rows
        self.events.append(
            f"worker {worker.number} {cause}; a new one replaces it, and {lost} running episodes were cut"
        )
        self._start(worker)

    def _release(self, worker: _WorkerProcess) -> None:
        if worker.answers >= 0:
            self._selector.unregister(worker.answers)
        worker.release()

    def _given_up(self, worker: _WorkerProcess, cause: str) -> TiltyardError:
        report = worker.error_report
        if self._restarts_left < 0:
            message = f"worker {worker.number} {cause}, and engine.restarts is exhausted"
            hint = "continue with `tiltyard fork` and a higher engine.restarts"
        elif report is not None:
            message, hint = report["error"], report["hint"]
        else:
            message = f"worker {worker.number} {cause}, {MAX_FAILURES} times in a row without a filled rollout"
            hint = "debug the env in this process: engine.kind=serial with --pdb"
        before = "".join(f"before: {event}\n" for event in self.events)  # no later report would show these
        return EnvError(message, hint, before + (report["details"] if report is not None else ""))

    # ------------------------------------------------------------------------------------------ hanging

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            count, phase = int(self.shared.beats[worker.number, 0]), int(self.shared.beats[worker.number, 1])
            if count != worker.beat or phase not in self._timeouts or worker.pid is None:
                worker.beat, worker.beat_since = count, now
            elif now - worker.beat_since > self._timeouts[phase] and not worker.kill_reason:
                _kill_hung(worker, "step" if phase == STEPPING else "reset", self._timeouts[phase])

    def close(self) -> None:
        """End all processes and close their files."""
        self._selector.close()
        self._let_workers_close()
        self._fork_server.close()
        if self._inference_server is not None:
            self._inference_server.requests.close()
            os.close(self._inference_server.report)
        for worker in self.workers:
            worker.release()

    def _let_workers_close(self) -> None:
        """Give workers a moment to close their envs, which may own files and processes."""
        waiting = set()
        for worker in self.workers:
            if worker.ready and worker.answers >= 0:
                waiting.add(worker.pid)
                os.close(worker.commands)
                worker.commands = -1
        until = time.monotonic() + CLOSE_SECONDS
        while waiting and select.select([self._fork_server], [], [], max(0.0, until - time.monotonic()))[0]:
            try:
                event = self._fork_server.poll_events() or {}
            except TiltyardError:  # it is gone, and so are its workers
                return
            waiting.discard(event.get("exited"))


def _write(worker: _WorkerProcess, command: dict[str, Any]) -> None:
    worker.beat_since = time.monotonic()  # an idle worker's heartbeat stands still
    with contextlib.suppress(BrokenPipeError):  # it just died; its replacement gets the command
        os.write(worker.commands, json.dumps(command).encode() + b"\n")


def _readable(worker: _WorkerProcess) -> bool:
    selector = selectors.DefaultSelector()
    selector.register(worker.answers, selectors.EVENT_READ)
    return bool(selector.select(0))


def _cause(worker: _WorkerProcess, status: int) -> str:
    """Why a worker ended; raises DivergedError, which no replacement could prevent."""
    report = worker.error_report
    if report is not None:
        if report["diverged"]:
            batch = read_tree(Path(report["diverged"]), "batch")
            shutil.rmtree(report["diverged"])
            raise DivergedError(report["error"], report["hint"], batch)
        return f"failed: {report['error']}"
    return worker.kill_reason or _exit_text(status)


def _exit_text(status: int) -> str:
    return killed_by(-status, explained=True) if status < 0 else f"exited with code {status}"


def _server_error(server: _InferenceServer, status: int) -> TiltyardError:
    """Why the inference server ended: the error that it reported, or how it exited."""
    text = os.pread(server.report, os.fstat(server.report).st_size, 0).rstrip(b"\0")
    if text:
        report = json.loads(text)
        return TiltyardError(report["error"], report["hint"] or HINT, report["details"])
    return TiltyardError(f"the inference server (process {server.pid}) {_exit_text(status)}", HINT)


def _kill_hung(worker: _WorkerProcess, call: str, seconds: float) -> None:
    assert worker.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGUSR1)
        frame = hang_location(worker.pid, worker.stack)
        where = f" (it was in {frame})" if frame else ""
        worker.kill_reason = f"did not return from {call}() within {seconds:g} s (env.{call}_timeout){where}"
        os.kill(worker.pid, signal.SIGKILL)
