"""One attempt at a run: what the training loop does to engine and folder, in single steps.

The loop in training.py decides when; this file does it.

    begin -> restore -> { measure, record, keep, write_progress } -> write_progress, or rescue and record_failure

    checkpoints/N/   policies/*  engine/*   written by the engine      loop.*   the Ledger
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import resolved_yaml
from tiltyard.errors import EXIT_FAILED, DivergedError, EnvError, TiltyardError, UseError
from tiltyard.evaluation.evaluate import Evaluator
from tiltyard.evaluation.rollouts import Cancelled
from tiltyard.models.policy import saved_policies
from tiltyard.run import atomic, checkpoint, metrics
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.settings_schedule import WHOLE, Segment
from tiltyard.run.status import write_status
from tiltyard.track.screen import Screen
from tiltyard.track.trackers import Trackers
from tiltyard.training.loop_state import LoopState, score_terms
from tiltyard.types import ActionSpec, Checkpoint, Engine, EnvSpec, Progress

CLOSES = 300.0  # seconds that closing everything may take after a failure


@dataclass(frozen=True)
class AttemptSetup:
    """What an attempt is to do: every check has passed and nothing is written yet."""

    found: Experiment
    """the run's settings as they were checked"""
    settings: Experiment
    """those to train with: the same, or changed by the words of `changes`"""
    spec: EnvSpec
    changes: tuple[str, ...] = ()
    afresh: bool = False
    """whether the run's checkpoints are set aside and training starts from scratch"""
    stretch: Segment = WHOLE
    """the part of the run to train now, and what it is told to go on with; all of it for most runs"""


@dataclass
class Attempt:
    """A process training a run, from lock to release."""

    run: Run
    experiment: Experiment
    number: int
    engine: Engine
    evaluator: Evaluator
    screen: Screen
    ledger: LoopState
    progress: Progress
    mirrors: Trackers
    filmable: bool
    stepping: bool = False
    """whether the engine is in a step, or one has failed half-way"""

    def say(self, kind: str, sentence: str) -> None:
        tell(self.run, self.screen, kind, sentence)


def tell(run: Run, screen: Screen, kind: str, sentence: str) -> None:
    """To the person watching and to events.jsonl."""
    log_event(run, kind, sentence)
    screen.say(sentence)


def begin(run: Run, plan: AttemptSetup, screen: Screen) -> int:
    """Count this start of the run and write it, and the settings it changes, into the folder; returns its number."""
    number = int(run.status().get("attempt", 0)) + 1
    now = plan.settings
    changed = {}
    if now != plan.found:
        before = run.folder / f"experiment.before-attempt-{number}.yaml"
        if not before.exists():  # a start cut short right here has kept the older settings already
            atomic.write_text(before, run.experiment_file.read_text(encoding="utf-8"))
        atomic.write_text(run.experiment_file, resolved_yaml(now))
        changed = {"target_env_steps": now.stop.env_steps, "tags": now.tags, "notes": now.notes}
    machine = {"host": socket.gethostname(), "pid": os.getpid()}
    write_status(run, state="running", reason="", attempt=number, **machine, **changed)
    if changed:
        words = list(plan.changes)
        log_event(run, "resumed", f"settings changed for attempt {number}: {' '.join(words)}", overrides=words)
    log_event(run, "started", f"attempt {number} started with the {now.engine.kind} engine", attempt=number)
    error = run.folder / "error.txt"
    if error.exists():
        error.replace(run.folder / f"error.before-attempt-{number}.txt")
    screen.begin(number)
    return number


def opening_lines(run: Run, experiment: Experiment, spec: EnvSpec, engine: Engine) -> list[str]:
    """What is about to be trained, with the derived numbers."""
    obs = ", ".join(f"{name} {item.shape} {item.dtype}" for name, item in spec.obs.items())
    limit = f", at most {spec.episode_limit:,} steps" if spec.episode_limit else ""
    if len(spec.agents) > 1:
        count = len(experiment.policy_settings)
        limit += f"; {len(spec.agents)} agents with {f'{count} policies' if count > 1 else 'one policy'}"
    if experiment.env.isolate != "none":
        limit += f"; each copy in a {experiment.env.isolate} of its own"
    return [
        f"run     {run.id}",
        f"env     {experiment.env.id}: {obs}; {actions_text(spec.action)}{limit}",
        *engine.describe(),
        *(f"note    {note}" for note in spec.notes),
        f"folder  {run.folder}",
    ]


def actions_text(action: ActionSpec) -> str:
    """2 choices; 3 x 3 choices; 2 numbers; 4 switches."""
    choices = [str(part.options) for part in action.parts if part.kind == "categorical"]
    switches = sum(part.columns for part in action.parts if part.kind == "binary")
    numbers = sum(part.columns for part in action.parts if part.kind == "continuous")
    said = [f"{' x '.join(choices)} choices"] if choices else []
    said += [f"{switches} switch{'es' if switches > 1 else ''}"] if switches else []
    said += [f"{numbers} number{'s' if numbers > 1 else ''}"] if numbers else []
    return "acts by " + " and ".join(said)


