"""Sweep preflight: every combination is checked, and the files it needs are copied."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.processes.test_fork_server import fork_servers
from tiltyard.config.yaml import dump_yaml
from tiltyard.errors import ConfigError, UseError
from tiltyard.sweep import preflight
from tiltyard.sweep.backends.shares import environment, least_busy, shares, visible_gpus
from tiltyard.sweep.folder import find_sweep

EXPERIMENT = {
    "env": "CartPole-v1",
    "name": "tiny",
    "engine": {"kind": "serial", "envs": 2},
    "algo": {"rollout": 8, "minibatch": 16, "epochs": 1},
    "stop": {"env_steps": 16},
    "eval": {"every": 0, "episodes": 1},
    "track": {"tensorboard": False},
}


def plan(space: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"experiment": EXPERIMENT, "space": space, **more}


def test_all_problems_of_all_points_are_reported_together(runs: Path) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.prepare(plan({"algo.lr": [1e-3, -1.0], "algo.gama": [0.9], "algo.epochs": [1, 0]}))
    printed = error.value.details
    assert "algo.lr = -1.0: must be at least 0 (in algo.lr=-1.0 algo.gama=0.9 algo.epochs=1, and 1 more)" in printed
    assert "algo.epochs = 0: must be at least 1 (in algo.lr=0.001 algo.gama=0.9 algo.epochs=0, and 1 more)" in printed
    assert "did you mean 'algo.gamma'" in printed
    assert len(error.value.problems) == 3
    assert not runs.exists()


def test_conflict_between_two_settings_is_reported_with_its_point(runs: Path) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.prepare(plan({"algo.rollout": [8, 16], "algo.minibatch": [16, 32]}))
    assert "in algo.rollout=8 algo.minibatch=32)" in error.value.details
    preflight.prepare(plan({"algo.rollout, algo.minibatch": [[8, 16], [16, 32]]}))


def test_bounds_of_a_space_are_checked_before_a_search_starts(runs: Path) -> None:
    with pytest.raises(ConfigError, match="points of the plan") as error:
        preflight.prepare(plan({"algo.gamma": {"range": [0.9, 1.5]}}, search="tpe", trials=3))
    assert "algo.gamma" in error.value.details


def test_envs_and_metrics_of_all_points_are_checked(runs: Path) -> None:
    with pytest.raises(UseError, match="NoSuchEnv"):
        preflight.prepare(plan({"env.id": ["CartPole-v1", "NoSuchEnv-v7"]}))
    with pytest.raises(UseError, match="not a known metric"):
        preflight.prepare(plan({"algo.lr": [1e-3]}, metric="eval/retrun"))
    with pytest.raises(UseError, match="needs evaluations"):
        preflight.prepare(plan({"eval.at_end": [True, False]}))
    assert not runs.exists()


def test_stop_rule_that_can_never_end_a_trial_is_refused(runs: Path) -> None:
    stop = {"rule": "asha", "after": 16}
    with pytest.raises(ConfigError) as error:
        preflight.prepare(plan({"algo.lr": [1e-3, 1e-4]}, stop=stop))
    assert "stop.after = 16: no trial trains that long: stop.env_steps = 16" in error.value.details
    assert not runs.exists()
    preflight.prepare(plan({"stop.env_steps": [16, 32]}, stop=stop))  # a longer trial can be ended


@pytest.mark.slow
def test_experiment_file_next_to_the_plan_is_copied_into_the_sweep(
    tiltyard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plug-ins are copied too: a trial created later has the code from the start of the sweep."""
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Own(CartPoleEnv):\n    pass\n"
    )
    (folder / "own.yaml").write_text(dump_yaml({**EXPERIMENT, "env": "own.py:Own"}))
    (folder / "plan.yaml").write_text(
        dump_yaml({"experiment": "own.yaml", "space": {"algo.lr": [1e-3, 1e-4]}, "retries": 0})
    )
    made = preflight.prepare(folder / "plan.yaml")
    sweep = preflight.begin(made)
    (folder / "own.py").write_text("raise SystemExit('the new code was run')")
    (folder / "own.yaml").write_text("broken: [")
    monkeypatch.chdir("/")
    tiltyard("sweep", "start", str(sweep.folder))
    copies = [path.read_text() for path in sweep.folder.glob("0*/plugins/own.py")]
    assert len(copies) == 2
    assert all("CartPoleEnv" in copy for copy in copies)
    assert [trial.settings for trial in find_sweep("tiny").trials()] == [{"algo.lr": 1e-3}, {"algo.lr": 1e-4}]


