"""The mutex in a file: a deadline, the holder's name, and no other user who could hold it."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from tiltyard.errors import EXIT_RESUMABLE
from tiltyard.run import mutex
from tiltyard.run.events import read_events
from tiltyard.run.lock import GUARD, Lock, read_owner

# Only flock: a user who may read a file can do this.
HOLDER = """
import fcntl, os, sys
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
try:
    handle = os.open(sys.argv[1], os.O_RDONLY)
except PermissionError:
    sys.exit("no permission")
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""
NOBODY = 65534


def hold(child, path, *user):
    holder = child(HOLDER, path, *user)
    assert holder.stdout.readline() == "held\n", holder.stderr.read()
    return holder


def test_waiting_ends_at_the_deadline_and_names_the_holder(tmp_path, child):
    path = tmp_path / "mutex"
    path.touch()
    holder = hold(child, path)
    with pytest.raises(mutex.MutexHeld) as caught, mutex.hold(path, 0.1):
        pass
    assert f"{path} has been locked by pid {holder.pid} of user " in caught.value.message
    assert caught.value.message.endswith(" for 0.1 s") and caught.value.exit_code == EXIT_RESUMABLE
    holder.communicate("\n")
    with mutex.hold(path):
        pass


def test_holder_on_another_machine_is_named_by_the_file(tmp_path, monkeypatch):
    with mutex.hold(tmp_path / "mutex"):
        # As after a lock over NFS: the kernel of this machine does not know the holder.
        monkeypatch.setattr("tiltyard.run.mutex.LOCKS", tmp_path / "none")
        holder = rf"last known holder: pid {os.getpid()} of user .* on host "
        with pytest.raises(mutex.MutexHeld, match=holder), mutex.hold(tmp_path / "mutex", 0.01):
            pass


def test_waiting_ends_when_the_holder_is_killed(tmp_path, child):
    path = tmp_path / "mutex"
    path.touch()
    holder = hold(child, path)
    killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.1); os.kill({holder.pid}, 9)"])
    with mutex.hold(path, 100):
        pass
    killer.wait()


def test_process_forked_meanwhile_does_not_keep_the_mutex(tmp_path):
    with mutex.hold(tmp_path / "mutex"):
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
    try:
        with mutex.hold(tmp_path / "mutex", 10):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("before", [None, 0o666, 0o644, 0o000])
def test_only_the_owner_may_open_the_file(tmp_path, before):
    path, umask = tmp_path / "mutex", os.umask(0)
    try:
        if before is not None:
            path.touch()
            path.chmod(before)
        handle = mutex.open_private(path)
        os.close(handle)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_can_neither_hold_the_lock_of_a_run_nor_stop_its_training(bare_run, child):
    for folder in (bare_run.folder, *list(bare_run.folder.parents)[:-1]):
        if folder.stat().st_uid == 0 and "pytest" in str(folder):
            folder.chmod(0o755)
    guard = bare_run.folder / GUARD
    guard.touch(0o644)  # of an earlier version
    stranger = hold(child, guard, NOBODY)
    with pytest.raises(mutex.MutexHeld, match=f"pid {stranger.pid} of user nobody"), mutex.hold(guard, 0.01):
        pass
    stranger.communicate("\n")
    with Lock.acquire(bare_run):
        refused = child(HOLDER, guard, NOBODY)
        assert refused.wait(100) == 1 and "no permission" in refused.stderr.read()


def test_owner_continues_while_its_guard_is_held(bare_run, child):
    with Lock.acquire(bare_run, period=0.02) as lock:
        holder = hold(child, bare_run.folder / GUARD)
        before, until = read_owner(bare_run.folder)["heartbeat"], time.monotonic() + 0.5
        while time.monotonic() < until:
            lock.check()  # neither raises nor waits for the guard
            assert read_owner(bare_run.folder)["heartbeat"] == before
        holder.communicate("\n")
        while read_owner(bare_run.folder)["heartbeat"] == before:  # limited by the timeout of the test
            time.sleep(0.001)
    assert read_owner(bare_run.folder) is None


def test_owner_is_not_taken_over_because_its_guard_was_held(bare_run, child):
    """A process on another machine sees the heartbeat stand still, but only because a third process holds the guard."""
    watcher = """
import os, sys
from pathlib import Path
from tiltyard.errors import UseError
from tiltyard.run import lock
from tiltyard.run.folder import Run
own = lock.this_machine()
lock.this_machine = lambda: {**own, "host": "node9"}  # plays another machine
print("ready", flush=True)
try:
    lock.Lock.acquire(Run(Path(sys.argv[1])), period=1)
except UseError as error:
    print(error.message, flush=True)
"""
    with Lock.acquire(bare_run, period=1) as lock:
        guard = bare_run.folder / GUARD
        other = child(watcher, bare_run.folder)
        assert other.stdout.readline() == "ready\n", other.stderr.read()
        holder = hold(child, guard)
        time.sleep(3.5)
        holder.communicate("\n")
        assert "is being written by pid" in other.stdout.readline()
        lock.check()
    assert not bare_run.events_file.exists() or read_events(bare_run) == []


@pytest.mark.parametrize("trouble", ["damaged", "unreadable"])
def test_owner_continues_while_its_lock_file_cannot_be_read(bare_run, trouble):
    with Lock.acquire(bare_run, period=1000) as lock:
        lock._seen -= 10_000  # the heartbeat thread did not run for long
        path = bare_run.folder / "lock.json"
        content = path.read_bytes()
        path.unlink()
        if trouble == "damaged":
            path.write_bytes(content[:-5])
        else:
            path.mkdir()
        lock.check()
        if trouble == "unreadable":
            path.rmdir()
            path.write_bytes(content)
        lock._update_heartbeat()
        assert read_owner(bare_run.folder)["heartbeat"] == 1


def test_suspended_owner_does_not_block_for_ever(bare_run, child, monkeypatch):
    """The owner is suspended while it updates its heartbeat: a restarted job gets an error that names it."""
    owner = child(
        """
import os, signal, sys, time
from pathlib import Path
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
write = atomic.write_json
def suspended(path, value):
    write(path, value)
    if value["heartbeat"] == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)  # this thread may run for a moment before it is suspended
atomic.write_json = suspended
with Lock(Run(Path(sys.argv[1])), period=0.01):
    sys.stdin.readline()
""",
        bare_run.folder,
        SLURM_JOB_ID="77",
        SLURM_RESTART_COUNT="0",
    )
    while (read_owner(bare_run.folder) or {}).get("heartbeat") != 1:
        assert owner.poll() is None, owner.stderr.read()
        time.sleep(0.001)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr("tiltyard.run.mutex.TIMEOUT", 0.2)
    with pytest.raises(mutex.MutexHeld, match=f"pid {owner.pid} of user "):
        Lock.acquire(bare_run)
    owner.kill()
    owner.wait()
    with Lock.acquire(bare_run):
        assert "job 77 was restarted" in read_events(bare_run)[0]["sentence"]
