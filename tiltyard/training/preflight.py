"""An experiment that has passed every check and only needs its folder: new, forked, or a policy's schedule replayed.

    prepare(TARGET)        load settings -> copy plug-ins -> probe env, build model once, check memory -> tune, if asked
    prepare_fork(RUN)      the same from a run's settings, with one of its checkpoints to start from
    prepare_replay(RUN)    the same with the settings that one policy of a population went through

Nothing is created or changed here but a temporary folder of copies; `start` makes the run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltyard.config.cross_checks import ignored_settings
from tiltyard.config.experiment import Experiment
from tiltyard.config.load import COMMAND_LINE, Loaded, as_overrides, load, refuse_presets
from tiltyard.config.site import apply_profile
from tiltyard.config.site_file import runs_root
from tiltyard.engines.local import PRELOAD
from tiltyard.engines.policies.frozen import freeze
from tiltyard.engines.preflight import check_engine, has_workers
from tiltyard.envs.probe import probe
from tiltyard.errors import ConfigError, TiltyardError, UseError, did_you_mean
from tiltyard.evaluation.rollouts import require_recordable
from tiltyard.plugins.resolve import short
from tiltyard.plugins.snapshot import MAX_DATA, Copies, copy_plugins
from tiltyard.processes import fork_server
from tiltyard.processes.resources import free_cores
from tiltyard.run import checkpoint, metrics
from tiltyard.run.folder import Run, find
from tiltyard.run.redact import mask_command
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.track import trackers
from tiltyard.training.loop_state import score_terms
from tiltyard.training.pbt import read_pbt_state, schedule_of
from tiltyard.tuning.autotune import TUNE_SECONDS, tune
from tiltyard.types import Checkpoint, EnvSpec


@dataclass(frozen=True)
class Origin:
    """Where a fork starts: a checkpoint of its parent, with what it is worth there, and what is changed."""

    parent: Run
    checkpoint: Checkpoint
    score: float | None
    changes: list[str]

    def lineage(self) -> dict[str, Any]:
        """As status.json keeps it."""
        place = {"run": self.parent.id, "folder": str(self.parent.folder), "env_steps": self.checkpoint.env_steps}
        return {**place, "changes": self.changes}


@dataclass(frozen=True)
class CheckedExperiment:
    """An experiment that has passed every check and only needs its folder."""

    loaded: Loaded
    root: Path
    spec: EnvSpec
    copies: Copies
    """of its plug-ins, in a temporary folder that is deleted with this object"""
    profile: str | None = None
    origin: Origin | None = None
    schedule: SettingsSchedule | None = None
    """where its settings change on the way"""

    @property
    def experiment(self) -> Experiment:
        return self.loaded.experiment


def prepare(
    target: str | Path | Mapping[str, Any] | Experiment,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    debug: bool = False,
    as_job: bool = False,
) -> CheckedExperiment:
    """Settings loaded and everything checked that can be checked without writing: env, model, trackers, memory.

    `as_job`: it will be trained elsewhere."""
    if isinstance(target, Experiment):
        target = target.model_dump(mode="json", by_alias=True)
    chosen = apply_profile(profile) if profile else None
    loaded = load(target, overrides, profile=chosen, debug=debug)
    _refuse_tuning(loaded.experiment, as_job)
    root = runs_root()
    experiment = with_found_sources(loaded.experiment, root)
    loaded = replace(loaded, experiment=experiment)
    continues = None if experiment.resume in ("auto", "never") else Path(experiment.resume)
    return _prepared(loaded, root, continues, profile)


def prepare_fork(
    source: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    at: int | str | None = None,
    trust_code: bool = False,
    as_job: bool = False,
) -> CheckedExperiment:
    """The parent's settings with changes and a checkpoint of it to start from, everything checked as by `prepare`."""
    parent = resolve_run(source)
    chosen = checkpoint.select(parent, at)
    refuse_presets("fork", overrides)
    parent.require_own_code(trust_code)
    before, profile = parent.experiment(), parent.enter_profile()
    loaded = load(before.model_dump(mode="json", by_alias=True), overrides, base=parent.base)
    _refuse_tuning(loaded.experiment, as_job)
    if loaded.origins["resume"] == COMMAND_LINE and loaded.experiment.resume != "auto":
        raise UseError(
            f"resume = {loaded.experiment.resume}: a fork goes on from the checkpoint that it is forked at",
            "leave it out; --at chooses the checkpoint, `tiltyard train` starts from scratch",
        )
    if loaded.experiment.model.init != before.model.init:
        raise UseError("a fork starts from its parent's checkpoint, not from model.init", "use `tiltyard train`")
    # A fork goes on from the copied checkpoint, whatever its parent was told to do.
    loaded = replace(loaded, experiment=loaded.experiment.model_copy(update={"resume": "auto"}))
    # By the ids before copying: another file than the parent's may end up under the same name.
    score = chosen.score if score_terms(before) == score_terms(loaded.experiment) else None
    origin = Origin(parent, chosen, score, mask_command(overrides))
    return _prepared(loaded, runs_root(), chosen.folder, profile, origin)


