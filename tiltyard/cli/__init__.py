"""The command line: a table of verbs, each in a small file of its own that is imported when typed.

stdout is data, stderr is everything else. Every failure is one sentence and a hint; see tiltyard.errors for exit
codes. Importing this module imports nothing heavy, so `tiltyard --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import BinaryIO, NoReturn

from tiltyard import __version__
from tiltyard.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_USE,
    ConfigError,
    TiltyardError,
    UseError,
    did_you_mean,
)
from tiltyard.processes.platforms import refuse_windows

# verb -> (module with configure_VERB and run_VERB, one-line summary)
VERBS: dict[str, tuple[str, str]] = {
    "train": ("tiltyard.cli.train", "train an experiment: a YAML file or an env id, with key=value changes"),
    "resume": ("tiltyard.cli.train", "continue a run, or train a finished one longer"),
    "fork": ("tiltyard.cli.train", "start a new run from a checkpoint with changed settings"),
    "eval": ("tiltyard.cli.evaluate", "measure a policy: mean and interval, video, rollout files"),
    "match": ("tiltyard.cli.evaluate", "play policies against each other: wins in every seating, and an Elo table"),
    "sweep": ("tiltyard.cli.sweep", "many runs from one plan: start, status, watch, best, plot, retry, extend, stop"),
    "bench": ("tiltyard.cli.bench", "how fast an env goes with nobody learning, in 1 to k processes"),
    "tune": ("tiltyard.cli.bench", "find the processes and sizes that train fastest on this machine"),
    "ls": ("tiltyard.cli.runs", "list runs"),
    "show": ("tiltyard.cli.runs", "what a run did and how it stands"),
    "logs": ("tiltyard.cli.runs", "print a run's log, or follow it"),
    "stop": ("tiltyard.cli.runs", "ask a running run to save and stop"),
    "rm": ("tiltyard.cli.runs", "delete runs"),
    "diff": ("tiltyard.cli.runs", "settings in which two runs or files differ"),
    "config": ("tiltyard.cli.config", "show a resolved experiment, its JSON schema, the settings reference"),
    "shell": ("tiltyard.cli.nodes", "a terminal on a node: beside a run's job, or as a profile asks for one"),
    "top": ("tiltyard.cli.nodes", "processes, threads, memory and GPUs of a run that is running"),
    "doctor": ("tiltyard.cli.doctor", "check this machine, or a profile's nodes, and say what is missing"),
    "version": ("tiltyard.cli.doctor", "print the version"),
}

GROUPS = (
    ("learn", ("train", "resume", "fork", "eval", "match", "sweep")),
    ("go faster", ("bench", "tune")),
    ("look", ("ls", "show", "logs", "top", "diff")),
    ("keep house", ("stop", "rm", "config", "shell", "doctor", "version")),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `tiltyard` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        refuse_windows()
        with data_to(sys.stdout.buffer, sys.stdout.encoding, sys.stdout.isatty()) as data, redirect_stdout(data):
            code = dispatch(words)
    except TiltyardError as error:
        report(error)
        code = error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        code = EXIT_DONE  # the reader of our stdout left (`tiltyard ls | head`): not an error
    except Exception as error:
        if os.environ.get("TILTYARD_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        report(
            TiltyardError(f"this is a defect of Tiltyard: {what}", "TILTYARD_TRACEBACK=1 shows where; please report it")
        )
        code = EXIT_FAILED
    sys.exit(code)


class Data(io.TextIOWrapper):
    """stdout: letters that it cannot encode go out as numbers, and what cannot be written is told as that."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._lost(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> Exception:
        # Nothing more goes there: the exit flushes once more, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if isinstance(error, BrokenPipeError):
            return BrokenPipeError(*error.args)
        hint = "write the output to a place with room for it"
        return TiltyardError(f"stdout cannot be written: {error.strerror}", hint)


@contextmanager
def data_to(buffer: BinaryIO, encoding: str, line_buffering: bool = False) -> Iterator[Data]:
    """What is written inside has gone out at the end; the buffer stays open."""
    data = Data(buffer, encoding, "backslashreplace", line_buffering=line_buffering)
    try:
        yield data
    finally:
        data.detach()


def dispatch(words: list[str]) -> int:
    """Run one verb; returns the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return EXIT_DONE if words else EXIT_WRONG_USE
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"{__version__}\n")
        return EXIT_DONE
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        sys.stderr.write(f"error: there is no command {verb!r}\nhint: {did_you_mean(verb, VERBS)}\n")
        return EXIT_WRONG_USE
    module, summary = VERBS[verb]
    commands = importlib.import_module(module)
    parser = Words(prog=f"tiltyard {verb}", description=summary, allow_abbrev=False)
    getattr(commands, f"configure_{verb}")(parser)
    command: list[str] = []
    if parser.get_default("command") is not None and "--" in rest:  # what follows is a command, whatever it looks like
        rest, command = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    args = parser.parse_intermixed_args(rest)
    if command:
        args.command = command
    code = getattr(commands, f"run_{verb}")(args)
    return int(code)


class Words(argparse.ArgumentParser):
    """Wrong words on the command line are told like everything else; this is where argparse lets one say so."""

    def error(self, message: str) -> NoReturn:
        hint = f"{self.prog} --help lists what it takes"
        if message.startswith("the following arguments are required:"):
            needed = [
                action.metavar or action.dest for action in self._actions if action.required and action.nargs != "*"
            ]
            message = f"{self.prog} needs {' and '.join(str(name) for name in needed)}"
        elif message.startswith("unrecognized arguments: "):
            word = message.removeprefix("unrecognized arguments: ").split()[0]
            near = did_you_mean(word, [name for action in self._actions for name in action.option_strings])
            message = f"{self.prog} has no {word}" if word.startswith("-") else f"{self.prog} has no use for {word!r}"
            hint = near if near.startswith("did") else hint
        else:
            message = f"{self.prog}: {message.removeprefix('argument ')}"
        raise UseError(message, hint)


def overview() -> str:
    """The text of `tiltyard --help`."""
    lines = ["usage: tiltyard COMMAND ...", "", "Train reinforcement-learning agents, and never lose a run.", ""]
    for title, verbs in GROUPS:
        lines += [f"{title}:"] + [f"  {verb:<9}{VERBS[verb][1]}" for verb in verbs] + [""]
    lines += ["`tiltyard COMMAND --help` explains a command.", "start here: tiltyard train CartPole-v1", ""]
    return "\n".join(lines)


def report(error: TiltyardError) -> None:
    """One sentence, what belongs to it, and a hint, on stderr."""
    lines = [f"error: {error.message}"]
    if error.details:
        lines += [error.details] if isinstance(error, ConfigError) else ["", error.details.rstrip(), ""]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")


__all__ = ["EXIT_FAILED", "data_to", "dispatch", "main", "overview", "report"]
