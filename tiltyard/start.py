"""From a description to a trained policy: check everything, make the run folder, train it here.

    train(TARGET)   load settings -> probe env, build model once, check memory -> create folder -> training loop
    resume(RUN)     same folder, newest valid checkpoint, perhaps changed settings
    fork(RUN)       new folder that starts from a copy of one checkpoint, lineage recorded

Nothing is created before every check has passed. Command line and Python use these same functions.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltyard.config.combinations import ignored_settings
from tiltyard.config.experiment import Experiment
from tiltyard.config.load import Loaded, load, resolved_yaml
from tiltyard.config.place import runs_root
from tiltyard.config.site import load_site, pick_profile
from tiltyard.engines import check_engine
from tiltyard.envs.probe import probe
from tiltyard.errors import ConfigError, UseError, did_you_mean
from tiltyard.ledger import terms
from tiltyard.run import checkpoint, disk, metrics
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run, create, find
from tiltyard.run.lock import Lock
from tiltyard.run.masking import mask_command
from tiltyard.run.status import write_status
from tiltyard.track import mirrors
from tiltyard.track.screen import Screen
from tiltyard.training import Outcome, train_run
from tiltyard.types import Checkpoint, EnvSpec

# What a run is: changing one of these makes another run, which is what `fork` is for.
IDENTITY = ("env", "model", "seed", "name", "engine")


@dataclass(frozen=True)
class Prepared:
    """An experiment that has passed every check and only needs its folder."""

    loaded: Loaded
    root: Path
    spec: EnvSpec

    @property
    def experiment(self) -> Experiment:
        return self.loaded.experiment


def train(
    target: str | Path | Mapping[str, Any] | Experiment,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    live: bool | None = None,
) -> Run:
    """Train an experiment (YAML file, env id, mapping or Experiment) in a new run folder and return the run."""
    prepared = prepare(target, overrides, profile=profile)
    run = begin(prepared)
    carry_out(run, live=live, spec=prepared.spec)
    return run


def resume(
    source: Run | str | Path, overrides: Sequence[str] = (), *, live: bool | None = None, trust_code: bool = False
) -> Run:
    """Continue a run, with changed settings if given: `resume(run, ["stop.env_steps=2e6"])` trains it longer.

    The code of its plug-ins is run only when the run is this user's own, or with `trust_code`.
    """
    run = source if isinstance(source, Run) else find(str(source))
    run.require_own_code(trust_code)
    if overrides:
        change_settings(run, overrides)
    carry_out(run, live=live)
    return run


def fork(
    source: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    at: int | str | None = None,
    live: bool | None = None,
    trust_code: bool = False,
) -> Run:
    """A new run that starts from one of another run's checkpoints with changed settings."""
    run = branch(source, overrides, at=at, trust_code=trust_code)
    carry_out(run, live=live)
    return run


# ------------------------------------------------------------------------------------------------ before a folder


def prepare(
    target: str | Path | Mapping[str, Any] | Experiment,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    debug: bool = False,
) -> Prepared:
    """Settings loaded and everything checked that can be checked without writing: env, model, trackers, memory."""
    site, site_file = load_site()
    if isinstance(target, Experiment):
        target = target.model_dump(mode="json", by_alias=True)
    chosen = pick_profile(site, profile, site_file) if profile else None
    if chosen is not None:
        os.environ.update(chosen.environment)
    loaded = load(target, overrides, profile=chosen, debug=debug)
    root = runs_root()
    experiment = _with_found_sources(loaded.experiment, root)
    loaded = replace(loaded, experiment=experiment)
    continues = None if experiment.resume in ("auto", "never") else Path(experiment.resume)
    return Prepared(loaded, root, check(experiment, loaded.base, continues))


def check(experiment: Experiment, base: Sequence[Path], continues: Path | None) -> EnvSpec:
    """Probe the env in a child process, build the engine's model once, and look at memory and trackers.

    `continues` is the checkpoint to start from, if it is another run's.
    """
    mirrors.check(experiment.track)
    check_metric(experiment)
    ignored = list(ignored_settings(experiment))
    if ignored:
        raise ConfigError(ignored, "the model's settings")
    spec = probe(experiment.env, base=base, previous=experiment.model.previous)
    check_engine(experiment, spec, base, continues)
    return spec


def check_metric(experiment: Experiment) -> None:
    """`save.metric` must be something that is ever recorded."""
    metric, measured = experiment.save.metric, experiment.eval
    if metrics.describe(metric) is None:
        known = did_you_mean(metric, [each.name for each in metrics.METRICS])
        raise UseError(f"save.metric = {metric} is no metric", known or "docs/reference/metrics.md lists them")
    if metric.startswith("eval/") and measured.every == 0 and not measured.at_end and experiment.save.best > 1:
        raise UseError(f"save.best = {experiment.save.best} by {metric} needs evaluations", "set eval.every")


def _with_found_sources(experiment: Experiment, root: Path) -> Experiment:
    """`resume: PATH` and `model.init: RUN` as absolute checkpoint folders: they must mean the same anywhere later."""
    if experiment.resume not in ("auto", "never"):
        found = _checkpoint_of(experiment.resume, root, None)
        experiment = experiment.model_copy(update={"resume": str(found.folder)})
    if experiment.model.init:
        found = _checkpoint_of(experiment.model.init, root, None)
        model = experiment.model.model_copy(update={"init": str(found.folder)})
        experiment = experiment.model_copy(update={"model": model})
    return experiment


