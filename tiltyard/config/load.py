"""Text, command line or Python values -> Experiment, with the origin of every value; and back to text.

    target (file | env id | mapping) + key=value ... ── merge ──> one tree ── one validation ──> Loaded or ConfigError

All problems are found and reported at once, before anything is started or written. Plug-in files must exist but are not
imported here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltyard.config.cross_checks import LAYERS, cross_check, makes_own_layers
from tiltyard.config.experiment import SCHEMA, Experiment
from tiltyard.config.fields import flat
from tiltyard.config.merge import ROOT, Merged, Section, as_layer, fields, plain, with_new_names
from tiltyard.config.site import Profile
from tiltyard.config.validation import Found, prune, special_answers, validate
from tiltyard.config.yaml import as_mapping, dump_yaml, parse_yaml, read_text, read_yaml
from tiltyard.errors import ConfigError, Problem, UseError, did_you_mean
from tiltyard.plugins.resolve import CONVENTIONAL, kind_of, named_plugins, parse, short

COMMAND_LINE = "command line"
KEYWORD = "keyword argument"  # of a function of the Python API
PRESETS = Path(__file__).parents[1] / "presets"
Target = str | Path | Mapping[str, Any] | Callable[..., Any] | None
"""a YAML file, an env's id, class or function, or a mapping"""


@dataclass(frozen=True)
class Loaded:
    """An experiment and where its values came from. `base`: folders that plug-in paths are relative to, in order."""

    experiment: Experiment
    origins: dict[str, str]
    source: Path | None
    source_text: str | None
    base: tuple[Path, ...]
    warnings: tuple[str, ...] = ()


@dataclass
class _Layers:
    """All layers of an experiment, merged but not validated."""

    merged: Merged
    problems: list[Problem]
    warnings: list[str]
    source: Path | None
    source_text: str | None
    base: tuple[Path, ...]

    def add(self, values: Mapping[str, Any], origin: str) -> None:
        layer, twice = as_layer(values.items())
        self.problems += twice
        self.merged.add(layer, origin)


def load(
    target: Target,
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    profile: Profile | None = None,
    debug: bool = False,
    base: Sequence[Path] = (),
) -> Loaded:
    """The experiment that `target` describes, changed by `settings` in Python and by `key=value` overrides.

    `debug` adds the preset `debug` above file and profile and below settings and overrides. `base` are folders to
    search for plug-in files before the usual ones, such as the run folder for a run's own settings.
    """
    layers = _layered(target, overrides, profile, debug, base, settings)
    merged, values = layers.merged, layers.merged.values
    found: Found = [((), problem) for problem in layers.problems]
    found += special_answers(values)
    experiment, wrong = validate(Experiment, values)
    found += wrong
    checked = experiment or _valid_part(values, wrong)
    if checked is not None:
        bad = [".".join(path) for path, _ in found if path]
        more = cross_check(checked) + _missing_files(checked, layers.base)
        found += [((), problem) for problem in more if not any(_mentions(problem, name) for name in bad)]
    if found or experiment is None:
        shown = [_with_origin(path, problem, layers) for path, problem in found]
        raise ConfigError(list(dict.fromkeys(shown)), str(layers.source or ""))
    origins = {".".join(path): merged.origin(path) for path, _ in flat(experiment.model_dump(by_alias=True))}
    return Loaded(experiment, origins, layers.source, layers.source_text, layers.base, tuple(layers.warnings))


