"""The settings that `tune` may try, as points around the experiment's own. Builds no engine, measures nothing.

A point must learn like the experiment itself, only faster. The limits, relative to the experiment's own values:

    batch       (engine.envs x algo.rollout, env steps per update)   at least half, at most twice
    minibatch   (env steps per gradient step)                        at least half, at most twice
    envs        half to eight times
    rollout     at least 16, or the experiment's own: in shorter ones returns are mostly the critic's estimates

So the number of gradient steps per env step changes by a factor of two at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tiltyard.config.cross_checks import cross_check
from tiltyard.config.experiment import Experiment

FACTOR = 2.0
MAX_ENVS_FACTOR = 8  # times the experiment's own envs
MIN_ROLLOUT = 16  # env steps of a rollout
PER_CORE = 8  # workers, for envs that mostly wait

RULE = (
    "batch and minibatch stay within half to twice the experiment's own, rollouts at 16 or longer: "
    "what is learned per env step hardly changes"
)


@dataclass(frozen=True)
class Point:
    """Values of the tuned settings."""

    workers: int
    mode: Literal["sync", "async"]
    envs: int
    rollout: int
    minibatch: int | None
    """None for algorithms without minibatches"""

    def applied(self, experiment: Experiment) -> Experiment:
        """The experiment with these values and `engine.tune` off."""
        sizes = {"rollout": self.rollout, **({} if self.minibatch is None else {"minibatch": self.minibatch})}
        processes = {"workers": self.workers, "envs": self.envs, "mode": self.mode, "tune": False}
        algo, engine = experiment.algo.model_copy(update=sizes), experiment.engine.model_copy(update=processes)
        return experiment.model_copy(update={"algo": algo, "engine": engine})

    def words(self) -> list[str]:
        """The values as command-line overrides."""
        minibatch = [] if self.minibatch is None else [f"algo.minibatch={self.minibatch}"]
        processes = [f"engine.workers={self.workers}", f"engine.mode={self.mode}", f"engine.envs={self.envs}"]
        return [*processes, f"algo.rollout={self.rollout}", *minibatch]


def own_point(experiment: Experiment, workers: int) -> Point:
    """The point of an experiment; `workers` is the resolved engine.workers."""
    algo, engine = experiment.algo, experiment.engine
    return Point(workers, engine.mode, engine.envs, algo.rollout, getattr(algo, "minibatch", None))


class Candidates:
    """Points around an experiment's own. `kept` names settings that must not change."""

    def __init__(self, experiment: Experiment, own: Point, kept: Iterable[str], cores: int) -> None:
        self.experiment, self.own, self.kept, self.cores = experiment, own, frozenset(kept), cores

    def processes(self, point: Point) -> list[Point]:
        """Other workers and modes with the same sizes, the most promising first."""
        return self._allowed(replace(point, workers=w, mode=m) for w, m in self._topologies(point.envs))

    def _topologies(self, envs: int) -> Iterator[tuple[int, Literal["sync", "async"]]]:
        all_cores, all_but_one, half = (
            even_workers(envs, each) for each in (self.cores, self.cores - 1, self.cores // 2)
        )
        if self.own.workers == 0:
            yield from ((all_cores, "sync"), (all_but_one, "async"), (all_cores, "async"), (half, "sync"))
        else:
            yield from ((0, "sync"), (all_but_one, "async"), (all_cores, "sync"), (all_cores, "async"))
            yield from ((self.own.workers, "async"), (self.own.workers, "sync"))

    def more_workers(self, point: Point) -> list[Point]:
        """Twice the workers, with an env for each, in either mode: for envs that wait rather than compute."""
        twice = 2 * point.workers
        if not 0 < twice <= PER_CORE * self.cores:
            return []
        wider = replace(point, workers=twice)
        if twice > point.envs:
            batch = self.own.envs * self.own.rollout
            same, larger = batch // twice, FACTOR * batch // twice
            wider = replace(wider, envs=twice, rollout=same if same >= MIN_ROLLOUT else int(larger))
        return self._allowed([wider, replace(wider, mode="sync" if point.mode == "async" else "async")])

    def sizes(self, point: Point) -> list[Point]:
        """Other numbers of envs and rollout lengths with the same processes, closest batch first."""
        own = self.own
        ratios = [(2.0, 1.0), (4.0, 1.0), (8.0, 1.0), (0.5, 1.0), (4.0, 2.0), (8.0, 2.0), (2.0, 2.0), (1.0, 2.0)]
        shapes = [(round(own.envs * envs), round(own.rollout * batch / envs)) for envs, batch in ratios]
        return self._allowed(replace(point, envs=envs, rollout=rollout) for envs, rollout in shapes)

    def minibatches(self, point: Point) -> list[Point]:
        """Larger and smaller gradient steps."""
        own = self.own.minibatch
        return [] if own is None else self._allowed(replace(point, minibatch=size) for size in (2 * own, own // 2))

    def _allowed(self, points: Iterable[Point]) -> list[Point]:
        return [point for point in dict.fromkeys(points) if point != self.own and self.allows(point)]

    def allows(self, point: Point) -> bool:
        """Whether a point is valid, within the limits, and leaves the kept settings alone."""
        own = self.own
        now = {
            "engine.workers": point.workers == own.workers,
            "engine.mode": point.mode == own.mode,
            "engine.envs": point.envs == own.envs,
            "algo.rollout": point.rollout == own.rollout,
            "algo.minibatch": point.minibatch == own.minibatch,
        }
        return (
            all(same for name, same in now.items() if name in self.kept)
            and point.workers <= point.envs
            and own.envs / FACTOR <= point.envs <= own.envs * MAX_ENVS_FACTOR
            and point.rollout >= min(MIN_ROLLOUT, own.rollout)
            and _near(point.envs * point.rollout, own.envs * own.rollout)
            and _near(point.minibatch or 1, own.minibatch or 1)
            and not cross_check(point.applied(self.experiment))
        )


def even_workers(envs: int, most: int) -> int:
    """The largest number of workers up to `most` that share the envs evenly."""
    return next(count for count in range(max(1, min(most, envs)), 0, -1) if envs % count == 0)


def _near(size: int, own: int) -> bool:
    return own / FACTOR <= size <= own * FACTOR
