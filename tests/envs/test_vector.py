"""Groups of envs: ends, final observations, limits, stacks, rewards, statistics, seeds, and errors."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tiltyard.config.sections import Env
from tiltyard.envs.episodes import episode_seed
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.errors import DivergedError, EnvError, UseError
from tiltyard.types import EnvSpec

BASE = [Path(__file__).parent]
RECORDER = "bad_envs.py:Recorder"


def spec_of(env: Env, previous: bool = False) -> EnvSpec:
    return spec_from_json(examine(env, BASE, previous))


def group_of(env: Env, rows: int = 2, seed: int = 0, previous: bool = False, **more: Any) -> EnvGroup:
    config = GroupConfig(env, spec_of(env, previous), rows, seed, BASE, previous=previous, **more)
    return make_group(config, native="never")


def flat(value: float, rows: int = 2) -> np.ndarray:
    """Return the recorder's action `value` for every row, scaled from [-2, 6] to [-1, 1]."""
    return np.full((rows, 1), (value - 2) / 4, np.float32)


def test_cartpole_equals_the_unwrapped_env_in_every_episode() -> None:
    group, rng = group_of(Env(id="CartPole-v1"), rows=3, seed=5), np.random.default_rng(0)
    bare = [gymnasium.make("CartPole-v1") for _ in range(3)]
    numbers = [0, 0, 0]
    seen = [env.reset(seed=episode_seed(5, "train", row, 0))[0] for row, env in enumerate(bare)]
    now = group.reset()
    assert now.first.all() and now.valid.all() and not now.terminated.any()
    for _ in range(300):
        assert np.array_equal(now.obs["obs"], np.stack(seen))
        action = rng.integers(0, 2, (3, 1)).astype(np.float32)
        now = group.step(action)
        for row, env in enumerate(bare):
            obs, reward, terminated, truncated, _ = env.step(int(action[row, 0]))
            assert now.reward[row] == reward and now.terminated[row] == terminated and now.truncated[row] == truncated
            assert now.first[row] == (terminated or truncated)
            if terminated or truncated:
                assert np.array_equal(now.final_obs["obs"][row], obs)
                numbers[row] += 1
                obs, _ = env.reset(seed=episode_seed(5, "train", row, numbers[row]))
            seen[row] = obs
    assert min(numbers) > 3


def test_registered_time_limit_is_used_and_a_setting_overrides_it() -> None:
    assert spec_of(Env(id="CartPole-v1")).episode_limit == 500
    assert spec_of(Env(id="CartPole-v1", frameskip=3)).episode_limit == 167
    group = group_of(Env(id="Pendulum-v1", time_limit=7))
    group.reset()
    for step in range(1, 15):
        now = group.step(np.zeros((2, 1), np.float32))
        assert now.truncated.tolist() == [step % 7 == 0] * 2 and not now.terminated.any()
        assert [end.length for end in now.episodes] == ([7, 7] if step % 7 == 0 else [])


def test_termination_at_the_limit_is_not_truncation() -> None:
    for ending in ("terminated", "both"):
        group = group_of(Env(id=RECORDER, options={"length": 4, "ending": ending}, time_limit=4))
        group.reset()
        for _ in range(4):
            now = group.step(flat(1))
        assert now.terminated.all() and not now.truncated.any()


def test_each_row_is_truncated_at_its_own_time() -> None:
    group = group_of(Env(id="CartPole-v1", time_limit=12), rows=4)
    now, lengths, rng = group.reset(), np.zeros(4, int), np.random.default_rng(1)
    for _ in range(400):
        now = group.step(rng.integers(0, 2, (4, 1)).astype(np.float32))
        lengths += 1
        assert (now.truncated == ((lengths == 12) & ~now.terminated)).all()
        assert sorted(end.length for end in now.episodes) == sorted(lengths[now.first].tolist())
        lengths[now.first] = 0


def test_frameskip_adds_rewards_and_stops_at_the_end() -> None:
    group = group_of(Env(id=RECORDER, options={"length": 5}, frameskip=3))
    group.reset()
    now = group.step(flat(1))
    assert now.reward.tolist() == [3, 3] and not now.first.any() and group.stats.frames_taken == 6
    now = group.step(flat(2))
    assert now.reward.tolist() == [4, 4] and now.terminated.all()
    assert [(end.length, end.frames, end.total) for end in now.episodes] == [(2, 5, 7.0)] * 2
    assert group.stats.frames_taken == 10
    assert (now.final_obs["obs"] == 5).all() and (now.obs["obs"] == 0).all()


