"""Settings of a sweep's plan: many runs of one experiment, or of any other program, in one file.

    experiment + space + metric + search (+ population) ── one validation ──> Plan or ConfigError

sweep/space.py draws combinations from `space`; each is validated as an experiment before anything is started.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tiltyard.config.experiment import NAME
from tiltyard.config.fields import Count, CountOrZero, NotNegative, Settings, Whole
from tiltyard.config.merge import plain
from tiltyard.config.policies import PopulationRules
from tiltyard.config.site import check_names
from tiltyard.config.validation import validate
from tiltyard.config.yaml import read_yaml
from tiltyard.errors import ConfigError, Problem, UseError
from tiltyard.plugins.resolve import short

MOST_SEEDS = 1000
_GOALS = {"maximize": "maximise", "max": "maximise", "minimize": "minimise", "min": "minimise"}


class Objective(Settings):
    """The metric that trials are compared by."""

    name: str = Field(default="eval/return", min_length=1, max_length=200)
    """Name of a metric in metrics.jsonl."""
    of: Literal["best", "last"] = "best"
    """A trial's best or last value of the metric. In a population the default is last."""


class EarlyStop(Settings):
    """Early stopping of trials that fall behind. It can be wrong: a trial that learns slowly at first may win later."""

    rule: Literal["asha", "median"]
    """asha: at increasing numbers of env steps (rungs) only the best fraction continues; median: trials below the
    median of the others at the same number of env steps are stopped."""
    after: Count
    """Env steps before a trial can be stopped; asha's first rung."""
    factor: Whole = Field(default=3, ge=2, le=100)
    """asha: one in this many trials continues, and each rung has this many times as many env steps."""
    least: Whole = Field(default=5, ge=2, le=10_000)
    """median: minimum number of other trials that have reached the same env steps."""


def _seeds(value: Any) -> Any:
    return list(range(int(value))) if type(value) in (int, float) and value == int(value) <= MOST_SEEDS else value


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class Plan(Settings):
    """Many runs: what varies, which metric compares them, and how many run at once."""

    version: Literal[1] = 1
    """Version of this file's schema."""
    name: str | None = Field(default=None, min_length=1, max_length=80)
    """Folder of the sweep below the runs root. Default: the experiment's name."""
    experiment: str | dict[str, Any] | None = None
    """An experiment's YAML file, an env id, or the content of an experiment file."""
    program: Annotated[list[str] | None, BeforeValidator(_words)] = None
    """Command line of another program to run instead of an experiment. Parameters are added as flags. The program
    writes its metrics to metrics.jsonl in the folder that the variable TILTYARD_TRIAL names."""
    flag: str = Field(default="--", max_length=10)
    """Prefix of a parameter's name on the program's command line."""
    name_flag: str | None = Field(default=None, min_length=1, max_length=100)
    """Flag of the program for the trial's name. Default: none is passed."""
    folder_flag: str | None = Field(default=None, min_length=1, max_length=100)
    """Flag of the program for the sweep's folder, which contains the trial's folder. Default: none is passed."""
    space: dict[str, Any] = Field(default={}, max_length=1000)
    """What varies: dotted names of settings; names joined by commas change together. The values are a list of choices,
    {range: [a, b]}, {log: [a, b]} or {int: [a, b]}, with `step` or `points` for a grid."""
    points: list[dict[str, Any]] = Field(default=[], max_length=100_000)
    """An explicit list of combinations instead of `space`. In a population: the members' initial settings."""
    metric: Annotated[Objective, BeforeValidator(lambda v: {"name": v} if isinstance(v, str) else v)] = Objective()
    goal: Annotated[
        Literal["maximise", "minimise"], BeforeValidator(lambda v: _GOALS.get(v, v) if isinstance(v, str) else v)
    ] = "maximise"
    """Whether a higher or lower metric is better."""
    search: Literal["grid", "random", "tpe", "gp", "population"] = "grid"
    """grid: every combination; random: independent draws; tpe and gp: Optuna's samplers, which learn from finished
    trials (extra `sweep`); population: population-based training, in which the worst trials become copies of the best
    with changed settings."""
    trials: Count | None = None
    """Number of combinations to try, or of members of a population. Not for a grid, which tries all."""
    population: PopulationRules = PopulationRules()
    seeds: Annotated[list[CountOrZero], Field(min_length=1, max_length=MOST_SEEDS), BeforeValidator(_seeds)] = [0]
    """Runs per combination: a number of seeds, counted from 0, or a list of seeds. In a population: the first member's
    seed; the other members use the seeds after it."""
    seed: CountOrZero = 0
    """Seed of the search and of the random order."""
    order: Literal["given", "random"] = "given"
    """Order of the trials of a grid or of points."""
    max_parallel: Whole = Field(default=1, ge=1, le=10_000)
    """Trials that run at once; the machine's cores are divided among them."""
    trials_per_gpu: Whole | None = Field(default=None, ge=1, le=1000)
    """Trials that share a GPU; each trial gets the least busy GPU. Default: every trial sees all GPUs."""
    pause_between: NotNegative = 0.0
    """Seconds between the starts of two trials."""
    retries: CountOrZero = 2
    """How often a failed trial is restarted automatically."""
    back_off: NotNegative = 10.0
    """Seconds before the first restart; doubled before each further one."""
    stop: EarlyStop | None = None
    """Early stopping of trials that fall behind. Default: off."""
    environment: dict[str, str] = {}
    """Environment variables for every trial."""

    @property
    def adaptive(self) -> bool:
        """Whether the next combination depends on the results so far."""
        return self.search in ("tpe", "gp")

    @property
    def better(self) -> float:
        """1 if a higher metric is better, else -1."""
        return 1.0 if self.goal == "maximise" else -1.0


