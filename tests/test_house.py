"""Rules for the code, checked on the syntax tree of every module: forbidden calls, allowed imports, names.

Imports point to the same or a lower floor (docs/floors.py), also in functions and under TYPE_CHECKING.
"""

import ast
import os
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tiltyard"
MODULES = sorted(PACKAGE.rglob("*.py"))

# ------------------------------------------------------------------------------------------------ forbidden calls

UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
IMPORT_SURGERY = {"__builtins__", "__import__"}
UNSAFE_YAML = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}


def aliases(tree: ast.Module) -> dict[str, str]:
    """Map local names to the dotted names of their imports, for all imports in the file."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """Return torch.load for `t.load` after `import torch as t`, and "" for other expressions."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        front = dotted(node.value, known)
        return f"{front}.{node.attr}" if front else ""
    return ""


def is_true(call: ast.Call, keyword: str) -> bool:
    return any(
        each.arg == keyword and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in call.keywords
    )


def forbidden(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, description) of all forbidden code in a source."""
    tree = ast.parse(source)
    known = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, f"import {alias.name}") for alias in node.names if alias.name.split(".")[0] in UNPICKLERS
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            yield node.lineno, f"from {node.module} import"
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in forbidden_call(node, dotted(node.func, known)))
        elif IMPORT_SURGERY & {getattr(node, field, None) for field in ("id", "attr", "arg", "value", "name")}:
            yield getattr(node, "lineno", 0), "__builtins__ or __import__"


def forbidden_call(call: ast.Call, name: str) -> Iterator[str]:
    parts = name.split(".")
    if parts[0] in UNPICKLERS:
        yield name
    if name == "torch.load" and not is_true(call, "weights_only"):
        yield "torch.load without weights_only=True"
    if parts[0] in ("yaml", "ruamel") and parts[-1] in UNSAFE_YAML:
        yield "yaml.load"
    if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
        yield name
    if is_true(call, "shell") or name in ("os.system", "os.popen"):
        yield "a shell"
    if is_true(call, "allow_pickle"):
        yield "allow_pickle=True"


def everywhere(found: Callable[[Path], Iterable[object]]) -> dict[str, list[object]]:
    """Map each module with problems to what the check finds there."""
    per_module = {path.relative_to(PACKAGE).as_posix(): list(found(path)) for path in MODULES}
    return {name: problems for name, problems in per_module.items() if problems}


def test_package_has_no_forbidden_calls():
    found = everywhere(lambda path: forbidden(path.read_text(encoding="utf-8")))
    # An Unpickler that admits arrays and plain records: tests/data/test_unpickle.py shows what it refuses.
    assert [what for _, what in found.pop("data/unpickle.py")] == ["import pickle"]
    assert found == {}


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "import pickle as p\np.loads(b'')",
        "from pickle import loads",
        "import os, cloudpickle",
        "def f():\n    import dill",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=False)",
        "from torch import load\nload('x')",
        "from torch import load as pull\npull('x')",
        "import torch\ntorch.load('x', **{'weights_only': True})",
        "import yaml\nyaml.load('x')",
        "from ruamel import yaml\nyaml.load('x')",
        "import ruamel.yaml\nruamel.yaml.load('x')",
        "import yaml as y\ny.unsafe_load('x')",
        "yaml = YAML()\nyaml.load('x')",
        "eval('1')",
        "exec('1')",
        "import builtins\nbuiltins.eval('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "from os import popen\npopen('ls')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "try:\n    pass\nexcept:\n    pass",
        "module.__builtins__ = {}",
        "vars(module)['__builtins__'] = {}",
        "module.__dict__.update(__builtins__={})",
        "import builtins\nbuiltins.__import__ = f",
    ],
)
def test_scanner_finds_forbidden_code(snippet):
    assert list(forbidden(snippet))


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "model.eval()",
        "self.exec()",
        "import json\njson.load(f)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "try:\n    pass\nexcept ValueError:\n    pass",
        "from tiltyard.config.load import load\nload('x')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
    ],
)
def test_scanner_accepts_allowed_code(snippet):
    assert list(forbidden(snippet)) == []


# ------------------------------------------------------------------------------------------------ floors

FLOORS = runpy.run_path(str(PACKAGE.parent / "docs" / "floors.py"))["FLOORS"]
FLOOR = {entry.removesuffix("/"): floor.number for floor in FLOORS for entry in floor.entries}


def place(module: str) -> str:
    """Return the entry in docs/floors.py of the module tiltyard.a.b."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import of a Tiltyard module in a source of `package`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            # for `import tiltyard` alone, the branch below finds the attributes that are used
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("tiltyard."))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tiltyard":
            if node.attr != "__version__":
                yield node.lineno, f"tiltyard.{lazy(node.attr)}"
        elif isinstance(node, ast.ImportFrom):
            front = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (front, node.module) if part)
            if base == "tiltyard":
                # other names of the root are modules or lazy names
                yield from (
                    (node.lineno, f"tiltyard.{lazy(alias.name)}") for alias in node.names if alias.name != "__version__"
                )
            elif base.startswith("tiltyard."):
                yield node.lineno, base


