"""The sampler: the speed of an env with random actions and no learning, in 1 .. k processes. No torch, no run folder.

    bench                                  child: `perform`
      its share of the envs  -> task  --------> builds the same group as training -> ready
      all are ready          -> go  ----------> only steps its envs, for the given seconds
                             <- ticks --------- (monotonic time, env steps, frames, seconds in resets) since it began

The best speed is an upper bound of training's: `run.measured` stores it, `train` and `show` compare with it.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import load
from tiltyard.config.sections import Env
from tiltyard.config.site_file import runs_root
from tiltyard.envs.env_errors import env_error
from tiltyard.envs.probe import probe
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.single_agent_vector import NativeStepping
from tiltyard.envs.spaces import spec_from_json, spec_to_json
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.plugins.snapshot import copy_plugins
from tiltyard.processes.child import Parent, children
from tiltyard.processes.resources import rss_bytes, usable_cores
from tiltyard.run import measured
from tiltyard.types import Array, EnvSpec, Step

SECONDS = 12.0  # of stepping, in total
WINDOWS = (1, 10, 60)  # seconds
MAX_TICKS, MIN_TICK_SECONDS = 100, 0.1


@dataclass(frozen=True)
class Throughput:
    """The speed of one number of processes."""

    processes: int
    envs: int
    seconds: float
    env_steps_per_second: float
    frames_per_second: float
    windows: dict[str, float]
    """median env steps per second over windows of that many seconds, where at least one fits"""
    reset_share: float
    """of the processes' time"""
    env_bytes: int
    """memory of one env; 0 if unknown"""


@dataclass(frozen=True)
class Bench:
    """All measurements of one env."""

    env: str
    envs: int
    sampled: list[Throughput]
    file: Path

    @property
    def best(self) -> Throughput:
        return max(self.sampled, key=lambda each: each.env_steps_per_second)


