"""Imports in a user's module, both while it is loaded and later in its functions."""

import builtins
import inspect
import json
import os
import sys
import traceback

import pytest

from tests.plugins.test_resolve import file_at, loaded
from tiltyard.envs import env_errors
from tiltyard.errors import UseError
from tiltyard.plugins import namespaces


@pytest.fixture(autouse=True)
def no_other_lab(monkeypatch):
    """Remove packages with the same name that other tests in this process imported, and their folders on sys.path."""
    for name in [each for each in sys.modules if each.partition(".")[0] in ("lab", "walls")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "pytest-of-" not in place])


def test_imports_inside_functions_stay_in_their_folder(tmp_path):
    for name in ("a", "b"):
        file_at(tmp_path / name / "layers.py", f"WHERE = '{name}'\n")
        file_at(
            tmp_path / name / "net.py",
            "class CustomModel:\n"
            "    def where(self):\n"
            "        import layers\n"
            "        from parts.deep import WHERE\n"
            "        import parts.deep as deep\n"
            "        import parts.deep\n"
            "        from . import layers as relative\n"
            "        return {layers.WHERE, WHERE, deep.WHERE, parts.deep.WHERE, relative.WHERE}\n",
        )
        file_at(tmp_path / name / "parts" / "__init__.py", "")
        file_at(
            tmp_path / name / "parts" / "deep.py",
            "def __getattr__(name):\n    import layers\n    return layers.WHERE\n",
        )
    before = set(sys.modules)
    nets = [loaded(f"{name}/net.py", tmp_path)() for name in "ab"]
    assert [net.where() for net in [*nets, *nets]] == [{"a"}, {"b"}, {"a"}, {"b"}]
    assert all(name.startswith("tiltyard_plugins_") for name in set(sys.modules) - before)
    assert not list(tmp_path.rglob("__pycache__"))


def test_every_form_of_import_finds_the_folder(tmp_path):
    for name in ("a", "b"):
        file_at(tmp_path / name / "lab" / "__init__.py", "from lab import walls\n")
        file_at(tmp_path / name / "lab" / "walls.py", f"import lab.net\nWHERE = '{name}'\n")  # a circle
        file_at(tmp_path / name / "lab" / "net.py", "")
        file_at(
            tmp_path / name / "net.py",
            '"""Docstring."""\n'
            "from __future__ import annotations\n"
            "import importlib, json as first, lab.walls as as_name, lab.walls, os.path\n"
            "from importlib import import_module\n"
            "from lab.walls import *\n"
            "class CustomModel:\n"
            "    import lab.walls\n"
            "    found = {WHERE, as_name.WHERE, lab.walls.WHERE, import_module('lab.walls').WHERE}\n"
            "    found |= {importlib.import_module('.lab.walls', __package__).WHERE}\n"
            "    others = first, os, importlib.import_module('json')\n"
            "    names = sorted(globals())\n",
        )
    before = set(sys.modules)
    for name in "ab":
        model = loaded("net.py", tmp_path / name)
        assert model.found == {name}
        assert model.others == (json, os, json)
        assert not [each for each in model.names if "plugins" in each]
        assert vars(sys.modules[model.__module__])["__builtins__"] is vars(builtins)
    assert not {name for name in set(sys.modules) - before if name.startswith("lab")}


def test_dynamic_imports_are_refused_with_a_hint(tmp_path):
    file_at(tmp_path / "walls.py", "")
    file_at(tmp_path / "net.py", "__import__('walls')\n")
    file_at(
        tmp_path / "late.py", "def make(spec):\n    from importlib import import_module as get\n    get('wal' + 'ls')\n"
    )
    with pytest.raises(
        UseError, match=r"net\.py raised ModuleNotFoundError while imported: No module named 'walls'$"
    ) as e:
        loaded("net.py", tmp_path)
    assert e.value.hint.startswith("write `import walls` in your code: dynamic imports")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'walls'$") as late:
        loaded("late.py:make", tmp_path)(None)
    assert namespaces.import_hint(late.value) == e.value.hint
    assert env_errors.construction_error(late.value, "env late.py:make").hint == e.value.hint
    file_at(tmp_path / "late.py", "def make(spec):\n    import no_such_package_at_all\n")
    with pytest.raises(ModuleNotFoundError) as missing:
        loaded("late.py:make", tmp_path)(None)
    assert namespaces.import_hint(missing.value) is None


