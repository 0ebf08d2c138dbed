"""Envs from settings: every kind of name, options, wrappers, and a one-sentence error for each mistake."""

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tiltyard.config.sections import Env
from tiltyard.envs.builtin import BUILTIN_ENVS, BUILTIN_WRAPPERS
from tiltyard.envs.make import make_any
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.wrappers import FlattenMultiDiscrete, GreyImage, ResizeImage
from tiltyard.errors import ConfigError, UseError

BASE = [Path(__file__).parent]


@pytest.mark.parametrize("name", BUILTIN_ENVS)
def test_every_built_in_env_can_be_made_and_reset(name: str) -> None:
    env = make_any(Env(id=name), BASE)
    obs, _ = env.reset(seed=0)
    views = obs.values() if isinstance(env, Parallel) else [obs]
    assert views and all(env.observation_space.contains(view) for view in views)


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1",
        "bad_envs.py:BadEnv",
        "tiltyard.envs.toys.single:Basic",
        "gymnasium.envs.classic_control:CartPoleEnv",
    ],
)
def test_every_kind_of_name_is_accepted(name: str) -> None:
    assert isinstance(make_any(Env(id=name), BASE), gymnasium.Env)


def test_time_limit_wrapper_of_gymnasium_is_not_applied() -> None:
    layer: Any = make_any(Env(id="CartPole-v1"), BASE)
    while isinstance(layer, gymnasium.Wrapper):
        assert not isinstance(layer, gymnasium.wrappers.TimeLimit)
        layer = layer.env


def test_render_sets_the_render_mode() -> None:
    assert make_any(Env(id="CartPole-v1"), BASE, render=True).render_mode == "rgb_array"
    assert make_any(Env(id="CarPass-v0"), BASE, render=True).render_mode == "rgb_array"
    assert make_any(Env(id="CarPass-v0"), BASE).render_mode is None
    assert isinstance(make_any(Env(id="basic"), BASE, render=True), gymnasium.Env)


@pytest.mark.parametrize(
    ("env", "output", "hint"),
    [
        (Env(id="CartPoel-v1"), "CartPoel-v1", "CartPole-v1"),
        (Env(id="CartPole-v7"), "CartPole-v7", "CartPole-v1"),
        (Env(id="cartpole-v1"), "cartpole-v1", "CartPole-v1"),
        (Env(id="identitty"), "identitty", "identity"),
        (Env(id="no_such_file.py:Maze"), "no_such_file.py", ""),
        (Env(id="bad_envs.py:BadEvn"), "BadEvn", "BadEnv"),
        (Env(id="bad_envs.py:NotAnEnv"), "not a gymnasium.Env", "derive"),
        (Env(id="bad_envs.py:BadEnv", options={"fault": "constructor"}), "RuntimeError: no licence found", ""),
        (Env(id="no_such_package_here:Env-v0"), "no_such_package_here", "neither next to your code nor among"),
        (Env(id="crafter:Env-v0"), "needs the package 'crafter'", "pip install crafter"),
        (Env(id="a\nb"), "a", ""),
        (Env(id="memory", options={"length": 0}), "length must be at least 1", ""),
        (Env(id="CartPole-v1", wrappers=["no_wrapper"]), "no_wrapper", "known"),
        (Env(id="CartPole-v1", wrappers=["flatten_multi_discrete"]), "MultiDiscrete", "remove"),
        (Env(id="CartPole-v1", wrappers=["resize_image"]), "", ""),
    ],
)
def test_invalid_envs_and_wrappers_are_refused_in_one_sentence(env: Env, output: str, hint: str) -> None:
    with pytest.raises(UseError) as caught:
        make_any(env, BASE)
    assert output in caught.value.message and hint in caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("env", "setting", "hint"),
    [
        (
            Env(id="CartPole-v1", options={"suton_barto_reward": True}),
            "env.options.suton_barto_reward",
            "sutton_barto_reward",
        ),
        (Env(id="memory", options={"lenght": 3}), "env.options.lenght", "length"),
        (Env(id="CartPole-v1", options={"max_episode_steps": 3}), "env.options.max_episode_steps", "env.time_limit=3"),
        (
            Env(id="CartPole-v1", wrappers=[{"id": "gymnasium.wrappers:FlattenObservation", "options": {"x": 1}}]),
            "env.wrappers.0.options.x",
            "",
        ),
    ],
)
def test_options_are_checked_against_the_constructor(env: Env, setting: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_any(env, BASE)
    assert caught.value.problems[0].setting == setting and hint in caught.value.problems[0].hint


def test_without_box2d_the_hint_is_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Box2D", None)  # marks the module as missing
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UseError) as caught:
        make_any(Env(id="LunarLander-v3"), BASE)
    assert "not installed" in caught.value.message and caught.value.hint == "pip install 'tiltyard[box2d]'"


