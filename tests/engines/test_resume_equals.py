"""A run that is stopped and resumed three times has the same weights and metrics as an uninterrupted one, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard
from tiltyard.run import checkpoint, metrics, state_file
from tiltyard.run.events import read_events

BASE: dict[str, Any] = {
    "algo": {"rollout": 32, "minibatch": 64, "epochs": 2, "lr": {"kind": "linear", "start": 1e-3}},
    "engine": {"envs": 4, "threads": 1},  # with threads=auto, two runs may round differently
    "eval": {"every": 512, "episodes": 3},
    "track": {"tensorboard": False},
}
CASES: dict[str, dict[str, Any]] = {
    "replayed envs": {"env": "CartPole-v1"},
    "memory, stack and previous action": {
        "env": {"id": "CartPole-v1", "frame_stack": 3, "frameskip": 2, "time_limit": 37},
        "model": {
            "memory": {"kind": "lstm", "size": 16, "bptt": 16},
            "previous": True,
            "normalise": {"obs": True, "returns": True},
        },
    },
    "continuous actions": {"env": "CarPass-v0", "model": {"memory": {"kind": "gru", "size": 8}}},
    "agents that come and go": {
        "env": {"id": "visitors", "options": {"pauses": True}, "frame_stack": 2},
        "model": {"memory": {"kind": "gru", "size": 8, "bptt": 16}, "previous": True},
    },
    "two policies and a pool": {
        "env": {"id": "visitors", "options": {"pauses": True}},
        "policies": {"main": {}, "rival": {"algo": {"lr": 3e-3}}},
        "match": {"host": "main", "*": {"main": 0.3, "rival": 0.7}},
    },
    "kl-adaptive": {"env": "identity", "algo": {"lr": {"kind": "kl_adaptive", "start": 1e-3}}},
}
TIMING = ("time/", "speed/", "eval/seconds")


def merged(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    whole = {key: dict(value) for key, value in BASE.items()} | more
    for key, value in case.items():
        whole[key] = {**whole.get(key, {}), **value} if isinstance(value, dict) else value
    return whole


def final(run: tiltyard.Run) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    weights = state_file.read_tree(newest.folder / "policies", "main")["weights"]
    records = [
        {
            "env_steps": record["env_steps"],
            "episodes": record["episodes"],
            "metrics": {key: value for key, value in record["metrics"].items() if not key.startswith(TIMING)},
        }
        for record in metrics.read(run.metrics_file)
    ]
    return weights, records


@pytest.mark.parametrize("name", CASES)
def test_three_resumes_do_not_change_weights_or_metrics(runs: Path, name: str) -> None:
    whole = tiltyard.train(merged(CASES[name], stop={"env_steps": 2048}), live=False)
    # The first stop is between evaluations and checkpoints.
    parts = tiltyard.train(
        merged(CASES[name], stop={"env_steps": 2048, "updates": 3}, eval={**BASE["eval"], "at_end": False}), live=False
    )
    for updates in (7, 8, 16):
        parts = tiltyard.resume(
            parts, [f"stop.updates={updates}", f"eval.at_end={str(updates == 16).lower()}"], live=False
        )
    one, two = final(whole), final(parts)
    assert one[0].keys() == two[0].keys()
    for key, array in one[0].items():
        assert array.tobytes() == two[0][key].tobytes(), key
    assert repr(one[1]) == repr(two[1])  # repr, because NaN is not equal to itself
    assert (
        len([event for event in read_events(parts) if event["kind"] == "resumed" and "continues" in event["sentence"]])
        == 3
    )
    assert not [event for event in read_events(parts) if event["kind"] == "warning"]
