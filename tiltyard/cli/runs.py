"""`ls`, `show`, `logs`, `stop`, `rm` and `diff`: list, show and manage runs by their folders.

ls, show, diff   read status.json, manifests and experiment.yaml; no plug-in is imported
logs             prints logs/attempt-N.log, one after another
stop             sends SIGTERM to the process named in lock.json, which saves and exits; for jobs see jobs.py
rm               asks first, and refuses running runs
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tiltyard.cli import formatting
from tiltyard.config.site_file import runs_root
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, UseError, did_you_mean
from tiltyard.run import atomic, metrics
from tiltyard.run.folder import Run, find, list_runs, read_events, read_owner, remove, remove_folder
from tiltyard.run.lock import liveness
from tiltyard.run.logs import new_text
from tiltyard.run.status import STATES, SWEEP_FOLDER

SEEN_STATES = (*STATES, "lost", "broken")


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        metavar="FOLDER",
        help="runs folder (default: TILTYARD_RUNS, else the site file's, else ./runs)",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _root(args: argparse.Namespace) -> Path:
    return atomic.absolute(args.root) if args.root is not None else runs_root()


def _write_json(value: Any) -> None:
    sys.stdout.write(atomic.to_json(value, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------- ls


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard ls`."""
    _add_root(parser)
    _add_json(parser)
    parser.add_argument("--tag", action="append", default=[], help="only runs with this tag (may be repeated)")
    parser.add_argument("--name", help="only runs with this name")
    parser.add_argument("--state", help=f"only runs in this state: {', '.join(SEEN_STATES)}")
    parser.add_argument("--notes", metavar="TEXT", help="only runs whose notes contain this text")


def run_ls(args: argparse.Namespace) -> int:
    """List runs, newest last."""
    if args.state is not None and args.state not in SEEN_STATES:
        raise UseError(f"--state {args.state!r}: unknown state of a run", did_you_mean(args.state, SEEN_STATES))
    root = _root(args)
    if args.root is not None and not root.is_dir():
        raise UseError(f"--root {root} is not a folder", "name the folder that holds the runs")
    every = list_runs(root)
    if any(row["job"] for row in every):
        from tiltyard.cli import jobs

        if not jobs.overlay(every):
            sys.stderr.write("Slurm does not answer here: states of jobs are from their run folders\n")
    rows = [row for row in every if _matches(row, args)]
    if args.json:
        _write_json(rows)
    elif rows:
        head = ("run", "state", "env", "env steps", "of", "return", "eval", "time", "updated", "tags", "notes")
        sys.stdout.write(formatting.table(head, [_line(row) for row in rows], right=(3, 4, 5, 6, 7)))
    elif every:
        sys.stderr.write(f"none of the {len(every)} runs in {root} matches\n")
    else:
        sys.stderr.write(f"no runs in {root}; start one with: tiltyard train CartPole-v1\n")
    return EXIT_DONE


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


# ---------------------------------------------------------------------------------------------- show


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard show`."""
    parser.add_argument("run", metavar="RUN", help="name/0007-brisk-otter, brisk-otter, a name, a path, or last")
    _add_root(parser)
    _add_json(parser)
    parser.add_argument("--events", action="store_true", help="print its events, one per line")
    parser.add_argument("--lineage", action="store_true", help="for a population: its copies and their settings")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the learning curve into this file (PNG)")


def run_show(args: argparse.Namespace) -> int:
    """Print the run on one screen, or its events or lineage, or plot it."""
    run = find(args.run, _root(args), programs=True)
    if run.is_program:
        return _show_program(run, args)
    if args.plot is not None:
        from tiltyard.track.plot import learning_curve

        sys.stdout.write(f"{learning_curve(run.folder, args.plot)}\n")
        return EXIT_DONE
    if args.events:
        return _show_events(run, args)
    if args.lineage:
        from tiltyard.cli.show import lineage_text
        from tiltyard.training.pbt import policy_lineage

        found = policy_lineage(run)
        _write_json(found) if args.json else sys.stdout.write(lineage_text(found))
        return EXIT_DONE
    from tiltyard.cli.show import facts_of, summary

    facts = facts_of(run)
    if args.json:
        _write_json(facts)
    else:
        sys.stdout.write(summary(run, facts))
    return EXIT_DONE


def _show_events(run: Run, args: argparse.Namespace) -> int:
    events = read_events(run)
    if args.json:
        _write_json(events)
        return EXIT_DONE
    lines = [f"{event.get('time')}  {event.get('kind', ''):<9}  {event.get('sentence', '')}" for event in events]
    sys.stdout.write("".join(formatting.clean(line) + "\n" for line in lines))
    return EXIT_DONE


def _show_program(run: Run, args: argparse.Namespace) -> int:
    """Print a trial that runs another program: its command, state and newest metrics."""
    if args.plot is not None or args.lineage:
        raise UseError(f"{run.id} is a trial of another program", "plot the sweep instead: tiltyard sweep plot")
    if args.events:
        return _show_events(run, args)
    status, records = run.status(), metrics.read(run.folder)
    last = {name: value for record in records for name, value in record["metrics"].items()}
    facts = {**status, "state": run.state, "command": run.program()["command"], "metrics": last}
    if args.json:
        _write_json(facts)
        return EXIT_DONE
    progress, reason = status["progress"], f": {status['reason']}" if status["reason"] else ""
    lines = [
        ("run", run.id),
        ("program", shlex.join(facts["command"])),
        ("state", f"{run.state}{reason}, attempt {status['attempt']}"),
        ("progress", f"{progress['env_steps']:,} env steps, {formatting.duration(progress['seconds'])}"),
        *((name, formatting.number(value)) for name, value in sorted(last.items())),
        ("folder", os.path.relpath(run.folder)),
        ("next", f"tiltyard logs {run.typed}"),
    ]
    width = max(len(name) for name, _ in lines)
    sys.stdout.write("".join(f"{name:<{width}}  {formatting.clean(value)}\n" for name, value in lines))
    return EXIT_DONE


# ---------------------------------------------------------------------------------------------- logs


def configure_logs(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard logs`."""
    parser.add_argument("run", metavar="RUN", help="name/0007-brisk-otter, brisk-otter, a name, a path, or last")
    _add_root(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until the run ends")


def run_logs(args: argparse.Namespace) -> int:
    """Print the log of every attempt; with -f keep printing until the run ends."""
    run = find(args.run, _root(args), programs=True)
    if args.follow and run.status().get("job"):
        from tiltyard.cli import jobs

        jobs.follow(run, sys.stdout)
        return EXIT_DONE
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
    return EXIT_DONE


# ---------------------------------------------------------------------------------------------- stop


def configure_stop(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard stop`."""
    parser.add_argument("run", metavar="RUN", help="name/0007-brisk-otter, brisk-otter, a name, a path, or last")
    _add_root(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long to wait until it has stopped (default: 120)",
    )


