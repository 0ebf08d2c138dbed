"""Copy plug-ins into a run folder, so that later edits do not change the run. Executes none of them.

A plug-in is copied together with the modules of its folder that it imports, directly or indirectly, also by name
("maze.parts:Wall", import_module("maze")), and the data files whose names occur in its code. Installed packages are not
copied.

    nets/custom.py       ──>  plugins/nets/custom.py       the id becomes plugins/nets/custom.py:CustomModel
    nets/layers.py       ──>  plugins/nets/layers.py       because custom.py has `import layers`
    nets/weights.json    ──>  plugins/nets/weights.json    because custom.py has the string "weights.json"
    lab.envs.push:Push   ──>  plugins/lab/ as a whole      the id becomes plugins/lab.envs.push:Push
    lab:Push-v0          ──>  plugins/lab/ as a whole      which registers the id: plugins/lab:Push-v0
    /elsewhere/env.py    ──>  plugins/outside/0/env.py     not below a base folder
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.merge import split_key
from tiltyard.errors import UseError
from tiltyard.plugins.namespaces import absolute_imports, is_own, module_file
from tiltyard.plugins.resolve import MODULE, Ref, named_plugins, own_ref, shown

MAX_FILES = 1000
MAX_DATA = 1 << 20  # bytes of one data file
_DEEPEST = 3  # path parts that may be joined to the name of a data file: base / "maps" / "small" / "1.txt"


@dataclass(frozen=True)
class Files:
    """The files of its folder that a plug-in needs, found from its text; those in `left` are too large to copy."""

    folder: Path
    copied: list[Path]
    left: list[Path]


def plugin_files(ref: Ref) -> Files:
    """The files of a plug-in that is a file or a module of the user's project."""
    assert ref.path is not None
    path = ref.path.resolve()
    folder = path if ref.module else path.parent
    waiting = _files_of(folder, ref.module) if ref.module else [path]
    reached: dict[Path, None] = {}
    while waiting:
        file = waiting.pop()
        if file in reached:
            continue
        reached[file] = None
        if len(reached) > MAX_FILES:
            hint = "move it into a separate folder"
            raise UseError(f"{ref.text} needs more than {MAX_FILES} files of {shown(folder)}", hint)
        if file.suffix == ".py":
            imports, strings = _mentioned(file, folder)
            waiting += [each for name in imports if is_own(folder, name) for each in _files_of(folder, name)]
            waiting += [each for place in {file.parent, folder} for each in _named(place, strings)]
    copied = [file for file in sorted(reached) if file.suffix == ".py" or file.stat().st_size <= MAX_DATA]
    return Files(folder, copied, [file for file in sorted(reached) if file not in copied])


def _mentioned(file: Path, folder: Path) -> tuple[set[str], set[str]]:
    """Modules that a file imports, and its strings; none if it is not valid Python, which the import will report."""
    try:
        tree = ast.parse(file.read_bytes())
    except OSError as error:
        raise UseError(f"{shown(file)} cannot be read: {error.strerror}", "check its permissions") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(), set()
    imports: set[str] = set()
    strings: set[str] = set()
    for node in ast.walk(tree):
        imports.update(absolute_imports(node))
        if isinstance(node, ast.ImportFrom) and node.level == 1 and file.parent == folder:
            imports |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
            match = MODULE.fullmatch(node.value)
            imports |= {match["module"]} if match and not match["folder"] else set()
    return imports, strings


def _files_of(folder: Path, name: str) -> list[Path]:
    """The files of `import name` in `folder`: a module, or the whole top-level package."""
    top = name.partition(".")[0]
    file = module_file(folder, top)
    if file == folder / f"{top}.py":
        return [file]
    found = []
    for place, folders, files in os.walk(folder / top):  # does not follow links to folders
        folders[:] = [each for each in folders if each != "__pycache__" and not each.startswith(".")]
        found += [Path(place, each) for each in files if not each.startswith(".") and Path(place, each).is_file()]
    return found


def _named(folder: Path, strings: set[str]) -> Iterator[Path]:
    """Files below a folder that strings name, alone ("maps/1.txt") or joined ("maps", "1.txt")."""
    parts = [text for text in strings if _is_inside(text)]
    places = {folder}
    for _ in range(_DEEPEST):
        below = {place / part for place in places for part in parts}
        yield from (each for each in below if each.is_file())
        places = {each for each in below if each.is_dir()} - places


