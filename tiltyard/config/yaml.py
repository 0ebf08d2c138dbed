"""Read and write YAML 1.2 with ruamel's safe loader: plain dicts, lists and scalars; knows nothing of settings.

The core rules hold whatever a %YAML line says: `3e-4` is a float, `off` and `2024-01-01` are text. Size is limited
while the text is read: an alias counts as much as its value, so that nested aliases ("billion laughs") are refused.

    at most   1 MiB of text   100,000 nodes   50 levels   one document   no tags beyond the core ones
"""

from __future__ import annotations

import difflib
import re
import shlex
import stat
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from tiltyard.errors import UseError

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 50
MAX_DIGITS = 1000

_CORE = "tag:yaml.org,2002:"
_TEXT, _MERGE = f"{_CORE}str", f"{_CORE}merge"
_TAGS = {_TEXT, _MERGE, *(f"{_CORE}{name}" for name in ("int", "float", "bool", "null", "map", "seq"))}

# (what ruamel reports, what we print, hint)
_EXPLAINED = (
    (r"mapping values are not allowed", "a line is indented too far", "indent it like the lines around it"),
    (r"undefined alias '(.*)'", r"unknown alias *\1", "write & and this name before the value it refers to"),
    (r"another document", "a second document starts here", "keep one document per file; remove the ---"),
    (r"for merging", "<< takes a mapping or a list of mappings", "write <<: *name"),
    (r"'\\t'", "a tab instead of spaces", "indent with spaces"),
)


def _refused(node: Any, problem: str, hint: str) -> MarkedYAMLError:
    """An error at a node or event, with its hint as note."""
    return MarkedYAMLError(None, None, problem, node.start_mark, hint)


class _Resolver(VersionedResolver):
    """The type of a plain scalar: ruamel's rules for 1.2, without its dates and `=`."""

    processing_version = (1, 2)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0] and re.fullmatch(r"[-+]?\.[0-9]+[eE][0-9]+", value):
            return Tag(suffix=f"{_CORE}float")  # ruamel takes .5e+5 but not .5e5
        tag = super().resolve(kind, value, implicit)
        return tag if str(tag) in _TAGS else self.DEFAULT_SCALAR_TAG


class _Composer(Composer):
    """Limits depth and size, and checks keys. `sizes` has the number of nodes below each node that is complete."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False
        self.sizes: dict[Any, int] = {}
        self.nodes = self.level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.parser.peek_event(), self.nodes
        if self.level > MAX_DEPTH:
            raise _refused(event, f"nested more than {MAX_DEPTH} levels deep", "an experiment needs four levels")
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        if not isinstance(event, AliasEvent):
            self.nodes += 1
            self.sizes[node] = self.nodes - before
        elif node not in self.sizes:
            raise _refused(event, f"alias *{event.anchor} is inside the value it refers to", "write the value out")
        else:
            self.nodes += self.sizes[node]
        if self.nodes > MAX_NODES:
            problem = f"more than {MAX_NODES:,} values after expanding aliases"
            raise _refused(event, problem, "an experiment needs a few hundred")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, lines = super().compose_mapping_node(anchor), dict[str, int]()
        for key, _ in node.value:
            if key.tag not in (_TEXT, _MERGE):
                shown = (key.value or "null") if isinstance(key.value, str) else "with several values"
                raise _refused(key, f"the key {shown[:60]} is not text", "put the key in quotes")
            if key.value in lines:
                first = lines[key.value]
                raise _refused(key, f"duplicate key {key.value!r}, first in line {first}", "keep one of them")
            lines[key.value] = key.start_mark.line + 1
        return node


class _Constructor(SafeConstructor):
    """Refuses tags beyond the core ones, and scalars that are not of the type of their tag."""

    def construct_non_recursive_object(self, node: Any, tag: str | None = None) -> Any:
        name = node.tag.replace(_CORE, "!!")
        if node.tag not in _TAGS:
            hint = "leave the tag out; only plain text, numbers, lists and mappings are read"
            raise _refused(node, f"the tag {name!r} is not allowed", hint)
        if name in ("!!int", "!!float") and len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value):,} digits is too long"
            raise _refused(node, problem, "write it with an exponent, as in 1e6")
        try:
            return super().construct_non_recursive_object(node, _TEXT if node.tag == _MERGE else None)
        except (ValueError, LookupError):
            raise _refused(node, f"{node.value[:60]!r} is not a valid {name}", "put text in quotes") from None


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Composer, yaml.Constructor, yaml.Representer = _Resolver, _Composer, _Constructor, _Representer
    return yaml


def parse_yaml(text: str, source: str) -> Any:
    """The value in a YAML text; None if it is empty. `source` names the text in errors."""
    try:
        return _yaml().load(StringIO(text))
    except YAMLError as error:
        raise UseError(*_explain(error, text, source)) from None
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # ruamel's scanner crashes on some malformed texts instead of refusing them
        problem = f"{source} is not valid YAML (the scanner raised {type(error).__name__})"
        raise UseError(problem, "compare it with examples/full.yaml") from None


def _explain(error: Any, text: str, source: str) -> tuple[str, str]:
    """An error of ruamel as message and hint."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        problem = getattr(error, "reason", "it cannot be read")
        return f"{source}, line {line}: {problem}", "check that this is a YAML text file"
    lines, line, problem = text.splitlines(), error.problem_mark.line, str(error.problem)
    shown = lines[line].strip()[:80] if line < len(lines) else ""
    hint = error.note or f"check quotes, brackets and indentation there{'' if shown else ' or just above it'}"
    if "stream end" in problem or "end of stream" in problem:
        line = min((error.context_mark or error.problem_mark).line, len(lines) - 1)
        problem, hint, shown = "a quote, bracket or brace is never closed", "close it", ""
    elif "mapping values are not allowed" in problem and shown.count(": ") + shown.endswith(":") > 1:
        problem, hint = "a second ': ' in one line", "put text with a colon in quotes"
    for pattern, ours, how in _EXPLAINED:
        if found := re.search(pattern, problem):
            problem, hint = found.expand(ours), how
    return f"{source}, line {line + 1}: {problem}{f' in {shown!r}' if shown and not error.note else ''}", hint


