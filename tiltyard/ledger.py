"""What the training loop remembers and writes down: windows of episodes, records, checkpoints, failures.

The loop in training.py decides when; this file does it. Everything a resume needs beyond the engine's own state is
in the Ledger and travels with every checkpoint.

    checkpoints/N/   policies/main.*  engine/*   written by the engine      loop.*   the Ledger
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tiltyard.config.experiment import Experiment, Save
from tiltyard.errors import DivergedError, TiltyardError
from tiltyard.evaluation.measure import Evaluator
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.status import write_status
from tiltyard.track.mirrors import Mirrors
from tiltyard.track.screen import Screen
from tiltyard.types import ActionSpec, Checkpoint, Engine, EnvSpec, Progress, Report, Tree

WINDOW = 100  # training episodes that train/return is the mean of


@dataclass
class Ledger:
    """What the loop remembers from update to update; saved with every checkpoint, so that a resume forgets nothing."""

    returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    extras: dict[str, deque[float]] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    best: float | None = None
    saved: Progress = field(default_factory=Progress)

    def absorb(self, report: Report) -> dict[str, float]:
        """The record's metrics after an engine step."""
        for episode in report.episodes:
            self.returns.append(episode.total)
            self.lengths.append(episode.length)
            for name, value in episode.metrics.items():
                self.extras.setdefault(name, deque(maxlen=WINDOW)).append(value)
        found = dict(report.metrics)
        if self.returns:
            found["train/return"] = sum(self.returns) / len(self.returns)
            found["train/return_min"], found["train/return_max"] = min(self.returns), max(self.returns)
            found["train/length"] = sum(self.lengths) / len(self.lengths)
        found |= {f"episode/{name}": sum(values) / len(values) for name, values in self.extras.items()}
        self.latest |= found
        return found

    def score(self, save: Save, env_steps: int) -> float | None:
        """The metric that ranks checkpoints; an evaluation counts only for the very weights it measured."""
        if save.metric.startswith("eval/") and self.evaluated_at != env_steps:
            return None
        return self.latest.get(save.metric)

    def improves(self, save: Save, env_steps: int) -> bool:
        """Whether the policy as just measured is the best so far, which makes it worth a checkpoint."""
        score = self.score(save, env_steps)
        if score is None or save.best == 0:
            return False
        better = self.best is None or (score > self.best if save.mode == "max" else score < self.best)
        self.best = score if better else self.best
        return better

    def dump(self) -> Tree:
        lists = {name: list(values) for name, values in self.extras.items()}
        plain = {"returns": list(self.returns), "lengths": list(self.lengths), "extras": lists}
        kept = {"latest": self.latest, "evaluated_at": self.evaluated_at, "best": self.best}
        return {**plain, **kept, "saved": asdict(self.saved)}

    @staticmethod
    def read(tree: Tree) -> Ledger:
        windows = {name: deque(values, maxlen=WINDOW) for name, values in tree["extras"].items()}
        return Ledger(
            deque(tree["returns"], maxlen=WINDOW),
            deque(tree["lengths"], maxlen=WINDOW),
            windows,
            dict(tree["latest"]),
            tree["evaluated_at"],
            tree["best"],
            Progress(**tree["saved"]),
        )


class Stopwatch:
    """Where the wall time went since the last record, and how far training came in it."""

    def __init__(self, since: Progress) -> None:
        self.since, self.began = since, time.monotonic()
        self.spent: dict[str, float] = {}

    def add(self, split: Mapping[str, float]) -> None:
        for part, seconds in split.items():
            self.spent[part] = self.spent.get(part, 0.0) + seconds

    @contextmanager
    def measuring(self, part: str) -> Iterator[None]:
        mark = time.monotonic()
        try:
            yield
        finally:
            self.add({part: time.monotonic() - mark})

    def metrics(self, progress: Progress) -> dict[str, float]:
        elapsed = max(time.monotonic() - self.began, 1e-9)
        # What nobody measured (records, status, the screen) is other too: the shares add up to one.
        self.add({"other": max(0.0, elapsed - sum(self.spent.values()))})
        return {
            "speed/env_steps_per_second": (progress.env_steps - self.since.env_steps) / elapsed,
            "speed/frames_per_second": (progress.frames - self.since.frames) / elapsed,
            **{f"time/{part}": seconds / elapsed for part, seconds in self.spent.items()},
        }


def begin_attempt(run: Run, experiment: Experiment) -> int:
    """Count this start of the run and write it into status and events."""
    attempt = int(run.status().get("attempt", 0)) + 1
    write_status(run, state="running", reason="", attempt=attempt, host=socket.gethostname(), pid=os.getpid())
    log_event(run, "started", f"attempt {attempt} started with the {experiment.engine.kind} engine", attempt=attempt)
    return attempt


def opening_lines(run: Run, experiment: Experiment, spec: EnvSpec, engine: Engine) -> list[str]:
    """What is about to be trained, with the derived numbers."""
    obs = ", ".join(f"{name} {item.shape} {item.dtype}" for name, item in spec.obs.items())
    limit = f", at most {spec.episode_limit:,} steps" if spec.episode_limit else ""
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
    said += [f"{switches} switches"] if switches else []
    said += [f"{numbers} numbers"] if numbers else []
    return "acts by " + " and ".join(said)


