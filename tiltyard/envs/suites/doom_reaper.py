"""A small process that outlives the owner of Doom engines and ends what a killed one leaves: run by vizdoom.py alone.

An engine does not notice that its owner is gone: without this, a kill -9 would leave it, its shared memory and its
folder for ever. Run as a program, with the standard library only, in a session of its own.

    stdin: a folder per line, each the scratch folder of one engine      end of stdin: the owner is gone
           FOLDER TAB INSTANCE once it has started: an engine may end by itself before anybody can ask it for its name
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

CONFIG = "vizdoom.ini"  # in the scratch folder; stands in the engine's command line
_INSTANCE = b"+viz_instance_id"
_SEGMENTS = ("SM", "MQCtr", "MQDoom")


def engines(folder: Path) -> list[tuple[int, str]]:
    """Process id and instance of the engines that were started with this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(folder / CONFIG) in words:
                found.append((int(process.name), os.fsdecode(words[words.index(_INSTANCE) + 1])))
        except (OSError, ValueError, IndexError):  # ended meanwhile, or somebody else's
            continue
    return found


def clean(folder: Path, known: set[str]) -> None:
    """End the engine of a folder and remove its shared memory and the folder itself."""
    for process, instance in engines(folder):
        known.add(instance)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for instance in known:
        for name in _SEGMENTS:
            Path(f"/dev/shm/ViZDoom{name}{instance}").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the owner's end, then clean up behind it; what it closed itself is gone already."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folders: dict[Path, set[str]] = {}
    for line in sys.stdin:
        folder, _, instance = line.rstrip("\n").partition("\t")
        folders.setdefault(Path(folder), set()).update({instance} - {""})
    for place, instances in folders.items():
        if place.is_dir():
            clean(place, instances)


if __name__ == "__main__":
    main()
