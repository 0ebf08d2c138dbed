"""Import a user's own modules in a namespace per folder, so that two files called layers.py do not clash.

A module in a namespace is called `tiltyard_plugins_3.layers`, and its imports, also later ones in functions, look in
the namespace's folder first, as a script's imports do; SHARED packages are always the installed ones. The same holds
for `__import__` and `importlib.import_module`. Names of plug-ins are resolved in resolve.py.

    import layers ── in the folder? ──yes──> tiltyard_plugins_3.layers ──no──> Python's own import
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# Packages whose objects pass between Tiltyard and plug-ins, so both must use the same classes.
SHARED = ("tiltyard", "gymnasium", "numpy", "torch")
_PREFIX = "tiltyard_plugins_"


def module_file(folder: Path, name: str) -> Path | None:
    """The Python file of `import name` in a folder, or None. Executes nothing."""
    place = folder.joinpath(*name.split("."))
    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if file.is_file():
            return file
    return None


def is_own(folder: Path, name: str) -> bool:
    """Whether `import name` in a module of this folder means a module of the folder."""
    top = name.partition(".")[0]
    if top in SHARED:
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


class Namespace:
    """The modules of one folder. After a file was edited, the next load creates a new namespace."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.name = folder, f"{_PREFIX}{number}"
        self.builtins = {**vars(builtins), "__import__": self._import}
        self.importlib = _Importlib(self)
        self.digests: dict[str, bytes] = {}
        self.files: dict[str, Path] = {}
        self.own: dict[str, bool] = {}
        spec = ModuleSpec(self.name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[self.name] = importlib.util.module_from_spec(spec)

    def load_file(self, path: Path) -> ModuleType:
        """Load a file of the folder, whatever its name."""
        stem = path.stem
        if not stem.isidentifier() or (self.folder / stem / "__init__.py").is_file():
            stem = re.sub(r"\W", "_", stem) + "_py"
        self.files[f"{self.name}.{stem}"] = path
        return self.load(stem)

    def load(self, name: str) -> ModuleType:
        if f"{self.name}.{name}" not in sys.modules:
            self.own.clear()  # files may have been added
            importlib.invalidate_caches()
        return self._call(importlib.import_module, f"{self.name}.{name}")

    def stale(self) -> bool:
        return any(_digest(Path(path)) != digest for path, digest in self.digests.items())

    def spec_of(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        if name in self.files:
            file = self.files[name]
            return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, str(file), self))
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path, self)
            spec.cached = None
        return spec

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Replacement of `__import__` in the modules of this namespace."""
        if level or not self._is_own(name):
            found = self._call(builtins.__import__, name, globals, locals, fromlist, level)
            return self.importlib if found is importlib else found
        found = self._call(builtins.__import__, f"{self.name}.{name}", globals, locals, fromlist, 0)
        return found if fromlist else sys.modules[f"{self.name}.{name.partition('.')[0]}"]

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """Replacement of `importlib.import_module` in the modules of this namespace."""
        whole = importlib.util.resolve_name(name, package) if package is not None else name
        if self._is_own(whole):
            return self._call(importlib.import_module, f"{self.name}.{whole}")
        return self._call(importlib.import_module, name, package)

    def _is_own(self, name: str) -> bool:
        if name not in self.own:
            self.own[name] = is_own(self.folder, name)
        return self.own[name]

    def _call(self, call: Any, *args: Any) -> ModuleType:
        """Call an import function; a ModuleNotFoundError names the module as the user wrote it."""
        try:
            return call(*args)  # type: ignore[no-any-return]
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(f"{self.name}."):
                raise
            message = str(error).replace(f"{self.name}.", "")
            raise ModuleNotFoundError(message, name=error.name.removeprefix(f"{self.name}.")) from None


class _Importlib(ModuleType):
    """The importlib that modules of a namespace see."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(importlib.__name__, importlib.__doc__)
        self.import_module = namespace.import_module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)


class _Loader(SourceFileLoader):
    """Loads a file of a namespace, without __pycache__: quick edits must not use an old cache."""

    def __init__(self, name: str, path: str, namespace: Namespace) -> None:
        super().__init__(name, path)
        self.namespace = namespace

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self.namespace.digests[self.path] = hashlib.sha256(source).digest()
        return self.source_to_code(source, self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self.namespace.builtins
        super().exec_module(module)


class _Finder:
    """Meta path finder for the modules of all namespaces."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        namespace = _named.get(name.partition(".")[0])
        return namespace.spec_of(name, path) if namespace is not None else None


_named: dict[str, Namespace] = {}
_newest: dict[Path, Namespace] = {}


def namespace_of(folder: Path) -> Namespace:
    """The namespace of a folder, with its files as they are now."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    folder = folder.resolve()
    namespace = _newest.get(folder)
    if namespace is None or namespace.stale():
        namespace = Namespace(folder, len(_named))
        _named[namespace.name] = _newest[folder] = namespace
    return namespace


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""
