"""Running episodes are saved and continue bit for bit in new envs, or a warning reports that they were cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.test_serial import build
from tiltyard.config.sections import Env
from tiltyard.envs.episodes import History
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.errors import UseError
from tiltyard.run.state_file import read_tree, write_tree, write_trees

BASE = [Path(__file__).parent]

CASES = [
    Env(id="CartPole-v1"),
    Env(id="CartPole-v1", frame_stack=3, frameskip=2, time_limit=9, reward_scale=0.1),
    Env(id="Pendulum-v1", time_limit=30),
    Env(id="CarPass-v0"),
    Env(id="CarPass-v0", restore_mode="rerun"),
    Env(id="memory"),
    Env(id="delay"),
    Env(id="timeout"),
    Env(id="masked"),
    Env(id="kitchen_sink", frame_stack=2),
    Env(
        id="identity",
        options={"shows": "image"},
        wrappers=[{"id": "resize_image", "options": {"height": 9, "width": 9}}],
    ),
]


def group_of(env: Env, rows: int = 3, previous: bool = True, seed: int = 3) -> EnvGroup:
    spec = spec_from_json(examine(env, BASE, previous))
    return make_group(GroupConfig(env, spec, rows, seed, BASE, previous=previous), native="never")


def act(group: EnvGroup, index: int) -> Any:
    return group.codec.random_rows(np.random.default_rng(index), group.rows, group.mask)


def assert_same(one: Any, two: Any) -> None:
    for name, array in one.obs.items():
        assert np.array_equal(array, two.obs[name]), name
    for name in ("reward", "terminated", "truncated", "first", "mask"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    for row in np.flatnonzero(one.first):
        for name, array in one.final_obs.items():
            assert np.array_equal(array[row], two.final_obs[name][row]), name
    assert one.episodes == two.episodes


@pytest.mark.parametrize("env", CASES, ids=lambda env: f"{env.id}-{env.frame_stack}-{env.restore_mode}")
def test_three_restores_do_not_change_the_results(env: Env, tmp_path: Path) -> None:
    steady, broken = group_of(env), group_of(env)
    steady.reset()
    broken.reset()
    for index in range(75):
        if index in (1, 20, 50):
            write_tree(tmp_path, f"envs{index}", broken.save())
            broken.close()
            broken = group_of(env)
            assert broken.load(read_tree(tmp_path, f"envs{index}")) == []
            now = broken.current()
            assert all(np.array_equal(array, now.obs[name]) for name, array in steady.obs.items())
            assert np.array_equal(now.first, steady.first)
        action = act(steady, index)
        assert_same(steady.step(action), broken.step(action.copy()))


def test_saving_does_not_change_the_episodes() -> None:
    env = Env(id="CartPole-v1")
    one, two = group_of(env), group_of(env)
    one.reset()
    two.reset()
    for index in range(60):
        one.save()
        action = act(one, index)
        assert_same(one.step(action), two.step(action))


def test_env_with_other_results_in_a_rerun_begins_new_episodes() -> None:
    env = Env(id="bad_envs.py:Unrepeatable")
    group = group_of(env)
    assert group.data.restore_mode == "rerun"
    group.reset()
    for index in range(25):
        group.step(act(group, index))
    fresh = group_of(env)
    (sentence,) = fresh.load(group.save())
    assert "gives other results when re-run: 3 of 3 running episodes were cut" in sentence
    now = fresh.current()
    assert now.first.all() and not now.obs["obs"].any() and fresh.stats.number.tolist() == [1, 1, 1]
    assert not fresh.stats.length.any() and not now.obs["previous.reward"].any()
    assert fresh.save()["restore_mode"] == "fresh" and "actions" not in fresh.save()
    fresh.step(act(fresh, 0))
    (again,) = group_of(env).load(fresh.save())
    assert "3 of 3 running episodes were cut" in again


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Env(id="CartPole-v1"), Env(id="CartPole-v1", options={"sutton_barto_reward": True})),
        (Env(id="CartPole-v1"), Env(id="CartPole-v1", time_limit=7)),
        (Env(id="CartPole-v1", frameskip=2), Env(id="CartPole-v1")),
        (Env(id="CarPass-v0"), Env(id="CarPass-v0", time_limit=7)),  # restored by its state
        (Env(id="CartPole-v1", restore_mode="fresh"), Env(id="CartPole-v1", time_limit=7)),
    ],
    ids=lambda env: f"{env.id}-{env.restore_mode}",
)
def test_changed_settings_cut_episodes_and_keep_the_restore_mode(before: Env, after: Env, tmp_path: Path) -> None:
    group = group_of(before)
    group.reset()
    group.step(act(group, 0))
    forked = group_of(after)
    mode = forked.data.restore_mode
    (sentence,) = forked.load(group.save())
    assert sentence == f"the settings of env {after.id} changed: 3 of 3 running episodes were cut and new ones begun"
    assert forked.current().first.all() and not forked.stats.length.any() and forked.stats.number.tolist() == [1, 1, 1]
    for index in range(3):
        forked.step(act(forked, index))
    write_tree(tmp_path, "envs", forked.save())
    again = group_of(after)
    assert forked.data.restore_mode == mode != "fresh" and again.load(read_tree(tmp_path, "envs")) == []
    action = act(forked, 9)
    assert_same(forked.step(action), again.step(action.copy()))


def test_settings_without_effect_on_episodes_cut_none_also_in_older_checkpoints() -> None:
    group = group_of(Env(id="CartPole-v1"))
    group.reset()
    for index in range(5):
        group.step(act(group, index))
    scaled, tree = group_of(Env(id="CartPole-v1", reward_scale=0.1, start_timeout=99)), group.save()
    assert scaled.load(tree) == [] and np.array_equal(scaled.obs["obs"], group.obs["obs"])
    del tree["settings"]
    assert group_of(Env(id="CartPole-v1")).load(tree) == []


def test_fresh_envs_warn_about_cut_episodes() -> None:
    env = Env(id="CartPole-v1", restore_mode="fresh")
    group = group_of(env)
    group.reset()
    assert group_of(env).load(group.save()) == []
    group.step(act(group, 0))
    other = group_of(env)
    assert other.load(group.save()) == [
        "env CartPole-v1 begins new episodes after a resume: 3 of 3 running episodes were cut"
    ]
    assert other.current().first.all()


def test_probe_sets_restore_mode_fresh_for_an_unseeded_env() -> None:
    spec = spec_from_json(examine(Env(id="bad_envs.py:BadEnv", options={"fault": "unseeded"}), BASE, False))
    assert spec.restore_mode == "fresh" and "behaves differently" in spec.notes[0]


def test_number_of_rows_may_change() -> None:
    env = Env(id="CartPole-v1")
    group = group_of(env, rows=3)
    group.reset()
    for index in range(5):
        group.step(act(group, index))
    tree = group.save()
    fewer, more = group_of(env, rows=2), group_of(env, rows=5)
    assert fewer.load(tree) == ["2 of the checkpoint's 3 rows are left: the episodes of the others were cut"]
    assert np.array_equal(fewer.obs["obs"], group.obs["obs"][:2])
    assert more.load(tree) == []
    assert np.array_equal(more.obs["obs"][:3], group.obs["obs"]) and more.first.tolist()[3:] == [True, True]
    more.step(act(more, 9))


def test_checkpoint_of_another_env_is_refused_with_both_shapes() -> None:
    group = group_of(Env(id="CartPole-v1"))
    group.reset()
    with pytest.raises(UseError, match=r"\[4\].*\[3\]"):
        group_of(Env(id="Pendulum-v1")).load(group.save())


def test_restore_mode_state_without_get_state_is_refused() -> None:
    with pytest.raises(UseError, match="get_state"):
        examine(Env(id="CartPole-v1", restore_mode="state"), BASE, False)


def test_history_keeps_the_actions_of_each_running_episode() -> None:
    history, rng = History(3, 2), np.random.default_rng(0)
    kept: list[list[np.ndarray]] = [[], [], []]
    for _ in range(3000):
        for row in range(3):
            if rng.random() < (0.02, 0.0005, 0.2)[row]:
                history.restart(row)
                kept[row] = []
        action = rng.normal(size=(3, 2)).astype(np.float32)
        history.append(action)
        for row in range(3):
            kept[row].append(action[row])
    for row in range(3):
        assert np.array_equal(history.of(row), np.stack(kept[row]))


ALONE = """
import gymnasium, numpy as np
class Alone(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(0, 1, (2,), np.float32), gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}
"""
KINDS = {
    "alone": ("alone.py:Alone",),
    "masked": ("masked", "env.options.options=2", "env.options.mask_in=info", "env.options.length=7"),
    "two": ("pennies",),
}


@pytest.mark.parametrize(
    ("then", "now"), [("alone", "masked"), ("masked", "alone"), ("alone", "two"), ("two", "alone")]
)
def test_fork_with_another_kind_of_env_begins_new_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, now: str
) -> None:
    """Observations and actions are the same, but masks or agents differ."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone.py").write_text(ALONE)
    before, after = (build(*KINDS[kind], "engine.kind=serial", "engine.envs=2") for kind in (then, now))
    before.step()
    write_trees(tmp_path / "saved", before.save(tmp_path / "saved"))
    assert any("were cut" in sentence for sentence in after.load(tmp_path / "saved"))
    assert after.step().progress.updates == 2
