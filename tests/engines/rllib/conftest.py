"""Engines on a real Ray, started and ended for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.envs.probe import probe
from tiltyard.processes.reaper import own_mark
from tiltyard.types import Engine

Make = Callable[..., Engine]
SMALL = ("algo.rollout=32", "algo.minibatch=64", "algo.epochs=2")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Make]:
    """engine(ENV, "key=value", ..., continues=folder): closed at the end, in the order they were made."""
    made: list[Engine] = []
    own_mark()  # starts the reaper, which lives as long as this process

    def make(target: str, *words: str, continues: Path | None = None) -> Engine:
        loaded = load(target, ["engine.kind=rllib", *words])
        experiment = loaded.experiment
        spec = probe(experiment.env, base=loaded.base, previous=experiment.model.previous)
        made.append(make_engine(experiment, spec, loaded.base, continues))
        return made[-1]

    yield make
    for each in made:
        each.close()


def children() -> set[int]:
    """All descendants of this process except zombies."""
    import os

    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found: set[int] = set()
    wave = {os.getpid()}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave} - found
        found |= wave
    return found
