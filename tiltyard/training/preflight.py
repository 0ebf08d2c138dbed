"""Everything checked before a run folder is made: a new experiment, a fork, or the schedule of a policy repeated.

    prepare(TARGET)        load settings -> copy plug-ins -> probe env, build net, check memory -> tune, if set
    prepare_fork(RUN)      the same from a run's settings, with one of its checkpoints to start from
    prepare_repeat(RUN)    the same with the settings schedule of one policy of a population

Only a temporary folder with copies of plug-ins is written here; `api.create_run` makes the run.
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

from tiltyard.config.clone_algo import Clone
from tiltyard.config.cross_checks import ignored_settings
from tiltyard.config.experiment import Experiment
from tiltyard.config.load import COMMAND_LINE, KEYWORD, Loaded, Target, as_overrides, load, refuse_presets
from tiltyard.config.sections import Eval, Stop
from tiltyard.config.site import apply_profile
from tiltyard.config.site_file import runs_root
from tiltyard.engines.policies.frozen import freeze
from tiltyard.engines.preflight import check_engine, check_platform, has_workers
from tiltyard.envs.probe import probe
from tiltyard.errors import ConfigError, TiltyardError, UseError, did_you_mean
from tiltyard.evaluation.evaluate import require_recordable
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins.resolve import short
from tiltyard.plugins.snapshot import MAX_DATA, Copies, copy_plugins
from tiltyard.processes.fork_server import ForkServer
from tiltyard.processes.platforms import is_linux
from tiltyard.processes.resources import free_cores
from tiltyard.run import checkpoint, metric_names, trust
from tiltyard.run.create import with_absolute_dataset, with_found_sources
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
    """Where a fork starts: a checkpoint of its parent with its score, and the changed settings."""

    parent: Run
    checkpoint: Checkpoint
    score: float | None
    changes: list[str]

    def lineage(self) -> dict[str, Any]:
        """The entry in status.json."""
        place = {"run": self.parent.id, "folder": str(self.parent.folder), "env_steps": self.checkpoint.env_steps}
        return {**place, "changes": self.changes}


@dataclass(frozen=True)
class CheckedExperiment:
    """An experiment that has passed every check and needs only its folder."""

    loaded: Loaded
    root: Path
    spec: EnvSpec
    net: PolicyNet
    """the first policy's net with its initial weights, to be trained by one run"""
    copies: Copies
    """copies of its plug-ins, in a temporary folder that is deleted with this object"""
    profile: str | None = None
    origin: Origin | None = None
    schedule: SettingsSchedule | None = None
    """settings that change at given env steps"""

    @property
    def experiment(self) -> Experiment:
        return self.loaded.experiment


def prepare(
    target: Target | Experiment,
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    profile: str | None = None,
    debug: bool = False,
    as_job: bool = False,
    server: ForkServer | None = None,
) -> CheckedExperiment:
    """Load the settings and check all that can be checked without writing: env, model, trackers, memory.

    `as_job`: it will be trained on another machine. `server` will fork its workers; it is started early.
    """
    if isinstance(target, Experiment):
        target = target.model_dump(mode="json", by_alias=True)
    chosen = apply_profile(profile) if profile else None
    loaded = load(target, overrides, settings=settings, profile=chosen, debug=debug)
    _refuse_tuning(loaded.experiment, as_job)
    root = runs_root()
    experiment = with_found_sources(loaded.experiment, root)
    loaded = replace(loaded, experiment=experiment)
    continues = None if experiment.resume in ("auto", "never") else Path(experiment.resume)
    return _checked(loaded, root, continues, profile, server)


def prepare_fork(
    source: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    at: int | str | None = None,
    trust_code: bool = False,
    as_job: bool = False,
    server: ForkServer | None = None,
) -> CheckedExperiment:
    """Check the parent's settings with changes, and the checkpoint to start from, as `prepare` does."""
    parent = resolve_run(source)
    chosen = checkpoint.select(parent, at)
    refuse_presets("fork", overrides)
    before = parent.experiment()
    loaded = load(before.model_dump(mode="json", by_alias=True), overrides, settings=settings, base=parent.base)
    _require_own(parent, trust_code, loaded)
    profile = trust.enter_profile(parent, trust_code)
    _refuse_tuning(loaded.experiment, as_job)
    if loaded.origins["resume"] == COMMAND_LINE and loaded.experiment.resume != "auto":
        message = f"resume = {loaded.experiment.resume}: a fork continues from the checkpoint that it is forked at"
        hint = "leave it out; --at chooses the checkpoint, `tiltyard train` starts from scratch"
        raise UseError(message, hint)
    if loaded.experiment.model.init != before.model.init:
        raise UseError("a fork starts from its parent's checkpoint, not from model.init", "use `tiltyard train`")
    loaded = _after_cloning(before, loaded, chosen)
    # A fork continues from the copied checkpoint, whatever its parent started from.
    experiment = with_absolute_dataset(loaded.experiment.model_copy(update={"resume": "auto"}))
    loaded = replace(loaded, experiment=experiment)
    # Compare ids before copying: a copy of another file than the parent's may get the same name.
    score = chosen.score if score_terms(before) == score_terms(loaded.experiment) else None
    origin = Origin(parent, chosen, score, mask_command(overrides))
    return _checked(loaded, runs_root(), chosen.folder, profile, server, origin)


