"""Supervision of workers: every hang is detected, slow workers are not killed, and other workers are not affected."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines import test_serial
from tests.engines.test_local import TWO
from tiltyard.engines.engine_state import read_group
from tiltyard.engines.local import PRELOAD, worker_pool
from tiltyard.envs.watchdog import STEPPING
from tiltyard.errors import EnvError
from tiltyard.processes import proc
from tiltyard.processes.fork_server import ForkServer
from tiltyard.processes.reaper import GRACE
from tiltyard.run.state_file import write_trees

TIMEOUT = 60
SERVER = ForkServer(PRELOAD)
build = partial(test_serial.build, server=SERVER)

# Files next to the env select its faults, so that it behaves well while it is probed.
ENV = """
import os, subprocess, time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv
HERE = Path(__file__).parent
WORKER = Path("/proc/self/comm").read_text().strip() if Path("/proc/self/comm").exists() else ""

def once(name):
    try:
        (HERE / name).unlink()
    except FileNotFoundError:
        return False
    return True

class CustomEnv(CartPoleEnv):
    def __init__(self):
        super().__init__()
        time.sleep(0.6 if (HERE / "slow").exists() else 0)
        if (HERE / "daemons").exists():  # somebody who no longer belongs to whoever started them
            text = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True).stdout
            (HERE / f"daemon-{os.getpid()}-{int(text)}").touch()
        if once("hang-in-making"):
            time.sleep(1000)

    def reset(self, **more):
        if (HERE / "simulators").exists():
            simulator = subprocess.Popen(["sleep", "600"])
            simulator.terminate()
            (HERE / "ended").write_text(str(simulator.wait(20)))
        return super().reset(**more)

    def step(self, action):
        time.sleep(0.03 if (HERE / "slow-steps").exists() else 0)
        if once("one-slow-step"):
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass
        if once("die-in-step"):
            os._exit(3)
        return super().step(action)
"""
STATEFUL = """
    def get_state(self):
        if once("hang-in-saving"):
            time.sleep(1000)
        return {"state": [float(x) for x in self.state]}

    def set_state(self, state):
        self.state = tuple(state["state"])
"""


@pytest.fixture(scope="module", autouse=True)
def one_fork_server() -> Iterator[None]:
    with SERVER:
        yield


@pytest.fixture
def env(tmp_path: Path) -> str:
    (tmp_path / "env.py").write_text(ENV)
    return str(tmp_path / "env.py")


def pids(engine: Any) -> list[int]:
    return [member.pid for member in engine.pool.workers]


def test_two_killed_workers_are_replaced_even_if_a_new_one_hangs(env: str, tmp_path: Path) -> None:
    """If the exit is reported before the dead worker's pipe is read, the driver must not read the new worker's pipe."""
    engine = build(env, *TWO, "env.reset_timeout=2")
    engine.step()
    (tmp_path / "hang-in-making").touch()
    for pid in pids(engine):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    events = engine.step().events
    assert len(events) == 3 and sum("did not return from reset() within 2 s" in event for event in events) == 1
    engine.close()


MODEL = """
import torch
from torch import nn
class CustomModel(nn.Module):
    during = None
    def __init__(self, spec, outputs):
        super().__init__()
        self.body, self.value = nn.Linear(4, outputs), nn.Linear(4, 1)
    def forward(self, obs):
        if torch.is_grad_enabled() and self.during:
            self.during()
        return self.body(obs["obs"]), self.value(obs["obs"]).squeeze(-1)
