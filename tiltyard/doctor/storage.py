"""Checks of places to write to: the runs, temporary folders, shared memory, and what dead processes left there.

    leftovers   /dev/shm     ViZDoom*  plasma*                  Doom's engines, Ray's object store
                temporary    ty-*  tiltyard-*  ray/session_*    ours, and Ray's own

A leftover is this user's, no process of this user has it open or names it, and all Python that runs is younger.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tiltyard.config.site_file import runs_root
from tiltyard.doctor.finding import Finding, size
from tiltyard.doctor.system import existing
from tiltyard.errors import TiltyardError, UseError
from tiltyard.processes import proc

LOW_DISK = 2 << 30  # bytes: a few checkpoints and a video
LOW_TEMPORARY, FULL = 1 << 30, 64 << 20
LOW_SHARED = 1 << 30  # Docker gives 64 MiB, and Ray's object store wants a third of the memory
PIECE = 32 << 20  # bytes written to see whether the quota lets them
LONGEST_SOCKET = 107  # bytes of a path that a socket may have
SOCKET = "pymp-xxxxxxxx/listener-xxxxxxxx"  # below the temporary folder, as multiprocessing names them
SHARED = Path("/dev/shm")
ALL_PROCESSES = "pid:[4026531836]"  # the kernel's first process namespace has this number everywhere
SHARED_NAMES = ("ViZDoom*", "plasma*")
TEMPORARY_NAMES = ("ty-*", "tiltyard-*", "ray/session_[0-9]*")


def check_runs() -> Finding:
    try:
        root = runs_root()
    except TiltyardError as error:
        return Finding("runs", "bad", error.message, error.hint)
    place = existing(root)
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        reason = f"{root} cannot be written: {error.strerror}"
        return Finding("runs", "bad", reason, "set TILTYARD_RUNS to a folder of yours")
    free = shutil.disk_usage(place).free
    found = f"{root}, {free / 2**30:.1f} GiB free"
    if free < LOW_DISK:
        return Finding("runs", "note", found, "checkpoints need room: free some, or set TILTYARD_RUNS to another disk")
    return Finding("runs", "ok", found)


def check_quota() -> Finding:
    """By really writing beside the runs, and by what `quota` says of this user where a site has it."""
    try:
        place = existing(runs_root())
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, PIECE)
    except TiltyardError as error:
        return Finding("quota", "bad", error.message, error.hint)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            reason = f"{size(PIECE)} cannot be written in {place}: {error.strerror}"
            return Finding("quota", "bad", reason, "delete old runs (tiltyard rm), or set TILTYARD_RUNS elsewhere")
    used = fullest(_quota_lines())
    if used is None:
        return Finding("quota", "ok", f"{size(PIECE)} written; `quota` has nothing to say of this user")
    found = f"{used[1]:.0%} of the quota of {used[0]} are used"
    if used[1] >= 0.9:
        return Finding("quota", "bad" if used[1] >= 1 else "note", found, "delete old runs: tiltyard rm")
    return Finding("quota", "ok", found)


def _quota_lines() -> list[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["quota", "-w"], capture_output=True, text=True, errors="replace", timeout=20)
        return done.stdout.splitlines()
    return []


def fullest(lines: Iterable[str]) -> tuple[str, float] | None:
    """File system and used part of its quota, of blocks or files, where that is largest; None without any quota."""
    found: list[tuple[str, float]] = []
    for words in (line.split() for line in lines):
        numbers = [int(word.rstrip("*")) for word in words[1:] if word.rstrip("*").isdecimal()]
        # FILESYSTEM blocks quota limit [grace] files quota limit [grace]
        for used, soft, hard in (numbers[0:3], numbers[3:6]) if len(numbers) >= 6 else ():
            if limit := soft or hard:
                found.append((words[0], used / limit))
    return max(found, key=lambda each: each[1], default=None)


def check_temporary() -> Finding:
    """Room, and whether a socket's name fits below it."""
    place = Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    found = f"{place}, {size(free)} free"
    if free < LOW_TEMPORARY:
        hint = "free some, or set TMPDIR to another disk of this machine"
        return Finding("temporary", "bad" if free < FULL else "note", found, hint)
    if (longest := len(os.fsencode(place / SOCKET))) > LONGEST_SOCKET:
        reason = (
            f"{place} is so long that sockets in it have names of {longest} bytes, and {LONGEST_SOCKET} are allowed"
        )
        return Finding("temporary", "bad", reason, "set TMPDIR to a shorter path, like /tmp")
    with tempfile.TemporaryDirectory(dir=place) as folder, socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.bind(f"{folder}/s")
        except OSError as error:
            reason = f"{place} takes no sockets: {error.strerror}"
            return Finding("temporary", "bad", reason, "set TMPDIR to a disk of this machine, like /tmp")
    return Finding("temporary", "ok", found)


