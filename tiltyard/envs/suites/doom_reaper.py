"""A small process that outlives the owner of Doom engines and removes what it leaves. Only vizdoom.py runs it.

An engine does not notice that its owner is gone: after a kill -9, it, its shared memory and its folder would stay for
ever. Run as a program with the standard library only, in its own session.

    stdin: one line per engine, its temporary folder                     end of stdin: the owner is gone
           FOLDER TAB INSTANCE once it has started: an engine may exit before /proc shows its instance
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

CONFIG = "vizdoom.ini"  # in the temporary folder; part of the engine's command line
_INSTANCE = b"+viz_instance_id"
_SEGMENTS = ("SM", "MQCtr", "MQDoom")


def engines(folder: Path) -> list[tuple[int, str]]:
    """Process id and instance of the engines started with this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(folder / CONFIG) in words:
                found.append((int(process.name), os.fsdecode(words[words.index(_INSTANCE) + 1])))
        except (OSError, ValueError, IndexError):  # exited meanwhile, or another user's
            continue
    return found


def clean(folder: Path, known: set[str]) -> None:
    """Kill the engine of a folder and remove its shared memory and the folder."""
    for process, instance in engines(folder):
        known.add(instance)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for instance in known:
        for name in _SEGMENTS:
            Path(f"/dev/shm/ViZDoom{name}{instance}").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the owner's end, then clean up what it has not closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folders: dict[Path, set[str]] = {}
    for line in sys.stdin:
        folder, _, instance = line.rstrip("\n").partition("\t")
        folders.setdefault(Path(folder), set()).update({instance} - {""})
    for engine_folder, instances in folders.items():
        if engine_folder.is_dir():
            clean(engine_folder, instances)


if __name__ == "__main__":
    main()
