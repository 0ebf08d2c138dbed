"""`ls`, `logs`, `stop`, `rm` and `diff`: list and manage runs by their folders.

ls, diff   read status.json and experiment.yaml; no plug-in is imported
logs       prints logs/attempt-N.log, one after another
stop       sends SIGTERM to the process named in lock.json, which saves and exits; for jobs see jobs.py
rm         asks first, and refuses running runs
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, root_named
from tiltyard.cli.output import write_result
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, UseError, did_you_mean
from tiltyard.run import atomic, trust
from tiltyard.run.folder import Run, find, remove, remove_folder
from tiltyard.run.lock import liveness, read_owner
from tiltyard.run.logs import new_text
from tiltyard.run.provenance import copied_files
from tiltyard.run.status import STATES, SWEEP_FOLDER, list_runs

SEEN_STATES = (*STATES, "lost", "damaged")


def configure_ls(parser: argparse.ArgumentParser) -> None:
    add(parser, "--root", "--json")
    parser.add_argument("--tag", action="append", default=[], help="only runs with this tag (may be repeated)")
    parser.add_argument("--name", help="only runs with this name")
    parser.add_argument("--state", help=f"only runs in this state: {', '.join(SEEN_STATES)}")
    parser.add_argument("--notes", metavar="TEXT", help="only runs whose notes contain this text")


def run_ls(args: argparse.Namespace) -> None:
    """List runs, newest last."""
    if args.state is not None and args.state not in SEEN_STATES:
        raise UseError(f"--state {args.state!r}: unknown state of a run", did_you_mean(args.state, SEEN_STATES))
    root = root_named(args)
    if args.root is not None and not root.is_dir():
        raise UseError(f"--root {root} is not a folder", "name the folder that holds the runs")
    every = list_runs(root)
    if any(row["job"] for row in every):
        from tiltyard.cli import jobs

        if not jobs.overlay(every):
            sys.stderr.write("Slurm does not answer here: states of jobs are from their run folders\n")
    rows = [row for row in every if _matches(row, args)]
    head = ("run", "state", "env", "env steps", "of", "return", "eval", "time", "updated", "tags", "notes")
    text = formatting.table(head, [_line(row) for row in rows], right=(3, 4, 5, 6, 7)) if rows else ""
    write_result(rows, text, as_json=args.json)
    if every and not rows:
        sys.stderr.write(f"none of the {len(every)} runs in {root} matches\n")
    elif not every:
        sys.stderr.write(f"no runs in {root}; start one with: tiltyard train CartPole-v1\n")


def _matches(row: dict[str, Any], args: argparse.Namespace) -> bool:
    return (
        all(tag in row["tags"] for tag in args.tag)
        and args.name in (None, row["id"].partition("/")[0])
        and args.state in (None, row["state"])
        and (args.notes is None or args.notes.casefold() in row["notes"].casefold())
    )


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["id"],
        row["state"],
        row["env"],
        formatting.count(row["env_steps"]),
        formatting.percent(row["env_steps"], row["target"]),
        formatting.number(row["return"]),
        formatting.number(row["eval_return"]),
        formatting.duration(row["seconds"]),
        formatting.ago(row["updated"]),
        ",".join(row["tags"]),
        (row["notes"].strip().splitlines() or [""])[0],
    ]


def configure_logs(parser: argparse.ArgumentParser) -> None:
    add(parser, "run", "--root")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until the run ends")


def run_logs(args: argparse.Namespace) -> None:
    """Print the log of every attempt; with -f keep printing until the run ends."""
    run = find(args.run, root_named(args), programs=True)
    if args.follow and run.status().get("job"):
        from tiltyard.cli import jobs

        jobs.follow(run, sys.stdout)
        return
    read: dict[Path, int] = {}
    empty = True
    while True:
        # Read the state first: everything written before the end is then printed.
        running = run.state == "running"
        for chunk in new_text(run, read):
            empty = False
            sys.stdout.write(chunk)
        sys.stdout.flush()
        if not args.follow or not running:
            break
        time.sleep(0.25)
    if empty:
        sys.stderr.write(f"run {run.id} has written no log yet\n")


def configure_stop(parser: argparse.ArgumentParser) -> None:
    add(parser, "run", "--root")
    about = "how long to wait until it has stopped (default: 120)"
    parser.add_argument("--wait", type=float, default=120.0, metavar="SECONDS", help=about)


def run_stop(args: argparse.Namespace) -> int:
    """Ask the run's process to save and exit, and wait until it has."""
    from tiltyard.cli import jobs
    from tiltyard.sweep.folder import sweep_at

    sweep = sweep_at(args.run, root_named(args))
    if sweep is not None:
        raise UseError(f"{sweep.id} is a sweep", f"stop all of it with: tiltyard sweep stop {sweep.typed}")
    run = find(args.run, root_named(args), programs=True)
    trust.require_own(run, "which process or job is stopped", "ask that user to stop it")
    owner = read_owner(run.folder)
    if run.status().get("job") and (owner is None or owner.get("job")):
        return jobs.stop(run, args.wait)
    if owner is None or liveness(owner) == "dead":
        raise UseError(f"run {run.id} is not running ({run.state})", f"see: tiltyard show {run.typed}")
    pid, host = owner.get("pid"), owner.get("host")
    if liveness(owner) == "unknown" or not isinstance(pid, int):
        hint = f"on that host: tiltyard stop {run.typed}"
        raise UseError(f"run {run.id} is being written by pid {pid} on host {host}", hint)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        hint = "ask that user to stop it"
        raise UseError(f"pid {pid}, which writes run {run.id}, belongs to another user", hint) from error
    sys.stderr.write(f"asked pid {pid} to save run {run.id} and stop\n")
    deadline = time.monotonic() + args.wait
    while (
        (now := read_owner(run.folder)) is not None
        and now.get("mark") == owner.get("mark")
        and liveness(now) == "alive"
    ):
        if time.monotonic() >= deadline:
            sys.stderr.write(f"pid {pid} is still finishing its update; it will save and stop after that\n")
            return EXIT_FAILED
        time.sleep(0.05)
    return jobs.report_stopped(run)


