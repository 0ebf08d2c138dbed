"""One attempt at a run: what the training loop does to the engine and to the run folder, step by step.

loop.py and clocks.py decide when; this file does it; failure.py handles what goes wrong.

    start_attempt -> restore -> { evaluate, record, saving.save_checkpoint, write_progress } -> write_progress

    checkpoints/N/   policies/*  engine/*   written by the engine      loop.*   the LoopState
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import resolved_yaml
from tiltyard.errors import TiltyardError, UseError
from tiltyard.evaluation.evaluate import Evaluator
from tiltyard.evaluation.recording import VideoTarget
from tiltyard.evaluation.rollouts import Cancelled
from tiltyard.evaluation.statistics import Evaluation
from tiltyard.models.policy_files import saved_policies
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run import atomic, checkpoint, state_file
from tiltyard.run.folder import Run
from tiltyard.run.settings_file import restore_settings, write_settings
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.run.writer import RunWriter, missing_records
from tiltyard.track.console import Screen
from tiltyard.track.trackers import Trackers
from tiltyard.training.loop_state import LoopState
from tiltyard.training.saving import Saving
from tiltyard.types import ActionSpec, Checkpoint, Engine, EnvSpec, Progress


@dataclass(frozen=True)
class AttemptSetup:
    """What an attempt will train: every check has passed and nothing is written yet."""

    stored: Experiment
    """the run's settings as they were checked"""
    experiment: Experiment
    """the settings to train with: the stored ones, or those changed by the overrides in `changes`"""
    spec: EnvSpec
    net: PolicyNet | None = None
    """the first policy's net, if it was built with these settings and for this attempt"""
    changes: tuple[str, ...] = ()
    from_scratch: bool = False
    """set the run's checkpoints aside and start from the beginning"""
    schedule: SettingsSchedule = field(default_factory=SettingsSchedule)
    """settings that change at given env steps"""
    trust_code: bool = False
    """whether the user trusts a run of another user"""


@dataclass
class Attempt:
    """A process training a run, from taking the lock to releasing it."""

    run: Run
    writer: RunWriter
    experiment: Experiment
    spec: EnvSpec
    number: int
    engine: Engine
    screen: Screen
    state: LoopState
    progress: Progress
    trackers: Trackers
    saving: Saving
    evaluator: Evaluator | None = None  # made by the first evaluation
    stepping: bool = False
    """whether the engine is in a step, or one has failed half-way"""
    last_save: float = field(default_factory=time.monotonic)
    last_status: float = 0.0
    save_seconds: float = 0.0
    """the longest of recent saves, which a job near its time limit must allow for"""


def start_attempt(writer: RunWriter, setup: AttemptSetup, screen: Screen) -> int:
    """Write the start of an attempt, and the settings it changes, into the run folder; returns its number."""
    run = writer.run
    for complaint in run.damage():
        writer.log("warning", complaint)
    restore_settings(run)
    number = int(run.status().get("attempt", 0)) + 1
    now = setup.experiment
    changed = {}
    if now != setup.stored:
        before = run.folder / f"experiment.before-attempt-{number}.yaml"
        if not before.exists():  # an attempt killed right here has kept the older settings already
            mode = run.experiment_file.stat().st_mode & 0o666  # it may have secrets
            atomic.write_text(before, resolved_yaml(setup.stored), mode)
        write_settings(run.folder, now)
        changed = {"target_env_steps": now.stop.env_steps, "tags": now.tags, "notes": now.notes}
    machine = {"host": socket.gethostname(), "pid": os.getpid()}
    writer.status(state="running", reason="", failure=None, attempt=number, **machine, **changed)
    if changed:
        words = list(setup.changes)
        writer.event("resumed", f"settings changed for attempt {number}: {' '.join(words)}", overrides=words)
    writer.event("started", f"attempt {number} started with the {now.engine.kind} engine", attempt=number)
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
        limit += f"; one {experiment.env.isolate} per env"
    return [
        f"run     {run.id}",
        f"env     {experiment.env.id}: {obs}; {actions_text(spec.action)}{limit}",
        *engine.describe(),
        *(f"note    {note}" for note in spec.notes),
        f"folder  {run.folder}",
    ]


def actions_text(action: ActionSpec) -> str:
    """The action space as Gymnasium writes it: actions Discrete(2); actions MultiDiscrete([3 3]) and Box(2)."""
    options = [part.options for part in action.parts if part.kind == "categorical"]
    binary = sum(part.columns for part in action.parts if part.kind == "binary")
    continuous = sum(part.columns for part in action.parts if part.kind == "continuous")
    spaces = []
    if options:
        spaces.append(f"Discrete({options[0]})" if len(options) == 1 else f"MultiDiscrete({options})".replace(",", ""))
    spaces += [f"MultiBinary({binary})"] if binary else []
    spaces += [f"Box({continuous})"] if continuous else []
    return "actions " + " and ".join(spaces)


