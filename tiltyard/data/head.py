"""The first steps of one episode, as values for a table or JSON. Reads only the row groups that they are in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.data import folder as layout
from tiltyard.data.episode_file import json_values
from tiltyard.data.manifest import Entry, Manifest
from tiltyard.envs.actions import ActionCodec
from tiltyard.errors import UseError
from tiltyard.types import Array

MOST_VALUES = 8  # of an observation that is shown with its values


@dataclass(frozen=True)
class Head:
    """An episode's line in the manifest, the other agents of the same episode, and its first steps."""

    env: str
    entry: Entry
    meta: dict[str, Any]
    other_agents: list[str]
    steps: list[dict[str, Any]]
    """step, obs {name: values, or {"shape", "dtype"}}, action, reward, terminated, truncated"""


def read_head(folder: Path, number: int | None, agent: str | None, steps: int) -> Head:
    """The first steps of an episode: by default the first one, and its first agent."""
    found = layout.read_manifest(folder)
    about = layout.read_about(folder)
    agents = _entries(folder, found, number)
    chosen = next((entry for entry in agents if agent is None or entry.agent == agent), None)
    if chosen is None:
        names = ", ".join(entry.agent or "(no name)" for entry in agents)
        raise UseError(f"episode {agents[0].episode} of {folder} has no agent {agent!r}", f"its agents: {names}")
    opened = layout.open_episode(folder, chosen)
    shown = min(steps, opened.rows)
    observations = [name for name in opened.columns if name.startswith("obs.")]
    arrays = opened.read(0, shown, [*observations, "action", "reward", "terminated", "truncated"])
    actions = ActionCodec(about.spec.action).decode_rows(arrays["action"].reshape(shown, -1))
    rows = []
    for step in range(shown):
        acts = step < opened.steps  # the last row is the final observation
        rows.append(
            {
                "step": step,
                "obs": {name[4:]: _value(arrays[name][step]) for name in observations},
                "action": json_values(actions[step]) if acts else None,
                "reward": float(arrays["reward"][step]) if acts else None,
                "terminated": bool(arrays["terminated"][step]),
                "truncated": bool(arrays["truncated"][step]),
            }
        )
    others = [entry.agent for entry in agents if entry.agent != chosen.agent]
    return Head(about.env_id, chosen, _meta(chosen, opened.about), others, rows)


def _entries(folder: Path, found: Manifest, number: int | None) -> list[Entry]:
    """All agents of an episode."""
    numbers = found.column("episode")
    if not len(numbers):
        raise UseError(f"{folder} has no episodes yet", "add some with: tiltyard data collect ENV --out FOLDER")
    rows = np.flatnonzero(numbers == (numbers[0] if number is None else number))
    if not len(rows):
        hint = f"its {len(found.numbers()):,} episodes have numbers from {numbers[0]} to {numbers[-1]}"
        raise UseError(f"{folder} has no episode {number}", hint)
    return [found.entry(row) for row in rows.tolist()]


def _meta(entry: Entry, about: dict[str, Any]) -> dict[str, Any]:
    """What is known about the episode; of schema 1, from its file."""
    text = entry.meta if entry.meta != "{}" else layout.meta_text(about["meta"])
    meta: dict[str, Any] = json.loads(text)
    return meta


def _value(observation: Array) -> Any:
    if observation.size <= MOST_VALUES:
        return json_values(observation[()])
    return {"shape": list(observation.shape), "dtype": observation.dtype.name}