def bench(
    target: str | Path,
    overrides: Sequence[str] = (),
    *,
    workers: int | None = None,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Measure an experiment's env in 1 .. `workers` processes (default: usable cores) and store the best speed."""
    root = runs_root()
    loaded = load(target, overrides)
    with tempfile.TemporaryDirectory(prefix="tiltyard-plugins-") as folder:
        # Copied as for a run: the stored speed is found by the copies' names.
        copies = copy_plugins(loaded.experiment, loaded.base, Path(folder))
        experiment = copies.named_in(loaded.experiment)
        base = (Path(folder),) if copies.ids else loaded.base
        spec = probe(experiment.env, base=base, previous=experiment.model.previous)
        for note in (*loaded.warnings, *spec.notes):
            say(f"note    {note}")
        envs = experiment.engine.envs
        if workers is not None and workers > envs:
            more = f"with engine.envs={workers} each has one"
            say(f"note    engine.envs={envs} is fewer than {workers} processes; {more}")
        counts = process_counts(min(workers or usable_cores(), envs))
        sampled = []
        for count in counts:
            each = sample(experiment, spec, base, count, seconds / len(counts))
            say(f"{count} process{'es' if count > 1 else ''}: {each.env_steps_per_second:,.0f} env steps per second")
            sampled.append(each)
    found = Bench(loaded.experiment.env.id, envs, sampled, root / measured.FILE)
    stored = ("env_steps_per_second", "frames_per_second", "processes")
    measured.remember(root, experiment, {name: getattr(found.best, name) for name in stored})
    return found


def process_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({min(most, 2**power) for power in range(most.bit_length() + 1)})


def sample(experiment: Experiment, spec: EnvSpec, base: Sequence[Path], processes: int, seconds: float) -> Throughput:
    """Step all envs of the experiment in `processes` processes for some seconds."""
    envs = experiment.engine.envs
    first = [number * envs // processes for number in range(processes + 1)]
    task = {
        "env": experiment.env.model_dump(mode="json"),
        "spec": spec_to_json(spec),
        "base": [str(place.absolute()) for place in base],
        "seed": experiment.seed,
        "previous": experiment.model.previous,
        "threads": None if processes == 1 else max(1, usable_cores() // processes),
        "seconds": seconds,
    }
    tasks = [{**task, "first": a, "envs": b - a} for a, b in pairwise(first)]
    hint = "run the env by itself to see why"
    with children("tiltyard.tuning.sampler:perform", tasks, "sampling process", hint) as started:
        env_bytes = [child.recv()["env_bytes"] for child in started]
        for child in started:
            child.send({"go": True})
        ticks = [np.array(child.recv()["ticks"]) for child in started]
    return summary(ticks, envs, env_bytes[0])  # the first process measures its memory


def summary(ticks: Sequence[Array], envs: int, env_bytes: int) -> Throughput:
    """Merge the ticks [n, 4] of all processes (time, env steps, frames, seconds in resets, all cumulative)."""
    begin, end = max(each[0, 0] for each in ticks), min(each[-1, 0] for each in ticks)

    def per_second(column: int, since: float, until: float) -> float:
        grown = sum(np.ptp(np.interp([since, until], each[:, 0], each[:, column])) for each in ticks)
        return float(grown / (until - since))

    windows = {}
    for width in WINDOWS:
        count = int((end - begin) / width + 0.05)  # tolerates processes that start a moment apart
        marks = [min(end, begin + number * width) for number in range(count + 1)]
        if count:
            windows[str(width)] = median(per_second(1, a, b) for a, b in pairwise(marks))
    alive = sum(each[-1, 0] - each[0, 0] for each in ticks)
    return Throughput(
        processes=len(ticks),
        envs=envs,
        seconds=float(end - begin),
        env_steps_per_second=per_second(1, begin, end),
        frames_per_second=per_second(2, begin, end),
        windows=windows,
        reset_share=float(sum(each[-1, 3] for each in ticks) / alive),
        env_bytes=env_bytes,
    )


# ---------------------------------------------------------------------------------------------- in the child


class _TimedResets:
    """An env with timed resets. Its `step` is the env's own bound method and not slowed."""

    def __init__(self, env: Any) -> None:
        self._env, self.seconds = env, 0.0

    def reset(self, *, seed: int | None) -> Any:
        began = time.perf_counter()
        answer = self._env.reset(seed=seed)
        self.seconds += time.perf_counter() - began
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def perform(task: dict[str, Any], parent: Parent) -> dict[str, Any]:
    """Build the group, report ready, wait for go, then step."""
    env, spec = Env.model_validate(task["env"]), spec_from_json(task["spec"])

    def build(envs: int) -> tuple[EnvGroup, Step]:
        config = GroupConfig(
            env,
            spec,
            envs * len(spec.agents),
            task["seed"],
            base=[Path(place) for place in task["base"]],
            previous=task["previous"],
            first_row=task["first"] * len(spec.agents),
        )
        group = make_group(config, threads=task["threads"])
        return group, group.reset()

    env_bytes = spec.env_bytes
    grows = env.isolate != "process"  # else envs are in other processes, and the probe has measured one
    if grows and task["first"] == 0 and task["envs"] > 1:
        first_group, _ = build(1)  # first, so that imports do not count as memory of envs
        before = rss_bytes()
        group, now = build(task["envs"])
        env_bytes = max(0, rss_bytes() - before) // task["envs"]
        first_group.close()
    else:
        group, now = build(task["envs"])
    timed = [_TimedResets(env) for env in group.envs]
    group.envs[:] = timed
    parent.send({"ready": True, "env_bytes": env_bytes})
    parent.recv()
    ticks = _step(EnvStepper(group, now), timed, task["seconds"])
    group.close()
    return {"ticks": ticks}


def _step(stepper: EnvStepper, timed: Sequence[_TimedResets], seconds: float) -> list[list[float]]:
    """Step for `seconds`; returns the ticks."""
    interval = max(MIN_TICK_SECONDS, seconds / MAX_TICKS)
    mark = began = time.monotonic()
    ticks = [[began, 0, 0, 0.0]]
    while mark < began + seconds:
        due = min(mark + interval, began + seconds)
        while mark < due:
            stepper.step()
            mark = time.monotonic()
        ticks.append([mark, stepper.env_steps, stepper.frames, sum(each.seconds for each in timed)])
    return ticks


ACTION_SETS = 256  # env steps with actions drawn in advance, used in a cycle


class EnvStepper:
    """Steps a group with random actions, in the fastest way that it allows."""

    def __init__(self, group: EnvGroup, now: Step) -> None:
        self.group, self.now = group, now
        self.env_steps = self.frames = 0
        self._rng = np.random.default_rng(0)
        self._limit = group.env.time_limit or group.spec.episode_limit or sys.maxsize
        self._row, self._doing = 0, "step"  # for errors
        if group.spec.parallel or group.spec.masked or group.env.isolate != "none":
            self.step = self._step_as_training
            """One env step of every row."""
            return
        actions: list[Any] = [group.codec.random_rows(self._rng, group.rows) for _ in range(ACTION_SETS)]
        self._step, self._lengths = self._step_single, np.zeros(group.rows, np.int64)
        if isinstance(group.stepping, NativeStepping):
            actions = [np.asarray(group.codec.decode_rows(each)) for each in actions]
            self._step = self._step_native
        self._actions = itertools.cycle(actions)
        self._calls = [env.step for env in group.envs]
        self._left = [self._limit] * group.rows
        self.step = self._step_with_errors

    def _step_with_errors(self) -> None:
        try:
            self._step(next(self._actions))
        except KeyboardInterrupt:  # by the user
            raise
        except BaseException as error:
            where = f"env {self.group.env.id}, row {self.group.first_row + self._row}, env step {self.env_steps}"
            raise env_error(error, where, self._doing) from error
        self.env_steps += self.group.rows

    def _step_single(self, actions: Any) -> None:
        calls, envs, left = self._calls, self.group.envs, self._left
        actions = self.group.codec.decode_rows(actions)  # decoded again: an env may modify its action
        skip = self.group.env.frameskip
        each = self.group.spec.frameskip // skip
        for self._row, call in enumerate(calls):
            row = self._row
            for _ in range(skip):
                _, _, over, cut, _ = call(actions[row])
                self.frames += each
                if over or cut:
                    break
            left[row] -= 1
            if over or cut or not left[row]:
                self._doing, left[row] = "reset", self._limit
                envs[row].reset(seed=None)
                self._doing = "step"

    def _step_native(self, actions: Any) -> None:
        group, lengths = self.group, self._lengths
        assert isinstance(group.stepping, NativeStepping)
        self._row = 0
        _, _, terminated, truncated = group.stepping.vector.step(actions)
        lengths += 1
        ended = terminated | truncated | (lengths >= self._limit)
        if ended.any():
            lengths[ended] = 0
            self._doing = "reset"
            for self._row in np.flatnonzero(ended).tolist():
                group.envs[self._row].reset(seed=None)
            self._doing = "step"
        self.frames += group.rows * group.spec.frameskip

    def _step_as_training(self) -> None:
        before = self.group.stats.frames_taken
        self.now = self.group.step(self.group.codec.random_rows(self._rng, self.group.rows, self.now.mask))
        self.env_steps += int(self.now.valid.sum())
        self.frames += self.group.stats.frames_taken - before
