"""Explain errors of pydantic as Problems in plain words: dotted name, value, message, hint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.fields import Settings
from tiltyard.config.merge import Free, Section, fields, inside
from tiltyard.errors import Problem, did_you_mean
from tiltyard.plugins.resolve import short

Keys = tuple[str, ...]

# Names of our settings in other libraries.
_ALSO = {
    "name": "run_name experiment",
    "notes": "description",
    "use": "preset presets",
    "env": "environment enviroment",
    "env.id": "env_id env_name",
    "env.options": "env_config env_kwargs",
    "env.frameskip": "frame_skip action_repeat",
    "env.frame_stack": "framestack",
    "model": "network policy net",
    "model.hidden": "net_arch hiddens fcnet_hiddens hidden_sizes",
    "model.memory.kind": "lstm use_lstm gru",
    "model.normalise": "normalize",
    "algo.id": "algorithm",
    "algo.lr": "learning_rate alpha",
    "algo.rollout": "n_steps num_steps rollout_length",
    "algo.minibatch": "batch_size minibatch_size",
    "algo.epochs": "n_epochs num_epochs",
    "algo.gamma": "discount",
    "algo.gae_lambda": "lam lambda",
    "algo.clip": "clip_range clip_coef",
    "algo.entropy": "ent_coef entropy_coef",
    "algo.value_coef": "vf_coef",
    "algo.kl_stop": "target_kl",
    "algo.max_grad_norm": "grad_clip",
    "engine.envs": "num_envs n_envs num_workers workers",
    "stop.env_steps": "total_timesteps timesteps total_steps max_steps steps",
    "eval.every": "eval_freq eval_every",
    "save": "checkpoint checkpoints",
    "save.env_steps": "save_every save_freq",
    "save.updates": "checkpoint_freq",
}
ELSEWHERE = {word: setting for setting, words in _ALSO.items() for word in words.split()}


def explain(model: type[Settings], values: dict[str, Any], error: Mapping[str, Any]) -> Iterator[tuple[Keys, Problem]]:
    """Zero or one problem: for a number or schedule, only the error of the branch that the value is on."""
    kind = str(error["type"])
    path, value, section, branch = _locate(model, values, error["loc"], kind)
    setting = ".".join(path)
    if isinstance(section, Section) and section.scheduled:
        if branch == "number" and not isinstance(value, int | float):
            if isinstance(value, Mapping):
                return
            hint = "write a number, or a mapping with kind: linear, piecewise or kl_adaptive"
            hint = f"write it without quotes: {value}" if _is_number(value) else hint
            yield path, Problem(setting, short(value), "must be a number or a schedule", hint)
            return
        if branch == "schedule" and not isinstance(value, Mapping):
            return
    if kind == "extra_forbidden":
        yield path, Problem(setting, short(value), "unknown setting", _unknown_hint(model, path, values))
    elif kind == "missing":
        yield path, Problem(setting, "", "is missing", _missing_hint(setting))
    elif kind in ("union_tag_invalid", "union_tag_not_found") and isinstance(section, Section) and section.tag:
        words = list(section.tags)
        if isinstance(value, Mapping):
            path, value = (*path, section.tag), value.get(section.tag)
        message = f"{'must be' if kind.endswith('invalid') else 'is missing:'} one of {', '.join(words)}"
        hint = did_you_mean(str(value), words) if value else ""
        yield path, Problem(".".join(path), "" if value is None else short(value), message, hint)
    else:
        message, hint = _sentence(kind, value, error.get("ctx") or {}, section)
        if "points" in path:
            hint = "write [[0, 3e-4], [1000000, 0]]: env steps and value of each point"
        yield path, Problem(setting, short(value), message, hint)


def _locate(
    model: type[Settings], values: Any, loc: tuple[Any, ...], kind: str
) -> tuple[Keys, Any, Section | Free | None, str]:
    """The keys of a pydantic location (without names of union branches), the value there, its shape, its branch."""
    path: list[str] = []
    value: Any = values
    shape: Section | Free | None = Section((model,))
    branch = ""
    for i, part in enumerate(loc):
        name, there = str(part), isinstance(value, Mapping) and part in value
        section = shape if isinstance(shape, Section) and not there else None
        if section and section.scheduled and name.startswith(("tagged-union", "constrained-float", "float")):
            branch = "schedule" if name.startswith("tagged-union") else "number"
        elif section and name in (*section.tags, "own"):
            continue
        elif isinstance(value, Mapping) and (there or (i == len(loc) - 1 and kind == "missing")):
            path.append(name)
            value, shape = value.get(name), inside(shape, name)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path.append(name)
            value, shape = value[part], None
    return tuple(path), value, shape, branch


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _is_number(value: Any) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value.replace("_", "")) is not None


_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_TYPES = dict.fromkeys(("int_type", "int_from_float", "int_parsing_size"), "a whole number")
_TYPES |= {"float_type": "a number", "string_type": "text", "string_unicode": "text", "bool_type": "true or false"}
_TYPES |= {"list_type": "a list", "dict_type": "a mapping"}


def _sentence(kind: str, value: Any, context: Mapping[str, Any], section: Section | Free | None) -> tuple[str, str]:
    """Message and hint for an error of a plain value."""
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {_number(context[key])}", ""
    if kind == "finite_number":
        return "must be a finite number", ""
    if kind == "literal_error":
        expected = str(context.get("expected"))
        known = re.findall(r"'([^']*)'", expected) or [expected]
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        message = f"must be {'one of ' * (len(known) > 1)}{', '.join(known)}"
        return message, "" if hint.startswith("known") else hint
    if kind == "value_error":
        return str(context.get("error", "is not accepted")), ""
    if kind in ("string_too_short", "too_short"):
        least = context["min_length"]
        return ("must not be empty" if least == 1 else f"must have {least} entries"), ""
    if kind in ("string_too_long", "too_long"):
        what = "characters" if kind.startswith("string") else "entries"
        return f"must have at most {_number(context['max_length'])} {what}", ""
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}", _type_hint(kind, value)
    if kind in ("model_type", "model_attributes_type", "dict_attributes_type"):
        names = ", ".join(list(fields(section.models[0]))[:4]) if isinstance(section, Section) else ""
        named = "a name or " if isinstance(section, Section) and section.short == "id" else ""
        return f"must be {named}a mapping", f"its settings are {names}, ..." if names else ""
    return "is not accepted here", ""


def _number(value: Any) -> str:
    """A bound as people write it."""
    if isinstance(value, int | float) and abs(value) >= 1e15:
        return "9223372036854775807" if value == 2**63 - 1 else f"{float(value):.0e}".replace("e+", "e")
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _type_hint(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return f'put it in quotes: "{short(value)}"'
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("on", "off", "yes", "no"):
        return "write true or false; in YAML 1.2 on, off, yes and no are text"
    if kind in ("int_type", "float_type") and _is_number(value):
        return f"write it without quotes: {value}"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(re.sub("[ ,']", "", value)):
        return "write " + re.sub("[ ,']", "_", value)
    if kind == "string_type" and isinstance(value, dict):
        return "put text that contains ': ' in quotes"
    if kind == "float_type" and isinstance(value, bool):
        return "write a number"
    if kind == "list_type" and isinstance(value, str | int | float):
        return f"write it in brackets: [{value}]" if len(str(value)) < 60 else "write it in brackets"
    if kind == "list_type" and isinstance(value, dict) and all(key.isdigit() for key in value):
        return "set the whole list: [a, b]"
    if kind == "dict_type":
        return "write name: value lines below it"
    if value is None and kind == "string_type":
        return 'write "" for empty text'
    return "leave the line out for the default" if value is None else ""


def _missing_hint(setting: str) -> str:
    if setting in ("env", "env.id"):
        return "name an environment: env: CartPole-v1"
    if setting.endswith(".kind"):
        return "kind is linear, piecewise or kl_adaptive"
    return f"set {setting}"


def _unknown_hint(model: type[Settings], path: Keys, values: Any) -> str:
    """The nearest setting in the same section, else that name in another section, else our name for it."""
    name = path[-1]
    section: Section | Free | None = Section((model,))
    place: Any = values
    for part in path[:-1]:
        section = inside(section, part)
        place = place.get(part) if isinstance(place, Mapping) else None
    here = list(fields(section.chosen(place))) if isinstance(section, Section) else []
    prefix = ".".join(path[:-1])
    if isinstance(section, Section) and len(section.models) > 1:
        others = [word for word, other in section.tags.items() if name in fields(other)]
        if others:
            return f"it is a setting of {prefix}.{section.tag}: {others[0]}"
    same = [dotted for dotted in leaves(model) if dotted.rsplit(".", 1)[-1] == name and dotted != ".".join(path)]
    if same and not (model is Experiment and name in ELSEWHERE):
        return f"did you mean {same[0]!r}?"
    if name in ELSEWHERE and model is Experiment:
        return f"Tiltyard calls it {ELSEWHERE[name]}"
    near = did_you_mean(name, here)
    if near and not near.startswith("known"):
        return near.replace("'", f"'{prefix}.", 1) if prefix else near
    return near or (f"{prefix or 'an experiment'} has: {', '.join(here)}" if here else "")


@cache
def leaves(model: type[Settings], prefix: str = "") -> tuple[str, ...]:
    """Dotted names of all settings except those of schedules."""
    found: list[str] = []
    for name, shape in fields(model).items():
        found.append(prefix + name)
        if isinstance(shape, Section) and not shape.scheduled:
            for inner in shape.models:
                found += leaves(inner, f"{prefix}{name}.")
    return tuple(dict.fromkeys(found))
