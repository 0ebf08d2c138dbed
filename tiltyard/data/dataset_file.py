"""dataset.json: what a dataset holds and how it was made. Written once, then only `made` grows.

    schema      2; a folder from before datasets has no such file (schema 1)
    env         the env settings of the experiment; options that look secret are masked
    digest      of the settings that define an episode: two datasets with the same digest can be merged
    spec        observations, actions and agents, as in tiltyard.types.EnvSpec
    seed        the seed from which the episodes' seeds follow, in a collected dataset
    made        one entry for each command that wrote to it: command, policy, version, host, date

The file has a checksum of its own. If it is damaged, readers take env and spec from an episode's file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tiltyard
from tiltyard.config.experiment import episode_digest
from tiltyard.config.sections import Env
from tiltyard.envs.spaces import spec_from_json, spec_to_json
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, mutex
from tiltyard.run.redact import mask_all, mask_command
from tiltyard.types import EnvSpec

NAME = "dataset.json"
SCHEMA = 2
LOCK = ".lock"


@dataclass(frozen=True)
class About:
    """The contents of dataset.json."""

    env: dict[str, Any]
    spec: EnvSpec
    digest: str = ""
    seed: int | None = None
    made: list[dict[str, Any]] = field(default_factory=list)
    created: str = ""
    schema: int = SCHEMA

    @property
    def env_id(self) -> str:
        return str(self.env.get("id", "unknown"))

    def to_json(self) -> dict[str, Any]:
        keys = ("schema", "created", "env", "digest", "seed", "made")
        return {**{key: getattr(self, key) for key in keys}, "spec": spec_to_json(self.spec)}


def about_env(env: Env, spec: EnvSpec, *, seed: int | None = None) -> About:
    """What the dataset of an env holds."""
    settings = mask_all(env.model_dump(mode="json", by_alias=True, exclude_defaults=True))
    return About(settings, spec, episode_digest(env), seed, created=atomic.now())


def provenance(command: list[str], **facts: Any) -> dict[str, Any]:
    """An entry of `made`."""
    where = {"tiltyard": tiltyard.__version__, "host": os.uname().nodename, "date": atomic.now()}
    return {"command": mask_command(command), **mask_all(facts), **where}


def read(folder: Path) -> About | None:
    """The file's contents; None if there is none. TiltyardError if it is damaged, UseError for a newer schema."""
    path = folder / NAME
    try:
        values = atomic.read_json(path)
        checksum, schema = values.pop("sha256", None), values.get("schema")
        # Not if the number alone is wrong, as after a flipped bit.
        if type(schema) is int and schema > SCHEMA and checksum != atomic.digest({**values, "schema": SCHEMA}):
            message = f"{path} was written by a newer Tiltyard (schema {schema}; this one reads up to {SCHEMA})"
            raise UseError(message, "update Tiltyard")
        if checksum != atomic.digest(values):
            raise ValueError("it does not match its own checksum")
        return _about(values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TiltyardError(f"{path} is damaged: {reason}", f"tiltyard data repair {folder}") from error


def _about(values: Mapping[str, Any]) -> About:
    kept = {name: values[name] for name in ("env", "digest", "seed", "made", "created", "schema")}
    return About(spec=spec_from_json(values["spec"]), **kept)


def create_or_check(folder: Path, about: About, entry: Mapping[str, Any] | None) -> About:
    """Write the file of a new dataset or check that an existing one is of the same env, and add to `made`.

    Without an `entry`, `made` stays as it is. Returns what is on disk, whose `seed` counts.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with mutex.hold(folder / LOCK):
            there = read(folder)
            if there is None:
                _refuse_other_folders(folder)
            else:
                require_same_env(folder, there, about)
            now = there or about
            if entry is not None:
                now = replace(now, made=[*now.made, dict(entry)])
            if now is not there:
                atomic.write_sealed(folder / NAME, now.to_json())
    except OSError as error:
        reason = error.strerror or error
        raise UseError(f"cannot write a dataset to {folder}: {reason}", "choose another folder") from error
    return now


def _refuse_other_folders(folder: Path) -> None:
    """A folder with other files is not a new dataset. One from before datasets (schema 1) is read but does not grow."""
    others = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    if "manifest.jsonl" in others:
        message = f"{folder} has episodes of an earlier version of Tiltyard, which are read but not added to"
        raise UseError(
            message, f"give another folder; both can be joined: tiltyard data merge {folder} OTHER --out NEW"
        )
    if others:
        message = f"{folder} is not a dataset: it has {others[0]} but no {NAME}"
        raise UseError(message, "give a new folder, or the folder of a dataset")


def require_same_env(folder: Path, there: About, wanted: About) -> None:
    """UseError if the dataset is of another env, or its observations or actions differ."""
    hint = "give another folder"
    if there.digest != wanted.digest and there.env_id != wanted.env_id:
        raise UseError(f"{folder} is a dataset of {there.env_id}, not of {wanted.env_id}", hint)
    if there.digest != wanted.digest:
        message = f"{folder} is a dataset of {there.env_id} with other settings: {there.env} instead of {wanted.env}"
        raise UseError(message, hint)
    if (there.spec.obs, there.spec.action) != (wanted.spec.obs, wanted.spec.action):
        raise UseError(f"{folder} has other observations or actions than {wanted.env_id} now has", hint)
