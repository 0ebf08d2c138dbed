"""`tiltyard config` in its own process: data on stdout, everything else on stderr, no plug-in imported."""

import json
import os
import subprocess
import sys

import pytest

from tiltyard.config.yaml import parse_yaml


def tiltyard(*words: str, cwd, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {**os.environ, "TILTYARD_SITE": "", "HOME": str(cwd), **environment}
    return subprocess.run(
        [sys.executable, "-m", "tiltyard", *words], cwd=cwd, env=kept, capture_output=True, text=True, timeout=60
    )


def test_show_prints_yaml_or_json(tmp_path):
    done = tiltyard("config", "show", "CartPole-v1", "algo.lr=3e-4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    values = parse_yaml(done.stdout, "stdout")
    assert values["algo"]["lr"] == 3e-4
    assert next(iter(values)) == "version"
    assert (
        json.loads(tiltyard("config", "show", "CartPole-v1", "algo.lr=3e-4", "--json", cwd=tmp_path).stdout) == values
    )


def test_show_prints_origins_and_profiles_without_importing_plugins(tmp_path):
    (tmp_path / "net.py").write_text("open('imported', 'w')\nclass CustomModel: pass\n")
    (tmp_path / "x.yaml").write_text("env: CartPole-v1\nmodel: net.py\nuse: [memory]\n")
    (tmp_path / "tiltyard.yaml").write_text("profiles: {big: {set: {engine.envs: 64}}}\n")
    done = tiltyard("config", "show", "x.yaml", "--origin", "seed=3", "--on", "big", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert lines["model.id"] == ["net.py", "file x.yaml"]
    assert lines["seed"] == ["3", "command line"]
    assert lines["engine.envs"] == ["64", "profile big"]
    assert lines["algo.entropy"] == ["0.01", "preset memory"]
    assert lines["eval.every"] == ["50000", "default"]
    assert not (tmp_path / "imported").exists()
    both = json.loads(tiltyard("config", "show", "x.yaml", "--origin", "--json", cwd=tmp_path).stdout)
    assert both["origins"]["model.id"] == "file x.yaml"
    assert not (tmp_path / "imported").exists()


def test_schema_and_reference_are_printed(tmp_path):
    assert json.loads(tiltyard("config", "schema", cwd=tmp_path).stdout)["title"] == "Tiltyard experiment"
    assert "| `algo.lr` |" in tiltyard("config", "reference", cwd=tmp_path).stdout
    rows = json.loads(tiltyard("config", "reference", "--json", cwd=tmp_path).stdout)
    assert {"setting", "type", "default", "meaning"} == set(rows[0])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "none.yaml"], "error: none.yaml does not exist"),
        (["show"], "error: tiltyard config show needs FILE|ENV"),
        (["shwo", "x"], "hint: did you mean 'show'?"),
        (["schema", "x"], "error: unexpected argument 'x' of tiltyard config schema"),
        (["show", "CartPole-v1", "--on", "cluster"], "error: there is no profile 'cluster'"),
        (["show", "CartPole-v1", "algo.lrr=1"], "1. algo.lrr = 1: unknown setting"),
    ],
)
def test_wrong_use_is_refused_with_a_sentence(tmp_path, words, sentence):
    done = tiltyard("config", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_show_imports_no_heavy_package(tmp_path):
    code = "import sys; from tiltyard.cli import main\ntry:\n    main(['config', 'show', 'CartPole-v1'])\nexcept SystemExit:\n    pass\n"
    code += "print(sorted({'torch', 'ray', 'gymnasium', 'numpy', 'pyarrow'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
