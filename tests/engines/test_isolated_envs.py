"""env.isolate, env.decorrelate and engine.affinity in whole engines and runs: same weights, no process left."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard as product
from tests.conftest import Command
from tests.engines.test_local import SHORT, TWO, weights
from tests.engines.test_serial import SMALL
from tests.envs.test_isolation import alive, spec_of
from tiltyard.config.load import load
from tiltyard.config.sections import Env
from tiltyard.engines import make_engine
from tiltyard.engines.local.engine import LocalEngine
from tiltyard.envs.episodes import first_limits
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.run import metrics
from tiltyard.run.state_file import write_trees
from tiltyard.types import Engine

pytestmark = pytest.mark.slow  # starts and ends processes

ENVS = Path(__file__).parents[1] / "envs" / "isolated_envs.py"


def build(target: str, *overrides: str) -> Engine:
    """Make an engine with an env that is probed in this process, without isolation and once for all engines."""
    experiment = load(target, [*SMALL, *overrides]).experiment
    return make_engine(experiment, spec_of(experiment.env), [ENVS.parent])


# ------------------------------------------------------------------------------------------------ isolate


@pytest.fixture
def apart(runs: Path) -> Path:
    """The env's file, copied next to the folder of the runs."""
    return Path(shutil.copy(ENVS, runs.parent / "where.py"))


def test_run_and_evaluation_step_envs_in_processes_that_end_with_them(apart: Path, tiltyard: Command) -> None:
    output = tiltyard("train", "where.py:Where", *SHORT, "env.isolate=process", "stop.env_steps=64", "engine.workers=0")
    assert "one process per env" in output.stderr
    (file,) = (apart.parent / "runs").rglob("metrics.jsonl")
    *_, trained = (record["metrics"] for record in metrics.read(file))
    assert trained["episode/same"] == 1.0 and trained["episode/process"] != os.getpid()
    evaluated = json.loads(tiltyard("eval", "last", "--episodes", "1", "--json").stdout)["metrics"]
    assert evaluated["same"] == 1.0 and evaluated["process"] != os.getpid() and not alive(int(evaluated["process"]))


@pytest.mark.parametrize("isolate", ["process", "thread"])
def test_worker_with_a_hung_isolated_env_is_reported_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolate: str
) -> None:
    monkeypatch.chdir(ENVS.parent)
    once = tmp_path / "once"
    options = (f"env.isolate={isolate}", "env.options.fault=hang", "env.options.at=20", f"env.options.flag={once}")
    engine = build("isolated_envs.py:Where", *TWO, *options, "env.step_timeout=1")
    assert isinstance(engine, LocalEngine)
    events = [event for _ in range(10) for event in engine.step().events]
    assert "did not return from step() within 1 s (env.step_timeout) (it was in" in events[0]
    assert "isolated_envs.py" in events[0] and "_fail" in events[0]
    assert "a new one replaces it, and 2 running episodes were cut" in events[0]
    assert len(events) == 1 and engine.step().metrics["workers/restarts"] == 1
    assert all(os.sched_getaffinity(member.pid or 0) == os.sched_getaffinity(0) for member in engine.pool.workers)
    engine.close()


# ------------------------------------------------------------------------------------------------ decorrelate


def group_of(copies: int, **settings: Any) -> EnvGroup:
    env = Env(**settings)
    spec = spec_of(env)
    return make_group(GroupConfig(env, spec, copies * len(spec.agents), 3, [ENVS.parent]))


def ends_of(group: EnvGroup, steps: int) -> list[list[int]]:
    """Return for each copy the env steps at which its episodes ended, all of them by a limit."""
    found: list[list[int]] = [[] for _ in range(group.copies)]
    reported = []
    group.reset()
    for step in range(1, steps + 1):
        now = group.step(np.zeros((group.rows, group.spec.action.columns), np.float32))
        reported += now.episodes
        for copy in np.flatnonzero(now.first[:: group.agents]).tolist():
            found[copy].append(step)
    assert group.stats.frames_taken == steps * group.copies * group.spec.frameskip, "cut episodes are counted"
    assert all(end.length == group.env.time_limit for end in reported), "cut episodes are not reported"
    assert len(reported) == sum(len(ends) - (ends[0] != group.env.time_limit) for ends in found)
    return found


