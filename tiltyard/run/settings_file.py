"""experiment.yaml, the settings of a run, and experiment.json, a copy of its text with a checksum.

Settings decide what is trained, so nothing else than what Tiltyard wrote is believed:

    experiment.yaml                 experiment.json     settings in effect
    as in the copy                                      those of experiment.yaml
    as before the last change       sound               those of experiment.yaml: a crash came between the two files
    other settings                  sound               those of the copy, to be shown only: the file was edited
    damaged or missing              sound               those of the copy; the next resume writes the file again
    any                             missing, damaged    those of experiment.yaml (earlier versions wrote no copy)
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.config.fields import flat
from tiltyard.config.load import from_resolved, resolved_yaml
from tiltyard.errors import UseError
from tiltyard.run import atomic
from tiltyard.run.folder import EXPERIMENT
from tiltyard.run.redact import mode_for

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.run.folder import Run

COPY = "experiment.json"
SHOWN = 5  # changed settings in a message


@dataclass(frozen=True)
class StoredSettings:
    """A run's settings, and what is wrong with their files."""

    experiment: Experiment
    complaint: str = ""
    """a sentence, if the settings are those of the copy"""
    edits: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """settings that were edited in experiment.yaml: there, and in the copy"""

    def refusal(self, run: Run) -> UseError:
        """The error for a command that must not use edited settings."""
        words = shlex.join(f"{name}={json.dumps(new)}" for name, (new, _) in self.edits.items())
        file = shlex.quote(str(run.experiment_file))
        hint = f"rm {file} && tiltyard resume {run.typed} {words}; or `fork` instead of `resume`, for another run"
        return UseError(self.complaint, hint)


def write_settings(folder: Path, experiment: Experiment) -> None:
    """Write both files, the copy first; readable only by this user if a setting has a secret."""
    text, mode = resolved_yaml(experiment), mode_for(experiment.model_dump(mode="json"))
    try:
        before = _digest((folder / EXPERIMENT).read_bytes())
    except OSError:
        before = ""
    atomic.write_sealed(folder / COPY, {"schema": 1, "text": text, "before": before}, mode)
    atomic.write_text(folder / EXPERIMENT, text, mode)


def read_settings(folder: Path) -> StoredSettings:
    """Read the settings; UseError if neither file can be used."""
    path = folder / EXPERIMENT
    try:
        copy = atomic.read_sealed(folder / COPY)
        text, before = str(copy["text"]), copy["before"]
    except (OSError, ValueError, KeyError):
        return StoredSettings(from_resolved(path))
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if data == text.encode("utf-8", "backslashreplace") or _digest(data) == before:
        return StoredSettings(from_resolved(path))
    sound = from_resolved(folder / COPY, text)
    try:
        found = from_resolved(path)
    except UseError as error:
        why = f"{error.message.removeprefix(f'{path} ').removeprefix(f'{path}, ')}"
        return StoredSettings(sound, f"{path} is damaged ({why}); its settings are those of {COPY}")
    edits = _differences(found, sound)
    if not edits:
        return StoredSettings(sound)
    shown = [f"{name} = {json.dumps(new)} (was {json.dumps(old)})" for name, (new, old) in [*edits.items()][:SHOWN]]
    more = f" and {len(edits) - SHOWN} more" if len(edits) > SHOWN else ""
    return StoredSettings(sound, f"{path} was changed after Tiltyard wrote it: {', '.join(shown)}{more}", edits)


def restore_settings(run: Run) -> None:
    """Write a damaged experiment.yaml again."""
    stored = read_settings(run.folder)
    if stored.complaint:
        write_settings(run.folder, stored.experiment)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _differences(found: Experiment, sound: Experiment) -> dict[str, tuple[Any, Any]]:
    new, old = (dict(flat(each.model_dump(mode="json", by_alias=True))) for each in (found, sound))
    names = [name for name in {**new, **old} if new.get(name) != old.get(name)]
    return {".".join(name): (new.get(name), old.get(name)) for name in names}
