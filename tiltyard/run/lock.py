"""One writer per run: which process holds lock.json, whether it is alive, and how a dead owner's lock is taken over.

    same job, higher restart count    at once
    same machine, process gone        at once
    same machine, process alive       refused, naming host and pid
    another machine, or another boot  only after its heartbeat has not changed for three periods, by our own clock

`.lock-guard` (mutex.py) makes check-and-take atomic. The owner's heartbeat uses it too, so that an owner that was taken
over while suspended notices and never overwrites its successor. Cloned machines and containers may share a host name:
one that has booted another time may be another machine.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, mutex
from tiltyard.run.events import log_event

if TYPE_CHECKING:
    from tiltyard.run.folder import Run

LOCK = "lock.json"
GUARD = ".lock-guard"
STILL_PERIODS = 3
# After this many periods without a check an owner may have been taken over, and checks again before it writes.
UNSEEN_PERIODS = 2
# For listings only, which cannot wait: an owner on another machine without a heartbeat for this long is shown as lost.
SILENT_PERIODS = 60

Owner = dict[str, Any]


def default_period() -> float:
    """Seconds between heartbeats: 10, or TILTYARD_HEARTBEAT."""
    text = os.environ.get("TILTYARD_HEARTBEAT", "10")
    period = atomic.NOT_FINITE.get(text)
    with contextlib.suppress(ValueError):
        period = float(text)
    if period is None or not 0.01 <= period <= 3600:
        hint = "set it between 0.01 and 3600, or unset it"
        raise UseError(f"TILTYARD_HEARTBEAT = {text} must be a number of seconds", hint)
    return period


# ---------------------------------------------------------------------------------------------- owners


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if the process (or /proc) does not exist."""
    # The command name (field 2) may contain spaces and brackets: split after the last bracket.
    fields = _first_line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def this_machine() -> dict[str, str]:
    """What tells machines, their boots and containers apart."""
    return {
        "host": os.uname().nodename,
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "pids": _pid_namespace(),
    }


