"""Validate settings with pydantic and report every error as a Problem in plain words; raises nothing.

    values ── special answers ──> ── pydantic ──> ── each error: dotted name, value, message, hint ──> [Problem]

Special answers are for names that users know from other libraries: algorithms and settings.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from tiltyard.config.error_messages import Keys, explain
from tiltyard.config.experiment import SCHEMA
from tiltyard.config.fields import Settings
from tiltyard.config.rllib_algos import NAMED, NOT_NAMED, ONLY_RLLIB
from tiltyard.errors import Problem, did_you_mean
from tiltyard.plugins.resolve import is_own_algo, short

Found = list[tuple[Keys, Problem]]
Model = TypeVar("Model", bound=Settings)

_NOT_YET = ("td3", "ddpg", "rainbow")
_KNOWN = ("ppo", "a2c", *ONLY_RLLIB, "clone")


def special_answers(values: dict[str, Any]) -> Found:
    """Problems that deserve a special message. Their settings are removed from `values`, so none is reported twice."""
    found: Found = []
    for path in ((), ("algo",), ("model",), ("engine",)):
        place = values.get(path[0]) if path else values
        if isinstance(place, dict) and "framework" in place:
            setting, given = ".".join((*path, "framework")), short(place.pop("framework"))
            message = "unknown setting; Tiltyard's models are PyTorch modules"
            found.append(((*path, "framework"), Problem(setting, given, message, "leave framework out")))
    algo = values.get("algo")
    word = algo.get("id") if isinstance(algo, dict) else None
    if isinstance(word, str) and word not in _KNOWN and not is_own_algo(word):
        found.append((("algo",), Problem("algo.id", short(word), *_algorithm(word))))
        del values["algo"]  # its other settings cannot be checked
    version = values.get("version")
    if type(version) is int and version > SCHEMA:
        message = f"was written by a newer Tiltyard; this one reads version {SCHEMA}"
        found.append((("version",), Problem("version", short(version), message, "update Tiltyard")))
        del values["version"]
    return found


def _algorithm(word: str) -> tuple[str, str]:
    """Message and hint for an unknown algorithm."""
    if word.lower() == "a3c":
        return "not available; use a2c", "a2c is the synchronous version of the same method; write algo: a2c"
    bare = word.lower().removeprefix("rllib:")
    name = next((each for each in (*NAMED, *NOT_NAMED) if each.lower().removeprefix("rllib:") == bare), "")
    if name in NAMED:
        return "unknown algorithm", f"did you mean {name}?"
    if name in NOT_NAMED:
        return f"not supported: RLlib's {name} {NOT_NAMED[name]}", f"known: {', '.join(_KNOWN)}"
    if word.lower() in _NOT_YET:
        return "not in this version", f"known: {', '.join(_KNOWN)}"
    return "unknown algorithm", did_you_mean(word, _KNOWN)


def validate(model: type[Model], values: dict[str, Any]) -> tuple[Model | None, Found]:
    """`values` as a settings object, or None and every problem with its path."""
    try:
        return model.model_validate(values, by_alias=True, by_name=False), []
    except ValidationError as error:
        found: dict[Keys, Problem] = {}
        for each in error.errors(include_url=False):
            for path, problem in explain(model, values, each):
                found.setdefault(path, problem)
        return None, list(found.items())
    except RecursionError:
        return None, [((), Problem("", "", "the settings are nested too deep", "use fewer levels"))]


def prune(values: Any, path: Keys) -> Any:
    """A copy of `values` without the value at `path`; for an item of a list, without the whole list."""
    if not path or not isinstance(values, dict):
        return values
    kept = dict(values)
    below = kept.get(path[0])
    if len(path) == 1 or not isinstance(below, dict) or (len(path) == 2 and path[1] not in below):
        kept.pop(path[0], None)  # also a section with a missing key
    else:
        kept[path[0]] = prune(below, path[1:])
    return kept
