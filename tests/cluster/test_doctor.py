"""`tiltyard doctor --on`: a short job checks the nodes of a real Slurm cluster, and bad nodes are excluded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.conftest import Command
from tiltyard.doctor.bad_nodes import bad_nodes

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm")]
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
Put = Callable[..., Path]


@pytest.fixture
def on_node2(cluster: Cluster, tmp_path: Path) -> Put:
    """Write a profile with both nodes and a Python wrapper that first runs `command` on node2."""

    def put(command: str) -> Path:
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/bash\nif [ "$SLURMD_NODENAME" = node2 ]; then {command}; fi\nexec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        slurm = f"{{python: {path}, exclude_failed: true, wait: 20}}"
        profile = f"{{launcher: slurm, resources: {{nodes: 2, cpus: 1}}, slurm: {slurm}}}"
        Path("tiltyard.yaml").write_text(f"profiles:\n  both: {profile}\n")
        return path

    return put


def nothing_left(cluster: Cluster, runs: Path) -> None:
    assert list(runs.glob(".doctor/visit-*")) == []
    wait_for(lambda: not cluster.run("squeue", "-h", "-t", "PD,R,CG"), "the end of all jobs")


def findings(text: str, node: str) -> dict[str, dict[str, str]]:
    return {each["what"]: each for each in json.loads(text) if each["node"] == node}


@pytest.mark.slow
def test_nodes_of_a_profile_are_checked(tiltyard: Command, cluster: Cluster, runs: Path, on_node2: Put) -> None:
    on_node2(":")
    output = tiltyard("doctor", "--on", "both")
    assert "is running on node[1-2]" in output.stderr
    assert "ok    node1      " in output.stdout and "ok    node2      " in output.stdout
    assert "note  all 2      preemption PreemptMode=OFF, KillWait=3 sec" in output.stdout
    nothing_left(cluster, runs)
    assert not (runs / ".doctor").exists()


@pytest.mark.slow
def test_node_with_other_versions_is_excluded_until_it_passes(
    tiltyard: Command, cluster: Cluster, runs: Path, on_node2: Put, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "ray-0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 0.1\n")
    on_node2(f"export PYTHONPATH={other.parent}")
    output = tiltyard("doctor", "--on", "both", "--json", expect=1)
    first, second = findings(output.stdout, "node1"), findings(output.stdout, "node2")
    assert (first["versions"]["state"], second["versions"]["state"]) == ("ok", "bad")
    assert second["versions"]["found"].startswith("ray 0.1, but ") and second["versions"]["hint"]
    assert first["reach"]["state"] == second["reach"]["state"] == second["clocks"]["state"] == "ok"
    assert first["locks"]["state"] == second["locks"]["state"] == first["flock"]["state"] == "ok"
    assert "node2 is marked as bad" in output.stderr and list(bad_nodes(runs)) == ["node2"]
    nothing_left(cluster, runs)

    script = tiltyard("train", "CartPole-v1", "engine.kind=rllib", "--on", "both", "--dry-run")
    assert "#SBATCH --exclude=node2\n" in script.stdout
    assert "excluded    node2 (bad since " in script.stderr and "--on both --nodes node2" in script.stderr

    on_node2(":")
    output = tiltyard("doctor", "--on", "both", "--nodes", "node2")
    assert "node2 passed and was removed from the bad nodes" in output.stderr and bad_nodes(runs) == {}
    assert "ok    node2 " in output.stdout and "node1" not in output.stdout


def test_run_excludes_bad_nodes(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    text = Path("tiltyard.yaml").read_text()
    Path("tiltyard.yaml").write_text(f"{text}    slurm: {{exclude_failed: true}}\n")
    (runs / ".doctor").mkdir(parents=True)
    (runs / ".doctor" / "nodes.json").write_text('{"node1": "2026-03-01: shm: 3 MiB free"}')
    small = ["engine.envs=4", "algo.rollout=16", "algo.minibatch=64", "algo.epochs=1", "eval.at_end=false"]
    output = tiltyard("train", "CartPole-v1", *small, "stop.env_steps=256", "--on", "cluster", "--json")
    assert "excluded    node1 (bad since 2026-03-01: shm: 3 MiB free)" in output.stderr
    assert cluster.run("squeue", "-h", "-t", "all", "-j", json.loads(output.stdout)["job"], "-o", "%N") == "node2"
    assert "excluded     node1\n" in tiltyard("show", "last").stdout
    assert (
        "excluding node1 (found bad by tiltyard doctor)"
        in (runs / "CartPole-v1").glob("*/events.jsonl").__next__().read_text()
    )


@pytest.mark.slow
@pytest.mark.skipif(FAKETIME is None, reason="no libfaketime here: apt-get install libfaketime")
def test_wrong_clock_on_one_node_is_reported(tiltyard: Command, cluster: Cluster, runs: Path, on_node2: Put) -> None:
    on_node2(f"export LD_PRELOAD={FAKETIME} FAKETIME=+100s")
    output = tiltyard("doctor", "--on", "both", "--json", expect=1)
    found = findings(output.stdout, "node2")
    assert found["clocks"]["state"] == found["clock"]["state"] == "bad"
    assert found["clocks"]["found"].startswith(("+99", "+100"))
    assert found["preload"]["state"] == "note"
    assert findings(output.stdout, "node1")["clocks"]["state"] == "ok"


@pytest.mark.slow
def test_node_whose_file_locks_do_not_work_is_reported(
    tiltyard: Command, cluster: Cluster, runs: Path, on_node2: Put, tmp_path: Path
) -> None:
    """As on a file system that locks files only within each node."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text("import fcntl\nfcntl.flock = lambda handle, how: None\n")
    on_node2(f"export PYTHONPATH={tmp_path / 'broken'}")
    output = tiltyard("doctor", "--on", "both", "--json", expect=1)
    first, second = findings(output.stdout, "node1"), findings(output.stdout, "node2")
    assert (first["flock"]["state"], second["flock"]["state"]) == ("ok", "bad")
    assert first["locks"]["found"] == "a file that is locked on node2 is not seen as locked"
    assert second["locks"]["found"] == "a file that is locked on node1 is not seen as locked"
    assert first["locks"]["state"] == second["locks"]["state"] == "bad" and "NFS" in first["locks"]["hint"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root to cut a node off")
def test_unreachable_node_is_reported_and_marked_as_bad(
    tiltyard: Command, cluster: Cluster, runs: Path, on_node2: Put
) -> None:
    on_node2(f'exec unshare --net {sys.executable} "$@"')
    output = tiltyard("doctor", "--on", "both", expect=1)
    assert "bad   node2      reach      cannot be reached from node1 (" in output.stdout
    assert "node2" in bad_nodes(runs)


@pytest.mark.slow
def test_node_without_a_report_is_reported(tiltyard: Command, cluster: Cluster, runs: Path, on_node2: Put) -> None:
    on_node2("echo no such image >&2; exit 1")
    output = tiltyard("doctor", "--on", "both", "--json", expect=1)
    assert findings(output.stdout, "node2").keys() == {"checkup"}
    assert findings(output.stdout, "node1")["runs"]["state"] == "ok"
    nothing_left(cluster, runs)


def test_ctrl_c_cancels_the_job(cluster: Cluster, runs: Path) -> None:
    profile = "{launcher: slurm, slurm: {extra: ['--begin=now+1hour']}}"
    Path("tiltyard.yaml").write_text(f"profiles:\n  later: {profile}\n")
    words = [sys.executable, "-m", "tiltyard", "doctor", "--on", "later"]
    doctor = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert doctor.stderr is not None
    assert "is pending: " in doctor.stderr.readline()
    assert len(list(runs.glob(".doctor/visit-*"))) == 1
    doctor.send_signal(signal.SIGINT)
    assert doctor.wait(100) == 130
    nothing_left(cluster, runs)


def test_wrong_profile_marks_no_node(tiltyard: Command, cluster: Cluster, runs: Path, on_node2: Put) -> None:
    on_node2(":").write_text("#!/bin/bash\necho unknown module >&2; exit 1\n")
    output = tiltyard("doctor", "--on", "both", expect=1)
    assert "error: no node was checked: job " in output.stderr and "unknown module" in output.stderr
    assert "slurm.python" in output.stderr and bad_nodes(runs) == {}
    nothing_left(cluster, runs)
    Path("tiltyard.yaml").write_text("profiles:\n  wrong: {launcher: slurm, slurm: {partition: nowhere}}\n  here:\n")
    output = tiltyard("doctor", "--on", "wrong", expect=1)
    assert "Slurm refused the job: invalid partition specified: nowhere" in output.stderr
    assert "submits no jobs" in tiltyard("doctor", "--on", "here", expect=2).stderr
    nothing_left(cluster, runs)
