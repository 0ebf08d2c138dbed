"""A job that is cut short goes on where it was: time limit, requeue, preemption, a dead node, a forbidden requeue.

What counts is that nobody can tell afterwards: the same weights and metrics as a run that was never interrupted. The
env sleeps in jobs, so that a run takes as long as several of them on any machine; it learns the same without.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tiltyard as product
from tests.conftest import Command
from tests.engines.test_resume_equals import final
from tests.slurm.cluster import Cluster, needs_slurm, wait_for
from tests.slurm.conftest import SITE
from tiltyard.launch import FOLDER
from tiltyard.run import checkpoint
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.xdist_group("slurm-own")]
SLOW = """
import os
import time
from gymnasium.envs.classic_control import CartPoleEnv


class Slow(CartPoleEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)

    def step(self, action):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return super().step(action)
"""
SMALL = {
    "engine.kind": "serial",
    "engine.envs": 4,
    "algo.rollout": 16,
    "algo.minibatch": 64,
    "algo.epochs": 1,
    "save.env_steps": 512,
    "eval.at_end": "false",
    "track.tensorboard": "false",
}
STEPS = 8192
Start = Callable[..., Cluster]


def words(steps: int) -> list[str]:
    return [*(f"{name}={value}" for name, value in SMALL.items()), f"stop.env_steps={steps}"]


def profile(pause: float, **lines: str) -> None:
    more = "".join(f"    {name}: {value}\n" for name, value in lines.items())
    text = SITE.replace('    resources: {cpus: 1, time: "1:00:00"}\n', "") if "resources" in lines else SITE
    Path("tiltyard.yaml").write_text(f"{text}    environment: {{PAUSE: '{pause}'}}\n{more}")
    Path("slow.py").write_text(SLOW)


def submitted(tiltyard: Command, steps: int) -> tuple[Run, str]:
    tiltyard("train", "slow.py:Slow", *words(steps), "--on", "cluster", "--detach")
    run = find("last")
    return run, run.status()["job"]["id"]


def newest(run: Run) -> int:
    return max((each.env_steps for each in checkpoint.list_checkpoints(run)), default=0)


def running(run: Run, attempt: int = 1) -> None:
    """Wait until that attempt trains and has saved something new."""
    wait_for(lambda: run.status()["attempt"] >= attempt and run.state == "running", f"attempt {attempt}")
    reached = newest(run)
    wait_for(lambda: newest(run) > reached, f"a checkpoint of attempt {attempt}")


def is_as_if_nothing_had_happened(run: Run, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAUSE", raising=False)
    whole = product.train("slow.py:Slow", words(steps), live=False)
    assert run.state == "finished" and run.status()["progress"]["env_steps"] == steps
    (weights, records), (same, expected) = final(run), final(whole)
    assert records == expected
    assert all(weights[name].tobytes() == same[name].tobytes() for name in same)


def sentences(run: Run, kind: str) -> list[str]:
    return [event["sentence"] for event in read_events(run) if event["kind"] == kind]


def test_a_time_limit_is_nothing_to_worry_about(
    tiltyard: Command, own_cluster: Start, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four minutes on a clock that is ten times as fast; the run needs several times that."""
    cluster = own_cluster("--nodes", "1", "--speed", "10")
    profile(0.001, resources='{cpus: 1, time: "4:00"}')
    run, job = submitted(tiltyard, 4 * STEPS)
    said = tiltyard("logs", "-f", run.id)
    assert run.state == "finished", said.stderr
    requeued = sentences(run, "requeued")
    assert len(requeued) >= 3 and len(requeued) == cluster.restarts(job)
    assert requeued[2].startswith("the time limit is near: saved at env step ")
    assert "(3 of at most 100 times)" in requeued[2]
    logs = sorted(path.name for path in (run.folder / "logs").glob("attempt-*.log"))
    assert len(logs) == len(requeued) + 1
    is_as_if_nothing_had_happened(run, 4 * STEPS, monkeypatch)


def test_requeued_from_outside_and_killed_on_the_way(
    tiltyard: Command, cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(0.002)
    run, job = submitted(tiltyard, STEPS)
    running(run)
    cluster.ask("scontrol", "requeue", job)
    wait_for(lambda: cluster.state(job) == "PENDING", "a job that waits again")
    assert "queued" in tiltyard("show", run.id).stdout
    running(run, attempt=2)
    os.kill(run.status()["pid"], signal.SIGKILL)
    tiltyard("logs", "-f", run.id)
    assert cluster.restarts(job) == 1 and run.status()["attempt"] == 3
    assert any("the trainer was killed by SIGKILL" in sentence for sentence in sentences(run, "warning"))
    is_as_if_nothing_had_happened(run, STEPS, monkeypatch)


def test_preemption(tiltyard: Command, own_cluster: Start, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = own_cluster(
        "--nodes", "1", "--cpus", "1",
        conf="PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP\n",
    )  # fmt: skip
    profile(0.002)
    run, job = submitted(tiltyard, STEPS)
    running(run)
    urgent = cluster.ask("sbatch", "--parsable", "-p", "urgent", "-o", "/dev/null", "--wrap", "sleep 3")
    wait_for(lambda: cluster.state(urgent) == "COMPLETED", "the end of the urgent job")
    tiltyard("logs", "-f", run.id)
    assert cluster.restarts(job) == 1
    assert "stopped at env step" in sentences(run, "stopped")[0]
    is_as_if_nothing_had_happened(run, STEPS, monkeypatch)


def test_a_node_drops_dead(tiltyard: Command, own_cluster: Start, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = own_cluster("--nodes", "2", "--cpus", "1")
    profile(0.002)
    run, job = submitted(tiltyard, STEPS)
    running(run)
    node = cluster.ask("squeue", "-h", "-j", job, "-o", "%N")
    cluster.script("kill-node", node)
    assert run.state == "lost"  # by its folder
    tiltyard("logs", "-f", run.id)
    assert cluster.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%N") != node
    assert f"job {job} was restarted" in sentences(run, "recovered")[0]
    is_as_if_nothing_had_happened(run, STEPS, monkeypatch)


def test_where_requeue_is_forbidden_the_script_is_submitted_again(
    tiltyard: Command, cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(0.002, slurm="{extra: ['--no-requeue']}")
    run, job = submitted(tiltyard, STEPS)
    running(run)
    cluster.ask("scancel", "--signal=USR2", job)  # as at the time limit
    tiltyard("logs", "-f", run.id)
    again = run.status()["job"]["id"]
    assert int(again) > int(job) and run.status()["attempt"] == 2
    output = (run.folder / "logs" / f"job-{job}.out").read_text()
    assert f"job {job} may not be requeued; the same script is submitted again" in output
    assert not (run.folder / FOLDER / "submitted-again").exists()
    is_as_if_nothing_had_happened(run, STEPS, monkeypatch)