def lazy(name: str) -> str:
    if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file():
        return name
    import tiltyard

    return tiltyard._WHERE[name].removeprefix("tiltyard.")


def upward_imports(path: Path) -> Iterator[tuple[int, str]]:
    here = place(module_name(path))
    assert here in FLOOR, f"{here} has no floor yet: add it to docs/floors.py"
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for line, module in own_imports(path.read_text(encoding="utf-8"), package):
        if FLOOR[place(module)] > FLOOR[here]:
            yield line, module


def test_imports_point_to_the_same_or_lower_floors():
    assert everywhere(upward_imports) == {}


@pytest.mark.parametrize(
    ("snippet", "module"),
    [
        ("import tiltyard.cli.train", "tiltyard.cli.train"),
        ("from tiltyard.cli import main", "tiltyard.cli"),
        ("from tiltyard import cli", "tiltyard.cli"),
        ("from tiltyard import train", "tiltyard.api"),
        ("import tiltyard\ntiltyard.train('x')", "tiltyard.api"),
        ("def f():\n    from ..engines import serial", "tiltyard.engines"),
        ("from . import lock", "tiltyard.run"),
        ("if TYPE_CHECKING:\n    from tiltyard.engines.serial import Serial", "tiltyard.engines.serial"),
    ],
)
def test_own_imports_are_found(snippet, module):
    assert [name for _, name in own_imports(snippet, "tiltyard.run")] == [module]


def test_every_module_may_import_the_version():
    assert (
        list(own_imports("import tiltyard\nfrom tiltyard import __version__\ntiltyard.__version__", "tiltyard.run"))
        == []
    )


