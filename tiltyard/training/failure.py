"""What happens when training fails: a last checkpoint, the reason in the run folder, an end for a process that hangs.

Failures before training began leave the run as it was, with the reason in status.json and error.txt.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress

from tiltyard.config.experiment import Experiment
from tiltyard.errors import EXIT_FAILED, DivergedError, EnvError, TiltyardError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.run import state_file
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.status import write_status
from tiltyard.training.attempt import Attempt, write_progress
from tiltyard.training.saving import save_checkpoint

CLOSE_TIMEOUT = 300.0  # seconds that closing everything may take after a failure


def explain(experiment: Experiment, error: BaseException) -> BaseException:
    """The error to report: `error`, or for an exit that no signal asked for, one that names env and model."""
    if isinstance(error, Exception):
        return error
    message = f"env {experiment.env.id} or model {experiment.model.id} {raised(error)}, which no signal asked for"
    return TiltyardError(message, "the traceback shows where", user_traceback(error))


def record(run: Run, attempt: Attempt | None, error: BaseException) -> None:
    """Save a checkpoint, unless the user interrupted twice; then write the reason, and a batch that diverged, into the
    folder."""
    if attempt is not None and not isinstance(error, KeyboardInterrupt):
        _save_last(attempt)
    if isinstance(error, KeyboardInterrupt):
        reason = "interrupted twice: exited without saving"
    elif isinstance(error, TiltyardError):
        reason = error.message
    else:
        reason = f"{type(error).__name__}: {error}"
    try:
        if isinstance(error, DivergedError) and error.batch:
            state_file.write_tree(run.folder / "bad_batch", "batch", error.batch)
        (run.folder / "error.txt").write_text("".join(traceback.format_exception(error)))
        if attempt is None:
            write_status(run, state="failed", reason=reason)
        else:
            write_progress(attempt, state="failed", reason=reason)
        log_event(run, "failed", reason)
    except OSError:
        return  # a full disk refuses this too; the error itself still reaches the user


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
        why = error.message if isinstance(error, TiltyardError) else f"{type(error).__name__}: {error}"
        with suppress(OSError, TiltyardError):  # a full disk
            attempt.log("warning", f"env step {progress.env_steps:,} could not be saved: {why}")


def exit_hung(run: Run, attempt: Attempt, lock: Lock, message: str) -> None:
    """End this process from the watchdog's thread: the main thread hangs in an env."""
    error = EnvError(message, "engine.workers=1 or more ends and replaces such envs")
    try:
        if not lock.taken_over:
            record(run, attempt, error)
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
