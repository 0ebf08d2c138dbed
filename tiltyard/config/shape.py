"""The shape of the settings classes: which setting is a section, which a free mapping, which a plain value.

Read off the pydantic fields once, so that merging, error texts and the reference page need no list of settings of
their own.

    Section   a mapping with known keys; several models when `tag` (id, kind) chooses one of them
    Free      a mapping with any keys: options as they are, or plug-ins by name
    None      a plain value or a list: replaced as a whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tiltyard.config.fields import Settings


@dataclass(frozen=True)
class Section:
    """A mapping with known keys. `scheduled`: a number may stand in its place; `optional`: it is off when left out."""

    models: tuple[type[Settings], ...]
    scheduled: bool = False
    optional: bool = False

    @property
    def tag(self) -> str | None:
        """The key whose change makes it another section: a `kind` or `id` that chooses the model."""
        for name in ("id", "kind"):
            annotation = self.models[0].model_fields[name].annotation if name in self.models[0].model_fields else None
            if get_origin(annotation) is Literal and len(get_args(annotation)) == 1:
                return name
        return None

    @property
    def short(self) -> str | None:
        """The key that plain text in place of the section stands for."""
        first = next(iter(self.models[0].model_fields))
        return first if first in ("id", "kind", "mode") and not self.scheduled else None

    @property
    def tags(self) -> dict[str, type[Settings]]:
        """Model by the word that chooses it."""
        if self.tag is None:
            return {}
        tag = self.tag
        return {word: model for model in self.models for word in get_args(model.model_fields[tag].annotation)}

    def chosen(self, values: Any) -> type[Settings]:
        """The model that `values` ask for, else the first."""
        word = values.get(self.tag) if self.tag and isinstance(values, Mapping) else None
        return self.tags.get(word, self.models[0]) if isinstance(word, str) else self.models[0]

    def field(self, name: str) -> Section | Free | None:
        """The shape of the setting called `name`; None for a plain value and for what is no setting."""
        return next((fields(model)[name] for model in self.models if name in fields(model)), None)


@dataclass(frozen=True)
class Free:
    """A mapping with any keys, whose values are sections or anything. `whole`: each of them is replaced as a whole."""

    item: Section | None = None
    whole: bool = False


def inside(shape: Section | Free | None, name: str) -> Section | Free | None:
    """The shape of what is called `name` in something of shape `shape`."""
    if isinstance(shape, Section):
        return shape.field(name)
    return shape.item if isinstance(shape, Free) else None


@cache
def fields(model: type[Settings]) -> dict[str, Section | Free | None]:
    """The shape of each setting of a model by the name used in files."""
    return {info.alias or name: _shape(info.annotation) for name, info in model.model_fields.items()}


def _shape(annotation: Any) -> Section | Free | None:
    annotation = _bare(annotation)
    if get_origin(annotation) is dict:
        inner = _shape(get_args(annotation)[1])
        return Free(inner if isinstance(inner, Section) else None, whole=isinstance(inner, Free))
    options = [_bare(each) for each in _members(annotation)]
    models = tuple(each for each in options if isinstance(each, type) and issubclass(each, Settings))
    return Section(models, scheduled=float in options, optional=type(None) in options) if models else None


def _members(annotation: Any) -> list[Any]:
    annotation = _bare(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return [member for each in get_args(annotation) for member in _members(each)]
    return [annotation]


def _bare(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def split_key(key: str, root: Section) -> tuple[str, ...]:
    """A dotted name as keys. Names of observations and policies may hold dots: model.encoders.camera.left.id has four
    keys."""
    parts = key.split(".")
    place: Section | Free | None = root
    for i, part in enumerate(parts):
        if isinstance(place, Free) and place.item is not None:
            rest, known = parts[i:], fields(place.item.models[0])
            ends = [
                j
                for j, word in enumerate(rest)
                if j > 0 and word in known and (known[word] is not None or j == len(rest) - 1)
            ]
            end = ends[0] if ends else len(rest)
            return (*parts[:i], ".".join(rest[:end]), *rest[end:])
        place = place.field(part) if isinstance(place, Section) else None
    return tuple(parts)
