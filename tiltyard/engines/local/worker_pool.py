"""The driver's side of the workers: commands out, answers in, and a replacement for every worker that dies or hangs.

A worker has at most a few commands outstanding. When it is replaced, the new one is given the same commands again, so
whoever waits for an answer gets one; episodes that were running in the dead worker are lost, and that is said. Nothing
is polled but heartbeats: a death is a message of the nursery, an answer is a line in a pipe. An actor that decides for
all of them is not replaced: its end is raised here with its cause, and workers that only lost it are no cause.
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
from tiltyard.engines.local.shared_memory import SharedMemory, make_memory
from tiltyard.envs.isolation.server import STACK
from tiltyard.envs.watchdog import IDLE, RESETTING, STEPPING
from tiltyard.errors import DivergedError, EnvError, TiltyardError
from tiltyard.processes import fork_server
from tiltyard.processes.child import killed_by
from tiltyard.processes.proc import tree
from tiltyard.run.checkpoint import read_tree

POLL_SECONDS = 0.5  # seconds between two looks at the heartbeats
GLANCE = 0.05  # seconds between two looks for deaths while the driver learns
SUSPENDED = 10 * POLL_SECONDS  # seconds that a look takes when not we alone were held up
FRUITLESS = 5  # replacements in a row without a filled slot: then it is not bad luck
STACK_BYTES = 1 << 16
WAITING = (
    "tiltyard/envs/isolation/pool.py",
    "tiltyard/envs/isolation/wire.py",
)  # for an env in a thread or process of its own
CLOSING = 3.0  # seconds that workers have to finish their rollout and close their envs
STACK_SECONDS = 2.0  # that a worker that hangs has to say where


HINT = "`tiltyard resume` continues; `tiltyard fork` with engine.inference=worker continues without it"


@dataclass
class _Actor:
    """The process that decides for all workers: where workers ask it, and where it says why it ends."""

    door: socket.socket
    words: int
    pid: int | None = None


@dataclass
class _WorkerProcess:
    """One worker: its process, its pipes, what it was asked and has not answered yet."""

    number: int
    pid: int | None = None
    commands: int = -1
    answers: int = -1
    stack: int = -1
    text: bytes = b""
    asked: deque[dict[str, Any]] = field(default_factory=deque)
    error_report: dict[str, Any] | None = None
    ready: bool = False
    fruitless: int = 0
    beat: int = -1
    beat_since: float = field(default_factory=time.monotonic)
    kill_reason: str = ""
    """why we killed it, if we did"""


class WorkerPool:
    """Workers 0 .. count - 1. `task` is what every worker is told, its number apart."""

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
        self._unborn: deque[_WorkerProcess | _Actor] = deque()
        self._attended = 0.0
        self._last_words: list[tuple[int, dict[str, Any]]] = []  # answers of workers that are gone
        self._inference_server = self._start_actor() if shared.batched else None
        for worker in self.workers:
            self._start(worker)

    # ------------------------------------------------------------------------------------------ talking

    def ask(self, number: int, **word: Any) -> None:
        """Give a worker a command. One that dies before it answers is replaced, and the new one is asked again."""
        worker = self.workers[number]
        worker.asked.append(word)
        if worker.ready:
            self._send(worker, word)

    def is_busy(self, number: int) -> bool:
        """Whether a worker has something left to answer."""
        return bool(self.workers[number].asked)

    def answers(self, timeout: float | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """(worker, answer) as they come in: at least one, unless the timeout is over."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if until is None else min(POLL_SECONDS, max(0.0, until - time.monotonic()))
            began = time.monotonic()
            # The nursery last: a death that it tells gives the member another pipe than the one that was seen here.
            ready = sorted(self._selector.select(left), key=lambda each: each[0].data is None)
            if time.monotonic() - began > SUSPENDED:  # the whole job was, and nobody could have come back meanwhile
                for worker in self.workers:
                    worker.beat_since = time.monotonic()
            found = [answer for key, _ in ready for answer in self._hear(key.data)]
            self._check_heartbeats()
            found += self._last_words
            self._last_words = []
            yield from found
            if found or (until is not None and time.monotonic() >= until):
                return

    def check_processes(self) -> None:
        """Replace who died, for a driver that is busy with something else. Cheap: it may be called very often."""
        now = time.monotonic()
        if now - self._attended > GLANCE:
            self._attended = now
            if select.select([self._fork_server], [], [], 0)[0]:
                self._handle_events()

    def _hear(self, worker: _WorkerProcess | None) -> list[tuple[int, dict[str, Any]]]:
        if worker is None:
            self._handle_events()
            return []
        got = os.read(worker.answers, 1 << 20)
        if not got:  # its death will be told; until then there is nothing more to read
            self._selector.unregister(worker.answers)
            os.close(worker.answers)
            worker.answers = -1
            return []
        *lines, worker.text = (worker.text + got).split(b"\n")
        return [answer for line in lines for answer in self._take(worker, json.loads(line))]

    def _take(self, worker: _WorkerProcess, word: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        if "ready" in word:
            worker.ready = True
            for each in worker.asked:
                self._send(worker, each)
            return []
        if "error" in word:
            worker.error_report = word
            return []
        worker.asked.popleft()
        if "filled" in word:
            worker.fruitless = 0
            self.episodes_begun[worker.number] += len(word["episodes"])
        return [(worker.number, word)]

    def _send(self, worker: _WorkerProcess, word: dict[str, Any]) -> None:
        worker.beat_since = time.monotonic()  # nobody may have looked while there was nothing to do
        with contextlib.suppress(BrokenPipeError):  # it died a moment ago, and its successor will be asked
            os.write(worker.commands, json.dumps(word).encode() + b"\n")

    # ------------------------------------------------------------------------------------------ births and deaths

    def _start_actor(self) -> _Actor:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = make_memory(1)  # grows with what is written; a pipe that nobody reads would hold up a long text
        task = {**self._task, "run": INFERENCE_SERVER, "name": "tiltyard-a0", "number": 0}
        self._fork_server.fork(task, [self.shared.fd, theirs.fileno(), words])
        theirs.close()
        actor = _Actor(ours, words)
        self._unborn.append(actor)
        return actor

    def _start(self, worker: _WorkerProcess) -> None:
        heard, commands = os.pipe2(os.O_CLOEXEC)
        answers, told = os.pipe2(os.O_CLOEXEC)
        stack = make_memory(STACK_BYTES)
        begun = self.episodes_begun[worker.number]
        task = {
            **self._task,
            "run": WORKER,
            "name": f"tiltyard-w{worker.number}",
            "number": worker.number,
            "skip_episodes": 0 if self.restarts == 0 else begun + self.restarts,
        }
        door = [] if self._inference_server is None else [self._inference_server.door.fileno()]
        self._fork_server.fork(task, [heard, told, self.shared.fd, stack, *door])
        os.close(heard)
        os.close(told)
        worker.commands, worker.answers, worker.stack, worker.text = commands, answers, stack, b""
        worker.pid, worker.ready, worker.error_report, worker.kill_reason = None, False, None, ""
        worker.beat_since = time.monotonic()
        self.shared.beats[worker.number, 1] = IDLE  # whatever the one before was doing
        self._selector.register(answers, selectors.EVENT_READ, worker)
        self._unborn.append(worker)

    def _handle_events(self) -> None:
        while (word := self._fork_server.poll_events()) is not None:
            if "started" in word:
                self._unborn.popleft().pid = word["started"]
                continue
            if self._inference_server is not None and self._inference_server.pid == word["exited"]:
                raise self._end_of(self._inference_server, word["status"])
            worker = next((each for each in self.workers if each.pid == word["exited"]), None)
            if worker is not None:
                self._replace(worker, word["status"])

    def _replace(self, worker: _WorkerProcess, status: int) -> None:
        while worker.answers >= 0 and self._readable(worker):  # slots that it filled before it died are good
            self._last_words += self._hear(worker)
        if worker.error_report is not None and worker.error_report["lost"]:  # the actor's end will be told, too
            self._forget(worker)
            worker.ready = False
            return
        cause = self._cause(worker, status)
        self._forget(worker)
        worker.fruitless += 1
        self._restarts_left -= 1
        if worker.fruitless > FRUITLESS or self._restarts_left < 0:
            raise self._given_up(worker, cause)
        self.restarts += 1
        lost = self.shared.rows
        self.events.append(f"worker {worker.number} {cause}; it is replaced, and {lost} running episodes were cut")
        self._start(worker)

    def _readable(self, worker: _WorkerProcess) -> bool:
        selector = selectors.DefaultSelector()
        selector.register(worker.answers, selectors.EVENT_READ)
        return bool(selector.select(0))

    def _cause(self, worker: _WorkerProcess, status: int) -> str:
        told = worker.error_report
        if told is not None:
            if told["diverged"]:
                batch = read_tree(Path(told["diverged"]), "batch")
                shutil.rmtree(told["diverged"])
                raise DivergedError(told["error"], told["hint"], batch)
            return f"failed: {told['error']}"
        if worker.kill_reason:
            return worker.kill_reason
        if status < 0:
            return killed_by(-status, explained=True)
        return f"exited with code {status}"

    def _end_of(self, actor: _Actor, status: int) -> TiltyardError:
        """Why there is no actor any more: what it says, or how it ended."""
        text = os.pread(actor.words, os.fstat(actor.words).st_size, 0).rstrip(b"\0")
        if text:
            told = json.loads(text)
            return TiltyardError(told["error"], told["hint"] or HINT, told["details"])
        how = killed_by(-status, explained=True) if status < 0 else f"exited with code {status}"
        return TiltyardError(f"the actor (process {actor.pid}) {how}", HINT)

    def _given_up(self, worker: _WorkerProcess, cause: str) -> TiltyardError:
        told = worker.error_report
        if self._restarts_left < 0:
            message = f"worker {worker.number} {cause}, and engine.restarts is used up"
            hint = "`tiltyard fork` with a higher engine.restarts continues"
        elif told is not None:
            message, hint = told["error"], told["hint"]
        else:
            message = f"worker {worker.number} {cause}, {FRUITLESS} times in a row before it had filled a rollout"
            hint = "engine.kind=serial runs the env in this process, where --pdb can look at it"
        before = "".join(f"before: {sentence}\n" for sentence in self.events)  # no report will tell these
        return EnvError(message, hint, before + (told["details"] if told is not None else ""))

    def _forget(self, worker: _WorkerProcess) -> None:
        if worker.answers >= 0:
            self._selector.unregister(worker.answers)
            os.close(worker.answers)
        os.close(worker.commands)
        os.close(worker.stack)
        worker.answers = worker.commands = worker.stack = -1

    # ------------------------------------------------------------------------------------------ hanging

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            count, phase = int(self.shared.beats[worker.number, 0]), int(self.shared.beats[worker.number, 1])
            if count != worker.beat or phase not in self._timeouts or worker.pid is None:
                worker.beat, worker.beat_since = count, now
            elif now - worker.beat_since > self._timeouts[phase] and not worker.kill_reason:
                self._end_hung(worker, "step" if phase == STEPPING else "reset", self._timeouts[phase])

    def _end_hung(self, worker: _WorkerProcess, doing: str, seconds: float) -> None:
        assert worker.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)
            stack = self._stack_of(worker)
            where = f" (it was in {stack})" if stack else ""
            worker.kill_reason = f"did not come back from {doing}() within {seconds:g} s (env.{doing}_timeout){where}"
            os.kill(worker.pid, signal.SIGKILL)

    @staticmethod
    def _stack_of(worker: _WorkerProcess) -> str:
        """The innermost frame that the hung worker wrote down, or one of its envs in a process of its own."""
        assert worker.pid is not None
        if found := _innermost(worker.stack):
            return found
        for stack in _stacks_below(worker.pid):
            found = found or _innermost(stack)
            os.close(stack)
        return found

    def close(self) -> None:
        """End every process and give back what was taken."""
        self._selector.close()
        self._say_goodbye()
        self._fork_server.close()
        if self._inference_server is not None:
            self._inference_server.door.close()
            os.close(self._inference_server.words)
        for worker in self.workers:
            for fd in (worker.commands, worker.answers, worker.stack):
                if fd >= 0:
                    os.close(fd)

    def _say_goodbye(self) -> None:
        """Give workers a moment to close their envs, which may have files and processes of their own."""
        waiting = set()
        for worker in self.workers:
            if worker.ready and worker.answers >= 0:
                waiting.add(worker.pid)
                os.close(worker.commands)
                worker.commands = -1
        until = time.monotonic() + CLOSING
        while waiting and select.select([self._fork_server], [], [], max(0.0, until - time.monotonic()))[0]:
            try:
                word = self._fork_server.poll_events() or {}
            except TiltyardError:  # gone, and its workers with it
                return
            waiting.discard(word.get("exited"))


def _stacks_below(pid: int) -> list[int]:
    """Where the processes with an env below a worker say where they are, which they are asked for."""
    found = []
    for process in tree(pid):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                if STACK in link.readlink().name:
                    found.append(os.open(link, os.O_RDONLY))
                    os.kill(process.pid, signal.SIGUSR1)
    return found


def _innermost(stack: int) -> str:
    """The innermost frame of a thread that does not wait for another, as soon as it is written."""
    until, before = time.monotonic() + STACK_SECONDS, ""
    while time.monotonic() < until:
        text = os.pread(stack, STACK_BYTES, 0).decode(errors="replace")
        for thread in text.split("(most recent call first):\n")[1:]:
            innermost = thread.partition("\n")[0].strip()
            if innermost.startswith("File ") and not any(place in innermost for place in WAITING):
                return innermost.removeprefix("File ")
        if before.rstrip("\0") and text == before:  # all of it, and every thread waits
            break
        before = text
        time.sleep(0.02)
    return ""
