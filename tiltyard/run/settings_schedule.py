"""stretches.json: a run whose settings change at given env steps, or that pauses at one. Most runs have no such file.

    {"stretches": [{"from": 0, "settings": {"algo.lr": 0.001}}, {"from": 50000, "settings": {...}}],
     "until": 100000, "period": 3}

Which stretch a run is in follows from its newest checkpoint alone, so it goes on rightly whenever it was killed. At the
end of one it saves and goes on in the next; at `until` it saves and ends as stopped. Stop conditions and schedules are
those of the whole run. `period` counts those of a member of a population.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.errors import UseError
from tiltyard.run import atomic

FILE = "stretches.json"
PAUSED = "paused at env step"  # how the reason begins of a run that ended where it was told to


@dataclass(frozen=True)
class Segment:
    """A part of a run: with these settings, up to this env step."""

    settings: Mapping[str, Any]
    end: int | None = None
    last: bool = True
    """whether nothing follows: at its end the run waits for whoever paused it"""


WHOLE = Segment({})


@dataclass(frozen=True)
class SettingsSchedule:
    """All of a run's, by the env step that each begins at."""

    parts: Sequence[tuple[int, Mapping[str, Any]]]
    until: int | None = None
    period: int = 0

    def at(self, env_steps: int) -> Segment:
        """The stretch that a run is in which has come so far."""
        begun = [said for begins, said in self.parts if begins <= env_steps]
        settings = begun[-1] if begun else {}
        later = [begins for begins, _ in self.parts if begins > env_steps]
        if later and (self.until is None or later[0] < self.until):
            return Segment(settings, later[0], last=False)
        return Segment(settings, self.until)

    def write(self, folder: Path) -> None:
        parts = [{"from": begins, "settings": dict(settings)} for begins, settings in self.parts]
        atomic.write_json(folder / FILE, {"stretches": parts, "until": self.until, "period": self.period})


def read(folder: Path) -> SettingsSchedule | None:
    """What the folder says, or None where it says nothing."""
    try:
        told = atomic.read_json(folder / FILE)
        parts = [(int(part["from"]), dict(part["settings"])) for part in told["stretches"]]
        until = told["until"]
        return SettingsSchedule(parts, None if until is None else int(until), int(told["period"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UseError(f"{folder / FILE} cannot be read: {error}", "restore the file, or remove the run") from error
