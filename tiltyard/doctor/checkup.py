"""All checks of one machine: the functions check_NAME of these modules, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tiltyard.doctor import display, slurm, software, storage, system
from tiltyard.doctor.finding import Finding

CHECKS: tuple[Callable[[], Finding], ...] = tuple(
    check
    for module in (software, system, storage, display, slurm)
    for name, check in vars(module).items()
    if name.startswith("check_")
)


def run_checks() -> Iterator[Finding]:
    """Run all checks. A check that raises an exception yields a finding too."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - checks must survive any machine
            name = check.__name__.removeprefix("check_")
            yield Finding(name, "note", f"the check failed: {type(error).__name__}: {error}", "please report it")
