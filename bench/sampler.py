"""Compare the sampler with a bare loop over the same envs: `python bench/sampler.py [TASK ...]`.

The bare loop is the code one would write without Tiltyard: random actions drawn in advance, a reset when an episode
ends, no results kept. The sampler is `tiltyard bench` with one process. Measurements alternate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "peers"))


def pong(rows: int) -> Any:
    import os

    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", rows, num_threads=len(os.sched_getaffinity(0)))


def doom(rows: int) -> Any:
    from doom import DoomBasic

    return [DoomBasic() for _ in range(rows)]


TASKS: dict[str, tuple[str, int, Callable[[int], Any]]] = {  # env id, rows, the same rows without Tiltyard
    "cartpole": (
        "CartPole-v1",
        64,
        lambda rows: gymnasium.make_vec("CartPole-v1", rows, vectorization_mode="vector_entry_point"),
    ),
    "lunarlander": ("LunarLander-v3", 16, lambda rows: [gymnasium.make("LunarLander-v3") for _ in range(rows)]),
    "pong": ("atari:pong", 32, pong),
    "doom_basic": (f"{BENCH / 'peers' / 'doom.py'}:DoomBasic", 8, doom),
}


def bare(make: Callable[[int], Any], rows: int, seconds: float) -> float:
    """Env steps per second of the bare loop."""
    envs = make(rows)
    rng = np.random.default_rng(0)
    steps, began = 0, 0.0
    if isinstance(envs, list):
        actions = rng.integers(0, envs[0].action_space.n, (4096, rows)).tolist()
        for row, env in enumerate(envs):
            env.reset(seed=row)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            for env, action in zip(envs, actions[steps // rows % 4096], strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += rows
    else:
        choices = rng.integers(0, envs.single_action_space.n, (4096, rows))
        envs.reset(seed=0)
        began = time.perf_counter()
        idle = 0  # rows that reset automatically ignore the action of their next step
        while time.perf_counter() - began < seconds:
            _, _, terminated, truncated, _ = envs.step(choices[steps // rows % 4096])
            idle += int((terminated | truncated).sum())
            steps += rows
        steps -= idle
    return steps / (time.perf_counter() - began)


def sampled(target: str, rows: int, seconds: float) -> float:
    """Env steps per second reported by `tiltyard bench`."""
    command = [sys.executable, "-m", "tiltyard", "bench", target, f"engine.envs={rows}", "--workers", "1"]
    done = subprocess.run([*command, "--seconds", str(seconds), "--json"], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["best"]["env_steps_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description="compare the sampler with a bare loop")
    parser.add_argument("tasks", nargs="*", default=[*TASKS], help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for task in options.tasks:
        target, rows, make = TASKS[task]
        pairs = [
            (bare(make, rows, options.seconds), sampled(target, rows, options.seconds)) for _ in range(options.rounds)
        ]
        alone, ours = (median(side) for side in zip(*pairs, strict=True))
        ratio = median(each[1] / each[0] for each in pairs)
        print(
            f"{task}: bare {alone:,.0f}, sampler {ours:,.0f} env steps per second; median ratio {ratio:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
