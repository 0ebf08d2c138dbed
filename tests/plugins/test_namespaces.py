"""Imports in a user's module, both while it is loaded and later in its functions."""

import importlib.util
import json
import sys

import pytest

from tests.plugins.test_resolve import file_at, loaded
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


def test_import_module_works_like_import(tmp_path):
    for name in ("a", "b"):
        file_at(tmp_path / name / "lab" / "__init__.py", "")
        file_at(tmp_path / name / "lab" / "walls.py", f"WHERE = '{name}'\n")
        file_at(
            tmp_path / name / "lab" / "net.py",
            "import importlib\n"
            "import importlib.util\n"
            "from importlib import import_module, util\n"
            "class CustomModel:\n"
            "    def where(self):\n"
            "        found = [import_module('lab.walls'), importlib.import_module('.walls', 'lab')]\n"
            "        found += [importlib.import_module('.walls', __package__), __import__('lab.walls').walls]\n"
            "        return {module.WHERE for module in found}\n"
            "    others = importlib.import_module('json'), importlib.util, util, importlib.reload\n",
        )
    before = set(sys.modules)
    nets = [loaded("lab.net:CustomModel", tmp_path / name)() for name in "ab"]
    assert [net.where() for net in [*nets, *nets]] == [{"a"}, {"b"}, {"a"}, {"b"}]
    assert nets[0].others == (json, importlib.util, importlib.util, importlib.reload)
    assert not {name for name in set(sys.modules) - before if name.startswith("lab")}
    file_at(tmp_path / "c" / "net.py", "from importlib import import_module\nimport_module('lab.walls')\n")
    with pytest.raises(UseError, match=r"No module named 'lab'$"):
        loaded("net.py", tmp_path / "c")


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
