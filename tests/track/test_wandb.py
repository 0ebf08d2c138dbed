"""W&B in offline mode, with the real package: one run id for all attempts, and all valid records in its file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.track.wandb_file import history, records
from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Wandb
from tiltyard.run import metrics
from tiltyard.track.wandb import WandbTracker, check


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder, without W&B settings of this machine and with a home folder that must stay empty."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    run = tmp_path / "runs" / "cartpole" / "0001-calm-newt"
    run.mkdir(parents=True)
    return run


def experiment(**wandb):
    return Experiment.model_validate(
        {"env": "CartPole-v1", "tags": ["ours"], "notes": "a note", "track": {"wandb": {"mode": "offline", **wandb}}}
    )


def attempt(folder: Path, steps: range, **wandb) -> str:
    """Append to metrics.jsonl and then to the tracker, like training; return the W&B id."""
    described = experiment(**wandb)
    tracker = WandbTracker(folder, described, described.track.wandb)
    for env_steps in steps:
        record = {"env_steps": env_steps, "frames": env_steps, "updates": 1, "episodes": 2, "seconds": 0.5,
                  "metrics": {"train/return": env_steps / 10, "loss/kl": float("nan")}}  # fmt: skip
        metrics.append(folder, record)
        tracker.record(record)
    tracker.close()
    return tracker.id


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def test_settings_are_recorded_and_no_other_files_are_written(folder):
    attempt(folder, range(100, 400, 100), entity="team", project="proj", job_type="kind", tags=["more"])
    (file,) = segments(folder)
    run = next(record.run for record in records(file) if record.WhichOneof("record_type") == "run")
    assert (run.entity, run.project, run.run_group, run.job_type) == ("team", "proj", "CartPole-v1", "kind")
    assert (set(run.tags), run.notes, run.display_name) == ({"ours", "more"}, "a note", "cartpole/0001-calm-newt")
    saved = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert saved["algo"]["id"] == "ppo"
    assert [(row["env_steps"], row["train/return"]) for row in history(file)] == [(100, 10.0), (200, 20.0), (300, 30.0)]
    assert list((folder.parents[2] / "home").rglob("*")) == []


def test_group_can_be_set(folder):
    attempt(folder, range(1, 2), group="mine")
    run = next(record.run for record in records(segments(folder)[0]) if record.WhichOneof("record_type") == "run")
    assert run.run_group == "mine"


def test_env_steps_are_the_x_axis_of_all_metrics(folder):
    attempt(folder, range(1, 2))
    defined = [record.metric for record in records(segments(folder)[0]) if record.WhichOneof("record_type") == "metric"]
    assert ("*", "env_steps") in [(metric.glob_name, metric.step_metric) for metric in defined]


def test_resumed_run_has_the_same_id_and_all_steps(folder):
    first = attempt(folder, range(100, 1000, 100))
    metrics.rewind(folder, 600, 2)  # killed at 900; the newest checkpoint was at 600
    second = attempt(folder, range(700, 1300, 100))
    metrics.rewind(folder, 1200, 3)
    third = attempt(folder, range(1300, 1500, 100))
    assert first == second == third
    (file,) = segments(folder)
    assert file.name == f"run-{first}.wandb"
    rows = history(file)
    assert (
        [row["env_steps"] for row in rows]
        == [record["env_steps"] for record in metrics.read(folder)]
        == list(range(100, 1500, 100))
    )
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers)), "W&B drops a step that is not above the last"


def test_attempt_after_a_sync_continues_with_higher_steps(folder):
    attempt(folder, range(100, 1000, 100))
    (older,) = segments(folder)
    older.with_name(older.name + ".synced").touch()  # written by `wandb sync`
    metrics.rewind(folder, 600, 2)
    attempt(folder, range(700, 900, 100))
    both = segments(folder)
    assert len(both) == 2
    (newer,) = set(both) - {older}
    assert [row["env_steps"] for row in history(newer)] == [700, 800]
    assert min(row["_step"] for row in history(newer)) > max(row["_step"] for row in history(older))


CHILD = """
import os, signal, sys
from pathlib import Path
from tests.track.test_wandb import experiment
from tiltyard.run import metrics
from tiltyard.track.wandb import WandbTracker
folder, described = Path(sys.argv[1]), experiment()
tracker = WandbTracker(folder, described, described.track.wandb)
for env_steps in range(100, 600, 100):
    record = {"env_steps": env_steps, "metrics": {"train/return": 1.0}}
    metrics.append(folder, record)
    tracker.record(record)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_next_attempt_adds_the_records_of_a_killed_one(folder):
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(CHILD), str(folder)], cwd=Path(__file__).parents[2])
    assert child.returncode == -signal.SIGKILL
    before = json.loads((folder / "track.json").read_text())["wandb_id"]
    metrics.rewind(folder, 300, 2)
    assert attempt(folder, range(400, 700, 100)) == before
    rows = [row for file in segments(folder) for row in history(file)]
    assert [row["env_steps"] for row in rows] == [100, 200, 300, 400, 500, 600]


def test_no_process_remains(folder):
    attempt(folder, range(1, 3))
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            status = (process / "stat").read_text().rsplit(")", 1)[1].split()
            commands.append((int(status[1]), status[0], (process / "cmdline").read_bytes()))
        except OSError:
            continue
    assert [c for parent, state, c in commands if parent == os.getpid() and state != "Z" and b"wandb" in c] == []


def test_missing_package_is_reported(tmp_path):
    # An interpreter with this project and all installed packages except wandb.
    site = Path(pytest.__file__).parents[1]
    hidden = tmp_path / "site"
    hidden.mkdir()
    for package in site.iterdir():
        if not package.name.startswith("wandb"):
            (hidden / package.name).symlink_to(package)
    asked = "from tiltyard.config.sections import Wandb; from tiltyard.track.wandb import check; check(Wandb(mode='offline'))"
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(hidden)])
    child = subprocess.run(
        [sys.executable, "-S", "-c", asked], env={"PYTHONPATH": path}, capture_output=True, text=True, cwd=tmp_path
    )
    assert "UseError: track.wandb.mode = offline needs the package wandb, which is not installed" in child.stderr


def test_online_mode_without_a_login_is_refused(folder):
    """In a process of its own: W&B remembers a login until its process ends."""
    asked = "from tiltyard.config.sections import Wandb; from tiltyard.track.wandb import check; check(Wandb(mode='online'))"
    child = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "UseError: track.wandb.mode = online needs a W&B login, but this machine has none" in child.stderr


@pytest.mark.parametrize("mode", ["off", "offline"])
def test_other_modes_need_no_login(folder, mode):
    check(Wandb(mode=mode))
    assert list(folder.iterdir()) == []
