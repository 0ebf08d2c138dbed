"""A grid with several seeds as one job array of a real Slurm cluster: each trial runs once, and a failed one again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.conftest import Command
from tests.counts import LONG
from tiltyard.config.yaml import dump_yaml
from tiltyard.sweep.folder import find_sweep
from tiltyard.sweep.report import summarize

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm-sweeps")]

FRAGILE = """
import os, pathlib
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    def __init__(self, *, bad, render_mode=None):
        super().__init__(render_mode=render_mode)
        if pathlib.Path(bad).exists() and os.environ.get("SLURM_ARRAY_TASK_ID") == pathlib.Path(bad).read_text():
            raise RuntimeError("the pole is broken")
"""


@pytest.mark.timeout(3000 if LONG else 300)
def test_grid_of_trainings_is_one_array_and_a_failed_trial_is_retried(
    tiltyard: Command, cluster: Cluster, runs: Path, tmp_path: Path
) -> None:
    """TILTYARD_LONG=1 runs the 3 x 2 grid with 5 seeds."""
    Path("fragile.py").write_text(FRAGILE)
    bad = tmp_path / "bad"
    bad.write_text("2")  # the third task of the array
    experiment = {
        "env": {"id": "fragile.py", "time_limit": 500, "options": {"bad": str(bad)}},
        "name": "grid",
        "engine": {"kind": "serial", "envs": 4},
        "algo": {"rollout": 16, "minibatch": 64, "epochs": 1},
        "stop": {"env_steps": 1024},
        "eval": {"every": 512, "episodes": 2},
        "track": {"tensorboard": False},
    }
    space = {"algo.lr": [1e-3, 3e-4, 1e-4] if LONG else [1e-3, 1e-4], "algo.gamma": [0.98, 0.99] if LONG else [0.99]}
    seeds, total = (5, 30) if LONG else (2, 4)
    plan = {"experiment": experiment, "space": space, "seeds": seeds, "max_parallel": 2, "retries": 0}
    Path("plan.yaml").write_text(dump_yaml(plan))
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("grid")

    def over() -> bool:
        return summarize(sweep).state not in ("running", "stopped")

    wait_for(over, "the end of the sweep", 2000 if LONG else 200)
    output = tiltyard("sweep", "status", "grid", expect=1).stdout
    assert "trial 3 failed" in output and "the pole is broken" in output
    assert summarize(sweep).counts == {"finished": total - 1, "failed": 1}
    assert f"#SBATCH --array=0-{total - 1}%2\n" in (sweep.folder / "slurm" / "array-0001" / "script.sh").read_text()

    bad.unlink()
    tiltyard("sweep", "retry", "--failed", "grid")
    wait_for(over, "the end of the trial that had failed", 200)
    report = summarize(sweep)
    assert report.counts == {"finished": total}
    assert len({(row.trial.seed, json.dumps(row.trial.settings)) for row in report.rows}) == total
    assert [row.trial.number for row in report.rows if row.attempt != 1] in ([], [3]), "no other trial was restarted"
    assert {row.env_steps for row in report.rows} == {1024} and all(row.value is not None for row in report.rows)
    if LONG:
        tiltyard("sweep", "extend", "grid", "--seeds", "1")
        wait_for(over, "the end of the new seeds", 500)
        assert summarize(sweep).counts == {"finished": total + 6}
