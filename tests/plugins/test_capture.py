"""Objects instead of names: the captured module, ids that are registered in this process, and every refusal."""

from __future__ import annotations

import linecache
import subprocess
import sys
from code import InteractiveInterpreter
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest

from tiltyard.config.load import load
from tiltyard.errors import UseError
from tiltyard.plugins.capture import name_objects, name_of
from tiltyard.plugins.resolve import load as load_ref
from tiltyard.plugins.resolve import parse


class Notebook:
    """A stand-in for the `__main__` of a kernel: a namespace, the executed cells in `In`, sources in linecache."""

    def __init__(self) -> None:
        self.module = ModuleType("__main__")
        self.values = vars(self.module)
        self.values["In"] = [""]

    def run(self, cell: str) -> None:
        name = f"<cell {len(self.values['In'])}>"
        self.values["In"].append(cell)
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        InteractiveInterpreter(self.values).runsource(cell, name, "exec")

    def captured(self, name: str) -> tuple[str, Any]:
        """The text of the captured module, and the object as a worker would import it."""
        values, folder = name_objects({"env": {"id": self.values[name]}})
        assert folder is not None
        assert values == {"env": {"id": f"notebook.py:{name}"}}
        return (folder / "notebook.py").read_text(), load_ref(parse(f"notebook.py:{name}", {}, None, [folder]))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    monkeypatch.setitem(sys.modules, "__main__", made.module)
    return made


def test_everything_that_a_class_uses_is_captured_and_nothing_else(notebook: Notebook) -> None:
    notebook.run(
        "import math, json\nimport xml.dom\nimport xml.etree.ElementTree\nfrom os import path as place, sep\n"
        "from collections import *\nSIZES = {'sm' 'all': (1, 2.5, None)}\nOTHER = 3\nunused = object()"
    )
    notebook.run("def double(x):\n    return twice * x  # kept\ntwice = 2\nBase = type('Base', (), {})")
    notebook.run(
        "import functools\n"
        "class Parent:\n    size = [double(n) for n in SIZES['small'][:1]]\n"
        "Alias = Parent\n"
        "@functools.total_ordering\n"
        "class Env(Alias):\n"
        "    def __lt__(self, other, root=math.sqrt(4)):\n"
        "        return root, sep, place.join('a', 'b'), xml.etree.ElementTree, OrderedDict(), Env, later()\n"
        "def later():\n    return 'later'"
    )
    text, env = notebook.captured("Env")
    assert env is not notebook.values["Env"]
    assert env.size == [2]
    assert env().__lt__(0)[:3] == (2.0, "/", "a/b")
    assert env().__lt__(0)[-1] == "later"
    assert "return twice * x  # kept" in text
    assert not [word for word in ("json", "unused", "OTHER", "Base") if word in text]


def test_edited_cell_is_captured_again(notebook: Notebook) -> None:
    notebook.run("STEP = 1\nclass Env:\n    def step(self): return STEP")
    first = notebook.values["Env"]
    notebook.run("raise ValueError\nclass Env:\n    def step(self): return 'never defined'")
    assert notebook.captured("Env")[1]().step() == 1
    notebook.run("STEP = 10")
    assert notebook.captured("Env")[1]().step() == 10
    notebook.run("class Env:\n    def step(self): return 2 * STEP")
    assert notebook.values["Env"] is not first
    assert notebook.captured("Env")[1]().step() == 20


