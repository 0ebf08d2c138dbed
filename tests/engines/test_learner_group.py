"""Several learners, each in its own process: the same policy as with one, and an error with a cause if one exits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Command
from tests.engines.test_serial import build
from tiltyard.engines.learner import check_learners
from tiltyard.engines.local.engine import LocalEngine
from tiltyard.engines.serial import SerialEngine
from tiltyard.errors import TiltyardError, UseError
from tiltyard.processes.resources import usable_cores
from tiltyard.run import checkpoint
from tiltyard.run.folder import find
from tiltyard.run.state_file import write_trees

pytestmark = pytest.mark.slow  # starts and ends processes

LSTM = ("model.memory.kind=lstm", "model.memory.size=8", "model.normalise.obs=true", "model.normalise.returns=true")
SHORT = ["engine.envs=2", "algo.rollout=16", "algo.minibatch=32", "eval.every=0", "eval.at_end=false"]
SHORT += ["track.tensorboard=false", "engine.learners=2"]


def pids(engine: Any) -> list[int]:
    """Return the pids of all learners except the driver's."""
    return [learner.pid for learner in engine.policies.first.processes._learners]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def wait_until_gone(found: list[int]) -> None:
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        assert time.monotonic() < until, [pid for pid in found if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)


def assert_same(one: Any, two: Any) -> None:
    ours, theirs = one.snapshot(), two.snapshot()
    for name, array in ours.weights.items():
        np.testing.assert_allclose(theirs.weights[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    assert ours.settings == theirs.settings and ours.optimiser["adam"]["steps"] == theirs.optimiser["adam"]["steps"]


def test_two_learners_equal_one_also_after_load_and_adopt(tmp_path: Path) -> None:
    settings = [*LSTM, "env.options.pauses=true", "algo.rollout=24", "algo.epochs=1", "engine.workers=2"]
    settings += ["engine.envs=4", "algo.lr.kind=kl_adaptive", "algo.lr.start=1e-3"]
    one, two = build("visitors", *settings, "engine.kind=serial"), build("visitors", *settings, "engine.learners=2")
    assert isinstance(one, SerialEngine) and isinstance(two, LocalEngine)
    assert "shared by 2 learners" in " ".join(two.describe()) and "learners" not in " ".join(one.describe())
    for _ in range(3):
        a, b = one.step(), two.step()
        shared = {name: b.metrics[name] for name in a.metrics}
        assert a.metrics == pytest.approx(shared, rel=1e-3, abs=1e-5, nan_ok=True)
    assert_same(one, two)
    (pid,) = pids(two)
    assert name_of(pid) == "tiltyard-l1"

    write_trees(tmp_path / "saved", one.save(tmp_path / "saved"))
    one.step()
    two.load(tmp_path / "saved")
    two.step()
    assert_same(one, two)

    given = one.snapshot()
    for engine in (one, two):
        engine.step()
        engine.adopt("main", given, {"lr": 1e-2})
        engine.step()
    assert_same(one, two)
    assert two.snapshot().optimiser["adam"]["steps"] > given.optimiser["adam"]["steps"]
    one.close()
    two.close()
    wait_until_gone([pid])


def test_cores_are_divided_among_the_learners() -> None:
    cores = usable_cores()
    engine: Any = build("CartPole-v1", "engine.workers=0", f"engine.learners={min(64, cores)}", "engine.threads=auto")
    assert (engine.threads, engine.why) == (1, "no other core available")
    engine.close()  # learners start with the first update, so there are none


# ------------------------------------------------------------------------------------------------ models that use random numbers

DROPS = """
from torch import nn
class CustomModel(nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, outputs + 1))
    def forward(self, obs):
        out = self.layers(obs["obs"])
        return out[:, :-1], out[:, -1]
"""


def test_random_state_of_learners_is_restored_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drops.py").write_text(DROPS)
    engine = build("CartPole-v1", "model.id=drops.py", "engine.learners=2")
    engine.step()
    write_trees(tmp_path / "saved", engine.save(tmp_path / "saved"))
    ends = []
    for _ in range(2):
        engine.step()
        engine.step()
        ends.append({name: array.tobytes() for name, array in engine.snapshot().weights.items()})
        assert engine.load(tmp_path / "saved") == []
    assert ends[0] == ends[1]
    engine.close()


# ------------------------------------------------------------------------------------------------ faults


def test_killed_learner_ends_the_step_with_the_cause() -> None:
    engine: Any = build("CartPole-v1", *LSTM, "engine.learners=3")
    engine.step()
    first, second = pids(engine)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(TiltyardError, match=rf"learner 2 \(process {second}\) was killed by SIGKILL") as raised:
        engine.step()
    assert "engine.learners=1" in raised.value.hint
    engine.close()
    wait_until_gone([first, second])


FAILS = """
import torch
from torch import nn
class CustomModel(nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, outputs + 1), 0
    def forward(self, obs):
        self.calls += torch.is_grad_enabled()
        with open("/proc/self/comm") as file:
            if self.calls > 8 and file.read().startswith("tiltyard-l"):
                raise ValueError('no more')
        out = self.layer(obs["obs"])
        return out[:, :-1], out[:, -1]
"""


def test_failed_learner_is_reported_and_the_checkpoint_is_kept_and_no_process_left(
    tiltyard: Command, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(FAILS)
    output = "raised ValueError: no more"
    settings = [*SHORT, "model.id=net.py", "algo.epochs=2", "save.updates=1"]
    done = tiltyard("train", "CartPole-v1", *settings, expect=1)
    run = find("last", runs)
    assert output in done.stderr and run.state == "failed" and output in run.status()["reason"]
    newest, complaints = checkpoint.newest_valid(run)
    assert newest is not None and newest.env_steps == 128 and complaints == []
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if name_of(int(pid)).startswith("tiltyard")]


DRIVER = """
from tests.engines.test_learner_group import build, pids
if __name__ == "__main__":
    engine = build("CartPole-v1", "engine.learners=2")
    engine.step()
    print(engine.policies.first.processes._fork_server._process.pid, *pids(engine), flush=True)
    while True:
        engine.step()
"""


def test_no_process_is_left_if_the_driver_is_killed() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    found = [int(word) for word in driver.stdout.readline().split()]
    assert len(found) == 2
    driver.kill()
    driver.wait()
    wait_until_gone(found)


# ------------------------------------------------------------------------------------------------ refused


def test_more_learners_than_gpus_are_refused() -> None:
    gpus = torch.cuda.device_count()
    with pytest.raises(UseError, match=rf"engine\.learners = 99 needs one GPU per learner, but torch finds {gpus}"):
        check_learners(99, torch.device("cuda"))
    check_learners(99, torch.device("cpu"))
