"""Whose a file is: what belongs to neither this user nor root decides nothing without the user's consent.

What a file says may choose code, commands, addresses, environment variables and lines of scripts. Its owner therefore
has to be this user or root, and so has the owner of each folder that counts:

    run/experiment.yaml, top=run      experiment.yaml and run; not the folder above, which may be a lab's shared one
    /scratch/tiltyard.yaml            the site file alone

A shared parent folder is left out on purpose: a colleague who owns it could replace your run folder, but the new
folder would be the colleague's, and is refused for that.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tiltyard.errors import UseError

TRUST_CODE = "review it, then pass --trust-code (trust_code=True in Python)"
_MAX_LINKS = 40  # as many as Linux follows


class Foreign(NamedTuple):
    """A file, folder or link of another user, and that user's name (the number if it has none)."""

    path: Path
    owner: str


def find_foreign(path: Path, top: Path | None = None) -> Foreign | None:
    """The first of `path` and the folders above it, up to and including `top`, that belongs to another user.

    A link counts with all that it leads to, because both decide what is read. Nothing is opened, so a FIFO does not
    block. What does not exist, or cannot be reached, belongs to no one. Without `top` only `path` itself counts.
    """
    place = Path(os.path.abspath(path))  # noqa: PTH100 - resolve would skip the links
    above = [] if top is None else [folder for folder in place.parents if folder.is_relative_to(os.path.abspath(top))]  # noqa: PTH100
    for item in (place, *above):
        if found := _foreign_item(item):
            return found
    return None


def _foreign_item(item: Path) -> Foreign | None:
    for _ in range(_MAX_LINKS):
        try:
            uid = item.lstat().st_uid
            if uid not in (0, os.geteuid()):
                return Foreign(item, owner_name(uid))
            item = item.parent / item.readlink()
        except OSError:  # not a link, or nothing that could be read
            return None
    return None


def owner_name(uid: int) -> str:
    """The name of a user, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def refuse_foreign(paths: Iterable[Path], decides: str, *, top: Path | None = None, hint: str = TRUST_CODE) -> None:
    """UseError for the first of `paths` that another user controls; `decides` says what it would choose."""
    for path in paths:
        if found := find_foreign(path, top):
            message = f"{found.path} belongs to another user, {found.owner}, and decides {decides}"
            raise UseError(message, hint)
