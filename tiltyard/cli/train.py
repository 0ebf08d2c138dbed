"""`train`, `resume` and `fork`: thin faces of tiltyard.api and its checks, plus seeds, expectations and the debugger.

A profile whose launcher is slurm makes a job of the run; what happens then is in jobs.py.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TextIO

from tiltyard.cli import data_to, report
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, TiltyardError, UseError

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.run.folder import Run
    from tiltyard.training.attempt import AttemptSetup
    from tiltyard.training.loop import Outcome

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
MOST_SEEDS = 1000
SHORT = {"return": "eval/return", "train_return": "train/return"}  # as below `stop`


@dataclass(frozen=True)
class Expectation:
    """`return>=475`: a metric, a comparison, a number."""

    text: str
    metric: str
    comparison: str
    number: float

    @staticmethod
    def parse(text: str) -> Expectation:
        match = re.fullmatch(r"\s*([\w/.-]+)\s*(>=|<=|==|>|<)\s*(\S+)\s*", text)
        try:
            number = float(match[3]) if match else float("nan")
        except ValueError:
            number = float("nan")
        if match is None or number != number:
            raise UseError(f"--expect {text!r} is not METRIC>=NUMBER", "write --expect 'return>=475'")
        return Expectation(text, SHORT.get(match[1], match[1]), match[2], number)

    def check(self, experiment: Experiment) -> None:
        """UseError when nothing that is about to be trained can meet it: its metric will not be recorded."""
        from tiltyard.training.preflight import evaluates, require_metric

        require_metric(self.metric, f"--expect {self.text!r}: {self.metric}", also=[*SHORT])
        if self.metric.startswith("eval/") and not evaluates(experiment):
            raise UseError(
                f"--expect {self.text!r} needs an evaluation, and eval.every = 0 and eval.at_end = false",
                "set eval.at_end=true, or expect train_return",
            )
        if self.metric in ("eval/return_low", "eval/return_high") and experiment.eval.episodes == 1:
            raise UseError(
                f"--expect {self.text!r}: one episode has no interval, and eval.episodes = 1",
                "set eval.episodes higher",
            )

    def missed(self, run: Run, latest: dict[str, float]) -> str | None:
        """Why it is not met, or None."""
        from tiltyard.run import metrics

        value = latest.get(self.metric)
        if value is None:  # speed and time are recorded only
            value = metrics.latest(metrics.read(run), self.metric)
        if value is None:
            return f"expected {self.text}, but {self.metric} was never recorded"
        if not COMPARISONS[self.comparison](value, self.number):
            return f"expected {self.text}, but {self.metric} is {value:.6g}"
        return None


def parse_seeds(text: str) -> list[int]:
    """`0-4`, `1,5,9` or both."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if match is None:
            raise UseError(f"--seeds {text!r} is not a list of seeds", "write --seeds 0-4 or --seeds 1,5,9")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MOST_SEEDS or len(seeds) + last - first >= MOST_SEEDS:
            raise UseError(f"--seeds {text!r}: from 1 to {MOST_SEEDS} seeds, growing", "write --seeds 0-4")
        seeds += range(first, last + 1)
    if len(set(seeds)) != len(seeds):
        raise UseError(f"--seeds {text!r} names a seed twice", "each seed is one run")
    return seeds


# ------------------------------------------------------------------------------------------------ verbs


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expect", metavar="'METRIC>=NUMBER'", help="exit 1 when the finished run misses this, e.g. 'return>=475'"
    )
    parser.add_argument("--pdb", action="store_true", help="open the debugger where it crashed")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live screen")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON on stdout")
    parser.add_argument("--detach", action="store_true", help="a job: submit it and return, do not follow it")


def _trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust-code", action="store_true", help="run plug-in code from another user's run folder")
    parser.add_argument("--here", action="store_true", help="on this machine, whatever the run's profile says")


def configure_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="experiment file (YAML) or env id")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings, e.g. algo.lr=3e-4")
    parser.add_argument("--on", metavar="PROFILE", help="profile of the site file to run with")
    parser.add_argument("--seeds", metavar="0-4", help="one run per seed, one after another")
    parser.add_argument(
        "--debug", action="store_true", help="everything in one process with tiny batches, over in seconds"
    )
    parser.add_argument("--dry-run", action="store_true", help="a job: print its script, and make nothing")
    _common(parser)


def run_train(args: argparse.Namespace) -> int:
    expectation = Expectation.parse(args.expect) if args.expect else None
    seeds = parse_seeds(args.seeds) if args.seeds else [None]
    from tiltyard import api
    from tiltyard.cli import jobs
    from tiltyard.training import preflight

    profile = jobs.job_profile(args.on)
    jobs.check_words(args, profile, expectation)
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
            run = api.create_run(prepared, seed=seed)
            try:
                result = _train_here(run, api.fresh_setup(run, prepared.spec), args, expectation, data)
            except TiltyardError as error:
                if len(seeds) == 1:
                    raise
                report(error)  # one seed that fails does not take the others with it
                result = error.exit_code
            code = code or result
            if result not in (EXIT_DONE, EXIT_FAILED):  # stopped by a signal: that ends the other seeds too
                break
    return code


