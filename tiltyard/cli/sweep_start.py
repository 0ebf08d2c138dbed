"""`sweep start`: check the plans, make the sweeps' folders, and run them here, in the background, or as jobs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.cli.sweep_show import summary
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, UseError
from tiltyard.sweep.folder import Sweep, find_sweep

if TYPE_CHECKING:
    from tiltyard.sweep.preflight import CheckedPlan


def run_start(args: argparse.Namespace) -> int:
    if args.target is None:
        raise UseError("`tiltyard sweep start` needs a plan or a sweep", "tiltyard sweep start plan.yaml")
    found = [each for target in args.targets for each in _resolve(target, args)]
    if args.dry_run:
        for each in found:
            _print_dry_run(each, leave_stopped=args.leave_stopped)
        return EXIT_DONE
    sweeps = [_make(each) for each in found]
    if args.detach and len(sweeps) > 1 and all(sweep.launcher == "local" for sweep in sweeps):
        return _run_in_background(sweeps, leave_stopped=args.leave_stopped)  # one after another there, too
    code = EXIT_DONE
    for sweep in sweeps:
        result = run(sweep, args.detach, leave_stopped=args.leave_stopped)
        code = code or result
        if result == EXIT_RESUMABLE:
            break
    return code


def run(sweep: Sweep, detach: bool, *, leave_stopped: bool) -> int:
    """Run a sweep in this process, or in the background; jobs are submitted and need neither."""
    from tiltyard.sweep.report import summarize

    if sweep.launcher != "local":
        from tiltyard.sweep.tick import run_tick

        run_tick(sweep, echo, by_user=True, leave_stopped=leave_stopped)
        found = summarize(sweep)
        sys.stdout.write(summary(found))
        return EXIT_FAILED if found.state == "failed" else EXIT_DONE
    if detach:
        return _run_in_background([sweep], leave_stopped=leave_stopped)
    from tiltyard.sweep.backends.local import Local
    from tiltyard.sweep.controller import run_controller

    code = run_controller(sweep, Local, echo, leave_stopped=leave_stopped)
    sys.stdout.write(summary(summarize(sweep)))
    return code


def echo(sentence: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(formatting.clean(sentence) + "\n")


# ---------------------------------------------------------------------------------------------- plans


def _resolve(target: str, args: argparse.Namespace) -> list[Sweep | CheckedPlan]:
    """What an argument names: a sweep to continue, or plans, which are checked."""
    sources = _plans(target)
    if not sources:
        sweep = find_sweep(target)
        if args.new or args.on or args.yes:
            hint = f"tiltyard sweep start {sweep.typed}; or name a plan to start a new sweep"
            raise UseError(f"{sweep.id} is an existing sweep: --new, --on and --yes are for plans", hint)
        return [sweep]
    from tiltyard.sweep import preflight

    found: list[Sweep | CheckedPlan] = []
    for prepared in [preflight.prepare(source, profile=args.on, many=args.yes) for source in sources]:
        known = None if args.new else preflight.same_sweep(prepared)
        if known is not None:
            sys.stderr.write(f"continuing sweep {known.id}, which has this plan; --new starts another\n")
        found.append(known or prepared)
    return found


def _plans(target: str) -> list[Any]:
    """The plans that an argument names: a YAML file, or RUN_DESCRIPTION in Python; none if it names a sweep."""
    if target.endswith((".yaml", ".yml")):
        return [Path(target)]
    from tiltyard.sweep.python_plan import is_module, load_description

    if target.endswith(".py"):
        return list(load_description(target).plans())
    try:
        find_sweep(target)
    except UseError:
        if is_module(target):
            return list(load_description(target).plans())
        raise
    return []


def _make(each: Sweep | CheckedPlan) -> Sweep:
    from tiltyard.sweep import preflight

    if not isinstance(each, preflight.CheckedPlan):
        return each
    sweep = preflight.begin(each, [Path(sys.argv[0]).name, *sys.argv[1:]])
    sys.stderr.write(f"sweep {sweep.id}: {trial_count(each.count)}, at most {each.plan.max_parallel} at once\n")
    return sweep


def trial_count(count: int) -> str:
    """1 trial, 2 trials."""
    return "1 trial" if count == 1 else f"{count:,} trials"


# ---------------------------------------------------------------------------------------------- dry run


def _print_dry_run(each: Sweep | CheckedPlan, *, leave_stopped: bool) -> None:
    from tiltyard.sweep.preflight import CheckedPlan

    if not isinstance(each, CheckedPlan):
        _print_unfinished(each, leave_stopped=leave_stopped)
    elif each.launcher == "local":
        _print_trials(each)
    else:
        _print_script(each)


def _print_unfinished(sweep: Sweep, *, leave_stopped: bool) -> None:
    from tiltyard.sweep.report import summarize

    left = [row for row in summarize(sweep).rows if not row.over and not (leave_stopped and row.state == "stopped")]
    sys.stdout.write("".join(f"trial {row.trial.number} ({row.state})\n" for row in left))
    sys.stderr.write(f"would continue {trial_count(len(left))} of {sweep.id}; nothing was started\n")


def _print_trials(prepared: CheckedPlan) -> None:
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
        plan, seeds = prepared.plan, len(prepared.plan.seeds)
        each = "one seed" if seeds == 1 else f"{seeds} seeds"
        sys.stdout.write(f"search: {plan.search} chooses {plan.trials} combinations during the sweep, {each} each\n")
    sys.stderr.write(f"would start {trial_count(prepared.count)} of {prepared.name}; nothing was made\n")


def _print_script(prepared: CheckedPlan) -> None:
    """The script of the first job."""
    from tiltyard.config.site_file import runs_root
    from tiltyard.sweep.tick import preview

    assert prepared.profile is not None
    sweep = Sweep(runs_root().absolute() / prepared.name / "sweep-NNNN")
    sys.stdout.write(preview(sweep, prepared.plan, prepared.profile, prepared.count))
    most = f"at most {prepared.plan.max_parallel:,} at once"
    sys.stderr.write(f"would submit {trial_count(prepared.count)} of {prepared.name}, {most}; nothing was made\n")


# ---------------------------------------------------------------------------------------------- background


def _run_in_background(sweeps: Sequence[Sweep], *, leave_stopped: bool) -> int:
    """Run sweeps one after another in a process that outlives the terminal."""
    for busy in [sweep for sweep in sweeps if sweep.controlled]:
        sys.stderr.write(f"sweep {busy.id} is already running\n")
    left = [sweep for sweep in sweeps if not sweep.controlled]
    if not left:
        return EXIT_DONE
    with (left[0].folder / "controller.log").open("ab") as file:
        command = [sys.executable, "-m", "tiltyard", "sweep", "start", *(str(sweep.folder) for sweep in left)]
        command += ["--leave-stopped"] if leave_stopped else []
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    order = ", one after another" if len(left) > 1 else ""
    for sweep in left:
        sys.stderr.write(f"sweep {sweep.id} is running in the background (pid {child.pid}{order}); safe to log out\n")
        sys.stdout.write(f"{sweep.id}\n")
    sys.stderr.write(f"next: tiltyard sweep watch {left[0].typed}\n")
    return EXIT_DONE
