"""Text, command line or Python values -> Experiment, with the origin of every value; and back to text.

    target (file | env id | mapping) + key=value ... ── merge ──> one tree ── one validation ──> Loaded or ConfigError

All problems are found and reported at once, before anything is started or written. Plug-in files must exist but are not
imported here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tiltyard.config.cross_checks import LAYERS, cross_check, makes_own_layers
from tiltyard.config.experiment import SCHEMA, Experiment
from tiltyard.config.fields import flat
from tiltyard.config.merge import ROOT, Merged, Section, fields, nested, override_layer, plain, with_new_names
from tiltyard.config.reference import describe, schema
from tiltyard.config.site import Profile, Site, load_site
from tiltyard.config.validation import Found, prune, special_answers, validate
from tiltyard.config.yaml import as_mapping, dump_yaml, parse_yaml, read_text, read_yaml
from tiltyard.errors import ConfigError, Problem, UseError, did_you_mean
from tiltyard.plugins.resolve import CONVENTIONAL, kind_of, named_plugins, parse, short

__all__ = [
    "Loaded",
    "Profile",
    "Site",
    "as_overrides",
    "describe",
    "dump_yaml",
    "from_resolved",
    "load",
    "load_site",
    "merged_settings",
    "override_list",
    "parse_override",
    "presets",
    "read_yaml",
    "refuse_presets",
    "resolved_yaml",
    "schema",
]

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Loaded:
    """An experiment and where its values came from. `base`: folders that plug-in paths are relative to, in order."""

    experiment: Experiment
    origins: dict[str, str]
    source: Path | None
    source_text: str | None
    base: tuple[Path, ...]
    warnings: tuple[str, ...] = ()


def load(
    target: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    *,
    profile: Profile | None = None,
    debug: bool = False,
    base: Sequence[Path] = (),
) -> Loaded:
    """The experiment that `target` describes: a YAML file, an env id or a mapping, changed by `key=value` overrides.

    `debug` adds the preset `debug` above file and profile and below the overrides. `base` are folders to search for
    plug-in files before the usual ones, such as the run folder for a run's own settings.
    """
    return _finish(*_layered(target, overrides, profile, debug, base))


def merged_settings(
    target: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, profile: Profile | None = None
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """All layers merged into one mapping, without defaults and not validated, and the folders of plug-ins."""
    merged, problems, source, _, base, _ = _layered(target, overrides, profile, False, ())
    if problems:
        raise ConfigError(problems, str(source) if source else "")
    return merged.values, base


_Layered = tuple[Merged, list[Problem], Path | None, str | None, tuple[Path, ...], list[str]]


def _layered(
    target: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    profile: Profile | None,
    debug: bool,
    base: Sequence[Path],
) -> _Layered:
    own, own_name, source, text, warnings = _target(target)
    own, problems = nested(own)
    from_command = override_layer([parse_override(each) for each in override_list(overrides)])
    from_profile, wrong = nested(profile.set) if profile else ({}, [])
    problems += wrong
    base = tuple(dict.fromkeys([*base, *([source.absolute().parent] if source else []), Path.cwd()]))
    merged = Merged()
    merged.add({"algo": {"id": "ppo"}}, "default")
    used = []
    for name in _uses(from_command, own, problems):
        try:
            values, folder = _preset(name, base)
            values, wrong = nested(values)
        except UseError as error:
            problems.append(Problem("use", short(name), error.message, error.hint))
            continue
        problems += wrong
        merged.add(values, f"preset {name}")
        used.append((f"preset {name}", values))
        base = tuple(dict.fromkeys([*base, *([folder] if folder else [])]))
    merged.add(own, own_name)
    merged.add(from_profile, f"profile {profile.name}".rstrip() if profile else "profile")
    if debug:
        asked = from_command.get("algo")
        if isinstance(asked, dict) and "id" in asked:
            merged.add({"algo": {"id": asked["id"]}}, COMMAND_LINE)
        merged.add(_tiny(merged.values["algo"]), "preset debug")
    merged.add(from_command, COMMAND_LINE)
    merged.drop("use")  # applied
    for origin, values in used:
        if values and origin not in merged.origins.values():
            warnings.append(f"{origin} has no effect: the file or the command line sets all of its settings")
    warnings += _without_layers(merged)
    return merged, problems, source, text, base, warnings


def _finish(
    merged: Merged,
    problems: list[Problem],
    source: Path | None,
    text: str | None,
    base: tuple[Path, ...],
    warnings: list[str],
) -> Loaded:
    """Validate the merged values, once."""
    values = merged.values
    found: Found = [((), problem) for problem in problems]
    found += special_answers(values)
    experiment, wrong = validate(Experiment, values)
    found += wrong
    checked = experiment
    if experiment is None:
        # Cross-check the valid settings as well, so that all problems are reported at once.
        rest, left = values, wrong
        for _ in range(5):
            for path, _ in left:
                rest = prune(rest, path)
            checked, left = validate(Experiment, {"env": "x", **rest})
    if checked is not None:
        bad = [".".join(path) for path, _ in found if path]
        more = cross_check(checked) + _missing_files(checked, base)
        found += [((), problem) for problem in more if not any(_mentions(problem, name) for name in bad)]
    if found or experiment is None:
        shown = [_with_origin(path, problem, merged, source) for path, problem in found]
        raise ConfigError(list(dict.fromkeys(shown)), str(source) if source else "")
    origins = {".".join(path): merged.origin(path) for path, _ in flat(experiment.model_dump(by_alias=True))}
    return Loaded(experiment, origins, source, text, base, tuple(warnings))


def _mentions(problem: Problem, name: str) -> bool:
    text = f"{problem.setting} {problem.message} {problem.hint}"
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


def _with_origin(path: tuple[str, ...], problem: Problem, merged: Merged, source: Path | None) -> Problem:
    """Add the layer that a wrong value came from, unless that is the file itself."""
    origin = merged.origin(path) if path else "default"
    if origin.startswith(("preset", "profile")) or (origin == COMMAND_LINE and source):
        return Problem(problem.setting, problem.value, f"{problem.message} ({origin})", problem.hint)
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


def _target(
    target: str | Path | Mapping[str, Any] | None,
) -> tuple[dict[str, Any], str, Path | None, str | None, list[str]]:
    """A target's values, their origin, its file, the file's text, and warnings."""
    if target is None:
        return {}, COMMAND_LINE, None, None, []
    if isinstance(target, Mapping):
        try:
            return plain(target), "python", None, None, []
        except ValueError as error:
            raise UseError(str(error), "use text, numbers, true, false, null, lists and mappings") from None
    if not isinstance(target, str | Path):
        raise UseError(
            f"{short(target)} is not an experiment", "give a YAML file, an env id, a mapping or an Experiment"
        )
    word = os.fspath(target)
    path = Path(word)
    if _is_yaml(word, path):
        text = read_text(path)
        values = as_mapping(parse_yaml(text, str(path)), str(path))
        if "env" not in values and {"experiment", "program"} & values.keys():
            raise UseError(f"{path} is a sweep plan, not an experiment", f"start it with: tiltyard sweep start {path}")
        return values, f"file {path.name}", path, text, []
    if not word.strip():
        raise UseError("the env's name is empty", "give a YAML file or an env id: CartPole-v1")
    if "=" in word and kind_of(word) is None:
        raise UseError(
            f"expected a YAML file or an env id, got the setting {word!r}", f"put the env first: CartPole-v1 {word}"
        )
    warnings = [f"{word!r} is used as an env id, although a folder has the same name"] if is_folder(path) else []
    return {"env": {"id": word}}, COMMAND_LINE, None, None, warnings


def _is_yaml(word: str, path: Path) -> bool:
    """Whether a target means a file: by its suffix, or because it exists and is neither Python nor a plain name."""
    if word.endswith((".yaml", ".yml")):
        return True
    try:
        return (path.is_file() and not word.endswith(".py")) or (path.is_dir() and ("/" in word or word in (".", "..")))
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


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
    if not equals:
        name, colon, rest = text.partition(":")
        written = f"{name.strip()}={rest.strip()}" if colon else f"{text.strip()}=VALUE"
        hint = f"write {written}, without spaces around '='" if text.strip() else "write algo.lr=3e-4"
        raise UseError(f"{text!r} is not an override; expected key=value", hint)
    if not key or not all(key.split(".")):
        wrong = "empty" if not key else "not a dotted name"
        raise UseError(f"{text!r} is not an override: the name before '=' is {wrong}", "write algo.lr=3e-4")
    if len(key) > 500:
        raise UseError(f"unknown setting {short(key)}: its name has {len(key)} characters", "write algo.lr=3e-4")
    try:
        found = parse_yaml(value, f"override {key}")
        if isinstance(found, str) and "\n" in value and found.split() == value.split():
            found = value  # YAML folds line breaks of plain text into spaces; text quoted in the shell keeps them
        return key, plain(found, (key,))
    except ValueError as error:
        raise UseError(f"override {error}", "write it as UTF-8 text") from None
    except UseError as error:
        raise UseError(error.message.replace(", line 1:", ":", 1), error.hint) from None


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
            raise UseError(
                f"use = {short(value)}: `{verb}` cannot apply presets, because a run has a value for every setting",
                "override single settings instead: key=value",
            )


def presets() -> list[str]:
    """Names of the built-in presets."""
    return sorted(
        item.name.removesuffix(".yaml")
        for item in resources.files("tiltyard").joinpath("presets").iterdir()
        if item.name.endswith(".yaml")
    )


def _tiny(algo: Any) -> dict[str, Any]:
    """The preset `debug`, with only those algo settings that the chosen algorithm has."""
    values, _ = _preset("debug", ())
    section = ROOT.field("algo")
    assert isinstance(section, Section)
    known = fields(section.chosen(algo))
    return {**values, "algo": {name: value for name, value in values["algo"].items() if name in known}}


def _without_layers(merged: Merged) -> list[str]:
    """Drop layer settings of built-in presets if the model is the user's own, and return warnings that say so.

    If the user wrote such a setting, cross_checks reports it instead. Dropping those of `debug` needs no warning.
    """
    model = merged.values.get("model")
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


def _preset(name: str, base: Sequence[Path]) -> tuple[dict[str, Any], Path | None]:
    """A preset's values and, for a user's own file, its folder."""
    if name in presets():
        text = resources.files("tiltyard").joinpath("presets", f"{name}.yaml").read_text(encoding="utf-8")
        return as_mapping(parse_yaml(text, f"preset {name}"), f"preset {name}"), None
    if not name.endswith((".yaml", ".yml")):
        raise UseError(f"unknown preset {name!r}", did_you_mean(name, presets()) + "; or give the path of a YAML file")
    places = [folder / Path(name).expanduser() for folder in base]
    path = next((place for place in places if place.is_file()), places[0])
    values = as_mapping(parse_yaml(read_text(path), str(path)), str(path))
    if values.get("use"):
        raise UseError(
            f"{path} is used as a preset and must not have a `use:` itself", "list all presets in the experiment file"
        )
    return values, path.absolute().parent


# ------------------------------------------------------------------------------------------------ resolved files


def resolved_yaml(experiment: Experiment) -> str:
    """The complete experiment as YAML, version first; `from_resolved` reads it."""
    return dump_yaml(experiment.model_dump(by_alias=True))


def from_resolved(path: Path) -> Experiment:
    """The experiment in a run folder's experiment.yaml."""
    values = read_yaml(path)
    version = values.get("version")
    if type(version) is int and version > SCHEMA:
        raise UseError(
            f"{path} was written by a newer Tiltyard: version {version}, this one reads {SCHEMA}", "update Tiltyard"
        )
    if version is None:
        raise UseError(
            f"{path} has no version, so it is not a run's experiment file",
            "restore it if it was edited; your own file is source.yaml beside it",
        )
    experiment, wrong = validate(Experiment, with_new_names(values))
    if experiment is None:
        raise ConfigError([problem for _, problem in wrong], str(path))
    return experiment
