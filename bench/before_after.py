"""Throughput of this checkout beside another one: interleaved pairs, env steps per second and per CPU-second.

    git worktree add ../before REVISION
    python bench/before_after.py ../before --pairs 9 --out pairs.jsonl

Every run is one line of the output file; with the same file, the script continues where it was stopped. In a pair, the
two checkouts take turns in going first. Ratios are medians over pairs of this checkout divided by the other one; on a
busy machine only env steps per CPU-second mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from systems import NATURE

HERE = Path(__file__).resolve().parents[1]
LSTM = {"model.memory.kind": "lstm", "engine.envs": 16, "algo.rollout": 64, "algo.minibatch": 256, "algo.epochs": 2}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole": ("CartPole-v1", {"use": "[classic-fast]"}),
    "pong": ("atari:pong", NATURE),
    "lstm": ("CartPole-v1", LSTM),
}


def measure(checkout: Path, task: str, seconds: float, seed: int) -> dict[str, Any]:
    """Train with the code of a checkout and this interpreter; returns the last line of bench/peers/ours.py."""
    experiment, settings = TASKS[task]
    options = ["--seconds", str(seconds), "--warmup", "3", "--seed", str(seed)]
    words = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, str(HERE / "bench" / "peers" / "ours.py"), *options, experiment, *words]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {checkout}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of this checkout beside another one.")
    parser.add_argument("other", type=Path, help="a checkout of the code before")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["cartpole", "pong"])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("before_after.jsonl"))
    options = parser.parse_args()
    checkouts = {"before": options.other.resolve(), "after": HERE}
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for task in options.tasks:
        for pair in range(options.pairs):
            for which in list(checkouts) if pair % 2 == 0 else list(checkouts)[::-1]:
                if any((row["task"], row["pair"], row["which"]) == (task, pair, which) for row in rows):
                    continue
                found = measure(checkouts[which], task, options.seconds, pair)
                rows.append({"task": task, "pair": pair, "which": which, **found})
                with options.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
        for unit in ("steps_per_second", "steps_per_cpu_second"):
            of = {
                which: {r["pair"]: r[unit] for r in rows if (r["task"], r["which"]) == (task, which)}
                for which in checkouts
            }
            ratios = [of["after"][pair] / of["before"][pair] for pair in of["after"] if pair in of["before"]]
            middle = {which: statistics.median(values.values()) for which, values in of.items()}
            print(
                f"{task:<10}{unit:<22}before {middle['before']:>10,.0f}  after {middle['after']:>10,.0f}  "
                f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs)"
            )


if __name__ == "__main__":
    main()
