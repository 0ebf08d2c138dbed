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
from tiltyard.envs.vector import IDLE, RESETTING, STEPPING
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
class _Member:
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
    verdict: str = ""
    """why we killed it, if we did"""


class WorkerPool:
    """Workers 0 .. count - 1. `task` is what every worker is told, its number apart."""

    def __init__(
        self,
        count: int,
        task: dict[str, Any],
        slab: SharedMemory,
        *,
        step_timeout: float,
        reset_timeout: float,
        restarts: int,
    ) -> None:
        self.slab, self._task = slab, task
        self._timeouts = {STEPPING: step_timeout, RESETTING: reset_timeout}
        self._restarts_left = restarts
        self.events: list[str] = []
        self.restarts = 0
        self.episodes_begun = [0] * count
        self._fork_server = fork_server.standby.take(PRELOAD)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fork_server, selectors.EVENT_READ, None)
        self.members = [_Member(number) for number in range(count)]
        self._unborn: deque[_Member | _Actor] = deque()
        self._attended = 0.0
        self._last_words: list[tuple[int, dict[str, Any]]] = []  # answers of workers that are gone
        self._actor = self._start_actor() if slab.batched else None
        for member in self.members:
            self._start(member)

    # ------------------------------------------------------------------------------------------ talking

    def ask(self, number: int, **word: Any) -> None:
        """Give a worker a command. One that dies before it answers is replaced, and the new one is asked again."""
        member = self.members[number]
        member.asked.append(word)
        if member.ready:
            self._send(member, word)

    def is_busy(self, number: int) -> bool:
        """Whether a worker has something left to answer."""
        return bool(self.members[number].asked)

    def answers(self, timeout: float | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """(worker, answer) as they come in: at least one, unless the timeout is over."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if until is None else min(POLL_SECONDS, max(0.0, until - time.monotonic()))
            began = time.monotonic()
            # The nursery last: a death that it tells gives the member another pipe than the one that was seen here.
            ready = sorted(self._selector.select(left), key=lambda each: each[0].data is None)
            if time.monotonic() - began > SUSPENDED:  # the whole job was, and nobody could have come back meanwhile
                for member in self.members:
                    member.beat_since = time.monotonic()
            found = [answer for key, _ in ready for answer in self._hear(key.data)]
            self._watch_beats()
            found += self._last_words
            self._last_words = []
            yield from found
            if found or (until is not None and time.monotonic() >= until):
                return

    def attend(self) -> None:
        """Replace who died, for a driver that is busy with something else. Cheap: it may be called very often."""
        now = time.monotonic()
        if now - self._attended > GLANCE:
            self._attended = now
            if select.select([self._fork_server], [], [], 0)[0]:
                self._news()

    def _hear(self, member: _Member | None) -> list[tuple[int, dict[str, Any]]]:
        if member is None:
            self._news()
            return []
        got = os.read(member.answers, 1 << 20)
        if not got:  # its death will be told; until then there is nothing more to read
            self._selector.unregister(member.answers)
            os.close(member.answers)
            member.answers = -1
            return []
        *lines, member.text = (member.text + got).split(b"\n")
        return [answer for line in lines for answer in self._take(member, json.loads(line))]

    def _take(self, member: _Member, word: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        if "ready" in word:
            member.ready = True
            for each in member.asked:
                self._send(member, each)
            return []
        if "error" in word:
            member.error_report = word
            return []
        member.asked.popleft()
        if "filled" in word:
            member.fruitless = 0
            self.episodes_begun[member.number] += len(word["episodes"])
        return [(member.number, word)]

    def _send(self, member: _Member, word: dict[str, Any]) -> None:
        member.beat_since = time.monotonic()  # nobody may have looked while there was nothing to do
        with contextlib.suppress(BrokenPipeError):  # it died a moment ago, and its successor will be asked
            os.write(member.commands, json.dumps(word).encode() + b"\n")

    # ------------------------------------------------------------------------------------------ births and deaths

    def _start_actor(self) -> _Actor:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = make_memory(1)  # grows with what is written; a pipe that nobody reads would hold up a long text
        task = {**self._task, "run": INFERENCE_SERVER, "name": "tiltyard-a0", "number": 0}
        self._fork_server.fork(task, [self.slab.fd, theirs.fileno(), words])
        theirs.close()
        actor = _Actor(ours, words)
        self._unborn.append(actor)
        return actor

    def _start(self, member: _Member) -> None:
        heard, commands = os.pipe2(os.O_CLOEXEC)
        answers, told = os.pipe2(os.O_CLOEXEC)
        stack = make_memory(STACK_BYTES)
        begun = self.episodes_begun[member.number]
        task = {
            **self._task,
            "run": WORKER,
            "name": f"tiltyard-w{member.number}",
            "number": member.number,
            "skip_episodes": 0 if self.restarts == 0 else begun + self.restarts,
        }
        door = [] if self._actor is None else [self._actor.door.fileno()]
        self._fork_server.fork(task, [heard, told, self.slab.fd, stack, *door])
        os.close(heard)
        os.close(told)
        member.commands, member.answers, member.stack, member.text = commands, answers, stack, b""
        member.pid, member.ready, member.error_report, member.verdict = None, False, None, ""
        member.beat_since = time.monotonic()
        self.slab.beats[member.number, 1] = IDLE  # whatever the one before was doing
        self._selector.register(answers, selectors.EVENT_READ, member)
        self._unborn.append(member)

    def _news(self) -> None:
        while (word := self._fork_server.poll_events()) is not None:
            if "started" in word:
                self._unborn.popleft().pid = word["started"]
                continue
            if self._actor is not None and self._actor.pid == word["exited"]:
                raise self._end_of(self._actor, word["status"])
            member = next((each for each in self.members if each.pid == word["exited"]), None)
            if member is not None:
                self._replace(member, word["status"])

    def _replace(self, member: _Member, status: int) -> None:
        while member.answers >= 0 and self._readable(member):  # slots that it filled before it died are good
            self._last_words += self._hear(member)
        if member.error_report is not None and member.error_report["lost"]:  # the actor's end will be told, too
            self._forget(member)
            member.ready = False
            return
        cause = self._cause(member, status)
        self._forget(member)
        member.fruitless += 1
        self._restarts_left -= 1
        if member.fruitless > FRUITLESS or self._restarts_left < 0:
            raise self._given_up(member, cause)
        self.restarts += 1
        lost = self.slab.rows
        self.events.append(f"worker {member.number} {cause}; it is replaced, and {lost} running episodes were cut")
        self._start(member)

    def _readable(self, member: _Member) -> bool:
        selector = selectors.DefaultSelector()
        selector.register(member.answers, selectors.EVENT_READ)
        return bool(selector.select(0))

    def _cause(self, member: _Member, status: int) -> str:
        told = member.error_report
        if told is not None:
            if told["diverged"]:
                batch = read_tree(Path(told["diverged"]), "batch")
                shutil.rmtree(told["diverged"])
                raise DivergedError(told["error"], told["hint"], batch)
            return f"failed: {told['error']}"
        if member.verdict:
            return member.verdict
        if status < 0:
            return killed_by(-status, explained=True)
        return f"ended by itself with exit code {status}"

    def _end_of(self, actor: _Actor, status: int) -> TiltyardError:
        """Why there is no actor any more: what it says, or how it ended."""
        text = os.pread(actor.words, os.fstat(actor.words).st_size, 0).rstrip(b"\0")
        if text:
            told = json.loads(text)
            return TiltyardError(told["error"], told["hint"] or HINT, told["details"])
        how = killed_by(-status, explained=True) if status < 0 else f"ended by itself with exit code {status}"
        return TiltyardError(f"the actor (process {actor.pid}) {how}", HINT)

    def _given_up(self, member: _Member, cause: str) -> TiltyardError:
        told = member.error_report
        if self._restarts_left < 0:
            message = f"worker {member.number} {cause}, and engine.restarts is used up"
            hint = "`tiltyard fork` with a higher engine.restarts continues"
        elif told is not None:
            message, hint = told["error"], told["hint"]
        else:
            message = f"worker {member.number} {cause}, {FRUITLESS} times in a row before it had filled a rollout"
            hint = "engine.kind=serial runs the env in this process, where --pdb can look at it"
        before = "".join(f"before: {sentence}\n" for sentence in self.events)  # no report will tell these
        return EnvError(message, hint, before + (told["details"] if told is not None else ""))

    def _forget(self, member: _Member) -> None:
        if member.answers >= 0:
            self._selector.unregister(member.answers)
            os.close(member.answers)
        os.close(member.commands)
        os.close(member.stack)
        member.answers = member.commands = member.stack = -1

    # ------------------------------------------------------------------------------------------ hanging

    def _watch_beats(self) -> None:
        now = time.monotonic()
        for member in self.members:
            count, phase = int(self.slab.beats[member.number, 0]), int(self.slab.beats[member.number, 1])
            if count != member.beat or phase not in self._timeouts or member.pid is None:
                member.beat, member.beat_since = count, now
            elif now - member.beat_since > self._timeouts[phase] and not member.verdict:
                self._end_hung(member, "step" if phase == STEPPING else "reset", self._timeouts[phase])

    def _end_hung(self, member: _Member, doing: str, seconds: float) -> None:
        assert member.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGUSR1)
            stack = self._stack_of(member)
            where = f" (it was in {stack})" if stack else ""
            member.verdict = f"did not come back from {doing}() within {seconds:g} s (env.{doing}_timeout){where}"
            os.kill(member.pid, signal.SIGKILL)

    @staticmethod
    def _stack_of(member: _Member) -> str:
        """The innermost frame that the hung worker wrote down, or one of its envs in a process of its own."""
        assert member.pid is not None
        if found := _innermost(member.stack):
            return found
        for stack in _stacks_below(member.pid):
            found = found or _innermost(stack)
            os.close(stack)
        return found

    def close(self) -> None:
        """End every process and give back what was taken."""
        self._selector.close()
        self._say_goodbye()
        self._fork_server.close()
        if self._actor is not None:
            self._actor.door.close()
            os.close(self._actor.words)
        for member in self.members:
            for fd in (member.commands, member.answers, member.stack):
                if fd >= 0:
                    os.close(fd)

    def _say_goodbye(self) -> None:
        """Give workers a moment to close their envs, which may have files and processes of their own."""
        waiting = set()
        for member in self.members:
            if member.ready and member.answers >= 0:
                waiting.add(member.pid)
                os.close(member.commands)
                member.commands = -1
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