def _is_inside(text: str) -> bool:
    """Whether a string could be a relative path downwards, without hidden folders or `..`."""
    if not 0 < len(text) <= 200 or not text.isprintable() or text.startswith(("/", "~")):
        return False
    parts = Path(text).parts
    return bool(parts) and not any(part.startswith(".") for part in parts)


# ------------------------------------------------------------------------------------------------ copies


@dataclass(frozen=True)
class Copies:
    """Copies of an experiment's plug-ins in `folder`/plugins and of frozen policies in `folder`/frozen; `notes` list
    files that were not copied."""

    folder: Path
    ids: dict[str, str]
    """the copies' ids, by dotted setting"""
    files: tuple[Path, ...]
    """relative to the folder"""
    notes: tuple[str, ...]

    def named_in(self, experiment: Experiment) -> Experiment:
        """The experiment with the ids of the copies."""
        if not self.ids:
            return experiment
        values: Any = experiment.model_dump(by_alias=True)
        for setting, copy in self.ids.items():
            *keys, last = split_key(setting)
            place = reduce(lambda place, key: place[int(key) if isinstance(place, list) else key], keys, values)
            place[last] = copy
        return Experiment.model_validate(values)

    def put_into(self, folder: Path) -> None:
        """Copy them into another folder."""
        for file in self.files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            copy_file(self.folder / file, folder / file)


def copy_plugins(experiment: Experiment, base: Sequence[Path], into: Path) -> Copies:
    """Copy the user's own plug-ins, with the files they need, into `into`/plugins."""
    tops = [folder.resolve() for folder in base]
    taken: dict[Path, Path] = {}  # copy -> its source, for files and for folders of plug-ins
    ids: dict[str, str] = {}
    notes: dict[str, None] = {}
    for setting, kind, text in named_plugins(experiment):
        if ref := own_ref(kind, text, base):
            ids[setting], note = _copy(ref, tops, into, taken)
            notes |= {note: None} if note else {}
    copied = tuple(copy.relative_to(into) for copy in taken if copy.is_file())
    return Copies(into, ids, copied, tuple(notes))


def _copy(ref: Ref, tops: Sequence[Path], into: Path, taken: dict[Path, Path]) -> tuple[str, str]:
    """Copy one plug-in; returns the id of the copy, and a note if a file was not copied."""
    assert ref.path is not None
    files = plugin_files(ref)
    folder = _folder_for(files, tops, into / "plugins", taken)
    for file in files.copied:
        copy = folder / file.relative_to(files.folder)
        if copy not in taken:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy_file(file, copy)
            taken[copy] = file
    taken[folder] = files.folder
    left = ", ".join(str(file.relative_to(files.folder)) for file in files.left[:5])
    note = f"{ref.text}: not copied into the run folder because larger than {MAX_DATA >> 20} MiB: {left}"
    name = ref.module or ref.path.resolve().name
    return f"{folder.relative_to(into).as_posix()}/{name}:{ref.attribute}", note if left else ""


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; other users can at no time read the copy if they cannot read the source."""
    with source.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o666 | 0o600
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags, mode), "wb") as copy:
            shutil.copyfileobj(file, copy)


def _folder_for(files: Files, tops: Sequence[Path], target: Path, taken: dict[Path, Path]) -> Path:
    """The folder for a plug-in's copy: its path below a base folder, or outside/<n> if that is not possible."""
    outside = [target / "outside" / str(n) for n in range(len(taken) + 1)]
    below = [target / _inside(files.folder.relative_to(top)) for top in tops if files.folder.is_relative_to(top)]
    for folder in [*below[:1], *outside]:
        copies = {folder / file.relative_to(files.folder): file for file in files.copied}
        if all(taken.get(copy, file) == file for copy, file in {folder: files.folder, **copies}.items()):
            return folder
    raise AssertionError("there is always a free outside/<n>")


def _inside(folder: Path) -> Path:
    """Do not nest a plug-in that already is a copy in a run folder one level deeper."""
    return Path(*folder.parts[1:]) if folder.parts[:1] == ("plugins",) else folder
