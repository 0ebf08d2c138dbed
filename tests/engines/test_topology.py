"""Number of workers and threads: from the env, from the free cores, and unchanged if a run is resumed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.engines import topology as topologies
from tiltyard.engines.topology import Topology, learner_threads, topology
from tiltyard.envs.probe import probe
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.fork_server import ForkServer
from tiltyard.processes.resources import free_cores, usable_cores
from tiltyard.run.state_file import write_trees
from tiltyard.training.preflight import start_early
from tiltyard.types import EnvSpec


def experiment(*words: str) -> Experiment:
    small = ["env.native=false", "engine.envs=12", "algo.rollout=16", "algo.minibatch=32"]
    return load("CartPole-v1", [*small, *words]).experiment


@pytest.fixture(scope="module")
def slow() -> EnvSpec:
    """Spec of CartPole with a step time of one second."""
    return replace(probe(experiment().env, base=()), step_seconds=1.0)


@contextmanager
def one_core_busy() -> Iterator[None]:
    """Keep one core busy with another process; clear the cached number of free cores."""
    words = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as spinner:
        try:
            assert spinner.stdout is not None
            spinner.stdout.readline()
            free_cores.cache_clear()
            yield
        finally:
            spinner.kill()
            free_cores.cache_clear()


def test_native_envs_get_a_worker_only_in_async_mode() -> None:
    for mode, workers in (("sync", 0), ("async", 1)):
        loaded = load("CartPole-v1", [f"engine.mode={mode}"]).experiment
        assert topology(loaded, probe(loaded.env, base=(), previous=False)).workers == workers


def set_cores(monkeypatch: pytest.MonkeyPatch, usable: int, free: float) -> None:
    """Set what a machine with that many cores measures."""
    monkeypatch.setattr(topologies, "usable_cores", lambda: usable)
    monkeypatch.setattr(topologies, "free_cores", lambda: free)


@pytest.mark.parametrize(
    ("mode", "usable", "free", "workers", "why"),
    [
        ("sync", 4, 4.0, 4, "4 cores available"),
        ("sync", 4, 3.0, 3, "4 cores available, 1 of them busy"),
        ("sync", 4, 2.4, 3, "4 cores available, 1 of them busy"),  # 40 % of a core are enough for a worker
        ("sync", 2, 1.0, 0, "2 cores available, 1 of them busy"),
        ("sync", 1, 1.0, 0, "1 core available"),
        ("async", 4, 3.0, 2, "4 cores available, 1 of them busy"),  # one core is for the learner
        ("async", 2, 1.0, 1, "2 cores available, 1 of them busy"),
    ],
)
def test_there_is_one_worker_per_free_core(
    slow: EnvSpec, monkeypatch: pytest.MonkeyPatch, mode: str, usable: int, free: float, workers: int, why: str
) -> None:
    set_cores(monkeypatch, usable, free)
    found = topology(experiment(f"engine.mode={mode}"), slow)
    assert found.workers == workers and found.why.endswith(why)


def test_resumed_run_keeps_its_number_of_groups(slow: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number, from a new measurement, would cut running episodes."""
    set_cores(monkeypatch, 2, 1.0)
    assert topology(experiment(), slow, 3).workers == 3
    set_cores(monkeypatch, 2, 2.0)
    assert topology(experiment(), slow, 1).workers == 0
    assert topology(experiment(), replace(slow, step_seconds=0.0), 1).workers == 0
    set_cores(monkeypatch, 4, 4.0)
    assert topology(experiment(), slow, 5).workers == 4, "twelve envs are no five equal groups"


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_core_used_by_another_process_is_not_free(slow: EnvSpec) -> None:
    with one_core_busy():
        assert 1 <= free_cores() < usable_cores() - 0.5
        assert "of them busy" in topology(experiment(), slow).why
    assert free_cores() >= 1


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_free_cores_are_measured_before_the_fork_server_uses_one(slow: EnvSpec) -> None:
    with one_core_busy():
        free_cores()
        with ForkServer() as server:
            start_early(server, experiment("engine.mode=async"))  # measures again, before anything else
        seen = free_cores.cache_info()
        assert seen.currsize == 1 and "of them busy" in topology(experiment("engine.mode=async"), slow).why
        assert free_cores.cache_info().misses == seen.misses


def test_number_of_threads_follows_the_free_cores(slow: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "SHORT_UPDATE", 0.0)  # every gradient step is long enough for a measurement,
    monkeypatch.setattr(topologies, "MIN_SPEEDUP", 0.0)  # and every measurement favours threads

    def threads(*words: str, usable: int = 4, free: float = 4.0, workers: int = 0, before: int | None = None) -> Any:
        settings = experiment(*words)
        net = PolicyNet(slow, settings.model, (), seed=0)
        set_cores(monkeypatch, usable, free)
        return learner_threads(settings, slow, net, Topology(workers, "", threads=before))

    assert threads()[0] == 4
    assert threads(free=2.8)[0] == 3 and threads(free=2.4)[0] == 2
    assert threads(free=1.0) == (1, "the other cores are busy")
    assert threads("engine.learners=2")[0] == 2
    assert threads("engine.mode=async", workers=1)[0] == 3
    assert threads("engine.mode=async", workers=1, free=3.0)[0] == 2, "one of the three is the worker's"
    assert threads(usable=1, free=1.0) == (1, "no other core available")
    assert threads("engine.threads=2") == (2, "as set")
    assert threads(before=3, free=1.0) == (3, "as before")
    assert threads(before=3, usable=2, free=2.0)[0] == 2, "three are no longer there"


def test_resume_keeps_the_threads_and_fork_measures_again(tmp_path: Path, slow: EnvSpec) -> None:
    """Another number of threads would round differently."""
    engine: Any = make_engine(experiment("engine.workers=0", "engine.threads=3"), slow, ())
    write_trees(tmp_path, engine.save(tmp_path))
    engine.close()
    for same_run, kept in ((True, 3), (False, None)):
        engine = make_engine(experiment("engine.workers=0"), slow, (), tmp_path, same_run=same_run)
        assert engine.chosen.threads == kept
        engine.close()
