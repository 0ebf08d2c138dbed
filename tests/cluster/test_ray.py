"""One Ray cluster over all nodes of a real Slurm job: start, loss of a node, loss of the head, missing nodes."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.rllib", reason="Ray RLlib is not installed: pip install 'tiltyard[ray]'")

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.conftest import Command
from tests.counts import only_when_long
from tests.engines.rllib.test_commands import without_ray
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find
from tiltyard.run.status import list_runs
from tiltyard.slurm import FOLDER

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("slurm")]
SMALL = ["algo.rollout=32", "algo.minibatch=64", "algo.epochs=1", "eval.every=0", "track.tensorboard=false"]
SITE = """
profiles:
  three:
    launcher: slurm
    resources: {{nodes: 3, cpus: 1, time: "1:00:00"}}
    slurm: {{wait: {wait}, python: {python}}}
    set: {{engine.kind: rllib, engine.runners: 3, engine.envs: 6}}
  both:
    launcher: slurm
    resources: {{nodes: 1, cpus: 1, time: "1:00:00"}}
    slurm: {{samplers: {{nodes: 2, cpus: 1}}}}
    set: {{engine.kind: rllib, engine.envs: 4}}
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    cluster = Cluster("--nodes", "3", "--cpus", "4")
    yield cluster
    cluster.close()


