"""Checks of storage: the runs folder, temporary folders, shared memory, and leftovers of dead processes there.

    leftovers   /dev/shm     ViZDoom*  plasma*                  Doom's engines, Ray's object store
                temporary    ty-*  tiltyard-*  ray/session_*    ours, and Ray's

A leftover belongs to this user, no process of this user has it open or names it, and it is older than all running
Python processes.
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
from tiltyard.run import mutex

LOW_DISK = 2 << 30  # bytes: a few checkpoints and a video
LOW_TEMPORARY, FULL = 1 << 30, 64 << 20
LOW_SHARED = 1 << 30  # Docker gives 64 MiB; Ray's object store uses a third of the memory
TRIAL_SIZE = 32 << 20  # bytes written to test the quota
LONGEST_SOCKET = 107  # bytes of a socket's path
SOCKET = "pymp-xxxxxxxx/listener-xxxxxxxx"  # below the temporary folder, as multiprocessing names them
SHARED = Path("/dev/shm")
ALL_PROCESSES = "pid:[4026531836]"  # the inode of the kernel's initial pid namespace
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
        reason = f"cannot write to {root}: {error.strerror}"
        return Finding("runs", "bad", reason, "set TILTYARD_RUNS to a folder that you may write to")
    free = shutil.disk_usage(place).free
    found = f"{root}, {free / 2**30:.1f} GiB free"
    if free < LOW_DISK:
        return Finding("runs", "note", found, "checkpoints need space: free some, or set TILTYARD_RUNS to another disk")
    return Finding("runs", "ok", found)


def check_flock() -> Finding:
    """Lock a file beside the runs, and try to lock it again: run folders have one writer only if that fails."""
    hint = "keep runs on a file system that supports flock (local disks and NFS 4 do)"
    try:
        place = existing(runs_root())
        with tempfile.NamedTemporaryFile(dir=place) as first, Path(first.name).open("r+b") as second:
            works = mutex.try_lock(first.fileno()) and not mutex.try_lock(second.fileno())
    except TiltyardError as error:
        return Finding("flock", "bad", error.message, error.hint)
    except OSError as error:
        return Finding("flock", "bad", f"files in {place} cannot be locked: {error.strerror}", hint)
    if not works:
        return Finding("flock", "bad", f"a locked file in {place} was locked a second time", hint)
    return Finding("flock", "ok", f"files in {place} can be locked")


def check_quota() -> Finding:
    """Write a file beside the runs, and read the user's `quota` where a site has it."""
    try:
        place = existing(runs_root())
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, TRIAL_SIZE)
    except TiltyardError as error:
        return Finding("quota", "bad", error.message, error.hint)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            reason = f"cannot write {size(TRIAL_SIZE)} to {place}: {error.strerror}"
            return Finding("quota", "bad", reason, "delete old runs (tiltyard rm), or set TILTYARD_RUNS elsewhere")
    used = fullest(_quota_lines())
    if used is None:
        return Finding("quota", "ok", f"{size(TRIAL_SIZE)} written; `quota` lists no limit for this user")
    found = f"{used[1]:.0%} of the quota on {used[0]} is used"
    if used[1] >= 0.9:
        return Finding("quota", "bad" if used[1] >= 1 else "note", found, "delete old runs: tiltyard rm")
    return Finding("quota", "ok", found)


def _quota_lines() -> list[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["quota", "-w"], capture_output=True, text=True, errors="replace", timeout=20)
        return done.stdout.splitlines()
    return []


def fullest(lines: Iterable[str]) -> tuple[str, float] | None:
    """The file system with the fullest quota (blocks or files) and the share that is used; None without a quota."""
    found: list[tuple[str, float]] = []
    for words in (line.split() for line in lines):
        numbers = [int(word.rstrip("*")) for word in words[1:] if word.rstrip("*").isdecimal()]
        # FILESYSTEM blocks quota limit [grace] files quota limit [grace]
        for used, soft, hard in (numbers[0:3], numbers[3:6]) if len(numbers) >= 6 else ():
            if limit := soft or hard:
                found.append((words[0], used / limit))
    return max(found, key=lambda each: each[1], default=None)


