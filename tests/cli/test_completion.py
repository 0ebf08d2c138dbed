"""Completion in the real shells: what a shell offers after a prefix was typed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiltyard.cli.completion import SCRIPTS, candidates

TYPED = [  # (line, a candidate, not a candidate)
    ("tiltyard sweep extend --s", "--seeds", "--new"),
    ("tiltyard train x.yaml algo.gam", "algo.gamma=", "algo.lr="),
    ("tiltyard train x.yaml use=[cl", "use=[classic]", "use=[memory]"),
    ("tiltyard show to", "toy/0001-brisk-otter", "last"),
]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one run, and `tiltyard` of this environment first on the path."""
    program = tmp_path / "bin" / "tiltyard"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tiltyard "$@"\n')
    program.chmod(0o755)
    (tmp_path / "runs" / "toy" / "0001-brisk-otter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TILTYARD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def answers(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


BASH = """
eval "$(tiltyard completion bash)"
for line in "$@"; do
    read -ra COMP_WORDS <<<"${line//=/ = }"
    COMP_LINE="$line" COMP_POINT=${#line} COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    $(complete -p tiltyard | sed 's/.*-F \\([^ ]*\\).*/\\1/') tiltyard
    echo "${COMPREPLY[*]}"
done
"""
FISH = "tiltyard completion fish | source; for line in $argv; complete -C $line | string join ' '; end; true"
ZSH = """
autoload -U compinit; compinit -u -D; eval "$(tiltyard completion zsh)"
compadd() { while [[ $1 == -* ]]; do [[ $1 == -S ]] && shift; [[ $1 == -- ]] && { shift; break }; shift; done; print -n -- "$* " }
_files() { }
for line in "$@"; do words=(${(s: :)line}); CURRENT=$#words; _tiltyard; print; done
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_offers_commands_options_settings_presets_and_runs(name: str, shell: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    typed = TYPED if name == "bash" else TYPED[:2]  # the candidates are the same
    lines = [line for line, _, _ in typed]
    code = {"bash": BASH, "zsh": ZSH, "fish": FISH}[name]
    found = answers(name, "-c", code, *([] if name == "fish" else [name]), *lines)
    for (line, wanted, other), offered in zip(typed, found, strict=True):
        # bash replaces only what is after the last =
        wanted = wanted.rpartition("=")[2] if name == "bash" and "=" in line else wanted
        assert wanted in offered.split() and other not in offered.split(), (line, offered)


def test_arguments_are_completed_by_their_place(shell: Path) -> None:
    assert candidates("tiltyard sw") == ["sweep"] and candidates("tiltyard sweep st") == ["start", "status", "stop"]
    assert candidates("tiltyard fork ") == ["last", "toy/0001-brisk-otter"]
    assert "algo.lr=" in candidates("tiltyard fork last ") and "algo.lr=" in candidates("tiltyard fork --at best last ")
    assert candidates("tiltyard train x.yaml algo.id=a") == ["algo.id=a2c", "algo.id=appo"]
    assert candidates("tiltyard train x.yaml eval.at_end=") == ["eval.at_end=true", "eval.at_end=false"]
    assert candidates("tiltyard completion f") == ["fish"]
    assert candidates("tiltyard train ") == candidates("tiltyard nothing ") == []  # file names
    (shell / "tiltyard.yaml").write_text("profiles: {gpu: {launcher: slurm}, here: {}}\n")
    assert candidates("tiltyard train x.yaml --on ") == ["gpu", "here"]
