"""Non-finite numbers: the run stops at once, names the tensor, and keeps the last checkpoint and the batch."""

from pathlib import Path

import pytest

import tiltyard as product
from tests.conftest import Command
from tiltyard.run import checkpoint, state_file
from tiltyard.run.folder import find

SETTINGS = [
    "engine.envs=2",
    "algo.rollout=16",
    "algo.minibatch=32",
    "algo.epochs=1",
    "save.env_steps=32",
    "eval.every=0",
    "track.tensorboard=false",
]
ENV = """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Rots(CartPoleEnv):
    def __init__(self, *, what: str, after: int = 60):
        super().__init__()
        self.what, self.left = what, after

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.left -= 1
        if self.left <= 0:
            if self.what == "reward":
                reward = float("nan")
            elif self.what == "infinite reward":
                reward = float("inf")
            elif self.what == "observation":
                obs = obs * np.float32("nan")
            elif self.what == "shape":
                obs = obs[:3]
            elif self.what == "dtype":
                obs = obs.astype(np.float64)
        return obs, reward, terminated, truncated, info
"""


@pytest.mark.parametrize(
    ("what", "named"),
    [("reward", "reward is nan"), ("infinite reward", "reward is inf"), ("observation", "observation 'obs' holds NaN")],
)
def test_non_finite_values_from_an_env_stop_the_run(
    tiltyard: Command, runs: Path, tmp_path: Path, what: str, named: str
) -> None:
    (tmp_path / "rots.py").write_text(ENV)
    done = tiltyard("train", "rots.py:Rots", f"env.options.what={what}", *SETTINGS, expect=1)
    run = find("last", runs)
    assert named in done.stderr and "row" in done.stderr
    assert run.state == "failed" and named in run.status()["reason"]
    newest, complaints = checkpoint.newest_valid(run)
    assert newest is not None and newest.env_steps == 96 and complaints == []
    assert state_file.read_tree(run.folder / "bad_batch", "batch")


def test_shape_or_dtype_that_changes_later_stops_the_run(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "rots.py").write_text(ENV)
    assert (
        "shape [3] but its space declares [4]"
        in tiltyard("train", "rots.py:Rots", "env.options.what=shape", *SETTINGS, expect=1).stderr
    )
    assert "float64" in tiltyard("train", "rots.py:Rots", "env.options.what=dtype", *SETTINGS, expect=1).stderr
    tiltyard(
        "train",
        "rots.py:Rots",
        "env.options.what=dtype",
        "env.strict=false",
        *SETTINGS,
        "stop.env_steps=200",
        "eval.at_end=false",
    )


def test_non_finite_loss_is_named(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class CustomModel(nn.Module):\n"
        "    def __init__(self, spec, outputs):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(4, outputs + 1)\n"
        "        self.calls = 0\n"
        "    def forward(self, obs):\n"
        "        out = self.layer(obs['obs'])\n"
        "        if torch.is_grad_enabled():\n"
        "            self.calls += 1\n"
        "            if self.calls > 3:\n"
        "                out = out * torch.tensor(float('nan'))\n"
        "        return out[:, :-1], out[:, -1]\n"
    )
    done = tiltyard("train", "CartPole-v1", "model.id=net.py", *SETTINGS, expect=1)
    assert "policy loss is not a finite number" in done.stderr
    run = find("last", runs)
    assert checkpoint.newest_valid(run)[0] is not None
    batch = state_file.read_tree(run.folder / "bad_batch", "batch")
    assert batch["action"].shape[:2] == (1, 32)
    assert product.load_policy(run.folder).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
