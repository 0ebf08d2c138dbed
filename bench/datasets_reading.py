"""Random windows of a dataset against readers of whole episodes, and the time to open a manifest of a million episodes.

    python bench/datasets_reading.py [--episodes 20] [--rounds 5] [--manifest 1_000_000] [--folder DIR] [--json FILE]

All readers get the same episodes: `car-racing:fast` in 64 x 64 x 3 pixels, random actions that are held for 8 frames.
They deliver the same batches: 16 windows of 32 steps with observations, actions, rewards and ends. One process, one
thread, CPU time, files in the page cache; readers alternate, and each row is the median over the rounds.

    tiltyard           dataset.windows(32), up to 8 windows per row group
    minari, tfrecord   read an episode, take 8 windows of it; "one window" takes 1, which mixes episodes as well as ours

MB/s are pixels delivered, those that windows of one read share counted once. `once per epoch` counts them once for all
reads of an epoch. Aims: 400 MB/s; 3 times Minari and TFRecord; the manifest in 2 s on two idle cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import machine
import numpy as np

from tiltyard.config.sections import Env
from tiltyard.data import dataset_file, manifest, tfrecord
from tiltyard.data.exports import Wanted, export
from tiltyard.data.loader import Dataset
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import observation_specs
from tiltyard.envs.suites.car_racing.family import CarRacing
from tiltyard.types import EnvSpec, Episode

LENGTH, BATCH, PER_READ, SIZE = 32, 16, 8, 64
AIM_MB, AIM_RATIO, AIM_SECONDS = 400, 3.0, 2.0
OPEN = """
import sys, time
from pathlib import Path
from tiltyard.data import manifest
wall, busy = time.perf_counter(), time.process_time()
found = manifest.read(Path(sys.argv[1]))
print(len(found), time.perf_counter() - wall, time.process_time() - busy)
"""

Reads = Iterator[tuple[int, int]]
"""(episode, start) of each window, once it is in a batch."""


def play(seed: int) -> Episode:
    env, rng = CarRacing("fast", size=SIZE), np.random.default_rng(seed)
    obs, actions, rewards, over, cut = [env.reset(seed=seed)[0]], [], [], False, False
    while not (over or cut):
        if len(actions) % 8 == 0:
            held = rng.uniform((-1, 0, 0), (1, 1, 0.4)).astype(np.float32)
        picture, reward, over, cut, _ = env.step(held)
        obs.append(picture)
        actions.append(held)
        rewards.append(reward)
    return Episode({"obs": np.stack(obs)}, np.stack(actions), np.asarray(rewards, np.float32), over, cut, seed)


def make(folder: Path, episodes: int) -> None:
    env = CarRacing("fast", size=SIZE)
    spec = EnvSpec(observation_specs(env.observation_space, 1), action_spec(env.action_space))
    about = dataset_file.about_env(Env(id="car-racing:fast", options={"size": SIZE}), spec, seed=0)
    about = dataset_file.create_or_check(folder, about, dataset_file.provenance(["bench/datasets_reading.py"]))
    writer = DatasetWriter(folder, about, {})
    for number in range(episodes):
        writer.commit(number, [play(number)])
    writer.close()


# ---------------------------------------------------------------------------------------------- readers


def tiltyard_reads(folder: Path, seed: int) -> Reads:
    for batch in Dataset(folder).windows(LENGTH, batch=BATCH, per_read=PER_READ, seed=seed, epochs=1):
        for episode, start in zip(batch["episode"], batch["start"], strict=True):
            yield int(episode), int(start)


def whole_episodes(read: Callable[[int], dict[str, np.ndarray]], count: int, seed: int, per_read: int) -> Reads:
    """Windows of episodes that are read as a whole, in the same batches."""
    rng, row, batch = np.random.default_rng(seed), 0, {}
    for episode in rng.permutation(count):
        arrays = read(int(episode))
        steps = len(arrays["reward"])
        for start in rng.choice(steps - LENGTH + 1, per_read, replace=False):
            if row == 0:
                batch = {name: np.empty((BATCH, LENGTH, *each.shape[1:]), each.dtype) for name, each in arrays.items()}
            for name, each in arrays.items():
                batch[name][row] = each[start : start + LENGTH]
            row = (row + 1) % BATCH
            yield int(episode), int(start)


def minari_reader(folder: Path) -> Callable[[int], dict[str, np.ndarray]]:
    import minari

    opened = minari.MinariDataset(folder / "data")

    def read(index: int) -> dict[str, np.ndarray]:
        found = opened[index]
        ends = {"terminated": found.terminations, "truncated": found.truncations}
        return {"obs": found.observations, "action": found.actions, "reward": found.rewards, **ends}

    return read


def tfrecord_reader(folder: Path) -> Callable[[int], dict[str, np.ndarray]]:
    """Each episode is in its own file, so that any of them can be read alone."""
    files = sorted(folder.iterdir())

    def read(index: int) -> dict[str, np.ndarray]:
        (data,) = tfrecord.records(files[index])
        found = tfrecord.decode_example(data)
        reward = found["reward"]
        ends = np.zeros((2, len(reward)), bool)
        ends[:, -1] = found["terminated"][0], found["truncated"][0]
        obs = np.frombuffer(found["obs.obs"], np.uint8).reshape(-1, SIZE, SIZE, 3)
        action = found["action"].reshape(len(reward), -1)
        return {"obs": obs, "action": action, "reward": reward, "terminated": ends[0], "truncated": ends[1]}

    return read


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def readers(folder: Path, place: Path, count: int) -> dict[str, Callable[[int], Reads]]:
    found: dict[str, Callable[[int], Reads]] = {"tiltyard": lambda seed: tiltyard_reads(folder, seed)}

    def add(name: str, read: Callable[[int], dict[str, np.ndarray]]) -> None:
        found[name] = lambda seed: whole_episodes(read, count, seed, PER_READ)
        found[f"{name}, one window"] = lambda seed: whole_episodes(read, count, seed, 1)

    for name, package, open_reader in (
        ("minari", "minari", minari_reader),
        ("tfrecord", "crc32c", tfrecord_reader),
    ):
        if find_spec(package) is None:
            print(f"{name} is left out: it requires the package {package} (pip install 'tiltyard[data]')")
            continue
        out = place / f"{name}-v0"
        export(folder, Wanted(name, out, shards=count if name == "tfrecord" else None))
        add(name, open_reader(out))
    return found


def measure(reads: Reads, by_row_group: bool, count: int) -> dict[str, float]:
    """Deliver an epoch. Seconds of CPU, pixels in MB: all, once per read, and once per epoch."""
    picked: list[tuple[int, int]] = []
    begin = time.process_time()
    picked.extend(reads)
    seconds = time.process_time() - begin
    per_read: dict[tuple[int, int], np.ndarray] = {}
    whole = np.zeros((count, 2000), bool)
    for episode, start in picked:
        read = (episode, start // 64 if by_row_group else 0)
        per_read.setdefault(read, np.zeros(2000, bool))[start : start + LENGTH] = True
        whole[episode, start : start + LENGTH] = True
    frame = SIZE * SIZE * 3 / 1e6
    once = sum(int(each.sum()) for each in per_read.values()) * frame
    return {
        "seconds": seconds,
        "windows": len(picked),
        "all": len(picked) * LENGTH * frame / seconds,
        "mb_per_s": once / seconds,
        "once_per_epoch": float(whole.sum()) * frame / seconds,
    }


def windows(place: Path, episodes: int, rounds: int) -> dict[str, dict[str, float]]:
    folder = place / "data"
    if not folder.exists():
        make(folder, episodes)
    count = len(Dataset(folder))
    exports = Path(tempfile.mkdtemp(dir=place))
    known = readers(folder, exports, count)
    disk = {"tiltyard": megabytes(folder), **{each.name[:-3]: megabytes(each) for each in exports.iterdir()}}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in known}
    for seed in range(-1, rounds):  # the first round fills the page cache
        for name, reads in known.items():
            result = measure(reads(max(0, seed)), name == "tiltyard", count)
            if seed >= 0:
                found[name].append(result)
    medians = {
        name: {key: statistics.median(each[key] for each in results) for key in results[0]}
        for name, results in found.items()
    }
    for name, each in medians.items():
        each["disk_mb"] = disk[name.partition(",")[0]]
        each["ratio"] = statistics.median(
            ours["mb_per_s"] / theirs["mb_per_s"] for ours, theirs in zip(found["tiltyard"], found[name], strict=True)
        )
    return medians


# ---------------------------------------------------------------------------------------------- manifest


def write_manifest(folder: Path, episodes: int) -> None:
    """Sealed manifests of 1,000 lines each, as collectors leave them. Their files are not there."""
    (folder / manifest.FOLDER).mkdir(parents=True)
    meta = {"env": "car-racing:fast", "policy": {"run": "runs/car/2026-11-18", "env_steps": 1_000_000}}
    for first in range(0, episodes, manifest.SEALED_AFTER):
        lines = []
        for number in range(first, min(episodes, first + manifest.SEALED_AFTER)):
            entry = {
                "episode": number,
                "agent": "",
                "file": f"episodes/{number // 1000:05d}/{number:09d}.parquet",
                "offset": 0,
                "bytes": 700_000 + number % 1000,
                "sha256": hashlib.sha256(str(number).encode()).hexdigest(),
                "rows": 1001,
                "length": 1000,
                "seed": number * 7919 % 2**31,
                "return": number / 7,
                "terminated": False,
                "truncated": True,
                "meta": json.dumps(meta),
            }
            body = json.dumps(entry)[:-1].encode()
            lines.append(body + f', "crc": "{zlib.crc32(body):08x}"}}\n'.encode())
        data = b"".join(lines)
        path = folder / manifest.FOLDER / f"writer-{first // manifest.SEALED_AFTER:04d}.jsonl"
        path.write_bytes(data + manifest.seal_line(data))


def opening(place: Path, episodes: int, rounds: int) -> dict[str, float]:
    """Seconds of reading the manifests, in a new process each time; the least disturbed one counts."""
    folder = place / f"manifest-{episodes}"
    if not folder.exists():
        write_manifest(folder, episodes)
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-c", OPEN, str(folder)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        if int(output[0]) != episodes:
            raise SystemExit(f"{output[0]} of {episodes} episodes were read")
        found.append((float(output[1]), float(output[2])))
    return {"episodes": episodes, "wall": min(each[0] for each in found), "cpu": min(each[1] for each in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--manifest", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="keep the data here, and use what is there")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = asked.folder or Path(temporary)
        result: dict[str, Any] = {"machine": machine.describe(), "load": os.getloadavg()[0]}
        result["windows"] = windows(place, asked.episodes, asked.rounds)
        print(
            f"{'reader':<22} {'MB/s':>8} {'tiltyard is':>12} {'once per epoch':>15} {'windows/s':>10} {'disk, MB':>9}"
        )
        for name, each in result["windows"].items():
            numbers = f"{each['mb_per_s']:8.0f} {each['ratio']:10.1f} x {each['once_per_epoch']:15.0f}"
            print(f"{name:<22} {numbers} {each['windows'] / each['seconds']:10.0f} {each['disk_mb']:9.0f}")
        if asked.manifest:
            opened = result["manifest"] = opening(place, asked.manifest, asked.rounds)
            print(f"manifest of {asked.manifest:,} episodes: {opened['wall']:.2f} s, {opened['cpu']:.2f} s of CPU")
        print(f"aims: {AIM_MB} MB/s, {AIM_RATIO:g} times minari and tfrecord, {AIM_SECONDS:g} s on two idle cores")
    out = asked.json or Path(__file__).parent / "results" / f"datasets_reading-{datetime.now(UTC):%Y-%m-%d}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(out, file=sys.stderr)


if __name__ == "__main__":
    main()
