"""stretches.json: settings that change at given env steps of a run, or a pause at one. Most runs have no such file.

    {"stretches": [{"from": 0, "settings": {"algo.lr": 0.001}}, {"from": 50000, "settings": {...}}],
     "until": 100000, "period": 3}

The env steps of its newest checkpoint decide which segment a run is in, so it may be killed at any time. At the end of
a segment the run saves and continues with the next; at `until` it saves and stops. Stop conditions and schedules refer
to the whole run. `period` counts the periods of a member of a population.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.errors import UseError
from tiltyard.run import atomic

FILE = "stretches.json"
PAUSED = "paused at env step"  # start of the reason in the status of a run that stopped at `until`


@dataclass(frozen=True)
class Segment:
    """A part of a run with constant settings, up to env step `end`."""

    settings: Mapping[str, Any]
    end: int | None = None
    last: bool = True
    """whether no segment follows: at its end the run pauses"""


WHOLE = Segment({})


@dataclass(frozen=True)
class SettingsSchedule:
    """The settings of all segments, by the env step at which each begins."""

    parts: Sequence[tuple[int, Mapping[str, Any]]]
    until: int | None = None
    period: int = 0

    def at(self, env_steps: int) -> Segment:
        """The segment at an env step."""
        begun = [settings for begins, settings in self.parts if begins <= env_steps]
        current = begun[-1] if begun else {}
        later = [begins for begins, _ in self.parts if begins > env_steps]
        if later and (self.until is None or later[0] < self.until):
            return Segment(current, later[0], last=False)
        return Segment(current, self.until)

    def write(self, folder: Path) -> None:
        parts = [{"from": begins, "settings": dict(settings)} for begins, settings in self.parts]
        atomic.write_json(folder / FILE, {"stretches": parts, "until": self.until, "period": self.period})


def read(folder: Path) -> SettingsSchedule | None:
    """The schedule in a run folder, or None."""
    try:
        content = atomic.read_json(folder / FILE)
        parts = [(int(part["from"]), dict(part["settings"])) for part in content["stretches"]]
        until = content["until"]
        return SettingsSchedule(parts, None if until is None else int(until), int(content["period"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UseError(f"{folder / FILE} cannot be read: {error}", "restore the file, or remove the run") from error
