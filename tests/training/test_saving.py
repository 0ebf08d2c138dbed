"""Checkpoints that are written while training continues: identical to others, safe when killed, and errors are raised."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiltyard as product
from tests.training.test_loop import TINY
from tiltyard.errors import TiltyardError
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find
from tiltyard.run.state_file import EncodedTree, read_tree
from tiltyard.training import saving
from tiltyard.training.loop_state import LoopState
from tiltyard.types import Progress

BATCH = 32
EVERY_UPDATE: dict[str, Any] = {**TINY, "save": {"env_steps": BATCH, "last": 100}, "stop": {"updates": 6}}


class SlowDisk:
    """Writes of checkpoints wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, write = threading.Event(), EncodedTree.write

        def slow(part: EncodedTree, folder: Path) -> Any:
            assert self._open.wait(200)
            return write(part, folder)

        monkeypatch.setattr(EncodedTree, "write", slow)

    def let_through(self, save: saving.Saving) -> None:
        """Let the save in progress end, and hold the next one."""
        self._open.set()
        save.wait()
        self._open.clear()

    def repair(self) -> None:
        self._open.set()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.repair()


def states(run: Run) -> dict[str, Any]:
    """Every tree of every checkpoint, without times."""
    folders = [each.folder for each in checkpoint.list_checkpoints(run)]
    assert [checkpoint.verify(folder) for folder in folders] == [None] * len(folders)
    files = [path for folder in folders for path in sorted(folder.rglob("*.json")) if path.name != "manifest.json"]
    names = [path.relative_to(run.checkpoints).as_posix() for path in files]
    return {name: timeless(read_tree(path.parent, path.stem)) for name, path in zip(names, files, strict=True)}


def timeless(tree: Any) -> Any:
    """The tree without what was measured (times, speeds, the env's spec); arrays as their bytes, types and shapes."""
    if isinstance(tree, dict):
        wanted = {
            key: each
            for key, each in tree.items()
            if not key.startswith(("seconds", "spec", "time/", "speed/", "workers/"))
        }
        return {key: timeless(each) for key, each in wanted.items()}
    if isinstance(tree, list):
        return [timeless(each) for each in tree]
    return (tree.tobytes(), str(tree.dtype), tree.shape) if hasattr(tree, "tobytes") else tree


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"envs": 2, "workers": 0, "threads": 1}, {"envs": 2, "workers": 1, "threads": 1}])
def test_checkpoint_written_during_the_next_update_is_the_same_bit_for_bit(
    runs: Path, slow_disk: SlowDisk, engine: dict[str, Any]
) -> None:
    settings = {**EVERY_UPDATE, "engine": engine}
    with product.iterate(settings, name="beside", live=False) as training:
        for report in training:
            # The update after the save has changed everything that it could have shared.
            known = [each.env_steps for each in checkpoint.list_checkpoints(training.run)]
            assert known == list(range(BATCH, report.progress.env_steps - BATCH, BATCH))
            slow_disk.let_through(training._attempt.saving)
        slow_disk.repair()
    beside = training.run
    with product.iterate(settings, ["save.async=false"], name="between", live=False) as training:
        for report in training:
            known = [each.env_steps for each in checkpoint.list_checkpoints(training.run)]
            assert known == list(range(BATCH, report.progress.env_steps, BATCH))
    assert len(states(beside)) == len(states(training.run)) >= 6 * 4
    assert states(beside) == states(training.run)
    for run in (beside, training.run):
        saved = [event["sentence"] for event in read_events(run) if event["kind"] == "saved"]
        assert saved == [f"checkpoint at env step {BATCH * update}" for update in range(1, 7)]


