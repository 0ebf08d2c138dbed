"""The share of this machine that each local trial gets: cores, threads, a GPU, environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import UseError
from tiltyard.processes.platforms import require_linux
from tiltyard.slurm.usage import gpu_count


def require_affinity() -> None:
    """UseError where processes cannot be bound to cores."""
    require_linux("a sweep on this machine", "start it on Linux, or as jobs with --on PROFILE")


def require_gpus(plan: Plan) -> list[str]:
    """The GPUs that trials share; none without trials_per_gpu, UseError if the machine has none."""
    if plan.trials_per_gpu is None:
        return []
    found = visible_gpus(os.environ)
    if not found:
        hint = "remove trials_per_gpu, or check with: tiltyard doctor"
        raise UseError(f"trials_per_gpu = {plan.trials_per_gpu}: this machine has no visible GPU", hint)
    return found


def environment(
    outside: Mapping[str, str], own: Mapping[str, str], cores: Sequence[int], gpu: str | None
) -> dict[str, str]:
    """The variables of one trial: this process's, its share of the machine, and above them the plan's."""
    share = {"OMP_NUM_THREADS": str(len(cores))} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
    return {**outside, **share, **own}


def shares(cores: Sequence[int], parts: int) -> list[list[int]]:
    """The cores divided into parts as evenly as possible; with more parts than cores, cores are used repeatedly."""
    count = len(cores)
    if parts >= count:
        return [[cores[i % count]] for i in range(parts)]
    return [list(cores[i * count // parts : (i + 1) * count // parts]) for i in range(parts)]


def least_busy(gpus: Sequence[str], taken: Sequence[str | None], most: int) -> str | None:
    """The GPU with the fewest trials, the first of equals; None if each has `most`."""
    open_ = [gpu for gpu in gpus if taken.count(gpu) < most]
    return min(open_, key=taken.count, default=None)


def visible_gpus(outside: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in outside:
        return [word.strip() for word in outside["CUDA_VISIBLE_DEVICES"].split(",") if word.strip() not in ("", "-1")]
    return [str(number) for number in range(gpu_count())]


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Bind processes started inside to these cores from their first instruction."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
