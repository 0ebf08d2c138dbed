"""Every setting as a table and as a JSON schema for editors, both generated from the settings classes.

Rows of alternative sections name the word that selects them: `algo.rollout (id: a2c)`. Sections with names that users
choose appear as `policies.NAME.from`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.fields import Plugin, Settings
from tiltyard.config.merge import Free, Section, fields
from tiltyard.config.yaml import dump_yaml

Row = tuple[str, str, str, str]

# To editors that know only YAML 1.2, whole numbers with underscores are strings.
_SPACED = {"type": "string", "pattern": "^-?[0-9]+(_[0-9]+)+$"}

_CHOICE = dict.fromkeys(("id", "kind"), "Selects the other settings of this section.")


# ------------------------------------------------------------------------------------------------ JSON schema


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of an experiment file: all settings optional, short forms allowed."""
    made = Experiment.model_json_schema(by_alias=True)
    definitions = made["$defs"]
    _loosen(made, Section((Experiment,)))
    models = {model.__name__: model for model in _models(Experiment)}
    for name, definition in definitions.items():
        if name in models:
            _loosen(definition, Section((models[name],)))
    made["properties"]["use"] = {"anyOf": [made["properties"]["use"], {"type": "string"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "Tiltyard experiment"}


def _loosen(definition: dict[str, Any], section: Section) -> None:
    """Make all settings but a schedule's kind optional, and allow short forms of sections and numbers (1_000_000)."""
    definition.pop("required", None)
    if section.models[0] in _schedules().values():
        definition["required"] = ["kind"]
    for name, shape in fields(section.models[0]).items():
        entry = definition["properties"][name]
        if isinstance(shape, Section) and not shape.scheduled:
            if "oneOf" in entry:  # several match if the word that selects one is left out
                entry["anyOf"] = entry.pop("oneOf")
            described = {key: entry.pop(key) for key in ("description", "default") if key in entry}
            short = [{"type": "string"}] if shape.short else []
            definition["properties"][name] = {**described, "anyOf": [entry, *short, {"type": "null"}]}
    for entry in definition["properties"].values():
        _allow_spaced(entry)
        for key in ("items", "additionalProperties"):
            if entry.get(key) == {"$ref": "#/$defs/Plugin"}:
                entry[key] = {"anyOf": [entry[key], {"type": "string"}]}


def _allow_spaced(entry: dict[str, Any]) -> None:
    if entry.get("type") == "integer":
        number = {key: entry.pop(key) for key in ("type", "minimum", "maximum") if key in entry}
        entry["anyOf"] = [number, _SPACED]
        return
    for inner in [*entry.get("anyOf", []), entry.get("items")]:
        if isinstance(inner, dict):
            _allow_spaced(inner)


def _models(model: type[Settings]) -> Iterator[type[Settings]]:
    yield model
    for shape in fields(model).values():
        section = shape if isinstance(shape, Section) else getattr(shape, "item", None)
        for inner in section.models if section else ():
            yield from _models(inner)


# ------------------------------------------------------------------------------------------------ table


def describe() -> list[Row]:
    """(dotted name, type, default, meaning) of every setting, in the order of the file."""
    rows = list(_rows(Experiment, "", ""))
    for word, schedule in _schedules().items():
        rows += _rows(schedule, "<schedule>.", f" (kind: {word})")
    return rows


def _schedules() -> dict[str, type[Settings]]:
    algo = fields(Experiment)["algo"]
    assert isinstance(algo, Section)
    lr = algo.field("lr")
    assert isinstance(lr, Section)
    return lr.tags


def _rows(model: type[Settings], prefix: str, suffix: str) -> Iterator[Row]:
    entries = model.model_json_schema(by_alias=True)
    for (name, shape), info in zip(fields(model).items(), model.model_fields.values(), strict=True):
        entry = entries["properties"][name]
        if isinstance(shape, Section) and not shape.scheduled:
            short = " or a name" if shape.short else ""
            meaning = info.description or " Or: ".join(inner.__doc__ or "" for inner in shape.models)
            yield f"{prefix}{name}{suffix}", f"mapping{short}", "", meaning
            for i, inner in enumerate(shape.models):
                words = " or ".join(word for word, model in shape.tags.items() if model is inner) or "your own"
                chosen = f" ({shape.tag}: {words})" if i else suffix
                yield from _rows(inner, f"{prefix}{name}.", chosen)
            continue
        default = "required" if info.is_required() else inline(info.get_default(call_default_factory=True))
        yield f"{prefix}{name}{suffix}", _type_text(entry), default, info.description or _CHOICE.get(name, "")
        if isinstance(shape, Free) and shape.item is not None and shape.item.models[0] is not Plugin:
            yield from _rows(shape.item.models[0], f"{prefix}{name}.NAME.", suffix)


def inline(value: Any) -> str:
    """A default value as it is written in a YAML file."""
    if isinstance(value, Settings):
        value = value.model_dump(by_alias=True)
    text = dump_yaml({"x": [value]})  # short values in a list stay on one line
    return (
        text.removeprefix("x:").strip().removeprefix("[").removesuffix("]") if "\n" not in text.strip() else str(value)
    )


def _type_text(entry: dict[str, Any]) -> str:
    """The type of a JSON schema entry in words."""
    options = entry.get("anyOf") or entry.get("oneOf")
    if options:
        schedule = any("discriminator" in each for each in options)
        words = [_type_text(each) for each in options if "discriminator" not in each]
        return " or ".join([*words, *(["a schedule"] if schedule else [])])
    if "const" in entry or "enum" in entry:
        return ", ".join(str(word) for word in entry.get("enum", [entry.get("const")]))
    if entry.get("type") == "array":
        return f"list of {_type_text(entry.get('items', {}))}"
    if entry.get("type") in ("integer", "number"):
        return ("whole number" if entry["type"] == "integer" else "number") + _bounds(entry)
    kinds = {"string": "text", "boolean": "true or false", "null": "null", "object": "mapping"}
    return kinds.get(str(entry.get("type")), "name or mapping" if "$ref" in entry else "anything")


def _bounds(entry: dict[str, Any]) -> str:
    low, above, high = entry.get("minimum"), entry.get("exclusiveMinimum"), entry.get("maximum")
    parts = [
        f"from {_figure(low)}" if low is not None and low > -1e15 else "",
        f"above {_figure(above)}" if above is not None else "",
    ]
    parts.append(f"to {_figure(high)}" if high is not None and high < 1e15 else "")
    return "".join(f" {part}" for part in parts if part)


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def plan_page() -> str:
    """Every setting of a sweep plan as a Markdown table."""
    from tiltyard.config.sweep_plan import Plan

    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(_table_row(row) for row in _rows(Plan, "", ""))]) + "\n"


def _table_row(row: Row) -> str:
    name, kind, default, meaning = row
    cells = [f"`{name}`", kind, f"`{default}`" if default else "", meaning]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def reference_page() -> str:
    """The table as Markdown, one heading per section."""
    lines = [
        "# Settings",
        "",
        "Generated by `tiltyard config reference`.",
        "`algo.lr` is `lr` below `algo` in a file and `algo.lr=3e-4` on the command line.",
    ]
    section = None
    for row in describe():
        name, kind, _, _ = row
        top = name.split(".")[0] if "." in name or kind.startswith("mapping") else ""
        if top != section:
            section = top
            title = {"": "The experiment", "<schedule>": "Schedules"}.get(top, top)
            lines += ["", f"## {title}", "", "| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines.append(_table_row(row))
    return "\n".join(lines) + "\n"
