"""metrics.jsonl: every measurement of a run, one JSON line per record, append only; and what each name means.

    {"env_steps": 4096, "frames": 4096, "updates": 2, "episodes": 31, "seconds": 1.7, "time": ..., "attempt": 1,
     "metrics": {"train/return": 22.5, ...}}
    {"rewind_to": 2048, "attempt": 2}     the run went back to a checkpoint: earlier records above 2048 are void

Numbers that are none are the strings nan, inf and -inf. Trackers are mirrors of this file, never the other way round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.run.folder import Run

FILE = "metrics.jsonl"


def _path(where: Run | Path) -> Path:
    """The file itself, whether named by a run, a run folder or its own path."""
    folder = where if isinstance(where, Path) else where.folder
    return folder / FILE if folder.suffix != ".jsonl" else folder


def append(where: Run | Path, record: Mapping[str, Any]) -> None:
    """Write one record; `time` (seconds since 1970) is added when left out."""
    _write(_path(where), {"time": round(time.time(), 3), **record})


def rewind(where: Run | Path, env_steps: int, attempt: int) -> None:
    """Declare every record so far that lies beyond `env_steps` void: the run goes on from there."""
    _write(_path(where), {"rewind_to": env_steps, "attempt": attempt})


def _write(path: Path, record: Mapping[str, Any]) -> None:
    atomic.append_line(path, atomic.to_json(dict(record)))


def read(where: Run | Path) -> list[dict[str, Any]]:
    """The records in force, oldest first, metrics as floats. Torn lines are left out (see `broken_lines`).

    Each gets `since`, the env step that it counts from: that of the record before it, or its attempt's first.
    """
    kept: list[dict[str, Any]] = []
    since = 0.0
    for record in atomic.read_lines(_path(where))[0]:
        if "rewind_to" in record:
            limit = atomic.number(record["rewind_to"])
            if limit is not None:
                kept = [earlier for earlier in kept if earlier["env_steps"] <= limit]
                since = limit
            continue
        values, steps = record.get("metrics"), record.get("env_steps")
        if not isinstance(values, dict) or not isinstance(steps, int):
            continue
        numbers = {name: atomic.number(value) for name, value in values.items()}
        record["metrics"] = {name: value for name, value in numbers.items() if value is not None}
        kept.append({**record, "since": since})
        since = steps
    return kept


def broken_lines(where: Run | Path) -> list[int]:
    """Numbers (from 1) of lines that are no records: a crash tears at most one per attempt."""
    return atomic.read_lines(_path(where))[1]


def series(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Env steps and values of one metric, where it was recorded."""
    pairs = [
        (int(record["env_steps"]), float(record["metrics"][name])) for record in records if name in record["metrics"]
    ]
    return [steps for steps, _ in pairs], [value for _, value in pairs]


def latest(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """The newest value of one metric."""
    _, values = series(records, name)
    return values[-1] if values else None


# ---------------------------------------------------------------------------------------------- where the time goes


def seconds_covered(since: float, env_steps: int, found: Mapping[str, float]) -> float:
    """The wall time that a record's shares are of: the env steps it covers over its env steps per second."""
    speed = found.get("speed/env_steps_per_second", 0.0)
    return (env_steps - since) / speed if speed > 0 else 0.0


def time_shares(records: Iterable[Mapping[str, Any]], whose: str = "time") -> dict[str, float]:
    """Where the wall time of all these records went: each counts by the seconds it covers, so the sum is 1.

    `whose` is "time" for the learner's process, "workers" for theirs.
    """
    spent: dict[str, float] = {}
    for record in records:
        seconds = seconds_covered(record["since"], record["env_steps"], record["metrics"])
        for name, share in record["metrics"].items():
            if name.startswith(f"{whose}/") and name != "workers/restarts":
                part = name.removeprefix(f"{whose}/")
                spent[part] = spent.get(part, 0.0) + share * seconds
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items()} if 0 < total < math.inf else {}


def percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares of one whole as whole percents that add up to 100: what is left goes to the largest remainders."""
    found = {part: math.floor(100 * share) for part, share in shares.items()}
    by_remainder = sorted(shares, key=lambda part: found[part] - 100 * shares[part])
    for part in by_remainder[: 100 - sum(found.values())]:
        found[part] += 1
    return found


# ---------------------------------------------------------------------------------------------- what names mean


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric(
        "train/return", "reward", "Mean return of the last 100 training episodes, before reward scaling and clipping."
    ),
    Metric("train/return_min", "reward", "Smallest return among the last 100 training episodes."),
    Metric("train/return_max", "reward", "Largest return among the last 100 training episodes."),
    Metric("train/length", "env steps", "Mean length of the last 100 training episodes."),
    Metric("eval/return", "reward", "Mean return of an evaluation on its fixed seeds."),
    Metric("eval/return_low", "reward", "Lower end of the 95 % interval of eval/return."),
    Metric("eval/return_high", "reward", "Upper end of the 95 % interval of eval/return."),
    Metric("eval/length", "env steps", "Mean episode length of an evaluation."),
    Metric("eval/seconds", "seconds", "Time the evaluation took."),
    Metric("loss/policy", "", "Policy loss, mean over the minibatches of the update's last epoch."),
    Metric("loss/value", "", "Value loss in normalised units, mean over the minibatches of the last epoch."),
    Metric("loss/entropy", "nats", "Entropy of the policy, mean over the minibatches of the last epoch."),
    Metric(
        "loss/kl",
        "nats",
        "Approximate KL divergence from the policy that acted, over the minibatches of the last epoch, each before its "
        "gradient step: 0 with a single gradient step.",
    ),
    Metric("learn/clip_fraction", "0 to 1", "Share of samples whose probability ratio was clipped."),
    Metric(
        "learn/explained_variance",
        "up to 1",
        "How much of the returns' variance the value function explains; 0 is none.",
    ),
    Metric("learn/gradient_norm", "", "Norm of the gradient before clipping, mean over the last epoch."),
    Metric(
        "learn/epochs", "epochs", "Passes over the batch that were made before algo.kl_stop, if set, ended the update."
    ),
    Metric("setting/lr", "", "Learning rate in force."),
    Metric("setting/clip", "", "Clip range of the probability ratio in force; 1e15 where nothing is clipped (a2c)."),
    Metric("setting/entropy", "", "Weight of the entropy bonus in force."),
    Metric("setting/kl", "", "Weight of the KL penalty in force."),
    Metric(
        "speed/env_steps_per_second", "env steps / s", "Env steps since the last record over the wall time they took."
    ),
    Metric(
        "speed/frames_per_second", "frames / s", "Simulator frames since the last record over the wall time they took."
    ),
    Metric("time/env", "0 to 1", "Share of the wall time since the last record spent in envs."),
    Metric("time/inference", "0 to 1", "Share of the wall time since the last record spent choosing actions."),
    Metric("time/learn", "0 to 1", "Share of the wall time since the last record spent in updates."),
    Metric("time/wait", "0 to 1", "Share of the wall time since the last record spent waiting for workers."),
    Metric("time/transfer", "0 to 1", "Share of the wall time since the last record spent on copies of samples."),
    Metric("time/save", "0 to 1", "Share of the wall time since the last record spent writing checkpoints."),
    Metric("time/eval", "0 to 1", "Share of the wall time since the last record spent in evaluations."),
    Metric("time/other", "0 to 1", "Share of the wall time since the last record spent on everything else."),
    Metric("workers/env", "0 to 1", "Share of the workers' time spent in envs."),
    Metric("workers/inference", "0 to 1", "Share of the workers' time spent choosing actions."),
    Metric("workers/wait", "0 to 1", "Share of the workers' time spent waiting for the learner."),
    Metric("workers/other", "0 to 1", "Share of the workers' time spent on everything else."),
    Metric("workers/restarts", "workers", "Workers that died or hung and were replaced, in this attempt."),
    Metric("actor/rows", "rows", "Mean rows that were decided on at once; with engine.inference batched only."),
    Metric("lag/mean", "updates", "How old the weights were that acted in this batch; asynchronous mode only."),
    Metric("lag/max", "updates", "Age of the oldest weights that acted in this batch."),
    Metric("lag/<updates>", "0 to 1", "Share of the batch whose weights were that many updates old."),
    Metric("lag/discarded", "env steps", "Thrown away in this attempt because they were older than max_lag."),
    Metric(
        "policy/<name>/return",
        "reward",
        "With several policies: mean return of this one's agents in the last 100 training episodes that it played in.",
    ),
    Metric("policy/<name>/env_steps", "env steps", "With several policies: those that this one has learned from."),
    Metric(
        "policy/<name>/<metric>",
        "its own",
        "With several policies: this one's loss/..., learn/... and setting/... , and episode/... of episodes that it "
        "played alone.",
    ),
    Metric(
        "episode/<name>",
        "the env's own",
        "Mean over the last 100 training episodes of what the env reported at their ends.",
    ),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


def describe(name: str) -> Metric | None:
    """What a metric means, or None for a name that is not ours. Every episode/... name has one meaning."""
    if name.startswith("episode/"):
        name = "episode/<name>"
    elif name.startswith("policy/"):
        _, _, own = name.removeprefix("policy/").partition("/")
        learned = own.startswith(("loss/", "learn/", "setting/")) and own in _BY_NAME
        if own in ("return", "env_steps"):
            name = f"policy/<name>/{own}"
        elif learned or own.startswith("episode/"):
            name = "policy/<name>/<metric>"
    elif name.startswith("lag/") and name[4:].isdecimal():
        name = "lag/<updates>"
    return _BY_NAME.get(name)


def reference_page() -> str:
    """The table of all metrics as Markdown."""
    rows = [f"| `{metric.name}` | {metric.unit or '–'} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(["| metric | unit | meaning |", "| --- | --- | --- |", *rows]) + "\n"
