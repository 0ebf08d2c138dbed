"""Merge layers of settings on dotted names and remember the origin of every value; validates nothing.

    defaults < presets < file < profile < command line        later layers win, value by value

Another algorithm, engine or kind of schedule discards that section's values from lower layers; another env or model
discards only its options, which envs of one family share. Lists are replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tiltyard.config.experiment import Experiment
from tiltyard.config.fields import Settings
from tiltyard.errors import Problem
from tiltyard.plugins.resolve import family_of, is_own_algo, short

Keys = tuple[str, ...]
Shape = Union["Section", "Free", None]


@dataclass(frozen=True)
class Section:
    """A mapping with known keys. `scheduled`: a number is allowed instead. `optional`: null turns it off."""

    models: tuple[type[Settings], ...]
    scheduled: bool = False
    optional: bool = False

    @property
    def tag(self) -> str | None:
        """The key (`kind` or `id`) whose value selects the model; None if there is only one."""
        for name in ("id", "kind"):
            annotation = self.models[0].model_fields[name].annotation if name in self.models[0].model_fields else None
            if get_origin(annotation) is Literal and len(get_args(annotation)) == 1:
                return name
        return None

    @property
    def short(self) -> str | None:
        """The key that is set when plain text is given instead of the section."""
        first = next(iter(self.models[0].model_fields))
        return first if first in ("id", "kind", "mode") and not self.scheduled else None

    @property
    def tags(self) -> dict[str, type[Settings]]:
        """The models by the word that selects them."""
        if self.tag is None:
            return {}
        tag = self.tag
        return {word: model for model in self.models for word in get_args(model.model_fields[tag].annotation)}

    def chosen(self, values: Any) -> type[Settings]:
        """The model that `values` select, else the first."""
        word = values.get(self.tag) if self.tag and isinstance(values, Mapping) else None
        own = self.models[-1 if is_own_algo(word) else 0]  # path/file.py:Name selects the last
        return self.tags.get(word, own) if isinstance(word, str) else own

    def field(self, name: str) -> Shape:
        """The shape of the setting called `name`; None for a plain value or an unknown setting."""
        return next((fields(model)[name] for model in self.models if name in fields(model)), None)


@dataclass(frozen=True)
class Free:
    """A mapping with any keys, whose values are sections or anything. `whole`: values are replaced, not merged."""

    item: Section | None = None
    whole: bool = False


def inside(shape: Shape, name: str) -> Shape:
    """The shape of the key `name` in a mapping of shape `shape`."""
    if isinstance(shape, Section):
        return shape.field(name)
    return shape.item if isinstance(shape, Free) else None


@cache
def fields(model: type[Settings]) -> dict[str, Shape]:
    """The shape of each setting of a model, by its name in files."""
    return {info.alias or name: _shape(info.annotation) for name, info in model.model_fields.items()}


def _shape(annotation: Any) -> Shape:
    options = _members(annotation)
    if get_origin(options[0]) is dict:
        inner = _shape(get_args(options[0])[1])
        return Free(inner if isinstance(inner, Section) else None, whole=isinstance(inner, Free))
    models = tuple(each for each in options if isinstance(each, type) and issubclass(each, Settings))
    return Section(models, scheduled=float in options, optional=type(None) in options) if models else None


def _members(annotation: Any) -> list[Any]:
    """The types of a union, or the one type."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return [member for each in get_args(annotation) for member in _members(each)]
    return [annotation]


ROOT = Section((Experiment,))
MAX_LEVELS = 50


def split_key(key: str) -> Keys:
    """The keys of a dotted name. Names of observations and policies may contain dots: model.encoders.camera.left.id
    has four keys."""
    parts = key.split(".")
    place: Shape = ROOT
    for i, part in enumerate(parts):
        if isinstance(place, Free) and place.item is not None:
            rest, known = parts[i:], fields(place.item.models[0])
            ends = (
                j
                for j, word in enumerate(rest)
                if j > 0 and word in known and (known[word] is not None or j == len(rest) - 1)
            )
            end = next(ends, len(rest))
            return (*parts[:i], ".".join(rest[:end]), *rest[end:])
        place = place.field(part) if isinstance(place, Section) else None
    return tuple(parts)


