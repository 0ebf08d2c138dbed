"""Read and write YAML 1.2: text to plain dicts, lists and scalars, and back; knows nothing of settings.

Plain scalars follow the core rules (`3e-4` is a float, `1_000_000` an int, `off` text), whatever a %YAML line says.
ruamel.yaml scans; values are built here from its events, so that size is limited while reading: an alias counts as much
as its value, so that nested aliases ("billion laughs") are refused early.

    at most   1 MiB of text   100,000 nodes   50 levels   one document   no tags beyond the core ones
"""

from __future__ import annotations

import difflib
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.representer import SafeRepresenter

from tiltyard.errors import UseError

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 50
MAX_DIGITS = 1000

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_OTHER_BASE = re.compile(r"0o[0-7_]+|0x[0-9a-fA-F_]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_CORE = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}


def scalar(text: str) -> Any:
    """The value of a plain (unquoted) scalar by the YAML 1.2 core rules, with underscores in numbers allowed."""
    if text in _WORDS:
        return _WORDS[text]
    if not text or text[0] not in "+-.0123456789" or len(text) > MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _OTHER_BASE.fullmatch(text) and text.strip("0ox_"):
        return int(text.replace("_", ""), 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if infinite := _INFINITE.fullmatch(text):
        return float(f"{infinite[1]}inf")
    return float("nan") if text in (".nan", ".NaN", ".NAN") else text


@dataclass
class _Reader:
    """One pass over the events of one text. `anchors` has each named node and its size; None while it is open."""

    source: str
    events: Iterator[Any]
    nodes: int = 0
    anchors: dict[str, tuple[Any, int] | None] = field(default_factory=dict)

    def wrong(self, event: Any, message: str, hint: str) -> UseError:
        return UseError(f"{self.source}, line {event.start_mark.line + 1}: {message}", hint)

    def count(self, event: Any, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self.wrong(
                event,
                f"more than {MAX_NODES:,} values after expanding aliases",
                "an experiment needs a few hundred",
            )

    def value(self, event: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.wrong(event, f"nested more than {MAX_DEPTH} levels deep", "an experiment needs four levels")
        if isinstance(event, AliasEvent):
            return self.alias(event)
        self.count(event, 1)
        before = self.nodes
        if event.anchor:
            self.anchors[event.anchor] = None
        if event.tag and event.tag not in _PLAIN_TAGS:
            tag = event.tag.replace(_CORE, "!!")
            raise self.wrong(
                event,
                f"the tag {tag!r} is not allowed",
                "leave the tag out; only plain text, numbers, lists and mappings are read",
            )
        if isinstance(event, ScalarEvent):
            made: Any = self.scalar(event)
        elif isinstance(event, SequenceStartEvent):
            made = [self.value(item, depth + 1) for item in self.until(SequenceEndEvent)]
        else:
            made = self.mapping(depth)
        if event.anchor:
            self.anchors[event.anchor] = (made, self.nodes - before + 1)
        return made

    def until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self.events), end):
            yield event

    def alias(self, event: Any) -> Any:
        if event.anchor not in self.anchors:
            raise self.wrong(
                event, f"unknown alias *{event.anchor}", f"write &{event.anchor} before the value it refers to"
            )
        known = self.anchors[event.anchor]
        if known is None:
            raise self.wrong(event, f"alias *{event.anchor} is inside the value it refers to", "write the value out")
        self.count(event, known[1])
        return known[0]

    def scalar(self, event: Any) -> Any:
        tag = (event.tag or "").removeprefix(_CORE)
        text = str(event.value)
        value = scalar(text) if event.implicit[0] or tag not in ("", "str") else text
        if tag == "float" and type(value) is int:
            value = float(value)
        if tag not in ("", "str", {bool: "bool", int: "int", float: "float", type(None): "null"}.get(type(value))):
            raise self.wrong(event, f"{text[:60]!r} is not a valid !!{tag}", "leave the tag out")
        if isinstance(value, str) and event.style is None and len(value) > MAX_DIGITS and _FLOAT.fullmatch(value):
            raise self.wrong(
                event, f"a number of {len(value):,} digits is too long", "write it with an exponent, as in 1e6"
            )
        return value

    def mapping(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        merged: list[tuple[Any, Any]] = []
        lines: dict[str, int] = {}
        for event in self.until(MappingEndEvent):
            key = self.value(event, depth + 1)
            value = self.value(next(self.events), depth + 1)
            if not isinstance(key, str):
                shown = "null" if key is None else str(key)[:60]
                raise self.wrong(event, f"the key {shown} is not text", "put the key in quotes")
            if key == "<<" and event.style is None:
                merged += [(event, each) for each in (value if isinstance(value, list) else [value])]
                continue
            if key in made:
                raise self.wrong(
                    event,
                    f"duplicate key {key!r}, first in line {lines[key]}",
                    "keep one of them",
                )
            made[key] = value
            lines[key] = event.start_mark.line + 1
        for event, other in merged:
            if not isinstance(other, dict):
                raise self.wrong(event, "<< takes a mapping or a list of mappings", "write <<: *name")
            self.count(event, len(other))
            made = {**other, **made}
        return made


def parse_yaml(text: str, source: str) -> Any:
    """The value in a YAML text; None if it is empty. `source` names the text in errors."""
    if len(text) > MAX_BYTES:
        raise UseError(
            f"{source} has {len(text):,} characters, more than {MAX_BYTES:,}", "check that this is the right file"
        )
    try:
        reader = _Reader(source, iter(YAML(typ="safe", pure=True).parse(StringIO(text))))
        found: list[Any] = []
        for event in reader.events:
            if isinstance(event, DocumentStartEvent):
                if found:
                    raise reader.wrong(
                        event, "a second document starts here", "keep one document per file; remove the ---"
                    )
                found.append(reader.value(next(reader.events), 0))
        return found[0] if found else None
    except UseError:
        raise
    except YAMLError as error:
        raise UseError(*_explain(error, text, source)) from None
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # ruamel's scanner crashes on some malformed texts instead of refusing them
        raise UseError(
            f"{source} is not valid YAML (the scanner raised {type(error).__name__})",
            "compare it with examples/full.yaml",
        ) from None


def _explain(error: YAMLError, text: str, source: str) -> tuple[str, str]:
    """A scanner's error as message and hint."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read")
    if mark is None:
        position = getattr(error, "position", None)
        line = text.count("\n", 0, position) + 1 if isinstance(position, int) else None
        return f"{source}{f', line {line}' if line else ''}: {problem}", "check that this is a YAML text file"
    lines = text.splitlines()
    shown = lines[mark.line].strip()[:80] if mark.line < len(lines) else ""
    hint = "check quotes, brackets and indentation there" + (" or just above it" if not shown else "")
    if "mapping values are not allowed" in problem:
        if shown.count(": ") + shown.endswith(":") > 1:
            problem, hint = "a second ': ' in one line", "put text with a colon in quotes"
        else:
            problem, hint = "a line is indented too far", "indent it like the lines around it"
    elif r"'\t'" in problem:
        problem, hint = "a tab instead of spaces", "indent with spaces"
    elif "stream end" in problem or "end of stream" in problem:
        opened = getattr(error, "context_mark", None) or mark
        return (
            f"{source}, line {min(opened.line + 1, len(lines))}: a quote, bracket or brace is never closed",
            "close it",
        )
    return f"{source}, line {mark.line + 1}: {problem}{f' in {shown!r}' if shown else ''}", hint


def read_text(path: Path) -> str:
    """The text of a YAML file, or a UseError that says why it cannot be read."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            inside = path / "experiment.yaml"
            typed = shlex.quote(str(path))
            hint = f"for a run folder: tiltyard resume {typed}" if inside.exists() else "give a YAML file inside it"
            raise UseError(f"{path} is a folder, not a YAML file", hint)
        if not stat.S_ISREG(kind):
            raise UseError(f"{path} is not a regular file", "give a YAML file")
        if path.stat().st_size > MAX_BYTES:
            raise UseError(
                f"{path} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}",
                "check that this is the right file",
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UseError(f"{path} does not exist", _near(path)) from None
    except (OSError, ValueError) as error:
        raise UseError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", "check the path and its permissions"
        ) from None
    if b"\0" in raw:
        raise UseError(f"{path} is a binary file, not YAML text", "check that this is the right file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UseError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8 text", "save the file as UTF-8"
        ) from None


def _near(path: Path) -> str:
    """A hint with the most similar name of a YAML file in the same folder."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    try:
        names = {item.stem: item.name for item in path.parent.iterdir() if item.suffix in (".yaml", ".yml")}
    except OSError:
        names = {}
    near = difflib.get_close_matches(path.stem, names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else "check the path"


def as_mapping(value: Any, source: str) -> dict[str, Any]:
    """`value`, or UseError if it is not a mapping or is empty."""
    if value is None:
        raise UseError(f"{source} is empty", "write at least `env: CartPole-v1`")
    if not isinstance(value, dict):
        found = {list: "a list", str: "text", bool: "a truth value"}.get(type(value), "a number")
        raise UseError(f"{source} must have `setting: value` lines, but has {found}", "start with `env: CartPole-v1`")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; UseError if it is missing, unreadable or not a mapping."""
    path = Path(path)
    return as_mapping(parse_yaml(read_text(path), str(path)), str(path))


class _Representer(SafeRepresenter):
    """Quotes text that `scalar` would read as another type; writes several lines as a block; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> Any:
        if not data.replace("\n", "").isprintable():
            style: str | None = '"'  # only escapes preserve control characters and other line ends
        elif "\n" in data:
            style = "|"
        else:
            style = None if scalar(data) is data else '"'
        return self.represent_scalar(f"{_CORE}str", data, style=style)

    def represent_sequence_of(self, data: list[Any]) -> Any:
        inline = not any(isinstance(item, dict | list) and item and not _is_pair(item) for item in data)
        return self.represent_sequence(f"{_CORE}seq", data, flow_style=inline)


def _is_pair(item: Any) -> bool:
    """Whether it is a point of a schedule, short enough to stay in one line."""
    return isinstance(item, list) and not any(isinstance(each, dict | list) for each in item)


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(list, _Representer.represent_sequence_of)


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """`mapping` as YAML text in its own order, with short lists on one line; reads back as the same values."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096
    yaml.allow_unicode = True
    out = StringIO()
    yaml.dump(dict(mapping), out)
    return out.getvalue()
