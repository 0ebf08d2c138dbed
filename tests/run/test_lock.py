"""One writer per run: races, owners that are gone, restarted jobs, other machines."""

import json
import os
import socket
import threading
import time

import pytest

from tests.counts import count
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run.events import read_events
from tiltyard.run.lock import Lock, liveness, read_owner, seems_alive, this_process

HOLDER = """
import sys, time
from pathlib import Path
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
with Lock(Run(Path(sys.argv[1])), period=float(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""


def plant(run, **changes):
    """Write the lock file of another process."""
    owner = {**this_process(), "heartbeat": 3, "period": 0.05, "mark": "theirs", **changes}
    draft = run.folder / f".{threading.get_ident()}"  # atomic, like in the product
    draft.write_text(json.dumps(owner))
    draft.rename(run.folder / "lock.json")
    return owner


def test_lock_is_acquired_and_released(bare_run):
    with Lock(bare_run) as lock:
        owner = read_owner(bare_run.folder)
        assert owner["pid"] == os.getpid() and owner["host"] == socket.gethostname() and lock.held
        assert liveness(owner) == "alive" and seems_alive(bare_run.folder)
        lock.check()
    assert read_owner(bare_run.folder) is None and not seems_alive(bare_run.folder)
    lock.release()
    assert not bare_run.events_file.exists()  # no takeover


def test_acquire_returns_a_held_lock_that_is_a_context_manager(bare_run):
    with Lock.acquire(bare_run) as lock:
        assert lock.held
        with pytest.raises(UseError, match=f"pid {os.getpid()}"):
            Lock.acquire(bare_run)
    assert not lock.held


def test_live_owner_is_reported_and_the_lock_of_a_killed_one_is_taken_over(bare_run, child):
    owner = child(HOLDER, bare_run.folder, 10)
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(UseError) as caught:
        Lock.acquire(bare_run)
    assert (
        caught.value.message
        == f"run toy/0001-brisk-otter is being written by pid {owner.pid} on host {socket.gethostname()}"
    )
    assert "tiltyard stop" in caught.value.hint and caught.value.exit_code == 2
    owner.kill()
    # The owner is not reaped yet: a zombie counts as dead.
    for _ in range(500):
        if liveness(read_owner(bare_run.folder)) == "dead":
            break
        time.sleep(0.01)
    with Lock.acquire(bare_run):
        (event,) = read_events(bare_run)
        assert event["kind"] == "recovered" and f"pid {owner.pid}" in event["sentence"]


def test_reused_process_id_is_not_the_owner(bare_run):
    plant(bare_run, started="1")
    with Lock.acquire(bare_run):
        assert read_owner(bare_run.folder)["mark"] != "theirs"


def test_owner_of_another_boot_is_watched_before_it_is_taken_over(bare_run):
    plant(bare_run, boot="another")
    with Lock.acquire(bare_run, period=0.05):
        assert "did not change for 3 periods" in read_events(bare_run)[0]["sentence"]


def test_restarted_job_takes_over_at_once(bare_run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    plant(bare_run, host="node9", job="77", restart=1, period=3600)  # waiting for its heartbeat would take three hours
    with Lock.acquire(bare_run):
        assert "job 77 was restarted" in read_events(bare_run)[0]["sentence"]


@pytest.mark.parametrize("owner", [{"job": "77", "restart": 2}, {"job": "78", "restart": 0}, {"job": "", "restart": 0}])
def test_other_jobs_and_equal_restarts_take_over_after_the_heartbeat_stopped(bare_run, monkeypatch, owner):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    plant(bare_run, host="node9", **owner)
    with Lock.acquire(bare_run, period=0.05):
        assert "did not change for 3 periods" in read_events(bare_run)[0]["sentence"]


@pytest.mark.parametrize("away", [{"host": "node9"}, {"boot": "another"}])
def test_lock_of_a_live_owner_on_another_machine_is_refused(bare_run, away):
    """A cloned machine or a container may have our host name."""
    plant(bare_run, period=0.2, **away)
    stop = threading.Event()

    def beat():
        number = 10
        while not stop.wait(0.02):
            number += 1
            plant(bare_run, period=0.2, heartbeat=number, **away)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UseError, match=f"on host {away.get('host', socket.gethostname())}"):
            Lock.acquire(bare_run, period=0.2)
    finally:
        stop.set()
        thread.join()
    assert read_owner(bare_run.folder)["mark"] == "theirs"


def test_waiting_ends_when_the_owner_on_another_host_releases(bare_run):
    plant(bare_run, host="node9", period=3600)
    threading.Timer(0.1, (bare_run.folder / "lock.json").unlink).start()
    with Lock.acquire(bare_run, period=0.05):
        assert read_events(bare_run) == []


def test_liveness_of_a_container_with_our_host_name_is_unknown(bare_run):
    assert liveness(plant(bare_run, pids="pid:[1]")) == "unknown"


@pytest.mark.parametrize("content", ["", "{", "[]", "\0\0\0", '{"pid": "x"}', '{"host": 3, "pid": -1}'])
def test_broken_lock_file_is_replaced_if_it_does_not_change(bare_run, content, monkeypatch):
    (bare_run.folder / "lock.json").write_text(content)
    monkeypatch.setattr("tiltyard.run.lock.STILL_PERIODS", 0.001)  # instead of 3 x 10 s for an unknown period
    with Lock.acquire(bare_run, period=0.02):
        assert read_owner(bare_run.folder)["pid"] == os.getpid()


def test_heartbeat_increases(bare_run):
    with Lock(bare_run, period=0.02):
        seen = set()
        while len(seen) < 4:  # limited by the timeout of the test
            seen.add(read_owner(bare_run.folder)["heartbeat"])
    assert seen <= set(range(10_000))


def test_owner_detects_a_takeover_and_stops_writing(bare_run):
    lock = Lock.acquire(bare_run, period=0.02)
    plant(bare_run, host="node9")
    while lock._successor is None:
        time.sleep(0.001)
    with pytest.raises(TiltyardError, match=r"taken over by pid .* on host node9"):
        lock.check()
    lock.release()
    assert read_owner(bare_run.folder)["mark"] == "theirs"


def test_exactly_one_of_many_processes_gets_the_lock(bare_run, child):
    code = """
