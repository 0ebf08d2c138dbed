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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from tiltyard.errors import Problem, RaisedElsewhere, UseError, did_you_mean
from tiltyard.plugins.namespaces import SHARED, is_own, module_file, namespace_of

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment, Model

# Class name in a plug-in file, if the name does not give one.
CONVENTIONAL = {
    "env": "CustomEnv",
    "model": "CustomModel",
    "encoder": "CustomEncoder",
    "wrapper": "CustomWrapper",
    "policy": "CustomPolicy",
}

# Families of envs: `atari:pong` is Atari("pong"). The second item is the pip extra that the family needs.
FAMILIES: Mapping[str, tuple[str, str]] = {
    "atari": ("tiltyard.envs.suites.atari:Atari", "atari"),
    "doom": ("tiltyard.envs.suites.vizdoom:Doom", "vizdoom"),
    "envpool": ("tiltyard.envs.suites.envpool:EnvPool", "envpool"),
}

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>.*))?", re.DOTALL)
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_MODULE = re.compile(rf"(?P<folder>.*/)?(?P<module>{_DOTTED}):(?P<name>{_DOTTED})", re.DOTALL)
_REGISTERING = re.compile(rf"(?P<folder>[^:]*/)?(?P<module>{_DOTTED}):(?P<id>.+)", re.DOTALL)
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = Path(os.__file__).parent
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True)
class Ref:
    """A parsed name. `module` is set for modules and built-ins; `path` is the file, or the project folder of the
    module, None if it is installed."""

    text: str
    kind: Literal["builtin", "module", "file", "registering"]
    path: Path | None
    module: str | None
    attribute: str


def kind_of(text: str, builtins: Iterable[str] = ()) -> Literal["builtin", "module", "file"] | None:
    """The kind of a name by its form alone; None for anything else (a Gymnasium id, a typo)."""
    if text in builtins:
        return "builtin"
    if _FILE.fullmatch(text):
        return "file"
    return "module" if _MODULE.fullmatch(text) else None


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
        raise UseError(
            f"{family}: envs need the package {error.name!r}, which is not installed",
            f"pip install 'tiltyard[{extra}]'",
        ) from error


def parse(text: str, builtins: Mapping[str, str], conventional: str | None, base: Sequence[Path]) -> Ref:
    """Parse a name. `builtins` maps short names to `package.module:Name`; files are searched below each `base`."""
    kind = kind_of(text, builtins)
    if kind is None:
        hint = did_you_mean(text, builtins) or "write a built-in name, package.module:Name or path/file.py:Name"
        raise UseError(f"unknown name {text!r}: not built-in, package.module:Name or path/file.py:Name", hint)
    if kind == "file":
        match = _FILE.fullmatch(text)
        assert match is not None
        name = match["name"] if match["name"] is not None else conventional
        if not name or not all(part.isidentifier() for part in name.split(".")):
            raise UseError(f"{text!r} does not name a class of the file", f"write {match['path']}:ClassName")
        return Ref(text, "file", find_file(match["path"], base), None, name)
    match = _MODULE.fullmatch(builtins[text] if kind == "builtin" else text)
    assert match is not None, f"built-in {text!r} must map to package.module:Name"
    module = match["module"]
    folder = _find_module(match["folder"] or "", module, base) if kind == "module" else None
    if match["folder"] and folder is None:
        written = f"{match['folder']}{module.replace('.', '/')}.py:{match['name']}"
        raise UseError(f"{text!r}: there is no module {module!r} in {match['folder']}", f"did you mean {written}?")
    return Ref(text, kind, folder, module, match["name"])


def parse_registering(text: str, base: Sequence[Path]) -> Ref | None:
    """Parse `package:Id-v0`, where the package registers the id with Gymnasium; None for an id without a package."""
    match = _REGISTERING.fullmatch(text)
    if match is None:
        return None
    folder = _find_module(match["folder"] or "", match["module"], base)
    if match["folder"] and folder is None:
        hint = "write an id, package:Id-v0, or folder/package:Id-v0 with the folder of the package"
        raise UseError(f"{text!r}: there is no module {match['module']!r} in {match['folder']}", hint)
    return Ref(text, "registering", folder, match["module"], match["id"])


def own_ref(kind: str, text: str, base: Sequence[Path]) -> Ref | None:
    """The file or module of the user's project that a name refers to; None if it is built-in or installed."""
    if kind_of(text) is not None:
        ref: Ref | None = parse(text, {}, CONVENTIONAL[kind], base)
    else:
        ref = parse_registering(text, base) if kind == "env" else None
    return ref if ref is not None and ref.path is not None else None


def _find_module(folder: str, module: str, base: Sequence[Path]) -> Path | None:
    """The project folder of a module: `folder` below the first base that has it. Executes nothing."""
    if module.partition(".")[0] in SHARED:
        return None
    for place in dict.fromkeys(Path(os.path.normpath(each.absolute() / _from_home(folder))) for each in base):
        installed = place.is_relative_to(_STDLIB) or any(part in _INSTALLED for part in place.parts)
        try:
            if not installed and module_file(place, module) is not None:
                return place
        except (OSError, ValueError):  # names too long for the file system, or with a zero byte
            continue
    return None


