"""Copies of plug-ins: which files are copied, their ids, and that the copies are used."""

import os
import shutil
from pathlib import Path

import pytest

from tests.plugins.test_resolve import file_at, loaded
from tiltyard.config.load import load as load_experiment
from tiltyard.errors import UseError
from tiltyard.plugins import resolve, snapshot


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def freeze(before, base, into: Path):
    return snapshot.copy_plugins(before, base, into).named_in(before)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def experiment(here, text: str):
    file_at(here / "x.yaml", text)
    found = load_experiment(here / "x.yaml")
    return found.experiment, found.base


def test_modules_named_in_strings_are_copied(here, tmp_path_factory):
    into = tmp_path_factory.mktemp("run")
    file_at(here / "net.py", "import importlib\nimportlib.import_module('layers')\nclass CustomModel: pass\n")
    file_at(here / "games.py", "register('Maze-v0', entry_point='mazes:Maze', kwargs={'a': 'late'})\n")
    for name in ("layers", "mazes", "late"):
        file_at(here / f"{name}.py", "")
    before, base = experiment(here, "env: games:Maze-v0\nmodel: net.py\n")
    after = freeze(before, base, into)
    assert (after.env.id, after.model.id) == ("plugins/games:Maze-v0", "plugins/net.py:CustomModel")
    assert files_below(into / "plugins") == ["games.py", "layers.py", "mazes.py", "net.py"]


def test_every_plugin_file_is_copied_with_its_imports(here, tmp_path_factory):
    into = tmp_path_factory.mktemp("run")
    file_at(here / "nets" / "net.py", "import layers, numpy\nfrom pack.inner import x\nclass CustomModel: pass\n")
    file_at(here / "nets" / "layers.py", "def f():\n    import late\n")
    file_at(here / "nets" / "late.py", "import net\n")
    file_at(here / "nets" / "unused.py", "")
    file_at(here / "nets" / "pack" / "__init__.py", "")
    file_at(here / "nets" / "pack" / "inner.py", "from . import data\nx = 1\n")
    file_at(here / "nets" / "pack" / "data.json", "{}")
    file_at(here / "nets" / "pack" / "__pycache__" / "x.pyc", "")
    file_at(here / "env.py", "class Mine: pass\n")
    file_at(here / "wrap.py", "class CustomWrapper: pass\nclass B: pass\n")
    file_at(here / "enc.py", "class CustomEncoder: pass\n")
    text = "env: {id: env.py:Mine, wrappers: [wrap.py, {id: wrap.py:B, options: {a: 1}}, 'm:W']}\n"
    text += "model: {id: ./nets/net.py, encoder: enc.py, encoders: {cam.left: enc.py, x: mlp}}\n"
    before, base = experiment(here, text)
    after = freeze(before, base, into)
    assert after.env.id == "plugins/env.py:Mine"
    assert [wrapper.id for wrapper in after.env.wrappers] == [
        "plugins/wrap.py:CustomWrapper",
        "plugins/wrap.py:B",
        "m:W",
    ]
    assert after.env.wrappers[1].options == {"a": 1}
    assert after.model.id == "plugins/nets/net.py:CustomModel"
    assert after.model.encoder.id == "plugins/enc.py:CustomEncoder"
    assert {name: encoder.id for name, encoder in after.model.encoders.items()} == {
        "cam.left": "plugins/enc.py:CustomEncoder",
        "x": "mlp",
    }
    assert files_below(into) == sorted(
        "plugins/" + name
        for name in (
            "env.py",
            "wrap.py",
            "enc.py",
            "nets/net.py",
            "nets/layers.py",
            "nets/late.py",
            "nets/pack/__init__.py",
            "nets/pack/inner.py",
            "nets/pack/data.json",
        )
    )
    # the copy is used even if the original changes
    file_at(here / "env.py", "raise SystemExit\n")
    assert loaded(after.env.id, into).__name__ == "Mine"


def test_copying_a_copy_keeps_the_ids(here, tmp_path_factory):
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    file_at(here / "nets" / "net.py", "import layers\nclass CustomModel: pass\n")
    file_at(here / "nets" / "layers.py", "")
    before, base = experiment(here, "env: CartPole-v1\nmodel: nets/net.py\n")
    once = freeze(before, base, first)
    twice = freeze(once, [first], second)
    assert twice == once
    assert (second / "plugins" / "nets" / "layers.py").is_file()


