"""Runs as jobs of a real Slurm cluster: submitted, followed, listed, stopped, resumed, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.cluster.conftest import SITE
from tests.conftest import Command
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find
from tiltyard.run.status import list_runs
from tiltyard.slurm import FOLDER

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm")]
SMALL = ["engine.envs=4", "algo.rollout=16", "algo.minibatch=64", "algo.epochs=1", "eval.at_end=false"]
SHORT = [*SMALL, "stop.env_steps=2048"]
LONG = [*SMALL, "stop.env_steps=1e9", "save.env_steps=1024"]


def site(lines: str, name: str = "cluster") -> None:
    """Write the site file with additional lines in its profile."""
    Path("tiltyard.yaml").write_text(SITE.replace("cluster:", f"{name}:") + lines)


def saved(run: Run) -> bool:
    return any((run.folder / "checkpoints").glob("0*"))


def ended(cluster: Cluster, run: Run) -> None:
    job = run.status()["job"]["id"]
    wait_for(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), f"the end of job {job}")


@pytest.mark.slow
def test_run_is_submitted_followed_and_finished(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    Path("twin.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Twin(CartPoleEnv):\n    pass\n"
    )
    output = tiltyard("train", "twin.py:Twin", *SHORT, "--on", "cluster", "--json", "--expect", "train_return>=5")
    outcome = json.loads(output.stdout)
    run = find(outcome["folder"])
    assert (outcome["state"], outcome["progress"]["env_steps"]) == ("finished", 2048)
    status = run.status()
    assert status["job"]["id"] == outcome["job"] and status["job"]["profile"] == "cluster"
    assert f"job {outcome['job']} is running on node" in output.stderr
    assert "finished: stop.env_steps=2,048 reached" in output.stderr  # from the log of the run
    ended(cluster, run)
    assert cluster.state(outcome["job"]) == "COMPLETED"
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("started") == 2 and kinds.index("submitted") < kinds.index("started")
    # A finished run can be resumed with new settings, as a job or on this host.
    tiltyard("resume", run.id, "stop.env_steps=3072", "notes='; $(touch never)'", "--detach")
    assert run.status()["state"] == "queued"
    output = tiltyard("logs", "-f", run.id)
    assert "stop.env_steps=3,072 reached" in output.stdout
    assert (run.status()["progress"]["env_steps"], run.experiment().notes) == (3072, "; $(touch never)")
    tiltyard("resume", run.id, "stop.env_steps=4096", "--here", "--plain")
    assert run.status()["progress"]["env_steps"] == 4096
    assert not Path("never").exists()


@pytest.mark.slow
def test_queued_job_keeps_its_files_and_can_be_stopped(
    tiltyard: Command, cluster: Cluster, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submit to a full cluster from an oddly named folder, stop while pending, resume, edit the sources, then run."""
    odd = tmp_path / 'it\'s 100% "odd"; $(touch never)'
    odd.mkdir()
    monkeypatch.chdir(odd)
    monkeypatch.setenv("TILTYARD_RUNS", str(odd / "my runs"))
    value = "$(touch never); 'a' \"b\"\nc"
    site(f"    environment: {{NOTE: {json.dumps(value)}, MY_TOKEN: {json.dumps(value)}}}\n")
    Path("env.py").write_text(
        "import os\nfrom pathlib import Path\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Mine(CartPoleEnv):\n    def __init__(self, word='', render_mode=None):\n"
        "        super().__init__(render_mode=render_mode)\n"
        f"        Path({str(tmp_path / 'seen.txt')!r}).write_text(word + os.environ['NOTE'] + os.environ['MY_TOKEN'])\n"
    )
    blocking = cluster.run("sbatch", "--parsable", "-N2", "-c2", "-o", "/dev/null", "--wrap", "sleep 1000")
    wait_for(lambda: cluster.state(blocking) == "RUNNING", "a full cluster")
    word = json.dumps({"word": value})
    tiltyard(
        "train",
        "env.py:Mine",
        f"env.options={word}",
        f"notes={json.dumps(value)}",
        *LONG,
        "--on",
        "cluster",
        "--detach",
    )
    run = find("last")
    job = run.status()["job"]["id"]
    assert [row["state"] for row in json.loads(tiltyard("ls", "--json").stdout)] == ["queued"]
    shown = tiltyard("show", run.id).stdout
    assert "queued" in shown and f"job {job} is pending: " in shown and f"tiltyard stop {run.id}" in shown
    assert "has an active Slurm job" in tiltyard("resume", run.id, expect=2).stderr
    assert "has an active Slurm job" in tiltyard("rm", run.id, "--yes", expect=2).stderr
    output = tiltyard("stop", run.id)
    assert "is stopped" in output.stderr and cluster.state(job) == "CANCELLED"
    tiltyard("resume", run.id, "--detach")

    (tmp_path / "seen.txt").unlink()
    Path("env.py").write_text("raise SystemExit('edited after it was submitted')")
    Path("tiltyard.yaml").write_text("profiles: {cluster: {launcher: broken}}")
    cluster.run("scancel", blocking)
    wait_for(lambda: saved(run), "a checkpoint")
    assert (tmp_path / "seen.txt").read_text() == value * 3
    assert run.experiment().notes == value
    assert [row["state"] for row in json.loads(tiltyard("ls", "--json", "--root", str(odd / "my runs")).stdout)] == [
        "running"
    ]
    tiltyard("stop", str(run.folder))
    assert (run.state, run.status()["reason"]) == ("stopped", "received SIGUSR2")
    ended(cluster, run)
    assert list(tmp_path.rglob("never*")) == []
    assert (run.folder / FOLDER / "script.sh").stat().st_mode & 0o777 == 0o700
    assert (run.folder / FOLDER / "secrets.sh").stat().st_mode & 0o777 == 0o600
    assert "MY_TOKEN" not in (run.folder / FOLDER / "script.sh").read_text()
    assert list((run.folder / "logs").glob("job-*.out"))


