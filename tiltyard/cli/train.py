"""`train`, `resume` and `fork`: tiltyard.api on the command line, with seeds, expectations and the debugger.

With a profile whose launcher is slurm the run becomes a job: see jobs.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from tiltyard.cli import report
from tiltyard.cli.arguments import add, parse_at, parse_seeds
from tiltyard.cli.expectation import Expectation
from tiltyard.cli.output import data_stdout, write_outcome
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, ResumableError, TiltyardError, UseError
from tiltyard.failures import class_of, exit_code

if TYPE_CHECKING:
    from tiltyard.config.site import Profile
    from tiltyard.processes.fork_server import ForkServer
    from tiltyard.run.folder import Run
    from tiltyard.training.attempt import AttemptSetup
    from tiltyard.training.preflight import CheckedExperiment


def add_common(parser: argparse.ArgumentParser) -> None:
    about = "exit with code 1 if the finished run does not meet this, e.g. 'return>=475'"
    parser.add_argument("--expect", type=Expectation.parse, metavar="'METRIC>=NUMBER'", help=about)
    parser.add_argument("--pdb", action="store_true", help="open the debugger where the run crashed")
    parser.add_argument("--plain", action="store_true", help="print lines instead of the live screen")
    add(parser, "--json", help="print the outcome as JSON on stdout")
    parser.add_argument("--detach", action="store_true", help="for a job: submit it and return instead of following it")


def configure_train(parser: argparse.ArgumentParser) -> None:
    add(parser, "target")
    add_new_run(parser)


def add_new_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that train a new experiment."""
    add(parser, "overrides", "--on")
    parser.add_argument("--seeds", type=parse_seeds, metavar="0-4", help="one run per seed, one after another")
    parser.add_argument("--debug", action="store_true", help="one process and tiny batches, done in seconds")
    about = "check everything and print what would run, or a job's script; train nothing"
    parser.add_argument("--dry-run", action="store_true", help=about)
    add_common(parser)


def run_train(args: argparse.Namespace) -> int:
    from tiltyard.cli import jobs

    profile = jobs.job_profile(args.on)
    _check_options(args, profile)
    from tiltyard.api import create_run, fresh_setup
    from tiltyard.engines.local import PRELOAD
    from tiltyard.processes.fork_server import ForkServer
    from tiltyard.training import preflight

    code, seeds = EXIT_DONE, args.seeds or [None]
    with data_stdout() as data, ForkServer(PRELOAD) as server:
        own, as_job = (server, False) if profile is None else (None, True)
        prepared = preflight.prepare(
            args.target, args.overrides, profile=args.on, debug=args.debug, as_job=as_job, server=own
        )
        if args.expect is not None:
            args.expect.check(prepared.experiment)
        if profile is not None:
            return jobs.train(prepared, profile, seeds, args, data)
        if args.dry_run:
            return _print_plan(prepared, server, data)
        for seed in seeds:
            run = create_run(prepared, seed=seed)
            try:
                result = _train_here(run, fresh_setup(run, prepared), server, args, data)
            except TiltyardError as error:
                if len(seeds) == 1:
                    raise
                report(error)  # the other seeds still run
                result = exit_code(error)
            code = code or result
            if result not in (EXIT_DONE, EXIT_FAILED):  # a signal stops the other seeds too
                break
    return code


def configure_resume(parser: argparse.ArgumentParser) -> None:
    add(parser, "run", "overrides", "--trust-code", "--here")
    add_common(parser)


def run_resume(args: argparse.Namespace) -> int:
    from tiltyard.cli import jobs
    from tiltyard.engines.local import PRELOAD
    from tiltyard.processes.fork_server import ForkServer
    from tiltyard.run.folder import find
    from tiltyard.slurm.job_state import refuse_queued
    from tiltyard.training import resume

    with data_stdout() as data, ForkServer(PRELOAD) as server:
        found = find(args.run)
        refuse_queued(found)
        profile = None if args.here else jobs.profile_of(found, args.trust_code)
        _check_options(args, profile)
        own = server if profile is None else None
        run, setup = resume.prepare_resume(found, args.overrides, trust_code=args.trust_code, server=own)
        if args.expect is not None:
            args.expect.check(setup.experiment)
        if profile is not None:
            return jobs.resume(run, profile, setup.experiment, args, data)
        return _train_here(run, setup, server, args, data)


def configure_fork(parser: argparse.ArgumentParser) -> None:
    add(parser, "run", "overrides", "--trust-code", "--here")
    about = "checkpoint to start from: its env steps, or best (default: the newest)"
    parser.add_argument("--at", type=parse_at, metavar="STEP|best", help=about)
    about = "train from scratch with the settings schedule of this policy of a population"
    parser.add_argument("--replay", metavar="POLICY", help=about)
    add_common(parser)


