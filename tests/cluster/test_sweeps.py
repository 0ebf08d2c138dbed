"""Sweeps on a real Slurm cluster without a process outside of jobs: arrays, retries, searches, killed ticks.

Most trials are small programs instead of trainings. Each records its start and end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.cluster.conftest import SITE
from tests.cluster.test_never_lost import SMALL, STEPS, finish, profile, running
from tests.conftest import Command, in_own_process
from tests.counts import only_when_long
from tests.sweep.talker import most_at_once, output, write_plan
from tiltyard.config.yaml import dump_yaml
from tiltyard.processes import proc
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.sweep.backends import jobs
from tiltyard.sweep.folder import Sweep, find_sweep
from tiltyard.sweep.report import summarize

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm-sweeps")]
Start = Callable[..., Cluster]


@pytest.fixture
def cluster(cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """The shared cluster. Jobs of a failed test are cancelled, because they would delay the next one."""
    yield cluster
    for file in tmp_path.glob("**/slurm/array-*/number"):
        cluster.run("scancel", "--quiet", file.read_text().strip())


def over(sweep: Sweep) -> bool:
    return summarize(sweep).state not in ("running", "stopped")


def arrays(sweep: Sweep) -> list[str]:
    return sorted(path.name for path in (sweep.folder / "slurm").glob("array-*"))


def number(sweep: Sweep, array: int = 1) -> str:
    return (sweep.folder / "slurm" / f"array-{array:04d}" / "number").read_text().strip()


def events(sweep: Sweep) -> str:
    return "\n".join(event["sentence"] for event in atomic.read_lines(sweep.folder / "events.jsonl")[0])


def test_grid_is_one_throttled_array_and_failures_are_retried(
    tiltyard: Command, cluster: Cluster, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / 'it\'s 100% "odd"; $(touch never)'
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TILTYARD_RUNS", str(folder / "my runs"))
    odd = "$(touch never); 'a' \"b\" $HOME `id`\nc d"
    Path("tiltyard.yaml").write_text(SITE + f"    environment: {{ODD_TOKEN: {json.dumps(odd)}}}\n")
    space = {"x": [1, 2, 3], "text": [odd, "--"]}
    write_plan(space={**space, "sleep": [0.3]}, max_parallel=2, bad="2", environment={"ODD": odd})
    script = tiltyard("sweep", "start", "plan.yaml", "--on", "cluster", "--dry-run").stdout
    assert "\n#SBATCH --array=0-5%2\n" in script and not Path("my runs").exists()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0

    Path("wait").touch()
    out = tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    job = number(sweep)
    assert f"6 trials (1, 2, 3, 4, 5, 6) were submitted as job {job}, at most 2 at once" in out.stderr
    assert "running (jobs of profile cluster)" in out.stdout and "sweep watch" in out.stdout
    wait_for(lambda: len(output("began")) == 2, "two programs")
    states = Counter(row["state"] for row in json.loads(tiltyard("ls", "--json").stdout))
    assert states == {"running": 2, "queued": 4} == summarize(sweep).counts
    refused = tiltyard("rm", Run(sweep.place(6)).id, "--yes", expect=2).stderr
    assert f"has an active Slurm job: job {job}_5 is pending: JobArrayTaskLimit" in refused
    Path("wait").unlink()
    watched = tiltyard("sweep", "watch", "toy", "--every", "0.5", expect=1).stdout
    assert "trial 3 failed: exit code 1: x is bad today" in watched and "trial 4 failed" in watched
    assert summarize(sweep).counts == {"finished": 4, "failed": 2}
    assert most_at_once() == 2 and arrays(sweep) == ["array-0001"]
    assert Counter((line["given"]["x"], line["given"]["text"]) for line in output("began")) == Counter(
        (x, text) for x in "123" for text in (odd, "--")
    )
    assert {(line["odd"], line["hidden"]) for line in output("began")} == {(odd, odd)}
    assert "ODD_TOKEN" not in (sweep.folder / "slurm" / "array-0001" / "script.sh").read_text()
    assert list(tmp_path.rglob("never*")) == []
    tiltyard("sweep", "status", "toy", expect=1)

    # Only the two failed trials are retried; then trials are added.
    Path("bad").write_text("")
    before = len(output("began"))
    tiltyard("sweep", "retry", "--failed", "toy")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert [line["given"]["x"] for line in output("began")[before:]] == ["2", "2"]
    tiltyard("sweep", "status", "toy")
    tiltyard("sweep", "extend", "toy", "--seeds", "1")
    tiltyard("sweep", "watch", "toy", "--every", "0.5")
    assert summarize(sweep).counts == {"finished": 12}
    assert len(output("done")) == 12 and most_at_once() == 2


def test_failed_trials_are_retried_by_their_task(cluster: Cluster, tiltyard: Command, runs: Path) -> None:
    write_plan(space={"x": [1, 2]}, bad="2", max_parallel=2, retries=2, back_off=0.5)
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert summarize(sweep).counts == {"finished": 1, "failed": 1}
    tries = [line for line in output("began") if line["given"]["x"] == "2"]
    assert len(tries) == 3 == len({line["job"] for line in tries}), "each time in a new job"
    assert arrays(sweep) == ["array-0001", "array-0002", "array-0003"]


def test_broken_site_is_reported_and_trials_can_be_retried(cluster: Cluster, tiltyard: Command, runs: Path) -> None:
    Path("tiltyard.yaml").write_text(SITE + "    slurm: {setup: ['echo this site is broken', 'exit 3']}\n")
    write_plan(space={"x": [1, 2]}, max_parallel=2)
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    wait_for(lambda: summarize(sweep).state != "running", "the end of the jobs")
    assert summarize(sweep).counts == {"lost": 2}
    printed = tiltyard("sweep", "start", "toy", expect=1).stdout
    assert f"trial 2 failed: job {number(sweep)}_1 ended: FAILED: this site is broken" in printed
    Path("tiltyard.yaml").write_text(SITE)
    tiltyard("sweep", "retry", "--failed")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert summarize(sweep).counts == {"finished": 2}
    Path("tiltyard.yaml").write_text(SITE + "    slurm: {partition: nowhere}\n")
    assert "invalid partition" in tiltyard("sweep", "extend", "--seeds", "1", expect=1).stderr
    assert summarize(sweep).counts == {"finished": 2, "created": 2}
    Path("tiltyard.yaml").write_text(SITE)
    tiltyard("sweep", "start", "toy")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert summarize(sweep).counts == {"finished": 4} == Counter(finished=len(output("done")))


def test_sweep_is_stopped_and_resumed(cluster: Cluster, tiltyard: Command, runs: Path) -> None:
    write_plan(space={"x": [1, 2, 3, 4]}, max_parallel=2)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    wait_for(lambda: len(output("began")) == 2, "two programs")
    tiltyard("sweep", "stop")
    assert "was removed from the queue" in Run(sweep.place(4)).status()["reason"]
    assert summarize(sweep).counts == {"stopped": 4} and summarize(sweep).state == "stopped"
    assert cluster.run("squeue", "-h", "-j", number(sweep)) == ""
    Path("wait").unlink()
    tiltyard("sweep", "start", "toy")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert summarize(sweep).counts == {"finished": 4} and len(output("done")) == 4


def test_trials_are_split_into_arrays_of_the_allowed_size(own_cluster: Start, tiltyard: Command, runs: Path) -> None:
    cluster = own_cluster("--nodes", "1", "--cpus", "4", conf="MaxArraySize=4\n")
    write_plan(space={"x": list(range(10)), "sleep": [0.2]}, max_parallel=2)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    assert arrays(sweep) == ["array-0001", "array-0002", "array-0003"]
    wait_for(lambda: len(output("began")) == 2, "two programs")
    waiting = cluster.run("squeue", "-h", "-r", "-j", number(sweep, 3), "-o", "%r").split()
    assert waiting == ["Dependency"] * 2
    Path("wait").unlink()
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert summarize(sweep).counts == {"finished": 10} and len(output("done")) == 10
    assert most_at_once() == 2


def outside_of_jobs(sweep: Sweep) -> list[str]:
    """Command lines of the sweep's processes outside of jobs. The sbatch of a task has only TILTYARD_JOB."""
    own = {"SLURM_JOB_ID", "TILTYARD_JOB"}
    return [
        each.command
        for each in proc.own_processes()
        if str(sweep.folder) in each.command
        and (variables := proc.environment(each.pid))  # empty if it has ended
        and not own & variables.keys()
    ]


