"""The folder of a checkpoint: its files are linked, synced and hashed, and it appears and goes by a rename."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from pathlib import Path

from tiltyard.errors import TiltyardError
from tiltyard.run import atomic
from tiltyard.run.regular_files import copy_files
from tiltyard.run.state_file import Files

MANIFEST = "manifest.json"
# A second save at the same env step is NNN.1 until it has replaced the first.
FOLDER = re.compile(r"(\d{12,})(?:\.\d+)?")


def link_files(source: Path, draft: Path, *, but: str) -> Files:
    """Link the files of a checkpoint into a draft, except those of the tree `but`; returns their checksums as they were
    when the files were written, so that damage since then does not become valid."""
    copy_files(source, draft, link=True, wanted=lambda name: name != MANIFEST and not name.startswith(f"{but}."))
    manifest = atomic.read_json(source / MANIFEST)
    return {name: entry for name, entry in manifest["files"].items() if (draft / name).exists()}


def sync_and_hash(draft: Path, known: Files) -> Files:
    """Sync all files and folders to disk; return size and checksum of each file by its relative path."""
    files: Files = {}
    for place, folders, names in os.walk(draft):
        folders.sort()
        for path in (Path(place, name) for name in sorted(names)):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise TiltyardError(f"{path} is not a regular file", "write only regular files to a checkpoint")
            name = path.relative_to(draft).as_posix()
            with path.open("rb") as file:
                os.fsync(file.fileno())
                files[name] = known.get(name) or {
                    "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
                    "bytes": os.fstat(file.fileno()).st_size,
                }
        atomic.sync_folder(Path(place))
    return files


def publish(draft: Path, final: Path) -> Path:
    """Rename to the final name. An older save of the same env step is deleted only after the new one is listed."""
    older = [
        path
        for path in final.parent.iterdir()
        if (match := FOLDER.fullmatch(path.name)) and int(match[1]) == int(final.name)
    ]
    if older:
        revision = 1 + max(int(path.name.partition(".")[2] or 0) for path in older)
        draft = draft.rename(final.with_name(f"{final.name}.{revision}"))
        atomic.sync_folder(final.parent)
    for path in older:
        delete_folder(path)
    draft.rename(final)
    atomic.sync_folder(final.parent)
    return final


def delete_folder(folder: Path) -> None:
    """Hide from listings by a rename, then delete."""
    shutil.rmtree(folder.rename(folder.with_name(f".tmp-gone-{folder.name}-{atomic.unique()}")), ignore_errors=True)