def prepare_repeat(
    source: Run | str | Path,
    policy: str,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool = False,
    as_job: bool = False,
    server: ForkServer | None = None,
) -> CheckedExperiment:
    """Check a run that repeats the settings schedule of one policy of a population, for as many env steps, with the
    policy's share of the envs where that is possible."""
    parent = resolve_run(source)
    now = read_pbt_state(parent)
    schedule = schedule_of(now, policy)
    values = parent.experiment().model_dump(mode="json", by_alias=True, exclude={"policies", "match", "population"})
    algo, engine, share = values["algo"], values["engine"], values["engine"]["envs"] // len(now.names)
    if share and (engine["workers"] == "auto" or share % max(1, engine["workers"]) == 0):
        engine["envs"] = share
        if "minibatch" in algo:  # the policy never had more samples than these
            algo["minibatch"] = min(algo["minibatch"], share * algo["rollout"])
    values["stop"] |= {"env_steps": max(1, now.env_steps[policy])}
    loaded = load(values, [*as_overrides(schedule[0][1]), *overrides], base=parent.base)
    _require_own(parent, trust_code, loaded)
    _refuse_tuning(loaded.experiment, as_job)
    checked = _checked(loaded, runs_root(), None, trust.enter_profile(parent, trust_code), server)
    return replace(checked, schedule=SettingsSchedule(schedule))


def _after_cloning(before: Experiment, loaded: Loaded, chosen: Checkpoint) -> Loaded:
    """A fork from cloning to an algorithm with envs: what was set to count passes over the data gets its default."""
    now = loaded.experiment
    if not isinstance(before.algo, Clone) or isinstance(now.algo, Clone):
        return loaded
    more, notes = Stop().env_steps or 0, []
    if now.stop.env_steps is not None and loaded.origins["stop.env_steps"] not in (COMMAND_LINE, KEYWORD):
        total = chosen.env_steps + more
        now = now.model_copy(update={"stop": now.stop.model_copy(update={"env_steps": total})})
        learned = f"{chosen.env_steps:,} recorded env steps of its parent and {more:,} of its own"
        notes.append(f"stop.env_steps is {total:,}: the {learned}")
    if loaded.origins["eval.every"] not in (COMMAND_LINE, KEYWORD):
        now = now.model_copy(update={"eval": now.eval.model_copy(update={"every": Eval().every})})
        notes.append(f"eval.every is {now.eval.every:,}")
    return replace(loaded, experiment=now, warnings=(*loaded.warnings, *notes))


def _require_own(parent: Run, trust_code: bool, loaded: Loaded) -> None:
    """UseError if another user chose code, an address or a path that the new run would use."""
    typed = [setting for setting, origin in loaded.origins.items() if origin in (COMMAND_LINE, KEYWORD)]
    trust.require_own_code(parent, trust_code, loaded.experiment, typed)
    trust.require_own_places(parent, trust_code, loaded.experiment, typed)


def _checked(
    loaded: Loaded,
    root: Path,
    continues: Path | None,
    profile: str | None,
    server: ForkServer | None,
    origin: Origin | None = None,
) -> CheckedExperiment:
    """Check with copies of the plug-ins, made in a temporary folder and later put into the run folder."""
    folder = Path(tempfile.mkdtemp(prefix="tiltyard-plugins-"))
    start_early(server, loaded.experiment)
    try:
        copies, spec, net = check_new(loaded.experiment, loaded.base, continues, folder)
        spec = replace(spec, notes=(*loaded.warnings, *spec.notes, *copies.notes))
        if loaded.experiment.engine.tune:
            loaded, spec = _tuned(loaded, copies, spec, server)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    checked = CheckedExperiment(loaded, root, spec, net, copies, profile, origin)
    weakref.finalize(checked, shutil.rmtree, folder, ignore_errors=True)
    return checked