def test_profile_is_applied_and_unsupported_requests_are_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_TOLD", "0")
    site = {
        "profiles": {
            "here": {"set": {"engine.threads": 1}, "environment": {"SWEEP_TOLD": "1"}},
            "there": {"launcher": "slurm", "resources": {"time": "1:00:00"}},
            "wide": {"launcher": "slurm", "resources": {"nodes": 2}},
            "mixed": {"launcher": "slurm", "slurm": {"samplers": {"nodes": 2}}},
        }
    }
    (tmp_path / "tiltyard.yaml").write_text(dump_yaml(site))
    made = preflight.prepare(plan({"algo.lr": [1e-3]}), profile="here")
    sweep = preflight.begin(made)
    folder = preflight.make_trial(sweep, sweep.plan(), sweep.trials()[0])
    from tiltyard.run.folder import Run

    assert Run(folder).experiment().engine.threads == 1
    assert Run(folder).status()["profile"] == "here"
    assert sweep.launcher == "local"
    there = preflight.begin(preflight.prepare(plan({"algo.lr": [1e-3]}), profile="there"))
    assert (there.launcher, there.facts()["profile"]) == ("slurm", "there")
    for name, words in (
        ("wide", "requests several nodes"),
        ("mixed", "heterogeneous jobs, which Slurm cannot run as job arrays"),
    ):
        with pytest.raises(UseError, match=words):
            preflight.prepare(plan({"algo.lr": [1e-3]}), profile=name)
    with pytest.raises(UseError, match="trials_per_gpu is for trials on this machine"):
        preflight.prepare(plan({"algo.lr": [1e-3]}, trials_per_gpu=2), profile="there")


def test_plan_in_the_folder_equals_the_prepared_plan(runs: Path) -> None:
    tree = {**EXPERIMENT, "algo": {**EXPERIMENT["algo"], "kl_stop": None}}  # type: ignore[dict-item]
    made = preflight.prepare({"experiment": tree, "points": [{"algo.kl_stop": None}, {"algo.kl_stop": 0.1}]})
    sweep = preflight.begin(made)
    assert sweep.plan() == made.plan
    assert sweep.plan().points[0] == {"algo.kl_stop": None}
    assert sweep.plan().experiment["algo"]["kl_stop"] is None  # type: ignore[index, call-overload]
    assert preflight.same_sweep(made) == sweep
    assert sweep.trials() == made.trials


def test_too_large_plan_is_refused_before_anything_is_written(runs: Path) -> None:
    made = preflight.prepare({"program": ["python"], "environment": {"LONG": "x" * 2_000_000}})
    with pytest.raises(UseError, match="more than 1,048,576"):
        preflight.begin(made)
    assert list(runs.glob("*/*")) == []


# ------------------------------------------------------------------------------------------------ shares of a machine


def test_cores_are_divided_among_slots() -> None:
    assert shares([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert shares([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3, 4]]
    assert shares([3, 7], 5) == [[3], [7], [3], [7], [3]]
    assert shares([0, 1, 2], 1) == [[0, 1, 2]]


def test_least_busy_gpu_is_used_first() -> None:
    taken: list[str | None] = []
    for _ in range(5):
        taken.append(least_busy(["2", "5"], taken, 2))
    assert taken == ["2", "5", "2", "5", None]
    assert least_busy(["2", "5"], ["2", "2", "5"], 3) == "5"


def test_visible_gpus_are_from_the_environment_or_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}) == ["3", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: B (UUID: y)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ["0", "1"]
    made = environment({"A": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, {"B": "2"}, [0, 1], "1")
    assert made == {"A": "1", "B": "2", "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2"}


def test_bad_variable_names_and_missing_gpus_are_reported_before_anything_is_written(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("MY VAR", "A=1; touch here; B", "1A"):
        with pytest.raises(ConfigError) as error:
            preflight.prepare(plan({"algo.lr": [1e-3]}, environment={name: "x"}))
        assert "is not a valid name of an environment variable" in error.value.details
    with pytest.raises(UseError, match="no visible GPU"):
        preflight.prepare(plan({"algo.lr": [1e-3]}, trials_per_gpu=2))
    assert not runs.exists()


def test_preflight_leaves_no_fork_server_running(runs: Path) -> None:
    assert preflight.prepare(plan({"algo.lr": [1e-3]}, experiment={**EXPERIMENT, "engine": {"envs": 2, "workers": 2}}))
    assert fork_servers() == 0


def test_many_trials_require_confirmation(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MANY", 3)
    four = plan({"algo.lr": [1e-3, 1e-4]}, seeds=2)
    with pytest.raises(UseError, match="this plan has 4 trials"):
        preflight.prepare(four)
    assert preflight.prepare(four, many=True).count == 4


def test_plan_and_experiment_files_are_not_interchangeable(tiltyard: Command, runs: Path) -> None:
    Path("plan.yaml").write_text(dump_yaml(plan({"algo.lr": [1e-3]})))
    Path("experiment.yaml").write_text(dump_yaml(EXPERIMENT))
    assert "tiltyard sweep start plan.yaml" in tiltyard("train", "plan.yaml", expect=2).stderr
    assert "tiltyard train experiment.yaml" in tiltyard("sweep", "start", "experiment.yaml", expect=2).stderr
