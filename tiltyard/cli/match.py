"""`match`: play policies against each other, and say who is stronger."""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from tiltyard.cli import formatting
from tiltyard.cli.evaluate import positive
from tiltyard.cli.train import data_stdout
from tiltyard.errors import EXIT_DONE

if TYPE_CHECKING:
    from tiltyard.evaluation.tournament import Table


def configure_match(parser: argparse.ArgumentParser) -> None:
    what = "a run (RUN, RUN@STEP, RUN@best) or a checkpoint's folder; with :NAME another than its first policy"
    parser.add_argument("policies", nargs="+", metavar="POLICY", help=what)
    parser.add_argument("--episodes", type=positive, default=100, help="episodes of each pair in each seating (100)")
    parser.add_argument("--seed", type=int, help="root of the episodes' seeds (default: eval.seed of the first)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="take the likeliest action (default: as eval.greedy says)")
    how.add_argument("--sample", action="store_true", help="draw actions as in training")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON on stdout")
    form.add_argument("--csv", action="store_true", help="print a line for each pair and seating")
    parser.add_argument("--trust-code", action="store_true", help="run plug-in code from another user's run folder")


def run_match(args: argparse.Namespace) -> int:
    from tiltyard.evaluation.tournament import match

    with data_stdout() as data:
        found = match(
            args.policies,
            episodes=args.episodes,
            seed=args.seed,
            greedy=True if args.greedy else False if args.sample else None,
            trust_code=args.trust_code,
        )
        if args.json:
            data.write(json.dumps(asdict(found)) + "\n")
        elif args.csv:
            write_csv(found, data)
        else:
            data.write(summary(found))
    return EXIT_DONE


def write_csv(found: Table, data: TextIO) -> None:
    """A line for each pair and seating."""
    agents = list(found.bouts[0].seats)
    writer = csv.writer(data, lineterminator="\n")
    writer.writerow(["one", "other", "wins", "draws", "losses", "return_one", "return_other", *agents])
    for bout in found.bouts:
        counts = (bout.wins, bout.draws, bout.losses)
        writer.writerow([bout.one, bout.other, *counts, *bout.returns, *(bout.seats.get(agent) for agent in agents)])


def summary(found: Table) -> str:
    """Who won how often in which seats, and the ratings."""
    how = "greedy" if found.greedy else "sampled"
    agents = list(found.bouts[0].seats)
    bouts = [
        [
            formatting.clean(bout.one),
            formatting.clean(bout.other),
            *(f"{count:,}" for count in (bout.wins, bout.draws, bout.losses)),
            *(formatting.number(bout.seats.get(agent)) for agent in agents),
        ]
        for bout in found.bouts
    ]
    ranks = [
        [
            formatting.clean(each.policy),
            f"{each.elo:.0f}",
            f"{each.low:.0f} to {each.high:.0f}",
            *(f"{count:,}" for count in (each.wins, each.draws, each.losses)),
        ]
        for each in found.ratings
    ]
    head = f"{found.env}, {found.episodes:,} episodes of each pair in each seating, {how}, seed {found.seed}\n\n"
    seats = ("first seat", "second seat", "wins", "draws", "losses", *(f"return {agent}" for agent in agents))
    right = range(2, len(seats))
    return (
        head
        + formatting.table(seats, bouts, right=right)
        + "\n"
        + formatting.table(("policy", "elo", "95 %", "wins", "draws", "losses"), ranks, right=(1, 3, 4, 5))
    )
