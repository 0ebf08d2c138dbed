"""`tiltyard data collect`: envs, runs and mixtures, what it prints, signals, and wrong use."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.counts import count
from tiltyard.collection.progress import ProgressView
from tiltyard.data import dataset_file
from tiltyard.data.folder import read_episodes, read_manifest
from tiltyard.run.folder import find

SMALL = [
    *("engine.kind=serial", "engine.envs=2", "algo.rollout=16", "algo.minibatch=32", "algo.epochs=1"),
    *("eval.at_end=false", "eval.every=0", "stop.env_steps=64", "track.tensorboard=false"),
]
HERE = ["--workers", "0"]


def policies(folder: str) -> list[str]:
    return [json.loads(entry.meta)["policy"] for entry in read_manifest(Path(folder))]


def test_env_is_collected_and_the_next_commands_are_printed(tiltyard: Command, tmp_path: Path) -> None:
    words = ["data", "collect", "CartPole-v1", "--out", "a b", "--seed", "7", *HERE]
    output = tiltyard(*words, "--episodes", "3", "env.frame_stack=2")
    lines = output.stdout.splitlines()
    assert lines[0] == "CartPole-v1: 3 episodes" and "seed       7" in lines and "folder     'a b'" in lines
    assert re.fullmatch(r"env steps  \d+", lines[1]) and re.fullmatch(r"size       [\d.]+ KiB", lines[3])
    assert lines[-2:] == ["next       tiltyard data verify 'a b'", "           tiltyard data stats 'a b'"]
    output = tiltyard(*words, "--episodes", "5", "env.frame_stack=2")
    assert output.stdout.startswith("CartPole-v1: 5 episodes, 2 of them new\n")
    found = json.loads(tiltyard(*words, "--episodes", "5", "env.frame_stack=2", "--json").stdout)
    assert (found["episodes"], found["added"], found["folder"]) == (5, 0, str(tmp_path / "a b"))
    assert next(read_episodes("a b")).obs["obs"].shape[1:] == (8,)
    assert "with other settings" in tiltyard(*words, "--episodes", "5", expect=2).stderr
    about = dataset_file.read(tmp_path / "a b")
    assert about is not None and len(about.made) == 2 and about.seed == 7


def test_run_is_collected_with_its_policy_or_others(tiltyard: Command, runs: Path) -> None:
    """The name of a run may be that of its env: then the env is meant."""
    Path("slow.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Slow(CartPoleEnv):\n    tau = 0.01\n"
    )
    tiltyard("train", "slow.py:Slow", *SMALL, "name=CartPole-v1")
    Path("slow.py").unlink()  # the copy in the run folder is used
    run = find("last")
    tiltyard("data", "collect", "last", "--out", "a", "--episodes", "2", "--seed", "1", "--max-steps", "20", *HERE)
    (first, second) = read_manifest(Path("a"))
    assert json.loads(first.meta) | {"env": ""} == {
        "env": "",
        "policy": "last",
        "run": run.id,
        "checkpoint": "000000000064",
        "greedy": True,
    }
    assert first.length <= 20 and first.seed != second.seed
    assert dataset_file.read(Path("a")).env_id == "plugins/slow.py:Slow"  # type: ignore[union-attr]
    mixture = ["--policy", "1=sampled", "--policy", f"2=epsilon:0.2:{run.id}@64", "--policy", "1=random"]
    tiltyard("data", "collect", run.id, "--out", "b", "--episodes", "8", "--seed", "3", *mixture, *HERE)
    assert set(policies("b")) == {"sampled", f"epsilon:0.2:{run.id}@64", "random"}
    tiltyard("data", "collect", run.id, "--out", "c", "--episodes", "8", "--seed", "3", *mixture, *HERE)
    both = [read_manifest(Path(name)).column("sha256").tolist() for name in ("b", "c")]
    assert both[0] == both[1], "sampled actions follow from the seed, too"
    tiltyard("data", "collect", "CartPole-v1", "--out", "d", "--episodes", "1", *HERE)
    assert dataset_file.read(Path("d")).env_id == "CartPole-v1" and policies("d") == ["random"]  # type: ignore[union-attr]
    output = tiltyard("data", "collect", "basic", "--out", "e", "--episodes", "1", "--policy", run.id, *HERE, expect=2)
    assert "the policy was trained with observations" in output.stderr and not Path("e").exists()
    output = tiltyard("data", "collect", "last", "--out", "e", "--episodes", "1", "algo.lr=1", *HERE, expect=2)
    assert "cannot change algo" in output.stderr and not Path("e").exists()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["basic", "--episodes", "3"], "needs --out", "--help"),
        (["basic", "--out", "x"], "needs --episodes", "--help"),
        (["basic", "--out", "x", "--episodes", "none"], "'none' must be a whole number", "--help"),
        (["basic", "--out", "x", "--episodes", "3", "--workers", "-1"], "must be a whole number", "--help"),
        (["basic", "--out", "x", "--episodes", "3", "--seed", "-1"], "'-1' must be a whole number", "--help"),
        (["basic", "--out", "x", "--episodes", "3", "--tasks", "2"], "--tasks needs --on", "--workers"),
        (["basic", "--out", "x", "--episodes", "3", "--policy", "sticky:7"], "p = 7 must be", "sticky:0.9"),
        (["basic", "--out", "x", "--episodes", "3", "--policy", "no.py:Act"], "there is no file no.py", "paths are"),
        (["basic", "--out", "x", "--episodes", "3", "--policy", "stikcy"], "--policy stikcy: ", "other policies"),
        (["nonsense", "--out", "x", "--episodes", "3"], "env.id = nonsense is not a known env", "give a Gymnasium id"),
        (["basic", "--out", "x/y", "--episodes", "3", "--workers", "0"], "cannot write a dataset", "another folder"),
        (["basic", "--out", "x", "--episodes", "3", "--workers", "0"], "cannot write a dataset", "another folder"),
    ],
)
def test_wrong_use_is_refused(words: list[str], message: str, hint: str, tiltyard: Command, tmp_path: Path) -> None:
    if "cannot" in message:
        (tmp_path / "x").write_text("a file")
    output = tiltyard("data", "collect", *words, expect=2)
    assert output.stdout == "" and message in output.stderr and hint in output.stderr
    assert "cannot" in message or not (tmp_path / "x").exists()


def test_newer_schema_and_read_only_folders_are_refused(tiltyard: Command, tmp_path: Path) -> None:
    words = ["data", "collect", "basic", "--episodes", "2", *HERE, "--out"]
    tiltyard(*words, "a")
    values = json.loads((tmp_path / "a" / "dataset.json").read_text())
    (tmp_path / "a" / "dataset.json").write_text(json.dumps({**values, "schema": 99, "more": 1}))
    assert "newer Tiltyard (schema 99" in tiltyard(*words, "a", expect=2).stderr
    assert "cannot write a dataset to /proc/x" in tiltyard(*words, "/proc/x", expect=2).stderr


# ---------------------------------------------------------------------------------------------- progress and signals


def start(*words: str, **streams: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tiltyard", "data", "collect", *words]
    return subprocess.Popen(command, text=True, **streams)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT][: count(10)])
def test_stopped_command_can_be_typed_again(number: signal.Signals, tiltyard: Command, tmp_path: Path) -> None:
    words = ["CartPole-v1", "--out", "data", "--workers", "2"]
    process = start(*words, "--episodes", "100000", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 100
    while not list(tmp_path.glob("data/episodes/*/*")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=100)
    assert (process.returncode, stdout) == (75, "")
    assert f"stopped by {number.name}: " in stderr and "hint: type the same command again" in stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a worker was killed between a file and its line
        there = len(read_manifest(tmp_path / "data"))
    assert len(list(tmp_path.glob("data/episodes/*/*"))) == there > 0
    output = tiltyard("data", "collect", *words[:3], "--episodes", str(there + 2), *HERE)
    assert output.stdout.startswith(f"CartPole-v1: {there + 2:,} episodes, ")
    seeds = read_manifest(tmp_path / "data").column("seed").tolist()
    assert len(seeds) == len(set(seeds)) == len(list(read_episodes(tmp_path / "data"))) == there + 2


def test_progress_is_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    with ProgressView(1_000, 200, stream) as view:
        view.update(200, 0)
        assert re.fullmatch(r"200 of 1,000 episodes, 0 env steps at 0/s", view.line(200, 0))
        assert re.fullmatch(r"600 of 1,000 episodes, 8,000 env steps at [\d,]+/s, 0:00:00 left", view.line(600, 8_000))
        assert "left" not in view.line(1_000, 9)
    assert stream.getvalue() == "", "no line in the first seconds"


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    front, back = pty.openpty()
    with os.fdopen(back, "w") as stream, ProgressView(10, 2, stream) as view:
        view.update(7, 1_234)
        view._bar.refresh()
        output = b""
        while b"1,234 env steps" not in output and select.select([front], [], [], 5)[0]:
            output += os.read(front, 4096)
    os.close(front)
    assert b"collecting" in output and b"7/10" in output and b"1,234 env steps" in output
