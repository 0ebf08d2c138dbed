"""What a run of another user may decide: nothing, unless this user trusts it (`trust_code`).

    which code runs           require_own_code      eval, match, resume, fork
    addresses and paths       require_own_places    fork
    a profile's variables     enter_profile         all: not set, with a warning
    how the run continues     require_own           resume, stop, rm

config/ownership.py knows whose a file is. Settings that this user typed are this user's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from tiltyard.config.ownership import TRUST_CODE, find_foreign, refuse_foreign
from tiltyard.run import settings_schedule
from tiltyard.run.settings_file import COPY
from tiltyard.run.status import STATUS

if TYPE_CHECKING:
    from pathlib import Path

    from tiltyard.config.experiment import Experiment
    from tiltyard.run.folder import Run


def require_own_code(run: Run, trust_code: bool, experiment: Experiment, typed: Collection[str] = ()) -> None:
    """UseError if another user controls the code that the settings name; called before each use of it.

    `experiment` are the settings in effect, and `typed` the names of those that this user gave.
    """
    from tiltyard.plugins.resolve import named_plugins, refuse_foreign_code

    if not trust_code:
        taken = [named for named in named_plugins(experiment) if not _is_typed(named[0], typed)]
        refuse_foreign_code(taken, run.base, [run.folder, *_sources(run)])


def require_own_places(run: Run, trust_code: bool, experiment: Experiment, typed: Collection[str] = ()) -> None:
    """UseError if another user's settings name an address or a path outside the run folder."""
    for setting, value in () if trust_code else _places(run, experiment):
        if not _is_typed(setting, typed):
            hint = f"give a value of your own, as {setting}=null; or {TRUST_CODE}"
            refuse_foreign(_sources(run), f"{setting} = {value}", top=run.folder, hint=hint)


def require_own(run: Run, decides: str, hint: str) -> None:
    """UseError if the run belongs to another user, who would decide what `decides` says."""
    refuse_foreign([*_sources(run), run.folder / STATUS], decides, top=run.folder, hint=hint)


def enter_profile(run: Run, trust_code: bool) -> str | None:
    """Set the environment variables of the profile that the run was started with, if any; return its name."""
    from tiltyard.config.site import restore_profile

    name = run.status().get("profile")
    files = (run.folder / STATUS, run.events_file)  # a damaged status is rebuilt from events
    found = None if trust_code else next(filter(None, (find_foreign(file, run.folder) for file in files)), None)
    if isinstance(name, str) and found is not None:
        owner = f"{found.path} belongs to another user, {found.owner}"
        sys.stderr.write(f"warning: profile {name} of run {run.id} is not used: {owner}; {TRUST_CODE}\n")
        return None
    return restore_profile(name, f"run {run.id}")


def _sources(run: Run) -> list[Path]:
    """The files that a run's settings are read from."""
    return [run.experiment_file, run.folder / COPY, run.folder / settings_schedule.FILE]


def _is_typed(setting: str, typed: Collection[str]) -> bool:
    return any(setting == name or setting.startswith(f"{name}.") for name in typed)


def _places(run: Run, experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Settings that name an address, an account or a path outside the run folder."""
    engine, wandb = experiment.engine, experiment.track.wandb
    found = {"engine.address": engine.address, "engine.temp_dir": engine.temp_dir}
    if wandb.mode != "off":
        found["track.wandb.entity"] = wandb.entity
    for name, policy in experiment.policies.items():
        if policy.from_ is not None and not _is_inside(run.folder / policy.from_, run.folder):
            found[f"policies.{name}.from"] = policy.from_
    return ((setting, value) for setting, value in found.items() if value is not None)


def _is_inside(place: Path, folder: Path) -> bool:
    return place.exists() and place.resolve().is_relative_to(folder.resolve())