def merged_settings(
    target: Target, overrides: Sequence[str] = (), *, profile: Profile | None = None
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """All layers merged into one mapping, without defaults and not validated, and the folders of plug-ins."""
    layers = _layered(target, overrides, profile)
    if layers.problems:
        raise ConfigError(layers.problems, str(layers.source or ""))
    return layers.merged.values, layers.base


def _layered(
    target: Target,
    overrides: Sequence[str],
    profile: Profile | None,
    debug: bool = False,
    base: Sequence[Path] = (),
    settings: Mapping[str, Any] | None = None,
) -> _Layers:
    own, origin, source, text, warnings = _target(target)
    from_python = _plain(settings or {})
    from_command, _ = as_layer(map(parse_override, override_list(overrides)))
    folders = dict.fromkeys([*base, *([source.absolute().parent] if source else []), Path.cwd()])
    layers = _Layers(Merged(), [], warnings, source, text, tuple(folders))
    merged = layers.merged
    merged.add({"algo": {"id": "ppo"}}, "default")
    names = _uses(from_command, {**own, **from_python}, layers.problems)
    used = [f"preset {name}" for name in names if _add_preset(layers, name)]
    layers.add(own, origin)
    if profile:
        layers.add(profile.set, f"profile {profile.name}".rstrip())
    if debug:
        _add_debug(merged, from_command)
    layers.add(from_python, KEYWORD)
    merged.add(from_command, COMMAND_LINE)
    merged.drop("use")  # applied
    if settings is not None or not isinstance(target, str | Path):  # a Python program may use objects as names
        from tiltyard.plugins.capture import name_objects

        merged.values, captured = name_objects(merged.values)
        layers.base = (*([captured] if captured else []), *layers.base)
    idle = [each for each in used if each not in merged.origins.values()]
    warnings += [f"{each} has no effect: the file or the command line sets all of its settings" for each in idle]
    if "model" in merged.values:
        warnings += _without_layers(merged)
    return layers


def _valid_part(values: dict[str, Any], wrong: Found) -> Experiment | None:
    """An experiment of the valid settings, which are cross-checked as well: all problems are reported at once."""
    checked: Experiment | None = None
    for _ in range(5):
        for path, _ in wrong:
            values = prune(values, path)
        checked, wrong = validate(Experiment, {"env": "x", **values})
    return checked


def _mentions(problem: Problem, name: str) -> bool:
    text = f"{problem.setting} {problem.message} {problem.hint}"
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


def _with_origin(path: tuple[str, ...], problem: Problem, layers: _Layers) -> Problem:
    """Add the layer that a wrong value came from, unless that is the file itself."""
    origin = layers.merged.origin(path) if path else "default"
    if origin.startswith(("preset", "profile")) or (origin == COMMAND_LINE and layers.source):
        return replace(problem, message=f"{problem.message} ({origin})")
    return problem


def _missing_files(experiment: Experiment, base: tuple[Path, ...]) -> list[Problem]:
    found = []
    for setting, kind, text in named_plugins(experiment):
        if kind_of(text) == "file":
            try:
                parse(text, {}, CONVENTIONAL[kind], base)
            except UseError as error:
                found.append(Problem(setting, short(text), error.message, error.hint))
    return found


# ------------------------------------------------------------------------------------------------ layers


def _target(target: Target) -> tuple[dict[str, Any], str, Path | None, str | None, list[str]]:
    """A target's values, their origin, its file, the file's text, and warnings."""
    if target is None:
        return {}, COMMAND_LINE, None, None, []
    if isinstance(target, Mapping):
        return _plain(target), "python", None, None, []
    if callable(target):
        return {"env": {"id": target}}, "python", None, None, []
    if not isinstance(target, str | Path):
        raise UseError(f"{short(target)} is not an experiment", "give a YAML file, an env, a mapping or an Experiment")
    word = os.fspath(target)
    path = Path(word)
    if _is_yaml(word):
        text = read_text(path)
        values = as_mapping(parse_yaml(text, str(path)), str(path))
        if "env" not in values and {"experiment", "program"} & values.keys():
            raise UseError(f"{path} is a sweep plan, not an experiment", f"start it with: tiltyard sweep start {path}")
        return values, f"file {path.name}", path, text, []
    if not word.strip():
        raise UseError("the env's name is empty", "give a YAML file or an env id: CartPole-v1")
    if "=" in word and kind_of(word) is None:
        hint = f"put the env first: CartPole-v1 {word}"
        raise UseError(f"expected a YAML file or an env id, got the setting {word!r}", hint)
    is_folder = os.path.isdir(word)  # noqa: PTH112
    warnings = [f"{word!r} is used as an env id, although a folder has the same name"] if is_folder else []
    return {"env": {"id": word}}, COMMAND_LINE, None, None, warnings


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return plain(values)  # type: ignore[no-any-return]
    except ValueError as error:
        hint = "use text, numbers, true, false, null, lists and mappings; for an env, model or wrapper its class"
        raise UseError(str(error), hint) from None


def _is_yaml(word: str) -> bool:
    """Whether a target means a file: by its suffix, or because it exists and is neither Python nor a plain name."""
    if word.endswith((".yaml", ".yml")):
        return True
    # Not methods of Path, which raise OSError for a word that is too long.
    is_file = os.path.isfile(word) and not word.endswith(".py")  # noqa: PTH113
    return is_file or (os.path.isdir(word) and ("/" in word or word in (".", "..")))  # noqa: PTH112


def override_list(overrides: Sequence[str]) -> list[str]:
    """The overrides as a list; UseError unless they are a sequence of strings (a single string is not)."""
    if isinstance(overrides, Sequence) and not isinstance(overrides, str | bytes):
        wrong = [each for each in overrides if not isinstance(each, str)]
        if not wrong:
            return list(overrides)
        raise UseError(f"override {short(wrong[0])} must be a string", 'write ["algo.lr=3e-4"]')
    raise UseError(f"overrides = {short(overrides)} must be a list of strings", 'write ["algo.lr=3e-4"]')


def parse_override(text: str) -> tuple[str, Any]:
    """`algo.lr=3e-4` as name and value; the value is YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or len(key) > 500:
        raise _not_an_override(text, key, equals)
    try:
        found = parse_yaml(value, f"override {key}")
        if isinstance(found, str) and "\n" in value and found.split() == value.split():
            found = value  # YAML folds line breaks of plain text into spaces; text quoted in the shell keeps them
        return key, plain(found, (key,))
    except ValueError as error:
        raise UseError(f"override {error}", "write it as UTF-8 text") from None
    except UseError as error:
        raise UseError(error.message.replace(", line 1:", ":", 1), error.hint) from None


def _not_an_override(text: str, key: str, equals: str) -> UseError:
    hint = "write algo.lr=3e-4"
    if not equals:
        name, colon, rest = text.partition(":")
        written = f"{name.strip()}={rest.strip()}" if colon else f"{text.strip()}=VALUE"
        hint = f"write {written}, without spaces around '='" if text.strip() else hint
        return UseError(f"{text!r} is not an override; expected key=value", hint)
    if len(key) > 500:
        return UseError(f"unknown setting {short(key)}: its name has {len(key)} characters", hint)
    return UseError(
        f"{text!r} is not an override: the name before '=' is {'not a dotted name' if key else 'empty'}", hint
    )


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as overrides, as they would be typed on the command line."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def _uses(from_command: Mapping[str, Any], own: Mapping[str, Any], problems: list[Problem]) -> list[str]:
    """The presets to use; a list on the command line replaces the file's."""
    value = from_command.get("use", own.get("use"))
    names = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names) or len(names) > 20:
        problems.append(
            Problem("use", short(value), "must be a list of at most 20 presets", f"write use: [{presets()[0]}]")
        )
        return []
    return names


