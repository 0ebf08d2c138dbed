"""Which processes and sizes train an experiment fastest on this machine, found by training with the real engine.

    samples are scarce:   processes  ->  envs and rollout  ->  minibatch  ->  the best against the own, once more
    learning takes long:  envs and rollout  ->  minibatch  ->  processes  ->  the best against the own, once more

Each is a race by successive halving: all take a turn, the faster half takes another twice as long, and so on; turns
are interleaved, so that a busy moment of the machine meets everybody, and a candidate is as fast as the median of its
last turns. What wins must be faster by a margin, so the choice never is slower than the experiment itself. What may be
tried at all is candidates.py. The time there is goes into turns: what engines need to get up (32 games of ALE: 9
seconds) is not counted, up to a limit.
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
from tiltyard.processes import fork_server
from tiltyard.processes.resources import usable_cores
from tiltyard.track.bottleneck import bottleneck
from tiltyard.types import Engine, EnvSpec, Report

SECONDS = 60.0
TUNE_SECONDS = 10.0  # seconds that `engine.tune: true` may take
STARTS = 2.0  # times the seconds there are: what starting engines may take beside them
TURN = 1 / 80  # of the time there is: the first turn of a candidate
SHORTEST_TURN = 0.1  # seconds
TURNS = 3  # of the last two in a race
MARGIN = 1.03  # how much faster something must be to be taken
CLEAR = 1.2  # how much faster in its first turn to be taken at once
DRAIN = 2  # updates that asynchronous workers can have ready from before
PAUSE = 1.0  # seconds at most until they have come to rest
LAST_DUEL = 0.9  # of the time: when the best and the own meet again
TUNED = ("engine.workers", "engine.envs", "algo.rollout", "algo.minibatch")


@dataclass(frozen=True)
class Measurement:
    """One point and how fast it was."""

    point: Point
    speed: float
    """env steps per second, learning included: the median of its last turns"""
    rounds: int
    bound: str
    failed: str = ""


@dataclass(frozen=True)
class Tuned:
    """What was tried, the experiment's own point among it, and what was chosen."""

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
        """The choice in a few sentences."""
        tried = f"{len(self.measurements)} settings tried in {self.seconds:.0f} s"
        if self.chosen is self.own:
            verdict = f"the experiment's own settings, {self.own.speed:,.0f} env steps per second: none was faster"
        else:
            gain = self.chosen.speed / self.own.speed
            verdict = (
                f"{self.chosen.speed:,.0f} env steps per second, {gain:.2f} times the experiment's own "
                f"{self.own.speed:,.0f}"
            )
        kept = [f"kept    as set: {', '.join(self.kept)}"] if self.kept else []
        bound = [f"bound   {self.chosen.bound}"] if self.chosen.bound else []
        return [f"choice  {verdict} ({tried})", *bound, *kept, f"rule    {RULE}"]


def tune(
    loaded: Loaded,
    copies: Copies,
    spec: EnvSpec,
    seconds: float,
    say: Callable[[str], None] = lambda sentence: None,
) -> Tuned:
    """Measure and choose within about that time, and that of starting engines, at most `STARTS` times as much."""
    experiment = copies.named_in(loaded.experiment)
    if experiment.engine.kind == "rllib":
        raise UseError("engine.kind = rllib cannot be tuned: its processes may be anywhere", "set engine.kind=local")
    base = (copies.folder,) if copies.ids else loaded.base
    kept = fixed_settings(loaded)
    began = time.monotonic()
    threads = torch.get_num_threads()
    field_ = _Field(experiment, spec, base, began, seconds, say)
    with fork_server.standby.shared():
        try:
            own, chosen = _search(field_, kept)
        finally:
            field_.close()
            torch.set_num_threads(threads)
    measurements = [entry.trial() for entry in field_.entries.values()]
    found = {trial.point: trial for trial in measurements}
    chosen_experiment = chosen.applied(loaded.experiment)
    return Tuned(chosen_experiment, measurements, found[own], found[chosen], kept, time.monotonic() - began)


