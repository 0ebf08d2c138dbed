"""From a plan to a sweep's folder: every point is built and checked before anything is started or written.

    plan ── points ──> the settings of each point validated, all problems reported together
                   ──> each distinct env, model and engine tried once, as `tiltyard train` does
                   ──> folder

The points of an adaptive search are not known in advance: the ends of each dimension and some samples are checked, and
invalid settings that it chooses later are a failed trial. For a population, the first members and samples are checked.

Heavy modules are imported when needed: a controller in the background does not import torch.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import Loaded, as_overrides, load, merged_settings
from tiltyard.config.search_space import Choices, Dimension, Point, fingerprint
from tiltyard.config.site import Profile, apply_profile, load_site, pick_profile
from tiltyard.config.site_file import runs_root
from tiltyard.config.sweep_plan import Plan, load_plan
from tiltyard.errors import ConfigError, Problem, UseError
from tiltyard.plugins.snapshot import copy_plugins
from tiltyard.run.create import Source, create, source_folder, with_found_sources
from tiltyard.run.folder import Run
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.slurm import submit
from tiltyard.sweep import external_program
from tiltyard.sweep.backends.shares import require_affinity, require_gpus
from tiltyard.sweep.folder import Sweep, Trial, digest, is_own, make, planned_pairs, sweeps, trial_line
from tiltyard.sweep.optuna_search import require_optuna
from tiltyard.sweep.space import dimensions, draws, fixed_count, fixed_points

MANY = 10_000
_SAMPLE = 20  # random points of a space that are checked before an adaptive search begins


@dataclass(frozen=True)
class CheckedPlan:
    """A plan that passed every check and has no folder yet."""

    name: str
    plan: Plan
    points: list[Point]
    """all of them, or none if the search chooses them later"""
    base: tuple[Path, ...]
    profile: Profile | None
    plugins: list[tuple[Path, Path]]
    """copies, and their places in the sweep's folder"""
    kept: tempfile.TemporaryDirectory[str] | None = None
    """the folder of the copies; deleted with this object"""

    @property
    def trials(self) -> list[Trial]:
        pairs = planned_pairs(self.plan, len(self.points), ())
        return [Trial(number, *pair, self.points[pair[0] - 1]) for number, pair in enumerate(pairs, start=1)]

    @property
    def launcher(self) -> str:
        """What will start the trials: local, slurm or template."""
        return self.profile.launcher if self.profile else "local"

    @property
    def count(self) -> int:
        """How many trials there will be."""
        return (self.plan.trials or len(self.points)) * len(self.plan.seeds)


def prepare(source: str | Path | Mapping[str, Any], *, profile: str | None = None, many: bool = False) -> CheckedPlan:
    """Load a plan and check everything. More than 10,000 trials are refused unless `many`."""
    plan = load_plan(source)
    found = dimensions(plan)
    require_optuna(plan)
    chosen = _profile(profile, plan)
    if chosen is None or chosen.launcher == "local":
        require_affinity()
        require_gpus(plan)
    if plan.program is not None:
        external_program.check(plan)
        return CheckedPlan(plan.name or external_program.name(plan), plan, _points(plan, many), (), chosen, [])
    tree, base = merged_settings(plan.experiment, profile=chosen)
    plan = plan.model_copy(update={"experiment": _with_sources(tree)})
    points = _points(plan, many)
    built = _build(plan, _tried(plan, found, points), base)
    _check_metric(plan, built)
    _check_stop(plan, built)
    if plan.search == "population":
        from tiltyard.sweep.pbt.members import check

        check(plan, built)
    name = plan.name or built[0].run_name
    kept, plugins = _try_out(built[: len(points)] or built, base)
    if chosen is not None:
        for experiment in built:
            submit.check(chosen, experiment)
    return CheckedPlan(name, plan, points, base, chosen, plugins, kept)


def check_more(sweep: Sweep, plan: Plan, points: int, seeds: int, *, many: bool = False) -> None:
    """Check, as `prepare` does, that many more combinations and seeds of a sweep."""
    before = planned_pairs(plan, fixed_count(plan), sweep.decisions())
    known, runs = max(point for point, _ in before), len({seed for _, seed in before})
    count = len(before) + points * runs + seeds * (known + points)
    if count > MANY and not many:
        raise UseError(f"{sweep.id} would have {count:,} trials", "add --yes to run all of them")
    if points and not plan.adaptive and plan.program is None:
        _try_out(_build(plan, fixed_points(plan, known + points)[known:], sweep.base), sweep.base)


