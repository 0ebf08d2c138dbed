"""The Python face: from a description to a trained policy, in this process. The command line uses the same functions.

    train(TARGET)   load settings -> probe env, build model once, check memory -> create folder -> training loop
    resume(RUN)     same folder, newest valid checkpoint, perhaps changed settings; checked before it is locked
    fork(RUN)       new folder that starts from a copy of one checkpoint, lineage recorded

Nothing is created or changed before every check has passed (training.preflight, training.resume).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.site import load_site, pick_profile
from tiltyard.errors import UseError
from tiltyard.run import checkpoint
from tiltyard.run.create import Source, create
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.track.screen import Screen
from tiltyard.training.attempt import AttemptSetup
from tiltyard.training.loop import Outcome, train_run
from tiltyard.training.preflight import CheckedExperiment, prepare, prepare_fork
from tiltyard.training.resume import prepare_resume
from tiltyard.types import EnvSpec


def train(
    target: str | Path | Mapping[str, Any] | Experiment,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    live: bool | None = None,
) -> Run:
    """Train an experiment (YAML file, env id, mapping or Experiment) in a new run folder and return the run.

    A profile that submits jobs is refused.
    """
    if profile is not None and pick_profile(load_site()[0], profile).launcher != "local":
        raise UseError(f"profile {profile!r} submits a job; train() runs here", f"tiltyard train ... --on {profile}")
    checked = prepare(target, overrides, profile=profile)
    run = create_run(checked)
    run_training(run, fresh_setup(run, checked.spec), live=live)
    return run


def resume(
    source: Run | str | Path, overrides: Sequence[str] = (), *, live: bool | None = None, trust_code: bool = False
) -> Run:
    """Continue a run, with changed settings if given: `resume(run, ["stop.env_steps=2e6"])` trains it longer.

    Its plug-ins are executed only if the run belongs to this user, or with `trust_code`.
    """
    run, setup = prepare_resume(source, overrides, trust_code=trust_code)
    run_training(run, setup, live=live)
    return run


def fork(
    source: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    at: int | str | None = None,
    live: bool | None = None,
    trust_code: bool = False,
) -> Run:
    """Start a new run from a checkpoint of another run, with changed settings."""
    checked = prepare_fork(source, overrides, at=at, trust_code=trust_code)
    run = create_run(checked)
    run_training(run, fresh_setup(run, checked.spec), live=live)
    return run


# ------------------------------------------------------------------------------------------------ folders


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


def fresh_setup(run: Run, spec: EnvSpec) -> AttemptSetup:
    """The setup of the first attempt at a new run."""
    experiment = run.experiment()
    return AttemptSetup(experiment, experiment, spec)


# ------------------------------------------------------------------------------------------------ training


def run_training(run: Run, setup: AttemptSetup, *, live: bool | None = None) -> Outcome:
    """Train the run in this process, segment by segment of its settings schedule, and print what to type next."""
    while True:
        screen = Screen(run, setup.experiment, live=live)
        try:
            outcome = train_run(run, setup, screen=screen)
            lines = [] if outcome.has_next_segment else next_commands(run, outcome)
            screen.finish(f"{outcome.state}: {outcome.reason}", lines)
        finally:
            screen.close()
        if not outcome.has_next_segment:
            return outcome
        setup = prepare_resume(run, trust_code=True)[1]  # its code was accepted for the first segment


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