def test_frame_stack_holds_the_last_frames_oldest_first() -> None:
    group = group_of(Env(id=RECORDER, options={"length": 4}, frame_stack=3))
    assert group.spec.obs["obs"].shape == (8, 8, 3)
    now = group.reset()
    stacks = [now.obs["obs"][0, 0, 0].tolist()]
    for _ in range(4):
        now = group.step(flat(0))
        stacks.append(now.obs["obs"][0, 0, 0].tolist())
    assert stacks == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 0]]
    assert now.final_obs["obs"][1, 7, 7].tolist() == [2, 3, 4]


def test_vectors_and_categories_are_stacked() -> None:
    group = group_of(Env(id="memory", options={"length": 3}, frame_stack=2))
    now = group.reset()
    first = now.obs["obs"][0].tolist()
    assert first[:3] == first[3:] and sum(first) == 2
    now = group.step(np.zeros((2, 1), np.float32))
    assert now.obs["obs"][0].tolist() == [*first[:3], 0, 0, 0]
    group = group_of(Env(id="identity", frame_stack=4))
    now = group.reset()
    assert now.obs["obs"].shape == (2, 4) and len(set(now.obs["obs"][0].tolist())) == 1


def test_rewards_are_scaled_then_clipped_for_learning_only() -> None:
    group = group_of(Env(id=RECORDER, options={"length": 2}, reward_scale=0.5, reward_clip=2.0))
    group.reset()
    assert group.step(flat(3)).reward.tolist() == [1.5, 1.5]
    now = group.step(flat(6))
    assert now.reward.tolist() == [2, 2] and [end.total for end in now.episodes] == [9.0, 9.0]


def test_scalars_of_the_last_info_become_metrics() -> None:
    group = group_of(Env(id=RECORDER, options={"length": 2}))
    group.reset()
    group.step(flat(1))
    now = group.step(flat(2))
    assert now.episodes[0].metrics == {"sum": 3.0, "won": 1.0, "depth": 3.0}
    assert group.infos[0]["name"] == "x"


def test_previous_action_and_reward_are_zero_at_the_start_of_an_episode() -> None:
    group = group_of(Env(id=RECORDER, options={"length": 2}, reward_scale=2.0), previous=True)
    now = group.reset()
    assert not now.obs["previous.action"].any() and not now.obs["previous.reward"].any()
    now = group.step(flat(3))
    assert now.obs["previous.action"].tolist() == [[0.25], [0.25]] and now.obs["previous.reward"].tolist() == [
        [6.0],
        [6.0],
    ]
    now = group.step(flat(2))
    assert not now.obs["previous.action"].any() and not now.obs["previous.reward"].any()
    assert now.final_obs["previous.reward"].tolist() == [[4.0], [4.0]]


def test_every_episode_has_its_own_seed() -> None:
    group = group_of(Env(id=RECORDER, options={"length": 1}), rows=2, seed=9, first_row=4)
    group.reset()
    ends = [end for _ in range(3) for end in group.step(flat(0)).episodes]
    assert [(end.row, end.number) for end in ends] == [(4, 0), (5, 0), (4, 1), (5, 1), (4, 2), (5, 2)]
    assert [end.seed for end in ends] == [episode_seed(9, "train", end.row, end.number) for end in ends]
    assert len({end.seed for end in ends}) == 6
    assert group.envs[0].seeds == [episode_seed(9, "train", 4, n) for n in range(4)]
    assert episode_seed(9, "eval", 4, 0) != episode_seed(9, "train", 4, 0)
    assert min(end.seed for end in ends) >= 0 and max(end.seed for end in ends) < 2**31


def test_seeds_can_be_passed_as_a_function() -> None:
    group = group_of(Env(id=RECORDER, options={"length": 1}), seeds=lambda row, number: 100 * row + number)
    group.reset()
    group.step(flat(0))
    assert [env.seeds for env in group.envs] == [[0, 1], [100, 101]]


