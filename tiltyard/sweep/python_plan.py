"""Sweeps described in Python: parameters made by code, for Tiltyard's training and for any other program.

    from tiltyard.sweep.python_plan import Experiment, ParamGrid, RunDescription, seeds

    params = ParamGrid([
        ("seed", seeds(5)),
        ("algo.lr", [1e-3, 3e-4]),
        (("algo.rollout", "algo.minibatch"), ([64, 128], [128, 256])),     # change together
    ])
    RUN_DESCRIPTION = RunDescription("study", [Experiment("cartpole", "tiltyard train cartpole.yaml", params)])

`tiltyard sweep start study.py` (or the module's dotted name) makes one sweep of each experiment. For a command that
begins with `tiltyard train`, parameters are key=value settings; any other program gets them as flags: --lr=0.001.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiltyard.config.load import parse_override
from tiltyard.config.search_space import Choices, Point, fingerprint
from tiltyard.errors import TiltyardError, UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.sweep.space import grid

NAME = "RUN_DESCRIPTION"


def seeds(count: int) -> list[int]:
    """`count` different seeds, the same on every call."""
    return list(range(count))


@dataclass(frozen=True)
class ParamList:
    """An explicit list of combinations."""

    combinations: Sequence[Mapping[str, Any]]

    def generate_params(self, randomize: bool = False) -> Iterator[Point]:
        """Every combination, in the given order or shuffled; the shuffle is always the same."""
        found = [dict(each) for each in self.combinations]
        if randomize:
            random.Random(0).shuffle(found)
        return iter(found)


@dataclass(frozen=True)
class ParamGrid:
    """All combinations of (name, values). Several names in place of one, with as many values each, change together."""

    grid_tuples: Sequence[tuple[str | Sequence[str], Sequence[Any]]]

    def generate_params(self, randomize: bool = False) -> Iterator[Point]:
        """Every combination, the last parameter fastest, or shuffled; the shuffle is always the same."""
        found = []
        for names, given in self.grid_tuples:
            keys = (names,) if isinstance(names, str) else tuple(names)
            values = [(value,) for value in given] if isinstance(names, str) else list(given)
            if not values:
                raise UseError(f"the grid has no value for {names!r}", "give at least one, or remove the name")
            wrong = [value for value in values if len(value) != len(keys)]
            if wrong:
                hint = "give one value for each name"
                raise UseError(f"{wrong[0]!r} does not have {len(keys)} values, for {', '.join(keys)}", hint)
            found.append(Choices(keys, tuple(values)))
        return ParamList(grid(found)).generate_params(randomize)


@dataclass(frozen=True)
class Experiment:
    """A command and the parameters that vary."""

    name: str
    command: str
    params: ParamGrid | ParamList | Iterable[Mapping[str, Any]] = ()
    env_vars: Mapping[str, str] = field(default_factory=dict)

    def points(self) -> list[Point]:
        """The combinations; one without parameters when there are none."""
        made = self.params.generate_params() if isinstance(self.params, ParamGrid | ParamList) else self.params
        return [dict(each) for each in made] or [{}]


@dataclass(frozen=True)
class RunDescription:
    """Experiments that belong together, and the other settings of their plans."""

    run_name: str
    experiments: Sequence[Experiment]
    experiment_arg_name: str | None = None
    """flag that passes another program its trial's name: "--experiment" """
    experiment_dir_arg_name: str | None = None
    """flag that passes it the folder that holds the trial's: "--train_dir" """
    param_prefix: str = "--"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """as in a plan: max_parallel, pause_between, order, trials_per_gpu, retries, metric, goal, stop"""

    def plans(self) -> list[dict[str, Any]]:
        """One plan for each experiment."""
        return [self._plan(experiment) for experiment in self.experiments]

    def _plan(self, experiment: Experiment) -> dict[str, Any]:
        name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", f"{self.run_name}-{experiment.name}").strip("-.")[:80]
        plan = {"name": name, **self.settings}
        variables = self.settings.get("environment", {})
        if isinstance(variables, Mapping):  # else loading the plan reports the error
            plan["environment"] = {**variables, **experiment.env_vars}
        words, points = _words(experiment.command), experiment.points()
        target = _trained(words)
        if target is None:
            flags = {"name_flag": self.experiment_arg_name, "folder_flag": self.experiment_dir_arg_name}
            plan |= {"program": words, "flag": self.param_prefix, **flags}
        else:
            plan["experiment"], changes = target[0], dict(parse_override(word) for word in target[1:])
            points = [{**changes, **point} for point in points]
        points, found = _without_seeds(points, keep=target is None)
        return {**plan, "points": points, **({"seeds": found} if found else {})}


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UseError(f"cannot parse the command {command!r}: {error}", "quote it as in a shell") from None


def _trained(words: Sequence[str]) -> list[str] | None:
    """The words after `tiltyard train`, or None for another command."""
    for front in (("tiltyard", "train"), ("python", "-m", "tiltyard", "train")):
        if tuple(words[: len(front)]) == front:
            rest = list(words[len(front) :])
            options = [word for word in rest if word.startswith("--")]
            if options or not rest:
                hint = "write `tiltyard train FILE key=value ...`; profiles are chosen by `sweep start --on`"
                raise UseError(f"a sweep cannot run the command {shlex.join(words)!r}", hint)
            return rest
    return None


def _without_seeds(points: Sequence[Point], *, keep: bool) -> tuple[list[Point], list[int]]:
    """Points without their seeds, each once, and the seeds, which all must share. With `keep`, for another program, a
    seed that does not vary or differs between points stays an ordinary parameter."""
    by_point: dict[str, tuple[Point, list[int]]] = {}
    for point in points:
        rest = {key: value for key, value in point.items() if key != "seed"}
        found = by_point.setdefault(fingerprint(rest), (rest, []))[1]
        found += [point["seed"]] if "seed" in point else []
    lists = [sorted(found) for _, found in by_point.values()]
    if keep and (len(lists[0]) < 2 or any(each != lists[0] for each in lists)):
        return list(points), []
    if any(each != lists[0] for each in lists):
        raise UseError("the combinations have different seeds", "give all of them the same seeds, as ParamGrid does")
    return [point for point, _ in by_point.values()], lists[0]


@contextlib.contextmanager
def _importing_from(folder: Path, text: str) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    except TiltyardError:
        raise
    except Exception as error:
        hint = "the traceback shows where; the classes are those of tiltyard.sweep.python_plan"
        raise UseError(f"{text} {raised(error)}", hint, user_traceback(error)) from error
    finally:
        sys.path.remove(str(folder))


def load_description(text: str) -> RunDescription:
    """Load RUN_DESCRIPTION from a Python file, or from a module by its dotted name."""
    if text.endswith(".py"):
        path = Path(text)
        if not path.is_file():
            raise UseError(f"no such file: {text}", "give a plan, or a Python file with a RUN_DESCRIPTION")
        spec = importlib.util.spec_from_file_location(f"description_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses in the file are looked up here
        with _importing_from(path.absolute().parent, text):
            spec.loader.exec_module(module)
    else:
        with _importing_from(Path.cwd(), text):
            module = importlib.import_module(text)
    found = getattr(module, NAME, None)
    if not isinstance(found, RunDescription):
        hint = "RUN_DESCRIPTION = RunDescription(name, [Experiment(...)])"
        raise UseError(f"{text} has no {NAME}", f"write {hint}")
    return found


def is_module(text: str) -> bool:
    """Whether the text names a module that can be imported here."""
    if not all(part.isidentifier() for part in text.split(".")):
        return False
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(text) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)