def refuse_presets(verb: str, overrides: Sequence[str]) -> None:
    """UseError for `use=`: presets have no effect on a run, whose own settings are complete."""
    for key, value in map(parse_override, override_list(overrides)):
        if key.partition(".")[0] == "use":
            reason = "cannot apply presets, because a run has a value for every setting"
            raise UseError(f"use = {short(value)}: `{verb}` {reason}", "override single settings instead: key=value")


def presets() -> list[str]:
    """Names of the built-in presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _add_debug(merged: Merged, from_command: Mapping[str, Any]) -> None:
    """Add the preset `debug`, with only those algo settings that the chosen algorithm has."""
    asked = from_command.get("algo")
    if isinstance(asked, dict) and "id" in asked:
        merged.add({"algo": {"id": asked["id"]}}, COMMAND_LINE)
    values, section = read_yaml(PRESETS / "debug.yaml"), ROOT.field("algo")
    assert isinstance(section, Section)
    known = fields(section.chosen(merged.values["algo"]))
    values["algo"] = {name: value for name, value in values["algo"].items() if name in known}
    merged.add(values, "preset debug")


def _without_layers(merged: Merged) -> list[str]:
    """Drop layer settings of built-in presets if the model is the user's own, and return warnings that say so.

    If the user wrote such a setting, cross_checks reports it instead. Dropping those of `debug` needs no warning.
    """
    model = merged.values["model"]
    chosen = model.get("id") if isinstance(model, dict) else None
    if not isinstance(chosen, str) or not makes_own_layers(chosen):
        return []
    origins = {f"preset {name}" for name in presets()}
    lost: dict[str, list[str]] = {}
    for name in LAYERS:
        path = ("model", *name.split("."))
        sources = {origin for known, origin in merged.origins.items() if known[: len(path)] == path}
        if sources and sources <= origins:
            merged.drop(*path)
            lost.setdefault(max(sources), []).append(".".join(path))
    lost.pop("preset debug", None)
    reason = f"ignored: only for the built-in model, and model.id = {chosen}"
    return [f"{origin}: {', '.join(names)} {reason}" for origin, names in lost.items()]


def _add_preset(layers: _Layers, name: str) -> bool:
    """Add a built-in preset or a user's own, whose folder may have plug-ins; False if it has no settings."""
    try:
        path = _preset_file(name, layers.base)
        values = read_yaml(path)
        if values.get("use"):
            hint = "list all presets in the experiment file"
            raise UseError(f"{path} is used as a preset and must not have a `use:` itself", hint)
    except UseError as error:
        layers.problems.append(Problem("use", short(name), error.message, error.hint))
        return False
    layers.add(values, f"preset {name}")
    if path.parent != PRESETS:
        layers.base = tuple(dict.fromkeys([*layers.base, path.absolute().parent]))
    return bool(values)


