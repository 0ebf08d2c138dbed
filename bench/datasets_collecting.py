"""What collecting costs beyond stepping the env: the same episodes with and without storing, in alternating pairs.

    python bench/datasets_collecting.py [--pairs 60] [--folder /scratch/me] [--json FILE]

One process has two copies of the env. Of each pair, one copy plays some episodes without storing them and the other
plays the same seeds with the same random actions as a worker does, in changing order. Pairs are short, so that a busy
machine slows both; the interval is a bootstrap over pairs, and a result counts only if the whole interval is below the
target. CPU seconds are those of the process tree (Doom's engine is a separate process) with the thread that compresses,
hashes and writes, until everything is on disk. Wall seconds include waiting for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from floor import cpu_seconds
from machine import busy_cores, describe

from tiltyard.collection import worker
from tiltyard.collection.actors import Mixture
from tiltyard.collection.collect import prepare
from tiltyard.collection.committed import Committed
from tiltyard.collection.request import Request, create
from tiltyard.data import seeds
from tiltyard.data.claims import Claims
from tiltyard.data.folder import read_episodes
from tiltyard.data.writer import DatasetWriter
from tiltyard.evaluation.recording import EpisodeRecorder
from tiltyard.evaluation.rollouts import EpisodeSet, players

ENVS = {
    "doom:take_cover": (["env.options.height=64", "env.options.width=64"], 1.12, 4),
    "car-racing:official": ([], 1.01, 1),
}  # settings, target, episodes in each half of a pair
MAX_STEPS = 300
WARM_UP = 4  # pairs that are not counted: imports and caches
CODECS = (("none", None), ("lz4", None), ("snappy", None), ("zstd", 1), ("zstd", 3))


class Fixed:
    """Episodes first .. end - 1 of a dataset, without claims."""

    def __init__(self) -> None:
        self.left: Iterator[tuple[int, int]] = iter(())

    def next(self, copy: int) -> tuple[int, int] | None:
        return next(self.left, None)


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    work()
    return cpu_seconds() - cpu, time.perf_counter() - wall


def compare(env: str, folder: Path, pairs: int) -> dict[str, Any]:
    settings, target, episodes = ENVS[env]
    total = (pairs + WARM_UP) * episodes
    prepared = prepare(Request(env, folder / "data", total, settings, seed=0, max_steps=MAX_STEPS))
    task, about = worker.Task.from_json(prepared.task()), create(prepared)
    policy = Mixture(task.policies, task.spec, False)
    wanted = EpisodeSet(task.env, task.spec, task.base, False, range(total), 1, 0)
    fixed, steps = Fixed(), [0]
    writer = DatasetWriter(prepared.folder, about, {})
    with ExitStack() as stack:
        claims = stack.enter_context(Claims(prepared.folder))
        notify: Callable[[dict[str, Any]], None] = lambda message: steps.append(message["steps"])  # noqa: E731
        committer = stack.enter_context(worker.Committer(writer, claims, Committed(prepared.folder, total), notify))
        source = worker.ClaimedEpisodes(0, total, claims, Committed(prepared.folder, total), committer)

        def recorder(group: Any) -> EpisodeRecorder:
            return EpisodeRecorder(group, source.keep, policy.describe, save_info=False)

        def collect() -> None:
            storing.play(cancelled=committer.check)
            committer.flush()

        plain = stack.enter_context(players(policy.begin, wanted, fixed))
        storing = stack.enter_context(players(policy.begin, wanted, source, recorder=recorder))
        found: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for index in range(pairs + WARM_UP):
            numbers = range(index * episodes, (index + 1) * episodes)
            fixed.left = iter([(number, seeds.episode_seed(0, number)) for number in numbers])
            # The worker's own code, limited to the episodes of this pair.
            source._committed = committer._committed = Committed(prepared.folder, numbers.stop)
            source._committed.refresh()
            halves = {}
            for half in (("plain", "stored"), ("stored", "plain"))[index % 2]:
                halves[half] = measured(plain.play if half == "plain" else collect)
            if index >= WARM_UP:
                found.append((halves["plain"], halves["stored"]))
            else:
                steps.clear()
    size = sum(path.stat().st_size for path in prepared.folder.glob("episodes/*/*"))
    return {
        "env": env,
        "settings": settings,
        "target": target,
        "pairs": pairs,
        "env_steps": sum(steps),
        "cpu": ratio(np.array([[a[0], b[0]] for a, b in found])),
        "wall": ratio(np.array([[a[1], b[1]] for a, b in found])),
        "cpu_us_per_step": (1e6 * np.array([[a[0], b[0]] for a, b in found]).sum(axis=0) / sum(steps)).tolist(),
        "bytes_per_episode": size / total,
        "codecs": codecs(prepared.folder),
    }


def ratio(pairs: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Sum of the second column over that of the first, and its 95 % interval."""
    drawn = np.random.default_rng(0).integers(len(pairs), size=(4_000, len(pairs)))
    sums = pairs[drawn].sum(axis=1)
    low, high = np.percentile(sums[:, 1] / sums[:, 0], [2.5, 97.5])
    total = pairs.sum(axis=0)
    each = (pairs[:, 1] / pairs[:, 0]).tolist()
    return {"ratio": float(total[1] / total[0]), "low": float(low), "high": float(high), "pairs": each}


