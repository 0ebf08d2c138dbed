"""The Python face: from a description to a trained policy, in this process. The command line uses the same functions.

    train(TARGET)   load settings -> probe env, build net, check memory -> create folder -> training loop
    resume(RUN)     same folder, newest valid checkpoint, perhaps changed settings; checked before it is locked
    fork(RUN)       new folder that starts from a copy of one checkpoint, lineage recorded
    iterate(...)    train or resume in a loop that the caller drives

Nothing is created or changed before every check has passed (training.preflight, training.resume).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import Target
from tiltyard.config.site import load_site, pick_profile
from tiltyard.engines.local import PRELOAD
from tiltyard.errors import UseError
from tiltyard.processes.fork_server import ForkServer
from tiltyard.run import checkpoint
from tiltyard.run.create import Source, create
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.run.status import STATUS
from tiltyard.track.console import Screen
from tiltyard.training.attempt import AttemptSetup
from tiltyard.training.loop import Outcome, Training, open_training
from tiltyard.training.preflight import CheckedExperiment, prepare, prepare_fork
from tiltyard.training.resume import prepare_resume


def train(
    target: Target | Experiment = None,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    live: bool | None = None,
    **settings: Any,
) -> Run:
    """Train an experiment in a new run folder and return the run: train(env=MyEnv, model=MyModel, seed=3).

    The target is a YAML file, an env (id, class or function), a mapping or an Experiment; `settings` are settings by
    section, with classes and functions or their names. A profile that submits jobs is refused.
    """
    with ForkServer(PRELOAD) as server:
        checked = _prepare_here(target, overrides, settings, profile, server)
        run = create_run(checked)
        run_training(run, fresh_setup(run, checked), server, live=live)
    return run


def resume(
    source: Run | str | Path, overrides: Sequence[str] = (), *, live: bool | None = None, trust_code: bool = False
) -> Run:
    """Continue a run, with changed settings if given: `resume(run, ["stop.env_steps=2e6"])` trains it longer.

    A run of another user is continued only with `trust_code`.
    """
    with ForkServer(PRELOAD) as server:
        run, setup = prepare_resume(source, overrides, trust_code=trust_code, server=server)
        run_training(run, setup, server, live=live)
    return run


def fork(
    source: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    at: int | str | None = None,
    live: bool | None = None,
    trust_code: bool = False,
    **settings: Any,
) -> Run:
    """Start a new run from a checkpoint of another run, with changed settings (`settings` as in `train`)."""
    with ForkServer(PRELOAD) as server:
        checked = prepare_fork(source, overrides, settings=settings, at=at, trust_code=trust_code, server=server)
        run = create_run(checked)
        run_training(run, fresh_setup(run, checked), server, live=live)
    return run


@contextmanager
def iterate(
    target: Target | Experiment | Run = None,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    live: bool | None = None,
    trust_code: bool = False,
    **settings: Any,
) -> Iterator[Training]:
    """Train as `train` does, or continue a Run or run folder as `resume` does, in a loop that you drive:

        with tiltyard.iterate("CartPole-v1") as training:
            for report in training:
                if report.metrics.get("train/return", 0) > 400:
                    training.set({"algo.lr": 1e-4})

    Leaving the block saves the run and releases its lock.
    """
    with ForkServer(PRELOAD) as server:
        if isinstance(target, Run) or (isinstance(target, str | Path) and (Path(target) / STATUS).is_file()):
            if settings:
                raise UseError("a run continues with its own settings", 'give changes as overrides: ["algo.lr=1e-4"]')
            run, setup = prepare_resume(target, overrides, trust_code=trust_code, server=server)
        else:
            checked = _prepare_here(target, overrides, settings, profile, server)
            run = create_run(checked)
            setup = fresh_setup(run, checked)
        with _with_screen(run, setup, server, live) as training:
            yield training


# ------------------------------------------------------------------------------------------------ folders


def _prepare_here(
    target: Target | Experiment,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    profile: str | None,
    server: ForkServer,
) -> CheckedExperiment:
    if profile is not None and pick_profile(load_site()[0], profile).launcher != "local":
        raise UseError(f"profile {profile!r} submits a job; train() runs here", f"tiltyard train ... --on {profile}")
    return prepare(target, overrides, settings=settings, profile=profile, server=server)


def create_run(checked: CheckedExperiment, *, seed: int | None = None) -> Run:
    """Make the run folder, with another seed if given."""
    loaded, origin = checked.loaded, checked.origin
    experiment = loaded.experiment if seed is None else loaded.experiment.model_copy(update={"seed": seed})
    source = Source(
        base=loaded.base,
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        text=loaded.source_text,
        name=loaded.source.name if loaded.source else None,
        parent=origin.lineage() if origin is not None else None,
        copies=checked.copies,
        profile=checked.profile,
    )
    run = create(checked.root, experiment, source, schedule=checked.schedule)
    if origin is not None:
        checkpoint.copy_into(run, origin.checkpoint, score=origin.score)
        message = f"forked from {origin.parent.id} at env step {origin.checkpoint.env_steps:,}"
        log_event(run, "forked", message, changes=origin.changes)
    return run


def fresh_setup(run: Run, checked: CheckedExperiment) -> AttemptSetup:
    """The setup of the first attempt at a new run."""
    experiment = run.experiment()
    same = experiment.seed == checked.experiment.seed  # runs with other seeds build their own nets
    schedule = checked.schedule or SettingsSchedule()
    return AttemptSetup(experiment, experiment, checked.spec, checked.net if same else None, schedule=schedule)


# ------------------------------------------------------------------------------------------------ training


def run_training(
    run: Run, setup: AttemptSetup, server: ForkServer | None = None, *, live: bool | None = None
) -> Outcome:
    """Train the run in this process until it is finished or stopped, and print what to type next."""
    while True:
        with _with_screen(run, setup, server, live) as training:
            for _ in training:
                pass
        assert training.outcome is not None
        if not training.outcome.continues:
            return training.outcome
        setup = prepare_resume(run, trust_code=setup.trust_code, server=server)[1]


@contextmanager
def _with_screen(run: Run, setup: AttemptSetup, server: ForkServer | None, live: bool | None) -> Iterator[Training]:
    screen = Screen(run, setup.experiment, live=live)
    try:
        with open_training(run, setup, server, screen) as training:
            yield training
        outcome = training.outcome
        assert outcome is not None
        screen.finish(f"{outcome.state}: {outcome.reason}", [] if outcome.continues else next_commands(run, outcome))
    finally:
        screen.close()


def next_commands(run: Run, outcome: Outcome) -> list[str]:
    """The run's folder and the commands to type next."""
    lines = [f"run folder  {os.path.relpath(run.folder)}"]
    if outcome.state == "finished" and not outcome.trained:
        longer = f"tiltyard resume {run.typed} {_further(outcome)}"
        lines += [f"next        nothing left to train; to continue: {longer}"]
    elif outcome.state == "finished":
        film = " --video" if outcome.filmable else ""
        lines += [f"next        tiltyard eval {run.typed}{film}", f"            tiltyard show {run.typed}"]
    else:
        lines += [f"next        tiltyard resume {run.typed}"]
    return lines


def _further(outcome: Outcome) -> str:
    """The override that continues a finished run: twice its budget, or without the goal it has reached."""
    setting = outcome.reason.partition("=")[0]
    reached = getattr(outcome.progress, setting.removeprefix("stop."), None)
    return f"{setting}={'null' if reached is None else 2 * math.ceil(reached)}"