"""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_worker_killed_during_an_update_is_replaced_at_once(env: str, tmp_path: Path, mode: str) -> None:
    """Not only after the update, which may take long."""
    (tmp_path / "model.py").write_text(MODEL)
    sizes = ("algo.rollout=64", "algo.minibatch=2", "algo.epochs=4", "eval.every=0")
    engine: Any = build(env, f"model.id={tmp_path / 'model.py'}", *TWO, *sizes, f"engine.mode={mode}")
    engine.step()
    calls, replaced = [0], []

    def during() -> None:
        calls[0] += 1
        if calls[0] == 1:
            os.kill(pids(engine)[0], signal.SIGKILL)
        if engine.pool.restarts:
            replaced.append(calls[0])
        elif calls[0] > 1:
            time.sleep(0.1)

    engine.learner.net.model.during = during
    events = engine.step().events
    assert calls[0] == 512 and replaced, "none of these gradient steps saw another worker"
    assert len(events) == 1 == engine.pool.restarts and "worker 0" in events[0]
    engine.learner.net.model.during = None
    assert engine.step().events == (), "the new one works"
    engine.close()


def test_error_after_too_many_restarts_names_the_command_to_change_them(env: str) -> None:
    engine = build(env, *TWO, "engine.restarts=0")
    engine.step()
    os.kill(pids(engine)[0], signal.SIGKILL)
    with pytest.raises(EnvError, match=r"engine\.restarts is exhausted") as raised:
        engine.step()
    assert "tiltyard fork" in raised.value.hint, "resume refuses another engine.restarts"
    engine.close()


def test_pause_of_the_driver_is_not_a_hang_of_a_worker(env: str) -> None:
    engine = build(env, *TWO, "env.step_timeout=1")
    engine.step()
    engine.pool._check_heartbeats()
    time.sleep(1.5)  # such as an evaluation
    engine.pool.send(0, {"do": "fill", "slot": 0})
    engine.shared.beats[0, 1] = STEPPING  # its state between the command and the first env step
    engine.pool._check_heartbeats()
    assert engine.pool.workers[0].kill_reason == "" and engine.pool.restarts == 0
    engine.close()


def test_suspended_job_has_no_hung_workers(env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "SUSPENDED_SECONDS", 2.0)
    engine = build(env, *TWO, "env.step_timeout=3")
    engine.step()
    (tmp_path / "one-slow-step").touch()
    select, stood = engine.pool._selector.select, []

    def stand_still(timeout: float) -> Any:
        if stood or (tmp_path / "one-slow-step").exists():  # no worker is in the slow step yet
            return select(timeout)
        stood.append(True)
        for pid in pids(engine):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.5)
        for pid in pids(engine):
            os.kill(pid, signal.SIGCONT)
        return []

    monkeypatch.setattr(engine.pool._selector, "select", stand_still)
    assert engine.step().events == () and stood
    engine.close()


def test_slow_start_of_a_new_worker_is_not_a_hang_in_the_previous_ones_step(env: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from torch import nn\n"
        "class CustomModel(nn.Module):\n"
        "    def __init__(self, spec, outputs):\n"
        "        super().__init__()\n"
        "        self.policy, self.worth = nn.Linear(4, outputs), nn.Linear(4, 1)\n"
        "        time.sleep(2.5 if (Path(__file__).parent / 'slow-model').exists() else 0)\n"
        "    def forward(self, obs):\n"
        "        return self.policy(obs['obs']), self.worth(obs['obs']).squeeze(-1)\n"
    )
    engine = build(env, *TWO, "env.step_timeout=1", f"model={tmp_path / 'model.py'}")
    engine.step()
    (tmp_path / "slow-model").touch()
    (tmp_path / "die-in-step").touch()
    events = engine.step().events
    assert len(events) == 1 and "exited with code 3" in events[0]
    engine.close()


def test_timeout_applies_to_each_env_copy_that_is_made(env: str, tmp_path: Path) -> None:
    engine = build(env, "engine.workers=1", "engine.envs=4", "engine.threads=1", "env.reset_timeout=1.5")
    (tmp_path / "slow").touch()
    os.kill(pids(engine)[0] or _born(engine), signal.SIGKILL)
    assert len(engine.step().events) == 1  # only the kill; making four copies takes 2.4 s, which is not a timeout
    engine.close()


def _born(engine: Any) -> int:
    while pids(engine)[0] is None:
        engine.pool._handle_events()
        time.sleep(0.01)
    return pids(engine)[0]


def test_timeout_applies_to_each_step_of_a_rerun(env: str, tmp_path: Path) -> None:
    words = ("engine.workers=1", "engine.envs=4", "engine.threads=1", "env.reset_timeout=1", "env.restore_mode=rerun")
    engine = build(env, *words)
    for _ in range(2):
        engine.step()
    write_trees(tmp_path / "saved", engine.save(tmp_path / "saved"))
    engine.close()
    (tmp_path / "slow-steps").touch()
    again = build(env, *words)
    began = time.monotonic()
    assert again.load(tmp_path / "saved") == [] and again.pool.restarts == 0
    assert time.monotonic() - began > 1, "nothing was replayed"
    again.close()


def test_hang_during_save_is_detected_and_the_checkpoint_is_still_written(env: str, tmp_path: Path) -> None:
    Path(env).write_text(ENV + STATEFUL)
    engine = build(env, *TWO, "env.reset_timeout=1")
    engine.step()
    (tmp_path / "hang-in-saving").touch()
    write_trees(tmp_path / "saved", engine.save(tmp_path / "saved"))
    assert engine.pool.restarts == 1 and "did not return" in engine.pool.events[0]
    engine.close()


def test_disk_error_in_a_worker_is_raised_and_no_worker_is_replaced(tmp_path: Path) -> None:
    engine = build("CartPole-v1", *TWO)
    engine.step()
    (tmp_path / "saved" / "engine" / "group-1.json").mkdir(parents=True)  # so that no file can be written there
    with pytest.raises(OSError, match="directory"):
        write_trees(tmp_path / "saved", engine.save(tmp_path / "saved"))
    assert engine.pool.restarts == 0
    assert engine.step().progress.updates == 2
    engine.close()


def test_new_worker_saves_episodes_with_new_seeds(tmp_path: Path) -> None:
    engine = build("CartPole-v1", *TWO, "algo.rollout=1", "algo.minibatch=4")
    engine.step()
    write_trees(tmp_path / "first", engine.save(tmp_path / "first"))
    os.kill(pids(engine)[0], signal.SIGKILL)
    write_trees(tmp_path / "second", engine.save(tmp_path / "second"))
    assert engine.pool.restarts == 1
    first, second = (read_group(tmp_path / name, 0) for name in ("first", "second"))
    assert first is not None and second is not None and second["envs"] is not None
    assert not {*first["envs"]["seeds"]} & {*second["envs"]["seeds"]}
    engine.close()


def test_envs_in_workers_can_end_processes_they_started(env: str, tmp_path: Path) -> None:
    engine = build(env, *TWO)
    (tmp_path / "simulators").touch()
    engine.step()
    assert (tmp_path / "ended").read_text() == str(-signal.SIGTERM) and engine.pool.restarts == 0
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find what an env has started")
def test_daemons_of_a_worker_survive_the_death_of_another_worker(env: str, tmp_path: Path) -> None:
    (tmp_path / "daemons").touch()
    engine = build(env, *TWO)
    engine.step()
    dead, alive = pids(engine)
    os.kill(dead, signal.SIGKILL)
    left = {
        owner: {int(path.name.split("-")[2]) for path in tmp_path.glob(f"daemon-{owner}-*")} for owner in pids(engine)
    }
    assert all(len(found) == 2 for found in left.values())
    until = time.monotonic() + TIMEOUT
    while any(_runs(pid) for pid in left[dead]) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(GRACE + 0.5)
    assert not any(_runs(pid) for pid in left[dead]) and all(_runs(pid) for pid in left[alive])
    engine.close()
    assert not any(_runs(pid) for pid in left[alive])


def _runs(pid: int) -> bool:
    return proc.read(pid) is not None


def test_time_of_the_driver_between_steps_does_not_count_as_waiting() -> None:
    engine = build("CartPole-v1", *TWO)
    engine.step()
    time.sleep(3)
    engine.step()
    waited = [
        filled.spent["wait"] for filled in engine.taken
    ]  # in seconds, because fractions of a few milliseconds prove nothing
    assert len(waited) == 2 and max(waited) < 1.5, "of the three seconds"
    engine.close()


def test_replaced_policies_do_not_increase_the_lag_of_samples() -> None:
    words = ("policies={a: {}, b: {}}", 'match={"*": {a: 0.5, b: 0.5}}', "engine.mode=async", "engine.max_lag=2")
    engine = build("CartPole-v1", *TWO, *words)
    engine.step()
    engine.step()
    for _ in range(4):
        engine.adopt("b", engine.snapshot("a"), {})
    found = engine.step().metrics
    assert found["lag/discarded"] == 0 and found["lag/max"] <= 2
    engine.close()
