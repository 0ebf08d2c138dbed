"""Find the fastest processes and sizes for an experiment on this machine, by training with the real engine.

    sampling is slow:  processes  ->  envs and rollout  ->  minibatch  ->  best against the experiment's own settings
    learning is slow:  envs and rollout  ->  minibatch  ->  processes  ->  best against the experiment's own settings

Each stage is a race by successive halving: all candidates run a round, the faster half runs one twice as long, and so
on. Rounds are interleaved, so that a busy moment of the machine hits all; the speed is the median of the last rounds.
A winner must be faster by a margin. Engine starts (32 ALE envs: 9 s) do not count as tuning time, up to a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import COMMAND_LINE, Loaded
from tiltyard.engines import make_engine
from tiltyard.engines.candidates import RULE, Candidates, Point, own_point
from tiltyard.engines.preflight import check_engine
from tiltyard.engines.topology import topology
from tiltyard.errors import TiltyardError, UseError
from tiltyard.plugins.snapshot import Copies
from tiltyard.processes.fork_server import ForkServer
from tiltyard.processes.resources import usable_cores
from tiltyard.track.bottleneck import bottleneck
from tiltyard.types import Engine, EnvSpec, Report

SECONDS = 60.0
TUNE_SECONDS = 10.0  # of `engine.tune: true`
MAX_START_FACTOR = 2.0  # engine starts may take so many times the tuning time in addition
FIRST_ROUND = 1 / 80  # of the tuning time: the first round of a candidate
MIN_ROUND_SECONDS = 0.1  # seconds
DUEL_ROUNDS = 3  # rounds of the last two in a race
MARGIN = 1.03  # a winner must be so many times as fast
CLEAR_MARGIN = 1.2  # and so many times to win after its first round
DRAIN_UPDATES = 2  # updates that asynchronous workers may have ready from before
MAX_PAUSE_SECONDS = 1.0  # until they are idle
FINAL_DUEL_AT = 0.9  # of the tuning time: then the best races the experiment's own settings
TUNED = ("engine.workers", "engine.envs", "algo.rollout", "algo.minibatch")


@dataclass
class Measurement:
    """A point, its engine during a race, and the results of its rounds."""

    point: Point
    engine: Engine | None = None
    threads: int = 1
    speeds: list[float] = field(default_factory=list)
    split: dict[str, float] = field(default_factory=dict)
    workers: dict[str, float] = field(default_factory=dict)
    env_steps: int = 0
    failed: str = ""

    def add(self, report: Report) -> None:
        self.env_steps = report.progress.env_steps
        for part, seconds in report.time_split.items():
            self.split[part] = self.split.get(part, 0.0) + seconds
        found = report.metrics.items()
        self.workers = {name.removeprefix("workers/"): value for name, value in found if name.startswith("workers/")}

    @property
    def speed(self) -> float:
        """Env steps per second, learning included: the median of the last rounds."""
        return median(self.speeds[-DUEL_ROUNDS:]) if self.speeds and not self.failed else 0.0

    @property
    def is_starved(self) -> bool:
        """Whether most of the learner's time goes into sampling."""
        return self.split.get("env", 0.0) + self.split.get("wait", 0.0) > sum(self.split.values()) / 2

    @property
    def bound(self) -> str:
        """What limits the speed."""
        total = sum(self.split.values()) or 1.0
        return bottleneck({part: seconds / total for part, seconds in self.split.items()}, self.workers)


@dataclass(frozen=True)
class Tuned:
    """All measured points, the experiment's own among them, and the chosen one."""

    experiment: Experiment
    measurements: list[Measurement]
    own: Measurement
    chosen: Measurement
    kept: list[str]
    seconds: float

    @property
    def overrides(self) -> list[str]:
        return self.chosen.point.words()

    def lines(self) -> list[str]:
        """The choice as lines for the console."""
        tried = f"{len(self.measurements)} settings tried in {self.seconds:.0f} s"
        own, speed = self.own.speed, f"{self.chosen.speed:,.0f} env steps per second"
        if self.chosen is self.own:
            choice = f"the experiment's own settings, {speed}: none was faster"
        else:
            choice = f"{speed}, {self.chosen.speed / own:.2f} times the experiment's own {own:,.0f}"
        kept = [f"kept    as set: {', '.join(self.kept)}"] if self.kept else []
        bound = [f"bound   {self.chosen.bound}"] if self.chosen.bound else []
        return [f"choice  {choice} ({tried})", *bound, *kept, f"rule    {RULE}"]


