"""Resolve names to objects: built-in short names, `package.module:Name`, `path/file.py[:Name]`, `family:name`.

`parse` executes nothing; `load` imports. Files and modules of the user's project are loaded in a namespace per folder
(namespaces.py) and copied into the run folder (snapshot.py), where `folder/package.module:Name` names the copy.

    text ── parse ──> Ref ── load ──> class or function ── check_options ──> [Problem]
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from tiltyard.config.ownership import refuse_foreign
from tiltyard.errors import Problem, RaisedElsewhere, TiltyardError, UseError, did_you_mean, raised
from tiltyard.plugins.namespaces import SHARED, import_hint, is_file, module_file, namespace_of, user_names

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.config.sections import Model

# Class name in a plug-in file, if the name does not give one.
CONVENTIONAL = {
    "env": "CustomEnv",
    "model": "CustomModel",
    "encoder": "CustomEncoder",
    "wrapper": "CustomWrapper",
    "policy": "CustomPolicy",
    "loss": "CustomLoss",
    "algo": "CustomAlgo",
}

# Families of envs: `atari:pong` is Atari("pong"). The second item is the pip extra that the family needs.
FAMILIES: Mapping[str, tuple[str, str]] = {
    "atari": ("tiltyard.envs.suites.atari:Atari", "atari"),
    "car-racing": ("tiltyard.envs.suites.car_racing.family:CarRacing", "car-racing"),
    "doom": ("tiltyard.envs.suites.vizdoom:Doom", "vizdoom"),
    "envpool": ("tiltyard.envs.suites.envpool:EnvPool", "envpool"),
}

# Packages that register ids with Gymnasium when they are imported: beginning of the ids -> package, pip extra.
REGISTERING: Mapping[str, tuple[str, str]] = {
    "ALE/": ("ale_py", "atari"),
    "BabyAI-": ("minigrid", "minigrid"),
    "MiniGrid-": ("minigrid", "minigrid"),
}

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>.*))?", re.DOTALL)
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
MODULE = re.compile(rf"(?P<folder>.*/)?(?P<module>{_DOTTED}):(?P<name>{_DOTTED})", re.DOTALL)
_REGISTERING = re.compile(rf"(?P<folder>[^:]*/)?(?P<module>{_DOTTED}):(?P<id>.+)", re.DOTALL)
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = Path(os.__file__).parent
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True)
class Ref:
    """A parsed name. `path` is the file, or the project folder of `module`, or None if the module is installed."""

    text: str
    path: Path | None
    module: str | None
    attribute: str


def kind_of(text: str) -> Literal["module", "file"] | None:
    """The kind of a name by its form alone; None for anything else (a built-in name, a Gymnasium id, a typo)."""
    if _FILE.fullmatch(text):
        return "file"
    return "module" if MODULE.fullmatch(text) else None


def is_own_algo(text: Any) -> bool:
    """Whether algo.id names a class of the user's; `rllib:PPO` only looks like a module."""
    return isinstance(text, str) and not text.startswith("rllib:") and kind_of(text) is not None


def family_of(env_id: str) -> tuple[str, str] | None:
    """Family and name of an env id like `atari:pong`, else None."""
    family, colon, name = env_id.partition(":")
    return (family, name) if colon and family in FAMILIES else None


def load_family(family: str) -> Any:
    """The class of a family's envs; UseError with the pip command if its package is missing."""
    target, extra = FAMILIES[family]
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        hint = f"pip install 'tiltyard[{extra}]'"
        raise UseError(f"{family}: envs need the package {error.name!r}, which is not installed", hint) from error


def parse(text: str, builtins: Mapping[str, str], conventional: str | None, base: Sequence[Path]) -> Ref:
    """Parse a name. `builtins` maps short names to `package.module:Name`; files are searched below each `base`."""
    if text in builtins:
        module, _, name = builtins[text].partition(":")
        return Ref(text, None, module, name)
    if match := _FILE.fullmatch(text):
        name = (conventional or "") if match["name"] is None else match["name"]
        if not all(part.isidentifier() for part in name.split(".")):
            raise UseError(f"{text!r} does not name a class of the file", f"write {match['path']}:ClassName")
        return Ref(text, _find_file(match["path"], base), None, name)
    if match := MODULE.fullmatch(text):
        module, name = match["module"], match["name"]
        hint = f"did you mean {match['folder']}{module.replace('.', '/')}.py:{name}?"
        return Ref(text, _find_module(match, base, hint), module, name)
    hint = did_you_mean(text, builtins) or "write a built-in name, package.module:Name or path/file.py:Name"
    raise UseError(f"unknown name {text!r}: not built-in, package.module:Name or path/file.py:Name", hint)