@dataclass
class Merged:
    """The layers merged so far. `origins` is keyed by the path of each value; absent values are defaults."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Keys, str] = field(default_factory=dict)

    def add(self, layer: Mapping[str, Any], origin: str) -> None:
        for name, value in layer.items():
            self._put(self.values, (name,), value, ROOT.field(name), origin)

    def origin(self, path: Keys) -> str:
        """Where the value at `path` came from."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "default"

    def drop(self, *path: str) -> None:
        """Remove a setting, as if no layer had set it."""
        place: Any = self.values
        for name in path[:-1]:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(path[-1], None)
        self._forget(path)

    def _put(self, into: dict[str, Any], path: Keys, value: Any, shape: Shape, origin: str) -> None:
        name = path[-1]
        value = _long_form(value, shape)
        if shape is None or not isinstance(value, Mapping):
            self._forget(path)
            into[name] = value
            self.origins[path] = origin
            return
        lower = into.get(name)
        if not isinstance(lower, dict):
            self._forget(path)
            into[name] = lower = {}
            if not value:
                self.origins[path] = origin
        if isinstance(shape, Section):
            self._discard_lower(lower, path, value, shape)
        for key, inner in value.items():
            below = inside(shape, key)
            if isinstance(shape, Free) and not shape.whole and below is None and isinstance(inner, Mapping):
                below = Free()  # mappings inside options are merged too
            self._put(lower, (*path, key), inner, below, origin)

    def _discard_lower(self, lower: dict[str, Any], path: Keys, value: Mapping[str, Any], shape: Section) -> None:
        """Discard values of lower layers that belong to another id or kind."""
        tag = shape.tag or ("id" if "options" in shape.models[0].model_fields else None)
        if tag is None or tag not in value:
            return
        known = shape.models[0].model_fields[tag]
        if tag not in lower and not shape.scheduled and known.is_required():
            return  # a preset's env options, which apply to whichever env a higher layer selects
        default = None if shape.scheduled else known.default
        before, after = lower.get(tag, default), value[tag]
        if before == after or (_family(after) and _family(before) == _family(after)):
            return
        for key in list(lower) if shape.tag else [key for key in lower if key == "options"]:
            del lower[key]
            self._forget((*path, key))

    def _forget(self, path: Keys) -> None:
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]


def _family(env_id: Any) -> str | None:
    found = family_of(env_id) if isinstance(env_id, str) else None
    return found[0] if found else None


def _long_form(value: Any, shape: Shape) -> Any:
    """Expand `env: X` to `env: {id: X}`, and null to an empty section."""
    if isinstance(shape, Section) and not shape.scheduled:
        if value is None and not shape.optional:
            return {}
        if (isinstance(value, str) or callable(value)) and shape.short:
            return {shape.short: value}
    if isinstance(shape, Free) and value is None:
        return {}
    return value


def as_layer(settings: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], list[Problem]]:
    """Settings with dotted names (`algo.lr`) as one nested layer, and problems with names that are set twice.

    Of two values the last counts. Another id discards nothing here, so the order of settings does not matter.
    """
    made: dict[str, Any] = {}
    twice: list[Problem] = []
    for key, value in settings:
        layer: Any = value
        for name in reversed(split_key(key)):
            layer = {name: layer}
        _join(made, layer, ROOT, (), twice)
    return with_new_names(made), twice


def _join(into: dict[str, Any], layer: Mapping[str, Any], shape: Shape, path: Keys, twice: list[Problem]) -> None:
    for key, value in layer.items():
        below, here = inside(shape, key), (*path, key)
        value = _long_form(value, below)
        if key in into and not (isinstance(value, Mapping) and isinstance(into[key], dict)):
            message = "is set twice, once by its dotted name and once inside its section"
            twice.append(Problem(".".join(here), short(value), message, "keep one of them"))
            del into[key]
        if isinstance(value, Mapping):
            _join(into.setdefault(key, {}), value, below, here, twice)
        else:
            into[key] = value


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Settings with their current names: version 0.1 had `env.comes_back`, with a value `replay`."""
    env = values.get("env")
    if not isinstance(env, dict):
        return values
    env = {"restore_mode" if key == "comes_back" else key: value for key, value in env.items()}
    if env.get("restore_mode") == "replay":
        env["restore_mode"] = "rerun"
    return {**values, "env": env}


def plain(value: Any, path: Keys = ()) -> Any:
    """A deep copy of plain YAML values, or a ValueError that names the place. Tuples become lists, paths strings.

    Classes and functions stay, except in options, until plugins/capture.py names them.
    """
    if len(path) > MAX_LEVELS:
        raise ValueError(f"{'.'.join(path[:6])}... is nested more than {MAX_LEVELS} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{'.'.join((*path, ''))}{key!r}: a key must be text")
        return {str(key): plain(inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, (*path, str(i))) for i, inner in enumerate(value)]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError(f"{'.'.join(path)} contains text that is not valid Unicode")
        return str(value)
    if value is None or isinstance(value, bool | int | float) or (callable(value) and "options" not in path):
        return value
    raise ValueError(f"{'.'.join(path)} has a value of type {type(value).__name__}, which YAML cannot express")
