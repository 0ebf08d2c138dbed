"""Trials as processes on this machine: at most max_parallel at once, each with its share of it (shares.py).

A trial's process holds the flock of `at-work/NNNN` for its whole life. The lock is taken before the process is made
and inherited by it, so a second process of a trial can never start, even after a kill: a later controller finds the
trials of an earlier one running and watches them like its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.config.site import ENTERED, restore_profile
from tiltyard.config.sweep_plan import Plan
from tiltyard.run import atomic, mutex
from tiltyard.run.lock import read_owner
from tiltyard.run.logs import last_error
from tiltyard.sweep.backends.shares import environment, least_busy, pinned, require_affinity, require_gpus, shares
from tiltyard.sweep.folder import Sweep

AT_WORK, OUTPUT = "at-work", "output"


@dataclass
class Work:
    """A running trial: a child process, or one that an earlier controller started."""

    slot: int
    gpu: str | None
    process: subprocess.Popen[bytes] | None = None
    output_start: int = 0
    """bytes in the output file that earlier processes of the trial wrote"""


class Local:
    """The processes of one sweep on this machine."""

    queues = False

    def __init__(self, sweep: Sweep, plan: Plan, *, trust_code: bool = False) -> None:
        require_affinity()
        self.sweep, self.plan, self.trust_code = sweep, plan, trust_code
        # With the profile's variables, whichever process continues the sweep: trials need not apply it over the plan's.
        name = restore_profile(sweep.facts().get("profile"), f"sweep {sweep.id}")
        self.outside = {**os.environ, ENTERED: name} if name else {**os.environ}
        self.gpus = require_gpus(plan)
        self.shares = shares(sorted(os.sched_getaffinity(0)), plan.max_parallel)
        self.work: dict[int, Work] = {}
        self.jobs: dict[int, str] = {}
        self.gone: dict[int, str] = {}  # none: a trial whose process vanished while no controller ran starts again
        for folder in (AT_WORK, OUTPUT):
            (sweep.folder / folder).mkdir(exist_ok=True)

    def adopt(self, numbers: Iterable[int]) -> set[int]:
        """Watch those of the trials that are running already; returns all that run."""
        for number in numbers:
            if number not in self.work and _is_locked(self._mark(number)):
                mark = _read_mark(self._mark(number))
                slot = mark.get("slot")
                self.work[number] = Work(slot if isinstance(slot, int) else self._free_slot(), mark.get("gpu"))
        return set(self.work)

    def has_capacity(self, number: int | None) -> bool:
        return len(self.work) < self.plan.max_parallel and (not self.gpus or self._gpu() is not None)

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        handle = _lock(self._mark(number))
        if handle is None:
            return False
        try:
            slot, gpu = self._free_slot(), self._gpu()
            cores = self.shares[slot % len(self.shares)]
            mark = {"slot": slot, "gpu": gpu, "cores": cores}
            _write_mark(handle, mark)
            with self._output(number).open("ab") as log, pinned(cores):
                output_start = log.tell()
                process = subprocess.Popen(
                    command(self.plan, folder, self.trust_code),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(self.outside, self.plan.environment, cores, gpu),
                    pass_fds=(handle,),
                    start_new_session=True,  # the controller passes on a Ctrl-C in the terminal itself
                )
            _write_mark(handle, {**mark, "pid": process.pid})
        finally:
            os.close(handle)
        self.work[number] = Work(slot, gpu, process, output_start)
        return True

    def poll(self) -> dict[int, str]:
        ended: dict[int, str] = {}
        for number, work in self.work.items():
            if work.process is None:
                if not _is_locked(self._mark(number)):
                    ended[number] = "its process is gone"
            elif (code := work.process.poll()) is not None:
                line = last_error(self._output(number), work.output_start)
                ended[number] = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
                ended[number] += f": {line}" if line else ""
        for number in ended:
            del self.work[number]
        return ended

    def cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            work = self.work.get(number)
            if work is not None and work.process is not None:
                work.process.terminate()
            elif work is not None:
                self._terminate_adopted(number)

    def _terminate_adopted(self, number: int) -> None:
        folder = self.sweep.place(number)
        owner = read_owner(folder) or {}
        for pid in (_read_mark(self._mark(number)).get("pid"), owner.get("pid")):
            # A pid may be reused: only a process whose command line names the trial is meant.
            with contextlib.suppress(OSError):
                if isinstance(pid, int) and os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)
                    return

    def _free_slot(self) -> int:
        taken = {each.slot for each in self.work.values()}
        return next(i for i in range(len(taken) + 1) if i not in taken)

    def _gpu(self) -> str | None:
        taken = [work.gpu for work in self.work.values()]
        return least_busy(self.gpus, taken, self.plan.trials_per_gpu or 0)

    def _mark(self, number: int) -> Path:
        return self.sweep.folder / AT_WORK / f"{number:04d}"

    def _output(self, number: int) -> Path:
        return self.sweep.folder / OUTPUT / f"{number:04d}.log"


def command(plan: Plan, folder: Path, trust_code: bool = False) -> list[str]:
    """The command line of one trial."""
    trust = ["--trust-code"] if trust_code else []
    if plan.program is not None:
        return [sys.executable, "-m", "tiltyard.sweep.external_program", str(folder), *trust]
    return [sys.executable, "-m", "tiltyard", "resume", str(folder), "--here", "--plain", *trust]


def _lock(mark: Path) -> int | None:
    """A handle that holds the lock; None if a process of the trial holds it."""
    handle = mutex.open_private(mark)
    if mutex.try_lock(handle):
        return handle
    os.close(handle)
    return None


def _is_locked(mark: Path) -> bool:
    if not mark.exists():
        return False
    handle = _lock(mark)
    if handle is not None:
        os.close(handle)
    return handle is None


def _read_mark(mark: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return atomic.read_json(mark)
    return {}


def _write_mark(handle: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))