def starting_point(run: Run, experiment: Experiment) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that training goes on from, None at the very start; and sentences about newer, damaged ones."""
    found, complaints = checkpoint.newest_valid(run)
    if found is not None or checkpoint.was_set_aside(run):
        return found, complaints
    if experiment.resume not in ("auto", "never"):
        return checkpoint.select(Path(experiment.resume)), complaints
    if run.status().get("lineage"):
        raise UseError(
            f"run {run.id} is a fork and the checkpoint it should start from is not there: forking was cut short",
            f"remove it with: tiltyard rm {run.id}, and fork again",
        )
    return None, complaints


def restore(
    run: Run,
    plan: AttemptSetup,
    engine: Engine,
    number: int,
    screen: Screen,
    start: tuple[Checkpoint | None, list[str]] | None,
) -> tuple[LoopState, Progress]:
    """Bring the engine to its `starting_point`; to the start of a fresh run when that is None or holds none."""
    say, experiment = partial(tell, run, screen), plan.settings
    found, complaints = start if start is not None else (None, checkpoint.set_aside(run, number))
    for sentence in complaints:
        say("warning", sentence)
    if found is None:
        if number > 1:
            metrics.rewind(run.metrics_file, 0, number)
            say("resumed", "no checkpoint had been written yet: training starts from the beginning")
        if experiment.model.init:
            for name in experiment.learning:
                say("started", _take_weights(engine, name, Path(experiment.model.init)))
        return LoopState(), Progress()
    for sentence in engine.load(found.folder):
        say("warning", sentence)
    ledger = LoopState.read(checkpoint.read_tree(found.folder, "loop"), experiment)
    ledger.saved = found.progress
    metrics.rewind(run.metrics_file, ledger.recorded_to(found.env_steps), number)
    say("resumed", f"attempt {number} continues from the checkpoint at env step {found.env_steps:,}")
    return ledger, found.progress


def _take_weights(engine: Engine, policy: str, source: Path) -> str:
    """Start from another policy's weights, those of the same name if there are several: what fits by name and shape."""
    chosen = checkpoint.select(source)
    there = saved_policies(chosen.folder)
    other = policy if policy in there else there[0]
    theirs = checkpoint.read_tree(chosen.folder / "policies", other)["weights"]
    ours = engine.snapshot(policy)
    fit = [name for name, array in ours.weights.items() if name in theirs and theirs[name].shape == array.shape]
    left = [
        f"{name} (here {array.shape}, there {theirs[name].shape if name in theirs else 'missing'})"
        for name, array in ours.weights.items()
        if name not in fit
    ] + [f"{name} (only there)" for name in theirs if name not in ours.weights]
    if not fit:
        raise TiltyardError(
            f"model.init = {source}: no weight of it fits this model", "compare both with `tiltyard diff`"
        )
    engine.adopt(policy, replace(ours, weights={**ours.weights, **{name: theirs[name] for name in fit}}), {})
    rest = f"; left as initialised: {', '.join(left)}" if left else ""
    whose = f" of {other} for {policy}" if (policy, other) != ("main", "main") else ""
    return f"took {len(fit)} of {len(ours.weights)} weights{whose} from {chosen.folder}{rest}"


def measure(attempt: Attempt, cancelled: Callable[[], bool]) -> dict[str, float] | None:
    """Evaluate the policy as it is now; seeds, envs and random streams are the evaluation's own. None if cancelled.

    A film that cannot be made is a warning: the numbers are what an evaluation is for.
    """
    run, ledger, env_steps = attempt.run, attempt.ledger, attempt.progress.env_steps
    video = run.folder / "videos" / f"{env_steps:012d}.mp4" if attempt.experiment.eval.video else None

    def unfilmed(error: TiltyardError) -> None:
        attempt.say("warning", f"the evaluation at env step {env_steps:,} is not filmed: {error.message}")

    try:
        weights = {name: attempt.engine.snapshot(name).weights for name in attempt.experiment.learning}
        result = attempt.evaluator.evaluate(weights, attempt.engine.past(), video, unfilmed, cancelled)
    except Cancelled:
        return None
    ledger.evaluated_at = env_steps
    found = {"eval/return": result.mean, "eval/length": result.mean_length, "eval/seconds": result.seconds}
    if len(result.returns) > 1:  # one episode has no interval
        found |= {"eval/return_low": result.low, "eval/return_high": result.high}
    ledger.latest |= found
    log_event(run, "evaluated", f"return {result.mean:.4g} at env step {env_steps:,}", returns=result.returns)
    return found


