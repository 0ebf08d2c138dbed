"""An interrupted job continues from its last save: time limit, requeue, preemption, dead node, forbidden requeue.

The weights and metrics must equal those of a run without interruptions. The env is slow while the file `brake` exists,
so that a run lasts until all interruptions are over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tiltyard as product
from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.cluster.conftest import SITE
from tests.conftest import Command
from tests.counts import count, only_when_long
from tests.engines.test_resume_equals import final
from tiltyard.run import checkpoint
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find
from tiltyard.slurm import FOLDER

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.xdist_group("slurm-own")]
SLOW = """
import time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

BRAKE = Path(PATH)


class Slow(CartPoleEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)

    def step(self, action):
        if BRAKE.exists():
            time.sleep(float(BRAKE.read_text()))
        return super().step(action)
"""
SMALL = {
    "engine.kind": "serial",
    "engine.envs": 4,
    "algo.rollout": 16,
    "algo.minibatch": 64,
    "algo.epochs": 1,
    "save.env_steps": 128,
    "eval.at_end": "false",
    "track.tensorboard": "false",
}
STEPS = 4096  # minutes with the brake, a second without
BRAKE = Path("brake")
Start = Callable[..., Cluster]


WORDS = [*(f"{name}={value}" for name, value in SMALL.items()), f"stop.env_steps={STEPS}"]


def profile(brake: float = 0.02, **lines: str) -> None:
    more = "".join(f"    {name}: {value}\n" for name, value in lines.items())
    text = SITE.replace('    resources: {cpus: 1, time: "1:00:00"}\n', "") if "resources" in lines else SITE
    Path("tiltyard.yaml").write_text(text + more)
    Path("slow.py").write_text(SLOW.replace("PATH", repr(str(BRAKE.absolute()))))
    BRAKE.write_text(str(brake))


def submitted(tiltyard: Command) -> tuple[Run, str]:
    tiltyard("train", "slow.py:Slow", *WORDS, "--on", "cluster", "--detach")
    run = find("last")
    return run, run.status()["job"]["id"]


def newest(run: Run) -> int:
    return max((each.env_steps for each in checkpoint.list_checkpoints(run)), default=0)


def running(run: Run, attempt: int = 1) -> None:
    """Wait until `attempt` is running and has saved a new checkpoint."""
    wait_for(lambda: run.status()["attempt"] >= attempt and run.state == "running", f"attempt {attempt}")
    reached = newest(run)
    wait_for(lambda: newest(run) > reached, f"a checkpoint of attempt {attempt}")


def finish(tiltyard: Command, run: Run) -> None:
    BRAKE.unlink()
    printed = tiltyard("logs", "-f", run.id)
    assert run.state == "finished", printed.stderr


def equals_an_uninterrupted_run(run: Run) -> None:
    whole = product.train("slow.py:Slow", WORDS, live=False)
    assert run.status()["progress"]["env_steps"] == STEPS
    (weights, records), (same, expected) = final(run), final(whole)
    assert records == expected
    assert all(weights[name].tobytes() == same[name].tobytes() for name in same)


def sentences(run: Run, kind: str) -> list[str]:
    return [event["sentence"] for event in read_events(run) if event["kind"] == kind]


def test_run_continues_after_time_limits(tiltyard: Command, own_cluster: Start, runs: Path) -> None:
    """The limit is 5 min on a clock that is 10 times as fast, and the run needs several times as long."""
    cluster = own_cluster("--nodes", "1", "--speed", "10")
    profile(resources='{cpus: 1, time: "5:00"}')
    run, job = submitted(tiltyard)
    wanted = count(3)
    wait_for(lambda: len(sentences(run, "requeued")) >= wanted, f"{wanted} requeues", 290)
    finish(tiltyard, run)
    requeued = sentences(run, "requeued")
    assert len(requeued) >= wanted and len(requeued) == cluster.restarts(job)
    assert requeued[wanted - 1].startswith("the time limit is near: saved at env step ")
    assert f"(requeue {wanted} of at most 100)" in requeued[wanted - 1]
    logs = sorted(path.name for path in (run.folder / "logs").glob("attempt-*.log"))
    assert len(logs) == len(requeued) + 1
    equals_an_uninterrupted_run(run)


def test_run_continues_after_the_time_limit_interrupts_a_save(
    tiltyard: Command, own_cluster: Start, runs: Path
) -> None:
    """First an update takes longer than the remaining time, then the job is cancelled while it saves."""
    only_when_long("a minute")
    cluster = own_cluster("--nodes", "1", "--speed", "10", conf="KillWait=100\n")
    profile(1.0, resources='{cpus: 1, time: "5:00"}')  # 60 s per update, 30 s per job
    run, job = submitted(tiltyard)
    wait_for(lambda: cluster.state(job) == "COMPLETING", "the time limit")
    BRAKE.write_text("0.02")
    wait_for(lambda: cluster.restarts(job) == 1, "a requeue")
    assert "ended while saving near the time limit" in " ".join(sentences(run, "stopped"))
    running(run, attempt=2)
    before = cluster.restarts(job)
    cluster.run("scancel", "--signal=USR2", job)
    cluster.run("scancel", job)
    wait_for(lambda: cluster.state(job) == "CANCELLED", "the end of the job")
    assert (run.state, cluster.restarts(job)) == ("stopped", before)
    tiltyard("resume", run.id, "--detach")
    finish(tiltyard, run)
    equals_an_uninterrupted_run(run)


@pytest.mark.xdist_group("slurm")
def test_run_continues_after_a_requeue_and_a_kill(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    profile()
    run, job = submitted(tiltyard)
    running(run)
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: cluster.state(job) == "PENDING", "a requeued job")
    assert "queued" in tiltyard("show", run.id).stdout
    running(run, attempt=2)
    os.kill(run.status()["pid"], signal.SIGKILL)
    finish(tiltyard, run)
    assert cluster.restarts(job) == 1 and run.status()["attempt"] == 3
    assert any("the trainer was killed by SIGKILL" in sentence for sentence in sentences(run, "warning"))
    equals_an_uninterrupted_run(run)


def test_run_continues_after_preemption(tiltyard: Command, own_cluster: Start, runs: Path) -> None:
    cluster = own_cluster(
        "--nodes", "1", "--cpus", "1",
        conf="PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP\nKillWait=10\n",
    )  # fmt: skip
    profile()
    run, job = submitted(tiltyard)
    running(run)
    urgent = cluster.run("sbatch", "--parsable", "-p", "urgent", "-o", "/dev/null", "--wrap", "sleep 3")
    wait_for(lambda: cluster.state(urgent) == "COMPLETED", "the end of the urgent job")
    finish(tiltyard, run)
    assert cluster.restarts(job) == 1
    assert "stopped at env step" in sentences(run, "stopped")[0]
    equals_an_uninterrupted_run(run)


def test_run_continues_after_a_node_failure(tiltyard: Command, own_cluster: Start, runs: Path) -> None:
    only_when_long("a minute")
    cluster = own_cluster("--nodes", "2", "--cpus", "1", conf="SlurmdTimeout=4\n")
    profile()
    run, job = submitted(tiltyard)
    running(run)
    node = cluster.run("squeue", "-h", "-j", job, "-o", "%N")
    cluster.script("kill-node", node)
    assert run.state == "lost"  # according to its folder
    wait_for(lambda: cluster.restarts(job) == 1, "Slurm's notice")
    finish(tiltyard, run)
    assert cluster.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%N") != node
    assert f"job {job} was restarted" in sentences(run, "recovered")[0]
    equals_an_uninterrupted_run(run)


@pytest.mark.xdist_group("slurm")
def test_script_is_resubmitted_where_requeue_is_forbidden(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    profile(slurm="{extra: ['--no-requeue']}")
    run, job = submitted(tiltyard)
    running(run)
    cluster.run("scancel", "--signal=USR2", job)  # as before the time limit
    finish(tiltyard, run)
    again = run.status()["job"]["id"]
    assert int(again) > int(job) and run.status()["attempt"] == 2
    output = (run.folder / "logs" / f"job-{job}.out").read_text()
    assert f"job {job} cannot be requeued; submitting the same script again" in output
    assert not (run.folder / FOLDER / "submitted-again").exists()
    equals_an_uninterrupted_run(run)
