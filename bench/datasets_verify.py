"""Measure `tiltyard data verify`: bytes per second from a warm cache, as single files and as shards.

One dataset of random images is written, verified, packed and verified again. For comparison, the same bytes are hashed
by one thread, which is the least that has to be done: `ratio` is verify's speed divided by that.

    python bench/datasets_verify.py [--episodes 400] [--steps 200] [--repeat 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from tiltyard.config.sections import Env
from tiltyard.data import dataset_file, shards, verify
from tiltyard.data.folder import files_on_disk
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import observation_specs
from tiltyard.processes.resources import usable_cores
from tiltyard.types import EnvSpec, Episode

SIDE = 64  # pixels of an observation


def write(folder: Path, episodes: int, steps: int) -> None:
    image = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
    spec = EnvSpec(obs=observation_specs(image, 1), action=action_spec(spaces.Discrete(4)))
    about = dataset_file.create_or_check(folder, dataset_file.about_env(Env(id="bench"), spec, seed=0), {})
    writer, rng = DatasetWriter(folder, about, {}), np.random.default_rng(0)
    (name,) = spec.obs
    for number in range(episodes):
        pixels = rng.integers(0, 256, (steps + 1, SIDE, SIDE, 3), np.uint8)
        action, reward = rng.integers(0, 4, (steps, 1)), np.zeros(steps, np.float32)
        writer.commit(number, [Episode({name: pixels}, action, reward, True, False, number, [], {})])
    writer.close()


def seconds(work: Callable[[], object], repeat: int) -> dict[str, float]:
    """Median wall time and CPU time over some repetitions, after one that fills the cache."""
    work()
    wall, cpu = [], []
    for _ in range(repeat):
        start, spent = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - spent)
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu), "best": min(wall)}


def hash_all(folder: Path) -> None:
    for file in files_on_disk(folder):
        hashlib.sha256((folder / file).read_bytes()).hexdigest()


def sound(folder: Path) -> None:
    found = verify.examine(folder)
    if found.damages:
        sys.exit(f"damaged: {found.damages[0]}")


def measure(folder: Path, repeat: int) -> dict[str, Any]:
    size = sum((folder / file).stat().st_size for file in files_on_disk(folder))
    checked, hashed = seconds(lambda: sound(folder), repeat), seconds(lambda: hash_all(folder), repeat)
    return {
        "files": len(list(files_on_disk(folder))),
        "bytes": size,
        "gb_per_s": size / checked["wall"] / 1e9,
        "best_gb_per_s": size / checked["best"] / 1e9,
        "gb_per_cpu_s": size / checked["cpu"] / 1e9,
        "one_thread_hash_gb_per_s": size / hashed["wall"] / 1e9,
        "ratio": hashed["wall"] / checked["wall"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="verify-"))
    try:
        write(folder, args.episodes, args.steps)
        results = {"single files": measure(folder, args.repeat)}
        start = time.perf_counter()
        packed = shards.pack(folder)
        results["pack"] = {"bytes": packed.bytes, "gb_per_s": packed.bytes / (time.perf_counter() - start) / 1e9}
        results["shards"] = measure(folder, args.repeat)
    finally:
        shutil.rmtree(folder)
    machine = {"cores": usable_cores(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    text = json.dumps({"machine": machine, **results}, indent=2)
    sys.stdout.write(text + "\n")
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