def run_fork(args: argparse.Namespace) -> int:
    from tiltyard.api import create_run, fresh_setup
    from tiltyard.cli import jobs
    from tiltyard.engines.local import PRELOAD
    from tiltyard.processes.fork_server import ForkServer
    from tiltyard.run.folder import find
    from tiltyard.training import preflight

    if args.replay is not None and args.at is not None:
        raise UseError("--replay starts from scratch, but --at selects a checkpoint", "use one of them")
    with data_stdout() as data, ForkServer(PRELOAD) as server:
        parent = find(args.run)
        sys.stderr.write("".join(f"{complaint}\n" for complaint in parent.damage()))
        profile = None if args.here else jobs.profile_of(parent, args.trust_code)
        _check_options(args, profile)
        own, as_job = (server, False) if profile is None else (None, True)
        options: dict[str, Any] = {"trust_code": args.trust_code, "as_job": as_job, "server": own}
        if args.replay is None:
            prepared = preflight.prepare_fork(args.run, args.overrides, at=args.at, **options)
        else:
            prepared = preflight.prepare_repeat(args.run, args.replay, args.overrides, **options)
        if args.expect is not None:
            args.expect.check(prepared.experiment)
        if profile is not None:
            return jobs.train(prepared, profile, [None], args, data)
        run = create_run(prepared)
        return _train_here(run, fresh_setup(run, prepared), server, args, data)


# ------------------------------------------------------------------------------------------------ shared


def _check_options(args: argparse.Namespace, profile: Profile | None) -> None:
    """UseError for options that do not fit where the run is executed; `profile` is that of a job."""
    if profile is None and args.detach:
        raise UseError("--detach is for jobs", "choose a profile with launcher: slurm by --on")
    if profile is not None and args.pdb:
        raise UseError("--pdb needs a terminal, which a job does not have", "remove --pdb, or train on this machine")
    if args.expect is not None and args.detach:
        raise UseError("--expect waits for the end of the run, but --detach does not", "remove one of them")


def _print_plan(prepared: CheckedExperiment, server: ForkServer, data: TextIO) -> int:
    """Print the opening lines of the run that would be trained. Its engine is started, but makes no step."""
    from tiltyard.engines import make_engine
    from tiltyard.run.folder import Run
    from tiltyard.training.attempt import opening_lines

    experiment, copies = prepared.copies.named_in(prepared.experiment), prepared.copies
    base = (copies.folder,) if copies.ids else prepared.loaded.base
    engine = make_engine(experiment, prepared.spec, base, server=server, net=prepared.net)
    try:
        run = Run(prepared.root / experiment.run_name / "NNNN-new-run")
        data.write("".join(f"{line}\n" for line in opening_lines(run, prepared.experiment, prepared.spec, engine)))
    finally:
        engine.close()
    sys.stderr.write("every check passed; nothing was made or trained\n")
    return EXIT_DONE


def _train_here(run: Run, setup: AttemptSetup, server: ForkServer, args: argparse.Namespace, data: TextIO) -> int:
    from tiltyard.api import run_training

    try:
        outcome = run_training(run, setup, server, live=False if args.plain else None)
    except UseError:
        raise
    except Exception as error:  # from an env, a model or torch
        if not args.pdb:
            raise _as_error(run, error) from error
        _debug(error)
        return EXIT_FAILED
    facts = {"state": outcome.state, "reason": outcome.reason, "progress": asdict(outcome.progress)}
    write_outcome(data, run, args.json, **facts, metrics=outcome.latest)
    if args.expect is not None and outcome.state == "finished" and not args.expect.report(run, outcome.latest):
        return EXIT_FAILED
    return outcome.exit_code


def _debug(error: BaseException) -> None:
    """Open the debugger at the original error: in the env or model, if that raised it."""
    import pdb
    import traceback

    traceback.print_exception(error)
    while error.__cause__ is not None:
        error = error.__cause__
    pdb.post_mortem(error.__traceback__)


def _as_error(run: Run, error: Exception) -> TiltyardError:
    """A failure of training as one sentence; the traceback is in the run folder."""
    if isinstance(error, TiltyardError):
        return error
    if class_of(error) != "final":
        return ResumableError(str(error), f"continue with: tiltyard resume {run.typed}")
    hint = f"the traceback is in {os.path.relpath(run.folder)}/error.txt; --pdb opens the debugger there"
    return TiltyardError(f"{type(error).__name__}: {error}", hint)