def check_temporary() -> Finding:
    """Free space in the temporary folder, and whether it can hold sockets."""
    place = Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    found = f"{place}, {size(free)} free"
    if free < LOW_TEMPORARY:
        hint = "free some, or set TMPDIR to another disk of this machine"
        return Finding("temporary", "bad" if free < FULL else "note", found, hint)
    if (longest := len(os.fsencode(place / SOCKET))) > LONGEST_SOCKET:
        reason = f"{place} is too long: socket paths in it have {longest} bytes, but {LONGEST_SOCKET} are allowed"
        return Finding("temporary", "bad", reason, "set TMPDIR to a shorter path, like /tmp")
    with tempfile.TemporaryDirectory(dir=place) as folder, socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(f"{folder}/s")
        except OSError as error:
            reason = f"{place} does not support sockets: {error.strerror}"
            return Finding("temporary", "bad", reason, "set TMPDIR to a disk of this machine, like /tmp")
    return Finding("temporary", "ok", found)


def check_shared_memory(place: Path = SHARED) -> Finding:
    if not place.is_dir():
        return Finding("shm", "note", f"{place} does not exist", "Doom and Ray need it: mount a tmpfs there")
    whole = shutil.disk_usage(place)
    found = f"{place}, {size(whole.free)} of {size(whole.total)} free"
    if whole.free < LOW_SHARED:
        hint = f"delete leftovers in {place}; in Docker, start with --shm-size=4g"
        return Finding("shm", "bad" if whole.free < FULL else "note", found, hint)
    return Finding("shm", "ok", found)


def check_leftovers(shared: Path | None = None, temporary: Path | None = None) -> Finding:
    left = leftovers(shared, temporary)
    if not left:
        return Finding("leftovers", "ok", "none in shared memory and temporary folders")
    names = ", ".join(str(path) for path in left[:3]) + (" ..." if len(left) > 3 else "")
    bytes_held = sum(_bytes_of(path) for path in left)
    found = f"{len(left)} of dead processes, {size(bytes_held)}: {names}"
    if not sees_all_processes():
        hint = "they may belong to processes outside this container: run this there"
        return Finding("leftovers", "note", found, hint)
    return Finding("leftovers", "note", found, "tiltyard doctor --clean removes them")


def sees_all_processes() -> bool:
    """Whether all processes of this machine are visible; in most containers they are not."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == ALL_PROCESSES
    except OSError:
        return False


def remove_leftovers(shared: Path | None = None, temporary: Path | None = None) -> list[Path]:
    """Delete leftovers; returns those that were deleted."""
    if not sees_all_processes():
        reason = "processes outside this container cannot be seen, and may use what looks like a leftover"
        raise UseError(reason, "run it outside the container, or delete by hand what `tiltyard doctor` lists")
    gone = []
    for path in leftovers(shared, temporary):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        gone += [] if path.exists() else [path]
    return gone


def leftovers(shared: Path | None = None, temporary: Path | None = None) -> list[Path]:
    """This user's files and folders with names of Tiltyard or Ray that no process uses any more."""
    shared = shared or SHARED
    places = {temporary} if temporary else {Path("/tmp"), Path(tempfile.gettempdir())}
    candidates = [path for name in SHARED_NAMES for path in shared.glob(name)]
    candidates += [path for place in sorted(places) for name in TEMPORARY_NAMES for path in place.glob(name)]
    changed = {}
    for path in candidates:
        with contextlib.suppress(OSError):  # just removed
            found = path.lstat()
            if found.st_uid == os.getuid() and not path.is_symlink():
                changed[path] = found.st_mtime
    if not changed:
        return []
    used, python = _files_of_processes(), _oldest_python()
    return [
        path for path, when in changed.items() if str(path) not in used and (path.parent == shared or when < python)
    ]


def _oldest_python() -> float:
    """When the oldest running Python was started. It may use younger folders without an open file in them."""
    return min((each.started for each in proc.own_processes() if "python" in _program(each.pid)), default=time.time())


def _program(pid: int) -> str:
    try:
        return (proc.PROC / str(pid) / "exe").readlink().name
    except OSError:
        return ""


def _files_of_processes() -> str:
    """Command lines, variables, open and mapped files of all processes that this user may read, as one text."""
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
