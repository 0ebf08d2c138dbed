"""Copies of plug-in files for a run folder, so that later edits do not change a run. Executes none of them.

What a file imports from its own folder is found on its syntax tree and copied along, again and again:

    nets/custom.py      ──>  plugins/nets/custom.py     the id becomes plugins/nets/custom.py:CustomModel
    nets/layers.py      ──>  plugins/nets/layers.py     because custom.py says `import layers`
    /elsewhere/env.py   ──>  plugins/outside/0/env.py   below none of the base folders

Not copied: data files beside a lone module (those inside an imported package are), and installed packages.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.errors import UseError
from tiltyard.refs import CONVENTIONAL, kind_of, named_plugins, parse, shown

MAX_FILES = 1000
MAX_DATA = 1 << 20


def neighbours(path: Path) -> list[Path]:
    """`path` and every file of its folder (and packages below) that its imports reach. Executes none of them."""
    folder = path.parent
    reached: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in reached:
            continue
        reached[file] = None
        if len(reached) > MAX_FILES:
            raise UseError(
                f"{shown(path)} imports more than {MAX_FILES} files of its folder", "move it into a folder of its own"
            )
        if file.suffix == ".py":
            for name in _imported(file):
                waiting += _files_of(folder, name)
    return sorted(reached)


def _imported(file: Path) -> set[str]:
    """First parts of the modules that a file imports absolutely; none when it is no Python, as importing will say."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def _files_of(folder: Path, name: str) -> list[Path]:
    """The files behind `import name` in `folder`: a module, or a package with all that is in it."""
    if (folder / f"{name}.py").is_file() and not (folder / name / "__init__.py").is_file():
        return [folder / f"{name}.py"]
    package = folder / name
    if not package.is_dir() or not any(package.rglob("*.py")):
        return []
    found = []
    for place, folders, files in os.walk(package):  # links to folders are not followed
        folders[:] = [each for each in folders if each != "__pycache__" and not each.startswith(".")]
        for each in (Path(place, file) for file in files if not file.startswith(".")):
            if each.is_file() and (each.suffix == ".py" or each.stat().st_size <= MAX_DATA):
                found.append(each)
    return found


def freeze_plugins(experiment: Experiment, base: Sequence[Path], into: Path) -> Experiment:
    """See `refs.freeze`."""
    target = into / "plugins"
    taken: dict[Path, Path] = {}  # copy -> its source
    renamed: dict[str, str] = {}
    for setting, kind, text in named_plugins(experiment):
        if kind_of(text) != "file":
            continue
        ref = parse(text, {}, CONVENTIONAL[kind], base)
        assert ref.path is not None
        files = neighbours(ref.path.absolute())
        folder = _folder_for(ref.path.absolute(), files, base, target, taken)
        for file in files:
            copy = folder / file.relative_to(ref.path.absolute().parent)
            if copy not in taken:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
                taken[copy] = file
        renamed[setting] = f"{(folder / ref.path.name).relative_to(into).as_posix()}:{ref.attribute}"
    return _rename(experiment, renamed) if renamed else experiment


def _folder_for(path: Path, files: list[Path], base: Sequence[Path], target: Path, taken: dict[Path, Path]) -> Path:
    """Where the folder of `path` goes: as it lies below a base folder, or outside/<n> when that is not possible."""
    outside = [target / "outside" / str(n) for n in range(len(taken) + 1)]
    below = [
        target / _inside(path.parent.relative_to(folder.absolute()))
        for folder in base
        if path.is_relative_to(folder.absolute())
    ]
    for folder in [*below[:1], *outside]:
        copies = {folder / file.relative_to(path.parent): file for file in files}
        if all(taken.get(copy, file) == file for copy, file in copies.items()):
            return folder
    raise AssertionError("there is one more place than files taken")


def _inside(folder: Path) -> Path:
    """A plug-in that already is a copy in a run folder is not put one level deeper."""
    return Path(*folder.parts[1:]) if folder.parts[:1] == ("plugins",) else folder


def _rename(experiment: Experiment, renamed: dict[str, str]) -> Experiment:
    values: dict[str, Any] = experiment.model_dump(by_alias=True)
    for i, wrapper in enumerate(values["env"]["wrappers"]):
        wrapper["id"] = renamed.get(f"env.wrappers.{i}.id", wrapper["id"])
    for name, encoder in values["model"]["encoders"].items():
        encoder["id"] = renamed.get(f"model.encoders.{name}.id", encoder["id"])
    for section in (values["env"], values["model"]):
        name = "env" if section is values["env"] else "model"
        section["id"] = renamed.get(f"{name}.id", section["id"])
    encoder = values["model"]["encoder"]
    encoder["id"] = renamed.get("model.encoder.id", encoder["id"])
    return Experiment.model_validate(values)