def codecs(folder: Path) -> list[dict[str, Any]]:
    """Size and CPU time of the observations in Parquet with each codec."""
    episodes = [next(iter(each.obs.values())) for each in read_episodes(folder)]
    raw, steps, found = sum(each.nbytes for each in episodes), sum(map(len, episodes)), []
    for codec, level in CODECS:
        times, size = [], 0
        for _ in range(3):
            cpu, size = time.process_time(), 0
            for obs in episodes:
                width = obs[0].nbytes
                column = pa.Array.from_buffers(
                    pa.binary(width), len(obs), [None, pa.py_buffer(np.ascontiguousarray(obs))]
                )
                sink = pa.BufferOutputStream()
                pq.write_table(
                    pa.table({"obs": column}),
                    sink,
                    row_group_size=64,
                    compression=codec,
                    compression_level=level,
                    use_dictionary=False,
                    write_statistics=False,
                    write_page_checksum=True,
                )
                size += sink.getvalue().size
            times.append(time.process_time() - cpu)
        name = codec + (f" {level}" if level else "")
        found.append({"codec": name, "us_per_step": 1e6 * min(times) / steps, "size": size / raw})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--envs", nargs="+", default=list(ENVS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, busy = [], busy_cores()
    print(f"other programs keep {busy:.1f} cores busy")
    for env in args.envs:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            found = compare(env, folder, args.pairs)
        finally:
            shutil.rmtree(folder)
        results.append(found)
        cpu, wall, us = found["cpu"], found["wall"], found["cpu_us_per_step"]
        reached = "reached" if cpu["high"] <= found["target"] else "missed" if cpu["low"] > found["target"] else "open"
        print(
            f"{env}: CPU ratio {cpu['ratio']:.3f} [{cpu['low']:.3f}, {cpu['high']:.3f}], target {found['target']} "
            f"{reached}; {us[0]:.0f} -> {us[1]:.0f} us per env step; wall {wall['ratio']:.2f}"
        )
        for codec in found["codecs"]:
            numbers = f"{codec['us_per_step']:7.1f} us per step, {100 * codec['size']:5.1f} % of raw"
            print(f"  {codec['codec']:<8}{numbers}", flush=True)
    path = args.json or Path(__file__).parent / "results" / f"datasets_collecting-{date.today()}.json"
    facts = {"date": str(date.today()), "machine": describe(), "busy_cores": busy, "load": os.getloadavg()[0]}
    path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
