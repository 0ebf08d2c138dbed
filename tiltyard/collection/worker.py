"""One process that collects: claim an episode, play it, commit it, until all of the dataset are there.

    claim a number ──> play in one copy of the env ──> queue of 2 ──> thread: encode, write, list, release the claim

Many workers of many commands and machines share a folder without knowing of each other. When every missing episode is
claimed, a worker waits: they are committed, or a process dies and the kernel frees its claims.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tiltyard.collection.actors import Mixture
from tiltyard.collection.committed import Committed
from tiltyard.collection.policies import PolicyChoice
from tiltyard.config.sections import Env
from tiltyard.data import seeds
from tiltyard.data.claims import Claims
from tiltyard.data.dataset_file import About
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.vector import EnvGroup
from tiltyard.envs.watchdog import Watchdog
from tiltyard.errors import EXIT_FAILED, EnvError, TiltyardError
from tiltyard.evaluation.recording import EpisodeRecorder, with_own_names
from tiltyard.evaluation.rollouts import EpisodeSet, players
from tiltyard.failures import PASSING
from tiltyard.processes.channel import Channel, error_message
from tiltyard.types import EnvSpec, Episode

QUEUE = 2  # episodes that wait for the disk
WINDOW = 256  # missing episodes among which a worker picks the first one it tries; fewer collisions than in order
PAUSES = (0.02, 1.0)  # seconds between two looks at the claims of others: the first pause, and the longest
Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What all workers of a command do."""

    env: Env
    base: list[Path]
    spec: EnvSpec
    previous: bool
    policies: list[PolicyChoice]
    total: int
    save_info: bool
    trust_code: bool

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Task:
        return Task(
            env=Env.model_validate(values["env"]),
            base=[Path(place) for place in values["base"]],
            spec=spec_from_json(values["spec"]),
            previous=values["previous"],
            policies=[PolicyChoice(**each) for each in values["policies"]],
            total=values["total"],
            save_info=values["save_info"],
            trust_code=values["trust_code"],
        )


def work(values: Message, channel: Channel, fds: list[int]) -> None:
    """In a forked process: load the policies, wait for the dataset, collect, and report."""
    try:
        task = Task.from_json(values)
        policy = Mixture(task.policies, task.spec, task.trust_code)
        channel.send({"ready": True})
        given = channel.recv()
        about = About(given["env"], spec_from_json(given["spec"]), given["digest"], given["seed"])
        threading.Thread(target=_exit_with, args=(channel,), daemon=True).start()
        stuck: Callable[[str], None] = lambda reason: _stuck(channel, reason)  # noqa: E731
        with Watchdog(task.env.step_timeout, task.env.reset_timeout, stuck):
            collect(task, policy, Path(given["folder"]), about, channel.send)
        channel.send({"done": True})
    except EOFError:  # the driver is gone
        sys.exit(EXIT_FAILED)
    except TiltyardError as error:
        channel.send(_failure(error))


def _exit_with(channel: Channel) -> None:
    """End this process when the driver is gone; only then there is something to read."""
    with contextlib.suppress(EOFError, OSError):
        channel.recv()
    os._exit(EXIT_FAILED)


def _failure(error: TiltyardError) -> Message:
    """An error for the driver: whether another worker may try again, and whether the user may, later."""
    return {**error_message(error), "again": isinstance(error, EnvError), "later": may_pass(error)}


