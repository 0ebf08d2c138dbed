"""The few kinds of failure a user can meet, and how each is told.

Every error is one sentence that names the setting, file and value, and a hint that says what to do. The command
line prints `error: MESSAGE` and `hint: HINT` and exits with the kind's code; nobody ever sees a traceback of ours.

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
    """Something failed while doing what was asked. `details` is text shown below the sentence: a user's traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "", details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class UseError(TiltyardError):
    """What was asked cannot be done as asked: found before anything was started or written."""

    exit_code = EXIT_WRONG_USE


@dataclass(frozen=True)
class Problem:
    """One thing wrong with an experiment: the setting's dotted name, the value found there, what to do."""

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
    """All problems of a description at once, numbered."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        hint = "" if any(problem.hint for problem in problems) else "`tiltyard config reference` explains every setting"
        super().__init__(f"{count} in {source or 'the settings'}", hint)
        self.problems = problems
        self.details = "\n".join(f"{i}. {problem}" for i, problem in enumerate(problems, 1))


class EnvError(TiltyardError):
    """An environment broke its contract, crashed or would not start."""


class DivergedError(TiltyardError):
    """A loss, reward, observation or gradient stopped being a finite number. `batch` holds the offending arrays."""

    def __init__(self, message: str, hint: str, batch: dict[str, object]) -> None:
        super().__init__(message, hint)
        self.batch = batch


class RaisedElsewhere(Exception):
    """What foreign code did in another process, as `raised` says it, and its traceback as text."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.message, self.details = message, details


def raised(error: BaseException) -> str:
    """What foreign code did, as the end of a sentence about it: raised ValueError: no map; called sys.exit(3)."""
    if isinstance(error, RaisedElsewhere):
        return error.message
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    return f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint naming the nearest known word, or all of them when they are few, or nothing."""
    words = sorted(set(known))
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if 0 < len(words) <= 20:
        return "known: " + ", ".join(words)
    return ""