def load_plan(source: str | Path | Mapping[str, Any]) -> Plan:
    """The plan in a YAML file or mapping; an experiment's file is searched for next to the plan's."""
    if isinstance(source, Mapping):
        try:
            values, where, shown = plain(source), Path.cwd(), "the plan"
        except ValueError as error:
            raise UseError(str(error), "use text, numbers, true, false, null, lists and mappings") from None
    else:
        path = Path(source)
        values, where, shown = read_yaml(path), path.absolute().parent, str(path)
    if "env" in values and "experiment" not in values:
        hint = f"train it with: tiltyard train {shown}; in a plan write experiment: {shown}"
        raise UseError(f"{shown} is an experiment, not a sweep plan", hint)
    plan, found = validate(Plan, values)
    problems = [problem for _, problem in found]
    if plan is not None:
        problems += _cross_check(plan)
        if plan.search == "population" and "of" not in plan.metric.model_fields_set:
            plan = plan.model_copy(update={"metric": plan.metric.model_copy(update={"of": "last"})})
    if problems or plan is None:
        raise ConfigError(problems, shown)
    if isinstance(plan.experiment, str) and (where / plan.experiment).is_file():
        plan = plan.model_copy(update={"experiment": str(where / plan.experiment)})
    return plan


def _cross_check(plan: Plan) -> list[Problem]:
    """Problems that involve two or more settings of a plan."""
    found = []

    def wrong(setting: str, value: Any, message: str, hint: str) -> None:
        found.append(Problem(setting, short(value) if value is not None else "", message, hint))

    if plan.experiment is None and plan.program is None:
        wrong("experiment", None, "is missing", "name an experiment file: experiment: cartpole.yaml")
    if plan.experiment is not None and plan.program is not None:
        wrong("program", plan.program, "cannot be combined with experiment", "keep one of them")
    if plan.program == []:
        wrong("program", None, "is empty", "write the command line of a program")
    if plan.space and plan.points and plan.search != "population":
        wrong("points", None, "cannot be combined with space", "keep one of them")
    if plan.points and plan.search not in ("grid", "population"):
        wrong("search", plan.search, "needs a space, but points are given", "leave search out")
    if plan.search == "grid" and plan.trials is not None:
        wrong("trials", plan.trials, "does not apply to a grid, which tries all combinations", "set search: random")
    if plan.search != "grid" and plan.trials is None:
        wrong("trials", None, "is missing", f"set how many combinations search: {plan.search} tries: trials: 20")
    if plan.search != "grid" and not plan.space:
        wrong("space", None, "is missing", "list the settings to vary: space: {algo.lr: {log: [1e-5, 1e-2]}}")
    if len(set(plan.seeds)) != len(plan.seeds):
        wrong("seeds", plan.seeds, "contains a seed twice", "list each seed once")
    found += check_names(plan.environment, "environment")
    if plan.search == "population":
        _check_population(plan, wrong)
    elif "population" in plan.model_fields_set and plan.population != PopulationRules():
        wrong("population", None, f"needs search = population, but it is {plan.search}", "set search: population")
    if plan.name is not None and (not NAME.fullmatch(plan.name) or ".." in plan.name):
        wrong("name", plan.name, "must be 1 to 80 letters, digits and . _ + -", "it becomes the name of a folder")
    return found


def _check_population(plan: Plan, wrong: Callable[[str, Any, str, str], None]) -> None:
    if plan.program is not None:
        wrong("program", plan.program, "cannot be a population: it has no checkpoints to copy", "use an experiment")
    if plan.trials is not None and plan.trials < 2:
        wrong("trials", plan.trials, "must be at least 2 for a population", "set trials: 8")
    if plan.points and plan.trials is not None and len(plan.points) != plan.trials:
        wrong("points", len(plan.points), f"must be one for each of {plan.trials} members", "give that many, or none")
    if len(plan.seeds) != 1:
        wrong("seeds", plan.seeds, "must be one seed for a population", "the other members use the seeds after it")
    if plan.stop is not None:
        wrong("stop", plan.stop.rule, "cannot be combined with search = population", "leave one of them out")
    if plan.order != "given":
        wrong("order", plan.order, "does not apply to a population", "leave it out")