def test_files_outside_the_project_and_files_with_equal_names_are_copied(here, tmp_path_factory):
    outside, into = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("run")
    file_at(outside / "env.py", "import part\nclass CustomEnv: pass\n")
    file_at(outside / "part.py", "A = 1\n")
    file_at(here / "exp" / "net.py", "class CustomModel: a = 1\n")
    file_at(here / "net.py", "class CustomEncoder: a = 2\n")
    file_at(here / "exp" / "x.yaml", f"env: {outside}/env.py\nmodel: {{id: net.py, encoder: {here}/net.py}}\n")
    found = load_experiment(here / "exp" / "x.yaml")
    after = freeze(found.experiment, found.base, into)
    assert after.env.id == "plugins/outside/0/env.py:CustomEnv"
    assert (into / "plugins" / "outside" / "0" / "part.py").is_file()
    assert after.model.id == "plugins/net.py:CustomModel"
    assert after.model.encoder.id != "plugins/net.py:CustomEncoder"
    assert loaded(after.model.id, into).a == 1
    assert loaded(after.model.encoder.id, into).a == 2


def test_nothing_is_written_without_plugins(here, tmp_path_factory):
    into = tmp_path_factory.mktemp("run")
    before = load_experiment("CartPole-v1").experiment
    assert freeze(before, [here], into) is before
    assert list(into.iterdir()) == []


def test_file_with_a_syntax_error_is_copied_unchanged(here, tmp_path_factory):
    into = tmp_path_factory.mktemp("run")
    file_at(here / "net.py", "class (\n")
    before, base = experiment(here, "env: CartPole-v1\nmodel: net.py\n")
    freeze(before, base, into)
    assert (into / "plugins" / "net.py").read_text() == "class (\n"


# ------------------------------------------------------------------------------------------------ modules


def write_lab(folder: Path, scale: int = 1) -> None:
    """Write a package with relative and absolute imports, and a module next to it."""
    file_at(folder / "lab" / "__init__.py", "")
    file_at(folder / "lab" / "scale.py", f"SCALE = {scale}\n")
    file_at(folder / "lab" / "envs" / "__init__.py", "from ..scale import SCALE\n")
    file_at(
        folder / "lab" / "envs" / "push.py",
        "import lab.scale\nfrom . import SCALE\n"
        "class Push:\n"
        "    scales = (SCALE, lab.scale.SCALE)\n"
        "    def length(self):\n"
        "        from beside import LENGTH\n"
        "        return LENGTH\n",
    )
    file_at(folder / "beside.py", f"LENGTH = {5 * scale}\n")


def test_modules_of_the_project_are_copied_and_run_from_the_copy(here, tmp_path_factory, monkeypatch):
    into, again, elsewhere = (tmp_path_factory.mktemp(name) for name in ("run", "again", "elsewhere"))
    write_lab(here)
    file_at(here / "spaces" / "bare.py", "class CustomWrapper: pass\n")  # no __init__.py
    text = "env: {id: 'lab.envs.push:Push', wrappers: ['spaces.bare:CustomWrapper', 'collections:OrderedDict']}\n"
    before, base = experiment(here, text)
    after = freeze(before, base, into)
    assert after.env.id == "plugins/lab.envs.push:Push"
    assert [each.id for each in after.env.wrappers] == ["plugins/spaces.bare:CustomWrapper", "collections:OrderedDict"]
    assert files_below(into / "plugins") == [
        "beside.py",
        "lab/__init__.py",
        "lab/envs/__init__.py",
        "lab/envs/push.py",
        "lab/scale.py",
        "spaces/bare.py",
    ]
    # The originals are gone, and a plain `import lab` would find another package.
    shutil.rmtree(here / "lab")
    write_lab(elsewhere, scale=7)
    monkeypatch.chdir(elsewhere)
    monkeypatch.syspath_prepend(str(elsewhere))
    for folder, found in ((into, after), (again, freeze(after, [into], again))):
        assert found == after
        push = loaded(found.env.id, folder)
        assert (push.scales, push().length()) == ((1, 1), 5)
    there = loaded("lab.envs.push:Push", elsewhere)
    assert (there.scales, there().length()) == ((7, 7), 35)
    assert (push.scales, push().length()) == ((1, 1), 5)