import sys
from pathlib import Path
from tiltyard.errors import UseError
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
run = Run(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    if line == "go\\n":
        try:
            lock = Lock.acquire(run)
            print("won", flush=True)
        except UseError as error:
            lock = None
            print("lost", flush=True)
    elif lock is not None:
        lock.release()
"""
    racers = [child(code, bare_run.folder) for _ in range(4)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n", racer.stderr.read()
    for race in range(count(300)):
        if race % 2:
            plant(bare_run, pid=2**22 + 1)  # with the lock of a dead owner
        for line in ("go\n", "end\n"):
            for racer in racers:
                racer.stdin.write(line)
                racer.stdin.flush()
            if line == "go\n":
                results = [racer.stdout.readline() for racer in racers]
                assert sorted(results) == ["lost\n"] * 3 + ["won\n"], race
        while read_owner(bare_run.folder) is not None:
            time.sleep(0.001)
    taken = [event for event in read_events(bare_run) if event["kind"] == "recovered"]
    assert len(taken) == count(300) // 2


def test_read_only_folder_is_an_error(small_disk):
    import subprocess

    from tiltyard.run.folder import Run

    run = Run(small_disk / "toy" / "0001-brisk-otter")
    run.folder.mkdir(parents=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UseError) as caught:
        Lock.acquire(run)
    assert "toy/0001-brisk-otter cannot be written" in caught.value.message and "Read-only" in caught.value.message


def test_period_is_read_from_the_environment(bare_run, monkeypatch):
    monkeypatch.setenv("TILTYARD_HEARTBEAT", "0.5")
    assert Lock(bare_run).period == 0.5
    for wrong in ("soon", "nan", "inf", "-1", "0", ""):
        monkeypatch.setenv("TILTYARD_HEARTBEAT", wrong)
        with pytest.raises(UseError, match="TILTYARD_HEARTBEAT"):
            Lock(bare_run)
