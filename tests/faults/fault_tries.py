"""Trainings on a disk that fails: `python -m tests.faults.fault_tries TRIES`, with disk_faults.c preloaded.

Imports everything once and forks a process per try, which trains a run while calls fail, and then resumes it while they
work. Prints a line of JSON per try.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from tiltyard import api
from tiltyard.errors import TiltyardError
from tiltyard.failures import exit_code
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.run.history import History
from tiltyard.training.attempt import AttemptSetup
from tiltyard.training.preflight import prepare
from tiltyard.types import EnvSpec

FIELDS = ("armed", "skip", "left", "chance", "random", "cut", "calls", "injected")
FOREVER = 2**31
STEPS, UPDATES = 32, 16
EXPERIMENT: dict[str, Any] = {
    "name": "faulty",
    "env": {"id": "CartPole-v1"},
    "engine": {"kind": "serial", "envs": 2},
    "algo": {"rollout": STEPS // 2, "minibatch": STEPS, "epochs": 1},
    "eval": {"every": 0, "at_end": False},
    "stop": {"env_steps": STEPS * UPDATES},
    "track": {"tensorboard": False},
}


class Faults:
    """The control block that is shared with disk_faults.c."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def set(self, folder: Path | None, **fields: int) -> None:
        values = [int(folder is not None), *(fields.get(name, 0) for name in FIELDS[1:])]
        self._map[:] = b"\0" * len(self._map)
        place = 4 * len(FIELDS)
        name = os.fsencode(folder or "")
        self._map[place : place + len(name)] = name
        self._map[:place] = struct.pack(f"{len(FIELDS)}I", *values)

    def lift_after(self, seconds: float) -> None:
        """Let all calls work again, some seconds after the first that failed."""
        while not self.get("injected"):
            time.sleep(0.01)
        time.sleep(seconds)
        place = 4 * FIELDS.index("left")
        self._map[place : place + 4] = struct.pack("I", 0)

    def get(self, name: str) -> int:
        return int(struct.unpack(f"{len(FIELDS)}I", self._map[: 4 * len(FIELDS)])[FIELDS.index(name)])


def weights(run: Run) -> bytes:
    return (checkpoint.select(run).folder / "policies" / "main.safetensors").read_bytes()


def check(run: Run, expected: bytes) -> None:
    """AssertionError if the run lost anything: it must equal one that never met a fault."""
    status = run.status()
    assert status["state"] == "finished", status
    assert status["progress"]["env_steps"] == STEPS * UPDATES
    assert [record["env_steps"] for record in metrics.read(run)] == [STEPS * (i + 1) for i in range(UPDATES)]
    assert History(run).broken == []
    lines = run.metrics_file.read_bytes().splitlines()
    assert len(set(lines)) == len(lines), "a record was written twice"
    events = read_events(run)
    times = [event["time"] for event in events]
    assert times == sorted(times) and len(set(map(str, events))) == len(events), "events are out of order, or repeated"
    kept = checkpoint.list_checkpoints(run)
    assert checkpoint.unreadable(run) == [] and [checkpoint.verify(each.folder) for each in kept] == [None] * len(kept)
    assert weights(run) == expected, "resumed weights differ"


def attempt(run: Run, spec: EnvSpec, patience: float) -> int:
    """Train the run as `tiltyard resume` does after its checks; returns the exit code."""
    stored = run.experiment()
    save = stored.save.model_copy(update={"env_steps": 2 * STEPS, "patience": patience})
    setup = AttemptSetup(stored, stored.model_copy(update={"save": save}), spec)
    try:
        return api.run_training(run, setup, live=False).exit_code
    except TiltyardError as error:
        return exit_code(error)


def one_try(run: Run, spec: EnvSpec, faults: Faults, seed: int, calls: int) -> tuple[int, int]:
    """Train while calls fail, then without faults to the end; returns the first exit code and the number of faults."""
    rng = random.Random(seed)
    kind = ("one", "some", "all", "lasting")[seed % 4]
    chance, left = 64 if kind == "some" else 256, 1 if kind == "one" else FOREVER
    first = {"skip": rng.randrange(calls // 2), "random": rng.randrange(1, 2**31)}
    faults.set(run.folder, **first, left=left, chance=chance)
    if kind in ("some", "all"):
        threading.Thread(target=faults.lift_after, args=(rng.uniform(0.05, 0.6),), daemon=True).start()
    code = attempt(run, spec, patience=0.3 if kind == "lasting" else 60.0)
    injected = faults.get("injected")
    faults.set(None)
    assert code in (0, 75), f"exit code {code}"
    assert code == 75 or kind != "lasting", "it ended as if everything had been written"
    if code == 75:
        assert attempt(run, spec, patience=60.0) == 0
    return code, injected


def main(tries: int) -> None:
    faults = Faults(os.environ["TILTYARD_FAULTS"])
    checked = prepare(EXPERIMENT)
    whole = api.create_run(checked)
    faults.set(whole.folder, skip=FOREVER)
    assert attempt(whole, checked.spec, patience=60.0) == 0
    calls, expected = faults.get("calls"), weights(whole)
    for seed in range(tries):
        run = api.create_run(checked)
        if os.fork() == 0:
            found: dict[str, Any] = {"seed": seed, "folder": str(run.folder), "problem": ""}
            try:
                found["code"], found["injected"] = one_try(run, checked.spec, faults, seed, calls)
                check(run, expected)
            except BaseException:  # noqa: BLE001
                found["problem"] = traceback.format_exc()
            os.write(1, json.dumps(found).encode() + b"\n")
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