def restore(run: Run, experiment: Experiment, engine: Engine, attempt: int, screen: Screen) -> tuple[Ledger, Progress]:
    """Bring the engine and the ledger to the newest valid checkpoint, or to the start of a fresh run."""

    def say(kind: str, sentence: str) -> None:
        log_event(run, kind, sentence)
        screen.say(sentence)

    found: Checkpoint | None = None
    if experiment.resume == "never":
        for sentence in checkpoint.set_aside(run, attempt):
            say("warning", sentence)
    else:
        found, complaints = checkpoint.newest_valid(run)
        for sentence in complaints:
            say("warning", sentence)
        if found is None and experiment.resume != "auto":
            found = checkpoint.select(Path(experiment.resume))
    if found is None:
        if attempt > 1:
            metrics.rewind(run.metrics_file, 0, attempt)
            say("resumed", "no checkpoint had been written yet: training starts from the beginning")
        if experiment.model.init:
            say("started", _take_weights(engine, Path(experiment.model.init)))
        return Ledger(), Progress()
    for sentence in engine.load(found.folder):
        say("warning", sentence)
    ledger = Ledger.read(checkpoint.read_tree(found.folder, "loop"))
    ledger.saved = found.progress
    metrics.rewind(run.metrics_file, found.env_steps, attempt)
    say("resumed", f"attempt {attempt} continues from the checkpoint at env step {found.env_steps:,}")
    return ledger, found.progress


def _take_weights(engine: Engine, source: Path) -> str:
    """Start from another policy's weights: those that fit by name and shape."""
    chosen = checkpoint.select(source)
    theirs = checkpoint.read_tree(chosen.folder / "policies", "main")["weights"]
    ours = engine.snapshot()
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
    engine.adopt("main", replace(ours, weights={**ours.weights, **{name: theirs[name] for name in fit}}), {})
    rest = f"; left as initialised: {', '.join(left)}" if left else ""
    return f"took {len(fit)} of {len(ours.weights)} weights from {chosen.folder}{rest}"


def measure(run: Run, engine: Engine, evaluator: Evaluator, ledger: Ledger, progress: Progress) -> dict[str, float]:
    """Evaluate the policy as it is now; seeds, envs and random streams are the evaluation's own."""
    settings = evaluator.experiment.eval
    video = run.folder / "videos" / f"{progress.env_steps:012d}.mp4" if settings.video else None
    result = evaluator.measure(engine.snapshot().weights, video)
    ledger.evaluated_at = progress.env_steps
    found = {"eval/return": result.mean, "eval/length": result.mean_length, "eval/seconds": result.seconds}
    if len(result.returns) > 1:  # one episode has no interval
        found |= {"eval/return_low": result.low, "eval/return_high": result.high}
    ledger.latest |= found
    log_event(run, "evaluated", f"return {result.mean:.4g} at env step {progress.env_steps:,}", returns=result.returns)
    return found


def record(
    run: Run, progress: Progress, found: dict[str, float], attempt: int, mirrors: Mirrors, screen: Screen
) -> None:
    """One line in metrics.jsonl, and the same to the mirrors and the screen."""
    line = {**asdict(progress), "time": time.time(), "attempt": attempt, "metrics": found}
    metrics.append(run.metrics_file, line)
    for sentence in mirrors.record(line):
        log_event(run, "warning", sentence)
        screen.say(sentence)
    split = {name.removeprefix("time/"): value for name, value in found.items() if name.startswith("time/")}
    screen.update(progress, found, split)


def keep(run: Run, engine: Engine, ledger: Ledger, save: Save, progress: Progress, *, milestone: bool = False) -> None:
    """Commit a checkpoint and drop those that need not be kept."""
    ledger.saved = progress

    def write(folder: Path) -> None:
        engine.save(folder)
        checkpoint.write_tree(folder, "loop", ledger.dump())

    score = ledger.score(save, progress.env_steps)
    checkpoint.commit(run, progress.env_steps, progress, score, write, milestone=milestone)
    checkpoint.prune(run, save)
    log_event(run, "saved", f"checkpoint at env step {progress.env_steps:,}", score=score)


def write_progress(run: Run, progress: Progress, ledger: Ledger, **changes: str) -> None:
    """status.json as `tiltyard ls` shows it."""
    write_status(
        run,
        progress=asdict(progress),
        **{"return": ledger.latest.get("train/return"), "eval_return": ledger.latest.get("eval/return")},
        best=ledger.best,
        **changes,
    )


def record_failure(run: Run, error: BaseException) -> None:
    """Say in the folder why it failed, with the batch that did it if there is one."""
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
        write_status(run, state="failed", reason=sentence)
        log_event(run, "failed", sentence)
    except OSError:
        # The disk that refused a checkpoint refuses this too; the error itself is on its way to the user.
        return
