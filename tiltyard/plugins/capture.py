"""Names for classes and functions that are passed instead of names: train(env=MyEnv, model=MyModel).

A run stores names and copies of files. A class of a notebook's cell or of the running script is therefore written to a
new module, with the statements that it uses; importing the whole script would train again.

    class of a module              package.module:MyEnv, or folder/module:MyEnv if it is not installed
    class of a cell or script      notebook.py:MyEnv, in a temporary folder
    id registered in this process  class, options and time limit of its entry in Gymnasium's registry
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from tiltyard.errors import UseError
from tiltyard.plugins.resolve import REGISTERING, Ref, own_ref, short
from tiltyard.plugins.snapshot import plugin_files

_AT_ONCE = {"class", "listcomp", "setcomp", "dictcomp", "genexpr"}  # scopes that are executed with the definition


def name_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Settings with names instead of classes and functions, and the folder of the module that has their source."""
    capture = _Capture()
    named = capture.named({**values, "env": _with_class(values["env"])} if "env" in values else values)
    return named, capture.write()


def name_of(target: Any) -> str:
    """The name of a class or function, valid until this process ends."""
    capture = _Capture()
    name, folder = capture.name_of(target), capture.write()
    return name if folder is None else f"{folder}/{name}"


def _with_class(env: Any) -> Any:
    """The env's settings with class, options and time limit, if its id is registered in this process only."""
    if "gymnasium" not in sys.modules or not isinstance(env, dict):
        return env
    from gymnasium.envs.registration import load_env_creator, registry

    entry = registry.get(str(env.get("id")))
    known = {"gymnasium", *(point.module.partition(".")[0] for point in entry_points(group="gymnasium.envs"))}
    known |= {package for package, _ in REGISTERING.values()}
    if entry is None or (isinstance(entry.entry_point, str) and entry.entry_point.partition(".")[0] in known):
        return env
    if entry.entry_point is None or entry.additional_wrappers:
        raise UseError(f"{entry.id} was registered with wrappers or without entry_point", "pass its class: env=MyEnv")
    creator = load_env_creator(entry.entry_point) if isinstance(entry.entry_point, str) else entry.entry_point
    frames = int(skip) if isinstance(skip := env.get("frameskip"), int | float) and skip >= 1 else 1
    limit = env.get("time_limit")
    if limit is None and entry.max_episode_steps:
        limit = -(-entry.max_episode_steps // frames)
    options = {**entry.kwargs, **(env.get("options") or {})}
    return {**env, "id": creator, "options": options, "time_limit": limit}


class _Capture:
    """Collects a module: imports, then definitions, each after those that it needs."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = vars(sys.modules["__main__"])
        script = self.namespace.get("__file__")
        self.filename = f"{Path(script).stem}_main.py" if script else "notebook.py"
        cells = self.namespace.get("In")  # as they were executed
        self.sources = [*([_source(script)] if script else ()), *(cells if isinstance(cells, list) else ())]
        self.done: set[str] = set()
        self.imports: dict[str, None] = {}
        self.statements: list[str] = []
        self.links: dict[Path, Path] = {}  # place next to the module -> file of the user's project

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [node for text in self.sources for statement in _parse(text) for node in ast.walk(statement)]

    def named(self, value: Any) -> Any:
        """A plain value with names instead of classes and functions, except in options."""
        if isinstance(value, Mapping):
            return {key: inner if key == "options" else self.named(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.named(inner) for inner in value]
        return self.name_of(value) if callable(value) else value

    def name_of(self, target: Any) -> str:
        name, module = getattr(target, "__qualname__", None), getattr(target, "__module__", None)
        if name is None or module is None:
            hint = "pass the class and its arguments apart: env={'id': MyEnv, 'options': {'size': 5}}"
            raise UseError(f"{short(target)} is not a class or function", hint)
        if "<" in name:
            what = "a lambda" if name.endswith("<lambda>") else f"defined inside {name.split('.<')[0]}()"
            hint = "write it as a class or `def` outside of functions"
            raise UseError(f"the source of {target.__name__} cannot be captured: it is {what}", hint)
        if module == "__main__":
            self._define(target, name.partition(".")[0])
            return f"{self.filename}:{name}"
        ref = _project_ref(module)
        return f"{module}:{name}" if ref is None else f"{ref.path}/{module}:{name}"

    def write(self) -> Path | None:
        """Write the module, if it has anything, and return its folder."""
        if not self.statements:
            return None
        future = ["from __future__ import annotations"] * (self.namespace.get("annotations") is annotations)
        text = "\n".join([*future, *self.imports, "", "", "\n\n\n".join(self.statements), ""])
        folder = Path(_folder().name, sha256(f"{self.filename}{text}{self.links}".encode()).hexdigest()[:16])
        if not folder.exists():
            for place, file in self.links.items():
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                (folder / place).symlink_to(file)
            folder.mkdir(exist_ok=True)
            with (folder / self.filename).open("x", encoding="utf-8") as module:
                module.write(text)
        return folder

    def _define(self, target: Any, name: str) -> None:
        """Add a class or function and everything that it uses."""
        if name in self.done:
            return
        self.done.add(name)
        text = self._definition(target, name)
        at_once, later = _global_names(text)
        for each in sorted(at_once):
            self._add(each, name)
        self.statements.append(text)
        for each in sorted(later):
            self._add(each, name)

    def _definition(self, target: Any, name: str) -> str:
        """The newest definition, in the cell that the object itself is from if that is known."""
        parts = vars(target).values() if isinstance(target, type) else [inspect.unwrap(target)]
        own = [_source(part.__code__.co_filename) for part in parts if hasattr(part, "__code__")]
        for text in [*own, *reversed(self.sources)]:
            for node in reversed(_parse(text)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                    first = min(each.lineno for each in (node, *node.decorator_list))
                    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        hint = f"define it in a cell without %%, or in a file: from my_code import {name}"
        raise UseError(f"the source of {name} was not found in the notebook or script", hint)

    def _add(self, name: str, user: str) -> None:
        """Add what a global name means that `user` uses. Names without a value are left out."""
        if name in self.done or (name.startswith("__") and name != "__file__") or name not in self.namespace:
            return
        value = self.namespace[name]
        if lines := dict(self._import_lines(name, value)):
            self.imports |= dict.fromkeys(lines)
            for ref in filter(None, map(_project_ref, lines.values())):
                files = plugin_files(ref)
                self.links |= {file.relative_to(files.folder): file for file in (*files.copied, *files.left)}
        elif getattr(value, "__module__", None) == "__main__" and getattr(value, "__qualname__", "<").isidentifier():
            self.name_of(value)
            self.statements += [f"{name} = {value.__qualname__}"] if value.__qualname__ != name else []
        elif name != "__file__" and self._is_constant(value):
            self.statements.append(f"{name} = {value!r}")
        else:
            what = f"{user} uses {name}, whose value ({type(value).__name__}) cannot be captured"
            hint = f"create it inside {user}, or write it into a file and import it: from my_code import {name}"
            raise UseError(f"{what}: only imports, classes, functions and constants can", hint)
        self.done.add(name)

    def _is_constant(self, value: Any) -> bool:
        """Whether a value is made of numbers and of strings that are written in the notebook or script: one that was
        computed may be a secret."""
        try:
            if ast.literal_eval(repr(value)) != value:
                return False
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return False
        found = [node.value for node in ast.walk(ast.parse(repr(value))) if isinstance(node, ast.Constant)]
        written = {node.value for node in self.nodes if isinstance(node, ast.Constant)}
        return all(each in written for each in found if isinstance(each, str | bytes))

    def _import_lines(self, name: str, value: Any) -> Iterator[tuple[str, str]]:
        """Statements that import `value` as `name`, with their modules: those that were executed, else a new one."""
        found = False
        for node in self.nodes:
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                start, module, bound = "", alias.name, alias.asname or alias.name.partition(".")[0]
                imported: Any = sys.modules.get(module if alias.asname else bound)
                if isinstance(node, ast.ImportFrom):
                    relative = "." * node.level + (node.module or "")
                    try:
                        module = importlib.util.resolve_name(relative, self.namespace.get("__package__"))
                    except ImportError:  # one that was not executed, or failed
                        continue
                    start, imported = f"from {module} ", getattr(sys.modules.get(module), alias.name, ...)
                    module = f"{module}.{alias.name}" if f"{module}.{alias.name}" in sys.modules else module
                if bound == name and imported is value:
                    found = True
                    yield f"{start}import {alias.name}" + (f" as {bound}" if alias.asname else ""), module
        home, title = str(getattr(value, "__module__", "__main__")), getattr(value, "__name__", "")
        if not found and isinstance(value, ModuleType):
            yield f"import {title} as {name}", title
        elif not found and home != "__main__" and getattr(sys.modules.get(home), title, ...) is value:
            yield f"from {home} import {title} as {name}", home


@cache
def _folder() -> TemporaryDirectory[str]:
    """Deleted when this process ends, because runs have copies."""
    return TemporaryDirectory(prefix="tiltyard-captured-")


def _source(filename: str) -> str:
    return "".join(linecache.getlines(filename))


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):  # a cell that was not executed either
        return []


def _global_names(text: str) -> tuple[set[str], set[str]]:
    """The global names that a definition uses when it is executed, and those that its functions use later."""
    top = symtable.symtable(text, "<captured>", "exec")
    found: tuple[set[str], set[str]] = ({each.get_name() for each in top.get_symbols() if each.is_referenced()}, set())
    waiting = [(table, False) for table in top.get_children()]
    for table, inside_function in waiting:
        later = inside_function or not {table.get_type(), table.get_name()} & _AT_ONCE
        found[later].update(each.get_name() for each in table.get_symbols() if each.is_global())
        waiting += [(child, later) for child in table.get_children()]
    return found


def _project_ref(module: str) -> Ref | None:
    """A loaded module as one of the user's project; None if it is installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    above = module.count(".") + (Path(file).name == "__init__.py")
    return own_ref("env", f"{module}:x", [Path(file).absolute().parents[above]])