def find_start(run: Run, experiment: Experiment) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that training continues from, None for a fresh run; and warnings about newer, damaged ones."""
    found, warnings = checkpoint.newest_valid(run)
    if found is not None or checkpoint.was_set_aside(run):
        return found, warnings
    if experiment.resume not in ("auto", "never"):
        return checkpoint.select(Path(experiment.resume)), warnings
    if run.status().get("lineage"):
        message = f"run {run.id} is a fork without the checkpoint it should start from: forking was interrupted"
        hint = f"remove it with: tiltyard rm {run.id}, and fork again"
        raise UseError(message, hint)
    return None, warnings


def restore(
    writer: RunWriter,
    setup: AttemptSetup,
    engine: Engine,
    number: int,
    start: tuple[Checkpoint | None, list[str]] | None,
) -> tuple[LoopState, Progress]:
    """Restore engine and loop state from what `find_start` found; None sets all checkpoints aside and starts fresh."""
    run, log, experiment = writer.run, writer.log, setup.experiment
    found, warnings = start if start is not None else (None, checkpoint.set_aside(run, number))
    for message in warnings:
        log("warning", message)
    if found is None:
        if number > 1:
            writer.rewind(0, number)
            log("resumed", "no checkpoint was written before: training starts from the beginning")
        if experiment.model.init:
            for name in experiment.learning:
                log("started", _take_weights(engine, name, Path(experiment.model.init)))
        return LoopState(), Progress()
    for message in (*missing_records(run, found), *engine.load(found.folder)):
        log("warning", message)
    state = LoopState.read(state_file.read_tree(found.folder, "loop"), experiment)
    state.saved = found.progress
    writer.rewind(state.recorded_to(found.env_steps), number)
    log("resumed", f"attempt {number} continues from the checkpoint at env step {found.env_steps:,}")
    return state, found.progress


def _take_weights(engine: Engine, policy: str, source: Path) -> str:
    """Copy the weights that fit by name and shape from another policy: the one of the same name, or the first."""
    chosen = checkpoint.select(source)
    there = saved_policies(chosen.folder)
    other = policy if policy in there else there[0]
    theirs = state_file.read_tree(chosen.folder / "policies", other)["weights"]
    ours = engine.snapshot(policy)
    fit = [name for name, array in ours.weights.items() if name in theirs and theirs[name].shape == array.shape]
    left = [
        f"{name} (here {array.shape}, there {theirs[name].shape if name in theirs else 'missing'})"
        for name, array in ours.weights.items()
        if name not in fit
    ] + [f"{name} (only there)" for name in theirs if name not in ours.weights]
    if not fit:
        hint = "compare both with `tiltyard diff`"
        raise TiltyardError(f"model.init = {source}: none of its weights fits this model", hint)
    engine.adopt(policy, replace(ours, weights={**ours.weights, **{name: theirs[name] for name in fit}}), {})
    rest = f"; left as initialised: {', '.join(left)}" if left else ""
    whose = f" of {other} for {policy}" if (policy, other) != ("main", "main") else ""
    return f"took {len(fit)} of {len(ours.weights)} weights{whose} from {chosen.folder}{rest}"


def evaluate(attempt: Attempt, cancelled: Callable[[], bool]) -> tuple[Evaluation, dict[str, float]] | None:
    """Evaluate the present policy with separate seeds, envs and random streams: the result and its metrics, None if
    cancelled.

    A video that cannot be made is only a warning.
    """
    run, state, env_steps = attempt.run, attempt.state, attempt.progress.env_steps

    def no_video(error: TiltyardError) -> None:
        attempt.writer.log("warning", f"no video of the evaluation at env step {env_steps:,}: {error.message}")

    target = VideoTarget(run.folder / "videos" / f"{env_steps:012d}.mp4", no_video)
    video = target if attempt.experiment.eval.video else None
    try:
        weights = {name: attempt.engine.snapshot(name).weights for name in attempt.experiment.learning}
        attempt.evaluator = attempt.evaluator or Evaluator(attempt.experiment, attempt.spec, run.base)
        result = attempt.evaluator.evaluate(weights, attempt.engine.past(), video, cancelled)
    except Cancelled:
        return None
    state.evaluated_at = env_steps
    found = {"eval/return": result.mean, "eval/length": result.mean_length, "eval/seconds": result.seconds}
    if len(result.returns) > 1:  # one episode has no interval
        found |= {"eval/return_low": result.low, "eval/return_high": result.high}
    state.latest |= found
    attempt.writer.event("evaluated", f"return {result.mean:.4g} at env step {env_steps:,}", returns=result.returns)
    return result, found


def record(attempt: Attempt, found: dict[str, float]) -> None:
    """Append a record to metrics.jsonl, and pass it to the trackers and the screen."""
    line = {**asdict(attempt.progress), "time": time.time(), "attempt": attempt.number, "metrics": found}
    attempt.writer.record(line)
    for message in attempt.trackers.record(line):
        attempt.writer.log("warning", message)
    split = {name.removeprefix("time/"): value for name, value in found.items() if name.startswith("time/")}
    attempt.screen.update(attempt.progress, found, split)


def write_progress(attempt: Attempt, **changes: str) -> None:
    """Update status.json, which `tiltyard ls` shows; `changes` are further fields of it."""
    latest = attempt.state.latest
    attempt.writer.status(
        progress=asdict(attempt.progress),
        **{"return": latest.get("train/return"), "eval_return": latest.get("eval/return")},
        best=attempt.state.best,
        **({"save_seconds": round(attempt.save_seconds, 3)} if attempt.save_seconds else {}),
        **changes,
    )
    attempt.last_status = time.monotonic()