def test_two_packages_with_the_same_name_are_both_kept(here, tmp_path_factory):
    """The case of a forked run with a copied env and a new model from the project."""
    parent, into = tmp_path_factory.mktemp("parent"), tmp_path_factory.mktemp("run")
    write_lab(parent / "plugins", scale=2)
    write_lab(here)
    file_at(here / "lab" / "nets.py", "from lab.scale import SCALE\nclass Net: scale = SCALE\n")
    values = {"env": "plugins/lab.envs.push:Push", "model": "lab.nets:Net"}
    found = load_experiment(values, base=[parent])
    after = freeze(found.experiment, found.base, into)
    assert after.env.id == "plugins/lab.envs.push:Push"
    assert after.model.id == "plugins/outside/0/lab.nets:Net"
    assert loaded(after.env.id, into).scales == (2, 2)
    assert loaded(after.model.id, into).scale == 1


def test_owner_of_each_copied_module_is_checked(here):
    if os.getuid() != 0:
        pytest.skip("only root can give files to another user")
    write_lab(here / "plugins")
    named = [("env.id", "env", "plugins/lab.envs.push:Push")]
    resolve.refuse_foreign_code(named, [here], [here])
    for name in ("plugins/lab/scale.py", "plugins/beside.py", "plugins/lab/envs"):
        os.chown(here / name, 4321, 4321)
        with pytest.raises(UseError, match=f"^{here / name} belongs to another user"):
            resolve.refuse_foreign_code(named, [here], [here])
        os.chown(here / name, os.getuid(), os.getgid())


def test_computed_relative_imports_work_in_the_copy(here, tmp_path_factory):
    into = tmp_path_factory.mktemp("run")
    text = "import importlib, levels\nclass CustomModel:\n    def size(self, name):\n"
    file_at(here / "net.py", f"{text}        return importlib.import_module(f'.levels.{{name}}', __package__).SIZE\n")
    for size, name in enumerate(("easy", "hard")):
        file_at(here / "levels" / f"{name}.py", f"SIZE = {size}\n")
    before, base = experiment(here, "env: CartPole-v1\nmodel: net.py\n")
    after = freeze(before, base, into)
    shutil.rmtree(here / "levels")
    assert [loaded(after.model.id, into)().size(name) for name in ("easy", "hard")] == [0, 1]


# ------------------------------------------------------------------------------------------------ data


def test_data_files_named_in_strings_are_copied(here, tmp_path_factory):
    into = tmp_path_factory.mktemp("run")
    file_at(
        here / "env.py",
        "from pathlib import Path\nimport os, parts\nhere = Path(__file__).parent\n"
        "one = here / 'map.txt'\ntwo = here / 'maps' / 'small' / '1.txt'\n"
        "three = os.path.join(here, 'maps/2.txt')\nbig = here / 'weights.bin'\n"
        "others = ['.secret', '../x.yaml', '/etc/passwd', 'maps', 'nowhere.txt', '', '.']\n"
        "class CustomEnv: pass\n",
    )
    file_at(here / "parts.py", "NAME = 'parts.json'\n")
    for name in ("map.txt", "maps/small/1.txt", "maps/2.txt", "maps/3.txt", "parts.json", "unnamed.txt", ".secret"):
        file_at(here / name, name)
    (here / "weights.bin").write_bytes(bytes(snapshot.MAX_DATA + 1))
    before, base = experiment(here, "env: env.py\n")
    copies = snapshot.copy_plugins(before, base, into)
    expected = ["env.py", "map.txt", "maps/2.txt", "maps/small/1.txt", "parts.json", "parts.py"]
    assert files_below(into / "plugins") == expected
    assert copies.notes == ("env.py: not copied into the run folder because larger than 1 MiB: weights.bin",)
    again = tmp_path_factory.mktemp("again")
    copies.put_into(again)
    assert files_below(again / "plugins") == expected


def test_symlink_is_copied_with_the_neighbours_of_its_target(here, tmp_path_factory):
    shared, into = tmp_path_factory.mktemp("shared"), tmp_path_factory.mktemp("run")
    file_at(shared / "net.py", "import layers\nclass CustomModel: size = layers.SIZE\n")
    file_at(shared / "layers.py", "SIZE = 3\n")
    (here / "linked.py").symlink_to(shared / "net.py")
    before, base = experiment(here, "env: CartPole-v1\nmodel: linked.py\n")
    assert loaded("linked.py", here).size == 3
    after = freeze(before, base, into)
    shutil.rmtree(shared)
    assert loaded(after.model.id, into).size == 3
