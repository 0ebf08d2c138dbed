"""The table of settings and the schema for editors are complete and agree with the loader."""

import re

import pytest

from tiltyard.config.fields import flat
from tiltyard.config.load import load
from tiltyard.config.reference import describe, reference_page, schema


def test_every_setting_has_a_row_with_type_and_meaning():
    rows = describe()
    names = {name for name, *_ in rows}
    assert len(names) == len(rows)
    settings = {".".join(path) for path, _ in flat(load("CartPole-v1").experiment.model_dump(by_alias=True))}
    assert settings <= names
    assert {"algo.rollout (id: a2c)", "<schedule>.points (kind: piecewise)", "stop.return"} <= names
    for name, kind, _, meaning in rows:
        assert kind, name
        assert meaning.endswith((".", "steps.")), name
        assert "\n" not in kind


def test_rows_have_types_and_defaults():
    rows = {name: (kind, default) for name, kind, default, _ in describe()}
    assert rows["algo.lr"] == ("number from 0 or a schedule", "0.001")
    assert rows["env.id"] == ("text", "required")
    assert rows["model.hidden"] == ("list of whole number from 1 to 16,384", "[64, 64]")
    assert rows["stop.env_steps"] == ("whole number from 1 or null", "1000000")
    assert rows["model.activation"][0].startswith("tanh, relu")
    assert rows["algo.rollout (id: a2c)"][1] == "16"
    assert rows["model.encoder"][0] == "mapping or a name"


def test_page_has_a_heading_per_section():
    page = reference_page()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [
        "The experiment", "env", "model", "algo", "policies", "match", "population", "engine", "stop", "eval", "save", "track",
        "Schedules",
    ]  # fmt: skip
    assert all(line.count("|") - line.count("\\|") == 5 for line in page.splitlines() if line.startswith("|"))


def accepts(entry: dict, value: object, root: dict) -> bool:
    """Validate `value`, with the part of JSON Schema that our schema uses."""
    if "$ref" in entry:
        return accepts(root["$defs"][entry["$ref"].rsplit("/", 1)[-1]], value, root)
    kinds = {
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    if "type" in entry and (
        not isinstance(value, kinds[entry["type"]])
        or (isinstance(value, bool) and entry["type"] in ("integer", "number"))
    ):
        return False
    if "anyOf" in entry and not any(accepts(each, value, root) for each in entry["anyOf"]):
        return False
    if "oneOf" in entry and sum(accepts(each, value, root) for each in entry["oneOf"]) != 1:
        return False
    if ("const" in entry and value != entry["const"]) or ("enum" in entry and value not in entry["enum"]):
        return False
    if isinstance(value, int | float) and not entry.get("minimum", value) <= value <= entry.get("maximum", value):
        return False
    if isinstance(value, str) and not re.search(entry.get("pattern", ""), value):
        return False
    if isinstance(value, list) and "items" in entry:
        return all(accepts(entry["items"], each, root) for each in value)
    if isinstance(value, dict):
        known, others = entry.get("properties", {}), entry.get("additionalProperties", True)
        if any(name not in value for name in entry.get("required", [])):
            return False
        for name, inner in value.items():
            if name not in known and others is False:
                return False
            judged = known.get(name, others)
            if isinstance(judged, dict) and not accepts(judged, inner, root):
                return False
    return True


GOOD = [
    {"env": "CartPole-v1"},
    {"env": {"id": "X"}, "algo": {"lr": 3e-4}},
    {"env": "X", "algo": "a2c", "model": "nets/x.py", "engine": "serial"},
    {"env": "X", "algo": {"id": "a2c", "rollout": 8}, "stop": None, "use": "classic"},
    {"env": "X", "stop": {"env_steps": "1_000_000", "return": 475}},
    {"env": "X", "algo": {"lr": {"kind": "linear", "start": 1}}, "track": {"wandb": "off"}},
    {"env": {"id": "X", "wrappers": ["a", {"id": "b"}]}, "model": {"encoders": {"camera": "nature"}, "memory": "lstm"}},
]
BAD = [
    {"env": 3},
    {"envs": "X"},
    {"algo": {"lr": "fast"}},
    {"algo": {"lr": {"start": 1}}},
    {"algo": {"id": "a2c", "clip": 0.1}},
    {"stop": {"env_steps": 0}},
    {"model": {"memory": {"kind": "lsmt"}}},
    {"eval": {"greedy": "off"}},
]


@pytest.mark.parametrize("values", GOOD)
def test_schema_accepts_valid_files(values):
    made = schema()
    assert made["$schema"].endswith("2020-12/schema")
    assert accepts(made, values, made)


@pytest.mark.parametrize("values", BAD)
def test_schema_rejects_invalid_files(values):
    made = schema()
    assert not accepts(made, values, made)


def test_schema_describes_every_setting():
    made = schema()
    for definition in [made, *made["$defs"].values()]:
        for name, entry in definition.get("properties", {}).items():
            assert entry.get("description") or name in ("id", "kind") or "anyOf" in entry, name
