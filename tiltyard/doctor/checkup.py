"""All checks of one machine, in the order of the report. Each is a function that returns a Finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tiltyard.doctor import display, slurm, software, storage, system
from tiltyard.doctor.finding import Finding

CHECKS: tuple[Callable[[], Finding], ...] = (
    software.check_python,
    software.check_packages,
    software.check_torch,
    software.check_gpus,
    software.check_extras,
    software.check_video,
    software.check_git,
    system.check_cores,
    system.check_memory,
    system.check_files,
    system.check_processes,
    system.check_threads,
    system.check_ports,
    system.check_preload,
    system.check_clock,
    storage.check_runs,
    storage.check_quota,
    storage.check_temporary,
    storage.check_shared_memory,
    storage.check_leftovers,
    display.check_display,
    display.check_opengl,
    display.check_opengl_xvfb,
    display.check_opengl_offscreen,
    slurm.check_slurm,
    slurm.check_requeue,
    slurm.check_preemption,
    slurm.check_arrays,
)


def run_checks() -> Iterator[Finding]:
    """Run all checks. A check that raises an exception yields a finding too."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - checks must survive any machine
            name = check.__name__.removeprefix("check_")
            yield Finding(name, "note", f"the check failed: {type(error).__name__}: {error}", "please report it")