def check_shared_memory(place: Path = SHARED) -> Finding:
    if not place.is_dir():
        return Finding("shm", "note", f"there is no {place}", "Doom and Ray need it: mount a tmpfs there")
    whole = shutil.disk_usage(place)
    found = f"{place}, {size(whole.free)} of {size(whole.total)} free"
    if whole.free < LOW_SHARED:
        hint = f"delete what is left over in {place}; in Docker, start with --shm-size=4g"
        return Finding("shm", "bad" if whole.free < FULL else "note", found, hint)
    return Finding("shm", "ok", found)


def check_leftovers(shared: Path = SHARED, temporary: Path | None = None) -> Finding:
    left = leftovers(shared, temporary)
    if not left:
        return Finding("leftovers", "ok", "none in shared memory and temporary folders")
    names = ", ".join(str(path) for path in left[:3]) + (" ..." if len(left) > 3 else "")
    bytes_held = sum(_bytes_of(path) for path in left)
    found = f"{len(left)} of processes that are gone, {size(bytes_held)}: {names}"
    if not sees_all_processes():
        return Finding("leftovers", "note", found, "or of processes outside of this container: look from there")
    return Finding("leftovers", "note", found, "tiltyard doctor --clean removes them")


def sees_all_processes() -> bool:
    """Whether there is no process of this machine that we cannot see; in most containers there are."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == ALL_PROCESSES
    except OSError:
        return False


def remove_leftovers() -> list[Path]:
    """Delete them; returns those that were."""
    if not sees_all_processes():
        reason = "processes outside of this container cannot be seen, and may use what looks left over here"
        raise UseError(reason, "type it outside, or remove by hand what `tiltyard doctor` lists")
    gone = []
    for path in leftovers():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        gone += [] if path.exists() else [path]
    return gone


def leftovers(shared: Path = SHARED, temporary: Path | None = None) -> list[Path]:
    """Files and folders of this user by the names that Tiltyard and Ray give them, that nobody uses any more."""
    places = {temporary} if temporary else {Path("/tmp"), Path(tempfile.gettempdir())}
    there = [path for name in SHARED_NAMES for path in shared.glob(name)]
    there += [path for place in sorted(places) for name in TEMPORARY_NAMES for path in place.glob(name)]
    made = {path: when for path in there if (when := _made(path)) is not None}
    if not made:
        return []
    words, python = _words_of_processes(), _oldest_python()
    return [path for path, when in made.items() if str(path) not in words and (path.parent == shared or when < python)]


def _made(path: Path) -> float | None:
    """When it was last changed, if it is this user's."""
    try:
        found = path.lstat()
    except OSError:  # it has just been removed
        return None
    return found.st_mtime if found.st_uid == os.getuid() and not path.is_symlink() else None


def _oldest_python() -> float:
    """When it was started. A process may know a folder and have nothing open in it: younger folders may be in use."""
    return min((each.started for each in proc.own_processes() if "python" in _program(each.pid)), default=time.time())


def _program(pid: int) -> str:
    try:
        return (proc.PROC / str(pid) / "exe").readlink().name
    except OSError:
        return ""


def _words_of_processes() -> str:
    """Command lines, open files and mapped files of all processes that this user may ask, one after another."""
    words: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words.append((process / "cmdline").read_bytes().decode(errors="replace"))
            words.append((process / "environ").read_bytes().decode(errors="replace"))
            words.append((process / "maps").read_text(errors="replace"))
        with contextlib.suppress(OSError):
            words.append(str((process / "cwd").readlink()))
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    words.append(str(handle.readlink()))
    return "\n".join(words)


def _bytes_of(path: Path) -> int:
    inside = path.rglob("*") if path.is_dir() else [path]
    total = 0
    for each in inside:
        with contextlib.suppress(OSError):
            total += each.lstat().st_size
    return total