def parse_registering(text: str, base: Sequence[Path]) -> Ref | None:
    """Parse `package:Id-v0`, where the package registers the id with Gymnasium; None for an id without a package."""
    match = _REGISTERING.fullmatch(text)
    if match is None:
        return None
    hint = "write an id, package:Id-v0, or folder/package:Id-v0 with the folder of the package"
    return Ref(text, _find_module(match, base, hint), match["module"], match["id"])


def own_ref(kind: str, text: str, base: Sequence[Path]) -> Ref | None:
    """The file or module of the user's project that a name refers to; None if it is built-in or installed."""
    if kind_of(text) is None:
        ref = parse_registering(text, base) if kind == "env" else None
    else:
        ref = parse(text, {}, CONVENTIONAL[kind], base)
    return ref if ref and ref.path else None


def _find_module(match: re.Match[str], base: Sequence[Path], hint: str) -> Path | None:
    """The project folder of a module, None if it is installed. Executes nothing."""
    folder, module = match["folder"] or "", match["module"]
    for place in _places(folder, base) if module.partition(".")[0] not in SHARED else ():
        installed = place.is_relative_to(_STDLIB) or any(part in _INSTALLED for part in place.parts)
        if not installed and module_file(place, module) is not None:
            return place
    if folder:
        raise UseError(f"{match.string!r}: there is no module {module!r} in {folder}", hint)
    return None


def _find_file(text: str, base: Sequence[Path]) -> Path:
    """The file of a plug-in path: absolute, or below the first base folder that has it."""
    places = _places(text, base)
    for place in places:
        if is_file(place):
            return place
    searched = ", ".join(str(place.parent) for place in places) or "no folder"
    near = [item.name for place in places if place.parent.is_dir() for item in place.parent.glob("*.py")]
    hint = did_you_mean(Path(text).name, near)
    if not hint.startswith("did"):
        hint = "paths are relative to the experiment file's folder, then to the current one"
    raise UseError(f"there is no file {text} (searched in {searched})", hint)


def _places(text: str, base: Sequence[Path]) -> list[Path]:
    wanted = Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown ~name
    places = [wanted] if wanted.is_absolute() else [folder.absolute() / wanted for folder in base]
    return list(dict.fromkeys(Path(os.path.normpath(place)) for place in places))


# ------------------------------------------------------------------------------------------------ importing


def load(ref: Ref) -> Any:
    """Import the object of `ref`."""
    module = load_module(ref)
    found: Any = module
    where = ref.module or (ref.path and shown(ref.path))
    for part in ref.attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            own = [name for name in public if getattr(vars(found)[name], "__module__", None) == module.__name__]
            raise UseError(f"{where} has no {part!r}", did_you_mean(part, own or public))
        found = getattr(found, part)
    return found


def load_module(ref: Ref) -> ModuleType:
    """Import the module of `ref`. Executes the plug-in's code; its exceptions become a UseError with the traceback."""
    if ref.path is not None and not os.access(ref.path, os.R_OK):
        raise UseError(f"{shown(ref.path)} cannot be read", "check its permissions")
    try:
        if ref.path is None:
            return _load_installed(str(ref.module))
        file = ref.path.resolve()
        return namespace_of(file).load(ref.module) if ref.module else namespace_of(file.parent).load_file(file)
    except UseError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may raise anything
        raise _import_error(error, ref) from None


