"""`sweep`: many runs from one plan.

start             check every trial, make the sweep's folder, carry it out here; started again, it goes on
status watch      how it stands, from the folders alone          best plot    what came out
lineage replay    of a population: who came from whom, and what made one of them, trained alone
retry extend      write a decision down, and carry it out unless somebody does already
stop              ask whoever carries it out, and every trial, to save and end

Where trials are jobs (--on PROFILE), start, retry and extend submit what is due and return: the jobs do the rest.
All but start, retry and extend import nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting, sweep_jobs
from tiltyard.cli.sweep_show import summary
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, UseError, did_you_mean
from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.run.folder import Run
    from tiltyard.sweep.folder import Sweep
    from tiltyard.sweep.preflight import CheckedPlan
    from tiltyard.sweep.report import SweepSummary

HEARS = 2.0  # seconds after which who still carries a sweep out has heard of a decision; one about to end may not
# action -> options that it has
ACTIONS: dict[str, tuple[str, ...]] = {
    "start": ("on", "yes", "dry_run", "new", "detach", "leave_stopped"),
    "status": ("json", "csv"),
    "watch": ("every",),
    "retry": ("failed", "detach", "dry_run"),
    "extend": ("trials", "seeds", "yes", "detach", "dry_run"),
    "stop": ("wait", "dry_run"),
    "best": ("json",),
    "plot": ("out",),
    "lineage": ("member", "json"),
    "replay": ("member", "dry_run"),
}


def configure_sweep(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard sweep`."""
    parser.add_argument("action", metavar="ACTION", help=" | ".join(ACTIONS))
    parser.add_argument(
        "targets",
        metavar="SWEEP|PLAN",
        nargs="*",
        help="a sweep: its id, folder or name, the newest when left out; start: plans (YAML, or Python), one after "
        "another",
    )
    parser.add_argument("--on", metavar="PROFILE", help="start: profile of the site file to run with")
    parser.add_argument("--yes", action="store_true", help="start, extend: more than 10,000 trials are meant")
    parser.add_argument("--new", action="store_true", help="start: another sweep, though this plan has one")
    parser.add_argument(
        "--leave-stopped",
        action="store_true",
        help="start: not those trials that somebody stopped, as retry and extend",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--detach", action="store_true", help="carry it out in the background")
    parser.add_argument("--failed", action="store_true", help="retry: all trials that failed")
    parser.add_argument("--trials", type=int, metavar="N", help="extend: so many more combinations")
    parser.add_argument("--seeds", type=int, metavar="N", help="extend: so many more seeds of every combination")
    parser.add_argument(
        "--every", type=float, metavar="SECONDS", help="watch: between two looks (2; 10 where trials are jobs)"
    )
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="stop: wait for trials (60)")
    parser.add_argument("--member", type=int, metavar="N", help="lineage, replay: of this member of a population")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="plot: where the pictures go")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV, a line per trial")


def run_sweep(args: argparse.Namespace) -> int:
    if args.action not in ACTIONS:
        raise UseError(f"`tiltyard sweep` has no {args.action!r}", did_you_mean(args.action, ACTIONS))
    every = {name for names in ACTIONS.values() for name in names}
    strange = [name for name in sorted(every - set(ACTIONS[args.action])) if getattr(args, name) not in (None, False)]
    if strange:
        owners = [action for action, names in ACTIONS.items() if strange[0] in names]
        has = "has" if len(owners) == 1 else "have"
        raise UseError(
            f"`tiltyard sweep {args.action}` has no --{strange[0].replace('_', '-')}",
            f"{' and '.join(owners)} {has} it",
        )
    if len(args.targets) > 1 and args.action != "start":
        raise UseError(f"`tiltyard sweep {args.action}` takes one sweep", "name one; start takes several")
    args.target = args.targets[0] if args.targets else None
    chosen: int = globals()[f"_{args.action}"](args)
    return chosen


# ---------------------------------------------------------------------------------------------- start