def _refuse_tuning(experiment: Experiment, as_job: bool) -> None:
    if experiment.engine.tune and as_job:
        raise UseError(
            "engine.tune measures this machine, but a job is trained on another",
            "find the settings on a node with `tiltyard shell --on PROFILE -- tiltyard tune FILE`, "
            "and write them into the experiment",
        )


def _tuned(loaded: Loaded, copies: Copies, spec: EnvSpec, server: ForkServer | None) -> tuple[Loaded, EnvSpec]:
    """Replace settings by those that were measured to be fastest, and add notes with the reasons."""
    sys.stderr.write(f"tuning for about {TUNE_SECONDS:.0f} s, plus the time to start envs (engine.tune)\n")
    found = tune(loaded, copies, spec, TUNE_SECONDS, server)
    notes = (*spec.notes, f"tuned: {' '.join(found.overrides)}", *found.lines())
    return replace(loaded, experiment=found.experiment), replace(spec, notes=notes)


def check_new(
    experiment: Experiment, base: Sequence[Path], continues: Path | None, folder: Path
) -> tuple[Copies, EnvSpec, PolicyNet]:
    """Check that new settings make sense and work here, with copies of the plug-ins made in `folder`: what passes works
    in the run folder too."""
    trackers.check(experiment.track)  # only for new runs: a tracker lost since must not stop a resume
    check_metric(experiment)
    ignored = list(ignored_settings(experiment))
    if ignored:
        raise ConfigError(ignored, "the model's settings")
    try:
        copies = copy_plugins(experiment, base, folder)
        if experiment.several_policies:
            copies = freeze(experiment, base, copies)
    except OSError as error:
        hint = "free some space, or set TMPDIR to another folder"
        raise TiltyardError(f"the plug-ins could not be copied to {folder}: {error.strerror or error}", hint) from error
    if not copies.ids:
        return copies, *check_on_this_machine(experiment, base, continues)
    try:
        return copies, *check_on_this_machine(copies.named_in(experiment), (folder,), continues)
    except UseError as error:
        failed = error
    check_on_this_machine(experiment, base, continues)  # an error of the plug-in itself is reported with its own paths
    raise UseError(
        f"a plug-in works in its place but not as a copy, which a run uses: {failed.message}",
        "copied are the modules it imports from its folder and the files there, up to "
        f"{MAX_DATA >> 20} MiB each, that it names in quotes; pass full paths of other files in its options",
        "\n".join(text for text in (*copies.notes, failed.details) if text),
    )


def start_early(server: ForkServer | None, experiment: Experiment) -> None:
    """Let the fork server import torch while the env is probed, if there will certainly be workers."""
    free_cores.cache_clear()  # measured before an earlier training
    if server is not None and has_workers(experiment) and is_linux():
        if "auto" in (experiment.engine.workers, experiment.engine.threads):
            free_cores()  # measured now, before the fork server loads the cores
        server.start()


def check_on_this_machine(
    experiment: Experiment, base: Sequence[Path], continues: Path | None
) -> tuple[EnvSpec, PolicyNet]:
    """Probe the env in a child process, build the net that is then trained, check memory.

    `continues` is the checkpoint to start from, if any: its weights must fit.
    """
    if not is_linux():
        check_platform(experiment)
    spec = probe(experiment.env, base=base, previous=experiment.model.previous)
    if experiment.eval.video:
        require_recordable(spec, experiment.env)
    return spec, check_engine(experiment, spec, base, continues)


def check_metric(experiment: Experiment) -> None:
    """UseError unless `save.metric` is ever recorded."""
    save = experiment.save
    if "metric" in save.model_fields_set:  # the default is always recorded
        require_metric(save.metric, f"save.metric = {save.metric}")
    if save.metric.startswith("eval/") and not evaluates(experiment) and save.best > 1:
        raise UseError(f"save.best = {save.best} by {save.metric} needs evaluations", "set eval.every")


def require_metric(name: str, setting: str, *, also: Sequence[str] = ()) -> None:
    """UseError for an unknown metric, naming the `setting` that has it; `also` are further names to suggest."""
    if metric_names.describe(name) is None:
        known = did_you_mean(name, [*(each.name for each in metric_names.METRICS), *also])
        raise UseError(f"{setting} is not a known metric", known or "docs/reference/metrics.md lists them")


def evaluates(experiment: Experiment) -> bool:
    """Whether this experiment ever evaluates."""
    return experiment.eval.every > 0 or experiment.eval.at_end


def resolve_run(source: Run | str | Path) -> Run:
    """The run for a Run, an id or a path; UseError for anything else."""
    if not isinstance(source, Run | str | Path):
        raise UseError(f"{short(source)} is not a run", "give a Run, its id, or the path of its folder")
    return find(str(source.folder if isinstance(source, Run) else source))