def test_rewritten_code_keeps_its_lines_and_its_source(tmp_path):
    text = "import lab.parts, os\n\n\ndef make():\n    import lab.parts; 1 / 0\n"
    file_at(tmp_path / "lab" / "parts.py", "")
    file_at(tmp_path / "net.py", text)
    make = loaded("net.py:make", tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        make()
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == (str(tmp_path / "net.py"), 5, "import lab.parts; 1 / 0")
    assert (frame.colno, frame.end_colno) == (22, 27)
    assert inspect.getsource(make) == text[text.index("def") :]


def test_missing_module_is_reported_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file_at(tmp_path / "lab" / "walls.py", "")
    file_at(tmp_path / "lab" / "net.py", "from lab.walls import x\n")
    file_at(tmp_path / "lab" / "deep" / "net.py", "import walls\n")
    file_at(tmp_path / "lab" / "other.py", "import pkgutil\npkgutil.resolve_name('walls:x')\n")
    for text, hint in (
        ("lab/net.py", f"work from {tmp_path}: write lab.net:CustomModel"),
        ("lab/deep/net.py:Net", f"work from {tmp_path}/lab: write lab/deep.net:Net"),
        ("lab/other.py", "`import walls` in your code"),
    ):
        with pytest.raises(UseError, match=r"No module named '(lab|walls)'$") as caught:
            loaded(text, tmp_path)
        assert hint in caught.value.hint


def test_local_modules_hide_some_installed_modules(tmp_path):
    """As in a script, local modules come first, except folders without __init__.py and except numpy."""
    import numpy

    file_at(tmp_path / "numpy.py", "hidden = True\n")
    file_at(tmp_path / "colorsys.py", "hidden = True\n")
    file_at(tmp_path / "pytest" / "notes.py", "")
    file_at(tmp_path / "bare_of_a_test" / "inner.py", "hidden = True\n")
    file_at(
        tmp_path / "net.py",
        "import colorsys, numpy, pytest\nfrom bare_of_a_test import inner\n"
        "class CustomModel: found = colorsys, inner, numpy, pytest\n",
    )
    own, inner, *others = loaded("net.py", tmp_path).found
    assert own.hidden and inner.hidden
    assert others == [numpy, pytest]


def test_missing_module_is_reported_by_its_name_in_the_code(tmp_path):
    file_at(tmp_path / "lab" / "__init__.py", "")
    file_at(tmp_path / "lab" / "net.py", "from .layrs import body\n")
    file_at(tmp_path / "net.py", "import lab.layrs\n")
    for text in ("lab.net:CustomModel", "net.py"):
        with pytest.raises(UseError, match=r"ModuleNotFoundError while imported: No module named 'lab\.layrs'$"):
            loaded(text, tmp_path)
    file_at(tmp_path / "lab" / "layrs.py", "body = 1\n")
    file_at(tmp_path / "net.py", "import lab.layrs\nclass CustomModel: size = lab.layrs.body\n")
    assert loaded("net.py", tmp_path).size == 1


def test_edited_neighbour_is_used_by_the_next_load_only(tmp_path):
    file_at(tmp_path / "net.py", "import layers\nclass CustomModel: size = layers.SIZE\n")
    file_at(tmp_path / "layers.py", "SIZE = 1\n")
    old = loaded("net.py", tmp_path)
    assert loaded("net.py", tmp_path) is old
    file_at(tmp_path / "layers.py", "SIZE = 2\n")
    assert (old.size, loaded("net.py", tmp_path).size) == (1, 2)
    (tmp_path / "layers.py").unlink()
    with pytest.raises(UseError, match="No module named 'layers'"):
        loaded("net.py", tmp_path)
    file_at(tmp_path / "layers" / "__init__.py", "SIZE = 3\n")
    assert loaded("net.py", tmp_path).size == 3


@pytest.mark.parametrize("name", ["my-net.py", "2048.py", "a.b.py", "both.py"])
def test_file_names_need_not_be_identifiers(tmp_path, name):
    file_at(tmp_path / "both" / "__init__.py", "")
    file_at(tmp_path / name, "from . import both\nclass CustomModel: module = both\n")
    found = loaded(name, tmp_path)
    assert found.module.__file__ == str(tmp_path / "both" / "__init__.py")


def test_finding_a_module_executes_nothing(tmp_path):
    file_at(tmp_path / "lab" / "__init__.py", "raise SystemExit('run')\n")
    file_at(tmp_path / "lab" / "net.py", "raise SystemExit('run')\n")
    assert namespaces.module_file(tmp_path, "lab.net") == tmp_path / "lab" / "net.py"
    assert namespaces.module_file(tmp_path, "lab") == tmp_path / "lab" / "__init__.py"
    assert namespaces.module_file(tmp_path, "lab.other") is None
    assert namespaces.is_own(tmp_path, "lab.net") and not namespaces.is_own(tmp_path, "collections")
