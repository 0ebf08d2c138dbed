"""`eval` and `match`: evaluate a policy (numbers, video, rollout files), or play policies against each other."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, add_json_or_csv, parse_at, positive
from tiltyard.cli.output import data_stdout
from tiltyard.errors import EXIT_DONE, UseError
from tiltyard.processes.resources import usable_cores

if TYPE_CHECKING:
    from tiltyard.evaluation.statistics import Evaluation
    from tiltyard.evaluation.tournament import Table

WORKERS_PER_CORE = 4


def _add_greedy(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="take the most likely action (default: eval.greedy)")
    how.add_argument("--sample", action="store_true", help="sample actions as in training")
    return how


def configure_eval(parser: argparse.ArgumentParser) -> None:
    add(parser, "run", help="a run: its id, folder, name or `last`; or the folder of a checkpoint")
    add(parser, "overrides")
    parser.add_argument("--episodes", type=positive, help="number of episodes (default: eval.episodes)")
    parser.add_argument("--steps", type=positive, help="no new episode begins after this many env steps")
    parser.add_argument("--best", action="store_true", help="evaluate the best checkpoint instead of the newest")
    parser.add_argument("--at", type=parse_at, metavar="STEP", help="evaluate the checkpoint at this env step")
    parser.add_argument("--workers", type=positive, default=1, help="processes that share the episodes (default: 1)")
    how = _add_greedy(parser)
    how.add_argument("--random", action="store_true", help="a baseline: random actions instead of the policy's")
    how.add_argument("--policy", metavar="FILE.py:NAME", help="your own policy, in the same episodes")
    parser.add_argument("--video", action="store_true", help="record a video of the first episode")
    parser.add_argument("--save-rollouts", metavar="DIR", help="save every episode as a Parquet file")
    parser.add_argument("--save-info", action="store_true", help="save the env's info with the rollouts")
    parser.add_argument("--out", metavar="DIR", help="folder for CSV, JSON and video (default: the run's folder)")
    add(parser, "--json", "--trust-code")


def run_eval(args: argparse.Namespace) -> int:
    if args.best and args.at is not None:
        raise UseError("--best and --at both select a checkpoint", "use one of them")
    if args.save_info and not args.save_rollouts:
        raise UseError("--save-info needs --save-rollouts", "add --save-rollouts DIR")
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with data_stdout() as data:
            return _evaluate(args, data)
    except Terminated:
        return 128 + signal.SIGTERM  # as in a shell
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM ends an evaluation as ^C does: workers end, and no partial video or episode file is left."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _evaluate(args: argparse.Namespace, data: TextIO) -> int:
    from tiltyard.evaluation.evaluate import VideoError, choose_checkpoint, evaluate
    from tiltyard.evaluation.statistics import as_json, write_files
    from tiltyard.run.folder import run_of
    from tiltyard.run.redact import mask_command

    chosen = choose_checkpoint(args.run, "best" if args.best else args.at)
    run = run_of(chosen.folder)
    sys.stderr.write("".join(f"{complaint}\n" for complaint in run.damage()))
    named = [mode for mode in ("random", "policy", "sample", "greedy") if getattr(args, mode)]
    mode = named[0] if named else "eval"
    stem = f"{chosen.env_steps:012d}-{mode}"
    out = Path(args.out) if args.out else None
    numbers, film = (out or run.folder / "eval") / stem, (out or run.folder / "videos") / f"{stem}.mp4"
    _must_be_writable(numbers.parent)
    unfilmed: VideoError | None = None
    try:
        result = evaluate(
            chosen.folder,
            args.overrides,
            episodes=args.episodes,
            steps=args.steps,
            greedy=True if args.greedy else False if args.sample else None,
            policy="random" if args.random else args.policy,
            workers=_workers(args.workers),
            video=film if args.video else None,
            rollouts=Path(args.save_rollouts) if args.save_rollouts else None,
            save_info=args.save_info,
            trust_code=args.trust_code,
        )
    except VideoError as error:  # reported after the numbers, which took longer
        result, unfilmed = error.result, error
    facts = {"run": run.id, "checkpoint": str(chosen.folder), "env_steps": chosen.env_steps, "mode": mode}
    facts |= {"overrides": mask_command(args.overrides)}
    table, whole = write_files(result, facts, numbers)
    files = {"csv": str(table), "json": str(whole)}
    if args.video and unfilmed is None:
        files["video"] = str(film)
    if args.save_rollouts:
        files["rollouts"] = args.save_rollouts
    if args.json:
        data.write(json.dumps({**facts, **as_json(result), "files": files}) + "\n")
    else:
        data.write(summary(f"{run.id} at env step {chosen.env_steps:,}", mode, result, files))
    if unfilmed is not None:
        data.flush()
        raise unfilmed
    return EXIT_DONE


def summary(what: str, mode: str, result: Evaluation, files: dict[str, str]) -> str:
    """The result as text."""
    interval = f" [{result.low:.6g}, {result.high:.6g}]" if math.isfinite(result.low) else " (one episode: no interval)"
    actions = {
        "random": "random actions",
        "policy": "your own policy",
        "eval": "greedy" if result.greedy else "sampled",
    }.get(mode, mode)
    lines = [
        what,
        f"return    {result.mean:.6g}{interval}  mean and 95 % interval of {len(result.returns)} episodes, {actions}",
        f"range     {min(result.returns):.6g} to {max(result.returns):.6g}",
        f"length    {result.mean_length:.6g}",
        *(f"{name:<9} {value:.6g}" for name, value in result.metrics.items()),
        *(f"{kind:<9} {os.path.relpath(path)}" for kind, path in files.items()),
    ]
    return "\n".join(lines) + "\n"


def _workers(asked: int) -> int:
    """The number of workers to start: each is a process that imports torch, so it is limited by the cores."""
    cores = usable_cores()
    most = cores * WORKERS_PER_CORE
    if asked > most:
        sys.stderr.write(f"--workers {asked:,} is too many for {cores} cores; starting {most}\n")
    return min(asked, most)


def _must_be_writable(folder: Path) -> None:
    """Check before any episode is played, without making the folder: the evaluation may still be refused."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        probe = there / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        hint = "choose another folder with --out DIR"
        raise UseError(f"{folder} cannot be written: {error.strerror}", hint) from error