def test_box2d_envs_run() -> None:
    env = make_any(Env(id="LunarLander-v3"), BASE)
    assert env.observation_space.contains(env.reset(seed=0)[0]) and len(env.step(0)) == 5


def test_options_reach_the_constructor() -> None:
    made = make_any(Env(id="CartPole-v1", options={"sutton_barto_reward": True}), BASE)
    made.reset(seed=0)
    assert made.step(0)[1] == 0.0


# ---------------------------------------------------------------------------------------------- wrappers


class Levers(gymnasium.Env):
    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (6, 8, 3), np.uint8)
        self.action_space = gymnasium.spaces.MultiDiscrete([2, 3], start=[1, 0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        image = np.zeros((6, 8, 3), np.uint8)
        image[:, :4] = (255, 0, 0)
        image[:, 4:] = 255
        return image, {}

    def step(self, action: Any) -> Any:
        self.got = action
        return self.reset()[0], 0.0, False, False, {}


def test_all_built_in_wrappers_are_tested_here() -> None:
    assert {target.split(":")[1] for target in BUILTIN_WRAPPERS.values()} == {
        "DiscreteSteps",
        "FlattenMultiDiscrete",
        "GreyImage",
        "ResizeImage",
    }


def test_flatten_multi_discrete_reaches_every_combination() -> None:
    inner = Levers()
    env = FlattenMultiDiscrete(inner)
    assert env.action_space == gymnasium.spaces.Discrete(6)
    env.reset()
    seen = []
    for action in range(6):
        env.step(action)
        assert inner.action_space.contains(inner.got)
        seen.append(tuple(inner.got.tolist()))
    assert seen == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_grey_image_is_a_weighted_sum_of_the_colours() -> None:
    env = GreyImage(Levers())
    obs, _ = env.reset()
    assert env.observation_space.contains(obs) and obs.shape == (1, 6, 8)
    assert obs[0, 0, 0] == 255 * 77 // 256 and obs[0, 0, 7] == 255


def test_resize_image_averages_areas() -> None:
    env = ResizeImage(Levers(), height=3, width=2)
    obs, _ = env.reset()
    assert env.observation_space.contains(obs) and obs[:, 0].tolist() == [[255, 0, 0]] * 3 and (obs[:, 1] == 255).all()
    grey = ResizeImage(GreyImage(Levers()), height=2, width=1)
    assert grey.reset()[0].shape == (1, 2, 1)


def test_first_wrapper_in_the_list_is_innermost() -> None:
    env = Env(
        id="identity",
        options={"shows": "image"},
        wrappers=[
            "gymnasium.wrappers:FlattenObservation",
            {"id": "gymnasium.wrappers:RescaleObservation", "options": {"min_obs": 0, "max_obs": 1}},
        ],
    )
    made = make_any(env, BASE)
    assert made.observation_space.shape == (36 * 36,)
    assert type(made).__name__ == "RescaleObservation"


def test_discrete_steps_are_evenly_spaced_from_bound_to_bound() -> None:
    settings = Env(id="CarPass-v0", wrappers=[{"id": "discrete_steps", "options": {"steps": 5}}])  # type: ignore[list-item]
    env = make_any(settings, ())
    assert list(env.action_space.nvec) == [5, 5]
    given = []
    env.unwrapped.step = lambda action: given.append(action) or (None, 0.0, False, False, {})  # type: ignore[method-assign]
    for index in range(5):
        env.env.step(env.action(np.array([index, 4 - index])))
    assert np.array_equal(given, [[-1, 1], [-0.5, 0.5], [0, 0], [0.5, -0.5], [1, -1]])
    assert given[0].dtype == np.float32
    with pytest.raises(UseError, match="finite bounds"):
        make_any(Env(id="CartPole-v1", wrappers=["discrete_steps"]), ())  # type: ignore[list-item]
