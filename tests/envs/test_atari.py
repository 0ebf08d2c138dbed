"""Atari with ALE: names, frame counts, ends, determinism, rendering, and many rows stepped in one call."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiltyard.config.load import load
from tiltyard.config.sections import Env
from tiltyard.engines import make_engine
from tiltyard.envs.actions import action_spec
from tiltyard.envs.episodes import episode_seed, row_seeds
from tiltyard.envs.make import frames_per_step, make_any
from tiltyard.envs.probe import examine, probe
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.single_agent_vector import NativeStepping, has_native
from tiltyard.envs.spaces import observation_specs, spec_from_json
from tiltyard.envs.suites.atari import Atari, AtariVector
from tiltyard.envs.vector import make_group
from tiltyard.errors import ConfigError, UseError
from tiltyard.plugins import resolve
from tiltyard.processes.resources import usable_cores
from tiltyard.types import EnvSpec

BASE = [Path(__file__).parent]


def played(env: Atari, seed: int, steps: int) -> list[tuple]:
    """Return everything the env returns for a seed and random actions."""
    rng, output = np.random.default_rng(0), [(env.reset(seed=seed)[0].tobytes(),)]
    for _ in range(steps):
        obs, *rest = env.step(int(rng.integers(env.action_space.n)))
        output.append((obs.tobytes(), *rest))
    return output


@pytest.mark.parametrize(
    ("name", "output", "hint"),
    [
        ("atari:pogn", "unknown Atari game 'pogn'", "pong"),
        ("atari:MsPacman", "MsPacman", "ms_pacman"),
        ("atari:", "''", ""),
    ],
)
def test_unknown_games_are_refused_in_one_sentence(name: str, output: str, hint: str) -> None:
    with pytest.raises(UseError) as caught:
        make_any(Env(id=name), BASE)
    assert output in caught.value.message and hint in caught.value.hint


def test_options_are_checked_and_the_game_cannot_be_set() -> None:
    for option, hint in (("framskip", "frameskip"), ("game", "leave it out")):
        with pytest.raises(ConfigError) as caught:
            make_any(Env(id="atari:pong", options={option: 1}), BASE)
        assert caught.value.problems[0].setting == f"env.options.{option}" and hint in caught.value.problems[0].hint
    with pytest.raises(UseError, match="stack = 0 must be an integer"):
        make_any(Env(id="atari:pong", options={"stack": 0}), BASE)


def test_without_ale_the_hint_is_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)  # marks the module as missing
    monkeypatch.delitem(sys.modules, "tiltyard.envs.suites.atari")
    for name in ("atari:pong", "ALE/Pong-v5"):
        with pytest.raises(UseError) as caught:
            make_any(Env(id=name), BASE)
        assert "'ale_py', which is not installed" in caught.value.message
        assert caught.value.hint.startswith("pip install 'tiltyard[atari]'")


def test_name_of_a_suite_is_not_an_import_string(tmp_path: Path) -> None:
    (tmp_path / "atari.py").write_text("class pong: ...")
    experiment = load("atari:pong", base=[tmp_path]).experiment
    assert "env.id" not in {name for name, _, _ in resolve.named_plugins(experiment)}
    resolve.refuse_foreign_code(resolve.named_plugins(experiment), [tmp_path], [Path("/")])


def test_frames_are_counted_separately_from_env_steps() -> None:
    env = Env(id="atari:pong", frameskip=3, options={"frameskip": 2})
    spec = spec_from_json(examine(env, BASE, False))
    assert spec.frameskip == 6 and spec.restore_mode == "rerun" and spec.renders
    group = make_group(GroupConfig(env, spec, 1, 0, BASE), native="never")
    group.reset()
    for _ in range(5):
        group.step(np.zeros((1, 1), np.float32))
    assert group.stats.frames_taken == group.stats.frames(0) == 30 and group.fps == 10
    assert frames_per_step(make_any(Env(id="atari:pong"), BASE)) == 4
    raw = spec_from_json(examine(Env(id="ALE/Pong-v5"), BASE, False))
    assert raw.frameskip == 4 and raw.obs["obs"].shape == (210, 160, 3) and "atari:pong" in raw.notes[0]
    assert frames_per_step(make_any(Env(id="ALE/Pong-v5", options={"frameskip": 1}), BASE)) == 1


def test_episodes_are_deterministic() -> None:
    for options in ({}, {"sticky": 0.25, "grey": False, "size": 42, "stack": 2}):
        one, other = Atari("breakout", **options), Atari("breakout", **options)
        assert one.observation_space.contains(one.reset(seed=1)[0])
        first = played(one, 7, 20)
        assert played(one, 8, 20) != first
        assert played(one, 7, 20) == first == played(other, 7, 20)


def test_frame_limit_truncates_and_a_lost_life_terminates() -> None:
    env = Atari("pong", max_frames=20)
    env.reset(seed=3)
    ends = [env.step(0)[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    env = Atari("breakout", episodic_life=True)
    env.reset(seed=3)
    rng = np.random.default_rng(0)
    assert next(end for _ in range(500) if any(end := env.step(int(rng.integers(4)))[2:4])) == (True, False)


def test_video_shows_the_colours_of_the_screen() -> None:
    env = make_any(Env(id="atari:pong"), BASE, render=True)
    env.reset(seed=0)
    for _ in range(30):
        env.step(0)
    picture = env.render()
    assert picture.shape == (210, 160, 3) and picture.dtype == np.uint8
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3 and (picture[..., 0] != picture[..., 2]).any()


@pytest.mark.parametrize(
    ("env", "steps"),
    [
        (Env(id="atari:pong", time_limit=20), 70),
        (Env(id="atari:breakout", options={"episodic_life": True, "sticky": 0.1, "size": 42}), 120),
    ],
    ids=["pong cut short", "breakout with lives"],
)
def test_rows_stepped_in_one_call_equal_single_envs(env: Env, steps: int) -> None:
    rows, game = 2, env.id.partition(":")[2]
    single = [Atari(game, **env.options) for _ in range(rows)]
    obs, action = observation_specs(single[0].observation_space, 1), action_spec(single[0].action_space)
    group = make_group(GroupConfig(env, EnvSpec(obs, action, frameskip=4), rows, 5, BASE), threads=2)
    assert isinstance(group.stepping, NativeStepping) and group.data.restore_mode == "fresh"
    seeds = row_seeds(episode_seed(5, "train", 0, 0), rows)
    seen = np.stack([one.reset(seed=int(seed))[0] for one, seed in zip(single, seeds, strict=True)])
    now, rng, ended, length = group.reset(), np.random.default_rng(1), 0, [0] * rows
    for _ in range(steps):
        assert np.array_equal(now.obs["obs"], seen)
        chosen = rng.integers(0, single[0].action_space.n, (rows, 1))
        now = group.step(chosen.astype(np.float32))
        for row, one in enumerate(single):
            obs, reward, terminated, truncated, _ = one.step(int(chosen[row, 0]))
            length[row] += 1
            truncated = (truncated or length[row] == env.time_limit) and not terminated
            assert (now.reward[row], now.terminated[row], now.truncated[row]) == (reward, terminated, truncated)
            if terminated or truncated:
                assert np.array_equal(now.final_obs["obs"][row], obs)
                obs, _ = one.reset()  # without a seed: the row's random stream continues
                length[row], ended = 0, ended + 1
            seen[row] = obs
    assert ended >= 2 * rows and group.stats.frames_taken == steps * rows * 4
    group.close()


def test_with_wrappers_or_frameskip_rows_are_stepped_one_by_one() -> None:
    assert has_native(Env(id="atari:pong")) and not has_native(Env(id="doom:basic"))
    for more in ({"native": False}, {"frameskip": 2}, {"frame_stack": 2}, {"wrappers": ["grey_image"]}):
        assert not has_native(Env(id="atari:pong", **more))


def threads_of(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_threads_are_limited_to_the_cores_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cgroups, a job step sees all cores of its node."""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    before = threads_of("self")
    games = AtariVector("pong", 4, {}, None)
    assert threads_of("self") == before + 1
    games.close()


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_cores_are_divided_among_the_threads_of_the_workers() -> None:
    found = []
    for workers in (1, 2):
        words = [
            f"engine.workers={workers}",
            "engine.mode=async",
            "engine.envs=4",
            "algo.rollout=4",
            "algo.minibatch=8",
        ]
        experiment = load("atari:pong", words).experiment
        engine: Any = make_engine(experiment, probe(experiment.env, base=BASE), BASE)
        engine.step()
        found.append(threads_of(engine.pool.workers[0].pid))
        engine.close()
    cores = usable_cores()
    assert found[0] - found[1] == min(4, cores) - min(2, cores // 2)