def _import_error(error: BaseException, ref: Ref) -> UseError:
    missing = user_names(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if ref.path is None and missing and f"{ref.module}.".startswith(f"{missing}."):
        hint = "install the package, start in the folder that has it, or name the file: path/file.py:Name"
        return UseError(f"{ref.text!r}: there is no module {missing!r}", hint)
    what = ref.text if ref.path is None or ref.module else shown(ref.path)
    reason = f"{type(error).__name__} while imported" + (f": {user_names(str(error))}" if str(error) else "")
    hint = import_hint(error) or _as_module(missing, ref) or "the traceback is the plug-in's own"
    return UseError(f"{what} raised {reason}", hint, user_traceback(error))


def _load_installed(name: str) -> ModuleType:
    """Import an installed module, or one in the current folder, for old runs that have no copy of it."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    return importlib.import_module(name)


def _as_module(missing: str, ref: Ref) -> str | None:
    """Hint for a module that is importable from a folder above the plug-in's file."""
    if not missing or ref.path is None or ref.module:
        return None
    top, file = missing.partition(".")[0], ref.path.absolute()
    for folder in file.parents[1:4]:
        names = file.relative_to(folder).with_suffix("").parts
        there = module_file(folder, top) is not None or (folder / top).is_dir()
        if there and all(name.isidentifier() for name in names):
            place = "" if folder == Path.cwd() else f"{shown(folder)}/"
            return f"its imports work from {folder}: write {place}{'.'.join(names)}:{ref.attribute}"
    return None


def call_plugin(setting: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a user's function; an error of theirs becomes a UseError that names the setting."""
    try:
        return function(*args, **options)
    except (TiltyardError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - a plug-in may raise anything
        message, hint = f"{setting}: {raised(error)}", "the traceback is the plug-in's own"
        raise UseError(message, hint, user_traceback(error)) from None


def user_traceback(error: BaseException) -> str:
    """The traceback as text, without frames of Tiltyard and of the import machinery."""
    if isinstance(error, RaisedElsewhere):
        return error.details
    shown_error = traceback.TracebackException.from_exception(error)
    chain: list[traceback.TracebackException | None] = [shown_error]
    for link in chain:
        if link is not None:
            kept = [frame for frame in link.stack if not _is_ours(frame.filename)]
            link.stack = traceback.StackSummary.from_list(kept)
            chain += [link.__cause__, link.__context__]
    return user_names("".join(shown_error.format()).rstrip())


def _is_ours(filename: str) -> bool:
    return filename.startswith(("<frozen importlib", "<frozen runpy", _PACKAGE)) or "importlib" + os.sep in filename


def shown(path: Path) -> Path:
    """`path` relative to the current folder, if it is inside."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


# ------------------------------------------------------------------------------------------------ options


def check_options(target: Any, options: Mapping[str, Any], given: int, what: str) -> list[Problem]:
    """Problems with options: names that `target` does not accept, and required ones that are missing.

    The first `given` positional parameters (without `self`) are passed by Tiltyard. A target with **kwargs accepts
    every name; one without a readable signature (compiled code) is not checked.
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return []
    ours = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:given]
    settable = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in ours]
    names = [p.name for p in settable]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    called = getattr(target, "__qualname__", str(target))
    found: list[Problem] = []
    for name, value in options.items():
        setting, text = f"{what}.{name}", short(value)
        if name in ours:
            found.append(Problem(setting, text, f"Tiltyard itself passes {name!r} to {called}", "leave it out"))
        elif name not in names and not anything:
            hint = did_you_mean(name, names) if names else "it has no options"
            found.append(Problem(setting, text, f"{called} has no option {name!r}", hint))
    for parameter in settable:
        if parameter.default is parameter.empty and parameter.name not in options:
            hint = f"set {what}.{parameter.name}=..."
            found.append(Problem(f"{what}.{parameter.name}", "", f"is missing: {called} needs it", hint))
    return found


def short(value: Any) -> str:
    """A value as it is shown in errors: like YAML, on one line, at most 60 characters."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, int) and abs(value) > 10**40:
        text = f"about 1e{(value.bit_length() * 30103) // 100000}"
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------------------------------ of an experiment


Named = tuple[str, str, str]  # dotted setting, kind of plug-in, id


def named_plugins(experiment: Experiment) -> list[Named]:
    """Every plug-in that an experiment names."""
    env, algo = experiment.env, experiment.algo
    loss = getattr(algo, "loss", None)
    return [
        *([] if family_of(env.id) else [("env.id", "env", env.id)]),
        *((f"env.wrappers.{i}.id", "wrapper", wrapper.id) for i, wrapper in enumerate(env.wrappers)),
        *model_plugins(experiment.model),
        *([] if loss is None else [("algo.loss.id", "loss", loss.id)]),
        *([("algo.id", "algo", algo.id)] if is_own_algo(algo.id) else []),
    ]


def model_plugins(model: Model) -> list[Named]:
    """The plug-ins of a model alone: a policy may be loaded without its experiment."""
    return [
        ("model.id", "model", model.id),
        ("model.encoder.id", "encoder", model.encoder.id),
        *((f"model.encoders.{name}.id", "encoder", encoder.id) for name, encoder in model.encoders.items()),
    ]


def refuse_foreign_code(named: Iterable[Named], base: Sequence[Path], read_from: Sequence[Path]) -> None:
    """UseError if another user controls which code these names run; called before a run's code is executed.

    `read_from` are the files and folders that contain the names: their owners chose the names. The owners of a
    plug-in's file, of files that it imports and of the folders above, up to `base`, control the code. Root's count as
    this user's (config/ownership.py).
    """
    from tiltyard.plugins.snapshot import plugin_files

    tops = [top for folder in base for top in (folder.absolute(), folder.resolve())]
    for setting, kind, text in named:
        if kind_of(text) is None and ":" not in text:  # a built-in name or a Gymnasium id, not `module:Id-v0`
            continue
        ref = own_ref(kind, text, base)
        files = [ref.path, *plugin_files(ref).copied] if ref and ref.path else []
        decides = f"which code {setting} = {text} runs"
        refuse_foreign(read_from, decides)
        for top in tops:
            refuse_foreign(files, decides, top=top)
