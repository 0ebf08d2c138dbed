"""Writes, syncs and renames that fail with EIO, ESTALE, ENOSPC or EDQUOT: no run is lost, no record, no checkpoint.

disk_faults.c makes the calls fail, fault_tries.py trains in a process per try.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import tiltyard as product
from tests.conftest import in_own_process
from tests.counts import LONG, count
from tests.faults.fault_tries import EXPERIMENT, FOREVER, Faults
from tiltyard.errors import DiskError
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import log_event, read_events
from tiltyard.run.folder import Run, find
from tiltyard.run.writer import LineFile, missing_records

HERE = Path(__file__).parent


@pytest.fixture
def faults(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults in processes that this test starts; none to begin with."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to make the library that injects faults; install gcc and libc6-dev")
    library, control = tmp_path / "faults.so", tmp_path / "control"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "disk_faults.c"), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the library that injects faults cannot be compiled: {done.stderr.strip()[-300:]}")
    control.write_bytes(bytes(4096))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("TILTYARD_FAULTS", str(control))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    return Faults(str(control))


@pytest.mark.slow
@pytest.mark.timeout(3000 if LONG else 300)
def test_no_fault_of_the_disk_loses_a_run(faults: Faults) -> None:
    tries = count(200)
    command = [sys.executable, "-m", "tests.faults.fault_tries", str(tries)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["problem"] for each in found if each["problem"]] == []
    assert done.returncode == 0 and len(found) == tries
    assert all(each["injected"] > 0 for each in found)
    assert {each["code"] for each in found} == {0, 75}


def test_disk_that_fails_for_longer_than_save_patience_stops_the_run_as_resumable(faults: Faults, runs: Path) -> None:
    words = ["engine.kind=serial", "engine.envs=2", "algo.rollout=16", "algo.minibatch=32", "algo.epochs=1"]
    words += ["eval.at_end=false", "track.tensorboard=false", "save.env_steps=64"]
    in_own_process("train", "CartPole-v1", *words, "stop.env_steps=64", "name=lasting")
    run = find("lasting", runs)
    faults.set(run.checkpoints, left=FOREVER, chance=256, random=1)
    done = in_own_process("resume", "lasting", "stop.env_steps=1e9", "save.patience=1", "--plain", expect=75)
    assert faults.get("injected") > 1
    assert "000000000064 is intact" in done.stderr and "(save.patience = 1)" in done.stderr
    assert f"hint: continue with: tiltyard resume {run.id}" in done.stderr
    status = run.status()
    assert (status["state"], status["failure"]) == ("stopped", "retried in place")
    warnings = [event["sentence"] for event in read_events(run) if event["kind"] == "warning"]
    assert len(warnings) == 2 and "tried again for 1 s" in warnings[0] and "could not be saved" in warnings[1]
    faults.set(None)
    in_own_process("resume", "lasting", "stop.env_steps=256")
    assert run.state == "finished" and run.status()["failure"] is None
    assert [record["env_steps"] for record in metrics.read(run)] == [32 * i for i in range(1, 9)]


# ------------------------------------------------------------------------------------------------ records


def test_line_that_a_full_disk_cut_is_completed_and_not_repeated(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        ballast, lines = disk / "ballast", LineFile(disk / "metrics.jsonl")
        ballast.write_bytes(bytes(32 * 1024))
        for i in range(100):
            lines.add(json.dumps({"i": i, "text": "x" * 1000}))
        with pytest.raises(DiskError, match="No space left on device"):
            lines.write()
        assert not lines.path.read_bytes().endswith(b"\n"), "the last line is cut"
        ballast.unlink()
        with pytest.raises(DiskError):
            lines.sync(nullcontext())
        assert subprocess.run(["mount", "-o", "remount,size=1m", str(disk)]).returncode == 0
        lines.sync(nullcontext())
        assert [json.loads(line)["i"] for line in lines.path.read_text().splitlines()] == list(range(100))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_line_is_repeated_if_another_process_wrote_after_its_cut_beginning(runs: Path) -> None:
    bare = Run(runs / "bare" / "0001-calm-crow")
    bare.folder.mkdir(parents=True)
    log_event(bare, "created", "made")
    lines = LineFile(bare.events_file)
    lines.add('{"kind": "ours"}')
    lines.write()
    lines.add('{"kind": "cut"}')
    with bare.events_file.open("ab") as file:  # as a full disk would leave it
        file.write(lines.waiting[0][:5])
    lines._cut, lines._end = 5, bare.events_file.stat().st_size
    log_event(bare, "warning", "theirs")
    lines.sync(nullcontext())
    assert [event["kind"] for event in read_events(bare)] == ["created", "ours", "warning", "cut"]


def test_records_end_before_the_checkpoint_is_reported(runs: Path) -> None:
    run = product.train({**EXPERIMENT, "save": {"env_steps": 64}}, live=False)
    newest = checkpoint.list_checkpoints(run)[-1]
    assert missing_records(run, newest) == []
    whole = run.metrics_file.read_bytes()
    run.metrics_file.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))  # what a power cut left
    lost = "metrics.jsonl ends before the checkpoint at env step 512: "
    assert lost in in_own_process("show", str(run.folder)).stdout
    resumed = in_own_process("resume", str(run.folder), "stop.env_steps=544", "--plain")
    assert lost in resumed.stderr
    assert [event for event in read_events(run) if event["kind"] == "warning" and lost in event["sentence"]]
