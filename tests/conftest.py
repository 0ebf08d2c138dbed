"""Fixtures for all tests: an empty runs folder, and the command line in this process or in its own process."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiltyard.cli import main


def pytest_configure(config: pytest.Config) -> None:
    """Set the signal handlers of a terminal. With nohup or in the background, SIGINT and SIGHUP would be ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


SLOW = (  # tests that train or start processes for seconds; `make check` does not run them
    "algos/test_accelerator.py",
    "algos/test_own_algorithm.py",
    "cli/test_bench.py",
    "cli/test_plugins.py",
    "cli/test_train.py",
    "cli/test_tune.py",
    "collection/test_collect.py",
    "cli/test_clone.py",
    "cli/test_data_collect.py",
    "cli/test_data_convert.py",
    "cli/test_data_files.py",
    "cli/test_data_transform.py",
    "cli/test_stopping.py",
    "data/test_damage.py",
    "data/test_exports.py",
    "data/test_imports.py",
    "data/test_repair.py",
    "data/test_shards.py",
    "data/test_transform.py",
    "data/test_verify.py",
    "engines/test_cloning.py",
    "engines/test_isolated_envs.py",
    "engines/test_inference.py",
    "engines/test_learner_group.py",
    "engines/test_leftovers.py",
    "engines/test_local.py",
    "processes/test_fork_server.py",
    "engines/test_population.py",
    "engines/test_resume_equals.py",
    "envs/test_isolation.py",
    "evaluation/test_evaluate.py",
    "evaluation/test_tournament.py",
    "faults/test_disk_full.py",
    "faults/test_damage_storm.py",
    "faults/test_diverged.py",
    "faults/test_foreign_exit.py",
    "faults/test_kill.py",
    "faults/test_signals.py",
    "faults/test_takeover.py",
    "faults/test_two_users.py",
    "slurm/test_agent.py",
    "doctor/test_nodes.py",
    "envs/test_atari.py",
    "envs/test_envpool.py",
    "sweep/test_controller.py",
    "sweep/test_custom_queue.py",
    "sweep/test_pbt.py",
    "tests/test_api.py",
    "tests/test_notebook.py",
    "tests/training/test_loop.py",
    "track/test_trackers.py",
    "track/test_bottleneck.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.as_posix().endswith(SLOW) or "cluster" in item.path.parts:
            item.add_marker(pytest.mark.slow)


@dataclass(frozen=True)
class Output:
    """Output of a command."""

    stdout: str
    stderr: str


Command = Callable[..., Output]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runs root for this process and its children."""
    root = tmp_path / "runs"
    monkeypatch.setenv("TILTYARD_RUNS", str(root))
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def tiltyard(runs: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in this process, which imports torch once; check the exit code and return the output."""

    def call(*words: str, expect: int = 0) -> Output:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        output = Output(*capfd.readouterr())
        assert ended.value.code == expect, (
            f"exit {ended.value.code} instead of {expect}\n{output.stdout}\n{output.stderr}"
        )
        attributed = "raised" in output.stderr or "called sys.exit" in output.stderr  # a plug-in's own traceback
        assert "Traceback" not in output.stderr or attributed, output.stderr
        return output

    return call


def in_own_process(*words: str, expect: int = 0, given: str | None = None) -> Output:
    """Run the command line in its own process, like a shell does."""
    command = [sys.executable, "-m", "tiltyard", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, input=given)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Output(done.stdout, done.stderr)
