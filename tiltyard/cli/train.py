"""`train`, `resume` and `fork`: tiltyard.api on the command line, with seeds, expectations and the debugger.

With a profile whose launcher is slurm the run becomes a job: see jobs.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from tiltyard.cli import report
from tiltyard.cli.output import data_stdout
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, TiltyardError, UseError

if TYPE_CHECKING:
    from tiltyard.cli.expectation import Expectation
    from tiltyard.config.site import Profile
    from tiltyard.run.folder import Run
    from tiltyard.training.attempt import AttemptSetup
    from tiltyard.training.loop import Outcome


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expect",
        metavar="'METRIC>=NUMBER'",
        help="exit with code 1 if the finished run does not meet this, e.g. 'return>=475'",
    )
    parser.add_argument("--pdb", action="store_true", help="open the debugger where the run crashed")
    parser.add_argument("--plain", action="store_true", help="print lines instead of the live screen")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON on stdout")
    parser.add_argument("--detach", action="store_true", help="for a job: submit it and return instead of following it")


def _trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust-code", action="store_true", help="run plug-in code from another user's run folder")
    parser.add_argument(
        "--here", action="store_true", help="run on this machine, even if the run's profile submits jobs"
    )


def configure_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="experiment file (YAML) or env id")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings, e.g. algo.lr=3e-4")
    parser.add_argument("--on", metavar="PROFILE", help="a profile of the site file to run with")
    parser.add_argument("--seeds", metavar="0-4", help="one run per seed, one after another")
    parser.add_argument("--debug", action="store_true", help="one process and tiny batches, done in seconds")
    parser.add_argument("--dry-run", action="store_true", help="for a job: print its script and submit nothing")
    _common(parser)


def run_train(args: argparse.Namespace) -> int:
    expectation, profile = _expectation(args), None
    seeds: Sequence[int | None] = [None]
    if args.seeds:
        from tiltyard.cli.arguments import parse_seeds

        seeds = parse_seeds(args.seeds)
    if args.on:
        from tiltyard.cli import jobs

        profile = jobs.job_profile(args.on)
    _check_options(args, profile, expectation)
    from tiltyard.api import create_run, fresh_setup
    from tiltyard.training import preflight

    code = EXIT_DONE
    with data_stdout() as data:
        prepared = preflight.prepare(
            args.target, args.overrides, profile=args.on, debug=args.debug, as_job=profile is not None
        )
        if expectation is not None:
            expectation.check(prepared.experiment)
        if profile is not None:
            return jobs.train(prepared, profile, seeds, args, expectation, data)
        for seed in seeds:
            run = create_run(prepared, seed=seed)
            try:
                result = _train_here(run, fresh_setup(run, prepared.spec), args, expectation, data)
            except TiltyardError as error:
                if len(seeds) == 1:
                    raise
                report(error)  # the other seeds still run
                result = error.exit_code
            code = code or result
            if result not in (EXIT_DONE, EXIT_FAILED):  # a signal stops the other seeds too
                break
    return code


def configure_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run: its id, folder or unique end of its name; `last` is the newest")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings, e.g. stop.env_steps=2e6")
    _trust(parser)
    _common(parser)


def run_resume(args: argparse.Namespace) -> int:
    expectation = _expectation(args)
    from tiltyard.cli import jobs
    from tiltyard.run.folder import find
    from tiltyard.slurm.job_state import refuse_queued
    from tiltyard.training import resume

    with data_stdout() as data:
        found = find(args.run)
        refuse_queued(found)
        profile = None if args.here else jobs.profile_of(found)
        _check_options(args, profile, expectation)
        run, setup = resume.prepare_resume(found, args.overrides, trust_code=args.trust_code)
        if expectation is not None:
            expectation.check(setup.experiment)
        if profile is not None:
            return jobs.resume(run, profile, setup.experiment, args, expectation, data)
        return _train_here(run, setup, args, expectation, data)


def configure_fork(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run to start from")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings, e.g. algo.lr=1e-4")
    parser.add_argument(
        "--at", metavar="STEP|best", help="checkpoint to start from: its env steps, or best (default: the newest)"
    )
    parser.add_argument(
        "--replay",
        metavar="POLICY",
        help="train from scratch with the settings schedule of this policy of a population",
    )
    _trust(parser)
    _common(parser)


def run_fork(args: argparse.Namespace) -> int:
    expectation = _expectation(args)
    from tiltyard.api import create_run, fresh_setup
    from tiltyard.cli import jobs
    from tiltyard.cli.arguments import parse_at
    from tiltyard.run.folder import find
    from tiltyard.training import preflight, resume

    at = parse_at(args.at)
    if args.replay is not None and at is not None:
        raise UseError("--replay starts from scratch, but --at selects a checkpoint", "use one of them")
    with data_stdout() as data:
        profile = None if args.here else jobs.profile_of(find(args.run))
        _check_options(args, profile, expectation)
        trusted, as_job = args.trust_code, profile is not None
        if args.replay is None:
            prepared = preflight.prepare_fork(args.run, args.overrides, at=at, trust_code=trusted, as_job=as_job)
        else:
            prepared = preflight.prepare_repeat(
                args.run, args.replay, args.overrides, trust_code=trusted, as_job=as_job
            )
        if expectation is not None:
            expectation.check(prepared.experiment)
        if profile is not None:
            return jobs.train(prepared, profile, [None], args, expectation, data)
        run = create_run(prepared)
        setup = fresh_setup(run, prepared.spec) if args.replay is None else resume.prepare_resume(run)[1]
        return _train_here(run, setup, args, expectation, data)


# ------------------------------------------------------------------------------------------------ shared


def _expectation(args: argparse.Namespace) -> Expectation | None:
    if not args.expect:
        return None
    from tiltyard.cli.expectation import Expectation

    return Expectation.parse(args.expect)


def _check_options(args: argparse.Namespace, profile: Profile | None, expectation: Expectation | None) -> None:
    """UseError for options that do not fit where the run is executed; `profile` is that of a job."""
    if profile is None:
        for name in ("detach", "dry_run"):
            if getattr(args, name, False):
                raise UseError(
                    f"--{name.replace('_', '-')} is for jobs", "choose a profile with launcher: slurm by --on"
                )
    elif args.pdb:
        raise UseError("--pdb needs a terminal, which a job does not have", "remove --pdb, or train on this machine")
    elif expectation is not None and args.detach:
        raise UseError("--expect waits for the end of the run, but --detach does not", "remove one of them")


def _train_here(
    run: Run, setup: AttemptSetup, args: argparse.Namespace, expectation: Expectation | None, data: TextIO
) -> int:
    from tiltyard.api import run_training

    try:
        outcome = run_training(run, setup, live=False if args.plain else None)
    except UseError:
        raise
    except Exception as error:  # from an env, a model or torch
        if not args.pdb:
            raise _as_error(run, error) from error
        _debug(error)
        return EXIT_FAILED
    missed = expectation.missed(run, outcome.latest) if expectation and outcome.state == "finished" else None
    _print_outcome(run, outcome, args.json, data)
    if missed:
        sys.stderr.write(f"error: {missed}\n")
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
    return TiltyardError(
        f"{type(error).__name__}: {error}",
        f"the traceback is in {os.path.relpath(run.folder)}/error.txt; --pdb opens the debugger there",
    )


def _print_outcome(run: Run, outcome: Outcome, as_json: bool, data: TextIO) -> None:
    if as_json:
        whole = {
            "run": run.id,
            "folder": str(run.folder),
            "state": outcome.state,
            "reason": outcome.reason,
            "progress": asdict(outcome.progress),
            "metrics": outcome.latest,
        }
        data.write(json.dumps(whole) + "\n")
    else:
        data.write(f"{os.path.relpath(run.folder)}\n")
    data.flush()
