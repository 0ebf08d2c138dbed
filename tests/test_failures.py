"""The table of failures: classes of errors and exit codes, and the page that lists them."""

import errno
from pathlib import Path

import pytest

from tiltyard.errors import DiskError, DivergedError, EnvError, ResumableError, TiltyardError, UseError
from tiltyard.failures import PASSING, FailureClass, class_of, class_of_exit, exit_code, retry

FULL = OSError(errno.ENOSPC, "No space left on device")
DENIED = OSError(errno.EACCES, "Permission denied")


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (DiskError("full", "", FULL), "retried in place", 75),
        (DiskError("denied", "", DENIED), "final", 1),
        (caused(ResumableError("too long"), DiskError("full", "", FULL)), "retried in place", 75),
        (caused(ResumableError("received SIGTERM"), EnvError("gone")), "resumable", 75),
        (caused(UseError("the lock cannot be opened"), FULL), "resumable", 75),
        (caused(UseError("the folder cannot be written"), DENIED), "final", 2),
        (UseError("no such run"), "final", 2),
        (caused(EnvError("step() raised OSError"), FULL), "final", 1),
        (DivergedError("nan", "", {}), "final", 1),
    ],
)
def test_class_and_exit_code_of_each_error(error: TiltyardError, kind: FailureClass, code: int) -> None:
    assert (class_of(error), exit_code(error)) == (kind, code)


def test_class_of_each_exit() -> None:
    found = [class_of_exit(code) for code in (0, 75, -9, 1, 2, 130)]
    assert found == [None, "resumable", "resumable", "final", "final", "final"]


def test_action_is_repeated_only_while_its_failure_may_pass() -> None:
    errors = [DiskError("full", "", FULL), FULL]

    def fails_twice() -> None:
        if errors:
            raise errors.pop()

    retry(fails_twice)
    assert errors == []
    for error, seconds in ((DENIED, 60.0), (FULL, 0.0)):
        errors.append(error)
        with pytest.raises(OSError, match=error.strerror):
            retry(fails_twice, seconds)


def test_page_names_every_error_that_may_pass() -> None:
    page = (Path(__file__).parents[1] / "docs" / "concepts" / "failures.md").read_text(encoding="utf-8")
    assert [errno.errorcode[number] for number in PASSING if errno.errorcode[number] not in page] == []
