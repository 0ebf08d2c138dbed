"""Resolving names to objects: kinds of names, running plug-in code, and reports about its errors and options."""

import os
import sys
from pathlib import Path

import pytest

from tiltyard.errors import UseError
from tiltyard.plugins import resolve

BUILTINS = {"mlp": "collections:OrderedDict", "nature": "pathlib:Path"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def file_at(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def loaded(text: str, base: Path, conventional: str = "CustomModel"):
    return resolve.load(resolve.parse(text, {}, conventional, [base]))


# ------------------------------------------------------------------------------------------------ parse


def test_builtin_module_and_file_names_are_parsed(here):
    path = file_at(here / "nets" / "net.py", "raise SystemExit('parse executes nothing')")
    assert resolve.parse("mlp", BUILTINS, None, [here]) == resolve.Ref("mlp", None, "collections", "OrderedDict")
    assert resolve.parse("a.b:C.d", {}, None, [here]) == resolve.Ref("a.b:C.d", None, "a.b", "C.d")
    assert resolve.parse("nets/net.py:Net", {}, None, [here]) == resolve.Ref("nets/net.py:Net", path, None, "Net")
    assert resolve.parse("nets/net.py", {}, "CustomModel", [here]).attribute == "CustomModel"
    assert resolve.parse(str(path), {}, "CustomModel", []).path == path


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CartPole-v1", None),
        ("ALE/Pong-v5", None),
        ("pkg:Env-v0", None),
        ("mlp", None),
        ("a:b", "module"),
        ("a.py", "file"),
        ("", None),
    ],
)
def test_kind_depends_on_the_form_of_the_name(text, kind):
    assert resolve.kind_of(text) == kind


def test_files_are_searched_in_order(here):
    first = file_at(here / "one" / "net.py", "")
    file_at(here / "two" / "net.py", "")
    file_at(here / "two" / "only.py", "")
    base = [here / "one", here / "two"]
    assert resolve.parse("net.py:A", {}, None, base).path == first
    assert resolve.parse("only.py:A", {}, None, base).path == here / "two" / "only.py"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nets/nett.py", "there is no file nets/nett.py (searched in {here}/nets)"),
        ("nets/net.py:", "does not name a class"),
        ("nets/net.py:3x", "does not name a class"),
        ("nope", "not built-in"),
        ("", "not built-in"),
        ("x\0.py", "there is no file"),
        ("~nobody_at_all/x.py", "there is no file"),
        ("~nobody_at_all/x:Y", "there is no module 'x' in ~nobody_at_all/"),
        ("x" * 300 + ".py", "there is no file"),
        ("nets", "not built-in"),
    ],
)
def test_unknown_names_are_refused(here, text, words):
    file_at(here / "nets" / "net.py", "")
    with pytest.raises(UseError) as caught:
        resolve.parse(text, BUILTINS, "CustomModel", [here])
    assert words.format(here=here) in caught.value.message
    assert caught.value.hint
    if text.endswith("nett.py"):
        assert caught.value.hint == "did you mean 'net.py'?"


def test_modules_of_the_project_are_found_without_running_them(here):
    file_at(here / "lab" / "__init__.py", "raise SystemExit('parse executes nothing')")
    file_at(here / "lab" / "net.py", "raise SystemExit('parse executes nothing')")
    file_at(here / "plugins" / "lab" / "net.py", "class Net: pass")
    file_at(here / "site-packages" / "lab" / "net.py", "")
    assert resolve.parse("lab.net:Net", {}, None, [here / "none", here]).path == here
    assert resolve.parse("plugins/lab.net:Net", {}, None, [here]).path == here / "plugins"
    assert resolve.parse("lab.other:Net", {}, None, [here]).path is None
    assert resolve.parse("lab.net:Net", {}, None, [here / "site-packages"]).path is None, "installed"
    assert resolve.parse("lab", {"lab": "lab.net:Net"}, None, [here]).path is None, "a built-in is Tiltyard's"
    file_at(here / "tiltyard" / "refs.py", "class Ref: pass")
    assert loaded("tiltyard.plugins.resolve:Ref", here) is resolve.Ref
    with pytest.raises(UseError, match=r"there is no module 'net' in lab/") as caught:
        resolve.parse("lab/net:Net", {}, None, [here.parent])
    assert "lab/net.py:Net" in caught.value.hint


def test_typo_in_a_builtin_name_gives_a_hint():
    with pytest.raises(UseError) as caught:
        resolve.parse("natur", BUILTINS, None, [])
    assert caught.value.hint == "did you mean 'nature'?"


# ------------------------------------------------------------------------------------------------ load


def test_plugin_code_runs_exactly_once(here):
    file_at(
        here / "net.py",
        "from pathlib import Path\nwith open('ran', 'a') as f: f.write('x')\nclass CustomModel:\n    answer = 42\n",
    )
    assert loaded("net.py", here).answer == 42
    assert loaded("net.py:CustomModel", here) is loaded("net.py", here)
    assert (here / "ran").read_text() == "x"