@pytest.fixture
def nodes(three: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("SLURM_CONF", str(three.conf))
    monkeypatch.setenv("TILTYARD_HEARTBEAT", "1")
    site()
    return three


def site(*, wait: float = 200, python: str = sys.executable) -> None:
    Path("tiltyard.yaml").write_text(SITE.format(wait=wait, python=python))


def sentences(run: Run) -> str:
    return "\n".join(event["sentence"] for event in read_events(run))


def processes(*words: str) -> list[int]:
    """Pids of the processes with all these words in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words) and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def folders_of(run: Run) -> set[str]:
    """Temporary folders of the Ray of a run, from the command lines of its processes."""
    found = set()
    for pid in processes("ray.scripts.scripts", "start", "--temp-dir="):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        if f"{run.folder}/" in environment:
            found |= {word.partition("=")[2] for word in words if word.startswith("--temp-dir=")}
    return found


def over(cluster: Cluster, run: Run) -> None:
    job = run.status()["job"]["id"]
    wait_for(lambda: cluster.state(job).split()[0] not in ("PENDING", "RUNNING", "COMPLETING"), f"the end of job {job}")


def test_three_nodes_train_together_and_ray_is_restarted_on_one(
    tiltyard: Command, nodes: Cluster, runs: Path, tmp_path: Path
) -> None:
    words = [*SMALL, "stop.env_steps=1e9", "save.updates=5"]
    tiltyard("train", "CartPole-v1", *words, "--on", "three", "--detach")
    run = find("last")
    wait_for(lambda: list(run.checkpoints.glob("0*")), "a checkpoint", 400)
    log = (run.folder / "logs" / "attempt-001.log").read_text()
    assert "3 runners with 2 envs each on node1 (1), node2 (1), node3 (1)" in log, log
    assert "Ray on the job's 3 nodes, 3 CPUs" in log

    # The token is only in its file.
    (place,) = run.folder.glob(f"{FOLDER}/ray-*")
    token = (place / "token").read_text()
    assert stat.S_IMODE((place / "token").stat().st_mode) == 0o600 and stat.S_IMODE(place.stat().st_mode) == 0o700
    assert processes(token) == []
    holding = [path for path in run.folder.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert holding == [place / "token"]

    kept = folders_of(run)
    assert len(kept) == 3
    (raylet,) = [pid for pid in processes("raylet/raylet", "node2") if _of(pid, run)][:1]
    os.kill(raylet, signal.SIGKILL)
    wait_for(lambda: "Ray died on node2; restarting it (1)" in sentences(run), "word of it", 200)
    steps = run.status()["progress"]["env_steps"]
    wait_for(lambda: run.status()["progress"]["env_steps"] > steps + 2000, "training that goes on", 200)
    assert run.status()["attempt"] == 1

    tiltyard("stop", run.id)
    over(nodes, run)
    assert run.status()["reason"] == "received SIGUSR2"
    assert max(int(path.name) for path in run.checkpoints.glob("0*")) == run.status()["progress"]["env_steps"]
    wait_for(lambda: not any(Path(each).parent.exists() for each in kept), "empty folders in /tmp", 100)
    assert not (place / "token").exists()
    assert run.state == "stopped"
    assert "mean" in without_ray(tmp_path, "eval", str(run.folder), "--episodes", "2", "--json")


def _of(pid: int, run: Run) -> bool:
    return f"{run.folder}/" in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


def test_cancelled_job_leaves_no_process_or_folder(tiltyard: Command, nodes: Cluster, runs: Path) -> None:
    """The SIGTERM of Slurm also ends the Ray processes. The job must not be requeued, and no process may be left."""
    only_when_long("a minute")
    words = [*SMALL, "stop.env_steps=1e9", "save.updates=5"]
    tiltyard("train", "CartPole-v1", *words, "--on", "three", "--detach")
    run = find("last")
    job = run.status()["job"]["id"]
    wait_for(lambda: list(run.checkpoints.glob("0*")), "a checkpoint", 400)
    kept = folders_of(run)
    nodes.run("scancel", job)
    over(nodes, run)
    assert nodes.state(job) == "CANCELLED" and nodes.restarts(job) == 0
    wait_for(lambda: run.state in ("stopped", "lost"), "an end")
    assert run.status()["job"]["id"] == job and not (run.folder / FOLDER / "submitted-again").exists()
    wait_for(lambda: not [pid for pid in processes("ray") if _of(pid, run)], "the end of Ray's processes")
    assert nodes.run("squeue", "-h") == ""
    tiltyard("resume", run.id, "stop.env_steps=2000")  # removes the leftovers of a killed agent
    assert run.state == "finished"
    over(nodes, run)
    assert not any(Path(each).parent.exists() for each in kept)


@pytest.mark.parametrize("lost", ["head", "requeued"])
def test_job_is_requeued_if_all_of_ray_is_lost(tiltyard: Command, nodes: Cluster, runs: Path, lost: str) -> None:
    only_when_long("two minutes")
    words = [*SMALL, "stop.env_steps=1e9", "save.updates=5"]
    tiltyard("train", "CartPole-v1", *words, "--on", "three", "--detach")
    run = find("last")
    job = run.status()["job"]["id"]
    wait_for(lambda: list(run.checkpoints.glob("0*")), "a checkpoint", 400)
    if lost == "head":
        (head,) = [pid for pid in processes("gcs_server") if _of(pid, run)][:1]
        os.kill(head, signal.SIGKILL)
        wait_for(lambda: "Ray's head on node1 exited" in sentences(run), "word of it", 200)
    else:
        nodes.run("scontrol", "requeue", job)
    saved = max(int(path.name) for path in run.checkpoints.glob("0*"))
    wait_for(lambda: nodes.restarts(job) == 1, "a restart", 200)
    wait_for(lambda: run.status()["attempt"] == 2 and run.state == "running", "the second attempt", 400)
    wait_for(lambda: run.status()["progress"]["env_steps"] > saved, "progress beyond the first", 200)
    tiltyard("stop", run.id)
    over(nodes, run)


def test_one_learner_and_two_samplers_train_together(
    tiltyard: Command, nodes: Cluster, runs: Path, tmp_path: Path
) -> None:
    only_when_long("a minute")
    tiltyard("train", "CartPole-v1", *SMALL, "stop.env_steps=1000", "--on", "both")
    run = find("last")
    log = (run.folder / "logs" / "attempt-001.log").read_text()
    assert "2 runners with 2 envs each on node2 (1), node3 (1), a learner in this process" in log, log
    assert run.state == "finished"
    assert "mean" in without_ray(tmp_path, "eval", str(run.folder), "--episodes", "2", "--json")
    over(nodes, run)


def test_two_jobs_have_separate_ray_clusters(tiltyard: Command, nodes: Cluster, runs: Path) -> None:
    """On the same nodes and for the same user, each job has its own Ray, port and token."""
    only_when_long("two minutes")
    for seed in ("1", "2"):
        tiltyard("train", "CartPole-v1", *SMALL, "stop.env_steps=2000", f"seed={seed}", "--on", "three", "--detach")
    both = [Run(Path(row["folder"])) for row in list_runs(runs)]
    for run in both:
        wait_for(lambda run=run: run.state == "finished", f"the end of {run.id}", 800)  # type: ignore[misc]
        log = (run.folder / "logs" / "attempt-001.log").read_text()
        assert "on node1 (1), node2 (1), node3 (1)" in log and "Ray on the job's 3 nodes, 3 CPUs" in log, log
    addresses = {next(run.folder.glob(f"{FOLDER}/ray-*/head.json")).read_text() for run in both}
    assert len(addresses) == 2
    for run in both:
        over(nodes, run)


def wrapper(folder: Path, on_node2: str) -> str:
    """Write a Python wrapper that first runs `on_node2` on node2, and return its path."""
    path = folder / "python.sh"
    path.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" != node2 ] || {on_node2}\nexec {sys.executable} "$@"\n')
    path.chmod(0o700)
    return str(path)


def _hangs(folder: Path) -> str:
    return "sleep 1000"


def _has_another_ray(folder: Path) -> str:
    info = folder / "other" / "ray-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 9.9.9\n")
    return f"export PYTHONPATH={info.parent}"


@pytest.mark.parametrize(
    ("what", "wait", "output"),
    [
        (_hangs, 40, "node2 did not join the job's Ray within 40 s"),
        (_has_another_ray, 200, "node2 cannot join Ray: versions differ"),
    ],
)
def test_node_that_does_not_join_is_named(
    tiltyard: Command, nodes: Cluster, runs: Path, tmp_path: Path, what: Callable[[Path], str], wait: float, output: str
) -> None:
    if what is _hangs:
        only_when_long("a minute")
    site(wait=wait, python=wrapper(tmp_path, what(tmp_path)))
    done = tiltyard("train", "CartPole-v1", *SMALL, "stop.env_steps=1000", "--on", "three", expect=1)
    assert output in done.stderr
    run = find("last")
    assert run.state == "failed" and output in run.status()["reason"]
    nodes.run("scancel", run.status()["job"]["id"])
    over(nodes, run)