def configure_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="runs or sweeps to delete permanently")
    add(parser, "--root")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run_rm(args: argparse.Namespace) -> int:
    """Delete runs and sweeps, once all of them are found."""
    from tiltyard.sweep.folder import sweep_at

    root = root_named(args)
    sweeps = {name: sweep for name in args.runs if (sweep := sweep_at(name, root)) is not None}
    for sweep in sweeps.values():
        if sweep.controlled:
            raise UseError(f"sweep {sweep.id} is running", f"stop it first: tiltyard sweep stop {sweep.typed}")
    named = [_named_run(name, root) for name in args.runs if name not in sweeps]
    named += [Run(folder) for sweep in sweeps.values() for folder in sweep.trial_folders()]
    runs = list({run.folder: run for run in named}.values())
    if not args.yes:
        if not sys.stdin.isatty():
            raise UseError("rm deletes permanently and cannot ask without a terminal", "add --yes")
        whole = f"{len(sweeps)} whole sweep{'s' * (len(sweeps) > 1)} of " if sweeps else ""
        sys.stderr.write("".join(f"{run.folder}\n" for run in runs))
        sys.stderr.write(f"delete {whole}{_runs(len(runs))} permanently? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            sys.stderr.write("nothing was deleted\n")
            return EXIT_FAILED
    from tiltyard.slurm.job_state import refuse_queued

    for run in runs:
        refuse_queued(run)
        remove(run, root)
        sys.stderr.write(f"deleted {run.id}\n")
    for sweep in sweeps.values():
        remove_folder(Run(sweep.folder), Path(os.path.realpath(root)) / sweep.id)
        sys.stderr.write(f"deleted sweep {sweep.id}\n")
    return EXIT_DONE


def _named_run(name: str, root: Path) -> Run:
    """A run to delete. A plain name must not mean a trial of a sweep."""
    run = find(name, root, whole=False)
    inside = run.folder.parent
    if SWEEP_FOLDER.fullmatch(inside.name) and atomic.absolute(root / name) in (inside.parent, atomic.absolute(root)):
        hint = f"name the trial, or the whole sweep: tiltyard rm {inside.parent.name}/{inside.name}"
        raise UseError(f"{name!r} is ambiguous: its newest run is {run.id}, a trial of a sweep", hint)
    return run


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def configure_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("left", metavar="RUN", help="a run, or an experiment's YAML file")
    parser.add_argument("right", metavar="RUN|FILE", help="another run, or an experiment's YAML file")
    add(parser, "--root", "--json")


def run_diff(args: argparse.Namespace) -> None:
    """Print the settings, and plug-in files, in which two runs or files differ."""
    root = root_named(args)
    left, right = _settings(args.left, root), _settings(args.right, root)
    missing = object()
    names = [name for name in {**left, **right} if left.get(name, missing) != right.get(name, missing)]
    rows = [{"setting": name, "left": left.get(name), "right": right.get(name)} for name in names]
    lines = [
        [name, *(formatting.value(side[name]) if name in side else "-" for side in (left, right))] for name in names
    ]
    text = formatting.table(("setting", args.left, args.right), lines) if names else ""
    write_result(rows, text, as_json=args.json)
    if not names and not args.json:
        sys.stderr.write("no setting differs\n")


def _settings(name: str, root: Path) -> dict[str, Any]:
    """Every setting by dotted name, and a run's plug-in copies by path with their checksums."""
    if name.endswith((".yaml", ".yml")):
        from tiltyard.config.load import load

        return formatting.leaves(load(name).experiment.model_dump(mode="json", by_alias=True))
    run = find(name, root)
    found = formatting.leaves(run.experiment().model_dump(mode="json", by_alias=True))
    return found | {file: f"sha256 {digest[:12]}" for file, digest in copied_files(run.folder).items()}
