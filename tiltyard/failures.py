"""How failures are classed: one table for training, the node agent of a job, sweeps and populations.

    retried in place   may pass by itself: the process waits and tries again, and after `save.patience` exits with 75
    resumable          the process was stopped or lost: `tiltyard resume` continues the run
    final              would happen again: exit code 1, or 2 for wrong use

docs/concepts/failures.md lists who does what.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Literal

from tiltyard.errors import EXIT_RESUMABLE, DiskError, ResumableError, TiltyardError, UseError

RETRY_SECONDS = 600.0  # for which node agents and sweeps try to write what they must; training has save.patience
FailureClass = Literal["retried in place", "resumable", "final"]

# Errors of a disk or a file server that may pass. Missing permissions and missing folders are final.
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EIO", "EREMOTEIO", "ESTALE", "EAGAIN", "EBUSY", "EINTR", "ETIMEDOUT", "ENOLCK"),
        *("ENOMEM", "ENOBUFS", "EMFILE", "ENFILE", "ENOTCONN", "ESHUTDOWN", "ECONNABORTED", "ECONNREFUSED"),
        *("ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENOLINK", "EKEYEXPIRED"),
    )
    if hasattr(errno, name)
)


def class_of(error: BaseException) -> FailureClass:
    """The class of an error that ended a command."""
    if isinstance(error, DiskError):
        return "retried in place" if error.errno in PASSING else "final"
    if isinstance(error, ResumableError):
        return "retried in place" if isinstance(error.__cause__, DiskError) else "resumable"
    # A lock or a file that could not be opened. Errors of envs and models have other types, whatever caused them.
    cause = error.__cause__ if isinstance(error, UseError) else error
    return "resumable" if isinstance(cause, OSError) and cause.errno in PASSING else "final"


def class_of_exit(code: int) -> FailureClass | None:
    """The class of a trainer's exit code, negative for a death by signal; None if it is done."""
    if code == 0:
        return None
    return "resumable" if code < 0 or code == EXIT_RESUMABLE else "final"


def exit_code(error: TiltyardError) -> int:
    """The exit code of a command that ended with this error."""
    return error.exit_code if class_of(error) == "final" else EXIT_RESUMABLE


def retry(action: Callable[[], None], seconds: float = RETRY_SECONDS) -> None:
    """Repeat an action while it fails for a reason that may pass; after some seconds its error is raised."""
    back_off = BackOff()
    while True:
        try:
            action()
            return
        except (OSError, UseError) as error:
            if class_of(error) == "final" or back_off.failed() >= seconds:
                raise
        back_off.wait()


class BackOff:
    """Pauses between two tries: 0.1 s, doubled after each failure, at most 10 s."""

    def __init__(self) -> None:
        self.since: float | None = None
        """when the failures began, by the monotonic clock"""
        self._pause, self._next = 0.1, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def failed(self) -> float:
        """Count a failure; returns the seconds since the first."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        self._next, self._pause = now + self._pause, min(2 * self._pause, 10.0)
        return now - self.since

    def wait(self) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
