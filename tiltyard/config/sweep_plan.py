"""What a sweep says: many runs of one experiment, or of any other program, in one file.

    experiment + space + metric + search (+ population) ── one validation ──> Plan or ConfigError

Which values a line of `space` stands for is tiltyard.sweep.space's; whether a combination of them makes sense is the
experiment's own validation, asked for each of them before anything is started.
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
    """What trials are compared by."""

    name: str = Field(default="eval/return", min_length=1, max_length=200)
    """A name in metrics.jsonl."""
    of: Literal["best", "last"] = "best"
    """The best value that a trial recorded, or its last one. Of a population it is the last one when left out."""


class EarlyStop(Settings):
    """Trials that fall behind are ended. Pruning can mislead: what learns slowly at first may win in the end."""

    rule: Literal["asha", "median"]
    """asha: at growing numbers of env steps only the best share goes on; median: who is worse than half of the others
    at the same number of env steps is ended."""
    after: Count
    """Env steps before anybody is judged; asha's first rung."""
    factor: Whole = Field(default=3, ge=2, le=100)
    """asha: one in so many goes on, and the next rung is so many times as far."""
    least: Whole = Field(default=5, ge=2, le=10_000)
    """median: so many others must have come as far."""


def _seeds(value: Any) -> Any:
    return list(range(int(value))) if type(value) in (int, float) and value == int(value) <= MOST_SEEDS else value


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class Plan(Settings):
    """Many runs: what is varied, what they are compared by, and how many go at once."""

    version: Literal[1] = 1
    """Schema of this description."""
    name: str | None = Field(default=None, min_length=1, max_length=80)
    """Folder of the sweep below the runs root; the experiment's name when left out."""
    experiment: str | dict[str, Any] | None = None
    """An experiment's YAML file, an env id, or what an experiment file would say."""
    program: Annotated[list[str] | None, BeforeValidator(_words)] = None
    """Any other program instead of an experiment: its command line. Parameters are added as flags. What it appends to
    metrics.jsonl in the folder that TILTYARD_TRIAL names is what its trials are compared by."""
    flag: str = Field(default="--", max_length=10)
    """What stands before a parameter's name on the program's command line."""
    name_flag: str | None = Field(default=None, min_length=1, max_length=100)
    """Flag by which the program is told its trial's name; not told when left out."""
    folder_flag: str | None = Field(default=None, min_length=1, max_length=100)
    """Flag by which the program is told the sweep's folder, which its trial's folder lies in."""
    space: dict[str, Any] = Field(default={}, max_length=1000)
    """What is varied: a setting's dotted name, or several with commas between them that change together. A list of
    choices, or {range: [a, b]}, {log: [a, b]}, {int: [a, b]}, with `step` or `points` where a grid needs them."""
    points: list[dict[str, Any]] = Field(default=[], max_length=100_000)
    """The combinations themselves instead of a space; beside one, what the members of a population begin with."""
    metric: Annotated[Objective, BeforeValidator(lambda v: {"name": v} if isinstance(v, str) else v)] = Objective()
    goal: Annotated[
        Literal["maximise", "minimise"], BeforeValidator(lambda v: _GOALS.get(v, v) if isinstance(v, str) else v)
    ] = "maximise"
    """Whether more of the metric is better, or less."""
    search: Literal["grid", "random", "tpe", "gp", "population"] = "grid"
    """grid: every combination; random: independent draws; tpe and gp: Optuna's samplers, which learn from the trials
    that are over (extra `sweep`); population: all trials learn side by side, and the worst become copies of the best
    with other settings."""
    trials: Count | None = None
    """How many combinations are tried; a grid has all of them. The members of a population."""
    population: PopulationRules = PopulationRules()
    seeds: Annotated[list[CountOrZero], Field(min_length=1, max_length=MOST_SEEDS), BeforeValidator(_seeds)] = [0]
    """Runs per combination: how many, from seed 0, or a list of seeds. Of a population the first member's seed; the
    others have those after it."""
    seed: CountOrZero = 0
    """Root of the draws and of the order."""
    order: Literal["given", "random"] = "given"
    """Of a grid, and of points."""
    max_parallel: Whole = Field(default=1, ge=1, le=10_000)
    """Trials at once; the machine's cores are divided among them."""
    trials_per_gpu: Whole | None = Field(default=None, ge=1, le=1000)
    """Trials on one GPU at once, the least busy GPU first. None: trials see all GPUs."""
    pause_between: NotNegative = 0.0
    """Seconds between two starts."""
    retries: CountOrZero = 2
    """How often a trial that failed is started again by itself."""
    back_off: NotNegative = 10.0
    """Seconds before the first of these retries; twice as many before each further one."""
    stop: EarlyStop | None = None
    """Early stopping of trials that fall behind; off when left out."""
    environment: dict[str, str] = {}
    """Environment variables of every trial."""

    @property
    def adaptive(self) -> bool:
        """Whether the next combination depends on what the others reached."""
        return self.search in ("tpe", "gp")

    @property
    def better(self) -> float:
        """1 where more is better, -1 where less is."""
        return 1.0 if self.goal == "maximise" else -1.0


