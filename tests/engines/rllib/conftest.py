"""Engines on a real Ray cluster, started by the engine itself or shared by the tests."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Factory `engine(ENV, "key=value", ..., continues=folder)`; closes all engines in order of creation."""
    made: list[Engine] = []
    own_mark()  # starts the reaper, which runs until this process exits

    def make(target: str, *words: str, continues: Path | None = None) -> Engine:
        loaded = load(target, ["engine.kind=rllib", *words])
        experiment = loaded.experiment
        spec = probe(experiment.env, base=loaded.base, previous=experiment.model.previous)
        made.append(make_engine(experiment, spec, loaded.base, continues))
        return made[-1]

    yield make
    for each in made:
        each.close()


OTHER_CLUSTER = """
import sys, ray
cpus = int(sys.argv[2])
ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
for line in sys.stdin:
    print(ray.get(ray.remote(lambda: 6 * 7).remote()), flush=True)
"""


@contextmanager
def other_cluster(token: Path, cpus: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a Ray cluster in another process with this token; yield its address and that process."""
    place = tempfile.mkdtemp(prefix="tyt-", dir="/tmp")
    owner = subprocess.Popen(
        [sys.executable, "-c", OTHER_CLUSTER, place, str(cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
    )
    assert owner.stdin is not None and owner.stdout is not None
    try:
        yield owner.stdout.readline().strip(), owner
    finally:
        owner.stdin.close()
        owner.wait(60)
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text("5" * 64)
    return token


@pytest.fixture(scope="session")
def ray_address(ray_token: Path) -> Iterator[str]:
    """Address of a cluster shared by the tests: starting Ray takes longer than most of them."""
    with other_cluster(ray_token, cpus=4) as (address, _):
        yield address


@pytest.fixture
def shared_engine(engine: Make, ray_address: str, ray_token: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Factory like `engine`, but on the shared cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(ray_token))

    def make(target: str, *words: str, continues: Path | None = None) -> Engine:
        address = [] if "engine.kind=serial" in words else [f"engine.address={ray_address}"]
        return engine(target, *words, *address, continues=continues)

    return make


def children() -> set[int]:
    """Return all descendants of this process except zombies."""
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
