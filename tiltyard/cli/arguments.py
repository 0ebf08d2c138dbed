"""Arguments that several commands share, and values of options: counts, seconds, seeds, checkpoints."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

from tiltyard.config.site_file import runs_root
from tiltyard.errors import UseError
from tiltyard.run import atomic

MOST = 1_000_000  # episodes, and env steps within which they begin: as many as eval.episodes may be
MOST_SECONDS = 86_400
MOST_SEEDS = 1000


SHARED: dict[str, dict[str, Any]] = {
    "target": {"metavar": "FILE|ENV", "help": "experiment file (YAML) or env id"},
    "overrides": {"metavar": "key=value", "nargs": "*", "help": "changed settings, e.g. algo.lr=3e-4"},
    "run": {"metavar": "RUN", "help": "a run: its id, folder, name or unique end of it; `last` is the newest"},
    "sweep": {"metavar": "SWEEP", "nargs": "?", "default": "last", "help": "id, folder or name (default: the newest)"},
    "--on": {"metavar": "PROFILE", "help": "a profile of the site file to run with"},
    "--root": {
        "metavar": "FOLDER",
        "type": Path,
        "help": "runs folder (default: TILTYARD_RUNS, or as in the site file)",
    },
    "--json": {"action": "store_true", "help": "print JSON"},
    "--dry-run": {"action": "store_true", "help": "print what would be done, and do nothing"},
    "--detach": {"action": "store_true", "help": "run in the background"},
    "--yes": {"action": "store_true", "help": "allow more than 10,000 trials"},
    "--here": {"action": "store_true", "help": "run on this machine, even if the run's profile submits jobs"},
    "--trust-code": {
        "action": "store_true",
        "help": "trust another user's run or sweep: the code, addresses and profile that it names",
    },
}


def add(parser: argparse.ArgumentParser, *names: str, **changed: Any) -> None:
    """Add arguments that several commands share, in this order."""
    for name in names:
        parser.add_argument(name, **{**SHARED[name], **changed})


def add_json_or_csv(parser: argparse.ArgumentParser, line: str) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", **SHARED["--json"])
    form.add_argument("--csv", action="store_true", help=f"print CSV, one line per {line}")


def root_named(args: argparse.Namespace) -> Path:
    """The runs folder of --root, or the usual one."""
    return runs_root() if args.root is None else atomic.absolute(args.root)


def positive(text: str) -> int:
    """Parse a count: 20, 1e6, 1_000_000."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        number = 0.0
    if not (1 <= number <= MOST and number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {MOST:,}")
    return int(number)


def seconds(word: str) -> float:
    """Parse a time in seconds."""
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 < number <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{word!r} must be a number of seconds above 0, at most {MOST_SECONDS:,}")
    return number


def parse_seeds(text: str) -> list[int]:
    """Parse seeds: `0-4`, `1,5,9` or both."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if match is None:
            raise UseError(f"--seeds {text!r} is not a list of seeds", "write --seeds 0-4 or --seeds 1,5,9")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MOST_SEEDS or len(seeds) + last - first >= MOST_SEEDS:
            hint = "write --seeds 0-4"
            raise UseError(f"--seeds {text!r} must be 1 to {MOST_SEEDS} seeds, ranges in ascending order", hint)
        seeds += range(first, last + 1)
    if len(set(seeds)) != len(seeds):
        raise UseError(f"--seeds {text!r} names a seed twice", "each seed is one run")
    return seeds


def parse_at(text: str) -> int | str:
    """Parse a checkpoint: its env steps (1_000_000, 1e6) or `best`."""
    if text == "best":
        return text
    try:
        number = float(text.replace("_", "").replace(",", ""))
    except ValueError:
        number = -1.0
    if not (0 <= number < 1e18 and number.is_integer()):
        hint = "`tiltyard show RUN` lists checkpoints"
        raise UseError(f"--at {text!r} must be a number of env steps or `best`", hint)
    return int(number)
