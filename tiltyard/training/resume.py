"""How a run would go on: its checkpoint, its settings with what is changed now, everything checked, nothing written.

What may change from one attempt to the next, and what would make another run of it, is decided here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import as_overrides, load, override_list, parse_override, refuse_presets
from tiltyard.config.reference import flat
from tiltyard.errors import UseError
from tiltyard.run.folder import Run
from tiltyard.run.lock import refuse_if_running
from tiltyard.run.redact import mask_command
from tiltyard.run.settings_schedule import WHOLE, Segment
from tiltyard.run.settings_schedule import read as read_schedule
from tiltyard.track import trackers
from tiltyard.training.attempt import AttemptSetup, starting_point
from tiltyard.training.preflight import check_metric, check_on_this_machine, resolve_run

# What a run is: changing one of these makes another run, which is what `fork` is for.
IDENTITY = ("env", "model", "policies", "match", "seed", "name", "engine")


def prepare_resume(
    source: Run | str | Path, overrides: Sequence[str] = (), *, trust_code: bool = False
) -> tuple[Run, AttemptSetup]:
    """A run and how it would go on: everything is checked, and not a byte of its folder has changed."""
    run = resolve_run(source)
    run.require_own_code(trust_code)
    refuse_if_running(run)
    found = run.experiment()
    words = override_list(overrides)
    refuse_presets("resume", words)
    asked = dict(map(parse_override, words))
    afresh = asked.get("resume") == "never"
    start = None if afresh else starting_point(run, found)[0]
    stretch, told = _stretch(run, start.env_steps if start is not None else 0, asked)
    before = settings = _changed(run, found, told)
    if words:
        settings = _changed(run, before, words)
        if settings.resume in ("auto", "never"):
            # Asked for in these very words, and for this attempt alone: what the run's file says is how it was made.
            settings = settings.model_copy(update={"resume": found.resume})
    _require_same_run(run, before, settings, words)
    run.enter_profile()
    spec = check_on_this_machine(settings, run.base, start.folder if start is not None else None)
    return run, AttemptSetup(found, settings, spec, tuple(mask_command([*told, *words])), afresh, stretch)


def _changed(run: Run, experiment: Experiment, words: Sequence[str]) -> Experiment:
    if not words:
        return experiment
    return load(experiment.model_dump(mode="json", by_alias=True), words, base=run.base).experiment


def _stretch(run: Run, env_steps: int, asked: Mapping[str, Any]) -> tuple[Segment, list[str]]:
    """The part of the run that comes now, and the settings that it is told to have and has not yet, as overrides."""
    stretches = read_schedule(run.folder)
    if stretches is None:
        return WHOLE, []
    stretch = stretches.at(env_steps)
    twice = sorted(set(asked) & set(stretch.settings))
    if twice:
        raise UseError(
            f"`resume` cannot change {twice[0]}: stretches.json of {run.id} says what it is from which env step on",
            f"start a run of your own from its checkpoint: tiltyard fork {run.typed} {twice[0]}=...",
        )
    now = dict(flat(run.experiment().model_dump(mode="json", by_alias=True)))
    new = {key: value for key, value in stretch.settings.items() if now.get(tuple(key.split("."))) != value}
    return stretch, as_overrides(new)


def _require_same_run(run: Run, before: Experiment, now: Experiment, overrides: Sequence[str]) -> None:
    """UseError for changes that make another run of it."""
    changed = [name for name in IDENTITY if getattr(before, name) != getattr(now, name)]
    if changed:
        raise UseError(
            f"`resume` cannot change {changed[0]}: it would be another run than {run.id}",
            f"start one from its checkpoint: tiltyard fork {run.typed} {shlex.join(overrides)}",
        )
    if now.resume != before.resume:
        raise UseError(
            f"resume = {now.resume}: {run.id} goes on from its own checkpoints",
            "start another run from that one: tiltyard fork CHECKPOINT",
        )
    if now.save.metric != before.save.metric:
        raise UseError(
            f"`resume` cannot change save.metric: the checkpoints of {run.id} are ranked by {before.save.metric}",
            f"start a run with scores of its own: tiltyard fork {run.typed} {shlex.join(overrides)}",
        )
    if now != before:
        check_metric(now)
    if now.track != before.track:
        trackers.check(now.track)
