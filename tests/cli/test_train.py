"""Commands train, resume and fork."""

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.conftest import Command, in_own_process
from tiltyard.run import checkpoint, metrics, state_file
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

TINY = [
    "engine.envs=2",
    "algo.rollout=16",
    "algo.minibatch=32",
    "algo.epochs=1",
    "stop.env_steps=96",
    "track.tensorboard=false",
]
QUICK = [*TINY, "eval.episodes=2", "eval.time_limit=50"]


def test_train_without_a_file_prints_the_folder_and_the_next_commands(tiltyard: Command, runs: Path) -> None:
    done = tiltyard("train", "CartPole-v1", *QUICK)
    run = find("last", runs)
    assert done.stdout == f"{os.path.relpath(run.folder)}\n"
    assert f"tiltyard eval {run.id} --video" in done.stderr
    assert "ActorCritic (tiltyard.models.actor_critic): 9,155 parameters" in done.stderr
    status = run.status()
    assert (status["state"], status["reason"]) == ("finished", "stop.env_steps=96 reached (96)")
    assert [record["env_steps"] for record in metrics.read(run.metrics_file)][-1] == 96


def test_dry_run_checks_everything_and_prints_what_would_run(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    done = tiltyard("train", "CartPole-v1", *TINY, "--dry-run", "--seeds", "0-2")
    run = "CartPole-v1/NNNN-new-run"
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(lines) == ["run", "env", "model", "algo", "engine", "folder"]
    assert lines["run"] == run and lines["folder"] == str(runs / run)
    assert lines["algo"].startswith("ppo: a batch of 32 env steps") and "9,155 parameters" in lines["model"]
    broken = (
        "import torch\nclass Broken(torch.nn.Module):\n    def __init__(self, *_, **__):\n        raise KeyError('x')\n"
    )
    (tmp_path / "broken.py").write_text(broken)
    assert "KeyError" in tiltyard("train", "CartPole-v1", "model.id=broken.py:Broken", "--dry-run", expect=2).stderr
    assert not runs.exists()


def test_stdout_has_only_json_even_if_the_env_prints(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Loud(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        print('python says')\n"
        "        os.write(1, b'the C library says\\n')\n"
        "        return super().step(action)\n"
    )
    done = tiltyard("train", "loud.py:Loud", *QUICK, "env.time_limit=20", "env.strict=false", "--json")
    outcome = json.loads(done.stdout)
    assert outcome["state"] == "finished" and outcome["progress"]["env_steps"] == 96
    assert "python says" in done.stderr and "prints to stdout" in done.stderr


def test_expect_sets_the_exit_code_of_a_finished_run(tiltyard: Command, runs: Path) -> None:
    done = tiltyard("train", "CartPole-v1", *QUICK, "--expect", "return>=5000", expect=1)
    assert "expected return>=5000, but eval/return is" in done.stderr
    tiltyard("train", "CartPole-v1", *QUICK, "--expect", "return>0")
    done = tiltyard("train", "CartPole-v1", *QUICK, "--expect", "episode/score>0", expect=1)
    assert "episode/score was never recorded" in done.stderr
    done = tiltyard("resume", "last", "--expect", "speed/env_steps_per_second<0", expect=1)
    assert "but speed/env_steps_per_second is" in done.stderr
    assert len(list(runs.glob("*/0*"))) == 3


@pytest.mark.parametrize(
    ("expected", "overrides", "output"),
    [
        ("return", [], "write --expect 'return>=475'"),
        ("retrun>=1", [], "did you mean 'return'?"),
        ("eval/retrun>=1", [], "did you mean 'eval/return'?"),
        ("return>=1", ["eval.every=0", "eval.at_end=false"], "needs an evaluation"),
        ("eval/return_low>=1", ["eval.episodes=1"], "one episode has no interval"),
    ],
)
def test_invalid_expectation_is_refused_before_anything_starts(
    tiltyard: Command, runs: Path, expected: str, overrides: list[str], output: str
) -> None:
    assert output in tiltyard("train", "CartPole-v1", *QUICK, *overrides, "--expect", expected, expect=2).stderr
    assert not runs.exists()


def test_seeds_create_one_run_each(tiltyard: Command, runs: Path) -> None:
    tiltyard("train", "CartPole-v1", *QUICK, "--seeds", "3-4", "eval.at_end=false")
    assert [Run(folder).experiment().seed for folder in sorted(runs.glob("*/0*"))] == [3, 4]
    weights = [
        state_file.read_tree(next(folder.glob("checkpoints/0*")) / "policies", "main")["weights"]
        for folder in sorted(runs.glob("*/0*"))
    ]
    assert any((weights[0][name] != weights[1][name]).any() for name in weights[0])


def test_debug_reduces_all_sizes(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("env: CartPole-v1\nengine: {envs: 64}\nalgo: {rollout: 512, minibatch: 4096}\n")
    tiltyard("train", "x.yaml", "--debug")
    run = find("last", runs)
    assert run.experiment().batch <= 64
    assert run.state == "finished" and run.status()["progress"]["env_steps"] < 5000


def test_pdb_stops_where_the_env_raised(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Bad(CartPoleEnv):\n"
        "    taken = 0\n"
        "    def step(self, action):\n"
        "        self.taken += 1\n"
        "        treasure = 4242\n"
        "        assert self.taken < 40\n"
        "        return super().step(action)\n"
    )
    done = in_own_process("train", "bad.py:Bad", *TINY, "--pdb", given="p treasure\nq\n", expect=1)
    assert "4242" in done.stderr + done.stdout
    done = tiltyard("train", "bad.py:Bad", *TINY, expect=1)
    assert "step() raised AssertionError" in done.stderr and "assert self.taken < 40" in done.stderr
    assert "tiltyard/engines" not in done.stderr
    run = find("last", runs)
    assert run.state == "failed" and "tiltyard/engines" in (run.folder / "error.txt").read_text()


def test_finished_run_prints_a_command_to_train_longer(tiltyard: Command, runs: Path) -> None:
    tiltyard("train", "CartPole-v1", *QUICK)
    run = find("last", runs)
    done = tiltyard("resume", "last")
    assert "stop.env_steps=96 reached" in done.stderr
    assert " after 96 env steps in " in done.stderr, "an attempt without an update knows where the run stands"
    _, _, further = done.stderr.partition("nothing left to train; to continue: tiltyard ")
    tiltyard(*shlex.split(further.splitlines()[0]))
    assert run.status()["progress"]["env_steps"] == run.experiment().stop.env_steps == 192
    assert (run.folder / "experiment.before-attempt-3.yaml").exists()
    done = tiltyard("resume", "last", "env.frameskip=2", expect=2)
    assert "tiltyard fork" in done.stderr


def test_printed_commands_work_for_a_run_outside_the_runs_folder(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiltyard("train", "CartPole-v1", *QUICK)
    (away := tmp_path / "my old runs" / "CartPole-v1").mkdir(parents=True)
    moved = find("last", runs).folder.rename(away / "0007-brisk-otter")
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    done = tiltyard("resume", str(moved), "stop.env_steps=128")
    commands = [line.partition("tiltyard ")[2] for line in done.stderr.splitlines() if " tiltyard " in line]
    assert [command.split()[0] for command in commands] == ["eval", "show"]
    assert "0007-brisk-otter at env step 128" in tiltyard(*shlex.split(commands[0].removesuffix(" --video"))).stdout
    assert f"folder       {moved}" in tiltyard(*shlex.split(commands[1])).stdout


def test_fork_starts_from_a_checkpoint_with_new_settings_and_records_its_lineage(tiltyard: Command, runs: Path) -> None:
    tiltyard("train", "CartPole-v1", *QUICK, "save.env_steps=32", "save.last=10")
    parent = find("last", runs)
    tiltyard("fork", parent.id, "--at", "64", "algo.lr=0.5", "stop.env_steps=128", "name=child")
    child = find("child", runs)
    assert child.status()["lineage"]["run"] == parent.id and child.status()["lineage"]["env_steps"] == 64
    first, *_ = metrics.read(child.metrics_file)
    assert (first["env_steps"], first["metrics"]["setting/lr"]) == (96, 0.5)
    assert parent.status()["progress"]["env_steps"] == 96
    assert any(event["kind"] == "forked" for event in read_events(child))
    tiltyard("fork", parent.id, "--at", "best", "name=best-child", "stop.env_steps=128")
    done = tiltyard("fork", parent.id, "--at", "63", expect=2)
    assert "has no checkpoint at env step 63" in done.stderr and "64" in done.stderr


def test_model_init_copies_matching_weights_and_lists_the_rest(tiltyard: Command, runs: Path) -> None:
    tiltyard("train", "CartPole-v1", *QUICK, "name=source", "eval.at_end=false")
    done = tiltyard(
        "train", "Acrobot-v1", *QUICK, "model.init=source", "name=taker", "stop.env_steps=32", "eval.at_end=false"
    )
    assert "weights from" in done.stderr and "left as initialised" in done.stderr
    source = state_file.read_tree(checkpoint.select(find("source", runs)).folder / "policies", "main")["weights"]
    started = [event["sentence"] for event in read_events(find("taker", runs)) if "weights from" in event["sentence"]]
    assert started and any(name in started[0] for name in source)
    tiltyard("rm", "source", "--yes")
    tiltyard("resume", "taker", "stop.env_steps=64")
    tiltyard("fork", "taker", "name=child", "stop.env_steps=96")
    done = tiltyard("train", "CartPole-v1", *QUICK, "model.init=nowhere", expect=2)
    assert "nowhere" in done.stderr


def test_run_can_start_from_the_checkpoint_of_another(tiltyard: Command, runs: Path) -> None:
    tiltyard("train", "CartPole-v1", *QUICK, "name=first", "eval.at_end=false")
    source = checkpoint.select(find("first", runs)).folder
    tiltyard("train", "CartPole-v1", *QUICK, "name=second", f"resume={source}", "stop.env_steps=128")
    assert metrics.read(find("second", runs).metrics_file)[0]["env_steps"] == 128
