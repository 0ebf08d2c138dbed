"""Conditions on episodes, parsed from strings: `return>=100`, `seed=10..20`, `policy=random*`, `terminated`.

return length seed episode    = != < <= > >= with a number; = and != also with a range: 10..20, 10.., ..20
policy agent                  = != with a name, in which * and ? stand for other characters
terminated truncated          alone, with ! before it, or = true, = false
"""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from tiltyard.data.manifest import Manifest
from tiltyard.data.statistics import policy_codes
from tiltyard.errors import UseError, did_you_mean
from tiltyard.types import Array

NUMBERS = ("return", "length", "seed", "episode")
NAMES = ("policy", "agent")
FLAGS = ("terminated", "truncated")
_FORM = re.compile(r"(!?)\s*(\w+)\s*(?:(>=|<=|!=|==|=|>|<)\s*(.*))?", re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_HINT = "write for example 'return>=100', 'seed=0..99', 'policy=random', terminated or '!terminated'"


@dataclass(frozen=True)
class Condition:
    """One condition: a name, a comparison, and a number, a range (low, high), a pattern or true and false."""

    text: str
    name: str
    comparison: str
    value: int | float | str | bool | tuple[float, float]

    def met_by(self, found: Manifest) -> Array:
        """bool [N]: which rows of the manifest meet it."""
        if self.name == "policy":
            codes, names = policy_codes(found)
            rows = self._matching(names)[codes]
        elif self.name == "agent":
            encoded = pc.dictionary_encode(found.table.column("agent").combine_chunks())
            rows = self._matching(encoded.dictionary.to_pylist())[np.asarray(encoded.indices)]
        elif isinstance(self.value, tuple):
            column = found.column(self.name)
            rows = (column >= self.value[0]) & (column <= self.value[1])
        else:
            return np.asarray(_COMPARE[self.comparison](found.column(self.name), self.value), bool)
        return ~rows if self.comparison == "!=" else rows

    def _matching(self, names: Sequence[str]) -> Array:
        return np.asarray([fnmatch.fnmatchcase(name, str(self.value)) for name in names], bool)


def met_by_all(conditions: Sequence[Condition], found: Manifest) -> Array:
    """bool [N]: which rows of the manifest meet all conditions."""
    rows = np.ones(len(found), bool)
    for condition in conditions:
        rows &= condition.met_by(found)
    return rows


def parse(text: str) -> Condition:
    """The condition in a string. UseError if it is not one."""
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise UseError(f"--where {text!r} is not a condition", _HINT)
    negated, name, comparison, value = form[1] == "!", form[2], form[3], (form[4] or "").strip()
    known = (*NUMBERS, *NAMES, *FLAGS)
    if name not in known:
        raise UseError(f"--where {text!r}: unknown name {name!r}", did_you_mean(name, known))
    comparison = "=" if comparison == "==" else comparison
    if name in FLAGS:
        return Condition(text, name, "=", _flag(text, comparison, value) != negated)
    if negated or not comparison or not value:
        raise UseError(f"--where {text!r} needs a comparison and a value after {name!r}", _HINT)
    if name in NAMES:
        if comparison not in ("=", "!="):
            raise UseError(f"--where {text!r}: {name} is compared with = or != only", _HINT)
        return Condition(text, name, comparison, value)
    low, dots, high = value.partition("..")
    if dots:
        if comparison not in ("=", "!="):
            raise UseError(f"--where {text!r}: a range is compared with = or != only", _HINT)
        return Condition(text, name, comparison, (_number(text, low, -math.inf), _number(text, high, math.inf)))
    return Condition(text, name, comparison, _number(text, value))


def _flag(text: str, comparison: str | None, value: str) -> bool:
    if comparison is None:
        return True
    if comparison not in ("=", "!=") or value.lower() not in ("true", "false"):
        raise UseError(f"--where {text!r} must be true or false", _HINT)
    return (value.lower() == "true") == (comparison == "=")


def _number(text: str, value: str, default: float | None = None) -> int | float:
    """An integer if it is one: seeds are larger than floats are exact."""
    plain = value.strip().replace("_", "")
    if not plain and default is not None:
        return default
    try:
        return int(plain) if re.fullmatch(r"[+-]?[0-9]+", plain) else _finite(float(plain))
    except ValueError:
        raise UseError(f"--where {text!r}: {value.strip()!r} is not a number", _HINT) from None


def _finite(value: float) -> float:
    if math.isnan(value):
        raise ValueError
    return value
