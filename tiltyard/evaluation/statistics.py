"""Statistics of an evaluation: the mean return, its 95 % interval, and their files."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from tiltyard.errors import TiltyardError
from tiltyard.evaluation.rollouts import EpisodeResult
from tiltyard.run import atomic


@dataclass(frozen=True)
class Evaluation:
    """A measured policy: one number per episode, the mean and its 95 % interval."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    mean: float
    low: float
    high: float
    mean_length: float
    greedy: bool
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # means of what envs reported at the ends of episodes


def summarise(played: Sequence[EpisodeResult], greedy: bool, seconds: float) -> Evaluation:
    """Mean return with its 95 % interval, by Student's t over episodes."""
    if not played:
        raise TiltyardError("no episode of the evaluation finished", "give more --episodes or --steps")
    returns = [one.total for one in played]
    mean = fmean(returns)
    half = student_t(len(returns) - 1) * stdev(returns) / math.sqrt(len(returns)) if len(returns) > 1 else math.inf
    names = sorted({name for one in played for name in one.metrics})
    return Evaluation(
        returns=tuple(returns),
        lengths=tuple(one.length for one in played),
        seeds=tuple(one.seed for one in played),
        mean=mean,
        low=mean - half,
        high=mean + half,
        mean_length=fmean(one.length for one in played),
        greedy=greedy,
        seconds=seconds,
        metrics={name: fmean(one.metrics[name] for one in played if name in one.metrics) for name in names},
    )


def student_t(freedom: int, level: float = 0.975) -> float:
    """Quantile of Student's t: series in 1/freedom (Abramowitz & Stegun 26.7.5), exact for 1 and 2 degrees."""
    if freedom == 1:
        return math.tan(math.pi * (level - 0.5))
    if freedom == 2:
        return (2 * level - 1) / math.sqrt(2 * level * (1 - level))
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def as_json(result: Evaluation) -> dict[str, Any]:
    """The evaluation as plain data; without an interval (one episode) low and high are null."""
    data = asdict(result)
    for name in ("low", "high"):
        data[name] = data[name] if math.isfinite(data[name]) else None
    return data


def write_files(result: Evaluation, facts: dict[str, Any], stem: Path) -> tuple[Path, Path]:
    """Write STEM.csv with a line per episode and STEM.json with everything, both atomically."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    table, whole = stem.with_name(stem.name + ".csv"), stem.with_name(stem.name + ".json")
    rows = zip(result.seeds, result.returns, result.lengths, strict=True)
    lines = StringIO(newline="")
    writer = csv.writer(lines)
    writer.writerow(["episode", "seed", "return", "length"])
    writer.writerows([index, *row] for index, row in enumerate(rows))
    atomic.write_text(table, lines.getvalue())
    atomic.write_text(whole, json.dumps({**facts, **as_json(result)}, indent=2) + "\n")
    return table, whole
