"""Before training starts: refused commands change nothing, requests apply once, mistakes raise clear errors."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiltyard as product
from tests.cli.test_train import QUICK
from tests.conftest import Command, in_own_process
from tiltyard.api import create_run
from tiltyard.errors import UseError
from tiltyard.run import metrics
from tiltyard.run.folder import Run, find
from tiltyard.training.preflight import prepare

SHORT = [*QUICK, "eval.at_end=false"]
ENV = """
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv): pass
"""
MODEL = """
import torch
class CustomModel(torch.nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.last = torch.nn.Linear(4, outputs + 1)
    def forward(self, obs):
        out = self.last(obs["obs"])
        return out[:, :-1], out[:, -1]
"""


def every_byte(folder: Path) -> dict[str, tuple[str, int]]:
    """Return hash and modification time of a folder and everything in it."""
    files = [folder, *folder.rglob("*")]
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "", path.stat().st_mtime_ns)
        for path in files
    }


def test_refused_resume_or_fork_changes_nothing(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without a W&B login
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "net.py").write_text(MODEL)
    tiltyard("train", "env.py", "model.id=net.py", *SHORT, "name=first", "env.time_limit=20")
    run = find("first", runs)
    plugins = run.folder / "plugins"
    spoilt = {
        "env.py": "raise RuntimeError('no licence')",
        "net.py": MODEL.replace("outputs + 1)", "outputs + 1, False)"),
    }
    for verbs, words, file, output in (
        ("resume fork", ["algo.lr=x"], "", "must be a number"),
        ("resume", ["seed=7", "stop.env_steps=2_000"], "", "cannot change seed"),
        (
            "resume fork",
            ["stop.env_steps=2_000", "use=memory"],
            "",
            "cannot apply presets, because a run has a value for",
        ),
        ("fork", ["resume=never"], "", "resume = never: a fork continues from the checkpoint that it is forked at"),
        ("resume fork", ["track.wandb.mode=online"], "", "needs a W&B login"),
        ("resume", ["stop.env_steps=2_000"], "env.py", "no licence"),
        ("resume fork", ["stop.env_steps=2_000"], "net.py", "the weights belong to another model"),
        ("resume fork", ["stop.env_steps=2_000", "--expect", "retrun>=1"], "", "retrun is not a known metric"),
    ):
        if file:
            kept = (plugins / file).read_text()
            (plugins / file).write_text(spoilt[file])
        before = every_byte(runs)
        for verb in verbs.split():
            assert output in tiltyard(verb, "first", *words, expect=2).stderr
            assert every_byte(runs) == before, (verb, words)
        if file:
            (plugins / file).write_text(kept)
    tiltyard("resume", "first", "stop.env_steps=128")
    assert run.status()["attempt"] == 2 and run.status()["target_env_steps"] == 128
    assert "env_steps: 96" in (run.folder / "experiment.before-attempt-2.yaml").read_text()


def test_setting_resume_to_never_starts_from_scratch_only_once(tiltyard: Command, runs: Path) -> None:
    tiltyard("train", "CartPole-v1", *SHORT, "name=first", "resume=never")
    first = find("first", runs)

    def recorded() -> list[int]:
        return [record["env_steps"] for record in metrics.read(first)]

    tiltyard("resume", "first", "stop.env_steps=128")
    assert recorded() == [32, 64, 96, 128], "never is about the new run, not about a later resume"
    tiltyard("resume", "first", "resume=never", "stop.env_steps=32")
    assert recorded() == [32]
    assert list(first.folder.glob("checkpoints.before-attempt-3/0*")), "abandoned checkpoints are kept aside"
    tiltyard("resume", "first", "stop.env_steps=64")
    assert recorded() == [32, 64] and first.experiment().resume == "never"


def test_interrupted_fork_is_refused_until_it_starts_from_scratch(tiltyard: Command, runs: Path) -> None:
    tiltyard("train", "CartPole-v1", *SHORT, "name=parent")
    tiltyard("fork", "parent", "name=child", "stop.env_steps=128")
    child = find("child", runs)
    for folder in child.checkpoints.iterdir():
        shutil.rmtree(folder)
    before = every_byte(child.folder)
    output = tiltyard("resume", "child", expect=2).stderr
    assert "is a fork without the checkpoint it should start from: forking was interrupted" in output
    assert every_byte(child.folder) == before
    tiltyard("resume", "child", "resume=never", "stop.env_steps=32")
    assert child.status()["progress"]["env_steps"] == 32


def test_environment_of_the_profile_is_set_again_for_its_run(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "tiltyard.yaml"
    site.write_text("profiles:\n  small: {environment: {FROM_PROFILE: seen}}\n")
    (tmp_path / "asks.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Asks(CartPoleEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        assert os.environ['FROM_PROFILE'] == 'seen'\n"
    )
    monkeypatch.setenv("FROM_PROFILE", "unseen")
    tiltyard("train", "asks.py:Asks", *SHORT, "name=asks", "env.time_limit=20", "--on", "small")
    assert find("asks", runs).status()["profile"] == "small"
    for words in ("resume asks stop.env_steps=128", "eval asks", "fork asks name=child stop.env_steps=160"):
        monkeypatch.setenv("FROM_PROFILE", "unseen")
        tiltyard(*words.split())
    assert find("child", runs).status()["profile"] == "small"
    site.write_text("profiles:\n  smaller: {}\n")
    output = tiltyard("resume", "asks", "stop.env_steps=160").stderr
    assert "continues without the environment of its profile: there is no profile 'small'" in output


MISTAKES: list[Callable[[Any], object]] = [
    lambda run: product.train(5),  # type: ignore[arg-type]
    lambda run: product.train(run),
    lambda run: product.train([]),  # type: ignore[arg-type]
    lambda run: product.train(product.Experiment),  # type: ignore[arg-type]
    lambda run: product.train("CartPole-v1", "seed=1"),
    lambda run: product.train("CartPole-v1", [5]),  # type: ignore[list-item]
    lambda run: product.train("CartPole-v1", None),  # type: ignore[arg-type]
    lambda run: product.train("CartPole-v1", {"seed": 1}),  # type: ignore[arg-type]
    lambda run: product.train("CartPole-v1", profile=5),  # type: ignore[arg-type]
    lambda run: product.resume(None),  # type: ignore[arg-type]
    lambda run: product.resume(Run("nowhere")),  # type: ignore[arg-type]
    lambda run: product.resume(run, "stop.env_steps=5"),
    lambda run: product.resume(run, [5]),  # type: ignore[list-item]
    lambda run: product.resume(run, 5),  # type: ignore[arg-type]
    lambda run: product.fork(5),  # type: ignore[arg-type]
    lambda run: product.fork(run, at=1.5),  # type: ignore[arg-type]
    lambda run: product.fork(run, at=[1]),  # type: ignore[arg-type]
    lambda run: product.fork(run, at=b"best"),  # type: ignore[arg-type]
    lambda run: product.fork(run, "algo.lr=1"),
    lambda run: product.evaluate(run, [5]),  # type: ignore[list-item]
    lambda run: product.evaluate(run, "eval.seed=1"),
]


def test_invalid_arguments_in_python_raise_errors_with_hints(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "tiltyard.yaml").write_text("profiles: {small: {}}\n")
    tiltyard("train", "CartPole-v1", *SHORT)
    before = every_byte(runs)
    for number, mistake in enumerate(MISTAKES):
        with pytest.raises(UseError) as told:
            mistake(find("last", runs))
        assert told.value.hint, number
    assert every_byte(runs) == before


@pytest.mark.slow
def test_resume_continues_if_the_tracker_is_no_longer_available(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is restarted automatically must continue, with or without its W&B login."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")  # seconds that wandb waits for a login; its default is 30
    run = create_run(prepare("identity", [*SHORT, "track.wandb.mode=online"]))
    monkeypatch.delenv("WANDB_API_KEY")
    assert "W&B is off for the rest of this attempt" in in_own_process("resume", run.id, "--plain").stderr
    assert run.status()["state"] == "finished"