def fixed_settings(loaded: Loaded) -> list[str]:
    """Names of the settings that stay as they are: those of the command line, and the mode, if anybody set it."""
    kept = [name for name in TUNED if loaded.origins.get(name) == COMMAND_LINE]
    kept += [] if loaded.origins.get("engine.mode") == "default" else ["engine.mode"]
    serial = loaded.experiment.engine.kind == "serial"  # one process, whatever it is told
    return list(dict.fromkeys([*kept, "engine.workers", "engine.mode"])) if serial else kept


def _search(field_: _Field, kept: Sequence[str]) -> tuple[Point, Point]:
    """The experiment's own point and the one that is chosen."""
    experiment = field_.experiment
    own = own_point(experiment, topology(experiment, field_.spec).workers)
    around = Candidates(experiment, own, kept, usable_cores())
    field_.enter(own, must=True)
    processes, sizes, steps = around.processes, around.sizes, around.minibatches
    best, stages = own, (processes, sizes, steps) if field_.entries[own].is_starved else (sizes, steps, processes)
    for stage in stages:
        until = field_.used() + (LAST_DUEL - field_.used()) * (0.6 if stage == processes else 0.4)
        best = _climb(field_, around, best, until)
        rivals = stage(best)
        if stage == processes and best.workers > own.workers:  # whoever climbed has no use for fewer
            rivals = [point for point in rivals if point.workers > best.workers]
        best = field_.race(best, rivals, until)
    best = _climb(field_, around, best, LAST_DUEL)
    return own, field_.race(own, [best], until=1.0) if best != own else own


def _climb(field_: _Field, around: Candidates, best: Point, until: float) -> Point:
    """More workers, for as long as that helps: where envs wait for something else than a core."""
    while field_.entries[best].is_starved and (more := around.more_workers(best)):
        found = field_.leap(best, more, until)
        if found == best:
            break
        best = found
    return best


@dataclass
class _Entry:
    """A point with its engine while it is in a race, and what its turns gave."""

    point: Point
    engine: Engine | None = None
    threads: int = 1
    speeds: list[float] = field(default_factory=list)
    split: dict[str, float] = field(default_factory=dict)
    workers: dict[str, float] = field(default_factory=dict)
    env_steps: int = 0
    failed: str = ""

    def note(self, report: Report) -> None:
        self.env_steps = report.progress.env_steps
        for part, seconds in report.time_split.items():
            self.split[part] = self.split.get(part, 0.0) + seconds
        told = [(name.split("/", 1), value) for name, value in report.metrics.items() if name.startswith("workers/")]
        self.workers = {part: value for (_, part), value in told}

    @property
    def speed(self) -> float:
        return median(self.speeds[-TURNS:]) if self.speeds and not self.failed else 0.0

    @property
    def is_starved(self) -> bool:
        """Whether most of the learner's time goes into getting samples."""
        return self.split.get("env", 0.0) + self.split.get("wait", 0.0) > sum(self.split.values()) / 2

    def trial(self) -> Measurement:
        total = sum(self.split.values()) or 1.0
        shares = {part: seconds / total for part, seconds in self.split.items()}
        return Measurement(self.point, self.speed, len(self.speeds), bottleneck(shares, self.workers), self.failed)