def find_file(text: str, base: Sequence[Path]) -> Path:
    """The file of a plug-in path: absolute, or below the first base folder that has it."""
    wanted = _from_home(text)
    places = (
        [wanted]
        if wanted.is_absolute()
        else list(dict.fromkeys(Path(os.path.normpath(folder.absolute() / wanted)) for folder in base))
    )
    for place in places:
        if _is_file(place):
            return place
    searched = ", ".join(str(place.parent) for place in places) or "no folder"
    near = [item.name for place in places if place.parent.is_dir() for item in place.parent.glob("*.py")]
    hint = did_you_mean(wanted.name, near)
    if not hint.startswith("did"):
        hint = "paths are relative to the experiment file's folder, then to the current one"
    raise UseError(f"there is no file {text} (searched in {searched})", hint)


def _from_home(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of an unknown user
        return Path(text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # names too long for the file system, or with a zero byte
        return False


# ------------------------------------------------------------------------------------------------ importing


def load(ref: Ref) -> Any:
    """Import the object of `ref`. Executes the plug-in's code; its exceptions become a UseError with the traceback."""
    if ref.kind == "file":
        assert ref.path is not None
        module = _load_file(ref.path, ref.attribute)
    else:
        assert ref.module is not None
        module = _load_module(ref.module, ref.text) if ref.path is None else load_own(ref.path, ref.module, ref.text)
    found: Any = module
    where = str(shown(ref.path)) if ref.path and not ref.module else ref.module
    for part in ref.attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            own = [name for name in public if getattr(vars(found)[name], "__module__", None) == module.__name__]
            raise UseError(f"{where} has no {part!r}", did_you_mean(part, own or public))
        found = getattr(found, part)
    return found


def _load_module(name: str, text: str) -> ModuleType:
    """Import an installed module, or one in the current folder, for old runs that have no copy of it."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    with _import_errors(text):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                hint = "install the package, start in the folder that has it, or name the file: path/file.py:Name"
                raise UseError(f"{text!r}: there is no module {error.name!r}", hint) from None
            raise


def load_own(folder: Path, name: str, text: str) -> ModuleType:
    """Import a module of the user's project in the namespace of its folder."""
    with _import_errors(text, lambda missing: _elsewhere(missing, folder)):
        return namespace_of(folder).load(name)


def _load_file(path: Path, attribute: str) -> ModuleType:
    resolved = path.resolve()
    if not os.access(resolved, os.R_OK):
        raise UseError(f"{shown(path)} cannot be read", "check its permissions")

    def hint(missing: str) -> str | None:
        return _elsewhere(missing, resolved.parent) or _as_module(missing, path.absolute(), attribute)

    with _import_errors(str(shown(path)), hint):
        return namespace_of(resolved.parent).load_file(resolved)


@contextmanager
def _import_errors(what: str, hint_for: Callable[[str], str | None] = lambda missing: None) -> Iterator[None]:
    """Turn exceptions of a plug-in's import into a UseError. `hint_for` may give a better hint for a missing module."""
    try:
        yield
    except UseError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may raise anything
        reason = f"{type(error).__name__} while imported" + (f": {error}" if str(error) else "")
        hint = hint_for(error.name) if isinstance(error, ModuleNotFoundError) and error.name else None
        hint = hint or "the traceback is the plug-in's own"
        raise UseError(f"{what} raised {reason}", hint, user_traceback(error)) from None


def _elsewhere(missing: str, folder: Path) -> str | None:
    """Hint for a module of the plug-in's folder that code outside that folder tried to import."""
    top = missing.partition(".")[0]
    if module_file(folder, missing) is None and not (missing == top and is_own(folder, top)):
        return None
    return f"other libraries cannot import your project's modules: `import {missing}` in your code and pass the objects"


def _as_module(missing: str, file: Path, attribute: str) -> str | None:
    """Hint for a module that is importable from a folder above the plug-in's file."""
    top = missing.partition(".")[0]
    for folder in file.parents[1:4]:
        names = file.relative_to(folder).with_suffix("").parts
        there = module_file(folder, top) is not None or (folder / top).is_dir()
        if there and all(name.isidentifier() for name in names):
            place = "" if folder == Path.cwd() else f"{shown(folder)}/"
            return f"its imports work from {folder}: write {place}{'.'.join(names)}:{attribute}"
    return None


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
    return "".join(shown_error.format()).rstrip()


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
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    ours = {p.name for p in positional[:given]}
    settable = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in ours]
    names = {p.name for p in settable}
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
    env = experiment.env
    return [
        *([] if family_of(env.id) else [("env.id", "env", env.id)]),
        *((f"env.wrappers.{i}.id", "wrapper", wrapper.id) for i, wrapper in enumerate(env.wrappers)),
        *model_plugins(experiment.model),
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
    plug-in's file, of files that it imports and of the folders above, up to `base`, control the code.
    """
    from tiltyard.plugins.snapshot import plugin_files

    tops = [top for folder in base for top in (folder.absolute(), folder.resolve())]
    for setting, kind, text in named:
        if kind_of(text) is None and ":" not in text:  # a built-in name or a Gymnasium id, not `module:Id-v0`
            continue
        places = [*read_from]
        ref = own_ref(kind, text, base)
        if ref is not None and ref.path is not None:
            files = plugin_files(ref).copied
            above = {folder for file in (ref.path, *files) for folder in file.parents}
            places += [folder for folder in above if any(folder.is_relative_to(top) for top in tops)]
            places += [ref.path, *files]
        for place in places:
            if place.exists() and place.stat().st_uid != os.getuid():
                raise UseError(
                    f"{shown(place)} belongs to another user and decides which code {setting} = {text} runs",
                    "review that code, then pass --trust-code (trust_code=True in Python)",
                )