def test_builtins_and_modules_are_loaded(here):
    assert resolve.load(resolve.parse("nature", BUILTINS, None, [])) is Path
    file_at(here / "own_package_of_a_test.py", "class Outer:\n    class Inner: pass\n")
    assert resolve.load(resolve.parse("own_package_of_a_test:Outer.Inner", {}, None, [])).__name__ == "Inner"


def test_edited_file_is_loaded_as_a_new_module(here):
    file_at(here / "net.py", "class CustomModel: size = 1\n")
    old = loaded("net.py", here)
    assert not (here / "__pycache__").exists()
    file_at(here / "net.py", "class CustomModel: size = 2\n")
    assert (old.size, loaded("net.py", here).size) == (1, 2)


def test_neighbours_are_importable_and_folders_do_not_mix(here):
    for name in ("a", "b"):
        file_at(here / name / "layers.py", f"WHERE = '{name}'\n")
        file_at(here / name / "parts" / "__init__.py", "from parts.deep import WHERE\n")
        file_at(here / name / "parts" / "deep.py", f"WHERE = '{name}'\n")
        for net in ("net", "other"):
            file_at(
                here / name / f"{net}.py",
                "import layers\nfrom parts import WHERE\nclass CustomModel: where = layers.WHERE + WHERE\n",
            )
    before = list(sys.path)
    found = [loaded(f"{name}/{net}.py", here).where for name in "abab" for net in ("net", "other")]
    assert found == ["aa", "aa", "bb", "bb"] * 2
    assert sys.path == before


def test_dataclasses_in_plugins_work(here):
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass CustomModel:\n    x: int = 3\n"
    file_at(here / "net.py", text)
    assert loaded("net.py", here)().x == 3


@pytest.mark.parametrize(
    ("source", "message", "shown"),
    [
        (
            "import not_a_module_at_all\n",
            "net.py raised ModuleNotFoundError while imported: No module named",
            'net.py", line 1',
        ),
        ("def f():\n    raise ValueError('my own')\nf()\n", "net.py raised ValueError while imported: my own", "in f"),
        ("class X:\n  y = [\n", "net.py raised SyntaxError while imported", "line 2"),
        ("import sys\nsys.exit(3)\n", "net.py raised SystemExit while imported: 3", "line 2"),
        (
            "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('b') from e\n",
            "net.py raised KeyError",
            "ZeroDivisionError",
        ),
        ("\xff".encode("latin-1").decode("latin-1") + " = (", "net.py raised SyntaxError", ""),
    ],
)
def test_exception_in_a_plugin_is_reported_with_its_own_traceback_only(here, source, message, shown):
    file_at(here / "net.py", source)
    with pytest.raises(UseError) as caught:
        loaded("net.py", here)
    assert caught.value.message.startswith(message)
    assert shown in caught.value.details
    assert "importlib" not in caught.value.details
    assert os.sep + "refs.py" not in caught.value.details
    file_at(here / "net.py", "class CustomModel: pass")
    assert loaded("net.py", here).__name__ == "CustomModel"


def test_missing_attributes_and_modules_are_reported(here):
    file_at(here / "net.py", "from collections import OrderedDict\nclass CustomModle: pass\n")
    with pytest.raises(UseError, match=r"net\.py has no 'CustomModel'") as caught:
        loaded("net.py", here)
    assert caught.value.hint == "did you mean 'CustomModle'?"
    with pytest.raises(UseError, match="there is no module 'no_such_package'"):
        loaded("no_such_package.nets:Net", here)
    file_at(here / "broken_of_a_test.py", "import no_such_package\n")
    with pytest.raises(UseError, match="broken_of_a_test:X raised ModuleNotFoundError while imported") as caught:
        loaded("broken_of_a_test:X", here)
    assert "broken_of_a_test.py" in caught.value.details


# ------------------------------------------------------------------------------------------------ options


class Takes:
    def __init__(self, spec, outputs, width, *, depth=2, gate): ...


class TakesAll:
    def __init__(self, spec, /, **options): ...


def test_options_are_checked_against_the_signature():
    problems = resolve.check_options(Takes, {"widht": 3, "gate": True, "spec": 1}, 2, "model.options")
    assert [str(problem) for problem in problems] == [
        "model.options.widht = 3: Takes has no option 'widht'\n   hint: did you mean 'width'?",
        "model.options.spec = 1: Tiltyard itself passes 'spec' to Takes\n   hint: leave it out",
        "model.options.width: is missing: Takes needs it\n   hint: set model.options.width=...",
    ]
    assert resolve.check_options(Takes, {"width": 1, "gate": 0}, 2, "model.options") == []
    assert resolve.check_options(TakesAll, {"anything": 1}, 1, "x") == []


def test_options_of_functions_and_of_objects_without_a_signature():
    assert resolve.check_options(lambda env: env, {"a": 1}, 1, "x")[0].hint == "it has no options"
    assert resolve.check_options(dict, {"a": 1}, 0, "x") == []


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), ("a", "'a'"), (10**50, "about 1e50"), (1e-5, "1e-05")]
)
def test_values_are_shortened(value, text):
    assert resolve.short(value) == text
    assert len(resolve.short("x" * 1000)) == 60