def begin(prepared: CheckedPlan, command: Sequence[str] = ()) -> Sweep:
    """Make the sweep's folder."""
    return make(
        runs_root(),
        prepared.name,
        prepared.plan,
        prepared.trials,
        base=prepared.base,
        profile=prepared.profile,
        command=command,
        plugins=prepared.plugins,
    )


def same_sweep(prepared: CheckedPlan) -> Sweep | None:
    """This user's newest sweep that was started from the same plan."""
    mark = digest(prepared.plan, prepared.profile)
    of_name = [sweep for sweep in sweeps(runs_root()) if sweep.folder.parent.name == prepared.name]
    return next((sweep for sweep in reversed(of_name) if is_own(sweep) and sweep.facts().get("digest") == mark), None)


def make_trial(sweep: Sweep, plan: Plan, trial: Trial) -> Path:
    """Make the trial's folder, under the sweep's lock; its settings were checked when the sweep began."""
    place = sweep.place(trial.number)
    if place.exists():
        return place
    if plan.program is not None:
        external_program.make(sweep, plan, trial)
        return place
    return new_run(sweep, plan, trial, ["tiltyard", "train", *_overrides(trial)], place).folder


def new_run(
    sweep: Sweep,
    plan: Plan,
    trial: Trial,
    command: Sequence[str],
    place: Path | None = None,
    schedule: SettingsSchedule | None = None,
) -> Run:
    """Make a run with a trial's settings: at `place` in the sweep or, without one, beside the sweep."""
    facts, loaded = sweep.facts(), load_trial(sweep, plan, trial)
    with tempfile.TemporaryDirectory(prefix="tiltyard-trial-") as folder:
        copies = copy_plugins(loaded.experiment, loaded.base, Path(folder))
        if any(member.from_ is not None for member in loaded.experiment.policy_settings.values()):
            from tiltyard.engines.policies.frozen import freeze

            copies = freeze(loaded.experiment, loaded.base, copies)
        base = [*map(Path, facts["base"]), *loaded.base]
        made_for = trial_line(trial) if place is not None else None
        source = Source(base=base, command=command, copies=copies, profile=facts.get("profile"), trial=made_for)
        return create(sweep.folder.parents[1], loaded.experiment, source, place=place, schedule=schedule)


def _overrides(trial: Trial) -> list[str]:
    return [*as_overrides(trial.settings), f"seed={trial.seed}"]


def load_trial(sweep: Sweep, plan: Plan, trial: Trial) -> Loaded:
    """Load a trial's experiment, with the copies of plug-ins from the start of the sweep."""
    loaded = load(plan.experiment, _overrides(trial), base=sweep.base)
    return replace(loaded, experiment=with_found_sources(loaded.experiment, sweep.folder.parents[1]))


# ------------------------------------------------------------------------------------------------ parts of prepare


def _profile(name: str | None, plan: Plan) -> Profile | None:
    """The profile called `name`, its variables set; UseError if it cannot run this plan."""
    if name is None:
        return None
    profile = pick_profile(load_site()[0], name)
    if profile.launcher != "local" and plan.trials_per_gpu is not None:
        hint = "set the GPUs of each trial in the profile instead: resources: {gpus: 1}"
        raise UseError(f"trials_per_gpu is for trials on this machine, but profile {name} submits jobs", hint)
    if profile.slurm.samplers is not None:
        hint = "use a profile without slurm.samplers"
        raise UseError(f"profile {name} needs heterogeneous jobs, which Slurm cannot run as job arrays", hint)
    return apply_profile(name)


def _with_sources(tree: dict[str, Any]) -> dict[str, Any]:
    """Runs that weights come from, as folders: a name such as `cartpole` would mean another run once trials exist."""
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("init"), str):
        tree = {**tree, "model": {**model, "init": source_folder(model["init"], runs_root())}}
    if isinstance(tree.get("resume"), str) and tree["resume"] not in ("auto", "never"):
        tree = {**tree, "resume": source_folder(tree["resume"], runs_root())}
    return tree


def _points(plan: Plan, many: bool) -> list[Point]:
    count = fixed_count(plan)
    if count * len(plan.seeds) > MANY and not many:
        raise UseError(f"this plan has {count * len(plan.seeds):,} trials", "add --yes to run all of them")
    return [] if plan.adaptive else fixed_points(plan, count)


