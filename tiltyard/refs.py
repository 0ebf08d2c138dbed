"""Names to objects, here and only here: built-in short names, `package.module:Name`, `path/file.py[:Name]`.

`parse` decides what a name means and executes nothing; `load` imports it. A file plug-in is a module of its own,
named after its path and content, so that two files called net.py never meet. What a plug-in may be given is its
signature's business (`check_options`). Copies of plug-in files for run folders are made in frozen.py.

    text ── parse ──> Ref ── load ──> class or function ── check_options ──> [Problem]
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from tiltyard.errors import Problem, UseError, did_you_mean

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

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>.*))?", re.DOTALL)
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_PACKAGE = str(Path(__file__).resolve().parent) + os.sep


@dataclass(frozen=True)
class Ref:
    """What a name in an experiment means. `path` for files, `module` for the other two kinds."""

    text: str
    kind: Literal["builtin", "module", "file"]
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
    return Ref(text, kind, None, match["module"], match["name"])


def find_file(text: str, base: Sequence[Path]) -> Path:
    """The file that a plug-in path means: absolute, or below the first base folder that has it."""
    wanted = Path(text).expanduser()
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
        module = _load_file(ref.path)
    else:
        assert ref.module is not None
        module = _load_module(ref.module, ref.text)
    found: Any = module
    where = str(shown(ref.path)) if ref.path else ref.module
    for part in ref.attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            own = [name for name in public if getattr(vars(found)[name], "__module__", None) == module.__name__]
            raise UseError(f"{where} has no {part!r}", did_you_mean(part, own or public))
        found = getattr(found, part)
    return found


def _load_module(name: str, text: str) -> ModuleType:
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


# Modules that plug-in files imported from their own folder, by folder: two folders may each have a layers.py.
_siblings: dict[str, dict[str, ModuleType]] = {}


def _load_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    try:
        source = resolved.read_bytes()
    except OSError as error:
        raise UseError(f"{shown(path)} cannot be read: {error.strerror}", "check its permissions") from None
    digest = hashlib.sha256(str(resolved).encode() + b"\0" + source).hexdigest()[:16]
    name = f"tiltyard_plugin_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and typing look their module up
    try:
        with _blamed_on(str(shown(path))), _among_siblings(str(resolved.parent)):
            spec.loader.exec_module(module)
    except UseError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _among_siblings(folder: str) -> Iterator[None]:
    """`folder` first on sys.path, with its own siblings in sys.modules rather than those of another plug-in folder."""
    for other, modules in _siblings.items():
        for name, module in modules.items():
            if other != folder and sys.modules.get(name) is module:
                del sys.modules[name]
    sys.modules.update(_siblings.get(folder, {}))
    before, writes = set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True  # a run folder holds text; and an edit within a second must not meet an old cache
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        if folder in sys.path:
            sys.path.remove(folder)
        mine = _siblings.setdefault(folder, {})
        for name in set(sys.modules) - before:
            module = sys.modules[name]
            file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
            if not name.startswith("tiltyard_plugin_") and str(file).startswith(folder + os.sep):
                mine[name] = module


@contextmanager
def _blamed_on(what: str) -> Iterator[None]:
    try:
        yield
    except UseError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever foreign code raises is told, not ours to handle
        reason = f"{type(error).__name__} while imported" + (f": {error}" if str(error) else "")
        raise UseError(f"{what} raised {reason}", "the traceback is the plug-in's own", user_traceback(error)) from None


def user_traceback(error: BaseException) -> str:
    """The traceback of a user's code as text: frames of Tiltyard and of the import machinery are left out."""
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
        ("env.id", "env", env.id),
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
    from tiltyard.frozen import neighbours

    tops = [folder.absolute() for folder in base]
    for setting, kind, text in named:
        form = kind_of(text)
        if form is None and ":" not in text:  # a built-in name or a Gymnasium id, and no `module:Id-v0`
            continue
        places = [*read_from]
        if form == "file":
            path = parse(text, {}, CONVENTIONAL[kind], base).path
            assert path is not None
            places += [folder for folder in path.parents if any(folder.is_relative_to(top) for top in tops)]
            places += neighbours(path)
        for place in places:
            if place.exists() and place.stat().st_uid != os.getuid():
                raise UseError(
                    f"{shown(place)} belongs to another user, and {setting} = {text} runs code on its word",
                    "read that code, then pass --trust-code (trust_code=True in Python)",
                )


def freeze(experiment: Experiment, base: Sequence[Path], into: Path) -> Experiment:
    """Copy plug-in files, with the neighbours they import, below `into`/plugins; the experiment naming the copies."""
    from tiltyard.frozen import freeze_plugins

    return freeze_plugins(experiment, base, into)
