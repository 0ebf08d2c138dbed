"""A request to collect, and what it means once it is checked: env, policies, and which episodes are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.collection.policies import PolicyChoice
from tiltyard.config.sections import Env
from tiltyard.data import dataset_file
from tiltyard.data.dataset_file import About, provenance
from tiltyard.envs.spaces import spec_to_json
from tiltyard.types import EnvSpec


@dataclass(frozen=True)
class Request:
    """What is typed."""

    target: str
    out: Path
    episodes: int
    overrides: Sequence[str] = ()
    policies: Sequence[str] = ()
    workers: int | None = None
    """processes; by default one for each usable core, and with 0 this process itself collects"""
    max_steps: int | None = None
    seed: int | None = None
    save_info: bool = False
    trust_code: bool = False
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Prepared:
    """What is collected: checked, but nothing is written."""

    request: Request
    env: Env
    base: list[Path]
    spec: EnvSpec
    previous: bool
    choices: list[PolicyChoice]
    about: About
    limit: int
    """all numbers below this one are collected; 0 if nothing is missing"""
    beyond: int
    """episodes that the folder has above it, of a command that wanted more"""

    @property
    def folder(self) -> Path:
        return self.request.out

    def task(self) -> dict[str, Any]:
        """What a worker gets."""
        return {
            "env": self.env.model_dump(mode="json"),
            "base": [str(place.absolute()) for place in self.base],
            "spec": spec_to_json(self.spec),
            "previous": self.previous,
            "policies": [choice.to_json() for choice in self.choices],
            "total": self.limit,
            "save_info": self.request.save_info,
            "trust_code": self.request.trust_code,
        }


def create(prepared: Prepared) -> About:
    """Write dataset.json, or check that of an existing dataset and add this command to it."""
    request = prepared.request
    command = list(request.command) or ["tiltyard", "data", "collect", request.target]
    facts = {"policy": [f"{each.weight:g}={each.text}" for each in prepared.choices], "episodes": request.episodes}
    if len(prepared.choices) == 1:
        facts["policy"] = prepared.choices[0].text
    return dataset_file.create_or_check(prepared.folder, prepared.about, provenance(command, **facts))