def may_pass(error: TiltyardError) -> bool:
    """Whether the disk is at fault, in a way that may pass."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in PASSING and not isinstance(error, EnvError)


def _stuck(channel: Channel, reason: str) -> None:
    with contextlib.suppress(OSError):
        channel.send(_failure(EnvError(reason, "raise env.step_timeout or env.reset_timeout if the env is that slow")))
    os._exit(EXIT_FAILED)


# ---------------------------------------------------------------------------------------------- one worker


def collect(task: Task, policy: Mixture, folder: Path, about: About, notify: Callable[[Message], object]) -> None:
    """Collect in this process until the dataset has all episodes; `notify` gets a message for each committed one."""
    assert about.seed is not None
    writer = DatasetWriter(folder, about, {}, save_info=task.save_info)
    committed = Committed(folder, task.total)

    def recorder(group: EnvGroup) -> EpisodeRecorder:
        return EpisodeRecorder(group, source.keep, policy.describe, save_info=task.save_info)

    with Claims(folder) as claims, Committer(writer, claims, committed, notify) as committer:
        source = ClaimedEpisodes(about.seed, task.total, claims, committed, committer)
        if not source.wait():
            return
        wanted = EpisodeSet(task.env, task.spec, task.base, task.previous, range(task.total), 1, about.seed)
        with _private_generators(), players(policy.begin, wanted, source, recorder=recorder) as player:
            while True:
                player.play(cancelled=committer.check)
                if not source.wait():
                    break


class ClaimedEpisodes:
    """Hands out episodes of the dataset that no process has claimed or committed."""

    def __init__(self, seed: int, total: int, claims: Claims, committed: Committed, committer: Committer) -> None:
        self._seed, self._total, self._claims, self._committed = seed, total, claims, committed
        self._committer = committer
        self._rng = np.random.default_rng()
        self._reserved: int | None = None

    def wait(self) -> bool:
        """Wait until there is an episode to play, and claim it; False if all are committed."""
        pause, longest = PAUSES
        while True:
            self._committer.flush()
            self._reserved = self._take()
            if self._reserved is not None:
                return True
            if self._committed.count == self._total:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def next(self, copy: int) -> tuple[int, int] | None:
        number, self._reserved = self._take() if self._reserved is None else self._reserved, None
        if number is None:
            return None
        seed = seeds.episode_seed(self._seed, number)
        _seed_generators(seed)
        return number, seed

    def keep(self, number: int, episodes: list[Episode]) -> None:
        """Commit the episodes of all agents of the env."""
        self._committer.put(number, with_own_names(episodes))

    def _take(self) -> int | None:
        """Claim a missing episode; None if others have claimed all of them."""
        found = self._try_to_take()
        if found is None:  # what was missing at the last poll is claimed or committed now
            self._committed.refresh()
            found = self._try_to_take()
        return found

    def _try_to_take(self) -> int | None:
        """A claim is taken first and the manifests are read after it: what was committed before is seen then."""
        missing = self._committed.missing()
        window = list(itertools.islice(missing, WINDOW))
        start = int(self._rng.integers(len(window))) if window else 0
        for number in itertools.chain(window[start:], window[:start], missing):
            if number in self._committed or self._committer.holds(number) or not self._claims.take(number):
                continue
            self._committed.refresh()
            if number in self._committed:
                self._claims.release(number)
            elif self._committer.has_file(number):  # its writer was killed before it listed the file
                self._committer.put(number, None)
            else:
                self._committer.hold(number)
                return number
        return None


class Committer:
    """A thread that encodes and writes episodes; compression, checksums and disk leave the interpreter to the env.

    Its first error is raised by the next call of any method.
    """

    def __init__(
        self, writer: DatasetWriter, claims: Claims, committed: Committed, notify: Callable[[Message], object]
    ) -> None:
        self._writer, self._claims, self._committed, self._notify = writer, claims, committed, notify
        self._queue: queue.Queue[tuple[int, list[Episode] | None] | None] = queue.Queue(QUEUE)
        self._held: set[int] = set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)

    def __enter__(self) -> Committer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Finish what was put, unless an error is raised already."""
        if error is not None and self._error is None:
            self._error = error  # the thread drops what is left
        self._queue.put(None)
        self._thread.join()
        if error is None:
            self.check()

    def check(self) -> bool:
        """Raise the thread's error, if there is one; else False, as a rollout that continues needs it."""
        if self._error is not None:
            raise self._error
        return False

    def hold(self, number: int) -> None:
        """Remember that this process has claimed an episode: its own claims do not exclude it."""
        self._held.add(number)

    def holds(self, number: int) -> bool:
        return number in self._held

    def has_file(self, number: int) -> bool:
        """Whether there is a file of the episode alone; those in shards are always listed."""
        return self._writer.has_file(number)

    def put(self, number: int, episodes: list[Episode] | None) -> None:
        """Commit an episode, or list its file if there are none; waits while the queue is full."""
        self._held.add(number)
        while True:
            self.check()
            with contextlib.suppress(queue.Full):
                self._queue.put((number, episodes), timeout=0.2)
                return

    def flush(self) -> None:
        """Wait until all that was put is committed."""
        while self._queue.unfinished_tasks and self._error is None:
            time.sleep(0.001)
        self.check()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._commit(*item)
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                self._error = error
            finally:
                self._queue.task_done()
        with contextlib.suppress(TiltyardError, OSError):  # an open manifest is only slower to read
            self._writer.close()

    def _commit(self, number: int, episodes: list[Episode] | None) -> None:
        fresh = episodes is not None and self._writer.commit(number, episodes)
        if not fresh:
            self._writer.list_existing(number)
        self._committed.add(number)
        self._held.discard(number)
        self._claims.release(number)
        steps = sum(len(each.action) for each in episodes or ())
        self._notify({"committed": number, "steps": steps})


# ---------------------------------------------------------------------------------------------- global generators


def _seed_generators(seed: int) -> None:
    """Seed the global generators for an episode: only the user's code uses them, and forks would share their state."""
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats stack traces for other devices


@contextlib.contextmanager
def _private_generators() -> Iterator[None]:
    """Restore the global generators afterwards: this may be the user's own process."""
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch is not None:
            torch.set_rng_state(before[2])
