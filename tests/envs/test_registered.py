"""Envs that other packages register with Gymnasium, and PettingZoo's turn-based games: made, trained, filmed, resumed."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command
from tests.evaluation.test_video import read_frames
from tiltyard.config.sections import Env
from tiltyard.envs.make import make_any
from tiltyard.envs.pettingzoo import as_parallel
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.spaces import hash_words, spec_from_json
from tiltyard.envs.vector import make_group
from tiltyard.errors import UseError

BASE = [Path.cwd()]
TIC_TAC_TOE = Env(id="pettingzoo.classic.tictactoe_v3:env")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "preset"),
    [
        ("MiniGrid-DoorKey-5x5-v0", "minigrid"),
        ("InvertedPendulum-v5", "mujoco"),
        ("FrozenLake-v1", "classic"),
        ("Acrobot-v1", "classic"),
        ("pettingzoo.classic.tictactoe_v3:env", "classic"),
    ],
)
def test_env_trains_is_filmed_and_resumed_without_a_display(
    env: str, preset: str, tiltyard: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    small = (
        "engine.envs=2",
        "algo.rollout=32",
        "algo.minibatch=32",
        "algo.epochs=1",
        "eval.every=0",
        "env.time_limit=20",
    )
    tiltyard("train", env, f"use=[{preset}]", "stop.env_steps=128", *small)
    (run,) = runs.glob("*/0001-*")
    tiltyard("eval", str(run), "--episodes", "1", "--video")
    (video,) = (run / "videos").glob("*.mp4")
    _, frames = read_frames(video)
    assert len(frames) > 1 and frames[0].std() > 1, "the film shows something"
    tiltyard("resume", str(run), "stop.env_steps=256")
    (checkpoint,) = (run / "checkpoints").glob("*256")
    assert checkpoint.is_dir()


def test_mission_is_read_as_text() -> None:
    env = Env(id="MiniGrid-DoorKey-5x5-v0")
    spec = spec_from_json(examine(env, BASE, False))
    assert {name: item.kind for name, item in spec.obs.items()} == {
        "direction": "discrete",
        "image": "box",
        "mission": "text",
    }
    group = make_group(GroupConfig(env, spec, 1, 0, BASE))
    expected = hash_words("use the key to open the door and then get to the goal")
    assert np.array_equal(group.reset().obs["mission"][0], expected)
    group.close()


@pytest.mark.slow
def test_mission_reaches_isolated_envs() -> None:
    env = Env(id="MiniGrid-Empty-5x5-v0", isolate="process")
    spec = spec_from_json(examine(env.model_copy(update={"isolate": "none"}), BASE, False))
    group = make_group(GroupConfig(env, spec, 1, 0, BASE))
    assert np.array_equal(group.reset().obs["mission"][0], hash_words("get to the green goal square"))
    group.close()


@pytest.mark.slow
def test_mujoco_films_without_shadows_and_multisampling_and_without_a_display() -> None:
    """In a process of its own, because MuJoCo chooses its way to draw when it is imported."""
    code = """
from pathlib import Path
from tiltyard.config.sections import Env
from tiltyard.envs.make import make_any
from tiltyard.envs.pettingzoo import as_parallel
make_any(Env(id="InvertedPendulum-v5"), [Path.cwd()]).close()
made = make_any(Env(id="InvertedPendulum-v5"), [Path.cwd()], render=True)
made.reset(seed=0)
quality = made.unwrapped.model.vis.quality
print(made.render().std() > 1, quality.offsamples, quality.shadowsize)
"""
    without = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "MUJOCO_GL")}
    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "0", "0"], done.stderr


@pytest.mark.parametrize(
    ("env_id", "package", "extra"),
    [
        ("MiniGrid-Empty-8x8-v0", "minigrid", "minigrid"),
        ("BabyAI-GoToObj-v0", "minigrid", "minigrid"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
    ],
)
def test_hint_is_the_install_command_of_a_missing_package(
    env_id: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to make an import fail
    with pytest.raises(UseError, match="not installed") as missing:
        make_any(Env(id=env_id), BASE)
    assert f"pip install 'tiltyard[{extra}]'" in missing.value.hint


def test_unknown_ids_and_options_are_refused() -> None:
    with pytest.raises(UseError, match="not a known env") as unknown:
        make_any(Env(id="MiniGrid-Emtpy-8x8-v0"), BASE)
    assert "MiniGrid-Empty-8x8-v0" in unknown.value.hint
    with pytest.raises(UseError, match="does not take the option 'forward_reward_wieght'") as option:
        make_any(Env(id="HalfCheetah-v5", options={"forward_reward_wieght": 1.0}), BASE)
    assert option.value.hint and not option.value.details


def test_turn_based_game_gives_each_player_its_reward() -> None:
    """Player 1 takes the left column while player 2 plays elsewhere; an action of the waiting player is ignored."""
    spec = spec_from_json(examine(TIC_TAC_TOE, BASE, False))
    assert spec.agents == ("player_1", "player_2") and spec.masked
    group = make_group(GroupConfig(TIC_TAC_TOE, spec, 2, 0, BASE))
    now = group.reset()
    moves = [(0, 8), (8, 3), (1, 8), (8, 4), (2, 8)]  # (player 1, player 2); the one who waits always says 8
    for index, pair in enumerate(moves):
        assert now.mask is not None and now.mask.any(axis=1).all(), "whoever waits may say anything"
        waiting = 1 - index % 2
        assert now.mask[waiting].all() and now.mask[1 - waiting].sum() == 9 - index
        now = group.step(np.array(pair, np.float32).reshape(2, 1))
    assert now.terminated.tolist() == [True, True] and now.reward.tolist() == [1.0, -1.0]
    group.close()


def test_conversion_needs_pettingzoo(monkeypatch: pytest.MonkeyPatch) -> None:
    made = importlib.import_module("pettingzoo.classic.tictactoe_v3").env()
    monkeypatch.setitem(sys.modules, "pettingzoo.utils", None)  # Python's own way to make an import fail
    with pytest.raises(UseError, match="needs the package 'pettingzoo'"):
        as_parallel(made)


def test_parallelizable_env_is_converted() -> None:
    spec = spec_from_json(examine(Env(id="pettingzoo.classic.rps_v2:env"), BASE, False))
    assert spec.agents == ("player_0", "player_1") and spec.parallel


def test_mujocos_warnings_are_pythons_and_no_log_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HalfCheetah's file has a deprecated attribute, of which MuJoCo writes a log into the working folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.warns(DeprecationWarning, match="MuJoCo: .*settotalmass"):
        made = make_any(Env(id="HalfCheetah-v5"), BASE)
    made.close()
    assert list(tmp_path.iterdir()) == []
