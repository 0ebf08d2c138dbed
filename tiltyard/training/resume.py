"""Prepare the next attempt at a run: its checkpoint, its settings with changes, everything checked, nothing written.

What may change from one attempt to the next, and what makes it another run, is decided here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.fields import flat
from tiltyard.config.load import as_overrides, override_list, parse_override, refuse_presets
from tiltyard.config.ownership import TRUST_CODE
from tiltyard.errors import UseError
from tiltyard.processes.fork_server import ForkServer
from tiltyard.run import trust
from tiltyard.run.create import with_absolute_dataset
from tiltyard.run.folder import Run
from tiltyard.run.lock import refuse_if_running
from tiltyard.run.redact import mask_command
from tiltyard.run.settings_schedule import FILE, SettingsSchedule, may_change
from tiltyard.run.settings_schedule import read as read_schedule
from tiltyard.track import trackers
from tiltyard.training.attempt import AttemptSetup, find_start
from tiltyard.training.live_settings import with_settings
from tiltyard.training.preflight import check_metric, check_on_this_machine, resolve_run, start_early

# Changing one of these makes another run: use `fork`.
IDENTITY = ("env", "model", "policies", "match", "seed", "name", "engine")


def prepare_resume(
    source: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool = False,
    server: ForkServer | None = None,
) -> tuple[Run, AttemptSetup]:
    """The run and the setup of its next attempt. Everything is checked; the folder is unchanged."""
    run = resolve_run(source)
    if not trust_code:
        hint = f"start your own from its checkpoint: tiltyard fork {run.typed}; or {TRUST_CODE}"
        trust.require_own(run, f"how run {run.id} continues", hint)
    refuse_if_running(run)
    found = run.experiment()
    words = override_list(overrides)
    refuse_presets("resume", words)
    asked = dict(map(parse_override, words))
    from_scratch = asked.get("resume") == "never"
    start = None if from_scratch else find_start(run, found)[0]
    schedule = read_schedule(run.folder) or SettingsSchedule()
    scheduled = _scheduled(run, found, schedule.at(start.env_steps if start is not None else 0), asked)
    before = settings = with_settings(run, found, scheduled)
    trust.require_own_code(run, trust_code, before)
    if words:
        settings = with_absolute_dataset(with_settings(run, before, words))
        if settings.resume in ("auto", "never"):
            # `resume` holds for this attempt only; the run's file keeps what the run was created with.
            settings = settings.model_copy(update={"resume": found.resume})
    _require_same_run(run, before, settings, words)
    trust.enter_profile(run, trust_code)
    start_early(server, settings)
    spec, net = check_on_this_machine(settings, run.base, start.folder if start is not None else None)
    changes = tuple(mask_command([*scheduled, *words]))
    return run, AttemptSetup(found, settings, spec, net, changes, from_scratch, schedule, trust_code)


def _scheduled(run: Run, found: Experiment, settings: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The overrides that put scheduled settings into effect."""
    twice = sorted(set(asked) & set(settings))
    if twice:
        hint = f"start a new run from its checkpoint: tiltyard fork {run.typed} {twice[0]}=..."
        raise UseError(f"`resume` cannot change {twice[0]}: {FILE} of {run.id} sets it", hint)
    now = dict(flat(found.model_dump(mode="json", by_alias=True)))
    changes = {key: value for key, value in settings.items() if now.get(tuple(key.split("."))) != value}
    fixed = next((key for key in changes if not may_change(key)), None)
    if fixed is not None:
        message = f"{run.folder / FILE} changes {fixed}, which cannot change during a run"
        raise UseError(message, "remove it there; only settings of algo and env can, except their ids")
    return as_overrides(changes)


def _require_same_run(run: Run, before: Experiment, now: Experiment, overrides: Sequence[str]) -> None:
    """UseError for changes that would make it another run."""
    changed = [name for name in IDENTITY if getattr(before, name) != getattr(now, name)]
    if changed:
        hint = f"start one from its checkpoint: tiltyard fork {run.typed} {shlex.join(overrides)}"
        raise UseError(f"`resume` cannot change {changed[0]}: that would be another run than {run.id}", hint)
    if now.resume != before.resume:
        hint = "start a new run from that one: tiltyard fork CHECKPOINT"
        raise UseError(f"resume = {now.resume}: {run.id} continues from its own checkpoints", hint)
    if now.save.metric != before.save.metric:
        message = f"`resume` cannot change save.metric: the checkpoints of {run.id} are ranked by {before.save.metric}"
        hint = f"start a new run with other scores: tiltyard fork {run.typed} {shlex.join(overrides)}"
        raise UseError(message, hint)
    if now != before:
        check_metric(now)
    if now.track != before.track:
        trackers.check(now.track)
