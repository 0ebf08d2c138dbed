"""The driver's side of the workers: sends commands, receives answers, replaces workers that die or hang.

A replacement gets the commands that its predecessor had not answered, so that every command is answered; episodes that
were running in the dead worker are lost, and an event says so. Only heartbeats are polled: the fork server reports
exits, and answers come through channels. The inference server is not replaced: its end is raised here with its cause.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from tiltyard.engines.local import INFERENCE_SERVER, PRELOAD, WORKER
from tiltyard.engines.local.hang_location import STACK_BYTES, hang_location
from tiltyard.engines.local.inference import InferenceServerGone
from tiltyard.engines.local.shared_memory import SharedMemory, make_memory
from tiltyard.engines.topology import require_worker_files
from tiltyard.envs.watchdog import IDLE, RESETTING, STEPPING
from tiltyard.errors import DivergedError, EnvError, TiltyardError
from tiltyard.processes.channel import error_from
from tiltyard.processes.fork_server import Forked, ForkServer

POLL_SECONDS = 0.5  # between two checks of the heartbeats
EXIT_POLL_SECONDS = 0.05  # between two checks for exits while the driver learns
SUSPENDED_SECONDS = 10 * POLL_SECONDS  # a select that takes longer means that the whole job was suspended
MAX_FAILURES = 5  # of one worker in a row, without a filled slot
CLOSE_SECONDS = 3.0  # that workers have to finish their rollout and close their envs
HINT = "`tiltyard resume` continues; `tiltyard fork` with engine.inference=worker runs without an inference server"


@dataclass
class _WorkerProcess:
    """One worker: its process, the file for its stack, and the commands that it has not answered yet."""

    number: int
    process: Forked | None = None
    is_open: bool = False
    """whether it may still send something"""
    stack: int = -1
    pending: deque[dict[str, Any]] = field(default_factory=deque)
    error_report: dict[str, Any] | None = None
    ready: bool = False
    failures: int = 0
    beat: int = -1
    beat_since: float = field(default_factory=time.monotonic)
    kill_reason: str = ""  # set when it is killed for hanging

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def release(self) -> None:
        """Close its channel and file."""
        if self.process is not None:
            self.process.channel.close()
            os.close(self.stack)
        self.process, self.is_open = None, False


class WorkerPool:
    """Workers 0 .. count - 1, forked by a copy of `server`, or by one of their own. All of them are given `task`."""

    def __init__(
        self,
        count: int,
        task: dict[str, Any],
        shared: SharedMemory,
        *,
        step_timeout: float,
        reset_timeout: float,
        restarts: int,
        server: ForkServer | None,
    ) -> None:
        require_worker_files(count)
        self.shared, self.task = shared, task
        self._timeouts = {STEPPING: step_timeout, RESETTING: reset_timeout}
        self._restarts_left = restarts
        self.events: list[str] = []
        self.restarts = 0
        self.episodes_begun = [0] * count
        self._fork_server = ForkServer(PRELOAD) if server is None else server.copy()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fork_server, selectors.EVENT_READ, None)
        self.workers = [_WorkerProcess(number) for number in range(count)]
        self._checked = 0.0
        self._late_answers: list[tuple[int, dict[str, Any]]] = []  # of workers that are gone
        self._inference_server: Forked | None = None
        self._requests: list[socket.socket] = []  # to the inference server
        if shared.batched:
            self._start_inference_server()
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
            if wait([self._fork_server.fileno()], 0):
                self._handle_events()

    def _recv(self, worker: _WorkerProcess | Forked | None) -> list[tuple[int, dict[str, Any]]]:
        if worker is None:
            self._handle_events()
            return []
        if isinstance(worker, Forked):
            raise self._server_error(worker)
        assert worker.process is not None
        channel, found = worker.process.channel, []
        try:
            while channel.is_ready():
                found += self._handle(worker, channel.recv())
        except EOFError:  # the fork server will report its exit
            self._selector.unregister(channel)
            worker.is_open = False
        return found

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

    def _start_inference_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [self.shared.fd, theirs.fileno()]
        self._inference_server = self._fork_server.fork(INFERENCE_SERVER, self.task, fds, name="tiltyard-a0")
        theirs.close()
        self._requests.append(ours)
        self._selector.register(self._inference_server.channel, selectors.EVENT_READ, self._inference_server)

    def _start(self, worker: _WorkerProcess) -> None:
        skip = 0 if self.restarts == 0 else self.episodes_begun[worker.number] + self.restarts
        task = {**self.task, "number": worker.number, "skip_episodes": skip}
        worker.stack, worker.is_open = make_memory(STACK_BYTES), True
        fds = [self.shared.fd, worker.stack, *(each.fileno() for each in self._requests)]
        worker.process = self._fork_server.fork(WORKER, task, fds, name=f"tiltyard-w{worker.number}")
        worker.ready, worker.error_report, worker.kill_reason = False, None, ""
        worker.beat_since = time.monotonic()
        self.shared.beats[worker.number, 1] = IDLE  # not what its predecessor was doing
        self._selector.register(worker.process.channel, selectors.EVENT_READ, worker)

    def _handle_events(self) -> None:
        for exited in self._fork_server.exits():
            if exited is self._inference_server:
                raise self._server_error(exited)
            worker = next((each for each in self.workers if each.process is exited), None)
            if worker is not None:
                self._replace(worker, exited)

    def _replace(self, worker: _WorkerProcess, exited: Forked) -> None:
        if worker.is_open:  # slots that it filled before it died are valid
            self._late_answers += self._recv(worker)
        if worker.is_open:
            self._selector.unregister(exited.channel)
        worker.release()
        if worker.error_report is not None and worker.error_report["kind"] == InferenceServerGone.__name__:
            worker.ready = False  # the end of that server will be reported
            return
        cause = _cause(worker, exited)
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

    def _server_error(self, server: Forked) -> TiltyardError:
        """Why the inference server ended: the error that it sends, or how it exited."""
        with contextlib.suppress(EOFError):
            error = error_from(server.channel.recv())
            error.hint = error.hint or HINT
            return error
        while server.status is None:
            self._fork_server.exits(POLL_SECONDS)
        return TiltyardError(f"the inference server (process {server.pid}) {server.how()}", HINT)

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
            self._inference_server.channel.close()
        for requests in self._requests:
            requests.close()
        for worker in self.workers:
            worker.release()

    def _let_workers_close(self) -> None:
        """Give workers a moment to close their envs, which may own files and processes."""
        closing = [worker.process for worker in self.workers if worker.process and worker.ready and worker.is_open]
        with contextlib.suppress(OSError, TiltyardError):  # a worker has just died; the fork server is gone
            for process in closing:
                process.channel.finish()
            until = time.monotonic() + CLOSE_SECONDS
            while any(each.status is None for each in closing) and (left := until - time.monotonic()) > 0:
                self._fork_server.exits(left)


def _write(worker: _WorkerProcess, command: dict[str, Any]) -> None:
    worker.beat_since = time.monotonic()  # an idle worker's heartbeat stands still
    if worker.process is not None:  # else it has just died; its replacement gets the command
        worker.process.send(command)


def _cause(worker: _WorkerProcess, exited: Forked) -> str:
    """Why a worker ended; raises DivergedError, which no replacement could prevent."""
    if worker.error_report is None:
        return worker.kill_reason or exited.how()
    error = error_from(worker.error_report)
    if isinstance(error, DivergedError):
        raise error
    return f"failed: {error.message}"


def _kill_hung(worker: _WorkerProcess, call: str, seconds: float) -> None:
    assert worker.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGUSR1)
        frame = hang_location(worker.pid, worker.stack)
        where = f" (it was in {frame})" if frame else ""
        worker.kill_reason = f"did not return from {call}() within {seconds:g} s (env.{call}_timeout){where}"
        os.kill(worker.pid, signal.SIGKILL)
