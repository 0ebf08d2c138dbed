"""Which settings can change while a run trains."""

from __future__ import annotations

import pytest

from tiltyard.config.load import load
from tiltyard.training.live_settings import are_live

LEARNING_RATE, OPTION, ENVS = "algo.lr", "env.options.level", "engine.envs"


@pytest.mark.parametrize(
    ("kind", "names", "live"),
    [
        ("serial", [LEARNING_RATE, OPTION], True),
        ("local", [LEARNING_RATE], True),
        ("serial", [LEARNING_RATE, ENVS], False),
        ("rllib", [LEARNING_RATE], False),  # a scheduled change starts its engine again
        ("rllib", [OPTION], False),
    ],
)
def test_settings_change_in_place_only_where_the_engine_can(kind: str, names: list[str], live: bool) -> None:
    experiment = load({"env": "CartPole-v1", "engine": kind}).experiment
    assert are_live(experiment, names) is live
