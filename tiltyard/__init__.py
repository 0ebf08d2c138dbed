"""Tiltyard: train reinforcement-learning agents with one file and one command.

The Python face of the command line. Names are imported when first used, so that `import tiltyard` is instant:

    import tiltyard
    run = tiltyard.train("CartPole-v1", ["stop.env_steps=50_000"])
    result = tiltyard.evaluate(run, episodes=20)
    policy = tiltyard.load_policy(run)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_WHERE = {
    "Dataset": "tiltyard.data.loader",
    "Experiment": "tiltyard.config.experiment",
    "Run": "tiltyard.run.folder",
    "TiltyardError": "tiltyard.errors",
    "evaluate": "tiltyard.evaluation.evaluate",
    "fork": "tiltyard.api",
    "iterate": "tiltyard.api",
    "load_policy": "tiltyard.models.policy",
    "plot": "tiltyard.track.plot",
    "read_episodes": "tiltyard.data.folder",
    "resume": "tiltyard.api",
    "train": "tiltyard.api",
}

if TYPE_CHECKING:
    from tiltyard.api import fork, iterate, resume, train
    from tiltyard.config.experiment import Experiment
    from tiltyard.data.folder import read_episodes
    from tiltyard.data.loader import Dataset
    from tiltyard.errors import TiltyardError
    from tiltyard.evaluation.evaluate import evaluate
    from tiltyard.models.policy import load_policy
    from tiltyard.run.folder import Run
    from tiltyard.track.plot import plot

__all__ = [
    "Dataset",
    "Experiment",
    "Run",
    "TiltyardError",
    "evaluate",
    "fork",
    "iterate",
    "load_policy",
    "plot",
    "read_episodes",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tiltyard' has no attribute {name!r}")
    if name != "TiltyardError":  # what catches the refusal
        importlib.import_module("tiltyard.processes.platforms").refuse_windows()
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