def _start(args: argparse.Namespace) -> int:
    if args.target is None:
        raise UseError("`tiltyard sweep start` needs a plan or a sweep", "tiltyard sweep start plan.yaml")
    found = [each for target in args.targets for each in _planned(target, args)]
    if args.dry_run:
        for each in found:
            _dry(each, leave_stopped=args.leave_stopped)
        return EXIT_DONE
    sweeps = [_begun(each) for each in found]
    if args.detach and len(sweeps) > 1 and all(sweep.launcher == "local" for sweep in sweeps):
        return _in_background(sweeps, leave_stopped=args.leave_stopped)  # one after another there, too
    code = EXIT_DONE
    for sweep in sweeps:
        result = _carry_out(sweep, args.detach, leave_stopped=args.leave_stopped)
        code = code or result
        if result == EXIT_RESUMABLE:
            break
    return code


def _planned(target: str, args: argparse.Namespace) -> list[Sweep | CheckedPlan]:
    """What a word means: sweeps to go on with, or plans that passed every check."""
    sources = _plans(target)
    if not sources:
        sweep = _find(target)
        if args.new or args.on or args.yes:
            raise UseError(f"{sweep.id} is a sweep, and goes on as it was started", "name a plan for another one")
        return [sweep]
    from tiltyard.sweep import preflight

    found: list[Sweep | CheckedPlan] = []
    for prepared in [preflight.prepare(source, profile=args.on, many=args.yes) for source in sources]:
        known = None if args.new else preflight.same_sweep(prepared)
        if known is not None:
            sys.stderr.write(f"this plan is sweep {known.id}, which goes on; --new starts another\n")
        found.append(known or prepared)
    return found


def _begun(each: Sweep | CheckedPlan) -> Sweep:
    from tiltyard.sweep import preflight

    if not isinstance(each, preflight.CheckedPlan):
        return each
    sweep = preflight.begin(each, [Path(sys.argv[0]).name, *sys.argv[1:]])
    sys.stderr.write(f"sweep {sweep.id}: {_trials(each.count)}, {each.plan.max_parallel} at once\n")
    return sweep


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count:,} trials"


def _plans(target: str) -> list[Any]:
    """The plans that a word means: a YAML file, or RUN_DESCRIPTION in Python; none where it means a sweep."""
    if target.endswith((".yaml", ".yml")):
        return [Path(target)]
    from tiltyard.sweep.python_plan import is_module, load_description

    if target.endswith(".py"):
        return list(load_description(target).plans())
    try:
        _find(target)
    except UseError:
        if is_module(target):
            return list(load_description(target).plans())
        raise
    return []


def _dry(each: Sweep | CheckedPlan, *, leave_stopped: bool) -> None:
    from tiltyard.sweep.preflight import CheckedPlan

    if not isinstance(each, CheckedPlan):
        _say_dry(each, leave_stopped=leave_stopped)
    elif each.launcher == "local":
        _say_trials(each)
    else:
        sweep_jobs.dry(each)


def _say_trials(prepared: CheckedPlan) -> None:
    from tiltyard.sweep.report import shown

    keys = list(dict.fromkeys(key for trial in prepared.trials for key in trial.settings))
    table = [
        [str(trial.number), str(trial.seed), *(shown(own[key]) if key in own else "" for key in keys)]
        for trial in prepared.trials
        for own in [trial.settings]
    ]
    if table:
        sys.stdout.write(formatting.table(("trial", "seed", *keys), table, right=(0, 1)))
    else:
        said = f"search: {prepared.plan.search} chooses {prepared.plan.trials} combinations as it goes"
        seeds = len(prepared.plan.seeds)
        sys.stdout.write(f"{said}, each with {'one seed' if seeds == 1 else f'{seeds} seeds'}\n")
    sys.stderr.write(f"{_trials(prepared.count)} of {prepared.name} would be started; nothing was made\n")


def _say_dry(sweep: Sweep, *, leave_stopped: bool) -> None:
    from tiltyard.sweep.report import summarize

    left = [row for row in summarize(sweep).rows if not row.over and not (leave_stopped and row.state == "stopped")]
    lines = [f"trial {row.trial.number} ({row.state})\n" for row in left]
    sys.stdout.write("".join(lines))
    sys.stderr.write(f"{_trials(len(left))} of {sweep.id} would go on; nothing was started\n")


