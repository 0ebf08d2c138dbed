"""Plug-ins as plain files: their code runs from the copy in the run folder, and later edits have no effect."""

from pathlib import Path

import numpy as np
import pytest

import tiltyard as product
from tests.conftest import Command
from tiltyard.run.folder import find

SETTINGS = [
    "engine.envs=2",
    "algo.rollout=16",
    "algo.minibatch=32",
    "algo.epochs=1",
    "stop.env_steps=64",
    "eval.episodes=2",
    "track.tensorboard=false",
]

MODEL = """
import layers
from torch import nn

class CustomModel(nn.Module):
    def __init__(self, spec, outputs, *, width: int = 7):
        super().__init__()
        self.body = layers.body(width)
        self.actor = nn.Linear(width, outputs)
        self.critic = nn.Linear(width, 1)

    def forward(self, obs):
        features = self.body(obs["obs"])
        return self.actor(features), self.critic(features).squeeze(-1)
"""
LAYERS = """
from torch import nn

def body(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU())
"""


def write_model(folder: Path) -> None:
    (folder / "nets").mkdir()
    (folder / "nets" / "customnet.py").write_text(MODEL)
    (folder / "nets" / "layers.py").write_text(LAYERS)


def test_model_file_is_used_and_its_options_are_checked(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    write_model(tmp_path)
    done = tiltyard("train", "CartPole-v1", "model={id: nets/customnet.py, options: {width: 5}}", *SETTINGS)
    # body 4 x 5 + 5, actor 5 x 2 + 2, critic 5 + 1: only the layers of the plug-in.
    assert "CustomModel (plugins/nets/customnet.py:CustomModel): 43 parameters" in done.stderr
    done = tiltyard("train", "CartPole-v1", "model={id: nets/customnet.py, options: {widht: 5}}", *SETTINGS, expect=2)
    assert "model.options.widht" in done.stderr and "did you mean 'width'" in done.stderr
    assert len(list(runs.glob("*/0*"))) == 1


def test_later_edits_do_not_change_a_run(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    write_model(tmp_path)
    tiltyard("train", "CartPole-v1", "model.id=nets/customnet.py", *SETTINGS)
    run = find("last", runs)
    (tmp_path / "nets" / "customnet.py").write_text("raise RuntimeError('edited')")
    (tmp_path / "nets" / "layers.py").write_text("raise RuntimeError('edited')")
    tiltyard("resume", "last", "stop.env_steps=128")
    tiltyard("eval", "last", "--episodes", "2")
    assert run.status()["progress"]["env_steps"] == 128
    assert product.load_policy(run.folder).net.parameter_count == 7 * 5 + 7 * 2 + 2 + 8
    done = tiltyard("train", "CartPole-v1", "model.id=nets/customnet.py", *SETTINGS, expect=2)
    assert "RuntimeError" in done.stderr and "edited" in done.stderr and "customnet.py" in done.stderr


def test_env_wrapper_and_encoder_files_are_used(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "import gymnasium, numpy as np, torch\n"
        "from torch import nn\n"
        "class Corridor(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def __init__(self, *, length: int = 4):\n"
        "        self.length = length\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        self.t = 0\n"
        "        return np.full(3, self.t, np.float32), {}\n"
        "    def step(self, action):\n"
        "        self.t += 1\n"
        "        return np.full(3, self.t, np.float32), 1.0, self.t == self.length, False, {'marker': 12.5}\n"
        "class Tripled(gymnasium.Wrapper):\n"
        "    def step(self, action):\n"
        "        obs, reward, *rest = self.env.step(action)\n"
        "        return obs, 3 * reward, *rest\n"
        "class Sum(nn.Module):\n"
        "    size = 1\n"
        "    def __init__(self, spec, *, gain: float = 1.0):\n"
        "        super().__init__()\n"
        "        self.gain = nn.Parameter(torch.tensor(gain))\n"
        "    def forward(self, x):\n"
        "        return x.sum(-1, keepdim=True) * self.gain\n"
    )
    done = tiltyard(
        "train", "parts.py:Corridor", "env.options.length=6", "env.wrappers=[parts.py:Tripled]",
        "model.encoder={id: 'parts.py:Sum', options: {gain: 0.5}}", *SETTINGS, "--json",
    )  # fmt: skip
    import json

    outcome = json.loads(done.stdout)
    assert outcome["metrics"]["eval/return"] == 18.0, "six steps of the env, tripled by the wrapper"
    assert outcome["metrics"]["episode/marker"] == 12.5, "scalars in the last info become metrics by name"
    gains = [
        array for name, array in product.load_policy(find("last", runs).folder).net.arrays().items() if "gain" in name
    ]
    assert gains and all(not np.array_equal(gain, np.float32(0.5)) for gain in gains), (
        "the encoder's parameter was trained"
    )


# ---------------------------------------------------------------------------------------------- copies of projects

# The return of an episode is SCALE x length.
PUSH = """
import gymnasium
import numpy as np

from . import SCALE


class Push(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        from beside import length

        self.t += 1
        return np.zeros(4, np.float32), SCALE, self.t >= length(), False, {}
"""
BESIDE = """
from pathlib import Path

def length():
    return int((Path(__file__).parent / "length.txt").read_text())
"""


def write_lab(folder: Path, scale: float, length: int) -> None:
    """Write lab.envs.push:Push: it has a relative import, and `step` imports a module that reads a file next to it."""
    (folder / "lab" / "envs").mkdir(parents=True, exist_ok=True)
    (folder / "lab" / "__init__.py").write_text("")
    (folder / "lab" / "scale.py").write_text(f"SCALE = {scale}\n")
    (folder / "lab" / "envs" / "__init__.py").write_text("from lab.scale import SCALE\n")
    (folder / "lab" / "envs" / "push.py").write_text(PUSH)
    (folder / "beside.py").write_text(BESIDE)
    (folder / "length.txt").write_text(str(length))


def returned(run: str) -> float:
    return product.evaluate(run, episodes=1).mean


def test_project_module_runs_from_its_copy_in_any_folder(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lab(tmp_path, 2.0, 3)
    tiltyard("train", "lab.envs.push:Push", "name=pushing", *SETTINGS)
    assert find("last", runs).experiment().env.id == "plugins/lab.envs.push:Push"
    assert returned("last") == 6.0
    write_lab(tmp_path, 100.0, 100)
    elsewhere = tmp_path / "elsewhere"
    write_lab(elsewhere, 1000.0, 1000)  # a normal import would find this one
    monkeypatch.chdir(elsewhere)
    monkeypatch.syspath_prepend(str(elsewhere))
    tiltyard("resume", "last", "stop.env_steps=128")
    assert find("last", runs).status()["eval_return"] == 6.0
    tiltyard("fork", "last", "name=forked", "stop.env_steps=192")
    assert [returned(name) for name in ("pushing", "forked")] == [6.0, 6.0]
    # An override on the command line names the one in the current folder.
    (elsewhere / "length.txt").write_text("5")
    assert product.evaluate("pushing", ["env.id=lab.envs.push:Push"], episodes=1).mean == 5000.0


def test_project_package_that_registers_an_id_runs_from_its_copy_in_any_folder(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is used in the probe, workers and this process, and for a resume next to a package of the same name."""
    write_lab(tmp_path, 2.0, 50)
    (tmp_path / "lab" / "__init__.py").write_text(
        "from gymnasium.envs.registration import register\n"
        "register('Push-v0', entry_point='lab.envs.push:Push', max_episode_steps=3)\n"
    )
    tiltyard("train", "lab:Push-v0", "engine.workers=1", *SETTINGS)
    run = find("last", runs)
    assert run.experiment().env.id == "plugins/lab:Push-v0" and run.status()["eval_return"] == 6.0
    elsewhere = tmp_path / "elsewhere"
    write_lab(elsewhere, 1000.0, 1000)
    monkeypatch.chdir(elsewhere)
    tiltyard("resume", "last", "stop.env_steps=128")
    assert run.status()["return"] == run.status()["eval_return"] == 6.0


def test_overrides_of_a_run_find_files_in_the_current_folder(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    tiltyard("train", "CartPole-v1", "name=cart", "model.id=nets/customnet.py", *SETTINGS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "short.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class CustomEnv(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        obs, reward, *_ = super().step(action)\n"
        "        return obs, 41.0, True, False, {}\n"
    )
    assert product.evaluate("cart", ["env.id=./short.py"], episodes=1).mean == 41.0
    (elsewhere / "net.py").write_text(MODEL.replace("import layers", "import layers, extra"))
    (elsewhere / "layers.py").write_text(LAYERS)
    (elsewhere / "extra.py").write_text("")
    tiltyard("fork", "cart", "model.id=./net.py", "name=forked", "stop.env_steps=96")
    run = find("forked", runs)
    assert run.experiment().model.id == "plugins/net.py:CustomModel"
    assert (run.folder / "plugins" / "extra.py").is_file() and run.state == "finished"


def test_plugin_that_does_not_work_as_a_copy_is_refused(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    write_lab(tmp_path, 2.0, 3)
    (tmp_path / "beside.py").write_text(BESIDE.replace('"length.txt"', '("length" + ".txt")'))
    done = tiltyard("train", "lab.envs.push:Push", *SETTINGS, expect=2)
    assert "works in its place but not as a copy" in done.stderr and "length.txt" in done.stderr
    assert not runs.exists()
    (tmp_path / "lab" / "scale.py").write_text("SCALE = 1 / 0\n")
    done = tiltyard("train", "lab.envs.push:Push", *SETTINGS, expect=2)
    assert f"{tmp_path}/lab/scale.py" in done.stderr, "what is wrong anywhere is told with the user's own path"
    assert "copy" not in done.stderr and not runs.exists()