class _Field:
    """All entries, the clock they share, and the engines that are up."""

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        base: Sequence[Path],
        began: float,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.experiment, self.spec, self.base, self.say = experiment, spec, base, say
        self.began, self.seconds = began, seconds
        self.starting = 0.0  # seconds that engines have taken to get up
        self.turn = max(SHORTEST_TURN, seconds * TURN)
        self.entries: dict[Point, _Entry] = {}

    def used(self) -> float:
        """Share of the time that is over, without what starting took."""
        passed = time.monotonic() - self.began - min(self.starting, STARTS * self.seconds)
        return passed / self.seconds

    # ------------------------------------------------------------------------------------------ racing

    def race(self, holder: Point, rivals: Sequence[Point], until: float) -> Point:
        """The fastest of a point and its rivals, those that there is time for; the holder when none is by a margin."""
        alive = [self.entries[holder]]
        for rival in rivals:
            if self.used() >= until and not self._is_up(rival):
                break
            if self.enter(rival):
                alive.append(self.entries[rival])
        turn, duels = self.turn, 0
        while len(alive) > 1 and duels < TURNS:
            duels += len(alive) == 2
            for entry in alive:
                self._take_turn(entry, turn)
            first, *rest = alive
            rest = sorted((entry for entry in rest if not entry.failed), key=lambda entry: -entry.speed)
            self._leave(rest[-(-len(rest) // 2) :])
            turn *= 2 if len(rest) > 1 else 1
            alive = [first, *rest[: -(-len(rest) // 2)]]
            if self.used() >= until:
                break
        first, *rest = alive
        fastest = max(rest, key=lambda entry: entry.speed, default=first)
        won = fastest if fastest.speed > MARGIN * first.speed else first
        self._leave([entry for entry in alive if entry is not won and entry.point != self._own])
        return won.point

    def leap(self, holder: Point, rivals: Sequence[Point], until: float) -> Point:
        """As a race, but a rival whose first turn leaves no doubt has won: many steps of a climb are such."""
        up = [rival for rival in rivals if (self.used() < until or self._is_up(rival)) and self.enter(rival)]
        fastest = max((self.entries[rival] for rival in up), key=lambda entry: entry.speed, default=None)
        if fastest is None or fastest.speed < CLEAR * self.entries[holder].speed:
            return self.race(holder, up, until)
        losers = [self.entries[point] for point in (holder, *up) if point not in (fastest.point, self._own)]
        self._leave(losers)
        return fastest.point

    def _is_up(self, point: Point) -> bool:
        return point in self.entries and self.entries[point].engine is not None

    @property
    def _own(self) -> Point:
        """The first that entered: its engine stays up until the end, to be compared with."""
        return next(iter(self.entries))

    def enter(self, point: Point, *, must: bool = False) -> bool:
        """Build the point's engine, if it is not up, and let it take its first turn; whether it could."""
        entry = self.entries.setdefault(point, _Entry(point))
        if entry.engine is None and not entry.failed:
            settings, began = point.applied(self.experiment), time.monotonic()
            try:
                check_engine(settings, self.spec, self.base)
                entry.engine = make_engine(settings, self.spec, self.base)
                entry.threads = torch.get_num_threads()
                entry.env_steps = entry.engine.step().progress.env_steps  # the first update is slower than all others
            except TiltyardError as error:
                if must:
                    raise
                self._fail(entry, error)
            self.starting += time.monotonic() - began
            if not entry.failed:
                self._take_turn(entry, self.turn)
            if not entry.failed:
                self.say(f"{entry.speed:>12,.0f} env steps/s  {' '.join(point.words())}")
        return not entry.failed

    def _take_turn(self, entry: _Entry, seconds: float) -> None:
        """Train for a moment with nobody else at work."""
        engine = entry.engine
        if engine is None:
            return
        apart = entry.point.mode == "async"
        torch.set_num_threads(entry.threads)
        try:
            for _ in range(DRAIN if apart else 0):
                entry.env_steps = engine.step().progress.env_steps
            before, began, updates = entry.env_steps, time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < seconds or not updates:
                entry.note(engine.step())
                updates += 1
            entry.speeds.append((entry.env_steps - before) / passed)
            if apart:  # its workers go on until their slots are full
                time.sleep(min(PAUSE, DRAIN * passed / updates))
        except TiltyardError as error:
            if entry.point == self._own:
                raise
            self._fail(entry, error)

    def _fail(self, entry: _Entry, error: TiltyardError) -> None:
        entry.failed = error.message
        self.say(f"{'failed':>12}  {' '.join(entry.point.words())}: {error.message}")
        self._leave([entry])

    def _leave(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            if entry.engine is not None:
                entry.engine.close()
                entry.engine = None

    def close(self) -> None:
        self._leave([*self.entries.values()])
