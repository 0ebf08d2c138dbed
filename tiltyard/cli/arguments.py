"""Values of command-line options: counts, seconds, seeds, checkpoints."""

from __future__ import annotations

import argparse
import math
import re

from tiltyard.errors import UseError

MOST = 1_000_000  # episodes, and env steps within which they begin: as many as eval.episodes may be
MOST_SECONDS = 86_400
MOST_SEEDS = 1000


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
            raise UseError(
                f"--seeds {text!r} must be 1 to {MOST_SEEDS} seeds, ranges in ascending order", "write --seeds 0-4"
            )
        seeds += range(first, last + 1)
    if len(set(seeds)) != len(seeds):
        raise UseError(f"--seeds {text!r} names a seed twice", "each seed is one run")
    return seeds


def parse_at(text: str | None) -> int | str | None:
    """Parse a checkpoint: its env steps (1_000_000, 1e6) or `best`."""
    if text is None or text == "best":
        return text
    try:
        number = float(text.replace("_", "").replace(",", ""))
    except ValueError:
        number = -1.0
    if not (0 <= number < 1e18 and number.is_integer()):
        raise UseError(
            f"--at {text!r} must be a number of env steps or `best`", "`tiltyard show RUN` lists checkpoints"
        )
    return int(number)