@pytest.mark.parametrize("name", ["Pendulum-v1", "isolated_envs.py:Pair"])
def test_first_episodes_are_cut_at_different_times_and_not_reported(name: str) -> None:
    together = ends_of(group_of(8, id=name, time_limit=50), 160)
    assert together == [[50, 100, 150]] * 8
    group = group_of(8, id=name, time_limit=50, decorrelate=40)
    drawn = first_limits(3, "train", range(8), 40).tolist()
    assert len(set(drawn)) > 5 and min(drawn) >= 1 and max(drawn) <= 40
    assert ends_of(group, 160) == [[first + 50 * n for n in range(4) if first + 50 * n <= 160] for first in drawn]


def test_limit_above_the_time_limit_cuts_nothing_and_other_ends_are_reported() -> None:
    group = group_of(8, id="Pendulum-v1", time_limit=10, decorrelate=1000)
    drawn = first_limits(3, "train", range(8), 1000)
    assert ends_of(group, 30) == [[10, 20, 30]] * 8 and (drawn >= 10).all()
    native = group_of(8, id="CartPole-v1", decorrelate=100)
    first = first_limits(3, "train", range(8), 100)
    native.reset()
    seen: dict[int, int] = {}
    ended: dict[int, int] = {}
    for step in range(1, 15):  # a pole pushed in one direction falls within eleven steps
        now = native.step(np.zeros((8, 1), np.float32))
        for row in np.flatnonzero(now.first).tolist():
            ended.setdefault(row, step)
            assert now.truncated[row] == (step == first[row]) or ended[row] != step
        seen |= {end.row: end.length for end in now.episodes if end.number == 0}
    assert {row: step for row, step in ended.items() if step < first[row]} == seen


def test_evaluations_are_not_decorrelated() -> None:
    env = Env(id="Pendulum-v1", time_limit=50, decorrelate=40)
    group = make_group(GroupConfig(env, spec_of(env), 4, 3, role="eval"))
    assert ends_of(group, 60) == [[50]] * 4


# ------------------------------------------------------------------------------------------------ all combined


def test_weights_depend_neither_on_engine_nor_isolation_nor_resume(tmp_path: Path) -> None:
    """Also check that workers are pinned round-robin and that the learner is not pinned."""
    settings = ("CarPass-v0", *TWO, "env.decorrelate=20", "env.frameskip=2", "algo.rollout=8", "algo.minibatch=32")
    serial = (*settings, "engine.kind=serial")
    off, whole, before = build(*serial, "env.decorrelate=0"), build(*serial), build(*serial, "env.isolate=thread")
    after = build(*serial, "env.isolate=thread")
    local = build(*settings, "env.isolate=process", "engine.affinity=true")
    before.step()
    write_trees(tmp_path / "saved", before.save(tmp_path / "saved"))
    assert after.load(tmp_path / "saved") == []
    for engine, steps in ((off, 5), (whole, 5), (after, 4), (local, 5)):
        for _ in range(steps):
            engine.step()
    assert weights(after) == weights(whole) == weights(local)
    assert weights(off) != weights(whole), "otherwise this proves nothing"
    assert 0 < whole.progress.episodes == local.progress.episodes == after.progress.episodes
    assert isinstance(local, LocalEngine) and "pinned to a core each" in local.describe()[-1]
    cores = sorted(os.sched_getaffinity(0))
    pinned = [os.sched_getaffinity(member.pid or 0) for member in local.pool.workers]
    assert pinned == [{cores[number % len(cores)]} for number in range(2)]
    for engine in (off, whole, before, after, local):
        engine.close()


@pytest.mark.parametrize("other", ["engine.kind=serial", "engine.workers=0"])
def test_affinity_without_workers_is_refused(tiltyard: Command, other: str) -> None:
    output = tiltyard("train", "CartPole-v1", "engine.affinity=true", other, expect=2)
    assert "engine.affinity = true: needs workers" in output.stderr and not Path("runs").exists()


def test_invalid_values_are_refused() -> None:
    for word in ("env.isolate=vm", "env.decorrelate=-1", "env.decorrelate=1.5", "engine.affinity=2"):
        with pytest.raises(product.TiltyardError) as caught:
            load("CartPole-v1", [word])
        assert word.partition("=")[0] in str(getattr(caught.value, "details", ""))