def test_large_state_is_saved_between_updates(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MAX_COPY", 1000)
    with product.iterate(EVERY_UPDATE, live=False) as training:
        for report in training:
            known = [each.env_steps for each in checkpoint.list_checkpoints(training.run)]
            assert known == list(range(BATCH, report.progress.env_steps, BATCH))
            assert "checkpoint" not in [thread.name for thread in threading.enumerate()]


def test_save_of_a_script_is_complete_when_it_returns(runs: Path, slow_disk: SlowDisk) -> None:
    with product.iterate(EVERY_UPDATE, ["save.env_steps=null"], live=False) as training:
        next(training)
        later = threading.Timer(0.2, slow_disk.repair)
        later.start()
        training.save()
        assert [each.env_steps for each in checkpoint.list_checkpoints(training.run)] == [BATCH]


def test_error_of_a_save_in_the_background_stops_the_run_at_the_next_update(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failed = EncodedTree.write, []

    def full(part: EncodedTree, folder: Path) -> Any:
        if (
            folder.name.startswith(f".tmp-{2 * BATCH:012d}")
            and threading.current_thread() is not threading.main_thread()
        ):
            failed.append(part.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(part, folder)

    monkeypatch.setattr(EncodedTree, "write", full)

    def drive() -> None:
        words = [f"save.env_steps={2 * BATCH}", "save.best=0", "save.patience=0"]
        with product.iterate(EVERY_UPDATE, words, live=False) as training:
            for report in training:
                if report.progress.updates == 3:
                    training._attempt.saving._ended.wait()

    with pytest.raises(TiltyardError, match=rf"env step {2 * BATCH} could not be saved: No space.* no earlier"):
        drive()
    run = find("last", runs)
    reached = [record["env_steps"] for record in metrics.read(run.metrics_file)][-1]
    assert len(failed) == 1 and reached in (2 * BATCH, 3 * BATCH), (
        "the error appears before the next update, and not at the next save"
    )
    assert (run.state, run.status()["failure"]) == ("stopped", "retried in place")
    kept = [each.env_steps for each in checkpoint.list_checkpoints(run)]
    assert kept == [reached]  # written after the failure
    assert not list(run.checkpoints.glob(".tmp-*"))
    product.resume(run, live=False)
    assert run.state == "finished"


def test_interrupted_end_of_a_training_lets_no_checkpoint_appear() -> None:
    state, held, published = LoopState(), threading.Event(), []
    save = saving.Saving(state, lambda: None)

    def write() -> None:
        assert held.wait(200)
        save.check()
        published.append(True)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        save.start(Progress(env_steps=1), write, background=True)
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            save.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    held.set()
    with pytest.raises(TiltyardError, match="interrupted"):
        save.wait()
    assert published == [] and state.saved == Progress()


LARGE = """
import numpy as np

class CustomAlgo:
    def __init__(self, net, rng):
        self.replay = np.ones((300, 2**17))  # 300 MiB

    def update(self, rollout, env_steps):
        return {}

    def save(self):
        return {"replay": self.replay, "transposed": self.replay[:10].T}

    def load(self, tree):
        assert (tree["transposed"] == tree["replay"][:10].T).all()
        self.replay = tree["replay"]
"""
MEASURE = """
from pathlib import Path
import tiltyard

def mebibytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) // 1024

with tiltyard.iterate({"env": "CartPole-v1", "algo": {"id": "large.py", "rollout": 16}, "engine": {"envs": 2},
        "eval": {"every": 0, "at_end": False}, "track": {"tensorboard": False}}, live=False) as training:
    next(training)
    training.stop()
    before = mebibytes("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest value
    training.save()
    print(mebibytes("VmHWM:") - before)
"""


@pytest.mark.slow
def test_memory_for_saving_a_large_state_is_small(runs: Path) -> None:
    Path("large.py").write_text(LARGE)
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64, "MiB beside a state of 310 MiB"
    found, complaints = checkpoint.newest_valid(find("last", runs))
    assert found is not None and complaints == []
    assert sum(path.stat().st_size for path in found.folder.rglob("*")) > 310 * 2**20


# A disk on which the second checkpoint takes until a file says otherwise.
CHILD = """
import sys, threading, time
from pathlib import Path
from tiltyard.run.state_file import EncodedTree
from tiltyard.cli import main

write, mark, go = EncodedTree.write, Path("waiting"), Path("go")

def slow(part, folder):
    if folder.name.startswith(".tmp-000000000064") and not go.exists():
        files = write(part, folder)  # half of the checkpoint
        mark.touch()
        while not go.exists():
            time.sleep(0.01)
        return files
    return write(part, folder)

EncodedTree.write = slow
main(sys.argv[1:])
"""
WORDS = ["engine.envs=2", "engine.workers=0", "algo.rollout=16", "algo.minibatch=32", "algo.epochs=1", "eval.every=0"]
OFF = ["eval.at_end=false", "track.tensorboard=false", "save.last=9", "name=slow", "--plain"]


def child(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", CHILD, *words], stderr=subprocess.PIPE, text=True)


def wait_for(condition: Any, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_signal_during_a_save_in_the_background(runs: Path, how: signal.Signals) -> None:
    # The second save is due at env step 64, the third far later.
    process = child("train", "CartPole-v1", *WORDS, *OFF, "save.env_steps=32", "save.seconds=null", "stop.updates=3")
    wait_for(Path("waiting").exists, process)
    (folder,) = (path.parent for path in runs.glob("*/*/status.json"))
    run = Run(folder)
    wait_for(lambda: any(record["env_steps"] == 96 for record in metrics.read(run.metrics_file)), process)
    assert [each.env_steps for each in checkpoint.list_checkpoints(run)] == [32]
    process.send_signal(how)
    if how == signal.SIGTERM:
        Path("go").touch()
    _, errors = process.communicate(timeout=200)
    found, complaints = checkpoint.newest_valid(run)
    assert found is not None and complaints == []
    if how == signal.SIGTERM:  # the third update had ended the run
        assert (process.returncode, found.env_steps, run.state) == (0, 96, "finished"), errors
        assert not list(run.checkpoints.glob(".tmp-*"))
        return
    assert (process.returncode, found.env_steps) == (-signal.SIGKILL, 32), errors
    assert list(run.checkpoints.glob(".tmp-*"))
    product.resume(run, live=False)
    assert run.state == "finished"
    assert [each.env_steps for each in checkpoint.list_checkpoints(run)] == [32, 64, 96]
    assert not list(run.checkpoints.glob(".tmp-*"))
