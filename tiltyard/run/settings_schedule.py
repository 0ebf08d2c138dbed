"""stretches.json: settings that change at given env steps of a run, or a pause at one. Most runs have no such file.

Written for members of populations, and by `Training.set` before a change takes effect.

    {"stretches": [{"from": 0, "settings": {"algo.lr": 0.001}}, {"from": 50000, "settings": {...}}],
     "until": 100000, "period": 3}

The env steps of its newest checkpoint decide which settings a run continues with, so it may be killed at any time. At
`until` the run saves and stops. Stop conditions and schedules refer to the whole run. `period` counts the periods of a
member of a population.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltyard.errors import UseError
from tiltyard.run import atomic

FILE = "stretches.json"
PAUSED = "paused at env step"  # start of the reason in the status of a run that stopped at `until`


@dataclass(frozen=True)
class SettingsSchedule:
    """The settings of each part of a run, by the env step at which it begins."""

    parts: Sequence[tuple[int, Mapping[str, Any]]] = ()
    until: int | None = None
    period: int = 0

    def at(self, env_steps: int) -> Mapping[str, Any]:
        """The settings at an env step."""
        begun = [settings for begins, settings in self.parts if begins <= env_steps]
        return begun[-1] if begun else {}

    def changed(self, env_steps: int, now: Mapping[str, Any], before: Mapping[str, Any]) -> SettingsSchedule:
        """The schedule with the settings `now` from an env step on, in place of what it has there and later. Earlier
        parts get the values `before`: a run that continues from there must not use later ones."""
        earlier = [(begins, {**before, **settings}) for begins, settings in self.parts if begins < env_steps]
        if env_steps and not earlier:
            earlier = [(0, dict(before))]
        return replace(self, parts=[*earlier, (env_steps, now)])

    def write(self, folder: Path) -> None:
        parts = [{"from": begins, "settings": dict(settings)} for begins, settings in self.parts]
        atomic.write_sealed(folder / FILE, {"stretches": parts, "until": self.until, "period": self.period})


def may_change(setting: str) -> bool:
    """Whether a schedule may change a setting: the seed, or one of `algo` or `env` except their ids."""
    section, _, name = setting.partition(".")
    return setting == "seed" or (section in ("algo", "env") and name not in ("", "id"))


def read(folder: Path) -> SettingsSchedule | None:
    """The schedule in a run folder, or None."""
    try:
        content = atomic.read_sealed(folder / FILE)
        parts = [(int(part["from"]), dict(part["settings"])) for part in content["stretches"]]
        until = content["until"]
        return SettingsSchedule(parts, None if until is None else int(until), int(content["period"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UseError(f"{folder / FILE} cannot be read: {error}", "restore the file, or remove the run") from error
