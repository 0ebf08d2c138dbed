"""`tiltyard data collect --on`: an array on a real Slurm cluster fills one dataset, also after a task was requeued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.cluster.conftest import SITE
from tests.conftest import Command
from tiltyard.data import dataset_file
from tiltyard.data.folder import read_episodes, read_manifest

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm")]


def finished(cluster: Cluster, job: str) -> bool:
    return not cluster.run("squeue", "-h", "-t", "PD,R,CG", "-j", job)


@pytest.mark.slow
def test_tasks_of_an_array_share_a_folder(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    """The policy is a file next to the command, and a secret of the profile is in no script."""
    Path("lever.py").write_text(
        "import os\ndef pull(obs):\n    return 2 if os.environ['MY_API_KEY'] == 'hush' else 0\n"
    )
    Path("tiltyard.yaml").write_text(SITE + "    environment: {MY_API_KEY: hush}\n")
    words = ["data", "collect", "basic", "--out", "a b", "--episodes", "40", "--policy", "lever.py:pull", "--seed", "3"]
    output = tiltyard(*words, "--on", "cluster", "--tasks", "2", "--workers", "2", "--json")
    facts = json.loads(output.stdout)
    assert facts["tasks"] == 2 and facts["logs"].endswith("a b/.jobs/0001")
    wait_for(lambda: finished(cluster, facts["job"]), "the end of the array")
    logs = [(Path(facts["logs"]) / f"{task}.out").read_text() for task in (0, 1)]
    found = read_manifest(Path("a b"))
    assert found.column("episode").tolist() == list(range(40)), logs
    assert found.column("return").tolist() == [1.0] * 40 and len(list(read_episodes("a b"))) == 40
    assert all("exit code 0" in log and "basic: 40 episodes" in log for log in logs)
    assert "hush" not in (Path(facts["logs"]) / "script.sh").read_text()
    about = dataset_file.read(Path("a b"))
    assert about is not None and about.seed == 3
    output = tiltyard(*words, "--on", "cluster")
    assert "basic: 40 episodes, 0 of them new" in output.stdout, "nothing is submitted when nothing is missing"
    assert sorted(path.name for path in Path("a b/.jobs").iterdir()) == ["0001"]


@pytest.mark.slow
def test_task_that_is_signalled_before_its_limit_is_requeued(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    output = tiltyard(
        *("data", "collect", "CartPole-v1", "--out", "data", "--episodes", "100000", "--workers", "1"),
        *("--on", "cluster", "--json"),
    )
    job = json.loads(output.stdout)["job"]
    log = Path("data/.jobs/0001/0.out")
    try:
        wait_for(lambda: list(Path("data").glob("episodes/*/*")), "the first episode")
        cluster.run("scancel", "--signal=USR2", job)  # as Slurm does some time before the limit
        wait_for(lambda: log.exists() and "exit code 75" in log.read_text(), "the end of the task")
        assert "stopped by SIGUSR2: " in log.read_text()
        wait_for(lambda: cluster.restarts(f"{job}_0") == 1, "the requeue")
    finally:
        cluster.run("scancel", "--full", job)
    wait_for(lambda: finished(cluster, job), "the end of the job")


def test_wrong_profiles_are_refused(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    words = ["data", "collect", "basic", "--out", "data", "--episodes", "4", "--on"]
    Path("tiltyard.yaml").write_text(
        "profiles:\n  here:\n  two: {launcher: slurm, resources: {nodes: 2}}\n"
        "  wrong: {launcher: slurm, slurm: {partition: nowhere}}\n"
    )
    assert "profile here submits no jobs" in tiltyard(*words, "here", expect=2).stderr
    assert "there is no profile 'cluster'" in tiltyard(*words, "cluster", expect=2).stderr
    assert "requests several nodes" in tiltyard(*words, "two", expect=2).stderr
    assert not Path("data").exists()
    assert "Slurm refused the job: invalid partition" in tiltyard(*words, "wrong", expect=1).stderr
