"""Names to objects, here and only here: built-in short names, `package.module:Name`, `path/file.py[:Name]`.

`parse` decides what a name means and executes nothing; `load` imports it. A module that lies in the project is the
user's own, like a file: it lives in a room (rooms.py), apart from every other folder's. `folder/package.module:Name`
says where it lies, which is how a run names its copy. What a plug-in may be given is its signature's business
(`check_options`). Copies of plug-ins for run folders are made in frozen.py. Envs that come in families have ids
`family:name` (FAMILIES), which are names of ours and no import strings.

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

# The class that a plug-in file holds when the name does not say.
CONVENTIONAL = {
    "env": "CustomEnv",
    "model": "CustomModel",
    "encoder": "CustomEncoder",
    "wrapper": "CustomWrapper",
    "policy": "CustomPolicy",
}

# Envs that one class makes by name: `atari:pong` is Atari("pong"). The second is the extra of Tiltyard that it needs.
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
    """What a name in an experiment means. `module` for modules and built-ins; `path` is the file, or the folder of the
    project that holds the module: None when it is installed."""

    text: str
    kind: Literal["builtin", "module", "file", "registering"]
    path: Path | None
    module: str | None
    attribute: str


def kind_of(text: str, builtins: Iterable[str] = ()) -> Literal["builtin", "module", "file"] | None:
    """The kind a name would be by its shape alone; None when it is none of the three (a Gymnasium id, a typo)."""
    if text in builtins:
        return "builtin"
    if _FILE.fullmatch(text):
        return "file"
    return "module" if _MODULE.fullmatch(text) else None


def family_of(env_id: str) -> tuple[str, str] | None:
    """Family and name of an env id like `atari:pong`; None for every other id."""
    family, colon, name = env_id.partition(":")
    return (family, name) if colon and family in FAMILIES else None


def load_family(family: str) -> Any:
    """The class that makes a family's envs; UseError with the command that installs what it needs."""
    target, extra = FAMILIES[family]
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise UseError(
            f"envs called {family}:... need the package {error.name!r}, which is not installed",
            f"pip install 'tiltyard[{extra}]'",
        ) from error


def parse(text: str, builtins: Mapping[str, str], conventional: str | None, base: Sequence[Path]) -> Ref:
    """What `text` refers to. `builtins` maps short names to `package.module:Name`; files lie below some `base`."""
    kind = kind_of(text, builtins)
    if kind is None:
        hint = did_you_mean(text, builtins) or "write a built-in name, package.module:Name or path/file.py:Name"
        raise UseError(f"{text!r} is no built-in name, no package.module:Name and no path/file.py:Name", hint)
    if kind == "file":
        match = _FILE.fullmatch(text)
        assert match is not None
        name = match["name"] if match["name"] is not None else conventional
        if not name or not all(part.isidentifier() for part in name.split(".")):
            raise UseError(
                f"{text!r} does not say which class of the file is meant", f"write {match['path']}:ClassName"
            )
        return Ref(text, "file", find_file(match["path"], base), None, name)
    match = _MODULE.fullmatch(builtins[text] if kind == "builtin" else text)
    assert match is not None, f"built-in {text!r} must map to package.module:Name"
    module = match["module"]
    folder = _find_module(match["folder"] or "", module, base) if kind == "module" else None
    if match["folder"] and folder is None:
        written = f"{match['folder']}{module.replace('.', '/')}.py:{match['name']}"
        raise UseError(
            f"there is no module {module!r} in {match['folder']}, as {text!r} says", f"or is {written} meant?"
        )
    return Ref(text, kind, folder, module, match["name"])


def parse_registering(text: str, base: Sequence[Path]) -> Ref | None:
    """`package:Id-v0`, whose package registers the id with Gymnasium; None for an id without a package."""
    match = _REGISTERING.fullmatch(text)
    if match is None:
        return None
    folder = _find_module(match["folder"] or "", match["module"], base)
    if match["folder"] and folder is None:
        hint = "an id alone, package:Id-v0, or folder/package:Id-v0 with the folder that the package lies in"
        raise UseError(f"there is no module {match['module']!r} in {match['folder']}, as {text!r} says", hint)
    return Ref(text, "registering", folder, match["module"], match["id"])


def own_ref(kind: str, text: str, base: Sequence[Path]) -> Ref | None:
    """What a name means of the project; None when that is something of ours, of Gymnasium's or installed."""
    if kind_of(text) is not None:
        ref: Ref | None = parse(text, {}, CONVENTIONAL[kind], base)
    else:
        ref = parse_registering(text, base) if kind == "env" else None
    return ref if ref is not None and ref.path is not None else None


def _find_module(folder: str, module: str, base: Sequence[Path]) -> Path | None:
    """The folder of the project that holds a module: `folder` below the first base that has it. Executes nothing."""
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
    """The file that a plug-in path means: absolute, or below the first base folder that has it."""
    wanted = _from_home(text)
    places = (
        [wanted]
        if wanted.is_absolute()
        else list(dict.fromkeys(Path(os.path.normpath(folder.absolute() / wanted)) for folder in base))
    )
    for place in places:
        if _is_file(place):
            return place
    looked = ", ".join(str(place.parent) for place in places) or "no folder"
    near = [item.name for place in places if place.parent.is_dir() for item in place.parent.glob("*.py")]
    hint = did_you_mean(wanted.name, near)
    if not hint.startswith("did"):
        hint = "paths are relative to the experiment file's folder, then to the current one"
    raise UseError(f"there is no file {text} (looked in {looked})", hint)