def _checkpoint_of(text: str, root: Path, at: int | str | None) -> Checkpoint:
    folder = Path(text).expanduser().absolute()
    if (folder / "manifest.json").is_file():
        return checkpoint.select(folder)
    return checkpoint.select(find(text, root), at)


# ------------------------------------------------------------------------------------------------ folders


def begin(prepared: Prepared, *, seed: int | None = None) -> Run:
    """Make the run folder; with another seed if asked."""
    loaded = prepared.loaded
    experiment = loaded.experiment if seed is None else loaded.experiment.model_copy(update={"seed": seed})
    return create(
        prepared.root,
        experiment,
        source_text=loaded.source_text,
        source_name=loaded.source.name if loaded.source else None,
        base=loaded.base,
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
    )


def change_settings(run: Run, overrides: Sequence[str]) -> None:
    """Rewrite the run's experiment.yaml with the changes; the old one stays as experiment.before-attempt-N.yaml."""
    before = run.experiment()
    loaded = load(before.model_dump(mode="json", by_alias=True), overrides, base=run.base)
    changed = [name for name in IDENTITY if getattr(before, name) != getattr(loaded.experiment, name)]
    if changed:
        raise UseError(
            f"`resume` cannot change {changed[0]}: it would be another run than {run.id}",
            f"start one from its checkpoint: tiltyard fork {run.id} {' '.join(overrides)}",
        )
    now = loaded.experiment
    if now.resume != before.resume and now.resume not in ("auto", "never"):
        raise UseError(
            f"resume = {now.resume}: {run.id} goes on from its own checkpoints",
            "start another run from that one: tiltyard fork CHECKPOINT",
        )
    if now.save.metric != before.save.metric:
        raise UseError(
            f"`resume` cannot change save.metric: the checkpoints of {run.id} are ranked by {before.save.metric}",
            f"start a run with scores of its own: tiltyard fork {run.id} {' '.join(overrides)}",
        )
    check_metric(now)
    with Lock(run):
        number = int(run.status().get("attempt", 0)) + 1
        shutil.copyfile(run.experiment_file, run.folder / f"experiment.before-attempt-{number}.yaml")
        disk.write_text(run.experiment_file, resolved_yaml(now))
        write_status(run, target_env_steps=now.stop.env_steps, tags=now.tags, notes=now.notes)
        changes = mask_command(overrides)
        log_event(run, "resumed", f"settings changed for attempt {number}: {' '.join(changes)}", overrides=changes)


def branch(
    source: Run | str | Path, overrides: Sequence[str], *, at: int | str | None = None, trust_code: bool = False
) -> Run:
    """The folder of a fork: the parent's settings with changes, and a copy of one checkpoint to start from."""
    root = runs_root()
    parent = source if isinstance(source, Run) else find(str(source), root)
    chosen = checkpoint.select(parent, at)
    parent.require_own_code(trust_code)
    before = parent.experiment()
    loaded = load(before.model_dump(mode="json", by_alias=True), overrides, base=parent.base)
    if loaded.experiment.model.init != before.model.init:
        raise UseError("a fork starts from its parent's checkpoint, not from model.init", "use `tiltyard train`")
    # A fork goes on from the copied checkpoint, whatever its parent was told to do.
    loaded = replace(loaded, experiment=loaded.experiment.model_copy(update={"resume": "auto"}))
    check(loaded.experiment, loaded.base, chosen.folder)
    changes = mask_command(overrides)
    run = create(
        root,
        loaded.experiment,
        source_text=None,
        source_name=None,
        base=loaded.base,
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        parent={"run": parent.id, "folder": str(parent.folder), "env_steps": chosen.env_steps, "changes": changes},
    )
    checkpoint.copy_into(run, chosen, score=chosen.score if terms(before) == terms(run.experiment()) else None)
    log_event(run, "forked", f"forked from {parent.id} at env step {chosen.env_steps:,}", changes=changes)
    return run


# ------------------------------------------------------------------------------------------------ training


def carry_out(run: Run, *, live: bool | None = None, spec: EnvSpec | None = None) -> Outcome:
    """Train the run in this process and say at the end what to type next. A `spec` just probed is not probed again."""
    screen = Screen(run, run.experiment(), live=live)
    try:
        outcome = train_run(run, screen=screen, spec=spec)
        screen.finish(f"{outcome.state}: {outcome.reason}", next_commands(run, outcome))
        return outcome
    finally:
        screen.close()


def next_commands(run: Run, outcome: Outcome) -> list[str]:
    """Where the run is and what one would type now."""
    lines = [f"run folder  {os.path.relpath(run.folder)}"]
    if outcome.state == "finished" and not outcome.trained:
        setting = outcome.reason.split("=")[0]
        lines += [f"next        nothing was left to train; to go on: tiltyard resume {run.id} {setting}=..."]
    elif outcome.state == "finished":
        film = " --video" if outcome.filmable else ""
        lines += [f"next        tiltyard eval {run.id}{film}", f"            tiltyard show {run.id}"]
    else:
        lines += [f"next        tiltyard resume {run.id}"]
    return lines
