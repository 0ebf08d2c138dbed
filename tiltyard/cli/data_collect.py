"""`data collect`: record episodes of an env or a run into a dataset, here or as an array of Slurm jobs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, positive
from tiltyard.cli.output import data_stdout
from tiltyard.errors import EXIT_DONE, UseError

if TYPE_CHECKING:
    from tiltyard.collection.collect import Collected
    from tiltyard.collection.request import Request
    from tiltyard.config.site import Profile

POLICIES = """\
policies:
  random                    uniform actions (default for an env)
  sticky:0.9                repeat the last action with this chance, else a random one
  ou:theta=0.15,sigma=0.3   Ornstein-Uhlenbeck noise, in units of half the range of an action
  brownian:0.1              a random walk with steps of this size
  RUN, RUN@best, RUN@STEP   the policy of a run (default for a run), as its eval.greedy says
  greedy:RUN, sampled:RUN   its most likely actions; actions sampled as in training
  epsilon:0.1:RUN           its most likely actions, but with this chance a random one
  FILE.py:NAME              your own: a function of the observation, or a class with act(obs)

When the target is a run, :RUN may be left out. Give --policy several times, with weights, for a mixture:
  --policy 0.7=random --policy 0.3=sticky:0.9
Each episode is played by one policy. It follows from the episode's seed, which one.

Several of these commands, on several machines, may fill one folder at the same time. --episodes is the number that the
folder has in the end: after a stop or a crash, the same command makes what is missing."""


def configure_collect(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = POLICIES
    parser.add_argument("target", metavar="ENV|RUN", help="an env id, an experiment file, or a run")
    add(parser, "overrides", help="changed settings, e.g. env.options.difficulty=3")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the dataset, new or to be completed")
    parser.add_argument("--episodes", type=positive, metavar="N", help="episodes in the folder at the end")
    parser.add_argument("--policy", action="append", default=[], metavar="POLICY", help="who acts, see below")
    parser.add_argument("--max-steps", type=positive, metavar="N", help="truncate episodes after N env steps")
    parser.add_argument("--workers", type=_workers, metavar="K", help="processes (default: one per core; 0: this one)")
    parser.add_argument("--seed", type=_seed, metavar="S", help="seed of a new dataset (default: a random one)")
    parser.add_argument("--save-info", action="store_true", help="save the env's info with every step")
    add(parser, "--on", help="a Slurm profile of the site file: submit an array of jobs that collect")
    parser.add_argument("--tasks", type=positive, metavar="K", help="tasks of the array (default: 1)")
    add(parser, "--json", "--trust-code")


def _workers(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to 2^63 - 1")
    return int(text)


def run_collect(args: argparse.Namespace) -> int:
    from tiltyard.cli.jobs import job_profile
    from tiltyard.collection.collect import collect
    from tiltyard.collection.request import Request

    for name, value in (("--out FOLDER", args.out), ("--episodes N", args.episodes)):
        if value is None:
            raise UseError(f"tiltyard data collect needs {name}", "see: tiltyard data collect --help")
    profile = job_profile(args.on)
    if args.on is not None and profile is None:
        raise UseError(f"profile {args.on} submits no jobs", "name a profile with launcher: slurm, or leave --on out")
    if args.tasks is not None and profile is None:
        raise UseError("--tasks needs --on PROFILE", "--workers sets the number of processes on this machine")
    request = Request(
        target=args.target,
        out=args.out,
        episodes=args.episodes,
        overrides=args.overrides,
        policies=args.policy,
        workers=args.workers,
        max_steps=args.max_steps,
        seed=args.seed,
        save_info=args.save_info,
        trust_code=args.trust_code,
        command=["tiltyard", *sys.argv[1:]],
    )
    with data_stdout() as data:
        if profile is not None:
            return _submit(request, profile, args.tasks or 1, args.json, data)
        found = collect(request)
        _write(data, _facts(found), _text(found), args.json)
    return EXIT_DONE


def _write(data: TextIO, facts: dict[str, Any], text: str, as_json: bool) -> None:
    from tiltyard.run import atomic

    data.write(f"{atomic.to_json(facts)}\n" if as_json else text)


def _facts(found: Collected) -> dict[str, Any]:
    return {**vars(found), "folder": str(found.folder)}


def _text(found: Collected) -> str:
    from tiltyard.collection.collect import size_text

    place = shlex.quote(os.path.relpath(found.folder))
    added = f", {found.added:,} of them new" if found.added < found.episodes else ""
    lines = [
        f"{found.env}: {found.episodes:,} episodes{added}",
        f"env steps  {found.env_steps:,}",
        f"return     {formatting.number(found.mean_return)} (mean)",
        f"size       {size_text(found.bytes)}",
        f"seed       {found.seed}",
        f"folder     {place}",
        f"next       tiltyard data verify {place}",
        f"           tiltyard data stats {place}",
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------- jobs


def _submit(request: Request, profile: Profile, tasks: int, as_json: bool, data: TextIO) -> int:
    """Check everything here, create the dataset, and submit an array whose tasks run the same command."""
    from dataclasses import replace

    from tiltyard.collection.collect import prepare, summary
    from tiltyard.collection.request import create
    from tiltyard.run import atomic
    from tiltyard.slurm.collect_job import check, submit

    check(profile)
    request = replace(request, out=atomic.absolute(request.out))
    prepared = prepare(request)
    if not prepared.limit:
        found = summary(prepared, 0)
        _write(data, _facts(found), _text(found), as_json)
        return EXIT_DONE
    create(prepared)
    for warning in profile.warnings():
        sys.stderr.write(f"warning: {warning}\n")
    number, folder = submit(request.out, profile, _words(request), tasks)
    place = shlex.quote(os.path.relpath(request.out))
    lines = [
        f"job     {number} ({tasks} {'task' if tasks == 1 else 'tasks'})",
        f"folder  {place}",
        f"logs    {os.path.relpath(folder)}",
        f"next    squeue -j {number}",
        f"        tiltyard data stats {place}",
        f"        scancel {number}  (the same command continues)",
    ]
    facts = {"job": number, "tasks": tasks, "folder": str(request.out), "logs": str(folder)}
    _write(data, facts, "\n".join(lines) + "\n", as_json)
    return EXIT_DONE


def _words(request: Request) -> list[str]:
    """The command of a task: as typed, without the profile."""
    words = ["data", "collect", request.target, "--out", str(request.out), "--episodes", str(request.episodes)]
    words += [word for policy in request.policies for word in ("--policy", policy)]
    for name, value in (("--max-steps", request.max_steps), ("--workers", request.workers), ("--seed", request.seed)):
        words += [] if value is None else [name, str(value)]
    words += ["--save-info"] if request.save_info else []
    words += ["--trust-code"] if request.trust_code else []
    return [*words, *request.overrides]
