"""The profile of a sweep's jobs, kept in the sweep's folder as it was when a user last started the sweep.

Ticks run on nodes, long after the site file may have changed.
"""

from __future__ import annotations

import json

from tiltyard.config.site import Profile, load_site, pick_profile
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.slurm.submit import write_private
from tiltyard.sweep.folder import Sweep

PROFILE = "profile.json"


def read_profile(sweep: Sweep, *, refresh: bool) -> Profile:
    """The profile of the sweep's jobs; with `refresh`, first copied again from the site file, if that still has it."""
    name, path = str(sweep.facts()["profile"]), sweep.folder / PROFILE
    if refresh:
        site, where = load_site()
        if name in site.profiles or not path.exists():
            profile = pick_profile(site, name, where)
            if profile.launcher != sweep.launcher:
                hint = f"set it back to {sweep.launcher}, which the sweep was started with, or start a new sweep"
                raise UseError(f"profile {name} of sweep {sweep.id} now has launcher: {profile.launcher}", hint)
            draft = path.with_name(f".{PROFILE}")
            write_private(draft, json.dumps(profile.model_dump(mode="json")), 0o600)
            draft.replace(path)
    try:
        return Profile.model_validate(atomic.read_json(path)).model_copy(update={"name": name})
    except (OSError, ValueError) as error:
        raise TiltyardError(f"{path} cannot be read: {error}", f"tiltyard sweep start {sweep.typed}") from error
