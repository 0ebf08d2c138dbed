"""Types of settings: numbers with bounds, sections, and plug-ins named by an import string."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

HUGE = 10**15


def _whole(value: Any) -> Any:
    """Accept 2e6 as a whole number: YAML reads numbers with an exponent as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bare_id(value: Any) -> Any:
    """Expand `env: CartPole-v1` to `env: {id: CartPole-v1}`."""
    return {"id": value} if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1, le=HUGE), BeforeValidator(_whole)]
CountOrZero = Annotated[int, Field(ge=0, le=HUGE), BeforeValidator(_whole)]
Width = Annotated[int, Field(ge=1, le=16384), BeforeValidator(_whole)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Options = dict[str, Any]


class Settings(BaseModel):
    # Built on first use: most processes need one section, and building all takes a tenth of a second.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, defer_build=True)


class Plugin(Settings):
    """A plug-in: a built-in name, `package.module:Name` or `path/file.py:Name`, with options."""

    id: str = Field(min_length=1, max_length=500)
    """Built-in name, `package.module:Name` or `path/file.py:Name`; `path/file.py` means its conventional class."""
    options: Options = {}
    """Keyword arguments, checked against the plug-in's signature before anything starts."""


PluginRef = Annotated[Plugin, BeforeValidator(bare_id)]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flat(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every leaf of nested settings; lists and empty mappings are leaves."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, (*path, key))
        else:
            yield (*path, key), value