def _carry_out(sweep: Sweep, detach: bool, *, leave_stopped: bool) -> int:
    """Carry a sweep out in this process, or in one that stays when this terminal is closed; jobs need neither."""
    if sweep.launcher != "local":
        return sweep_jobs.submit(sweep, _say, leave_stopped=leave_stopped)
    if detach:
        return _in_background([sweep], leave_stopped=leave_stopped)
    from tiltyard.sweep.backends.local import Local
    from tiltyard.sweep.controller import carry_out
    from tiltyard.sweep.report import summarize

    code = carry_out(sweep, Local, _say, leave_stopped=leave_stopped)
    sys.stdout.write(summary(summarize(sweep)))
    return code


def _say(sentence: str) -> None:
    sys.stderr.write(formatting.clean(sentence) + "\n")


def _in_background(sweeps: Sequence[Sweep], *, leave_stopped: bool) -> int:
    """Carry sweeps out in a process of their own, one after another."""
    for busy in [sweep for sweep in sweeps if sweep.controlled]:
        sys.stderr.write(f"sweep {busy.id} is being carried out already\n")
    left = [sweep for sweep in sweeps if not sweep.controlled]
    if not left:
        return EXIT_DONE
    with (left[0].folder / "controller.log").open("ab") as file:
        command = [sys.executable, "-m", "tiltyard", "sweep", "start", *(str(sweep.folder) for sweep in left)]
        command += ["--leave-stopped"] if leave_stopped else []
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    one_after = ", one after another" if len(left) > 1 else ""
    for sweep in left:
        sys.stderr.write(f"sweep {sweep.id} is carried out by pid {child.pid}{one_after}; it may be logged out of\n")
        sys.stdout.write(f"{sweep.id}\n")
    sys.stderr.write(f"next: tiltyard sweep watch {left[0].typed}\n")
    return EXIT_DONE


# ---------------------------------------------------------------------------------------------- look


def _find(target: str | None) -> Sweep:
    from tiltyard.sweep.folder import find_sweep

    return find_sweep(target or "last")


def _status(args: argparse.Namespace) -> int:
    from tiltyard.sweep import report

    found = report.summarize(_find(args.target))
    if args.json:
        sys.stdout.write(atomic.to_json(report.as_data(found), indent=2) + "\n")
    elif args.csv:
        sys.stdout.write(report.as_csv(found))
    else:
        sys.stdout.write(summary(found))
    return EXIT_FAILED if found.state == "failed" else EXIT_DONE


def _watch(args: argparse.Namespace) -> int:
    from tiltyard.cli import sweep_watch

    return sweep_watch.watch(_find(args.target), args.every, _say)


def _best(args: argparse.Namespace) -> int:
    from tiltyard.sweep import report

    found = report.summarize(_find(args.target))
    group = next((group for group in found.groups if group.value is not None), None)
    if group is None:
        waits = found.state == "running" or found.counts.get("running")
        hint = "wait for one" if waits else report.recorded_instead(found)
        raise UseError(
            f"no trial of {found.sweep.id} has recorded {found.plan.metric.name}{' yet' if waits else ''}", hint
        )
    interval = report.bootstrap(group.values)
    row = next(row for row in group.rows if row.value == _best_value(found, group.values))
    if args.json:
        data: dict[str, Any] = {"settings": group.settings, "value": group.value, "interval": interval}
        data |= {
            "values": group.values,
            "trials": [report.row_data(each) for each in group.rows],
            "best": report.row_data(row),
        }
        sys.stdout.write(atomic.to_json(data, indent=2) + "\n")
        return EXIT_DONE
    from tiltyard.run.folder import Run

    assert row.folder is not None
    run = Run(row.folder)
    words = " ".join(f"{key}={report.shown(value)}" for key, value in group.settings.items())
    over = f" over {len(group.values)} seeds" if len(group.values) > 1 else ""
    low_high = f" ({formatting.number(interval[0])} to {formatting.number(interval[1])})" if interval else ""
    lines = [
        ("settings", words or "as in the experiment"),
        ("value", f"{found.plan.metric.name} {formatting.number(group.value)}{low_high}{over}"),
        ("best run", f"{run.id}, {formatting.number(row.value)}"),
        ("next", _next_to_best(run, is_program=found.plan.program is not None)),
    ]
    sys.stdout.write("".join(f"{name:<9} {formatting.clean(value)}\n" for name, value in lines))
    return EXIT_DONE