def tune(
    loaded: Loaded,
    copies: Copies,
    spec: EnvSpec,
    seconds: float,
    server: ForkServer | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Measure and choose in about `seconds`, plus at most MAX_START_FACTOR times that for engine starts.

    All engines get copies of one fork server: without it, each would import torch again."""
    experiment = copies.named_in(loaded.experiment)
    if experiment.engine.kind == "rllib":
        hint = "set engine.kind=local"
        raise UseError("engine.kind = rllib cannot be tuned: its processes may be on other machines", hint)
    if experiment.algo.id == "clone":
        raise UseError("algo.id = clone cannot be tuned: it steps no envs", "tune an algorithm with envs: algo=ppo")
    base = (copies.folder,) if copies.ids else loaded.base
    kept = fixed_settings(loaded)
    began = time.monotonic()
    threads = torch.get_num_threads()
    contest = _Contest(experiment, spec, base, server, seconds, say, began)
    try:
        own, chosen = _search(contest, kept)
    finally:
        contest.close()
        torch.set_num_threads(threads)
    found, passed = contest.entries, time.monotonic() - began
    return Tuned(chosen.applied(loaded.experiment), [*found.values()], found[own], found[chosen], kept, passed)


def fixed_settings(loaded: Loaded) -> list[str]:
    """Settings that are not tuned: those of the command line, and engine.mode if it was set."""
    kept = [name for name in TUNED if loaded.origins.get(name) == COMMAND_LINE]
    kept += [] if loaded.origins.get("engine.mode") == "default" else ["engine.mode"]
    serial = loaded.experiment.engine.kind == "serial"  # always one process
    return list(dict.fromkeys([*kept, "engine.workers", "engine.mode"])) if serial else kept


def _search(contest: _Contest, kept: Sequence[str]) -> tuple[Point, Point]:
    """The experiment's own point and the chosen one."""
    experiment = contest.experiment
    own = own_point(experiment, topology(experiment, contest.spec).workers)
    around = Candidates(experiment, own, kept, usable_cores())
    contest.enter(own, must=True)
    processes, sizes, steps = around.processes, around.sizes, around.minibatches
    best, stages = own, (processes, sizes, steps) if contest.entries[own].is_starved else (sizes, steps, processes)
    for stage in stages:
        until = contest.used() + (FINAL_DUEL_AT - contest.used()) * (0.6 if stage == processes else 0.4)
        best = _climb(contest, around, best, until)
        rivals = stage(best)
        if stage == processes and best.workers > own.workers:  # after a climb fewer are slower
            rivals = [point for point in rivals if point.workers > best.workers]
        best = contest.race(best, rivals, until)
    best = _climb(contest, around, best, FINAL_DUEL_AT)
    return own, contest.race(own, [best], until=1.0) if best != own else own


def _climb(contest: _Contest, around: Candidates, best: Point, until: float) -> Point:
    """Add workers while that helps, as for envs that wait for something other than a core."""
    while contest.entries[best].is_starved and (more := around.more_workers(best)):
        found = contest.quick_race(best, more, until)
        if found == best:
            break
        best = found
    return best


@dataclass
class _Contest:
    """All entries, their common clock, and the running engines."""

    experiment: Experiment
    spec: EnvSpec
    base: Sequence[Path]
    server: ForkServer | None
    seconds: float
    say: Callable[[str], None]
    began: float
    starting: float = 0.0
    """seconds spent in engine starts"""
    entries: dict[Point, Measurement] = field(default_factory=dict)

    @property
    def round_seconds(self) -> float:
        return max(MIN_ROUND_SECONDS, self.seconds * FIRST_ROUND)

    def used(self) -> float:
        """The share of the tuning time used, without engine starts."""
        passed = time.monotonic() - self.began - min(self.starting, MAX_START_FACTOR * self.seconds)
        return passed / self.seconds

    # ------------------------------------------------------------------------------------------ racing

    def race(self, champion: Point, rivals: Sequence[Point], until: float) -> Point:
        """The fastest of a point and the rivals there is time for; the champion if none is faster by the margin."""
        first, rest = self.entries[champion], self._entered(rivals, until)
        seconds_each, duels = self.round_seconds, 0
        while rest and duels < DUEL_ROUNDS:
            duels += len(rest) == 1
            for entry in (first, *rest):
                self._run_round(entry, seconds_each)
            rest = sorted((entry for entry in rest if not entry.failed), key=lambda entry: -entry.speed)
            seconds_each *= 2 if len(rest) > 1 else 1
            half = -(-len(rest) // 2)
            self._leave(rest[half:])
            rest = rest[:half]
            if self.used() >= until:
                break
        fastest = max(rest, key=lambda entry: entry.speed, default=first)
        winner = fastest if fastest.speed > MARGIN * first.speed else first
        return self._won(winner, [first, *rest])

    def quick_race(self, champion: Point, rivals: Sequence[Point], until: float) -> Point:
        """A race that a rival wins at once if its first round is clearly faster, as in many steps of a climb."""
        first, up = self.entries[champion], self._entered(rivals, until)
        fastest = max(up, key=lambda entry: entry.speed, default=None)
        if fastest is None or fastest.speed < CLEAR_MARGIN * first.speed:
            return self.race(champion, [entry.point for entry in up], until)
        return self._won(fastest, [first, *up])

    def _entered(self, points: Sequence[Point], until: float) -> list[Measurement]:
        """Those of the points that run already or that there is time to start."""
        up = {point for point, entry in self.entries.items() if entry.engine is not None}
        wanted = (point for point in points if self.used() < until or point in up)
        return [self.entries[point] for point in wanted if self.enter(point)]

    def _won(self, winner: Measurement, entries: Sequence[Measurement]) -> Point:
        """End the engines of the others, except the experiment's own."""
        self._leave([entry for entry in entries if entry is not winner and entry.point != self._own])
        return winner.point

    @property
    def _own(self) -> Point:
        """The experiment's own point, the first entry; its engine runs until the end, for comparison."""
        return next(iter(self.entries))

    def enter(self, point: Point, *, must: bool = False) -> bool:
        """Start the point's engine if needed and run its first round; returns whether that worked."""
        entry = self.entries.setdefault(point, Measurement(point))
        if entry.engine is None and not entry.failed:
            settings, began = point.applied(self.experiment), time.monotonic()
            try:
                check_engine(settings, self.spec, self.base)
                entry.engine = make_engine(settings, self.spec, self.base, server=self.server)
                entry.threads = torch.get_num_threads()
                entry.env_steps = entry.engine.step().progress.env_steps  # the first update is the slowest
            except TiltyardError as error:
                if must:
                    raise
                self._fail(entry, error)
            self.starting += time.monotonic() - began
            if not entry.failed:
                self._run_round(entry, self.round_seconds)
            if not entry.failed:
                self.say(f"{entry.speed:>12,.0f} env steps/s  {' '.join(point.words())}")
        return not entry.failed

    def _run_round(self, entry: Measurement, seconds: float) -> None:
        """Train for some seconds while the other engines are idle."""
        engine = entry.engine
        if engine is None:
            return
        is_async = entry.point.mode == "async"
        torch.set_num_threads(entry.threads)
        try:
            for _ in range(DRAIN_UPDATES if is_async else 0):
                entry.env_steps = engine.step().progress.env_steps
            before, began, updates = entry.env_steps, time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < seconds or not updates:
                entry.add(engine.step())
                updates += 1
            entry.speeds.append((entry.env_steps - before) / passed)
            if is_async:  # its workers continue until their slots are full
                time.sleep(min(MAX_PAUSE_SECONDS, DRAIN_UPDATES * passed / updates))
        except TiltyardError as error:
            if entry.point == self._own:
                raise
            self._fail(entry, error)

    def _fail(self, entry: Measurement, error: TiltyardError) -> None:
        entry.failed = error.message
        self.say(f"{'failed':>12}  {' '.join(entry.point.words())}: {error.message}")
        self._leave([entry])

    def _leave(self, entries: Sequence[Measurement]) -> None:
        for entry in entries:
            if entry.engine is not None:
                entry.engine.close()
                entry.engine = None

    def close(self) -> None:
        self._leave([*self.entries.values()])
