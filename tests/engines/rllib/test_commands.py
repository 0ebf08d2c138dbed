"""Commands with Ray: train, stop, kill, resume; and the trained policy without Ray."""

import json
import os
import pickletools
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray.rllib", reason="Ray RLlib is not installed: pip install 'tiltyard[ray]'")

from tests.conftest import in_own_process
from tests.counts import LONG
from tests.engines.rllib.conftest import SMALL
from tests.faults.test_kill import wait_until
from tiltyard.run import state_file
from tiltyard.run.events import read_events
from tiltyard.run.folder import find

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NO_RAY = "raise ImportError('Ray is not installed')\n"


def trained(*words: str, expect: int = 0) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "tiltyard", "train", *words, "--plain"], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return find("last").folder


def without_ray(folder: Path, *words: str) -> str:
    """Run `tiltyard ...` with a Python in which Ray cannot be imported."""
    blocked = folder / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "ray.py").write_text(NO_RAY)
    environment = os.environ | {"PYTHONPATH": str(blocked)}
    done = subprocess.run(
        [sys.executable, "-m", "tiltyard", *words], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


GOALS = {
    "ppo": ("CartPole-v1", 450, ["engine.kind=rllib", "engine.runners=0"]),
    "impala": ("CartPole-v1", 400, []),
    "appo": ("CartPole-v1", 400, []),
    "dqn": ("CartPole-v1", 450, ["engine.runners=0", "engine.envs=4"]),
    "sac": ("Pendulum-v1", -200, ["engine.runners=0", "engine.envs=1", "eval.every=1000"]),
    "rllib:PPO": (
        "CartPole-v1",
        450,
        [
            "engine.runners=0",
            "algo.rollout=128",
            "algo.options={lr: 1e-3, train_batch_size_per_learner: 1024, minibatch_size: 256, num_epochs: 6}",
        ],
    ),
    "rllib:TQC": (
        "Pendulum-v1",
        -200,
        [
            "engine.runners=0",
            "engine.envs=1",
            "eval.every=1000",
            "algo.options={actor_lr: 3e-4, replay_buffer_config: {type: EpisodeReplayBuffer, capacity: 100000}}",
        ],
    ),
}
QUICK = ("ppo",)


@pytest.mark.parametrize("algo", GOALS)
def test_algorithms_learn_and_policies_need_no_ray(runs: Path, tmp_path: Path, algo: str) -> None:
    if algo not in QUICK and not LONG:
        pytest.skip("minutes: make test-long runs it")
    env, goal, words = GOALS[algo]
    run = trained(
        env,
        f"algo.id={algo}",
        "eval.every=5000",
        *words,
        f"stop.return={goal}",
        "stop.env_steps=400000",
        "eval.episodes=20",
    )
    status = json.loads((run / "status.json").read_text())
    assert "stop.return" in status["reason"], status
    measured = json.loads(without_ray(tmp_path, "eval", str(run), "--episodes", "20", "--json"))
    assert measured["mean"] >= goal - abs(goal) * 0.15  # not the seeds of the last evaluation


def test_custom_files_train_on_runners_without_being_registered(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class CustomModel(torch.nn.Module):\n"
        "    def __init__(self, spec, outputs, width=64):\n"
        "        super().__init__()\n"
        "        size = spec.obs['obs'].shape[0]\n"
        "        self.body = torch.nn.Sequential(torch.nn.Linear(size, width), torch.nn.Tanh(),\n"
        "                                        torch.nn.Linear(width, width), torch.nn.Tanh())\n"
        "        self.pi, self.vf = torch.nn.Linear(width, outputs), torch.nn.Linear(width, 1)\n"
        "    def forward(self, obs):\n"
        "        x = self.body(obs['obs'])\n"
        "        return self.pi(x), self.vf(x).squeeze(-1)\n"
    )
    end = (
        ["eval.every=10000", "stop.return=150", "stop.env_steps=300000"]
        if LONG
        else ["stop.updates=2", "save.updates=1"]
    )
    run = trained(
        "CarPass-v0",
        "env.wrappers=[{id: discrete_steps, options: {steps: 21}}]",
        "model.id=net.py",
        "model.normalise={returns: true}",
        "algo.lr=5e-4",
        "algo.entropy=0.05",
        "engine.kind=rllib",
        "engine.runners=1",
        "engine.envs=16",
        *end,
    )
    status = json.loads((run / "status.json").read_text())
    assert ("stop.return" if LONG else "stop.updates") in status["reason"]
    assert "net.py" in (run / "experiment.yaml").read_text()
    measured = json.loads(without_ray(tmp_path, "eval", str(run), "--episodes", "4", "--json"))
    if LONG:
        assert measured["mean"] >= 130
    first, *_, last = (state_file.read_tree(each / "policies", "main")["weights"] for each in _checkpoints(run))
    own = "model.body.0.weight"
    assert (first[own] != last[own]).any(), "the model from the file is trained"


def test_run_is_stopped_killed_and_resumed(runs: Path, tmp_path: Path) -> None:
    """SIGTERM saves; kill -9 loses at most one save interval; no process of Ray is left; no file is a pickle."""
    words = [*SMALL, "engine.kind=rllib", "engine.runners=1", "engine.envs=4", "stop.env_steps=1e9", "eval.every=0"]
    place = Path(tempfile.mkdtemp(prefix="tyt-", dir="/tmp"))  # socket paths must be short
    words += ["save.updates=1", f"engine.temp_dir={place}"]
    child = _started("train", "CartPole-v1", *words)
    wait_until(lambda: list(runs.glob("*/0*/checkpoints/0*")), 200)
    run = find("last")
    child.send_signal(signal.SIGTERM)
    assert child.wait(120) == 75
    stopped = _env_steps(run.folder)
    assert json.loads((run.folder / "status.json").read_text())["state"] == "stopped"
    assert _ray_processes(place) == []

    child = _started("resume", run.id)
    wait_until(lambda: _env_steps(run.folder) > stopped, 200)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    killed = _env_steps(run.folder)
    wait_until(lambda: _ray_processes(place) == [], 200)  # Ray's processes notice that the driver was killed

    child = _started("resume", run.id)
    wait_until(lambda: _env_steps(run.folder) > killed, 200)
    child.send_signal(signal.SIGTERM)
    assert child.wait(120) == 75
    assert [event["kind"] for event in read_events(run)].count("started") == 3
    assert [path for path in run.folder.rglob("*") if path.is_file() and _is_pickle(path)] == []
    assert list((run.folder / "logs" / "ray").iterdir())
    shutil.rmtree(place)


def test_sigterm_while_ray_starts_is_a_stop(runs: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="tyt-", dir="/tmp"))
    words = [*SMALL, "engine.kind=rllib", "engine.runners=1", "stop.env_steps=1e9", f"engine.temp_dir={place}"]
    child = _started("train", "CartPole-v1", *words)
    # Ray's first process: the start takes seconds. A fork of the trainer has its command line until it starts a program.
    wait_until(lambda: any("tiltyard\0train" not in command for command in _commands(place).values()), 200)
    child.send_signal(signal.SIGTERM)
    assert child.wait(200) == 75
    status = find("last").status()
    assert (status["state"], status["reason"]) == ("stopped", "received SIGTERM")
    wait_until(lambda: _ray_processes(place) == [], 200)
    shutil.rmtree(place)