def record(attempt: Attempt, found: dict[str, float]) -> None:
    """One line in metrics.jsonl, and the same to the mirrors and the screen."""
    line = {**asdict(attempt.progress), "time": time.time(), "attempt": attempt.number, "metrics": found}
    metrics.append(attempt.run.metrics_file, line)
    for sentence in attempt.mirrors.record(line):
        attempt.say("warning", sentence)
    split = {name.removeprefix("time/"): value for name, value in found.items() if name.startswith("time/")}
    attempt.screen.update(attempt.progress, found, split)


def keep(attempt: Attempt, *, milestone: bool = False, drop: bool = True) -> None:
    """Commit a checkpoint and drop those that need not be kept.

    When there is one of this very moment, the new one takes its place with the score and ledger of now.
    """
    run, ledger, progress, save = attempt.run, attempt.ledger, attempt.progress, attempt.experiment.save
    same = [each for each in checkpoint.list_checkpoints(run) if each.progress == progress == ledger.saved]
    ledger.saved = progress

    def write(folder: Path) -> None:
        if same:
            checkpoint.link_files(same[-1].folder, folder, but="loop")
        else:
            attempt.engine.save(folder, cut=attempt.stepping)
        checkpoint.write_tree(folder, "loop", {**ledger.dump(), "terms": score_terms(attempt.experiment)})

    score = ledger.score(save, progress.env_steps)
    checkpoint.commit(run, progress.env_steps, progress, score, write, milestone=milestone)
    if drop:
        checkpoint.prune(run, save)
    said = "has the score of its evaluation" if same else ""
    log_event(run, "saved", f"checkpoint at env step {progress.env_steps:,} {said}".rstrip(), score=score)


def write_progress(attempt: Attempt, **changes: str) -> None:
    """status.json as `tiltyard ls` shows it."""
    latest = attempt.ledger.latest
    write_status(
        attempt.run,
        progress=asdict(attempt.progress),
        **{"return": latest.get("train/return"), "eval_return": latest.get("eval/return")},
        best=attempt.ledger.best,
        **changes,
    )


def rescue(attempt: Attempt) -> None:
    """A last checkpoint of a training that failed, of the moment before the step that did. It drops no other: failing
    again and again just behind it must not push out those from before there was anything wrong."""
    progress = attempt.progress
    if progress.updates == 0 or progress == attempt.ledger.saved:
        return
    try:
        keep(attempt, drop=False)
    except BaseException as error:  # noqa: BLE001 - what is broken may be anything, and what broke it must be told
        why = error.message if isinstance(error, TiltyardError) else f"{type(error).__name__}: {error}"
        with suppress(OSError, TiltyardError):  # a full disk
            attempt.say("warning", f"env step {progress.env_steps:,} could not be saved: {why}")


def end_stuck(run: Run, attempt: Attempt, lock: Lock, sentence: str) -> None:
    """The end of a process whose main thread will do nothing more, from another one."""
    error = EnvError(sentence, "engine.workers=1 or more ends and replaces such envs")
    try:
        if not lock.taken_over:
            record_failure(run, attempt, error)
    finally:
        _end_process(error)


def closing_deadline() -> threading.Timer:
    """Ends this process unless it is cancelled in time: after a failure, an env that hung may hang in close() too."""
    error = EnvError(f"closing takes more than {CLOSES:g} s: an env may hang in it", "`tiltyard show` says what failed")
    timer = threading.Timer(CLOSES, _end_process, (error,))
    timer.daemon = True
    return timer


def _end_process(error: TiltyardError) -> None:
    try:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        sys.stderr.flush()
    finally:
        os._exit(EXIT_FAILED)


def record_failure(run: Run, attempt: Attempt | None, error: BaseException) -> None:
    """Save, unless the user would not wait for it; then say in the folder why it failed and how far it had come, with
    the batch that did it if there is one.

    There is no attempt when it failed before training began: then the run stands where it stood.
    """
    if attempt is not None and not isinstance(error, KeyboardInterrupt):
        rescue(attempt)
    if isinstance(error, KeyboardInterrupt):
        sentence = "interrupted twice: ended without saving"
    elif isinstance(error, TiltyardError):
        sentence = error.message
    else:
        sentence = f"{type(error).__name__}: {error}"
    try:
        if isinstance(error, DivergedError) and error.batch:
            checkpoint.write_tree(run.folder / "bad_batch", "batch", error.batch)
        (run.folder / "error.txt").write_text("".join(traceback.format_exception(error)))
        if attempt is None:
            write_status(run, state="failed", reason=sentence)
        else:
            write_progress(attempt, state="failed", reason=sentence)
        log_event(run, "failed", sentence)
    except OSError:
        # The disk that refused a checkpoint refuses this too; the error itself is on its way to the user.
        return