def read_text(path: Path) -> str:
    """The text of a YAML file, or a UseError that says why it cannot be read."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            a_run = (path / "experiment.yaml").exists()
            hint = (
                f"for a run folder: tiltyard resume {shlex.quote(str(path))}" if a_run else "give a YAML file inside it"
            )
            raise UseError(f"{path} is a folder, not a YAML file", hint)
        if not stat.S_ISREG(found.st_mode):
            raise UseError(f"{path} is not a regular file", "give a YAML file")
        if found.st_size > MAX_BYTES:
            problem = f"{path} has {found.st_size:,} bytes, more than {MAX_BYTES:,}"
            raise UseError(problem, "check that this is the right file")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UseError(f"{path} does not exist", _near(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UseError(f"{path} cannot be read: {reason}", "check the path and its permissions") from None
    if b"\0" in raw:
        raise UseError(f"{path} is a binary file, not YAML text", "check that this is the right file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        hint = "save the file as UTF-8"
        raise UseError(f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8 text", hint) from None


def _near(path: Path) -> str:
    """A hint with the most similar name of a YAML file in the same folder."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    names = {item.stem: item.name for item in path.parent.glob("*.y*ml")}
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
    return as_mapping(parse_yaml(read_text(Path(path)), str(path)), str(path))


class _Representer(SafeRepresenter):
    """Writes text of several lines as a block, short lists on one line, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> Any:
        # Only escapes preserve control characters and other line ends.
        style = '"' if not data or not data.replace("\n", "").isprintable() else "|" if "\n" in data else None
        return self.represent_scalar(_TEXT, data, style=style)

    def represent_short(self, data: list[Any]) -> Any:
        inner = [each for item in data for each in (item if isinstance(item, list) else [item])]
        inline = not any(isinstance(each, dict | list) and each for each in inner)  # [[0, 1e-3], [1e6, 0]]: a schedule
        return self.represent_sequence(f"{_CORE}seq", data, flow_style=inline)


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(list, _Representer.represent_short)


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """`mapping` as YAML text in its own order, with short lists on one line; reads back as the same values."""
    yaml, out = _yaml(), StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096
    yaml.dump(dict(mapping), out)
    return out.getvalue()
