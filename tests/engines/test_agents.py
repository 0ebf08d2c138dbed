"""Several agents in one env: rows without a decision are neither counted nor learned from, whatever they contain."""

import copy
from pathlib import Path

import numpy as np
import pytest

from tests.engines.test_serial import build
from tiltyard.engines.learner import Learner
from tiltyard.engines.local.engine import LocalEngine
from tiltyard.engines.serial import SerialEngine
from tiltyard.envs.toys.games import Visitors
from tiltyard.types import Rollout

PAUSES = ("env.options.pauses=true", "algo.rollout=24")
DECISIONS = 14  # of four visitors in one episode of six env steps


def spoilt(rollout: Rollout) -> Rollout:
    """Return a copy with random values in all rows without a decision."""
    other, rng = copy.deepcopy(rollout), np.random.default_rng(0)
    away = ~other.valid
    assert away.any()
    for array in (*other.obs.values(), other.reward, other.value, other.log_prob, other.bootstrap, other.action):
        array[away] = rng.normal(0, 100, array[away].shape)
    other.action[away] = rng.integers(0, 2, other.action[away].shape)
    return other


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("model.memory.kind=lstm", "model.memory.size=8"),
        ("algo.advantage=vtrace",),
        ("model.normalise.obs=true", "model.normalise.returns=true", "algo.kl.kind=kl_adaptive", "algo.kl.start=0.1"),
    ],
    ids=["plain", "memory", "vtrace", "normalised"],
)
def test_content_of_rows_without_a_decision_does_not_change_the_update(settings: tuple[str, ...]) -> None:
    engine = build("visitors", *PAUSES, "engine.kind=serial", *settings)
    assert isinstance(engine, SerialEngine)
    engine.step()  # so that memories and statistics differ from their initial values
    spoken = []
    learners = [Learner(engine.experiment, engine.learner.spec, [Path.cwd()]) for _ in range(2)]
    for learner, rollout in zip(learners, (engine.rollout, spoilt(engine.rollout)), strict=True):
        learner.net.load_arrays(engine.learner.net.arrays())
        spoken.append([learner.update(rollout, 0), learner.update(rollout, 48)])
    assert spoken[0] == spoken[1]
    ours, theirs = (learner.net.arrays() for learner in learners)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    before = engine.learner.net.arrays()
    assert any(not np.array_equal(before[name], ours[name]) for name in ours), "something was learned"
    engine.close()


def test_env_steps_count_decisions_and_frames_count_simulator_steps() -> None:
    engine = build("visitors", *PAUSES, "engine.kind=serial")
    for updates in (1, 2):
        report = engine.step()
        assert report.progress.env_steps == updates * 3 * 4 * DECISIONS, "three envs, four episodes each"
        assert report.progress.frames == updates * 3 * 4 * Visitors.LENGTH
        assert report.progress.episodes == updates * 3 * 4
    engine.close()


@pytest.mark.slow
def test_workers_and_groups_in_one_process_give_identical_weights() -> None:
    settings = (*PAUSES, "engine.workers=2", "engine.envs=4", "model.memory.kind=gru", "model.memory.size=8")
    one, two = build("visitors", *settings, "engine.kind=serial"), build("visitors", *settings)
    assert isinstance(two, LocalEngine)
    for _ in range(3):
        a, b = one.step(), two.step()
        assert (a.progress.env_steps, a.progress.frames) == (b.progress.env_steps, b.progress.frames)
        assert sorted(end.seed for end in a.episodes) == sorted(end.seed for end in b.episodes)
    ours, theirs = one.snapshot().weights, two.snapshot().weights
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    one.close()
    two.close()
