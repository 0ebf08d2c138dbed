"""Where a user's own modules live in this process: one room per folder, so that two files called layers.py never meet.

A module of a room is called `tiltyard_room_3.layers`, and its imports go through the room, at any time: `import layers`
in a function that runs hours later still means the layers.py of that folder. Like the folder of a script, a room comes
before what is installed, but for the packages whose classes Tiltyard and plug-ins must share. `__import__` and
`importlib.import_module` of a room's modules do what `import` does there. Names are refs.py's.

    import layers ── in the room's folder? ──yes──> tiltyard_room_3.layers ──no──> Python's own import
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

# Objects of these pass between Tiltyard and a plug-in, so both must mean the same classes.
SHARED = ("tiltyard", "gymnasium", "numpy", "torch")
_PREFIX = "tiltyard_room_"


def module_file(folder: Path, name: str) -> Path | None:
    """The Python file behind `import name` in a folder; None when it has none. Executes nothing."""
    place = folder.joinpath(*name.split("."))
    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if file.is_file():
            return file
    return None


def is_own(folder: Path, name: str) -> bool:
    """Whether `import name` by a module of this folder means something in the folder."""
    top = name.partition(".")[0]
    if top in SHARED:
        return False
    if module_file(folder, top) is not None or module_file(folder, name) is not None:
        return True
    if not (folder / top).is_dir():
        return False
    try:
        installed = importlib.util.find_spec(top)
    except ValueError:  # loaded, by something other than an import
        return False
    if installed is not None and installed.origin is not None:
        return False  # every real package comes before a folder without __init__.py
    return any((folder / top).rglob("*.py"))


class Namespace:
    """The modules of one folder. An edited file makes it stale, and the next load begins another room."""

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
        """A file of the folder, whatever it is called."""
        stem = path.stem
        if not stem.isidentifier() or (self.folder / stem / "__init__.py").is_file():
            stem = re.sub(r"\W", "_", stem) + "_py"
        self.files[f"{self.name}.{stem}"] = path
        return self.load(stem)

    def load(self, name: str) -> ModuleType:
        if f"{self.name}.{name}" not in sys.modules:
            self.own.clear()  # the folder may have got files since
            importlib.invalidate_caches()
        return self._told(importlib.import_module, f"{self.name}.{name}")

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
        """What `import` statements of this room's modules call; `__import__` of the standard library explains it."""
        if level or not self._is_own(name):
            found = self._told(builtins.__import__, name, globals, locals, fromlist, level)
            return self.importlib if found is importlib else found
        found = self._told(builtins.__import__, f"{self.name}.{name}", globals, locals, fromlist, 0)
        return found if fromlist else sys.modules[f"{self.name}.{name.partition('.')[0]}"]

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """What `importlib.import_module` is in this room's modules."""
        whole = importlib.util.resolve_name(name, package) if package is not None else name
        if self._is_own(whole):
            return self._told(importlib.import_module, f"{self.name}.{whole}")
        return self._told(importlib.import_module, name, package)

    def _is_own(self, name: str) -> bool:
        if name not in self.own:
            self.own[name] = is_own(self.folder, name)
        return self.own[name]

    def _told(self, call: Any, *args: Any) -> ModuleType:
        """A module that is missing is told by the name that the user wrote."""
        try:
            return call(*args)  # type: ignore[no-any-return]
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(f"{self.name}."):
                raise
            message = str(error).replace(f"{self.name}.", "")
            raise ModuleNotFoundError(message, name=error.name.removeprefix(f"{self.name}.")) from None


class _Importlib(ModuleType):
    """importlib as the modules of a room see it."""

    def __init__(self, room: Namespace) -> None:
        super().__init__(importlib.__name__, importlib.__doc__)
        self.import_module = room.import_module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)


class _Loader(SourceFileLoader):
    """Runs a file of a room. No __pycache__: a run folder holds text, and a quick edit must not meet an old cache."""

    def __init__(self, name: str, path: str, room: Namespace) -> None:
        super().__init__(name, path)
        self.room = room

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self.room.digests[self.path] = hashlib.sha256(source).digest()
        return self.source_to_code(source, self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self.room.builtins
        super().exec_module(module)


class _Finder:
    """Asked by Python for every module that is not loaded yet; answers for those of rooms."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        room = _named.get(name.partition(".")[0])
        return room.spec_of(name, path) if room is not None else None


_named: dict[str, Namespace] = {}
_newest: dict[Path, Namespace] = {}


def namespace_of(folder: Path) -> Namespace:
    """The room of a folder as its files are now."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    folder = folder.resolve()
    room = _newest.get(folder)
    if room is None or room.stale():
        room = Namespace(folder, len(_named))
        _named[room.name] = _newest[folder] = room
    return room


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""