def configure_match(parser: argparse.ArgumentParser) -> None:
    what = "a run (RUN, RUN@STEP, RUN@best) or the folder of a checkpoint; add :NAME for another policy than the first"
    parser.add_argument("policies", nargs="+", metavar="POLICY", help=what)
    about = "episodes of each pair in each seating (default: 100)"
    parser.add_argument("--episodes", type=positive, default=100, help=about)
    parser.add_argument("--seed", type=int, help="seed of the episodes (default: eval.seed of the first policy)")
    _add_greedy(parser)
    add_json_or_csv(parser, "pair and seating")
    add(parser, "--trust-code")


def run_match(args: argparse.Namespace) -> None:
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
            data.write(match_summary(found))


def write_csv(found: Table, data: TextIO) -> None:
    """Write a line for each pair and seating."""
    agents = list(found.bouts[0].seats)
    writer = csv.writer(data, lineterminator="\n")
    writer.writerow(["one", "other", "wins", "draws", "losses", "return_one", "return_other", *agents])
    for bout in found.bouts:
        counts = (bout.wins, bout.draws, bout.losses)
        writer.writerow([bout.one, bout.other, *counts, *bout.returns, *(bout.seats.get(agent) for agent in agents)])


def match_summary(found: Table) -> str:
    """The result as text: wins in each seating, and the ratings."""
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
    ratings = formatting.table(("policy", "elo", "95 %", "wins", "draws", "losses"), ranks, right=(1, 3, 4, 5))
    return f"{head}{formatting.table(seats, bouts, right=right)}\n{ratings}"
