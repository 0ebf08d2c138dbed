"""Trackers cannot stop training: a failure is reported once, and the others continue."""

from __future__ import annotations

import socket
import threading

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import in_own_process
from tests.track.wandb_file import history
from tiltyard.config.experiment import Experiment
from tiltyard.run import metrics
from tiltyard.track.trackers import Trackers


def experiment(tensorboard=True, wandb="off"):
    return Experiment.model_validate(
        {"env": "CartPole-v1", "track": {"tensorboard": tensorboard, "wandb": {"mode": wandb}}}
    )


def record(env_steps):
    return {
        "env_steps": env_steps,
        "frames": env_steps,
        "updates": 1,
        "episodes": 1,
        "seconds": 1.0,
        "metrics": {"x": 1.0},
    }


def record_all(folder, trackers, steps):
    """Record each step as training does; return all messages."""
    output = []
    for step in steps:
        metrics.append(folder, record(step))
        output += trackers.record(record(step))
    return output


def tensorboard_steps(folder):
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars("x")]


def test_only_the_selected_trackers_are_opened(tmp_path):
    trackers = Trackers(tmp_path, experiment(tensorboard=False), 0)
    assert record_all(tmp_path, trackers, [1, 2]) + trackers.close() == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_both_trackers_match_the_metrics_across_a_resume(tmp_path):
    trackers = Trackers(tmp_path, experiment(wandb="offline"), 0)
    assert record_all(tmp_path, trackers, range(100, 600, 100)) + trackers.close() == []
    metrics.rewind(tmp_path, 300, 2)
    trackers = Trackers(tmp_path, experiment(wandb="offline"), 300)
    assert record_all(tmp_path, trackers, range(400, 900, 100)) + trackers.close() == []
    truth = [line["env_steps"] for line in metrics.read(tmp_path)]
    assert truth == list(range(100, 900, 100))
    assert tensorboard_steps(tmp_path) == truth
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert [row["env_steps"] for row in history(file)] == truth


def test_run_that_starts_over_supersedes_all_records(tmp_path):
    trackers = Trackers(tmp_path, experiment(), 0)
    record_all(tmp_path, trackers, [100, 200])
    trackers.close()
    trackers = Trackers(tmp_path, experiment(), 0)
    record_all(tmp_path, trackers, [50, 150])
    trackers.close()
    assert tensorboard_steps(tmp_path) == [50, 150]


def test_tracker_that_cannot_open_is_reported_once_and_the_other_continues(tmp_path):
    (tmp_path / "wandb").write_text("in the way")
    trackers = Trackers(tmp_path, experiment(wandb="offline"), 0)
    output = record_all(tmp_path, trackers, [1, 2, 3]) + trackers.close()
    assert len(output) == 1
    assert output[0].startswith("W&B is off for the rest of this attempt (FileExistsError: ")
    assert tensorboard_steps(tmp_path) == [1, 2, 3]


def test_tracker_that_fails_is_reported_once_and_training_continues(tmp_path):
    trackers = Trackers(tmp_path, experiment(), 0)
    assert record_all(tmp_path, trackers, [1]) == []
    trackers._open["TensorBoard"]._file.close()  # like an unmounted file system
    output = record_all(tmp_path, trackers, [2, 3]) + trackers.close()
    assert len(output) == 1
    assert "TensorBoard is off" in output[0] and "training continues" in output[0]
    assert len(metrics.read(tmp_path)) == 3


def test_server_without_answer_only_disables_wandb_after_a_timeout(tmp_path, monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))
    held = []

    def accept() -> None:
        while True:
            try:
                held.append(server.accept())
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    monkeypatch.setenv("HOME", str(tmp_path))
    trackers = Trackers(tmp_path, experiment(wandb="online"), 0)
    output = record_all(tmp_path, trackers, [1, 2]) + trackers.close()
    server.close()
    assert len(output) == 1 and output[0].startswith("W&B is off")
    assert tensorboard_steps(tmp_path) == [1, 2]


def test_online_mode_without_a_login_is_refused_before_a_run_exists(runs, monkeypatch, tmp_path):
    """In a process of its own: W&B remembers a login until its process ends."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    refused = in_own_process("train", "identity", "track.wandb.mode=online", expect=2)
    assert "track.wandb.mode = online needs a W&B login" in refused.stderr and not runs.exists()
