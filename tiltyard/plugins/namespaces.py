"""Load the modules of a user's folder as a package of its own, so that two files called layers.py do not clash.

The package is called, say, `tiltyard_plugins_3`. As in a script, imports look in the folder first: the loader rewrites
them when it compiles a file. SHARED packages are always the installed ones. Names of plug-ins are resolved in
resolve.py.

    import layers          ──>  import tiltyard_plugins_3.layers as layers     if the folder has layers.py
    from layers import X   ──>  from tiltyard_plugins_3.layers import X
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

# Packages whose objects pass between Tiltyard and plug-ins, so both must use the same classes.
SHARED = ("tiltyard", "gymnasium", "numpy", "torch")
_PREFIX = "tiltyard_plugins_"


def module_file(folder: Path, name: str) -> Path | None:
    """The Python file of `import name` in a folder, or None. Executes nothing."""
    place = folder.joinpath(*name.split("."))
    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if is_file(file):
            return file
    return None


def is_file(path: Path) -> bool:
    """Whether there is such a file; False for names that the file system refuses."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises OSError for them


def is_own(folder: Path, name: str) -> bool:
    """Whether `import name` in a module of this folder means a module of the folder."""
    top = name.partition(".")[0]
    if top in (*SHARED, *sys.builtin_module_names, "__future__"):
        return False
    if module_file(folder, top) is not None or module_file(folder, name) is not None:
        return True
    if not (folder / top).is_dir():
        return False
    try:
        installed = importlib.util.find_spec(top)
    except ValueError:  # loaded, but not by an import
        return False
    if installed is not None and installed.origin is not None:
        return False  # a regular package has priority over a folder without __init__.py
    return any((folder / top).rglob("*.py"))


def absolute_imports(node: ast.AST) -> list[str]:
    """The modules that a node imports: `import a, b.c`, `from a import b` or `import_module("a")`."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(name), level=0):
            return [name]
        case ast.Call(ast.Name("import_module") | ast.Attribute(attr="import_module"), [ast.Constant(str(name)), *_]):
            return [name] if all(part.isidentifier() for part in name.split(".")) else []
    return []


def user_names(text: str) -> str:
    """A message with the names of modules as users know them."""
    return re.sub(rf"\b{_PREFIX}\d+\.", "", text)


class Namespace:
    """The package of one folder, which finds its modules for Python. After an edit, the next load creates a new one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, f"{_PREFIX}{next(_numbers)}"
        self.sources: dict[Path, bytes] = {}
        self.files: dict[str, Path] = {}
        spec = ModuleSpec(self.name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[self.name] = importlib.util.module_from_spec(spec)
        sys.meta_path.insert(0, self)

    def load_file(self, path: Path) -> ModuleType:
        """Load a file of the folder, whatever its name."""
        stem = path.stem
        if not stem.isidentifier() or (self.folder / stem / "__init__.py").is_file():
            stem = re.sub(r"\W", "_", stem) + "_py"
        self.files[f"{self.name}.{stem}"] = path
        return self.load(stem)

    def load(self, name: str) -> ModuleType:
        if f"{self.name}.{name}" not in sys.modules:
            importlib.invalidate_caches()  # files may have been added
        return importlib.import_module(f"{self.name}.{name}")

    def is_stale(self) -> bool:
        return any(not file.is_file() or file.read_bytes() != source for file, source in self.sources.items())

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by Python for every import."""
        if not name.startswith(f"{self.name}."):
            return None
        if name in self.files:
            file = str(self.files[name])
            return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file, self))
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path, self)
            spec.cached = None
        return spec

    def rewrite(self, tree: ast.AST) -> None:
        """Turn imports of the folder's modules into imports from this package."""
        for node in ast.walk(tree):
            own = [name for name in absolute_imports(node) if is_own(self.folder, name)]
            match node:
                case ast.Import() if own:
                    within = [self._within(alias) if alias.name in own else [alias] for alias in node.names]
                    node.names = [alias for aliases in within for alias in aliases]
                case ast.ImportFrom() if own:
                    node.module = f"{self.name}.{node.module}"
                case ast.Call(args=[ast.Constant() as argument, *_]) if own:
                    argument.value = f"{self.name}.{own[0]}"

    def _within(self, alias: ast.alias) -> list[ast.alias]:
        """`import a.b as c` is one import; `import a.b` loads a.b and then binds `a`."""
        top = alias.name.partition(".")[0]
        names = [alias.name] if alias.asname else dict.fromkeys((alias.name, top))
        return [ast.copy_location(ast.alias(f"{self.name}.{name}", alias.asname or top), alias) for name in names]


class _Loader(SourceFileLoader):
    """Loads a file of a namespace, without __pycache__: quick edits must not use an old cache."""

    def __init__(self, name: str, path: str, namespace: Namespace) -> None:
        super().__init__(name, path)
        self.namespace = namespace

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self.namespace.sources[Path(self.path)] = source
        tree = ast.parse(source, self.path)
        self.namespace.rewrite(tree)
        return self.source_to_code(tree, self.path)


_numbers = itertools.count()
_newest: dict[Path, Namespace] = {}


def namespace_of(folder: Path) -> Namespace:
    """The namespace of a folder, with its files as they are now."""
    folder = folder.resolve()
    if folder not in _newest or _newest[folder].is_stale():
        _newest[folder] = Namespace(folder)
    return _newest[folder]


def import_hint(error: BaseException) -> str | None:
    """Hint for a module of a plug-in's folder that was not found: an import that cannot be rewritten asked for it."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    loaders = [frame.f_globals.get("__loader__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(is_own(each.namespace.folder, error.name) for each in loaders if isinstance(each, _Loader)):
        return None
    reason = "dynamic imports and other libraries do not find your project's modules"
    return f"write `import {error.name}` in your code: {reason}"
