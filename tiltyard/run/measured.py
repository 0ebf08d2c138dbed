"""bench.json in the runs root: the speed of envs without learning, as last measured by `tiltyard bench`.

    {"schema": 1, "bounds": {"<digest of the env> x 8 rows on HOST": {"env_steps_per_second": 51234.5, ...}}}

A run's speed is compared with it. A missing or damaged file is treated as empty.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment

FILE = "bench.json"


def remember(root: Path, experiment: Experiment, figures: dict[str, Any]) -> Path:
    """Store the speed of this env on this host; return the file. Ids of plug-ins are those of a run's copies."""
    root.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    known = {**_read(root), _key(experiment, host): {"env": experiment.env.id, "measured": atomic.now(), **figures}}
    atomic.write_json(root / FILE, {"schema": 1, "bounds": known})
    return root / FILE


def recall(root: Path, experiment: Experiment, host: str) -> float | None:
    """Env steps per second of the env alone on a host; None if it was not measured."""
    found = _read(root).get(_key(experiment, host))
    speed = atomic.number(found.get("env_steps_per_second")) if isinstance(found, dict) else None
    return speed if speed is not None and 0 < speed < float("inf") else None


def speed_text(env_steps: int, seconds: float, alone: float | None, host: str) -> str:
    """12,345 env steps per second, 34 % of what the env alone does here; empty before the first step."""
    if not seconds or not env_steps:
        return ""
    speed = env_steps / seconds
    where = "here" if host == socket.gethostname() else f"on {host}"
    share = f", {100 * speed / alone:.0f} % of what the env alone does {where}" if alone else ""
    return f"{speed:,.0f} env steps per second{share}"


def _key(experiment: Experiment, host: str) -> str:
    from tiltyard.config.experiment import episode_digest

    return f"{episode_digest(experiment.env)} x {experiment.engine.envs} rows on {host}"


def _read(root: Path) -> dict[str, Any]:
    try:
        bounds = atomic.read_json(root / FILE).get("bounds")
    except (OSError, ValueError):
        return {}
    return bounds if isinstance(bounds, dict) else {}
