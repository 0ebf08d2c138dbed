"""The site file: where runs live and the profiles that say where a run is executed; no part of an experiment.

Which file counts is decided in place.py. `${VAR}` is expanded in every string; `$${` stands for a plain `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tiltyard.config.fields import Settings
from tiltyard.config.place import FILE, find_site
from tiltyard.config.problems import validate
from tiltyard.config.yaml_door import as_mapping, parse_yaml, read_text
from tiltyard.errors import ConfigError, Problem, UseError, did_you_mean
from tiltyard.refs import short

_SETTABLE = ("engine", "save", "track")
_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")


class Profile(Settings):
    """Where and how a run is executed."""

    launcher: Literal["local"] = "local"
    """What starts the run."""
    set: dict[str, Any] = {}
    """Settings of engine, save and track for this place, by dotted name."""
    environment: dict[str, str] = {}
    """Environment variables of the run's processes."""
    name: str = Field(default="", exclude=True)
    """Filled in from the profile's key."""


class Site(Settings):
    """What is true of this machine or project rather than of an experiment."""

    runs: str | None = None
    """Folder of all runs; relative to the site file. `./runs` when left out."""
    profiles: dict[str, Profile] = {}
    """Places to run at, chosen with `--on NAME`."""


def load_site(start: Path | None = None) -> tuple[Site, Path | None]:
    """The site file's settings and its path; an empty Site when there is none. `runs` comes back absolute."""
    path = find_site(start)
    if path is None:
        return Site(), None
    found = parse_yaml(read_text(path), str(path))
    values = {} if found is None else as_mapping(found, str(path))
    problems: list[Problem] = []
    expanded = _expand(values, (), problems)
    if isinstance(expanded.get("profiles"), dict):
        for name, profile in expanded["profiles"].items():
            if profile is None:
                expanded["profiles"][name] = profile = {}
            if isinstance(profile, dict):
                if "name" in profile:
                    problems.append(
                        Problem(f"profiles.{name}.name", short(profile["name"]), "is no setting", "the key is the name")
                    )
                profile["name"] = name
                problems += _check_set(profile.get("set"), f"profiles.{name}.set")
    site, wrong = validate(Site, expanded)
    problems += [problem for _, problem in wrong]
    if problems or site is None:
        raise ConfigError(problems, str(path))
    if site.runs is not None:
        runs = Path(os.path.normpath(path.parent / Path(site.runs).expanduser()))
        site = site.model_copy(update={"runs": str(runs)})
    return site, path


def pick_profile(site: Site, name: str, path: Path | None = None) -> Profile:
    """The profile called `name`."""
    if name in site.profiles:
        return site.profiles[name]
    if not site.profiles:
        where = f"{path} has no profiles" if path else f"there is no site file {FILE} here or above"
        raise UseError(f"there is no profile {name!r}: {where}", "write one below `profiles:`")
    raise UseError(
        f"there is no profile {name!r}{f' in {path}' if path else ''}", did_you_mean(str(name), site.profiles)
    )


def apply_profile(name: str, *, gone: Callable[[str], None] | None = None) -> Profile | None:
    """The profile called `name`, its environment variables set for this process and its children.

    One that the site file does not have is a UseError or, where a run was started with it, a sentence for `gone`.
    """
    site, path = load_site()
    try:
        profile = pick_profile(site, name, path)
    except UseError as error:
        if gone is None:
            raise
        gone(error.message)
        return None
    os.environ.update(profile.environment)
    return profile


def _check_set(values: Any, setting: str) -> list[Problem]:
    """Where a run lives never changes what it learns: a profile sets engine, save and track only."""
    if not isinstance(values, Mapping):
        return []
    hint = "what a run learns belongs in the experiment file; a profile may set engine, save and track"
    return [
        Problem(f"{setting}.{key}", short(value), "is no setting of a profile", hint)
        for key, value in values.items()
        if str(key).split(".")[0] not in _SETTABLE
    ]


def _expand(value: Any, path: tuple[str, ...], problems: list[Problem]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(inner, (*path, key), problems) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expand(inner, (*path, str(i)), problems) for i, inner in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return "${"
        if name not in os.environ:
            problems.append(
                Problem(
                    ".".join(path), short(value), f"the environment variable {name} is not set", f"export {name}=..."
                )
            )
        return os.environ.get(name, "")

    return _VARIABLE.sub(replaced, value)