def test_token_and_address_of_another_cluster_are_ignored(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs train although the token is wrong and the address is unreachable."""
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("another token")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    both = [_started("train", "CartPole-v1", *SMALL, "engine.kind=rllib", "engine.runners=1", "engine.envs=4",
                     "stop.updates=3", f"name=run{number}") for number in range(2)]  # fmt: skip
    assert [child.wait(300) for child in both] == [0, 0]
    assert (home / ".ray" / "auth_token").read_text() == "another token"
    assert sorted(path.name for path in runs.iterdir() if path.name.startswith("run")) == ["run0", "run1"]


def test_without_ray_the_error_names_the_install_command(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Simulate that the extra `ray` is not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "true = m.version\n"
        "def version(name):\n"
        "    if name == 'ray': raise m.PackageNotFoundError(name)\n"
        "    return true(name)\n"
        "m.version = version\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = in_own_process("train", "CartPole-v1", "algo.id=dqn", expect=2)
    assert "pip install 'tiltyard[ray]'" in output.stderr and "Traceback" not in output.stderr
    assert list(runs.glob("*/0*")) == []


# ------------------------------------------------------------------------------------------------ helpers


def _started(*words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tiltyard", *words, "--plain"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _env_steps(folder: Path) -> int:
    return max((int(path.name.split(".")[0]) for path in _checkpoints(folder)), default=0)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("0*"))


def _commands(place: Path) -> dict[int, str]:
    """Return the processes with this folder in their command line, with that."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(place) in (command := path.read_text()):
                found[int(path.parent.name)] = command
        except OSError:
            continue
    return found


def _ray_processes(place: Path) -> list[int]:
    return list(_commands(place))


def _is_pickle(path: Path) -> bool:
    """Return whether a file is a pickle from its first opcode to its STOP."""
    data = path.read_bytes()
    if not data.startswith((b"\x80", b"(", b"]", b"}", b"c")):
        return False
    try:
        *_, (last, _, at) = pickletools.genops(data)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError):  # raised by the disassembler for other files
        return False
    return last.name == "STOP" and at is not None
