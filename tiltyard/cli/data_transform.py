"""`data split`, `merge` and `filter`: new datasets from old ones, as copies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add
from tiltyard.cli.data_views import progress_lines
from tiltyard.cli.output import write_result
from tiltyard.cli.stopping import stoppable

if TYPE_CHECKING:
    from tiltyard.data.transform import Command, Result


def fraction(text: str) -> float:
    """Parse a part of a whole: 0.1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number between 0 and 1, such as 0.1")
    return number


# ------------------------------------------------------------------------------------------------ split


def configure_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a dataset, which is not changed")
    parser.add_argument(
        "--validation", type=fraction, default=0.1, metavar="X", help="fraction for validation, on average (0.1)"
    )
    default = "where to (default: FOLDER-train and FOLDER-validation)"
    parser.add_argument("--out", nargs=2, type=Path, metavar=("TRAIN", "VALIDATION"), help=default)
    add(parser, "--json")


def run_split(args: argparse.Namespace) -> None:
    from tiltyard.data.transform import split_dataset

    name = args.folder.resolve().name if args.folder.name in ("", "..") else args.folder.name
    beside = args.folder.resolve().parent if args.folder.name in ("", "..") else args.folder.parent
    train, validation = args.out or (beside / f"{name}-train", beside / f"{name}-validation")
    with stoppable(at_once=False) as check:
        results = split_dataset(args.folder, args.validation, (train, validation), _command(check))
    for result in results:
        if not result.episodes:
            sys.stderr.write(f"warning: {result.folder} has no episodes: {args.folder} is too small for this split\n")
    _write(results, as_json=args.json)


# ------------------------------------------------------------------------------------------------ merge


def configure_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="one or more datasets, of the same env")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the new dataset")
    add(parser, "--json")


def run_merge(args: argparse.Namespace) -> None:
    from tiltyard.data.transform import merge_datasets

    with stoppable(at_once=False) as check:
        result = merge_datasets(args.folders, args.out, _command(check))
    if result.repeated:
        left_out = formatting.plural(result.repeated, "episode")
        sys.stderr.write(f"left out {left_out} that an earlier one of the datasets has, too\n")
    _write([result], as_json=args.json)


# ------------------------------------------------------------------------------------------------ filter


def configure_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a dataset, which is not changed")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the new dataset")
    what = "return, length, seed, episode, policy, agent, terminated or truncated: 'return>=100', 'seed=0..99', "
    what += "'policy=random*', '!terminated'; repeat it for more conditions, all of which must be met"
    parser.add_argument("--where", action="append", required=True, metavar="CONDITION", help=what)
    add(parser, "--json")


def run_filter(args: argparse.Namespace) -> None:
    from tiltyard.data.conditions import parse
    from tiltyard.data.transform import filter_dataset

    conditions = [parse(text) for text in args.where]
    with stoppable(at_once=False) as check:
        result = filter_dataset(args.folder, args.out, conditions, _command(check))
    _write([result], as_json=args.json)


# ------------------------------------------------------------------------------------------------ all of them


def _command(check: Callable[[], None]) -> Command:
    """What was typed, and a report of progress that calls `check` between two episodes."""
    from tiltyard.data.transform import Command

    shown: dict[Path, Callable[[int, int], None]] = {}

    def progress(out: Path, done: int, total: int) -> None:
        check()
        shown.setdefault(out, progress_lines(f"copying to {out}"))(done, total)

    return Command([Path(sys.argv[0]).name, *sys.argv[1:]], progress)


def _write(results: Sequence[Result], *, as_json: bool) -> None:
    rows = [
        [str(result.folder), f"{result.episodes:,}", f"{result.steps:,}", f"{result.added:,}"] for result in results
    ]
    text = formatting.table(("dataset", "episodes", "steps", "added now"), rows, (1, 2, 3))
    write_result([asdict(result) for result in results], text, as_json=as_json)
    sys.stderr.write(f"next: tiltyard data stats {results[0].folder}\n")