def _tried(plan: Plan, found: Sequence[Dimension], points: Sequence[Point]) -> Sequence[Point]:
    """The points to build before anything starts: all known ones, and of a space that is explored later random samples
    and one with each end of each dimension."""
    if points and plan.search != "population":
        return points
    some = list(itertools.islice(draws(found, plan.seed), _SAMPLE))
    for each in found:
        ends = each.grid() if isinstance(each, Choices) else [{each.key: each.at(0.0)}, {each.key: each.at(1.0)}]
        some += [{**some[0], **end} for end in ends]
    return [*points, *({**points[0], **sample} for sample in some)] if points else some


def _build(plan: Plan, points: Sequence[Point], base: Sequence[Path]) -> list[Experiment]:
    """Build each point's experiment; ConfigError with all problems, each with the first point that has it."""
    built: list[Experiment] = []
    found: dict[tuple[str, str], list[tuple[Problem, Point]]] = {}
    for point in points:
        try:
            experiment = load(plan.experiment, as_overrides(point), base=base).experiment
            built.append(with_found_sources(experiment, runs_root()))
        except UseError as error:
            problems = error.problems if isinstance(error, ConfigError) else [Problem("", "", str(error), error.hint)]
            for problem in problems:
                found.setdefault((problem.setting, problem.message), []).append((problem, point))
    if found:
        raise ConfigError([_in_point(*each[0], len(each)) for each in found.values()], "the points of the plan")
    if any(each.engine.tune for each in built):
        hint = "run `tiltyard tune` first, and write the settings that it finds into the experiment"
        raise UseError("engine.tune cannot be used in a sweep: it needs a machine that runs nothing else", hint)
    return built


def _in_point(problem: Problem, point: Point, count: int) -> Problem:
    others = f", and {count - 1} more" if count > 1 else ""
    where = f" (in {' '.join(as_overrides(point)) or 'the experiment'}{others})"
    return replace(problem, message=problem.message + where)


def _check_metric(plan: Plan, built: Sequence[Experiment]) -> None:
    from tiltyard.training.preflight import evaluates, require_metric

    require_metric(plan.metric.name, f"metric = {plan.metric.name}")
    if plan.metric.name.startswith("eval/") and not all(evaluates(each) for each in built):
        hint = "set eval.at_end: true in the experiment, or metric: train/return in the plan"
        raise UseError(f"metric = {plan.metric.name} needs evaluations, but the trials would not evaluate", hint)


def _check_stop(plan: Plan, built: Sequence[Experiment]) -> None:
    """ConfigError for a rule that could never stop a trial."""
    ends = [each.stop.env_steps for each in built]
    if plan.stop is None or any(end is None or end > plan.stop.after for end in ends):
        return
    message = f"no trial trains that long: stop.env_steps = {max(filter(None, ends)):,} in the experiment"
    hint = "set it lower, or remove stop from the plan"
    raise ConfigError([Problem("stop.after", f"{plan.stop.after:,}", message, hint)], "the plan")


def _try_out(
    built: Sequence[Experiment], base: tuple[Path, ...]
) -> tuple[tempfile.TemporaryDirectory[str], list[tuple[Path, Path]]]:
    """Try each distinct env, model and engine among the trials once; returns copies of all plug-ins that they name."""
    from tiltyard.training.preflight import check_new

    kinds = {_kind(experiment): experiment for experiment in built}
    if len(kinds) > 1:
        sys.stderr.write(f"checking {len(kinds)} combinations of env, model and engine\n")
    kept = tempfile.TemporaryDirectory(prefix="tiltyard-sweep-")
    plugins: dict[Path, Path] = {}
    for number, experiment in enumerate(kinds.values()):
        folder = Path(kept.name) / str(number)
        folder.mkdir()
        resume = experiment.resume
        continues = None if resume in ("auto", "never") else Path(resume)
        copies, *_ = check_new(experiment, base, continues, folder)
        for file in copies.files:
            if file.parts[0] == "plugins" and file.parts[1] != "outside":
                plugins.setdefault(file, folder / file)
    return kept, [(source, place) for place, source in plugins.items()]


def _kind(experiment: Experiment) -> str:
    """A key that is equal for experiments that need one try: everything but floats of the algorithm."""
    values = experiment.model_dump(mode="json", by_alias=True)
    parts = {name: values[name] for name in ("env", "model", "policies", "match", "engine", "resume", "track")}
    algo = {name: value for name, value in values["algo"].items() if not isinstance(value, float)}
    return fingerprint({**parts, "algo": algo, "video": experiment.eval.video, "best": experiment.save.best})
