"""The engine contract on the serial engine: progress, save and load, adopted policies, all spaces."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.envs.probe import probe
from tiltyard.errors import UseError
from tiltyard.processes.fork_server import ForkServer
from tiltyard.run.state_file import write_trees
from tiltyard.types import Engine

SMALL = [
    "engine.envs=3",
    "engine.threads=1",
    "algo.rollout=16",
    "algo.minibatch=24",
    "algo.epochs=2",
    "model.memory.bptt=8",
]


def build(target: str, *overrides: str, server: ForkServer | None = None) -> Engine:
    loaded = load(target, [*SMALL, *overrides])
    experiment = loaded.experiment
    spec = probe(experiment.env, base=loaded.base, previous=experiment.model.previous)
    return make_engine(experiment, spec, loaded.base, server=server)


def test_progress_grows_and_the_time_split_adds_up(tmp_path: Path) -> None:
    engine = build("CartPole-v1")
    seen = [engine.step().progress for _ in range(3)]
    assert [each.env_steps for each in seen] == [48, 96, 144]
    assert [each.updates for each in seen] == [1, 2, 3]
    report = engine.step()
    assert sum(report.time_split.values()) == pytest.approx(report.progress.seconds - seen[-1].seconds)
    engine.close()


def test_save_and_load_continue_bit_for_bit(tmp_path: Path) -> None:
    one, two = build("CarPass-v0", "model.memory.kind=gru"), build("CarPass-v0", "model.memory.kind=gru")
    two.step()
    two.step()
    one.step()
    write_trees(tmp_path / "saved", one.save(tmp_path / "saved"))
    assert two.load(tmp_path / "saved") == []
    for _ in range(3):
        one.step()
        two.step()
    ours, theirs = one.snapshot().weights, two.snapshot().weights
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_adopt_copies_a_policy_and_applies_changed_settings() -> None:
    giver, taker = build("CartPole-v1"), build("CartPole-v1", "seed=5")
    giver.step()
    given = giver.snapshot()
    in_force = taker.adopt("main", given, {"lr": 0.25, "entropy": 0.5})
    assert (in_force["lr"], in_force["entropy"]) == (0.25, 0.5)
    now = taker.snapshot()
    assert all(np.array_equal(now.weights[name], given.weights[name]) for name in given.weights)
    metrics = taker.step().metrics
    assert (metrics["setting/lr"], metrics["setting/entropy"]) == (0.25, 0.5), "the values reached the update"
    frozen = {name: array.copy() for name, array in given.weights.items()}
    giver.step()
    assert all(np.array_equal(given.weights[name], frozen[name]) for name in frozen), "a snapshot is a copy"
    with pytest.raises(UseError, match="unknown learning policy 'other'"):
        giver.snapshot("other")
    with pytest.raises(UseError, match="cannot change during training"):
        giver.adopt("main", None, {"epochs": 3})


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_every_kind_of_observation_and_action_is_learned(memory: str, critic: str) -> None:
    engine = build("kitchen_sink", f"model.memory.kind={memory}", f"model.critic={critic}", "model.previous=true")
    before = engine.snapshot().weights
    engine.step()
    after = engine.snapshot().weights
    # The recurrent weights of the text encoder get only zeros, because the texts of this env have one word.
    learned = [name for name in before if "stats" not in name and not name.endswith("core.weight_hh_l0")]
    unmoved = [name for name in learned if np.array_equal(before[name], after[name])]
    assert unmoved == [], "every parameter takes part in learning"
    engine.close()


def test_masked_actions_are_never_taken() -> None:
    engine = build("masked", "algo.rollout=64", "algo.minibatch=64")
    assert engine.learner.spec.masked  # type: ignore[attr-defined]
    engine.step()
    rollout = engine.rollout  # type: ignore[attr-defined]
    chosen = rollout.action[..., 0].astype(int)
    assert np.take_along_axis(rollout.mask, chosen[..., None], -1).all()
    assert not rollout.mask.all(), "something was forbidden"


def test_truncation_bootstraps_from_the_final_observation() -> None:
    engine: Any = build("timeout", "algo.rollout=32", "algo.minibatch=32", "engine.envs=2")
    engine.step()
    rollout = engine.rollout
    assert rollout.truncated.any() and rollout.terminated.any()
    ends = rollout.truncated.copy()
    ends[-1] |= ~(rollout.terminated[-1] | rollout.truncated[-1])
    assert (rollout.bootstrap[ends] != 0).all() and (rollout.bootstrap[~ends] == 0).all()


def test_schedules_count_env_steps() -> None:
    engine = build("CartPole-v1", "algo.lr={kind: linear, start: 1.0, end: 0.0, over: 96}")
    assert [engine.step().metrics["setting/lr"] for _ in range(4)] == [1.0, 0.5, 0.0, 0.0]


def test_too_large_rollout_is_refused_with_required_and_free_memory(tmp_path: Path) -> None:
    from tiltyard.engines.preflight import check_engine

    loaded = load("CartPole-v1", ["engine.envs=100000", "algo.rollout=1000000"])
    spec = probe(loaded.experiment.env, base=())
    with pytest.raises(UseError, match=r"needs about [\d.]+ GiB .* but only [\d.]+ GiB are free"):
        check_engine(loaded.experiment, spec, ())
    check_engine(
        loaded.experiment.model_copy(update={"algo": loaded.experiment.algo.model_copy(update={"rollout": 1})}),
        replace(spec),
        (),
    )
