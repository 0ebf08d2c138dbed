"""What happens when training fails: a last checkpoint, the reason in the run folder, an end for a process that hangs.

Failures before training began leave the run as it was, with the reason in status.json and error.txt. Which failures
are passing, resumable or final is in failures.py.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress

from tiltyard.config.experiment import Experiment
from tiltyard.errors import (
    EXIT_FAILED,
    DiskError,
    DivergedError,
    EnvError,
    ResumableError,
    TiltyardError,
    UseError,
    raised,
)
from tiltyard.failures import class_of
from tiltyard.plugins.resolve import user_traceback
from tiltyard.run import state_file
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.writer import RunWriter
from tiltyard.training.attempt import Attempt, write_progress
from tiltyard.training.saving import save_checkpoint

CLOSE_TIMEOUT = 300.0  # seconds that closing everything may take after a failure


def explain(run: Run, experiment: Experiment, error: BaseException, received: str | None) -> BaseException:
    """The error to report: `error`; one that is resumable; or for an exit that no signal asked for, one that names env
    and model. `received` is a signal that asked to stop, which may have ended processes that the run needs."""
    if isinstance(error, Exception):
        stopped = received is not None and not isinstance(error, DivergedError)
        if not stopped and class_of(error) == "final":
            return error
        message = f"received {received}, then failed: {_reason(error)}" if stopped else _reason(error)
        resumable = ResumableError(message, f"continue with: tiltyard resume {run.typed}")
        resumable.__cause__ = error
        return resumable
    message = f"env {experiment.env.id} or model {experiment.model.id} {raised(error)}, which no signal asked for"
    return TiltyardError(message, "the traceback shows where", user_traceback(error))


def record(writer: RunWriter, attempt: Attempt | None, error: BaseException, *, stopped: bool = False) -> None:
    """Save a checkpoint, unless the user interrupted twice; then write the reason, and a batch that diverged, into the
    folder. `stopped`: a signal asked for it, so nothing starts the run again by itself."""
    kind = class_of(error)
    if attempt is not None and not isinstance(error, KeyboardInterrupt):
        _save_last(attempt)
    state = "failed" if kind == "final" else "stopped"
    with suppress(OSError):  # a full disk refuses this; the error itself still reaches the user
        (writer.run.folder / "error.txt").write_text("".join(traceback.format_exception(error)))
        if isinstance(error, DivergedError) and error.batch:
            state_file.write_tree(writer.run.folder / "bad_batch", "batch", error.batch)
    try:
        if attempt is not None:
            write_progress(attempt)
        writer.status(state=state, reason=_reason(error), failure=None if stopped else kind)
        writer.event(state, _reason(error))
        left = writer.close()
    except (OSError, UseError) as trouble:  # the folder is gone
        left = str(trouble)
    if left:
        sys.stderr.write(f"{left}\n")


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted twice: exited without saving"
    return error.message if isinstance(error, TiltyardError) else f"{type(error).__name__}: {error}"


def _save_last(attempt: Attempt) -> None:
    """Save the moment before the step that failed. Older checkpoints are kept: repeated failures at one place must not
    delete those from before the trouble began."""
    progress = attempt.progress
    with suppress(Exception):  # `error` is it, or the next save fails too
        attempt.saving.wait()
    if progress.updates == 0 or progress == attempt.state.saved:
        return
    try:
        save_checkpoint(attempt, prune=False)
    except BaseException as error:  # noqa: BLE001 - anything may be broken now, and the first error must be reported
        attempt.writer.log("warning", f"env step {progress.env_steps:,} could not be saved: {_reason(error)}")


def check_patience(attempt: Attempt, error: DiskError) -> None:
    """Report that a checkpoint could not be written; raise if that is final, or lasts longer than `save.patience`."""
    back_off = attempt.saving.back_off
    first = back_off.since is None
    seconds, patience = back_off.failed(), attempt.experiment.save.patience
    if class_of(error) == "final":
        raise error
    if seconds >= patience:
        message = f"{error.message}; no checkpoint could be written for {seconds:.0f} s (save.patience = {patience:g})"
        raise DiskError(message, error.hint, error) from error
    if first:
        attempt.writer.log(
            "warning", f"{error.message}; training continues, and a checkpoint is tried again for {patience:g} s"
        )


def exit_hung(attempt: Attempt, lock: Lock, message: str) -> None:
    """End this process from the watchdog's thread: the main thread hangs in an env."""
    error = EnvError(message, "engine.workers=1 or more ends and replaces such envs")
    try:
        if not lock.taken_over:
            record(attempt.writer, attempt, error)
    finally:
        _exit(error)


def close_deadline() -> threading.Timer:
    """A timer that ends this process when closing takes too long: an env that hung may hang in close() too."""
    message = f"closing takes more than {CLOSE_TIMEOUT:g} s: an env may hang in it"
    error = EnvError(message, "`tiltyard show` shows what failed")
    timer = threading.Timer(CLOSE_TIMEOUT, _exit, (error,))
    timer.daemon = True
    return timer


def _exit(error: TiltyardError) -> None:
    try:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        sys.stderr.flush()
    finally:
        os._exit(EXIT_FAILED)