def run_stop(args: argparse.Namespace) -> int:
    """Ask the run's process to save and exit, and wait until it has."""
    from tiltyard.sweep.folder import sweep_at

    sweep = sweep_at(args.run, _root(args))
    if sweep is not None:
        raise UseError(f"{sweep.id} is a sweep", f"stop all of it with: tiltyard sweep stop {sweep.typed}")
    run = find(args.run, _root(args), programs=True)
    owner = read_owner(run.folder)
    if run.status().get("job") and (owner is None or owner.get("job")):
        from tiltyard.cli import jobs

        return jobs.stop(run, args.wait)
    if owner is None or liveness(owner) == "dead":
        raise UseError(f"run {run.id} is not running ({run.state})", f"see: tiltyard show {run.typed}")
    pid, host = owner.get("pid"), owner.get("host")
    if liveness(owner) == "unknown" or not isinstance(pid, int):
        raise UseError(
            f"run {run.id} is being written by pid {pid} on host {host}",
            f"on that host: tiltyard stop {run.typed}",
        )
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise UseError(
            f"pid {pid}, which writes run {run.id}, belongs to another user", "ask that user to stop it"
        ) from error
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
    reason = run.status()["reason"]
    sys.stderr.write(f"run {run.id} is {run.state}{f': {reason}' if reason else ''}\n")
    sys.stderr.write(f"next: tiltyard {'show' if run.state == 'finished' else 'resume'} {run.typed}\n")
    return EXIT_DONE


# ---------------------------------------------------------------------------------------------- rm


def configure_rm(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard rm`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="runs or sweeps to delete permanently")
    _add_root(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run_rm(args: argparse.Namespace) -> int:
    """Delete runs and sweeps, once all of them are found."""
    from tiltyard.sweep.folder import sweep_at

    root = _root(args)
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


# ---------------------------------------------------------------------------------------------- diff


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard diff`."""
    parser.add_argument("left", metavar="RUN", help="a run, or an experiment's YAML file")
    parser.add_argument("right", metavar="RUN|FILE", help="another run, or an experiment's YAML file")
    _add_root(parser)
    _add_json(parser)


def run_diff(args: argparse.Namespace) -> int:
    """Print the settings, and plug-in files, in which two runs or files differ."""
    root = _root(args)
    left, right = _settings(args.left, root), _settings(args.right, root)
    rows: list[dict[str, Any]] = [
        {"setting": name, "left": left.get(name), "right": right.get(name)}
        for name in [*left, *(name for name in right if name not in left)]
        if name not in left or name not in right or left[name] != right[name]
    ]
    if args.json:
        _write_json(rows)
    elif rows:
        lines = [
            [
                row["setting"],
                *(formatting.value(side[row["setting"]]) if row["setting"] in side else "-" for side in (left, right)),
            ]
            for row in rows
        ]
        sys.stdout.write(formatting.table(("setting", args.left, args.right), lines))
    else:
        sys.stderr.write("no setting differs\n")
    return EXIT_DONE


def _settings(name: str, root: Path) -> dict[str, Any]:
    """Every setting by dotted name, and a run's plug-in copies by path with their checksums."""
    if name.endswith((".yaml", ".yml")):
        from tiltyard.config.load import load

        return formatting.leaves(load(name).experiment.model_dump(mode="json", by_alias=True))
    run = find(name, root)
    found = formatting.leaves(run.experiment().model_dump(mode="json", by_alias=True))
    with contextlib.suppress(OSError, ValueError):  # without provenance.json there is nothing to compare
        copies = atomic.read_json(run.folder / "provenance.json").get("plugins")
        found |= {file: f"sha256 {digest[:12]}" for file, digest in copies.items()} if isinstance(copies, dict) else {}
    return found