def test_search_continues_without_a_controller_process(cluster: Cluster, runs: Path) -> None:
    space = {"x": {"range": [0.0, 1.0]}, "sleep": [0.2]}
    write_plan(space=space, search="tpe", trials=6, max_parallel=2)
    in_own_process("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    assert len(sweep.trials()) == 2, "the next trials are chosen when these are over"
    found = []
    wait_for(lambda: found.extend(outside_of_jobs(sweep)) or len(output("done")) == 6, "six trials")
    wait_for(lambda: over(sweep), "the end of the last job")
    assert found == []
    assert summarize(sweep).counts == {"finished": 6} and len(output("done")) == 6
    assert len({line["given"]["x"] for line in output("done")}) == 6
    assert most_at_once() <= 2, "a busy machine may run them one after another"


# The first two ticks that submit something are killed: one before sbatch runs, one after.
KILLER = """#!/bin/bash
[ -n "$TILTYARD_JOB" ] || exec REAL "$@"
mkdir killed-before 2>/dev/null && { kill -9 $PPID; exit 1; }
mkdir killed-after 2>/dev/null && { REAL "$@"; kill -9 $PPID; exit 1; }
exec REAL "$@"
"""


def test_killed_ticks_lose_nothing(
    cluster: Cluster, tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(KILLER.replace("REAL", shutil.which("sbatch") or ""))
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    write_plan(space={"x": {"range": [0.0, 1.0]}, "sleep": [0.2]}, search="tpe", trials=8, max_parallel=3)
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    wait_for(lambda: summarize(sweep).state != "running", "no job at work")
    assert Path("killed-before").exists() and Path("killed-after").exists()
    tiltyard("sweep", "start", "toy")  # nothing is left to do, unless all ticks were killed
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert summarize(sweep).counts == {"finished": 8}
    assert Counter(line["trial"] for line in output("done")) == Counter({sweep.place(n).name: 1 for n in range(1, 9)})
    assert Counter(line["trial"] for line in output("began")) == Counter(line["trial"] for line in output("done"))
    forgotten = [name for name in arrays(sweep) if (sweep.folder / "slurm" / name / "forgotten").exists()]
    assert len(forgotten) == 1, "the array that was never submitted; the other was found by its name"


def test_concurrent_ticks_submit_each_trial_once(cluster: Cluster, tiltyard: Command, runs: Path) -> None:
    write_plan(space={"x": [1, 2, 3]}, max_parallel=3)
    from tiltyard.sweep import preflight

    sweep = preflight.begin(preflight.prepare("plan.yaml", profile="cluster"))
    command = [sys.executable, "-m", "tiltyard", "sweep", "start", str(sweep.folder)]
    with Lock.acquire(Run(sweep.folder)):
        children = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(3)]
        with pytest.raises(subprocess.TimeoutExpired):
            children[0].wait(3)
    assert [child.wait(100) for child in children] == [0, 0, 0]
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert arrays(sweep) == ["array-0001"] and len(output("began")) == 3


# Records metrics like a training: `x` per step, five times; all but the best then wait for SIGTERM.
LEARNER = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
x = int(sys.argv[1].split("=")[1])
with open(os.environ["TILTYARD_TRIAL"] + "/metrics.jsonl", "a", buffering=1) as file:
    for step in range(1, 1000):
        if step <= 5:
            file.write(json.dumps({"env_steps": 10 * step, "metrics": {"eval/return": x * step}}) + "\\n")
        elif x == 5:
            break
        time.sleep(0.3)
"""


def test_worse_trials_are_stopped_early(
    cluster: Cluster, tiltyard: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "EARLY_STOP_SECONDS", 1.0)
    write_plan(space={"x": [5, 1, 2]}, max_parallel=3, stop={"rule": "asha", "after": 30})
    Path("program.py").write_text(LEARNER)
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert {row.trial.settings["x"]: row.state for row in summarize(sweep).rows} == {
        5: "finished",
        1: "ended",
        2: "ended",
    }
    assert all("env steps" in row.reason for row in summarize(sweep).rows if row.state == "ended")


# Runs until it gets SIGTERM; the next attempt runs until `wait` is gone.
INTERRUPTED = """
import os, pathlib, signal, sys, time
place = pathlib.Path(os.environ["TILTYARD_TRIAL"])
def end(*_):
    with open(place / "metrics.jsonl", "a") as file:
        file.write('{"env_steps": 5, "metrics": {"eval/return": 1.0}}\\n')
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
(place / "ready").touch()
while not (place / "metrics.jsonl").exists() or pathlib.Path("wait").exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("way", ["requeued", "submitted again"])
def test_only_the_task_near_its_limit_is_requeued(way: str, cluster: Cluster, tiltyard: Command, runs: Path) -> None:
    lines = "    slurm: {extra: ['--no-requeue']}\n" if way == "submitted again" else ""
    Path("tiltyard.yaml").write_text(SITE + lines)
    write_plan(space={"x": [1, 2]}, max_parallel=2)
    Path("program.py").write_text(INTERRUPTED)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("toy")
    both = [Run(sweep.place(1)), Run(sweep.place(2))]
    wait_for(lambda: all((run.folder / "ready").exists() for run in both), "two programs")
    job = f"{number(sweep)}_1"  # the last task: its plain job id equals that of the array
    cluster.run("scancel", "--signal=USR2", job)  # as before the time limit
    wait_for(lambda: both[1].status()["attempt"] == 2, "the second attempt")
    job_id = both[1].status()["job"]["id"]
    assert (job_id == job) == (way == "requeued") and job_id.endswith("_1")
    assert "running" in tiltyard("ls", "--json").stdout and both[0].status()["attempt"] == 1, (
        "the other trial was not disturbed"
    )
    Path("wait").unlink()
    cluster.run("scancel", "--signal=USR2", f"{number(sweep)}_0")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert [row.attempt for row in summarize(sweep).rows] == [2, 2]
    assert arrays(sweep) == ["array-0001"] and summarize(sweep).counts == {"finished": 2}


@pytest.mark.parametrize("way", ["requeued", "submitted again"])
def test_interrupted_training_continues(way: str, cluster: Cluster, tiltyard: Command, runs: Path) -> None:
    only_when_long("a minute")
    profile(**({"slurm": "{extra: ['--no-requeue']}"} if way == "submitted again" else {}))
    tree: dict[str, Any] = {"env": "slow.py:Slow", "name": "slow", "stop": {"env_steps": STEPS}}
    for name, value in SMALL.items():
        part, _, key = name.partition(".")
        tree.setdefault(part, {})[key] = False if value == "false" else value
    space = {"algo.lr": [1e-3, 1e-4, 1e-5]}
    plan = {"experiment": tree, "space": space, "metric": "train/return", "max_parallel": 2}
    Path("plan.yaml").write_text(dump_yaml(plan))
    tiltyard("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep = find_sweep("slow")
    first, job = Run(sweep.place(1)), f"{number(sweep)}_0"
    running(first)
    running(Run(sweep.place(2)))
    assert first.status()["job"]["id"] == job
    last = Run(sweep.place(3))
    assert f"job {number(sweep)}_2 is pending: JobArrayTaskLimit" in tiltyard("show", last.id).stdout
    tiltyard("stop", last.id)
    assert (last.state, cluster.state(f"{number(sweep)}_2")) == ("stopped", "CANCELLED")
    if way == "requeued":
        cluster.run("scontrol", "requeue", job)
        wait_for(lambda: cluster.state(job) == "PENDING", "a requeued task")
        assert "queued" in tiltyard("show", str(first.folder)).stdout
        running(first, attempt=2)
        os.kill(first.status()["pid"], signal.SIGKILL)
        running(first, attempt=3)
    else:
        cluster.run("scancel", "--signal=USR2", job)  # as before the time limit
        running(first, attempt=2)
        assert first.status()["job"]["id"].endswith("_0") and first.status()["job"]["id"] != job
    assert Run(sweep.place(2)).status()["attempt"] == 1, "no other trial was disturbed"
    finish(tiltyard, first)
    wait_for(lambda: summarize(sweep).state != "running", "the end of the jobs")
    assert summarize(sweep).counts == {"finished": 2, "stopped": 1}, "stopped trials stay stopped"
    tiltyard("sweep", "start", "slow")
    wait_for(lambda: over(sweep), "the end of the sweep")
    assert [row.attempt for row in summarize(sweep).rows] == [3 if way == "requeued" else 2, 1, 1]
    assert {row.env_steps for row in summarize(sweep).rows} == {STEPS}
    assert arrays(sweep) == ["array-0001", "array-0002"]
