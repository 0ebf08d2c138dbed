"""Find the site file and the folder of all runs, with the standard library only.

`tiltyard ls` needs this; reading a site file (site.py) takes longer than listing a thousand runs, and most users have
none.

    TILTYARD_SITE                        the file to use; no search
    ./tiltyard.yaml, ../tiltyard.yaml    the current folder and its parents, up to the home folder
    ~/.config/tiltyard/tiltyard.yaml     ($XDG_CONFIG_HOME) the user's own
"""

from __future__ import annotations

import os
from pathlib import Path

from tiltyard.errors import UseError

FILE = "tiltyard.yaml"


def find_site(start: Path | None = None) -> Path | None:
    """The site file for folder `start` (default: the current folder)."""
    if named := os.environ.get("TILTYARD_SITE"):
        path = Path(named).expanduser()
        if not path.is_file():
            raise UseError(f"TILTYARD_SITE names {path}, which is not a file", "correct or unset the variable")
        return path.absolute()
    home = Path.home()
    folder = (start or Path.cwd()).absolute()
    for place in (folder, *folder.parents):
        if (place / FILE).is_file():
            return place / FILE
        if place == home:
            break
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    user = config / "tiltyard" / FILE
    return user if user.is_file() else None


def runs_root() -> Path:
    """The folder of all runs: $TILTYARD_RUNS, else the site file's `runs`, else ./runs."""
    if named := os.environ.get("TILTYARD_RUNS"):
        return Path(named).expanduser().absolute()
    if find_site() is not None:
        from tiltyard.config.site import load_site

        site, _ = load_site()
        if site.runs:
            return Path(site.runs).expanduser().absolute()
    return Path.cwd() / "runs"
