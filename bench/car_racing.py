"""Compare `car-racing:fast` with Gymnasium's CarRacing-v3: frames per second of CPU time, and pixels.

Both get the same actions in the same process, in alternating blocks of frames, so that a busy machine slows both. Every
reward and end must be identical; the program fails otherwise.

    python bench/car_racing.py [--frames 1000] [--seeds 1 2 3] [--json FILE]

    drive    follows the track: contacts with tiles, and bends     on the road, the one that counts
    random   random actions                                        mostly on the grass
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from tiltyard.envs.suites.car_racing.family import CarRacing

BLOCK = 50  # frames of one env before it is the other's turn


def steer(core: Any) -> np.ndarray:
    """The action that follows the track at 35 m/s, and at half of that in bends."""
    hull, track = core.car.hull, core.track
    x, y = hull.position
    near = min(range(len(track)), key=lambda i: (track[i][2] - x) ** 2 + (track[i][3] - y) ** 2)
    ahead = track[(near + 5) % len(track)]
    angle = math.remainder(math.atan2(ahead[3] - y, ahead[2] - x) - hull.angle - math.pi / 2, math.tau)
    wanted = 35.0 if abs(angle) < 0.2 else 17.5
    now = math.hypot(*hull.linearVelocity)
    return np.array([min(max(-2 * angle, -1), 1), 0.5 * (now < wanted), 0.3 * (now > 1.3 * wanted)], np.float32)


def record(kind: str, seed: int, frames: int) -> list[np.ndarray]:
    env, rng, actions = CarRacing("fast"), np.random.default_rng(seed), []
    env.reset(seed=seed)
    for _ in range(frames):
        actions.append(steer(env._core) if kind == "drive" else rng.uniform((-1, 0, 0), 1).astype(np.float32))
        if any(env.step(actions[-1])[2:4]):
            break
    return actions


def timed(env: Any, actions: list[np.ndarray]) -> tuple[float, list[Any]]:
    start = time.process_time()
    output = [env.step(action)[:4] for action in actions]
    return time.process_time() - start, output


def compare(kind: str, seed: int, frames: int) -> dict[str, Any]:
    """CPU milliseconds per frame of each env, median over blocks, and the error of the pixels."""
    actions = record(kind, seed, frames)
    envs = {
        "official": gymnasium.make("CarRacing-v3"),
        "fast": CarRacing("fast"),
        "fast, grey, size 48": CarRacing("fast", size=48, grey=True),
    }
    skipping = CarRacing("fast", frameskip=4, max_frames=10**6)  # holds each action, so it takes another path
    for env in (*envs.values(), skipping):
        env.reset(seed=seed)
    spent: dict[str, list[float]] = {name: [] for name in (*envs, "fast, frameskip 4")}
    errors: list[float] = []
    for begin in range(0, len(actions), BLOCK):
        block = actions[begin : begin + BLOCK]
        seen = {}
        for name, env in envs.items():
            seconds, seen[name] = timed(env, block)
            spent[name].append(1000 * seconds / len(block))
        seconds, _ = timed(skipping, block[::4])
        spent["fast, frameskip 4"].append(1000 * seconds / (4 * len(block[::4])))
        for one, other in zip(seen["fast"], seen["official"], strict=True):
            if one[1:] != other[1:]:
                sys.exit(f"error: {kind} {seed}: {one[1:]} is not {other[1:]}")
            errors.append(float(np.abs(one[0].astype(int) - other[0]).mean()))
    median = {name: statistics.median(values) for name, values in spent.items()}
    ratio = {name: median["official"] / value for name, value in median.items()}
    error = {"mean": statistics.mean(errors), "worst_frame": max(errors)}
    return {"kind": kind, "seed": seed, "frames": len(actions), "ms": median, "ratio": ratio, "pixel_error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record("random", 0, 2)  # compiles
    CarRacing("fast", size=48, grey=True).reset(seed=0)
    results = []
    for kind in ("drive", "random"):
        for seed in args.seeds:
            found = compare(kind, seed, args.frames)
            results.append(found)
            parts = [f"{name}: {found['ms'][name]:.3f} ms ({found['ratio'][name]:.1f}x)" for name in found["ms"]]
            error = found["pixel_error"]
            print(f"{kind} {seed}, {found['frames']} frames  " + "  ".join(parts), end="  ")
            print(f"pixel error {error['mean']:.3f}, worst frame {error['worst_frame']:.3f}", flush=True)
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