def prepare_repeat(
    source: Run | str | Path,
    policy: str,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool = False,
    as_job: bool = False,
) -> CheckedExperiment:
    """A run alone with the settings that one of a population's policies went through, as long as that took: everything
    checked as by `prepare`. Of the parent's envs it has the policy's share, where that is possible."""
    parent = resolve_run(source)
    parent.require_own_code(trust_code)
    now = read_pbt_state(parent)
    schedule = schedule_of(now, policy)
    values = parent.experiment().model_dump(mode="json", by_alias=True, exclude={"policies", "match", "population"})
    algo, engine, share = values["algo"], values["engine"], values["engine"]["envs"] // len(now.names)
    if share and (engine["workers"] == "auto" or share % max(1, engine["workers"]) == 0):
        engine["envs"] = share
        if "minibatch" in algo:  # there were never more samples than these
            algo["minibatch"] = min(algo["minibatch"], share * algo["rollout"])
    values["stop"] |= {"env_steps": max(1, now.env_steps[policy])}
    loaded = load(values, [*as_overrides(schedule[0][1]), *overrides], base=parent.base)
    _refuse_tuning(loaded.experiment, as_job)
    return replace(_prepared(loaded, runs_root(), None, parent.enter_profile()), schedule=SettingsSchedule(schedule))


def _prepared(
    loaded: Loaded, root: Path, continues: Path | None, profile: str | None, origin: Origin | None = None
) -> CheckedExperiment:
    """Check copies of the plug-ins, which wait in a temporary folder to be put into the run folder."""
    folder = Path(tempfile.mkdtemp(prefix="tiltyard-plugins-"))
    try:
        copies, spec = check_copies(loaded.experiment, loaded.base, continues, folder)
        spec = replace(spec, notes=(*loaded.warnings, *spec.notes, *copies.notes))
        if loaded.experiment.engine.tune:
            loaded, spec = _tuned(loaded, copies, spec)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    prepared = CheckedExperiment(loaded, root, spec, copies, profile, origin)
    weakref.finalize(prepared, shutil.rmtree, folder, ignore_errors=True)
    return prepared


def _refuse_tuning(experiment: Experiment, as_job: bool) -> None:
    if experiment.engine.tune and as_job:
        raise UseError(
            "engine.tune measures the machine that it is asked on, and a job is trained on another",
            "find the settings on a node, with `tiltyard shell --on PROFILE -- tiltyard tune FILE`, "
            "and write them into the experiment",
        )


def _tuned(loaded: Loaded, copies: Copies, spec: EnvSpec) -> tuple[Loaded, EnvSpec]:
    """The settings with what a measurement chose, and the notes with why."""
    sys.stderr.write(f"tuning for about {TUNE_SECONDS:.0f} s, and what starting envs takes (engine.tune)\n")
    found = tune(loaded, copies, spec, TUNE_SECONDS)
    notes = (*spec.notes, f"tuned: {' '.join(found.overrides)}", *found.lines())
    return replace(loaded, experiment=found.experiment), replace(spec, notes=notes)