def _preset_file(name: str, base: Sequence[Path]) -> Path:
    if name in presets():
        return PRESETS / f"{name}.yaml"
    if not name.endswith((".yaml", ".yml")):
        raise UseError(f"unknown preset {name!r}", did_you_mean(name, presets()) + "; or give the path of a YAML file")
    places = [folder / Path(name).expanduser() for folder in base]
    return next((place for place in places if place.is_file()), places[0])


# ------------------------------------------------------------------------------------------------ resolved files


def resolved_yaml(experiment: Experiment) -> str:
    """The complete experiment as YAML, version first; `from_resolved` reads it."""
    return dump_yaml(experiment.model_dump(by_alias=True))


def from_resolved(path: Path, text: str | None = None) -> Experiment:
    """The experiment in a run folder's experiment.yaml, or in the text of it."""
    values = read_yaml(path) if text is None else as_mapping(parse_yaml(text, str(path)), str(path))
    version = values.get("version")
    if type(version) is int and version > SCHEMA:
        hint = "update Tiltyard"
        raise UseError(f"{path} was written by a newer Tiltyard: version {version}, this one reads {SCHEMA}", hint)
    if version is None:
        hint = "restore it if it was edited; your own file is source.yaml beside it"
        raise UseError(f"{path} has no version, so it is not a run's experiment file", hint)
    experiment, wrong = validate(Experiment, with_new_names(values))
    if experiment is None:
        raise ConfigError([problem for _, problem in wrong], str(path))
    return experiment
