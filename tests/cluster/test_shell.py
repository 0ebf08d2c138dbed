"""`tiltyard shell` and `tiltyard top` on the nodes of a real Slurm cluster, and `top` of a local run."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.conftest import Command, in_own_process
from tiltyard import api
from tiltyard.cli.nodes import drawn
from tiltyard.run.folder import find
from tiltyard.run.status import write_status
from tiltyard.slurm import usage
from tiltyard.training import preflight

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm")]
LONG = ["CartPole-v1", "engine.envs=4", "algo.rollout=64", "eval.at_end=false", "stop.env_steps=1e9"]
SITE = """
profiles:
  cluster:
    launcher: slurm
    resources: {cpus: 1, time: "0:20:00"}
    environment: {PLAIN: "a 'b' $(c)", MY_API_KEY: hidden}
    set: {engine.kind: serial}
    slurm:
      setup: ["echo loading", "export FROM_SETUP=1", "greet() { echo hello $1; }"]
"""


@pytest.fixture
def site(cluster: Cluster) -> Cluster:
    Path("tiltyard.yaml").write_text(SITE)
    return cluster


@pytest.fixture
def job(tiltyard: Command, site: Cluster) -> Iterator[str]:
    """Job id of a run that trains until it is stopped."""
    number = json.loads(tiltyard("train", *LONG, "--on", "cluster", "--detach", "--json").stdout)["job"]
    wait_for(lambda: find("last").state == "running", "the training")
    yield number
    site.run("scancel", "--full", number)
    wait_for(lambda: site.state(number) not in ("RUNNING", "COMPLETING"), "the job's end")


def test_command_runs_with_the_setup_of_its_profile(site: Cluster) -> None:
    line = 'echo "$SLURMD_NODENAME|$PLAIN|$MY_API_KEY|$FROM_SETUP|$TILTYARD_SET_UP|$1"; echo "$SLURM_CPUS_PER_TASK"; exit 7'
    output = in_own_process(
        "shell", "--on", "cluster", "--cpus", "2", "--", "bash", "-c", line, "x", "--y 'z' $(w)", expect=7
    )
    assert output.stdout.splitlines() == ["node1|a 'b' $(c)|hidden|1||--y 'z' $(w)", "2"]
    assert "loading" in output.stderr and "hidden" not in output.stderr
    words = ["squeue", "-h", "-t", "R", "-o", "%l"]
    output = in_own_process("shell", "--on", "cluster", "--time", "0:10:00", "--", *words)
    assert output.stdout == "10:00\n"
    assert site.run("squeue", "-h", "-t", "R") == ""


def test_wrong_arguments_are_refused(tiltyard: Command, site: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a RUN or --on PROFILE" in tiltyard("shell", "--", "true", expect=2).stderr
    assert (
        "--cpus 'two': must be a whole number"
        in tiltyard("shell", "--on", "cluster", "--cpus", "two", "--", "true", expect=2).stderr
    )
    output = in_own_process("shell", "--on", "cluster", expect=2, given="")
    assert "a shell needs a terminal" in output.stderr
    monkeypatch.setenv("PATH", "/nowhere")
    assert "cannot start srun" in tiltyard("shell", "--on", "cluster", "--", "true", expect=2).stderr


def test_interactive_shell_runs_on_the_node(site: Cluster) -> None:
    """The shell on the node reads input and has the functions of the setup."""
    front, back = pty.openpty()
    words = [sys.executable, "-m", "tiltyard", "shell", "--on", "cluster"]
    shell = subprocess.Popen(words, stdin=back, stdout=back, stderr=back, start_new_session=True)
    os.close(back)
    os.write(front, b"greet $SLURMD_NODENAME-$((40+2)); exit 5\n")
    output, end = b"", time.monotonic() + 100
    while shell.poll() is None or select.select([front], [], [], 0)[0]:
        assert time.monotonic() < end, output
        if select.select([front], [], [], 0.2)[0]:
            try:
                output += os.read(front, 4096)
            except OSError:  # the other end is closed
                break
    assert shell.wait(100) == 5, output
    assert b"hello node1-42" in output
    os.close(front)


def test_shell_and_top_run_inside_the_job_of_a_run(
    tiltyard: Command, site: Cluster, job: str, runs: Path, tmp_path: Path
) -> None:
    line = 'echo "$SLURM_JOB_ID $SLURMD_NODENAME $FROM_SETUP $TILTYARD_RUNS"; exit 3'
    output = in_own_process("shell", "last", "--", "bash", "-c", line, expect=3)
    node = site.run("squeue", "-h", "-j", job, "-o", "%N")
    assert output.stdout == f"{job} {node} 1 {runs}\n"
    output = in_own_process("shell", "last", "--node", "node7", "--", "true", expect=2)
    assert f"does not run on node7\nhint: it runs on {node}" in output.stderr

    found = json.loads(tiltyard("top", "last", "--json").stdout)
    assert [each["node"] for each in found] == [node]
    commands = [each["command"] for each in found[0]["processes"]]
    assert sum(" -m tiltyard resume " in each for each in commands) == 1
    assert not any("slurm.usage" in each for each in commands)
    trainer = next(each for each in found[0]["processes"] if " -m tiltyard resume " in each["command"])
    assert (
        trainer["threads"] >= 1 and trainer["resident"] > 50e6 and trainer["proportional"] > 10e6 and trainer["cpu"] > 0
    )
    shown = tiltyard("top", "last").stdout
    assert shown.startswith("NODE ") and f"{node}: {len(commands)} processes, " in shown
    assert site.state(job) == "RUNNING"

    site.run("scancel", job)
    wait_for(lambda: site.state(job) not in ("RUNNING", "COMPLETING"), "the job's end")
    assert "is not running: job" in tiltyard("top", "last", expect=2).stderr
    assert "is not running: job" in tiltyard("shell", "last", "--", "true", expect=2).stderr


def test_top_and_shell_support_heterogeneous_jobs(site: Cluster, runs: Path) -> None:
    """`top` shows both groups of the job, and `shell` uses the given node."""
    run = api.create_run(preflight.prepare("CartPole-v1"))
    groups = "#SBATCH --nodes=1\n#SBATCH --cpus-per-task=1\n"
    srun = "srun --het-group=0 /usr/bin/sleep 300 : --het-group=1 /usr/bin/sleep 300"
    Path("het.sh").write_text(f"#!/bin/bash\n{groups}#SBATCH hetjob\n{groups}{srun}\n")
    number = site.run("sbatch", "--parsable", "--output=/dev/null", "het.sh")
    try:
        write_status(run, state="queued", job={"profile": "cluster", "id": number})
        wait_for(lambda: sleeping() == {"node1": 1, "node2": 1}, "both sleeps")
        output = in_own_process("shell", "last", "--node", "node2", "--", "printenv", "SLURMD_NODENAME")
        assert output.stdout == "node2\n"
    finally:
        site.run("scancel", "--full", number)


def sleeping() -> dict[str, int]:
    """Number of `sleep` processes on each node, from `top`."""
    words = [sys.executable, "-m", "tiltyard", "top", "last", "--json"]
    output = subprocess.run(words, capture_output=True, text=True, timeout=100).stdout
    nodes = json.loads(output) if output else []
    return {node["node"]: sum(each["command"] == "/usr/bin/sleep 300" for each in node["processes"]) for node in nodes}


def test_top_shows_the_processes_of_a_local_run(runs: Path) -> None:
    words = [sys.executable, "-m", "tiltyard", "train", *LONG, "engine.kind=local", "engine.workers=2", "--plain"]
    trainer = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: list(runs.glob("*/*/lock.json")), "the run")
        wait_for(lambda: len(pids_of_last()) >= 3, "the workers")
        assert trainer.pid in pids_of_last()
        assert watched("top", "last") >= 2
    finally:
        trainer.send_signal(signal.SIGTERM)
        trainer.wait(100)
    assert "is not running (stopped)" in in_own_process("top", "last", expect=2).stderr


def pids_of_last() -> list[int]:
    (node,) = json.loads(in_own_process("top", "last", "--json").stdout)
    return [each["pid"] for each in node["processes"]]


def watched(*words: str) -> int:
    """Wait for two redraws of the terminal, then send Ctrl-C, which must end it with code 0. Return the redraws."""
    front, back = pty.openpty()
    top = subprocess.Popen(
        [sys.executable, "-m", "tiltyard", *words], stdin=back, stdout=back, stderr=subprocess.DEVNULL
    )
    os.close(back)
    output, end = b"", time.monotonic() + 100
    while output.count(b"\x1b[H") < 2:
        assert time.monotonic() < end, output
        if select.select([front], [], [], 0.2)[0]:
            output += os.read(front, 65536)
    top.send_signal(signal.SIGINT)
    assert top.wait(100) == 0
    os.close(front)
    return output.count(b"\x1b[H")


def test_gpus_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usage.gpus() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, NVIDIA A100, 87, 1024, 40960'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (shown,) = usage.snapshots(lambda: [], 0)
    assert f"{shown['node']}: GPU 0 NVIDIA A100, 87 %, 1024 of 40960 MiB" in drawn([shown])
    assert f"{shown['node']}: 0 processes, 0 threads, 0 % CPU, 0 MiB" in drawn([shown])
