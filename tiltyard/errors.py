"""The kinds of errors that a user can see, and their exit codes.

Every error is one sentence that names the setting, file and value, and a hint that says what to do. The command line
prints `error: MESSAGE` and `hint: HINT` and exits with the error's code, without a traceback of Tiltyard.

    0 done   1 failed   2 wrong use   75 stopped and resumable   130 interrupted twice
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_RESUMABLE = 75
EXIT_INTERRUPTED = 130


class TiltyardError(Exception):
    """A command failed. `details` is text shown below the message, such as a traceback of the user's code."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "", details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class TiltyardWarning(UserWarning):
    """Something is wrong that does not stop a command; the command line prints it without the place in the code."""


class UseError(TiltyardError):
    """Wrong use, found before anything was started or written."""

    exit_code = EXIT_WRONG_USE


@dataclass(frozen=True)
class Problem:
    """One problem with a setting: its dotted name, its value, what is wrong and what to do."""

    setting: str
    value: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        setting = self.setting if self.setting.isprintable() else repr(self.setting)
        shown = f" = {self.value}" if self.value else ""
        hint = f"\n   hint: {self.hint}" if self.hint else ""
        return f"{setting}{shown}: {self.message}{hint}"


class ConfigError(UseError):
    """All problems of an experiment, site file or plan, numbered."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        hint = "" if any(problem.hint for problem in problems) else "`tiltyard config reference` explains every setting"
        super().__init__(f"{count} in {source or 'the settings'}", hint)
        self.problems = problems
        self.details = "\n".join(f"{i}. {problem}" for i, problem in enumerate(problems, 1))


class DiskError(TiltyardError, OSError):
    """A file could not be written: an error with a hint, and an OSError for code that handles those."""

    def __init__(self, message: str, hint: str, cause: OSError) -> None:
        super().__init__(message, hint)
        self.errno, self.strerror = cause.errno, cause.strerror

    def __str__(self) -> str:
        return self.message


class ResumableError(TiltyardError):
    """The run ended for a reason that is not its own; `tiltyard resume` continues it."""

    exit_code = EXIT_RESUMABLE


class EnvError(TiltyardError):
    """An environment broke the API, crashed or did not start."""


class DivergedError(TiltyardError):
    """A loss, reward, observation or gradient is not finite. `batch` has the arrays concerned."""

    def __init__(self, message: str, hint: str, batch: dict[str, object]) -> None:
        super().__init__(message, hint)
        self.batch = batch


class RaisedElsewhere(Exception):
    """An exception of user code in another process: the text of `raised`, and its traceback."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.message, self.details = message, details


def raised(error: BaseException) -> str:
    """Describe an exception of user code as a verb phrase: `raised ValueError: no map`, `called sys.exit(3)`."""
    if isinstance(error, RaisedElsewhere):
        return error.message
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    return f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the most similar known word, else all known words if they are few, else nothing."""
    words = sorted(set(known))
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if 0 < len(words) <= 20:
        return "known: " + ", ".join(words)
    return ""