def _from_home(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~nobody
        return Path(text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # names too long for the file system, or with a zero byte
        return False


# ------------------------------------------------------------------------------------------------ importing


def load(ref: Ref) -> Any:
    """Import what `ref` names. Executes the plug-in's code; what that raises becomes a UseError with its traceback."""
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
    """A module that is installed, or of an old run, which has no copy of it: then it is looked for here."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    with _blamed_on(text):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                hint = "install the package, start where it is importable, or name the file: path/file.py:Name"
                raise UseError(f"there is no module {error.name!r} for {text!r}", hint) from None
            raise


def load_own(folder: Path, name: str, text: str) -> ModuleType:
    """A module of the project, from the room of its folder."""
    with _blamed_on(text, lambda missing: _elsewhere(missing, folder)):
        return namespace_of(folder).load(name)


def _load_file(path: Path, attribute: str) -> ModuleType:
    resolved = path.resolve()
    if not os.access(resolved, os.R_OK):
        raise UseError(f"{shown(path)} cannot be read", "check its permissions")

    def hint(missing: str) -> str | None:
        return _elsewhere(missing, resolved.parent) or _as_module(missing, path.absolute(), attribute)

    with _blamed_on(str(shown(path)), hint):
        return namespace_of(resolved.parent).load_file(resolved)


@contextmanager
def _blamed_on(what: str, hint_for: Callable[[str], str | None] = lambda missing: None) -> Iterator[None]:
    """`hint_for` may know more than the traceback about a module that is missing."""
    try:
        yield
    except UseError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever foreign code raises is told, not ours to handle
        reason = f"{type(error).__name__} while imported" + (f": {error}" if str(error) else "")
        hint = hint_for(error.name) if isinstance(error, ModuleNotFoundError) and error.name else None
        hint = hint or "the traceback is the plug-in's own"
        raise UseError(f"{what} raised {reason}", hint, user_traceback(error)) from None


def _elsewhere(missing: str, folder: Path) -> str | None:
    """For a module that is in the plug-in's folder and was asked for by code that is not."""
    top = missing.partition(".")[0]
    if module_file(folder, missing) is None and not (missing == top and is_own(folder, top)):
        return None
    return f"other libraries do not find your project's modules: `import {missing}` in its own code and pass objects on"


def _as_module(missing: str, file: Path, attribute: str) -> str | None:
    """For a module that is found from a folder above a plug-in's file: how to name the plug-in as a module there."""
    top = missing.partition(".")[0]
    for folder in file.parents[1:4]:
        names = file.relative_to(folder).with_suffix("").parts
        there = module_file(folder, top) is not None or (folder / top).is_dir()
        if there and all(name.isidentifier() for name in names):
            place = "" if folder == Path.cwd() else f"{shown(folder)}/"
            return f"its imports would be found from {folder}: write {place}{'.'.join(names)}:{attribute}"
    return None


def user_traceback(error: BaseException) -> str:
    """The traceback of a user's code as text: frames of Tiltyard and of the import machinery are left out."""
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
    """`path` as a user would write it: relative to the current folder when below it."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


# ------------------------------------------------------------------------------------------------ options


def check_options(target: Any, options: Mapping[str, Any], given: int, what: str) -> list[Problem]:
    """Options that `target` does not take, and those it needs and is not given.

    The first `given` positional parameters (`self` not counted) are Tiltyard's own. A target that takes **kwargs takes
    every name; one without a readable signature (compiled code) is left to complain itself.
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
            found.append(Problem(setting, text, f"{called} is given {name!r} by Tiltyard", "leave it out"))
        elif name not in names and not anything:
            hint = did_you_mean(name, names) if names else "it takes no options"
            found.append(Problem(setting, text, f"{called} takes no option {name!r}", hint))
    for parameter in settable:
        if parameter.default is parameter.empty and parameter.name not in options:
            hint = f"set {what}.{parameter.name}=..."
            found.append(Problem(f"{what}.{parameter.name}", "", f"is missing: {called} needs it", hint))
    return found


def short(value: Any) -> str:
    """A value as an error shows it: as YAML would write it, on one line, at most 60 characters."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, int) and abs(value) > 10**40:
        text = f"about 1e{(value.bit_length() * 30103) // 100000}"
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------------------------------ plug-ins of an ex


Named = tuple[str, str, str]  # dotted setting, kind of plug-in, id


def named_plugins(experiment: Experiment) -> list[Named]:
    """Everything that an experiment names by import string."""
    env = experiment.env
    return [
        *([] if family_of(env.id) else [("env.id", "env", env.id)]),
        *((f"env.wrappers.{i}.id", "wrapper", wrapper.id) for i, wrapper in enumerate(env.wrappers)),
        *model_plugins(experiment.model),
    ]


def model_plugins(model: Model) -> list[Named]:
    """The part of `named_plugins` that a policy needs, which may be loaded without its experiment."""
    return [
        ("model.id", "model", model.id),
        ("model.encoder.id", "encoder", model.encoder.id),
        *((f"model.encoders.{name}.id", "encoder", encoder.id) for name, encoder in model.encoders.items()),
    ]


def refuse_foreign_code(named: Iterable[Named], base: Sequence[Path], read_from: Sequence[Path]) -> None:
    """UseError when somebody else decides which code these names run: the one check before a run's code is executed.

    `read_from` are the files and folders that the names stand in. Whoever owns one of them chose the names, also those
    of modules that are installed here; whoever owns a plug-in's file, a file that it imports or a folder above them up
    to `base` chose the code.
    """
    from tiltyard.plugins.snapshot import plugin_files

    tops = [top for folder in base for top in (folder.absolute(), folder.resolve())]
    for setting, kind, text in named:
        if kind_of(text) is None and ":" not in text:  # a built-in name or a Gymnasium id, and no `module:Id-v0`
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
                    f"{shown(place)} belongs to another user, and {setting} = {text} runs code on its word",
                    "read that code, then pass --trust-code (trust_code=True in Python)",
                )
