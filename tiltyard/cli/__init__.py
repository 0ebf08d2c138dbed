"""The command line: a table of commands, each in a small file that is imported when the command is typed.

stdout is data, stderr is everything else. Every failure is one sentence and a hint; exit codes are in tiltyard.errors.
This module imports nothing heavy, so `tiltyard --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import NoReturn, TextIO

from tiltyard import __version__
from tiltyard.cli.formatting import printable
from tiltyard.cli.output import data_to
from tiltyard.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_USE,
    ConfigError,
    TiltyardError,
    TiltyardWarning,
    UseError,
    did_you_mean,
)
from tiltyard.failures import exit_code
from tiltyard.processes.platforms import refuse_windows

HELP = ("-h", "--help", "help")

# command -> (module below tiltyard.cli with configure_X and run_X, where X is the last word; one-line summary)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train", "train an experiment: a YAML file or an env id, with key=value settings"),
    "resume": ("train", "continue a run, or train a finished one longer"),
    "fork": ("train", "start a new run from a checkpoint, with changed settings"),
    "eval": ("evaluate", "evaluate a policy: mean return and interval, video, rollout files"),
    "match": ("evaluate", "play policies against each other: wins for every seating, and an Elo table"),
    "sweep start": ("sweep", "check every trial of a plan, then run the sweep; or continue a sweep"),
    "sweep status": ("sweep_results", "print the state and results of a sweep"),
    "sweep watch": ("sweep_results", "print the status whenever it changes, until nothing runs"),
    "sweep best": ("sweep_results", "print the best settings and the best run with them"),
    "sweep plot": ("sweep_results", "draw plots of the results"),
    "sweep retry": ("sweep", "start failed trials again"),
    "sweep extend": ("sweep", "add combinations or seeds"),
    "sweep stop": ("sweep", "ask all trials to save and stop, and wait until they have"),
    "sweep lineage": ("population", "print which member of a population was copied from which"),
    "sweep replay": ("population", "train one run with the settings schedule of one member of a population"),
    "env list": ("env", "list envs by family: those that are installed, and those that an extra would add"),
    "env check": ("env", "check an env: interface, seeding, leaks, speed, memory; exits with 1 if something is wrong"),
    "env play": ("env", "play one episode with random actions or a run's policy, and film or show it"),
    "data collect": ("data_collect", "record episodes of an env or a run into a dataset, by many processes at once"),
    "data verify": ("data_files", "check every file of a dataset, or TFRecord files; exits with 1 if one is damaged"),
    "data repair": ("data_files", "put damaged files into quarantine and list all sound episodes again"),
    "data pack": ("data_files", "pack the files of a dataset into shards of a given size"),
    "data stats": ("data_views", "print episodes, steps, returns, actions, observations, size"),
    "data head": ("data_views", "print the first steps of an episode"),
    "data ls": ("data_views", "list datasets and how they were made"),
    "data split": ("data_transform", "divide a dataset into a training and a validation set, by seed"),
    "data merge": ("data_transform", "join datasets of the same env"),
    "data filter": ("data_transform", "copy the episodes that meet conditions on return, length, seed or policy"),
    "data export": ("data_convert", "write a dataset as TFRecord, Minari, npz, WebDataset or GIF"),
    "data import": ("data_convert", "read Minari, TFRecord, npz or pickled rollouts into a dataset"),
    "clone": ("clone", "learn a policy from a dataset by behaviour cloning, without an env"),
    "bench": ("bench", "measure how fast an env steps without learning, in 1 to k processes"),
    "tune": ("bench", "find the processes and batch sizes that train fastest on this machine"),
    "ls": ("runs", "list runs"),
    "show": ("show", "show a run: state, progress, results, checkpoints"),
    "logs": ("runs", "print a run's log, or follow it"),
    "stop": ("runs", "ask a running run to save and stop"),
    "rm": ("runs", "delete runs"),
    "diff": ("runs", "list the settings in which two runs or files differ"),
    "config show": ("config", "print the settings in effect; reads files, imports no plug-in"),
    "config schema": ("config", "print a JSON schema for editors"),
    "config reference": ("config", "print every setting, as Markdown"),
    "shell": ("nodes", "open a terminal on a node: of a run's job, or a new one by a profile"),
    "top": ("nodes", "show processes, threads, memory and GPUs of a running run"),
    "doctor": ("doctor", "check this machine, or a profile's nodes, and report what is missing"),
    "completion": ("completion", "print a script that completes commands, options and settings in your shell"),
    "version": ("doctor", "print the version"),
}
WITH_ACTIONS = {
    "sweep": "many runs from one plan: start, status, watch, best, plot, retry, extend, stop",
    "env": "look at envs: list, check, play",
    "data": "datasets of recorded episodes: collect, verify, pack, stats, split, export and more",
    "config": "print a resolved experiment, the JSON schema or the settings reference",
}

GROUPS = (
    ("train and evaluate", ("train", "resume", "fork", "eval", "match", "sweep")),
    ("record and learn from data", ("data", "clone")),
    ("look at envs, measure speed", ("env", "bench", "tune")),
    ("inspect runs", ("ls", "show", "logs", "top", "diff")),
    ("manage", ("stop", "rm", "config", "shell", "doctor", "completion", "version")),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `tiltyard` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        refuse_windows()
        with (
            data_to(sys.stdout.buffer, sys.stdout.encoding, sys.stdout.isatty()) as data,
            data_to(sys.stderr.buffer, sys.stderr.encoding, True) as messages,
            redirect_stdout(data),
            redirect_stderr(messages),
            warnings.catch_warnings(),
        ):
            warnings.showwarning = show_warning
            code = dispatch(words)
    except TiltyardError as error:
        report(error)
        code = exit_code(error)
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
    if not words or words[0] in HELP:
        sys.stdout.write(overview())
        return EXIT_DONE if words else EXIT_WRONG_USE
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"{__version__}\n")
        return EXIT_DONE
    command, rest = words[0], words[1:]
    if actions := actions_of(command):
        if not rest or rest[0] in HELP:
            sys.stdout.write(actions_overview(command))
            return EXIT_DONE if rest else EXIT_WRONG_USE
        if rest[0] not in actions:
            raise UseError(f"unknown action {rest[0]!r} of `tiltyard {command}`", did_you_mean(rest[0], actions))
        command, rest = f"{command} {rest[0]}", rest[1:]
    elif command not in COMMANDS:
        raise UseError(f"unknown command {command!r}", did_you_mean(command, [name.split()[0] for name in COMMANDS]))
    parser, run = load_command(command)
    program: list[str] = []
    if parser.get_default("command") is not None and "--" in rest:  # everything after it is a command
        rest, program = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    parser.given = bool(rest)
    args = parser.parse_intermixed_args(rest)
    if program:
        args.command = program
    return run(args) or EXIT_DONE


def actions_of(command: str) -> list[str]:
    """The actions of `sweep` or `config`; none of other commands."""
    return [name.split()[1] for name in COMMANDS if name.startswith(f"{command} ")]


def load_command(name: str) -> tuple[Parser, Callable[[argparse.Namespace], int | None]]:
    """The parser of a command, and the function that runs it and returns an exit code, or None if it is done."""
    module, summary = COMMANDS[name]
    commands, last = importlib.import_module(f"tiltyard.cli.{module}"), name.split()[-1]
    parser = Parser(prog=f"tiltyard {name}", description=summary, allow_abbrev=False)
    getattr(commands, f"configure_{last}")(parser)
    return parser, getattr(commands, f"run_{last}")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others of Tiltyard."""

    given = True  # whether anything was typed after the command

    def error(self, message: str) -> NoReturn:
        hint = f"see: {self.prog} --help"
        if message.startswith(required := "the following arguments are required: "):
            missing = message.removeprefix(required).split(", ")
            needed = [action for action in self._actions if action.required and action.nargs != "*"]
            names = ["/".join(action.option_strings) or str(action.metavar or action.dest) for action in needed]
            # argparse looks for the options first, so it names no others if one of these is missing.
            shown = [name for name in names if name in missing or not self.given]
            message = f"{self.prog} needs {' and '.join(shown)}"
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
        lines += [f"{title}:", *(f"  {verb:<12}{WITH_ACTIONS.get(verb) or COMMANDS[verb][1]}" for verb in verbs), ""]
    lines += ["Help for a command: tiltyard COMMAND --help", "Start here: tiltyard train CartPole-v1", ""]
    return "\n".join(lines)


def actions_overview(command: str) -> str:
    """The text of `tiltyard sweep --help`."""
    lines = [f"usage: tiltyard {command} ACTION ...", "", WITH_ACTIONS[command].partition(":")[0], ""]
    lines += [f"  {action:<12}{COMMANDS[f'{command} {action}'][1]}" for action in actions_of(command)]
    return "\n".join([*lines, "", f"Help for an action: tiltyard {command} ACTION --help", ""])


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print our own warnings as a sentence, those of libraries as Python does."""
    own = issubclass(category, TiltyardWarning)
    text = f"warning: {message}\n" if own else warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(printable(text))


def report(error: TiltyardError) -> None:
    """Print an error on stderr: one sentence, details, a hint."""
    lines = [f"error: {error.message}"]
    if error.details:
        lines += [error.details] if isinstance(error, ConfigError) else ["", error.details.rstrip(), ""]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    sys.stderr.write(printable("\n".join(lines) + "\n"))


__all__ = ["EXIT_FAILED", "dispatch", "main", "overview", "report"]