def test_modules_next_to_the_notebook_are_captured_with_their_files(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mazes").mkdir()
    (tmp_path / "mazes" / "__init__.py").write_text("from pathlib import Path\nMAZE = bytearray(b'###')\n")
    (tmp_path / "captured_parts.py").write_text("import mazes\nclass Env: maze = mazes.MAZE\n")
    (tmp_path / "without_init").mkdir()
    (tmp_path / "without_init" / "walls.py").write_text("HEIGHT = 3\n")
    notebook.run("import captured_parts\nfrom mazes import MAZE\nfrom without_init import walls")
    notebook.run("class Env(captured_parts.Env):\n    own = MAZE * walls.HEIGHT")
    assert notebook.captured("Env")[1].own == b"###" * 3
    parts = notebook.values["captured_parts"].Env
    loaded = load({"env": parts, "model": notebook.values["Env"]})
    assert loaded.experiment.env.id == f"{tmp_path}/captured_parts:Env"
    assert loaded.experiment.model.id == "notebook.py:Env"
    assert loaded.base[0].joinpath("mazes", "__init__.py").is_file()
    assert name_of(gymnasium.Env) == "gymnasium.core:Env"


def test_id_registered_in_this_process_becomes_its_class(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", {**gymnasium.registry})
    notebook.run("class Env:\n    def __init__(self, size, speed=1): pass")
    gymnasium.register("Mine-v0", entry_point=notebook.values["Env"], max_episode_steps=99, kwargs={"size": 3})
    gymnasium.register("Text-v0", entry_point="__main__:Env")
    env = load("Mine-v0", ["env.options.speed=2", "env.frameskip=10"], settings={}).experiment.env
    assert (env.id, env.options, env.time_limit) == ("notebook.py:Env", {"size": 3, "speed": 2}, 10)
    assert load({"env": {"id": "Mine-v0", "time_limit": 7}}).experiment.env.time_limit == 7
    assert load("Text-v0", settings={}).experiment.env.id == "notebook.py:Env"
    assert load("CartPole-v1", settings={}).experiment.env.id == "CartPole-v1"
    gymnasium.register(
        "Wrapped-v0",
        entry_point="__main__:Env",
        additional_wrappers=(gymnasium.envs.registration.WrapperSpec("W", "m:W", {}),),
    )
    with pytest.raises(UseError, match="registered with wrappers"):
        load("Wrapped-v0", settings={})


def test_objects_are_settings_like_names(notebook: Notebook) -> None:
    notebook.run("class Env: pass\nclass Net: pass\ndef wrap(env, k=1): return env")
    env, net, wrap = (notebook.values[name] for name in ("Env", "Net", "wrap"))
    loaded = load(
        env, ["seed=4"], settings={"env": {"wrappers": [{"id": wrap, "options": {"k": 2}}, wrap]}, "model": net}
    )
    assert [wrapper.id for wrapper in loaded.experiment.env.wrappers] == ["notebook.py:wrap"] * 2
    assert loaded.experiment.model.id == "notebook.py:Net"
    assert (loaded.experiment.seed, loaded.origins["model.id"]) == (4, "keyword argument")
    with pytest.raises(UseError, match=r"env\.options\.hook has a value of type function"):
        load(env, settings={"env": {"options": {"hook": wrap}}})


@pytest.mark.parametrize(
    ("cell", "message", "hint"),
    [
        ("Env = lambda: 1", "the source of <lambda> cannot be captured: it is a lambda", "`def` outside"),
        (
            "def make():\n    class Env: pass\n    return Env\nEnv = make()",
            "defined inside make()",
            "outside of functions",
        ),
        ("class Env:\n    def __call__(self): pass\nEnv = Env()", "is not a class or function", "'options'"),
        ("import functools\nEnv = functools.partial(dict, a=1)", "is not a class or function", "'options'"),
        ("Env = type('Env', (), {})", "the source of Env was not found", "from my_code import Env"),
        ("rng = object()\nclass Env:\n    def f(self): return rng", "Env uses rng, whose value (object)", "inside Env"),
        ("import os\nTOKEN = os.sep * 9\nclass Env:\n    def f(self): return [TOKEN]", "Env uses TOKEN", "inside Env"),
        (
            "key = lambda x: x\nclass Env:\n    f = key",
            "Env uses key, whose value (function)",
            "from my_code import key",
        ),
        ("__file__ = 'x'\nclass Env:\n    def f(self): return __file__", "Env uses __file__", "into a file"),
    ],
)
def test_what_cannot_be_captured_is_refused(notebook: Notebook, cell: str, message: str, hint: str) -> None:
    notebook.run(cell)
    if cell.startswith("__file__"):  # not a script
        notebook.values["In"], notebook.values["__file__"] = [], None
    with pytest.raises(UseError) as refused:
        name_objects({"env": {"id": notebook.values["Env"]}})
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_script_without_a_guard_trains_once(tmp_path: Path) -> None:
    """The captured module has the class alone, so importing it does not call train again."""
    (tmp_path / "my-script.py").write_text(
        "from __future__ import annotations\n"
        "from tiltyard.plugins.capture import name_objects\n"
        "class Env:\n    def step(self, action: NotDefined): return action\n"
        "values, folder = name_objects({'env': {'id': Env}})\n"
        "print(values['env']['id'])\nprint((folder / 'my-script_main.py').read_text())\n"
    )
    done = subprocess.run([sys.executable, "my-script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    assert done.stdout == (
        "my-script_main.py:Env\nfrom __future__ import annotations\n\n\n"
        "class Env:\n    def step(self, action: NotDefined): return action\n\n"
    )
