"""Trials as processes of this machine: at most k at once, each with its share of the cores and, if asked, of a GPU.

A trial's process holds the flock of `at-work/NNNN` for as long as it lives. It is taken before the process is made and
handed down to it, so at no moment can a second one be started, whoever was killed: a controller that comes later finds
the trials of its predecessor at work and watches them as if they were its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.config.site import ENTERED, restore_profile
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import UseError
from tiltyard.processes.platforms import require_linux
from tiltyard.run.lock import read_owner
from tiltyard.run.logs import last_error
from tiltyard.sweep.folder import Sweep

AT_WORK, OUTPUT = "at-work", "output"


@dataclass
class Work:
    """A trial at work: a child of ours, or one that a predecessor left."""

    slot: int
    gpu: str | None
    process: subprocess.Popen[bytes] | None = None
    said_before: int = 0
    """bytes that earlier processes of the trial have written"""


class Local:
    """The processes of one sweep on this machine."""

    queues = False

    def __init__(self, sweep: Sweep, plan: Plan) -> None:
        require_affinity()
        self.sweep, self.plan = sweep, plan
        self.outside = self._outside()
        self.gpus = require_gpus(plan)
        self.shares = shares(sorted(os.sched_getaffinity(0)), plan.max_parallel)
        self.work: dict[int, Work] = {}
        for name in (AT_WORK, OUTPUT):
            (sweep.folder / name).mkdir(exist_ok=True)

    def _outside(self) -> dict[str, str]:
        """Our variables and those of the sweep's profile, whoever goes on with it; trials need not set them again, over
        what the plan says."""
        name = restore_profile(self.sweep.facts().get("profile"), f"sweep {self.sweep.id}")
        return {**os.environ, ENTERED: name} if name else {**os.environ}

    def adopt(self, numbers: Iterable[int]) -> set[int]:
        """Those of the trials that are at work already; they are watched from now on."""
        for number in numbers:
            if number not in self.work and self._busy(number):
                told = self._told(number)
                slot = told.get("slot")
                taken = {each.slot for each in self.work.values()}
                free = next(i for i in range(len(taken) + 1) if i not in taken)
                self.work[number] = Work(slot if isinstance(slot, int) else free, told.get("gpu"))
        return set(self.work)

    def gone(self) -> dict[int, str]:
        """One whose process vanished while nobody watched is started again, and has not failed."""
        return {}

    def job(self, number: int) -> str:
        return ""

    def has_capacity(self, number: int | None) -> bool:
        """Whether one more may be started."""
        return len(self.work) < self.plan.max_parallel and (not self.gpus or self._gpu() is not None)

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        """Start a trial; False when somebody is at it still."""
        handle = os.open(self._mark(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            taken = {each.slot for each in self.work.values()}
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
            cores, gpu = self.shares[slot % len(self.shares)], self._gpu()
            told = {"slot": slot, "gpu": gpu, "cores": cores}
            _write(handle, told)
            with self._output(number).open("ab") as log, pinned(cores):
                said_before = log.tell()
                process = subprocess.Popen(
                    command(self.plan, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(self.outside, self.plan.environment, cores, gpu),
                    pass_fds=(handle,),
                    start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on
                )
            _write(handle, {**told, "pid": process.pid})
        finally:
            os.close(handle)
        self.work[number] = Work(slot, gpu, process, said_before)
        return True

    def _output(self, number: int) -> Path:
        return self.sweep.folder / OUTPUT / f"{number:04d}.log"

    def send(self) -> list[str]:
        return []

    def poll(self) -> dict[int, str]:
        """Trials that ended since the last question, and what their process's end tells."""
        ended: dict[int, str] = {}
        for number, work in self.work.items():
            if work.process is None:
                if not self._busy(number):
                    ended[number] = "its process is gone"
            elif (code := work.process.poll()) is not None:
                said = last_error(self._output(number), work.said_before)
                ended[number] = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
                ended[number] += f": {said}" if said else ""
        for number in ended:
            del self.work[number]
        return ended

    def cancel(self, numbers: Iterable[int]) -> None:
        """Ask trials to save and end."""
        for number in numbers:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        work = self.work.get(number)
        if work is None:
            return
        if work.process is not None:
            work.process.terminate()
            return
        folder = self.sweep.place(number)
        owner = read_owner(folder) or {}
        for pid in (self._told(number).get("pid"), owner.get("pid")):
            # A number can be given to another process: its command line names the trial, or it is not meant.
            with contextlib.suppress(OSError):
                if isinstance(pid, int) and os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)
                    return

    def _gpu(self) -> str | None:
        taken = [work.gpu for work in self.work.values()]
        return least_busy(self.gpus, taken, self.plan.trials_per_gpu or 0)

    def _mark(self, number: int) -> Path:
        return self.sweep.folder / AT_WORK / f"{number:04d}"

    def _busy(self, number: int) -> bool:
        try:
            handle = os.open(self._mark(number), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def _told(self, number: int) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(self._mark(number).read_bytes())
            if isinstance(value, dict):
                return value
        return {}


def _write(handle: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))


# ---------------------------------------------------------------------------------------------- what each gets


def require_gpus(plan: Plan) -> list[str]:
    """The GPUs that trials are packed on: none where the plan does not ask for that; UseError where there are none."""
    found = visible_gpus(os.environ) if plan.trials_per_gpu is not None else []
    if plan.trials_per_gpu is not None and not found:
        raise UseError(
            f"trials_per_gpu = {plan.trials_per_gpu}, and this machine shows no GPU",
            "leave it out, or look with: tiltyard doctor",
        )
    return found


def command(plan: Plan, folder: Path) -> list[str]:
    """What is typed for one trial."""
    if plan.program is not None:
        return [sys.executable, "-m", "tiltyard.sweep.external_program", str(folder)]
    return [sys.executable, "-m", "tiltyard", "resume", str(folder), "--here", "--plain"]


def environment(
    outside: Mapping[str, str], own: Mapping[str, str], cores: Sequence[int], gpu: str | None
) -> dict[str, str]:
    """The variables of one trial: ours, the share that it has, and above them what the plan says."""
    share = {"OMP_NUM_THREADS": str(len(cores))} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
    return {**outside, **share, **own}


def shares(cores: Sequence[int], parts: int) -> list[list[int]]:
    """The cores divided into that many parts, as even as can be; with more parts than cores, one core each in turn."""
    count = len(cores)
    if parts >= count:
        return [[cores[i % count]] for i in range(parts)]
    return [list(cores[i * count // parts : (i + 1) * count // parts]) for i in range(parts)]


def least_busy(gpus: Sequence[str], taken: Sequence[str | None], most: int) -> str | None:
    """The GPU with the fewest trials, the first of equals; None when all have as many as they may."""
    open_ = [gpu for gpu in gpus if taken.count(gpu) < most]
    return min(open_, key=taken.count, default=None)


def visible_gpus(outside: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in outside:
        return [word.strip() for word in outside["CUDA_VISIBLE_DEVICES"].split(",") if word.strip() not in ("", "-1")]
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(i) for i, line in enumerate(line for line in said.splitlines() if line.startswith("GPU "))]


def require_affinity() -> None:
    """UseError where trials cannot be bound to cores of their own."""
    require_linux("a sweep on this machine", "start it on Linux, or as jobs with --on PROFILE")


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """What is started inside is bound to these cores from its first instruction."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
