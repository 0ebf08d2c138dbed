"""Saves checkpoints: a small state from a copy, next to training; a large one in the loop, without a copy.

    loop     trees of the engine ── small ──> copy ──> next updates ... poll
    thread                                      └────> files, checksums, sync, rename, prune, event
    loop                         ── large ──> the same, array by array, before the next update

One save at a time: the next one waits, and so does everything that ends a training. clocks.py decides when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from tiltyard.errors import TiltyardError
from tiltyard.failures import BackOff
from tiltyard.run import atomic, checkpoint
from tiltyard.run.checkpoint_files import link_files
from tiltyard.run.history import update_index
from tiltyard.run.state_file import encode
from tiltyard.training.loop_state import LoopState, score_terms
from tiltyard.types import Progress

if TYPE_CHECKING:
    from tiltyard.training.attempt import Attempt

MAX_COPY = 256 * 2**20  # bytes of arrays
RECENT = 0.9  # of an earlier save's seconds that still count after the next one


class Saving:
    """The save that is being written, if any. `check` is called before a checkpoint appears."""

    def __init__(self, state: LoopState, check: Callable[[], None]) -> None:
        self._state, self._check = state, check
        self._before = state.saved  # the newest checkpoint that is complete
        self._ended = threading.Event()  # not join(): Python 3.11 takes a thread for ended when that is interrupted
        self._ended.set()
        self._error: BaseException | None = None
        self._closed = False
        self.back_off = BackOff()  # of saves that failed
        self.milestone = False  # whether the newest is one

    def start(self, progress: Progress, write: Callable[[], None], *, background: bool) -> None:
        """Call `write` for a checkpoint of this moment, after the one that is being written."""
        self.wait()
        if background:
            thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
            self._ended.clear()
            thread.start()
        else:
            write()
        self._before, self._state.saved = self._state.saved, progress

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, in the loop
            self._error = error
        finally:
            self._ended.set()

    def poll(self) -> None:
        """Raise the error of a save that has ended."""
        if self._ended.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the save; raises its error. The moment can then be saved again."""
        self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            self._state.saved = self._before
            raise error

    def close(self) -> None:
        """Wait for the save, whose error is of no interest any more. If that is interrupted, no checkpoint appears."""
        try:
            self._ended.wait()
        finally:
            self._closed = True

    def check(self) -> None:
        """Raise unless this process may still write into the run folder."""
        self._check()
        if self._closed:
            raise TiltyardError("the training was interrupted while a checkpoint was being saved")


def save_checkpoint(attempt: Attempt, *, milestone: bool = False, prune: bool = True, background: bool = False) -> None:
    """Commit a checkpoint and delete those that need not be kept; in the `background` if save.async is set and it is
    small.

    A checkpoint of the same moment is replaced by one with the present score and loop state.
    """
    saving, run, state, progress = attempt.saving, attempt.run, attempt.state, attempt.progress
    saving.wait()
    saving.milestone = milestone
    save, began = attempt.experiment.save, time.monotonic()
    before = attempt.save_seconds or atomic.number(run.status().get("save_seconds")) or 0.0
    same = [each.folder for each in checkpoint.list_checkpoints(run) if each.progress == progress == state.saved]
    score = state.score(save, progress.env_steps)
    draft = checkpoint.Draft(run, progress.env_steps)
    with draft.filling() as folder:
        trees = {} if same else attempt.engine.save(folder, cut=attempt.stepping)
        loop = {**state.dump(), "saved": asdict(progress), "terms": score_terms(attempt.experiment)}
        parts = [encode(name, tree) for name, tree in {**trees, "loop": loop}.items()]
        background = background and save.async_ and sum(part.size for part in parts) <= MAX_COPY
        if background:
            parts = [part.copy() for part in parts]

    def write() -> None:
        with draft.filling() as folder:
            files = link_files(same[-1], folder, but="loop") if same else {}
            for part in parts:
                files |= part.write(folder)
            records = attempt.writer.sync()
        draft.commit(progress, score, files, milestone=milestone, check=saving.check, records=records)
        if prune:
            checkpoint.prune(run, save)
        seconds, note = time.monotonic() - began, " with the score of its evaluation" if same else ""
        message = f"checkpoint at env step {progress.env_steps:,}{note}"
        attempt.writer.event("saved", message, score=score, seconds=round(seconds, 3))
        update_index(run)
        if saving.back_off.since is not None:
            late = time.monotonic() - saving.back_off.since
            attempt.writer.log("recovered", f"a checkpoint could be written again, after {late:.1f} s")
        saving.back_off = BackOff()
        attempt.last_save, attempt.save_seconds = time.monotonic(), max(seconds, RECENT * before)

    attempt.last_save = began
    saving.start(progress, write, background=background)