def _next_to_best(run: Run, *, is_program: bool) -> str:
    """What can be done with the best run: a program's is looked at; a score is of some checkpoints only."""
    if is_program:
        return f"tiltyard show {run.typed}"
    from tiltyard.run.checkpoint import list_checkpoints

    scored = any(each.score is not None for each in list_checkpoints(run))
    return f"tiltyard eval {run.typed}{' --best' if scored else ''}"


def _best_value(found: SweepSummary, values: list[float]) -> float:
    return max(values) if found.plan.better > 0 else min(values)


def _plot(args: argparse.Namespace) -> int:
    from tiltyard.sweep import plots
    from tiltyard.sweep.report import summarize

    found = summarize(_find(args.target))
    for picture in plots.draw(found, args.out or found.sweep.folder / "pictures"):
        sys.stdout.write(f"{os.path.relpath(picture)}\n")
    return EXIT_DONE


def _lineage(args: argparse.Namespace) -> int:
    from tiltyard.cli import population

    return population.lineage(_find(args.target), args)


def _replay(args: argparse.Namespace) -> int:
    from tiltyard.cli import population

    return population.replay(_find(args.target), args)


# ---------------------------------------------------------------------------------------------- decide


def _retry(args: argparse.Namespace) -> int:
    from tiltyard.sweep.report import RETRY, summarize

    if not args.failed:
        raise UseError("`tiltyard sweep retry` needs to know which trials", "add --failed")
    sweep = _find(args.target)
    if sweep.launcher != "local" and not args.dry_run:
        from tiltyard.sweep import tick

        tick.run_tick(sweep, _say)  # what failed just now is written down before it is forgiven
    rows = [row for row in summarize(sweep).rows if row.state in ("failed", RETRY)]
    failed = [row.trial.number for row in rows if not row.trial.refused]
    if len(failed) < len(rows):
        sys.stderr.write(f"{len(rows) - len(failed)} of the failed make no experiment, and would not the next time\n")
    if not failed:
        sys.stderr.write(f"no trial of {sweep.id} has failed that could be started again\n")
        return EXIT_DONE
    sys.stderr.write(f"to be started again: trial {', '.join(map(str, failed))}\n")
    if args.dry_run:
        return EXIT_DONE
    for number in failed:
        sweep.decide("retry", trial=number)
    return _act(sweep, args.detach)


def _extend(args: argparse.Namespace) -> int:
    sweep = _find(args.target)
    plan = sweep.plan()
    points, seeds = args.trials or 0, args.seeds or 0
    if points < 0 or seeds < 0 or not points + seeds:
        raise UseError("`tiltyard sweep extend` needs to know by how much", "--trials 10, or --seeds 2")
    if plan.search == "population":
        hint = "start another sweep; a member goes on alone with: tiltyard fork RUN stop.env_steps=..."
        raise UseError(f"{sweep.id} is a population, which nobody can join later", hint)
    if points and plan.search == "grid":
        raise UseError(
            f"{sweep.id} is a grid, which has all combinations already", "--seeds 2 runs each of them two more times"
        )
    if seeds and plan.program and any("seed" in trial.settings for trial in sweep.trials()):
        hint = "write the new ones into the plan, and start that"
        raise UseError(f"seed is a parameter of {sweep.id} like any other: it cannot be given twice", hint)
    from tiltyard.sweep.preflight import check_more

    check_more(sweep, plan, points, seeds, many=args.yes)
    more = [f"{count} {what}{'s' * (count > 1)}" for count, what in ((points, "combination"), (seeds, "seed")) if count]
    sys.stderr.write(f"{sweep.id} {'would be' if args.dry_run else 'is'} extended by {' and '.join(more)}\n")
    if args.dry_run:
        return EXIT_DONE
    sweep.decide("extend", points=points, seeds=seeds)
    return _act(sweep, args.detach)


def _act(sweep: Sweep, detach: bool) -> int:
    """Whoever carries the sweep out hears of the decision; nobody does: carry it out, but for what somebody stopped."""
    until = time.monotonic() + HEARS
    while sweep.launcher == "local" and sweep.controlled:
        if time.monotonic() >= until:
            sys.stderr.write(f"sweep {sweep.id} is being carried out, and hears of it\n")
            return EXIT_DONE
        time.sleep(0.1)
    return _carry_out(sweep, detach, leave_stopped=True)


def _stop(args: argparse.Namespace) -> int:
    from tiltyard.cli import sweep_stop

    return sweep_stop.stop(_find(args.target), args, _say)