@pytest.mark.slow
def test_ctrl_c_stops_following_and_not_the_job(cluster: Cluster, runs: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tiltyard", "train", "CartPole-v1", *LONG, "--on", "cluster"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: list_runs(runs) and saved(Run(Path(list_runs(runs)[0]["folder"]))), "a checkpoint")
    os.killpg(child.pid, signal.SIGINT)
    _, output = child.communicate(timeout=60)
    run = find("last", runs)
    assert child.returncode == 130 and f"follow it again with: tiltyard logs -f {run.id}" in output, output
    job = run.status()["job"]["id"]
    assert (cluster.state(job), run.state) == ("RUNNING", "running")
    cluster.run("scancel", job)  # cancelled by another program: it saves, and no process is left
    ended(cluster, run)
    wait_for(lambda: run.state == "stopped", "a stopped run")
    left = subprocess.run(["pgrep", "-f", str(run.folder)], capture_output=True, text=True).stdout
    assert left == ""


def test_seeds_are_submitted_as_one_job_each(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    output = tiltyard("train", "CartPole-v1", *SHORT, "--on", "cluster", "--seeds", "1,2", "--detach")
    found = [Run(Path(folder)) for folder in output.stdout.split()]
    assert len({run.status()["job"]["id"] for run in found}) == 2
    assert [run.experiment().seed for run in found] == [1, 2]
    wait_for(lambda: all(run.state == "finished" for run in found), "two finished runs")


def test_dry_run_prints_the_script_and_creates_nothing(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    before = set(cluster.run("squeue", "-h", "-t", "all", "-o", "%i").split())
    script = tiltyard("train", "CartPole-v1", *SHORT, "--on", "cluster", "--dry-run").stdout
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=CartPole-v1/NNNN-new-run\n")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not runs.exists() and set(cluster.run("squeue", "-h", "-t", "all", "-o", "%i").split()) == before


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("    slurm: {partition: nowhere}\n", "invalid partition specified: nowhere"),
        ("    slurm: {account: x, extra: ['--nodelist=unknown']}\n", "Slurm refused the job"),
    ],
)
def test_job_refused_by_slurm_is_reported(
    tiltyard: Command, cluster: Cluster, runs: Path, lines: str, words: str
) -> None:
    site(lines)
    output = tiltyard("train", "CartPole-v1", *SHORT, "--on", "cluster", expect=1)
    run = find("last")
    assert words in output.stderr and str(run.folder / FOLDER / "script.sh") in output.stderr
    assert run.status()["state"] == "failed" and "refused" in run.status()["reason"]
    assert cluster.run("squeue", "-h", "-n", run.id) == ""


@pytest.mark.parametrize("kind", ["missing", "slow"])
def test_missing_or_slow_sbatch_is_reported(
    tiltyard: Command, cluster: Cluster, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A slow sbatch may submit a job and still run into the timeout; that job is cancelled."""
    tools = tmp_path / "bin"
    tools.mkdir()
    path = os.environ["PATH"]
    if kind == "slow":
        (tools / "sbatch").write_text(f'#!/bin/bash\nPATH={path}\nsbatch "$@" >/dev/null\nexec sleep 100\n')
        (tools / "sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{path}")
        monkeypatch.setattr("tiltyard.slurm.commands.TIMEOUT", 3.0)
    else:
        monkeypatch.setenv("PATH", str(tools))
    output = tiltyard("train", "CartPole-v1", *SHORT, "--on", "cluster", expect=1)
    run = find("last")
    assert ("sbatch not found" if kind == "missing" else "sbatch did not answer within 3 s") in output.stderr
    assert str(run.folder / FOLDER / "script.sh") in output.stderr
    assert run.status()["state"] == "failed"
    monkeypatch.setenv("PATH", path)
    wait_for(lambda: cluster.run("squeue", "-h", "-n", run.id) == "", "an empty queue")


def test_lost_job_shows_its_output(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    site("    slurm: {setup: ['echo this site is broken', 'exit 3']}\n")
    output = tiltyard("train", "CartPole-v1", *SHORT, "--on", "cluster", expect=1)
    run = find("last")
    job = run.status()["job"]["id"]
    assert f"is lost: job {job} ended: FAILED" in output.stderr and "this site is broken" in output.stderr
    assert [row["state"] for row in json.loads(tiltyard("ls", "--json").stdout)] == ["lost"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--detach"], "--detach is for jobs"),
        (["--on", "cluster", "--pdb"], "--pdb needs a terminal"),
        (["--on", "cluster", "--detach", "--expect", "return>=1"], "--expect waits for the end"),
        (["--on", "wide"], "profile wide requests several nodes, but engine.kind = serial uses one"),
    ],
)
def test_conflicting_arguments_are_refused(
    tiltyard: Command, cluster: Cluster, runs: Path, words: list[str], output: str
) -> None:
    site("  wide: {launcher: slurm, resources: {nodes: 2}}\n")
    assert output in tiltyard("train", "CartPole-v1", *SHORT, "engine.kind=serial", *words, expect=2).stderr
    assert not runs.exists()
