"""EnvPool envs: names, options, ends and resets, seeds, many rows stepped in one call, and runs with them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.conftest import Command
from tests.counts import count
from tiltyard.config.sections import Env
from tiltyard.envs.actions import action_spec
from tiltyard.envs.episodes import episode_seed, row_seeds
from tiltyard.envs.make import can_render, frames_per_step, make_any
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.single_agent_vector import NativeStepping, has_native
from tiltyard.envs.spaces import MASK, encode, observation_leaves, observation_specs, spec_from_json
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.errors import ConfigError, UseError
from tiltyard.evaluation.evaluate import require_recordable
from tiltyard.run import checkpoint, state_file
from tiltyard.run.folder import find
from tiltyard.types import EnvSpec

BASE = [Path(__file__).parent]
INSTALLED = find_spec("envpool") is not None
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered")
installed = pytest.mark.skipif(not INSTALLED, reason="the extra `envpool` is not installed: it takes 750 MB")
if INSTALLED:
    import envpool

    from tiltyard.envs.suites.envpool import EnvPool

TINY = [
    "engine.kind=local",
    "engine.envs=4",
    "algo.rollout=16",
    "algo.minibatch=64",
    "algo.epochs=1",
    "stop.updates=3",
    "eval.episodes=2",
    "track.tensorboard=false",
]


def group_of(env: Env, rows: int, threads: int | None = None) -> EnvGroup:
    """Make a group without the child process of the probe."""
    made = make_any(env, BASE)
    obs, action = observation_specs(made.observation_space), action_spec(made.action_space)
    masked = isinstance(made.observation_space, gymnasium.spaces.Dict) and MASK in made.observation_space.spaces
    spec = EnvSpec(obs, action, frameskip=frames_per_step(made), masked=masked)
    return make_group(GroupConfig(env, spec, rows, 5, BASE), threads=threads)


def fall(**options: Any) -> tuple[int, bool, bool]:
    """Push a pole to the right until the episode ends; return env steps, terminated and truncated."""
    env = EnvPool("CartPole-v1", **options)
    env.reset(seed=7)
    for steps in range(1, 100):
        _, _, terminated, truncated, _ = env.step(1)
        if terminated or truncated:
            return steps, terminated, truncated
    raise AssertionError("it stands")


def raw_pool(name: str, seed: int, **options: Any) -> Any:
    """Make a pool of one row directly with EnvPool."""
    return envpool.make_gymnasium(name, num_envs=1, env_seed=[seed], num_threads=1, **options)


# ---------------------------------------------------------------------------------------------- names and options


@pytest.mark.slow
def test_without_envpool_the_hint_is_the_install_command(runs: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    # Python finds this before the installed package, in the command and in its child processes.
    (hidden / "envpool.py").write_text("raise ModuleNotFoundError(\"No module named 'envpool'\", name='envpool')\n")
    output = subprocess.run(
        [sys.executable, "-m", "tiltyard", "train", "envpool:CartPole-v1"],
        env={**os.environ, "PYTHONPATH": str(hidden)},
        capture_output=True,
        text=True,
    )
    assert output.returncode == 2 and not runs.exists()
    assert output.stderr.splitlines() == [
        "error: envpool: envs need the package 'envpool', which is not installed",
        "hint: pip install 'tiltyard[envpool]'",
    ]


@installed
@pytest.mark.parametrize(
    ("name", "output", "hint"),
    [
        ("CartPol-v1", "EnvPool has no env 'CartPol-v1'", "'CartPole-v1'"),
        ("pong", "'pong'", "'Pong-v5'"),
        ("", "''", "list_all_envs"),
        ("Go9x9-v1", "has 2 players", "PettingZoo"),
        ("D1Basic-v1", "is not supported", "doom:basic"),
    ],
)
def test_unknown_names_are_refused_in_one_sentence(name: str, output: str, hint: str) -> None:
    with pytest.raises(UseError) as caught:
        make_any(Env(id=f"envpool:{name}"), BASE)
    assert output in caught.value.message and hint in caught.value.hint


@installed
@pytest.mark.parametrize(
    ("option", "value", "output", "hint"),
    [
        ("framskip", 4, "has no option", "frame_skip"),
        ("frame_skip", 0, "must be an integer, at least 1", "4"),
        ("frame_skip", "four", "must be of type int", "4"),
        ("num_envs", 8, "cannot be set in env.options", "engine.envs"),
        ("seed", 8, "cannot be set in env.options", "set seed"),
        ("reward_clip", True, "cannot be set in env.options", "env.reward_clip"),
        ("name", "Breakout-v5", "Tiltyard itself passes 'name' to EnvPool", "leave it out"),
    ],
)
def test_invalid_options_are_refused_by_name(option: str, value: object, output: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_any(Env(id="envpool:Pong-v5", options={option: value}), BASE)
    (problem,) = caught.value.problems
    assert problem.setting == f"env.options.{option}" and output in problem.message and hint in problem.hint


@installed
def test_options_reach_the_env() -> None:
    env = Env(id="envpool:Pong-v5", options={"frame_skip": 2, "stack_num": 3, "img_height": 42, "gray_scale": False})
    made = make_any(env, BASE)
    assert made.observation_space.shape == (9, 42, 84) and made.observation_space.dtype == np.uint8
    assert frames_per_step(made) == 2
    obs, _ = made.reset(seed=1)
    assert made.observation_space.contains(obs) and obs.std() > 0


@installed
def test_spaces_match_the_observations() -> None:
    walker = make_any(Env(id="envpool:BipedalWalker-v3"), BASE)
    assert np.isneginf(walker.observation_space.low).all()  # EnvPool declares 1e-38 as lower bound
    obs, _ = walker.reset(seed=0)
    assert walker.observation_space.contains(obs) and (obs < 0).any()
    assert walker.action_space == gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    bits = make_any(Env(id="envpool:Play2048-v1"), BASE)
    assert bits.observation_space.contains(bits.reset(seed=0)[0])
    tetris = make_any(Env(id="envpool:Tetris-v0"), BASE)
    assert tetris.action_space == gymnasium.spaces.MultiDiscrete([4, 10], dtype=np.int32)


# ---------------------------------------------------------------------------------------------- episodes


@installed
def test_rows_are_stepped_by_envpool() -> None:
    group = group_of(Env(id="envpool:CartPole-v1"), 2)
    assert isinstance(group.stepping, NativeStepping)
    group.reset()
    pool = group.stepping.vector._rows.pool
    assert any(base.__module__ == "envpool.classic_control.classic_control_envpool" for base in type(pool).__mro__)
    assert "classic_control_envpool" in Path("/proc/self/maps").read_text()
    ours, _ = EnvPool("CartPole-v1").reset(seed=7)
    assert not np.allclose(ours, gymnasium.make("CartPole-v1").reset(seed=7)[0])
    group.close()


@installed
def test_termination_at_the_time_limit_is_not_truncation() -> None:
    steps, terminated, truncated = fall()
    assert (terminated, truncated) == (True, False)
    assert fall(max_episode_steps=steps) == (steps, True, False)
    assert fall(max_episode_steps=steps - 1) == (steps - 1, False, True)
    raw = raw_pool("CartPole-v1", 7, max_episode_steps=steps)
    raw.reset()
    for _ in range(steps):
        _, _, raw_terminated, raw_truncated, _ = raw.step(np.array([1]))
    assert (raw_terminated[0], raw_truncated[0]) == (False, True)  # EnvPool itself reports a truncation


@installed
def test_time_limit_is_passed_to_envs_whose_reward_depends_on_it() -> None:
    paid = []
    for options in ({}, {"max_episode_steps": 50}):
        env = EnvPool("MiniGrid-Empty-5x5-v0", **options)
        env.reset(seed=0)
        steps = [env.step(action) for action in (2, 2, 1, 2, 2)]
        paid.append(steps[-1][1])
        assert steps[-1][2:4] == (True, False)
    assert paid == pytest.approx([1 - 0.9 * 5 / 100, 1 - 0.9 * 5 / 50])
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(50)] == [(False, False)] * 49 + [(False, True)]


@installed
def test_seeds_determine_episodes() -> None:
    def played(env: Any, seed: int) -> list[tuple[Any, ...]]:
        rng, output = np.random.default_rng(0), [(env.reset(seed=seed)[0].tobytes(),)]
        for _ in range(8):
            obs, *rest = env.step(rng.uniform(-2, 2, 1).astype(np.float32))
            output.append((obs.tobytes(), *rest))
        return output

    one, other = EnvPool("Pendulum-v1"), EnvPool("Pendulum-v1")
    first = played(one, 7)
    assert played(one, 8) != first
    assert played(one, 7) == first == played(other, 7)
    assert not np.array_equal(one.reset()[0], one.reset()[0])  # without a seed, the random stream continues
    group = group_of(Env(id="envpool:Pendulum-v1"), 3)
    assert len(np.unique(group.reset().obs["obs"], axis=0)) == 3
    group.close()


@installed
@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [("CartPole-v1", {}, 200), ("Breakout-v5", {"episodic_life": True, "img_height": 42, "img_width": 42}, 400)],
)
def test_steps_and_episodes_equal_those_of_a_raw_pool(name: str, options: dict[str, Any], steps: int) -> None:
    """The raw pool resets in the step after an end; in Breakout that is the next life."""
    group = group_of(Env(id=f"envpool:{name}", options=options), 1)
    seed = row_seeds(episode_seed(5, "train", 0, 0), 1)
    raw = raw_pool(name, int(seed[0]), **options)
    now, (seen, _), rng = group.reset(), raw.reset(), np.random.default_rng(1)
    total, length, ends, before = 0.0, 0, 0, 0  # EnvPool counts steps over all lives of a game
    for _ in range(steps):
        assert np.array_equal(now.obs["obs"], seen)
        chosen = rng.integers(0, raw.action_space.n, (1, 1))
        now = group.step(chosen.astype(np.float32))
        seen, reward, terminated, truncated, info = raw.step(chosen[0])
        total, length = total + float(reward[0]), length + 1
        assert (now.reward[0], now.terminated[0], now.truncated[0]) == (reward[0], terminated[0], truncated[0])
        assert length == info["elapsed_step"][0] - before
        if terminated[0] or truncated[0]:
            (episode,) = now.episodes
            assert (episode.total, episode.length) == (total, length) and np.array_equal(now.final_obs["obs"], seen)
            seen, _, _, _, info = raw.step(np.array([0]))
            total, length, ends, before = 0.0, 0, ends + 1, int(info["elapsed_step"][0])
    assert ends > 5  # more than the number of lives in a game
    group.close()


@installed
@pytest.mark.parametrize(
    ("env", "steps"),
    [
        (Env(id="envpool:CartPole-v1", options={"max_episode_steps": 12}), count(1000)),
        (Env(id="envpool:CartPole-v1", time_limit=9), count(1000)),
        (Env(id="envpool:Pong-v5", time_limit=10, options={"img_height": 42, "img_width": 42}), 30),
        (Env(id="envpool:Reacher-v5", time_limit=20), 50),
        (Env(id="envpool:MiniGrid-Empty-5x5-v0", options={"max_episode_steps": 20}), 70),
        (Env(id="envpool:TSP-v1"), 60),
    ],
    ids=["cut by EnvPool", "cut by us", "images", "float64", "dict", "masks"],
)
def test_rows_stepped_in_one_call_equal_single_envs(env: Env, steps: int) -> None:
    rows, name = 2, env.id.partition(":")[2]
    single = [EnvPool(name, **env.options) for _ in range(rows)]
    group, leaves = group_of(env, rows, threads=2), observation_leaves(single[0].observation_space)
    assert isinstance(group.stepping, NativeStepping) and group.data.restore_mode == "fresh"
    seeds = row_seeds(episode_seed(5, "train", 0, 0), rows)
    seen = [one.reset(seed=int(seed))[0] for one, seed in zip(single, seeds, strict=True)]
    now, rng, ended, length = group.reset(), np.random.default_rng(1), 0, [0] * rows
    for _ in range(steps):
        for row in range(rows):
            assert all(np.array_equal(now.obs[key][row], value) for key, value in encode(leaves, seen[row]).items())
            assert now.mask is None or np.array_equal(now.mask[row], seen[row][MASK])
        chosen = group.codec.random_rows(rng, rows, now.mask)
        now = group.step(chosen)
        for row, (one, action) in enumerate(zip(single, group.codec.decode_rows(chosen), strict=True)):
            obs, reward, terminated, truncated, _ = one.step(action)
            length[row] += 1
            truncated = (truncated or length[row] == env.time_limit) and not terminated
            assert (now.terminated[row], now.truncated[row]) == (terminated, truncated)
            assert now.reward[row] == np.float32(reward)
            if terminated or truncated:
                kept = encode(leaves, obs)
                assert all(np.array_equal(now.final_obs[key][row], value) for key, value in kept.items())
                obs, _ = one.reset()  # without a seed: the row's random stream continues
                length[row], ended = 0, ended + 1
            seen[row] = obs
    assert ended >= 2 * rows and group.stats.frames_taken == steps * rows * frames_per_step(single[0])
    group.close()


@installed
def test_threads_are_limited_by_rows_and_setting() -> None:
    for rows, threads, expected in ((3, 2, 2), (2, 7, 2), (1, None, 1)):
        group = group_of(Env(id="envpool:CartPole-v1"), rows, threads=threads)
        group.reset()
        assert group.stepping.vector._rows.pool.config["num_threads"] == expected
        group.close()


@installed
def test_with_wrappers_or_frameskip_rows_are_stepped_one_by_one() -> None:
    assert has_native(Env(id="envpool:CartPole-v1"))
    for more in ({"native": False}, {"frameskip": 2}, {"frame_stack": 2}, {"isolate": "thread"}):
        env = Env(id="envpool:CartPole-v1", **more)
        assert not has_native(env)
    spec = spec_from_json(examine(Env(id="envpool:CartPole-v1", native=False), BASE, False))
    assert spec.restore_mode == "rerun" and spec.renders and spec.frameskip == 1


@installed
def test_videos_are_rendered_by_envpool_or_refused() -> None:
    for name, shape in (("CartPole-v1", (400, 600, 3)), ("Pong-v5", (210, 160, 3))):
        env = Env(id=f"envpool:{name}")
        made = make_any(env, BASE, render=True)
        assert can_render(env, made, BASE)
        made.reset(seed=0)
        made.step(0)
        picture = made.render()
        assert picture.shape == shape and picture.dtype == np.uint8 and picture.std() > 0
    for name in ("FrozenLake-v1", "Ant-v5"):
        env = Env(id=f"envpool:{name}")
        assert not can_render(env, make_any(env, BASE, render=True), BASE)
        with pytest.raises(UseError, match=f"env envpool:{name} cannot be recorded"):
            require_recordable(spec_from_json(examine(env, BASE, False)), env)


# ---------------------------------------------------------------------------------------------- runs


def weights(runs: Path) -> dict[str, np.ndarray]:
    newest, _ = checkpoint.newest_valid(find("last", runs))
    assert newest is not None
    return state_file.read_tree(newest.folder / "policies", "main")["weights"]


@installed
@pytest.mark.slow
def test_training_is_repeatable_and_the_run_can_be_evaluated_and_recorded(tiltyard: Command, runs: Path) -> None:
    def train() -> dict[str, np.ndarray]:
        output = tiltyard("train", "envpool:CartPole-v1", *TINY)
        assert "the env steps all rows in one call" in output.stderr
        return weights(runs)

    first = train()
    assert find("last", runs).status()["progress"]["env_steps"] == 3 * 64
    output = tiltyard("eval", "last", "--episodes", "3", "--video")
    assert "mean and 95 % interval of 3 episodes" in output.stdout + output.stderr
    assert [film for film in find("last", runs).folder.rglob("*.mp4") if film.stat().st_size > 1000]
    again = train()
    assert all(np.array_equal(first[key], again[key]) for key in first)


@installed
def test_single_rows_are_restored_and_native_rows_begin_new_episodes() -> None:
    def played(native: bool) -> tuple[list[str], bool]:
        env = Env(id="envpool:CartPole-v1", native=native)
        one, other = group_of(env, 2), group_of(env, 2)
        one.reset()
        rng = np.random.default_rng(0)
        for _ in range(30):
            one.step(one.codec.random_rows(rng, 2))
        other.reset()
        output, same = other.load(one.save()), True
        for _ in range(30):
            action = one.codec.random_rows(rng, 2)
            same &= np.array_equal(one.step(action).obs["obs"], other.step(action).obs["obs"])
        return output, same

    assert played(native=False) == ([], True)
    output, same = played(native=True)
    assert "begins new episodes after a resume: 2 of 2 running episodes were cut" in output[0] and not same
