"""Fixtures for Slurm clusters: a shared one, and separate ones with special options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster

SITE = """
profiles:
  cluster:
    launcher: slurm
    resources: {cpus: 1, time: "1:00:00"}
    set: {engine.kind: serial}
"""


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    cluster = Cluster("--nodes", "2", "--cpus", "2")
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared_cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The shared cluster, with a site file that has the profile `cluster`."""
    return _enter(shared_cluster, monkeypatch)


@pytest.fixture
def own_cluster(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Start a separate cluster: own_cluster("--speed", "20", conf="JobRequeue=0")."""
    started: list[Cluster] = []

    def start(*options: str, conf: str = "") -> Cluster:
        started.append(Cluster(*options, conf=conf))
        return _enter(started[-1], monkeypatch)

    yield start
    for each in started:
        each.close()


def _enter(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("TILTYARD_HEARTBEAT", "1")
    Path("tiltyard.yaml").write_text(SITE)
    return cluster
