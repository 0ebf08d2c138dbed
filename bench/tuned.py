"""Does `tune` find what an exhaustive grid finds? `python bench/tuned.py [TASK ...]`.

The grid is every combination of processes, envs, rollout and minibatch that `tune` may choose (candidates.py). All
points are measured one after another, and the fastest few again for longer. Then `tune` runs for a minute, and its
choice, the best of the grid and the experiment's own settings are measured in alternation. The last ratio is the
result.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.engines.candidates import Candidates, Point, own_point
from tiltyard.engines.local import PRELOAD
from tiltyard.engines.topology import topology
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError
from tiltyard.plugins.snapshot import copy_plugins
from tiltyard.processes.fork_server import ForkServer
from tiltyard.processes.resources import usable_cores
from tiltyard.tuning.autotune import fixed_settings, tune
from tiltyard.types import EnvSpec

BENCH = Path(__file__).resolve().parent
# Given as in a file: `tune` does not change settings from the command line.
TASKS: dict[str, dict[str, Any]] = {
    "cartpole": {"env": "CartPole-v1"},
    "sleep": {
        "env": f"{BENCH / 'sleeper.py'}:Sleeper",
        "engine": {"envs": 8},
        "algo": {"rollout": 32, "minibatch": 64},
    },
    "pong": {"env": "atari:pong", "use": ["atari-fast"]},
}
BEST = 4  # points of the grid that are measured again
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="compare `tune` with an exhaustive grid")
    parser.add_argument("tasks", nargs="*", default=[*TASKS], help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of measurement for each point of the grid")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for `tune`")
    parser.add_argument(
        "--workers", type=int, default=16, help="largest number in the grid; use 4 for envs that need the cores"
    )
    parser.add_argument("--coarse", action="store_true", help="without minibatches smaller than the experiment's")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the final comparison")
    options = parser.parse_args()
    for task in options.tasks:
        compare(task, options)


def compare(task: str, options: argparse.Namespace) -> None:
    loaded = load(TASKS[task])
    experiment = loaded.experiment
    spec = probe(experiment.env, base=loaded.base, previous=False)
    own = own_point(experiment, topology(experiment, spec).workers)

    def speed(point: Point, seconds: float) -> float:
        return measure(point, seconds, experiment, spec, loaded.base, server)

    seconds = options.seconds
    around = Candidates(experiment, own, fixed_settings(loaded), usable_cores())
    points = [own, *grid(around, own, options.workers, options.coarse)]
    began = time.monotonic()
    with ForkServer(PRELOAD) as server:
        found = {point: speed(point, seconds) for point in points}
        first = sorted(found, key=lambda point: -found[point])[:BEST]
        best = max(first, key=lambda point: speed(point, 3 * seconds))
    took = f"{len(points)} points in {time.monotonic() - began:.0f} s"
    print(f"{task}: a grid of {took}; best: {' '.join(best.words())}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ForkServer(PRELOAD) as server:
        copies = copy_plugins(experiment, loaded.base, Path(folder))
        tuned = tune(loaded, copies, spec, options.budget, server)
    print(f"{task}: tune, {tuned.seconds:.0f} s: {' '.join(tuned.overrides)}")
    finalists = {"grid": best, "tune": tuned.chosen.point, "own": own}
    measured: dict[str, list[float]] = {name: [] for name in finalists}
    with ForkServer(PRELOAD) as server:
        for number in range(options.rounds):
            for name in sorted(finalists, reverse=bool(number % 2)):
                measured[name].append(speed(finalists[name], 3 * seconds))
    speeds = {name: median(each) for name, each in measured.items()}
    print(f"{task}: " + ", ".join(f"{name} {each:,.0f} env steps/s" for name, each in speeds.items()), end="; ")
    print(f"tune / grid = {speeds['tune'] / speeds['grid']:.2f}", flush=True)


def grid(around: Candidates, own: Point, most: int, coarse: bool) -> list[Point]:
    """Every point that `tune` could choose, with at most `most` workers."""
    topologies = {(own.workers, own.mode), *((p.workers, p.mode) for p in around.processes(own))}
    if max(workers for workers, _ in topologies) > 0:  # envs that wait benefit from many workers
        topologies |= {(w, m) for w in (4, 8, 16) for m in ("sync", "async") if w <= most}
    envs = [round(own.envs * ratio) for ratio in (0.5, 1, 2, 4, 8)]
    batches = [own.envs * own.rollout * ratio for ratio in (1, 2)]
    sizes = [None] if own.minibatch is None else [own.minibatch // 2, own.minibatch, own.minibatch * 2][int(coarse) :]
    points = [
        replace(own, workers=workers, mode=mode, envs=count, rollout=batch // count, minibatch=size)
        for (workers, mode), count, batch, size in itertools.product(sorted(topologies), envs, batches, sizes)
    ]
    return [point for point in dict.fromkeys(points) if point != own and around.allows(point)]


def measure(
    point: Point, seconds: float, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], server: ForkServer
) -> float:
    """Env steps per second with learning, after three warm-up updates; 0 if the point is invalid."""
    threads = torch.get_num_threads()
    try:
        engine = make_engine(point.applied(experiment), spec, base, server=server)
    except TiltyardError as error:
        print(f"{' '.join(point.words())}: {error.message}", file=sys.stderr)
        return 0.0
    try:
        for _ in range(3):
            report = engine.step()
        before, began = report.progress.env_steps, time.perf_counter()
        while time.perf_counter() - began < seconds:
            report = engine.step()
        return (report.progress.env_steps - before) / (time.perf_counter() - began)
    finally:
        engine.close()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
