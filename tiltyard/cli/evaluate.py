"""`eval`: measure the policy of a run or checkpoint, and keep what was asked for: numbers, a video, rollout files."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from tiltyard.cli.train import data_stdout, parse_at
from tiltyard.errors import EXIT_DONE, UseError

if TYPE_CHECKING:
    from tiltyard.types import Evaluation


MOST = 1_000_000  # episodes, and env steps within which they are begun: as many as eval.episodes may be
WORKERS_PER_CORE = 4


def positive(text: str) -> int:
    """A count on the command line: 20, 1e6, 1_000_000."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        number = 0.0
    if not (1 <= number <= MOST and number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST:,}")
    return int(number)


def configure_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run (id, folder, `last`) or folder of a checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings, e.g. env.time_limit=200")
    parser.add_argument("--episodes", type=positive, help="whole episodes to play (default: eval.episodes)")
    parser.add_argument("--steps", type=positive, help="env steps within which episodes are begun")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--at", metavar="STEP", help="the checkpoint at this env step")
    parser.add_argument("--workers", type=positive, default=1, help="processes to share the episodes")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="take the likeliest action (default: as eval.greedy says)")
    how.add_argument("--sample", action="store_true", help="draw actions as in training")
    how.add_argument("--random", action="store_true", help="a baseline: random actions instead of the policy's")
    how.add_argument("--policy", metavar="FILE.py:NAME", help="a policy of yours in the same episodes")
    parser.add_argument("--video", action="store_true", help="film the first episode")
    parser.add_argument("--save-rollouts", metavar="DIR", help="keep every episode as a Parquet file")
    parser.add_argument("--save-info", action="store_true", help="keep the env's info with the rollouts")
    parser.add_argument("--out", metavar="DIR", help="folder for CSV, JSON and video (default: the run's own)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.add_argument("--trust-code", action="store_true", help="run plug-in code from another user's run folder")


def run_eval(args: argparse.Namespace) -> int:
    if args.best and args.at:
        raise UseError("--best and --at both choose a checkpoint", "give one of them")
    if args.save_info and not args.save_rollouts:
        raise UseError("--save-info needs rollout files to put it in", "add --save-rollouts DIR")
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with data_stdout() as data:
            return _evaluate(args, data)
    except Terminated:
        return 128 + signal.SIGTERM  # as a shell tells it
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM ends an evaluation as ^C does: workers end, and no half film or episode is left."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _evaluate(args: argparse.Namespace, data: TextIO) -> int:
    from tiltyard.evaluation.evaluate import FilmError, choose_checkpoint, evaluate
    from tiltyard.evaluation.statistics import as_json, write_files
    from tiltyard.run.folder import run_of
    from tiltyard.run.redact import mask_command

    chosen = choose_checkpoint(args.run, "best" if args.best else parse_at(args.at))
    run = run_of(chosen.folder)
    named = [mode for mode in ("random", "policy", "sample", "greedy") if getattr(args, mode)]
    mode = named[0] if named else "eval"
    stem = f"{chosen.env_steps:012d}-{mode}"
    out = Path(args.out) if args.out else None
    numbers, film = (out or run.folder / "eval") / stem, (out or run.folder / "videos") / f"{stem}.mp4"
    _must_be_writable(numbers.parent)
    unfilmed: FilmError | None = None
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
    except FilmError as error:  # told after the numbers, which took longer
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
    """The result as a person reads it."""
    interval = f" [{result.low:.6g}, {result.high:.6g}]" if math.isfinite(result.low) else " (one episode: no interval)"
    actions = {
        "random": "random actions",
        "policy": "a policy written by hand",
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
    """Each worker is a process with a torch of its own: more than the cores can feed are not started."""
    cores = len(os.sched_getaffinity(0))
    most = cores * WORKERS_PER_CORE
    if asked > most:
        sys.stderr.write(f"--workers {asked:,} is more than {cores} cores can feed: {most} are started\n")
    return min(asked, most)


def _must_be_writable(folder: Path) -> None:
    """Found out before the episodes are played, not after, and without making the folder: they may be refused yet."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        probe = there / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UseError(f"{folder} cannot be written: {error.strerror}", "give another folder with --out DIR") from error