def check_copies(
    experiment: Experiment, base: Sequence[Path], continues: Path | None, folder: Path
) -> tuple[Copies, EnvSpec]:
    """`check`, on copies of the plug-ins made in `folder`: what passes works in the run folder too."""
    try:
        copies = freeze(experiment, base, copy_plugins(experiment, base, folder))
    except OSError as error:
        raise TiltyardError(
            f"the plug-ins could not be copied to {folder}: {error.strerror or error}",
            "free some space, or set TMPDIR to another folder",
        ) from error
    if not copies.ids:
        return copies, check(experiment, base, continues)
    try:
        return copies, check(copies.named_in(experiment), (folder,), continues)
    except UseError as error:
        failed = error
    check(experiment, base, continues)  # what is wrong with the plug-in itself is told with its own paths
    raise UseError(
        f"a plug-in works where it is and not as a copy, which is what a run uses: {failed.message}",
        "copied are modules that it imports from its own folder, and files there of at most "
        f"{MAX_DATA >> 20} MiB that it names in quotes; give it the full paths of others in its options",
        "\n".join(text for text in (*copies.notes, failed.details) if text),
    )


def check(experiment: Experiment, base: Sequence[Path], continues: Path | None) -> EnvSpec:
    """Whether new settings make sense, and whether they work here: `try_out`."""
    trackers.check(experiment.track)  # only here: a tracker that was lost since cannot stop a run that goes on
    check_metric(experiment)
    ignored = list(ignored_settings(experiment))
    if ignored:
        raise ConfigError(ignored, "the model's settings")
    return check_on_this_machine(experiment, base, continues)


def check_on_this_machine(experiment: Experiment, base: Sequence[Path], continues: Path | None) -> EnvSpec:
    """Probe the env in a child process, build the engine's model once, and look at memory.

    `continues` is the checkpoint to start from, if there is one: its weights must fit.
    """
    free_cores.cache_clear()  # what was seen before an earlier training is no longer so
    if has_workers(experiment):
        if "auto" in (experiment.engine.workers, experiment.engine.threads):
            free_cores()  # now: the fork server will keep a core busy at first
        fork_server.standby.start(PRELOAD)  # it needs as long as the probe and the model do
    try:
        spec = probe(experiment.env, base=base, previous=experiment.model.previous)
        if experiment.eval.video:
            require_recordable(spec, experiment.env)
        check_engine(experiment, spec, base, continues)
    except BaseException:
        fork_server.standby.end()
        raise
    return spec


def check_metric(experiment: Experiment) -> None:
    """`save.metric` must be something that is ever recorded."""
    save = experiment.save
    require_metric(save.metric, f"save.metric = {save.metric}")
    if save.metric.startswith("eval/") and not evaluates(experiment) and save.best > 1:
        raise UseError(f"save.best = {save.best} by {save.metric} needs evaluations", "set eval.every")


def require_metric(name: str, said: str, *, also: Sequence[str] = ()) -> None:
    """UseError for a name that no record has. `also` are other names that may be meant."""
    if metrics.describe(name) is None:
        known = did_you_mean(name, [*(each.name for each in metrics.METRICS), *also])
        raise UseError(f"{said} is no metric", known or "docs/reference/metrics.md lists them")


def evaluates(experiment: Experiment) -> bool:
    """Whether there is ever an evaluation."""
    return experiment.eval.every > 0 or experiment.eval.at_end


def with_found_sources(experiment: Experiment, root: Path) -> Experiment:
    """`resume: PATH` and `model.init: RUN` as absolute checkpoint folders: they must mean the same anywhere later."""
    if experiment.resume not in ("auto", "never"):
        experiment = experiment.model_copy(update={"resume": source_folder(experiment.resume, root)})
    if experiment.model.init:
        model = experiment.model.model_copy(update={"init": source_folder(experiment.model.init, root)})
        experiment = experiment.model_copy(update={"model": model})
    return experiment


def source_folder(text: str, root: Path) -> str:
    """The checkpoint that a run's name or a path means, as an absolute folder."""
    folder = Path(text).expanduser().absolute()
    if (folder / "manifest.json").is_file():
        return str(checkpoint.select(folder).folder)
    return str(checkpoint.select(find(text, root), None).folder)


def resolve_run(source: Run | str | Path) -> Run:
    """The run that a caller names; whatever else is given is refused in words."""
    if not isinstance(source, Run | str | Path):
        raise UseError(f"{short(source)} names no run", "give a Run, its id, or the path of its folder")
    return find(str(source.folder if isinstance(source, Run) else source))