@pytest.mark.parametrize("mask_in", ["obs", "info"])
def test_mask_belongs_to_the_current_observation(mask_in: str) -> None:
    group = group_of(Env(id="masked", options={"mask_in": mask_in, "length": 3}), rows=3)
    now, total = group.reset(), 0.0
    assert group.spec.masked and "action_mask" not in now.obs
    for _ in range(12):
        assert now.mask is not None and now.mask.shape == (3, 4) and (now.mask.sum(axis=1) == 2).all()
        now = group.step(now.mask.argmax(axis=1)[:, None].astype(np.float32))
        total += float(now.reward.sum())
    assert total == 36


def test_all_spaces_work_in_one_env() -> None:
    group, rng = group_of(Env(id="kitchen_sink"), rows=3), np.random.default_rng(0)
    now = group.reset()
    for _ in range(9):
        vector, code = now.obs["vector"].copy(), now.obs["code"].copy()
        action = group.codec.random_rows(rng, 3)
        action[:, 0], action[:, 1:3] = code, vector
        now = group.step(action)
        assert (now.reward >= 2 - 1e-6).all()
    assert now.obs["words"].dtype == np.int32 and now.obs["code"].max() < 3 and now.obs["vector"].dtype == np.float32


def test_rows_are_rendered_also_at_the_end_of_an_episode() -> None:
    env = Env(id=RECORDER, options={"length": 3})
    group = group_of(env, render=True)
    last: list[int] = []

    def render_end(row: int) -> None:
        picture = group.render_row(row)
        assert picture is not None
        last.append(int(picture[0, 0, 0]))

    group.reset()
    for frame in range(3):
        picture = group.render_row(1)
        assert picture is not None and picture.shape == (4, 6, 3) and picture[0, 0, 0] == frame
        group.step(flat(0), before_reset=render_end)
    assert last and set(last) == {3}, "the end is rendered before the next episode begins"
    assert group.fps == 8
    group.close()


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fault", "kind", "output"),
    [
        ("float64", EnvError, "dtype float64 but its space declares float32"),
        ("list", EnvError, "is a list"),
        ("nan", DivergedError, "holds NaN"),
        ("inf", DivergedError, "holds infinity"),
        ("shape", EnvError, "shape [3]"),
        ("reward_nan", DivergedError, "the reward is nan"),
        ("reward_array", EnvError, "instead of a number"),
        ("raise", EnvError, "step() raised RuntimeError: the wheel came off"),
        ("old_step", EnvError, "wrong form"),
    ],
)
def test_contract_violation_after_the_probe_names_row_and_episode(fault: str, kind: type, output: str) -> None:
    env = Env(id="bad_envs.py:BadEnv", options={"fault": fault, "at": 30}, time_limit=40)
    group = group_of(env, rows=2, first_row=6)
    group.reset()
    for _ in range(29):
        group.step(np.zeros((2, 1), np.float32))
    with pytest.raises(kind) as caught:
        group.step(np.zeros((2, 1), np.float32))
    assert output in caught.value.message and "row 6, episode 0" in caught.value.message and caught.value.hint
    if fault in ("nan", "inf", "reward_nan"):
        assert caught.value.batch
    if fault == "raise":
        assert "bad_envs.py" in caught.value.details and "vector.py" not in caught.value.details


def test_dtypes_are_converted_if_strict_is_off() -> None:
    group = group_of(Env(id="bad_envs.py:BadEnv", options={"fault": "float64"}, strict=False))
    group.reset()
    for step in range(1, 6):
        now = group.step(np.zeros((2, 1), np.float32))
        assert now.obs["obs"].dtype == np.float32 and (now.obs["obs"] == step).all()


def test_nan_action_is_refused_with_its_row() -> None:
    group = group_of(Env(id="CartPole-v1"))
    group.reset()
    with pytest.raises(DivergedError, match=r"row 1.*action is"):
        group.step(np.array([[0], [np.nan]], np.float32))


def test_env_that_differs_from_the_probed_one_is_refused() -> None:
    with pytest.raises(UseError, match="expected"):
        make_group(GroupConfig(Env(id="CartPole-v1"), spec_of(Env(id="Pendulum-v1")), 1, 0, BASE), native="never")
