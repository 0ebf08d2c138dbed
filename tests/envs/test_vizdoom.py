"""Doom with ViZDoom: names, ends, determinism, actions, and clean-up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from tiltyard.config.sections import Env
from tiltyard.envs.make import make_any
from tiltyard.envs.probe import examine
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.suites.vizdoom import Doom, scenarios
from tiltyard.errors import UseError

BASE = [Path(__file__).parent]


def engines(instance: str) -> list[int]:
    """Return the pids of the engine processes of one game."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"+viz_instance_id {instance}" in words:
            found.append(int(process.name))
    return found


def shared(instance: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"ViZDoom*{instance}"))


def played(env: Doom, seed: int, steps: int) -> list[tuple]:
    rng, output = np.random.default_rng(0), [(env.reset(seed=seed)[0].tobytes(),)]
    for _ in range(steps):
        obs, *rest = env.step(int(rng.integers(env.action_space.n)))
        output.append((obs.tobytes(), *rest))
        if rest[1] or rest[2]:
            break
    return output


@pytest.mark.parametrize(
    ("env", "output", "hint"),
    [
        (Env(id="doom:basik"), "unknown Doom scenario 'basik'", "basic"),
        (Env(id="doom:doom2"), "commercial", "deathmatch"),
        (Env(id="doom:cig"), "other players", "deathmatch"),
        (Env(id="doom:basic", options={"resolution": "160x12"}), "160x12", "160x120"),
        (Env(id="doom:basic", options={"actions": "all"}), "'all'", "groups"),
        (Env(id="doom:my_way_home", options={"variables": True}), "no game variables", "remove"),
    ],
)
def test_invalid_names_and_options_are_refused_in_one_sentence(env: Env, output: str, hint: str) -> None:
    with pytest.raises(UseError) as caught:
        make_any(env, BASE)
    assert output in caught.value.message and hint in caught.value.hint


def test_basic_is_probed_and_counts_frames() -> None:
    spec = spec_from_json(examine(Env(id="doom:basic"), BASE, False))
    assert spec.obs["obs"].shape == (3, 72, 128) and spec.obs["obs"].image
    assert spec.frameskip == 4 and spec.restore_mode == "rerun" and spec.renders
    assert spec.action.parts[0].options == 4


def test_timeouts_truncate_and_the_last_image_is_never_black(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = Doom("basic", frameskip=30)
    before, _ = env.reset(seed=1)
    while True:
        obs, reward, terminated, truncated, _ = env.step(0)
        if terminated or truncated:
            break
        before = obs
    assert (terminated, truncated) == (False, True) and reward < 0
    assert obs.any() and np.array_equal(obs, before)
    env.close()
    assert list(tmp_path.iterdir()) == []  # the engine writes its files elsewhere
    env = Doom("take_cover", frameskip=20)
    env.reset(seed=1)
    assert next(end for _ in range(200) if any(end := env.step(0)[2:4])) == (True, False)
    env.close()


@pytest.mark.parametrize("scenario", ["basic", "deathmatch"])
def test_episodes_are_deterministic_and_independent_of_earlier_ones(scenario: str) -> None:
    assert scenario in scenarios()
    env, other = Doom(scenario), Doom(scenario)
    first = played(env, 5, 40)
    assert first == played(env, 5, 40) != played(env, 6, 40)
    assert played(env, 5, 40) == first == played(other, 5, 40)
    env.close()
    other.close()


def test_buttons_are_separate_or_in_groups() -> None:
    env = Doom("deadly_corridor", actions="any", grey=True, height=36, width=64, variables=True)
    assert env.action_space == spaces.MultiBinary(7)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs) and obs["screen"].shape == (1, 36, 64) and obs["variables"][0] == 100
    assert env._buttons(np.array([1, 0, 0, 1, 0, 0, 1])) == [1, 0, 0, 1, 0, 0, 1]
    env.step(np.array([1, 0, 0, 1, 0, 0, 1]))
    env.close()
    env = Doom("deadly_corridor", actions="groups")
    assert env.action_space == spaces.MultiDiscrete([3, 3, 3, 2])  # left or right, turns, forward or back, attack
    assert env._buttons(np.array([2, 1, 1, 1])) == [0, 1, 1, 1, 0, 1, 0]
    env.close()


def test_video_shows_the_rendered_screen() -> None:
    env = make_any(Env(id="doom:basic"), BASE, render=True)
    env.reset(seed=0)
    assert env.render().shape == (120, 160, 3) and env.render().std() > 10
    env.close()


@pytest.mark.parametrize("first", ["owner", "engine"])
def test_killed_process_leaves_no_engine_shared_memory_or_folder(tmp_path: Path, first: str) -> None:
    code = "import time; from tiltyard.envs.suites.vizdoom import Doom; env = Doom('basic'); env.reset(seed=1)\n"
    code += "print(env._game.get_instance_id(), flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert child.stdout is not None
    instance = child.stdout.readline().strip()
    assert len(engines(instance)) == 1 and len(shared(instance)) == 3 and len(list(tmp_path.iterdir())) == 1
    if first == "engine":  # its name can no longer be read
        os.kill(engines(instance)[0], signal.SIGKILL)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 20
    while (engines(instance) or shared(instance) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engines(instance) == [] and shared(instance) == [] and list(tmp_path.iterdir()) == []


def test_signal_to_the_process_group_does_not_end_the_engine() -> None:
    code = "import signal, sys; from tiltyard.envs.suites.vizdoom import Doom; env = Doom('basic'); env.reset(seed=1)\n"
    code += "signal.signal(signal.SIGINT, lambda *_: None); print('up', flush=True); sys.stdin.readline()\n"
    code += "print(env.step(0)[1], flush=True); env.close()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    os.killpg(child.pid, signal.SIGINT)  # like Ctrl-C in a terminal
    assert child.communicate("go on\n")[0] == "-4.0\n" and child.returncode == 0
