"""Read-only commands are quick: they import none of torch, ray, gymnasium and numpy, and run no plug-in."""

import subprocess
import sys
from pathlib import Path

import pytest

import tiltyard as product

HEAVY = ("torch", "ray", "gymnasium", "numpy", "pyarrow", "matplotlib", "wandb")
SPY = """
import sys
sys.argv = ["tiltyard", *{words!r}]
try:
    from tiltyard.cli import main
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
print("IMPORTED:" + ",".join(sorted(name for name in {heavy!r} if name in sys.modules)))
"""


@pytest.fixture
def one_run(runs: Path, tmp_path: Path) -> str:
    (tmp_path / "watched.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Watched(CartPoleEnv):\n    pass\n"
    )
    run = product.train(
        {
            "env": "watched.py:Watched",
            "engine": {"envs": 1},
            "algo": {"rollout": 8, "minibatch": 8},
            "stop": {"env_steps": 8},
            "eval": {"at_end": False},
        },
        live=False,
    )
    for copy in run.folder.glob("plugins/**/*.py"):
        copy.write_text("raise SystemExit('a plug-in was run')")
    return run.id


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["ls"],
        ["ls", "--json"],
        ["show", "RUN"],
        ["diff", "RUN", "RUN"],
        ["logs", "RUN"],
        ["version"],
        ["config", "schema"],
        ["config", "show", "FILE"],
    ],
    ids=" ".join,
)
def test_read_only_commands_import_no_heavy_package_and_run_no_plugin(
    words: list[str], one_run: str, runs: Path
) -> None:
    file = str(next(runs.glob("*/0*/experiment.yaml")))
    typed = [{"RUN": one_run, "FILE": file}.get(word, word) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", SPY.format(words=typed, heavy=HEAVY)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "IMPORTED:"
