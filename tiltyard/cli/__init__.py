"""The command line: a table of commands, each in a small file that is imported when the command is typed.

stdout is data, stderr is everything else. Every failure is one sentence and a hint; exit codes are in tiltyard.errors.
This module imports nothing heavy, so `tiltyard --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import NoReturn

from tiltyard import __version__
from tiltyard.cli.output import data_to
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
    "train": ("tiltyard.cli.train", "train an experiment: a YAML file or an env id, with key=value settings"),
    "resume": ("tiltyard.cli.train", "continue a run, or train a finished one longer"),
    "fork": ("tiltyard.cli.train", "start a new run from a checkpoint, with changed settings"),
    "eval": ("tiltyard.cli.evaluate", "evaluate a policy: mean return and interval, video, rollout files"),
    "match": ("tiltyard.cli.evaluate", "play policies against each other: wins for every seating, and an Elo table"),
    "sweep": ("tiltyard.cli.sweep", "many runs from one plan: start, status, watch, best, plot, retry, extend, stop"),
    "bench": ("tiltyard.cli.bench", "measure how fast an env steps without learning, in 1 to k processes"),
    "tune": ("tiltyard.cli.bench", "find the processes and batch sizes that train fastest on this machine"),
    "ls": ("tiltyard.cli.runs", "list runs"),
    "show": ("tiltyard.cli.runs", "show a run: state, progress, results, checkpoints"),
    "logs": ("tiltyard.cli.runs", "print a run's log, or follow it"),
    "stop": ("tiltyard.cli.runs", "ask a running run to save and stop"),
    "rm": ("tiltyard.cli.runs", "delete runs"),
    "diff": ("tiltyard.cli.runs", "list the settings in which two runs or files differ"),
    "config": ("tiltyard.cli.config", "print a resolved experiment, the JSON schema or the settings reference"),
    "shell": ("tiltyard.cli.nodes", "open a terminal on a node: of a run's job, or a new one by a profile"),
    "top": ("tiltyard.cli.nodes", "show processes, threads, memory and GPUs of a running run"),
    "doctor": ("tiltyard.cli.doctor", "check this machine, or a profile's nodes, and report what is missing"),
    "version": ("tiltyard.cli.doctor", "print the version"),
}

GROUPS = (
    ("train and evaluate", ("train", "resume", "fork", "eval", "match", "sweep")),
    ("measure speed", ("bench", "tune")),
    ("inspect runs", ("ls", "show", "logs", "top", "diff")),
    ("manage", ("stop", "rm", "config", "shell", "doctor", "version")),
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
        code = EXIT_DONE  # the reader of stdout exited (`tiltyard ls | head`): not an error
    except Exception as error:
        if os.environ.get("TILTYARD_TRACEBACK"):
            raise
        hint = "please report it, with the traceback that TILTYARD_TRACEBACK=1 shows"
        report(TiltyardError(f"internal error: {type(error).__name__}: {error}", hint))
        code = EXIT_FAILED
    sys.exit(code)


def dispatch(words: list[str]) -> int:
    """Run one command; returns the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return EXIT_DONE if words else EXIT_WRONG_USE
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"{__version__}\n")
        return EXIT_DONE
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        sys.stderr.write(f"error: unknown command {verb!r}\nhint: {did_you_mean(verb, VERBS)}\n")
        return EXIT_WRONG_USE
    module, summary = VERBS[verb]
    commands = importlib.import_module(module)
    parser = Parser(prog=f"tiltyard {verb}", description=summary, allow_abbrev=False)
    getattr(commands, f"configure_{verb}")(parser)
    command: list[str] = []
    if parser.get_default("command") is not None and "--" in rest:  # everything after it is a command
        rest, command = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    args = parser.parse_intermixed_args(rest)
    if command:
        args.command = command
    code = getattr(commands, f"run_{verb}")(args)
    return int(code)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others of Tiltyard."""

    def error(self, message: str) -> NoReturn:
        hint = f"see: {self.prog} --help"
        if message.startswith("the following arguments are required:"):
            needed = [
                action.metavar or action.dest for action in self._actions if action.required and action.nargs != "*"
            ]
            message = f"{self.prog} needs {' and '.join(str(name) for name in needed)}"
        elif message.startswith("unrecognized arguments: "):
            word = message.removeprefix("unrecognized arguments: ").split()[0]
            near = did_you_mean(word, [name for action in self._actions for name in action.option_strings])
            message = f"unknown option {word} of {self.prog}"
            if not word.startswith("-"):
                message = f"unexpected argument {word!r} of {self.prog}"
            hint = near if near.startswith("did") else hint
        else:
            message = f"{self.prog}: {message.removeprefix('argument ')}"
        raise UseError(message, hint)


def overview() -> str:
    """The text of `tiltyard --help`."""
    lines = ["usage: tiltyard COMMAND ...", "", "Train reinforcement-learning agents, and never lose a run.", ""]
    for title, verbs in GROUPS:
        lines += [f"{title}:"] + [f"  {verb:<9}{VERBS[verb][1]}" for verb in verbs] + [""]
    lines += ["Help for a command: tiltyard COMMAND --help", "Start here: tiltyard train CartPole-v1", ""]
    return "\n".join(lines)


def report(error: TiltyardError) -> None:
    """Print an error on stderr: one sentence, details, a hint."""
    lines = [f"error: {error.message}"]
    if error.details:
        lines += [error.details] if isinstance(error, ConfigError) else ["", error.details.rstrip(), ""]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")


__all__ = ["EXIT_FAILED", "dispatch", "main", "overview", "report"]
