"""Do the presets learn? `python bench/presets.py [TASK ...] [--seeds 0 1 2] [--table]`.

Each run is trained to its end and then evaluated greedily on 20 seeds that training never used. Its result is one file
in bench/results/presets. A run that has one is skipped, and an interrupted run is resumed from its folder in
.bench/presets, so that the benchmark continues where it was stopped. The score is that of the last checkpoint, not of
the best one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine

import tiltyard
from tiltyard.config.load import load
from tiltyard.run.folder import Run
from tiltyard.run.history import History

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / ".bench" / "presets"
RESULTS = ROOT / "bench" / "results" / "presets"
EPISODES = 20
FIRST_SEED = 900_000  # of the evaluations at the end


@dataclass(frozen=True)
class Task:
    env: str
    use: tuple[str, ...]
    goal: float | None  # mean greedy return; None where the result is only recorded
    settings: tuple[str, ...] = ()
    official: str | None = None  # the env of the score, if it is not the env of the training


TASKS = {
    "minigrid-empty": Task("MiniGrid-Empty-8x8-v0", ("minigrid",), 0.9, ("stop.env_steps=200000",)),
    "minigrid-doorkey": Task("MiniGrid-DoorKey-6x6-v0", ("minigrid", "memory"), 0.9),
    "inverted-pendulum": Task("InvertedPendulum-v5", ("mujoco",), 950, ("stop.env_steps=300000",)),
    "car-racing": Task("car-racing:fast", ("car-racing",), 700, official="car-racing:official"),
    "pong": Task("atari:pong", ("atari-fast",), 0),
    "hopper": Task("Hopper-v5", ("mujoco",), None),
    "halfcheetah": Task("HalfCheetah-v5", ("mujoco",), None),
}


def words(task: Task, seed: int) -> list[str]:
    return [f"use=[{', '.join(task.use)}]", *task.settings, f"seed={seed}", "track.tensorboard=false"]


def trained(name: str, seed: int) -> Run:
    """The finished run of a task and a seed; an interrupted one is resumed."""
    label = f"{name}-{seed}"
    for folder in sorted((RUNS / label).glob("[0-9]*")):
        run = Run(folder)
        return run if run.state() == "finished" else tiltyard.resume(folder)
    return tiltyard.train(TASKS[name].env, [*words(TASKS[name], seed), f"name={label}"])


def measure(name: str, seed: int) -> dict[str, Any]:
    task = TASKS[name]
    run = trained(name, seed)
    changes = [f"eval.seed={FIRST_SEED}", *([f"env.id={task.official}"] if task.official else [])]
    score = tiltyard.evaluate(run, changes, episodes=EPISODES, greedy=True)
    history, progress = History(run), run.status()["progress"]
    curves = {
        kind: [[step, round(value, 4)] for step, value in history.curve(metric).points(60)]
        for kind, metric in (("training", "train/return"), ("evaluations", "eval/return"))
    }
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "task": name,
        "env": task.env,
        "scored_on": task.official or task.env,
        "settings": words(task, seed),
        "seed": seed,
        "goal": task.goal,
        "return": score.mean,
        "interval": [score.low, score.high],
        "returns": score.returns,
        "episodes": EPISODES,
        "env_steps": progress["env_steps"],
        "training_seconds": round(progress["seconds"], 1),
        "cpu_seconds_of_this_process": round(own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine.describe(),
        "version": tiltyard.__version__,
        "curves": curves,
    }


def table() -> None:
    """Print all results as a Markdown table, a row for each task."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["task"], []).append(result)
    print("| env | presets | env steps | seeds | greedy return, 20 episodes each | goal | training, min |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, task in TASKS.items():
        rows = found.get(name)
        if rows is None:
            continue
        scores = ", ".join(f"{row['return']:.4g}" for row in rows)
        minutes = statistics.median(row["training_seconds"] for row in rows) / 60
        where = f"{task.env}, scored on {task.official}" if task.official else task.env
        cells = [where, " + ".join(f"`{use}`" for use in task.use), f"{rows[0]['env_steps']:,}"]
        cells += [", ".join(str(row["seed"]) for row in rows), scores]
        cells += ["recorded" if task.goal is None else f"{task.goal:g}", f"{minutes:.1f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description="train the presets and score them")
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 1001, 1002])
    parser.add_argument("--table", action="store_true", help="only print the results that are there")
    options = parser.parse_args()
    unknown = [name for name in options.tasks if name not in TASKS]
    if unknown:
        parser.error(f"unknown task {unknown[0]}")
    os.environ["TILTYARD_RUNS"] = str(RUNS)
    for name in [] if options.table else options.tasks or TASKS:
        load(TASKS[name].env, words(TASKS[name], 0))
        for seed in options.seeds:
            path = RESULTS / f"{name}-{seed}.json"
            if not path.exists():
                result = measure(name, seed)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(result, indent=1) + "\n")
    table()


if __name__ == "__main__":
    main()
