"""Env specs for tests, written by hand so that no env is created."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiltyard.types import ActionPart, ActionSpec, ArraySpec, EnvSpec

CATEGORICAL = ActionPart("categorical", 1, 3)
BINARY = ActionPart("binary", 2)
CONTINUOUS = ActionPart("continuous", 2, low=(-1.0, -2.0), high=(1.0, 2.0))


def action(*parts: ActionPart) -> ActionSpec:
    return ActionSpec(parts, {})


def vector(size: int = 4) -> ArraySpec:
    return ArraySpec("box", (size,), "float32")


def env(*parts: ActionPart, masked: bool = False, **obs: ArraySpec) -> EnvSpec:
    return EnvSpec(obs or {"obs": vector()}, action(*(parts or (CATEGORICAL,))), masked=masked)


def observations(spec: EnvSpec, *lead: int, seed: int = 0) -> dict[str, Any]:
    """Random observations [*lead, ...] that match the spec."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for name, item in spec.obs.items():
        shape = (*lead, *item.shape)
        if item.kind == "box" and item.dtype == "float32":
            found[name] = rng.normal(size=shape).astype(np.float32)
        else:
            most = {"box": 256, "multi_binary": 2}.get(item.kind, min(item.options, default=0))
            found[name] = rng.integers(0, most, shape).astype(item.dtype)
    return found
