"""`env list`, `check` and `play`: which envs there are, whether one keeps the contract, and what it looks like."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, positive
from tiltyard.cli.output import data_stdout, write_result
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, UseError

if TYPE_CHECKING:
    from tiltyard.envs.catalogue import Family

SHOWN = 6  # ids of a family, unless a pattern asks for more

# ------------------------------------------------------------------------------------------------ list


def configure_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="part of an id or family, or a pattern with *")
    add(parser, "--json")


def run_list(args: argparse.Namespace) -> None:
    from tiltyard.envs.catalogue import families

    found = [family.matching(args.pattern) for family in families()]
    found = [family for family in found if family.ids or (not family.installed and family.is_named(args.pattern))]
    if not found:
        raise UseError(f"no env matches {args.pattern!r}", "list all of them with: tiltyard env list")
    rows = [
        {"id": name, "family": family.name, "installed": family.installed, "extra": family.extra}
        for family in found
        for name in family.ids or (family.form,)
    ]
    write_result(rows, "\n".join(_family_text(family, args.pattern) for family in found), as_json=args.json)


def _family_text(family: Family, pattern: str | None) -> str:
    """A title, and all ids that match a pattern, or the first ones of a long list."""
    if not family.installed:
        return f"{family.title}: pip install 'tiltyard[{family.extra}]' adds {family.form}\n"
    shown = family.ids if pattern else family.ids[:SHOWN]
    more = len(family.ids) - len(shown)
    rest = [f"  ... and {more} more: tiltyard env list {family.name}"] if more else []
    return "\n".join([family.title, *(f"  {name}" for name in shown), *rest, ""])


# ------------------------------------------------------------------------------------------------ check


def configure_check(parser: argparse.ArgumentParser) -> None:
    add(parser, "target", "overrides")
    parser.add_argument("--resets", type=positive, default=1_000, metavar="N", help="resets to look for leaks (1,000)")
    add(parser, "--json")


def run_check(args: argparse.Namespace) -> int:
    from tiltyard.config.load import load
    from tiltyard.envs.inspection import inspect_env

    loaded = load(args.target, args.overrides)
    sys.stderr.write(f"checking {loaded.experiment.env.id}: {args.resets:,} resets and some hundred env steps\n")
    with data_stdout() as data:
        rows = inspect_env(loaded.experiment.env, loaded.base, args.resets)
        wrong = sum(row.result == "wrong" for row in rows)
        if args.json:
            from tiltyard.run import atomic

            whole = {"env": loaded.experiment.env.id, "ok": not wrong, "checks": [asdict(row) for row in rows]}
            data.write(atomic.to_json(whole, indent=2) + "\n")
        else:
            data.write(formatting.table(("check", "", "found"), [[row.check, row.result, row.text] for row in rows]))
    return EXIT_FAILED if wrong else EXIT_DONE


# ------------------------------------------------------------------------------------------------ play


def configure_play(parser: argparse.ArgumentParser) -> None:
    add(parser, "target", "overrides")
    parser.add_argument("--policy", metavar="RUN|random", default="random", help="who acts (default: random)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the episode (default: 0)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--video", type=Path, metavar="FILE", help="record it as an mp4")
    where.add_argument("--window", action="store_true", help="show it in a window")


def run_play(args: argparse.Namespace) -> None:
    from tiltyard.evaluation.play import play

    with data_stdout() as data:
        result = play(args.target, args.overrides, args.policy, args.seed, video=args.video, window=args.window)
        lines = {"return": f"{result.total:.6g}", "length": str(result.length)}
        lines |= {name: f"{value:.6g}" for name, value in result.metrics.items()}
        if args.video:
            lines["video"] = str(args.video)
        width = max(map(len, lines))
        data.writelines(f"{name:<{width}}  {value}\n" for name, value in lines.items())