def load_plan(source: str | Path | Mapping[str, Any]) -> tuple[Plan, Path]:
    """The plan in a YAML file or mapping, and the folder that its experiment's file is relative to."""
    if isinstance(source, Mapping):
        try:
            values, where, told = plain(source), Path.cwd(), "the plan"
        except ValueError as error:
            raise UseError(str(error), "use text, numbers, true, false, null, lists and mappings") from None
    else:
        path = Path(source)
        values, where, told = read_yaml(path), path.absolute().parent, str(path)
    if "env" in values and "experiment" not in values:
        hint = f"train it with: tiltyard train {told}; a plan names it: experiment: {told}"
        raise UseError(f"{told} is an experiment and no plan of a sweep", hint)
    plan, found = validate(Plan, values)
    problems = [problem for _, problem in found]
    if plan is not None:
        problems += _cross_check(plan)
        if plan.search == "population" and "of" not in plan.metric.model_fields_set:
            plan = plan.model_copy(update={"metric": plan.metric.model_copy(update={"of": "last"})})
    if problems or plan is None:
        raise ConfigError(problems, told)
    return plan, where


def _cross_check(plan: Plan) -> list[Problem]:
    """What two settings of a plan together show."""
    found = []

    def wrong(setting: str, value: Any, message: str, hint: str) -> None:
        found.append(Problem(setting, short(value) if value is not None else "", message, hint))

    if plan.experiment is None and plan.program is None:
        wrong("experiment", None, "is missing", "name an experiment file: experiment: cartpole.yaml")
    if plan.experiment is not None and plan.program is not None:
        wrong("program", plan.program, "is one way, experiment another", "keep one of them")
    if plan.program == []:
        wrong("program", None, "is empty", "write the command line of a program")
    if plan.space and plan.points and plan.search != "population":
        wrong("points", None, "are one way to say what is varied, space another", "keep one of them")
    if plan.points and plan.search not in ("grid", "population"):
        wrong("search", plan.search, "chooses from a space, and points are given", "leave search out")
    if plan.search == "grid" and plan.trials is not None:
        wrong("trials", plan.trials, "is no setting of a grid, which has all combinations", "set search: random")
    if plan.search != "grid" and plan.trials is None:
        wrong("trials", None, "is missing", f"search: {plan.search} needs to know how many: trials: 20")
    if plan.search != "grid" and not plan.space:
        wrong("space", None, "is missing", "say what is varied: space: {algo.lr: {log: [1e-5, 1e-2]}}")
    if len(set(plan.seeds)) != len(plan.seeds):
        wrong("seeds", plan.seeds, "names a seed twice", "each seed is one run")
    found += check_names(plan.environment, "environment")
    if plan.search == "population":
        _check_population(plan, wrong)
    elif "population" in plan.model_fields_set and plan.population != PopulationRules():
        wrong("population", None, f"has rules, and search = {plan.search}", "set search: population")
    if plan.name is not None and (not NAME.fullmatch(plan.name) or ".." in plan.name):
        wrong("name", plan.name, "has 1 to 80 letters, digits and . _ + -", "it becomes a folder's name")
    return found


def _check_population(plan: Plan, wrong: Callable[[str, Any, str, str], None]) -> None:
    if plan.program is not None:
        wrong("program", plan.program, "has no checkpoints that could be copied", "name an experiment")
    if plan.trials is not None and plan.trials < 2:
        wrong("trials", plan.trials, "is no population", "two members or more")
    if plan.points and plan.trials is not None and len(plan.points) != plan.trials:
        wrong("points", len(plan.points), f"is not one for each of {plan.trials} members", "give one for each, or none")
    if len(plan.seeds) != 1:
        wrong("seeds", plan.seeds, "makes several populations", "one seed: the members have those after it")
    if plan.stop is not None:
        wrong("stop", plan.stop.rule, "ends members, which are replaced instead", "leave one of them out")
    if plan.order != "given":
        wrong("order", plan.order, "is of a grid", "the member with the fewest env steps goes next")