def this_process() -> Owner:
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    return {
        **this_machine(),
        "pid": os.getpid(),
        "started": _start_ticks(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restart": int(restart) if restart.isdecimal() else 0,
    }


def liveness(owner: Owner) -> Literal["alive", "dead", "unknown"]:
    """Whether the owner's process is alive; unknown for a process on another machine."""
    here = this_machine()
    # A container with our host name has its own process ids, a cloned machine its own boot.
    if any(owner.get(name) != here[name] for name in here):
        return "unknown"
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return "dead"
    if here["boot"]:
        # A process id can be reused; together with the start time it is unique.
        return "alive" if _start_ticks(pid) == owner.get("started") != "" else "dead"
    return "alive" if in_use(pid) else "dead"


def in_use(pid: int) -> bool:
    """Whether this machine has a process with that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def read_owner(folder: Path) -> Owner | None:
    """The process that holds the run, or None. A broken lock file counts as an unknown owner."""
    try:
        return atomic.read_json(folder / LOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return {"host": "", "pid": 0}


def seems_alive(folder: Path) -> bool:
    """For listings: whether a process seems to hold the run, by one quick check."""
    owner = read_owner(folder)
    if owner is None:
        return False
    seen = liveness(owner)
    if seen != "unknown":
        return seen == "alive"
    try:
        age = time.time() - (folder / LOCK).stat().st_mtime
    except OSError:
        return False
    return age < SILENT_PERIODS * _period_of(owner)


def _period_of(owner: Owner) -> float:
    period = atomic.number(owner.get("period"))
    return period if period is not None and 0 < period <= 3600 else 10.0


def describe(owner: Owner) -> str:
    """The process that holds a lock, for people."""
    return f"pid {owner.get('pid', '?')} on host {owner.get('host') or '?'}"


def _busy(run: Run, owner: Owner) -> UseError:
    hint = f"wait until it ends, or stop it with: tiltyard stop {run.typed}"
    return UseError(f"run {run.id} is being written by {describe(owner)}", hint)


def refuse_if_running(run: Run) -> None:
    """UseError if a running process on this machine holds the run: a quick check before slow ones."""
    owner = read_owner(run.folder)
    if owner is not None and liveness(owner) == "alive" and not _restarted(owner, this_process()):
        raise _busy(run, owner)


# ---------------------------------------------------------------------------------------------- the lock


class Lock:
    """A run's lock, held from `acquire` (or `with`) to `release`; a thread updates its heartbeat in between."""

    def __init__(self, run: Run, *, period: float | None = None) -> None:
        self.run = run
        self.period = default_period() if period is None else period
        self.held = False
        self._mark = os.urandom(8).hex()
        self._beat = 0
        self._seen = time.monotonic()  # when lock.json was last checked to be ours
        self._successor: Owner | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(cls, run: Run, *, period: float | None = None) -> Lock:
        """Acquire the run's lock, or UseError naming the owner. Use as a context manager, or call release."""
        lock = cls(run, period=period)
        lock._take()
        return lock

    def __enter__(self) -> Lock:
        if not self.held:
            self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def taken_over(self) -> bool:
        """Whether another process holds the run now.

        Free, unless the heartbeat thread could not check for a while, because this process was suspended or the guard
        is held: then it reads the file.
        """
        if self._successor is None and time.monotonic() - self._seen > UNSEEN_PERIODS * self.period:
            self._find_successor()
        return self._successor is not None

    def check(self) -> None:
        """Raise if another process took the run over; called before writing anything permanent."""
        if self.taken_over:
            assert self._successor is not None
            raise TiltyardError(
                f"run {self.run.id} was taken over by {describe(self._successor)} while this process was suspended",
                f"this process stops writing; follow the run with: tiltyard logs -f {self.run.typed}",
            )

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        if not self.held:
            return
        self.held = False
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        # `remove` may have moved the folder to the trash, and the lock with it.
        with contextlib.suppress(OSError, UseError), guard(self.run):
            owner = read_owner(self.run.folder)
            if owner is not None and owner.get("mark") == self._mark:
                (self.run.folder / LOCK).unlink()

    # -- taking

    def _take(self) -> None:
        watched = self._try()
        while watched is not None:
            self._watch(watched)
            watched = self._try(given_up=watched)
        self.held, self._seen = True, time.monotonic()
        self._thread = threading.Thread(target=self._keep_beating, name="run-lock-heartbeat", daemon=True)
        self._thread.start()

    def _try(self, given_up: Owner | None = None) -> Owner | None:
        """Take the lock; or return an owner that may be on another machine, to be watched first; or raise if one is
        alive here."""
        with guard(self.run):
            owner = read_owner(self.run.folder)
            if owner is not None and not self._may_take(owner, given_up):
                if liveness(owner) == "unknown":
                    return owner
                raise _busy(self.run, owner)
            self._write()
        if owner is not None:
            log_event(self.run, "recovered", f"The lock of {describe(owner)} was taken over: {_why_taken(owner)}.")
        return None

    def _may_take(self, owner: Owner, given_up: Owner | None) -> bool:
        return _restarted(owner, this_process()) or liveness(owner) == "dead" or owner == given_up

    def _watch(self, owner: Owner) -> None:
        """Return once the owner's heartbeat has not changed for long enough by our own clock; raise when it changes.
        Time in which a third process held the guard, which the heartbeat needs, does not count."""
        timeout = STILL_PERIODS * max(_period_of(owner), self.period)
        start = time.monotonic()
        while time.monotonic() - start < timeout:
            time.sleep(min(0.5, self.period / 4))
            with guard(self.run) as waited:
                seen = read_owner(self.run.folder)
            if waited > self.period / 2:
                start = time.monotonic()
            if seen is None:
                return
            if seen != owner:
                raise _busy(self.run, seen)

    # -- keeping

    def _write(self) -> None:
        atomic.write_json(
            self.run.folder / LOCK,
            {**this_process(), "heartbeat": self._beat, "period": self.period, "mark": self._mark},
        )

    def _keep_beating(self) -> None:
        while not self._ended.wait(self.period) and self._successor is None:
            self._update_heartbeat()

    def _update_heartbeat(self) -> None:
        """Update the heartbeat if the run is still ours, else remember the new owner."""
        # A full or unreachable disk or a held guard must not end the run: the next attempt may succeed.
        with contextlib.suppress(OSError, UseError), guard(self.run, min(self.period, mutex.TIMEOUT)):
            if not self._ended.is_set() and self._find_successor() is None:
                self._beat += 1
                self._write()

    def _find_successor(self) -> Owner | None:
        """The process that has taken the run over, or None; also None while the file cannot be read, as the disk may
        be unreachable for a moment, and a new owner's file is never damaged."""
        with contextlib.suppress(OSError, ValueError):
            try:
                owner = atomic.read_json(self.run.folder / LOCK)
            except FileNotFoundError:
                owner = {}
            self._seen = time.monotonic()
            if owner.get("mark") != self._mark:
                self._successor = owner
        return self._successor


@contextlib.contextmanager
def guard(run: Run, timeout: float | None = None) -> Iterator[float]:
    """A mutex for all processes that use the run, on any machine; yields how many seconds it had to be waited for."""
    with contextlib.ExitStack() as held:
        try:
            waited = held.enter_context(mutex.hold(run.folder / GUARD, timeout))
        except OSError as error:
            hint = "check the folder's owner and permissions, or fork the run into a runs folder of your own"
            raise UseError(f"run {run.id} cannot be written: {run.folder}: {error.strerror}", hint) from error
        yield waited


def _restarted(owner: Owner, me: Owner) -> bool:
    restart = owner.get("restart")
    return bool(me["job"]) and owner.get("job") == me["job"] and isinstance(restart, int) and me["restart"] > restart


def _why_taken(owner: Owner) -> str:
    if _restarted(owner, this_process()):
        return f"job {owner['job']} was restarted"
    return (
        "the process is gone"
        if liveness(owner) == "dead"
        else f"its heartbeat did not change for {STILL_PERIODS} periods"
    )