def test_floors_list_only_existing_modules():
    assert [name for name in FLOOR if not ((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file())] == []


# Where a library may be imported. Elsewhere it may not, not even in a function.
HOMES = {
    "torch": (
        *("models", "algos", "engines", "evaluation", "data/torch_loader.py"),
        *("tuning/autotune.py", "doctor/software.py", "testing.py"),
    ),
    "ray": ("engines/rllib",),
    "wandb": ("track/wandb.py",),
    "tensorboardX": ("track/tensorboard.py",),
    "matplotlib": ("track/plot.py", "sweep/plots.py"),
    "optuna": ("sweep/optuna_search.py",),
    "pyarrow": ("data",),
    "minari": ("data/minari_format.py",),
    "h5py": ("data/minari_format.py",),
    "crc32c": ("data/tfrecord.py",),
    "pydantic": ("config",),
    "ruamel": ("config/yaml.py",),
}
# Modules for `tiltyard --help`, `ls` and `config show`: they must not import large packages at import time.
LIGHT = (
    "__init__.py",
    "__main__.py",
    "types.py",
    "errors.py",
    "plugins",
    "cli",
    "config",
    "run",
)
HEAVY = {
    "torch",
    "ray",
    "gymnasium",
    "numpy",
    "pyarrow",
    "safetensors",
    "matplotlib",
    "optuna",
    "wandb",
    "tensorboardX",
}


def inside(path: Path, homes: tuple[str, ...]) -> bool:
    text = path.relative_to(PACKAGE).as_posix()
    return any(text == home or text.startswith(f"{home}/") for home in homes)


def imported_libraries(nodes: Iterator[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run at import time: no bodies of functions, nothing under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from at_import_time(child)


def misplaced_libraries(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for line, name in imported_libraries(ast.walk(tree)):
        if name in HOMES and not inside(path, HOMES[name]):
            yield line, name
    if inside(path, LIGHT):
        yield from ((line, name) for line, name in imported_libraries(at_import_time(tree)) if name in HEAVY)


def test_libraries_are_imported_only_where_allowed():
    assert everywhere(misplaced_libraries) == {}


# ------------------------------------------------------------------------------------------------ docstrings


# ------------------------------------------------------------------------------------------------ processes

# Programs that are not ours, and trainings that outlive or replace who starts them, by the module that starts them.
FOREIGN_PROGRAMS = {
    "cli/nodes.py": "srun",
    "cli/sweep.py": "a sweep's controller, which outlives the command",
    "doctor/display.py": "Xvfb; a test of the OpenGL driver, which may crash",
    "doctor/software.py": "ffmpeg",
    "doctor/storage.py": "quota",
    "evaluation/video.py": "ffmpeg",
    "run/provenance.py": "git",
    "slurm/commands.py": "sbatch, squeue, ...",
    "slurm/node_agent.py": "the trainer of a job, a tick of its sweep",
    "slurm/ray_nodes.py": "ray",
    "slurm/shell.py": "the user's command",
    "sweep/backends/local.py": "the trainer of a trial",
    "sweep/external_program.py": "the user's program",
}
STARTS = {"subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}


def process_starts(source: str) -> list[str]:
    """Return the dotted names of all functions that start a process, as called or passed on."""
    tree = ast.parse(source)
    known = aliases(tree)
    annotations = {id(each) for node in ast.walk(tree) for each in _annotation_nodes(node)}
    names = (dotted(n, known) for n in ast.walk(tree) if isinstance(n, ast.expr) and id(n) not in annotations)
    return [name for name in names if name in STARTS or re.fullmatch(r"os\.(fork|forkpty|posix_spawn|spawn\w+)", name)]


def _annotation_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for field in ("annotation", "returns"):
        if isinstance(found := getattr(node, field, None), ast.expr):
            yield from ast.walk(found)


def test_processes_are_started_only_where_listed():
    starts = {path.relative_to(PACKAGE).as_posix(): process_starts(path.read_text()) for path in MODULES}
    forks = [(name, each) for name, found in starts.items() for each in found if each.startswith("os.")]
    assert forks == [("processes/fork_server.py", "os.fork")]
    foreign = {name for name, found in starts.items() if found and not name.startswith("processes/")}
    assert foreign == FOREIGN_PROGRAMS.keys()


@pytest.mark.parametrize(
    "snippet",
    [
        "import subprocess\nsubprocess.Popen(['x'])",
        "from subprocess import run as go\ngo(['x'])",
        "import os\nos.fork()",
        "import subprocess\nThread(target=subprocess.run)",
    ],
)
def test_process_starts_are_found(snippet):
    assert len(process_starts(snippet)) == 1


def test_annotations_start_no_process():
    assert process_starts("import subprocess\ndef f(x: subprocess.Popen[str]) -> subprocess.Popen[str]: ...") == []


# ------------------------------------------------------------------------------------------------ names


def missing_manners(path: Path) -> Iterator[str]:
    if {"utils", "common", "helpers", "misc", "manager"} & set(path.relative_to(PACKAGE).with_suffix("").parts):
        yield "a name that says nothing"
    source = path.read_text(encoding="utf-8")
    if source and not ast.get_docstring(ast.parse(source)):
        yield "no docstring at the top"


def test_every_module_has_a_clear_name_and_a_docstring():
    assert everywhere(missing_manners) == {}


# ------------------------------------------------------------------------------------------------ names

# Metaphors that readers would have to learn; docs/concepts/style.md has the words to use.
METAPHOR = re.compile(
    r"bears?|rooms?|cast|tall(y|ies)|turns?|told|said"
    r"|(nurser|bury|burie|confess|parcel|resident|landlord|comeback|blam|warden|ledger|stretch).*"
)


def defined_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of all functions, classes, parameters, variables and attributes that a source defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield 0, node.asname


def is_metaphor(name: str) -> bool:
    """Return whether a word in a snake_case or CamelCase name is a metaphor."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return any(METAPHOR.fullmatch(word.lower()) for word in words)


def metaphors(path: Path) -> Iterator[tuple[int, str]]:
    yield from ((0, part) for part in path.relative_to(PACKAGE).with_suffix("").parts if is_metaphor(part))
    for line, name in defined_names(path.read_text(encoding="utf-8")):
        if is_metaphor(name):
            yield line, name


def test_names_contain_no_metaphors():
    assert everywhere(metaphors) == {}


@pytest.mark.parametrize(
    "snippet",
    [
        "class EnvRoom: ...",
        "def _bury(): ...",
        "def f(told): ...",
        "ledger = 1",
        "self.stretches = []",
        "SAID: int = 1",
    ],
)
def test_metaphors_are_found(snippet):
    assert any(is_metaphor(name) for _, name in defined_names(snippet))


# ------------------------------------------------------------------------------------------------ documents

ARCHITECTURE = PACKAGE.parent / "docs" / "concepts" / "architecture.md"
PLACE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def members(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Return functions, classes and methods of a module as `name` and `Class.name`."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found |= members(node.body, f"{node.name}.")
    return found


def test_architecture_page_refers_to_existing_code():
    places = PLACE.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(places) > 30
    known = {
        file: members(ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body)
        for file, _ in places
        if (PACKAGE / file).is_file()
    }
    assert [f"{file}:{name}" for file, name in places if file not in known or (name and name not in known[file])] == []


# ------------------------------------------------------------------------------------------------ tests


@pytest.mark.xdist_group("house")
def test_xdist_groups_are_respected(request: pytest.FixtureRequest) -> None:
    """Some combinations of pytest and pytest-xdist ignore groups silently.

    Each process then creates again what the tests of a group should share."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("all tests are in one process here: -n 2 has groups")
    assert request.node.nodeid.endswith("@house")