def configure_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run: its id, folder or unique end of its name; `last` is the newest")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings, e.g. stop.env_steps=2e6")
    _trust(parser)
    _common(parser)


def run_resume(args: argparse.Namespace) -> int:
    expectation = Expectation.parse(args.expect) if args.expect else None
    from tiltyard.cli import jobs
    from tiltyard.run.folder import find
    from tiltyard.slurm.job_state import refuse_queued
    from tiltyard.training import resume

    with data_stdout() as data:
        meant = find(args.run)
        refuse_queued(meant)
        profile = None if args.here else jobs.profile_of(meant)
        jobs.check_words(args, profile, expectation)
        run, setup = resume.prepare_resume(meant, args.overrides, trust_code=args.trust_code)
        if expectation is not None:
            expectation.check(setup.experiment)
        if profile is not None:
            return jobs.hand_over(run, profile, setup.experiment, args, expectation, data)
        return _train_here(run, setup, args, expectation, data)


def configure_fork(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run to start from")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings, e.g. algo.lr=1e-4")
    parser.add_argument("--at", metavar="STEP|best", help="checkpoint: env steps, or best; the newest when left out")
    parser.add_argument(
        "--replay", metavar="POLICY", help="from scratch and alone, with the settings that this one of a population had"
    )
    _trust(parser)
    _common(parser)


def run_fork(args: argparse.Namespace) -> int:
    expectation = Expectation.parse(args.expect) if args.expect else None
    at = parse_at(args.at)
    if args.replay is not None and at is not None:
        raise UseError("--replay starts from scratch, and --at chooses a checkpoint", "give one of them")
    from tiltyard import api
    from tiltyard.cli import jobs
    from tiltyard.run.folder import find
    from tiltyard.training import preflight, resume

    with data_stdout() as data:
        profile = None if args.here else jobs.profile_of(find(args.run))
        jobs.check_words(args, profile, expectation)
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
        run = api.create_run(prepared)
        setup = api.fresh_setup(run, prepared.spec) if args.replay is None else resume.prepare_resume(run)[1]
        return _train_here(run, setup, args, expectation, data)


def parse_at(text: str | None) -> int | str | None:
    """A checkpoint's env steps (1_000_000, 1e6) or `best`."""
    if text is None or text == "best":
        return text
    try:
        number = float(text.replace("_", "").replace(",", ""))
    except ValueError:
        number = -1.0
    if not (0 <= number < 1e18 and number.is_integer()):
        raise UseError(
            f"--at {text!r} is neither a number of env steps nor `best`", "`tiltyard show RUN` lists checkpoints"
        )
    return int(number)


# ------------------------------------------------------------------------------------------------ shared


def _train_here(
    run: Run, setup: AttemptSetup, args: argparse.Namespace, expectation: Expectation | None, data: TextIO
) -> int:
    from tiltyard import api

    try:
        outcome = api.run_training(run, setup, live=False if args.plain else None)
    except UseError:
        raise
    except Exception as error:  # whatever an env, a model or torch raises is told the same way
        if not args.pdb:
            raise _as_told(run, error) from error
        _debug(error)
        return EXIT_FAILED
    missed = expectation.missed(run, outcome.latest) if expectation and outcome.state == "finished" else None
    _print_outcome(run, outcome, args.json, data)
    if missed:
        sys.stderr.write(f"error: {missed}\n")
        return EXIT_FAILED
    return outcome.exit_code


def _debug(error: BaseException) -> None:
    """The debugger where it really went wrong: in the env or model, if that is what raised."""
    import pdb
    import traceback

    traceback.print_exception(error)
    while error.__cause__ is not None:
        error = error.__cause__
    pdb.post_mortem(error.__traceback__)


def _as_told(run: Run, error: Exception) -> TiltyardError:
    """Any failure of a training as one sentence; the whole traceback is in the run folder."""
    if isinstance(error, TiltyardError):
        return error
    return TiltyardError(
        f"{type(error).__name__}: {error}",
        f"the traceback is in {os.path.relpath(run.folder)}/error.txt; --pdb stops there",
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


@contextmanager
def data_stdout() -> Iterator[TextIO]:
    """The real stdout, for data; meanwhile whatever else this process prints, C libraries included, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    raw = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        with data_to(raw, sys.stdout.encoding) as data, redirect_stdout(sys.stderr):
            yield data
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        raw.close()
