"""Find the site file and the folder of all runs, with the standard library only.

`tiltyard ls` needs this; reading a site file (site.py) takes longer than listing a thousand runs, and most users have
none.

    TILTYARD_SITE                        the file to use; no search
    ./tiltyard.yaml, ../tiltyard.yaml    the current folder and its parents, up to the home folder
    ~/.config/tiltyard/tiltyard.yaml     ($XDG_CONFIG_HOME) the user's own
    ~/.config/tiltyard/trusted-sites     site files of other users that may be used, one path per line

A site file decides on commands and environment variables, so a found one has to belong, with its folder, to this user
or root, or be listed in trusted-sites. TILTYARD_SITE is the user's own choice of a file and is not asked again.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from tiltyard.config.ownership import find_foreign, refuse_foreign
from tiltyard.errors import UseError

FILE = "tiltyard.yaml"
TRUSTED = "trusted-sites"


def find_site(start: Path | None = None) -> Path | None:
    """The site file for folder `start` (default: the current folder). UseError if it is another user's."""
    if named := os.environ.get("TILTYARD_SITE"):
        chosen = Path(named).expanduser()
        if not chosen.is_file():
            raise UseError(f"TILTYARD_SITE names {chosen}, which is not a file", "correct or unset the variable")
        return chosen.absolute()
    path = _search((start or Path.cwd()).absolute())
    if path is not None and find_foreign(path, path.parent) and str(path) not in _trusted():
        folder = shlex.quote(str(_user_folder()))
        command = f"mkdir -p {folder} && echo {shlex.quote(str(path))} >> {folder}/{TRUSTED}"
        hint = f"review it, then allow it with: {command}; or name another file in TILTYARD_SITE"
        refuse_foreign([path], "where runs are and what profiles execute", top=path.parent, hint=hint)
    return path


def _search(folder: Path) -> Path | None:
    home = Path.home()
    for place in (folder, *folder.parents):
        if (place / FILE).is_file():
            return place / FILE
        if place == home:
            break
    user = _user_folder() / FILE
    return user if user.is_file() else None


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tiltyard"


def _trusted() -> set[str]:
    """The site files of other users that this user allows."""
    path = _user_folder() / TRUSTED
    if not path.is_file():
        return set()
    hint = f"replace {path} by a file of your own"
    refuse_foreign([path], "which site files of other users are used", top=path.parent, hint=hint)
    lines = path.read_text(errors="replace").splitlines()
    return {os.path.expanduser(line.strip()) for line in lines}  # noqa: PTH111 - Path raises for an unknown ~name


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
