"""What the training loop remembers from update to update, and where the time goes.

The Ledger is everything a resume needs beyond the engine's own state: it travels with every checkpoint as loop.*.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tiltyard.config.experiment import Experiment, PolicySettings, Save
from tiltyard.types import Progress, Report, Tree

WINDOW = 100  # training episodes that train/return is the mean of


@dataclass
class LoopState:
    """What the loop remembers from update to update; saved with every checkpoint, so that a resume forgets nothing."""

    returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    extras: dict[str, deque[float]] = field(default_factory=dict)
    policies: dict[str, deque[float]] = field(default_factory=dict)
    alone: dict[str, deque[float]] = field(default_factory=dict)
    """NAME/METRIC: what the env reported at the ends of episodes that one of several policies played alone"""
    latest: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    best: float | None = None
    saved: Progress = field(default_factory=Progress)
    unrecorded: dict[str, float] | None = None
    """what the update before an evaluation gave, until both are one record: a checkpoint in between takes it along"""
    selection: Tree = None
    """how the policies of a population stand"""

    def absorb(self, report: Report) -> dict[str, float]:
        """The record's metrics after an engine step."""
        for episode in report.episodes:
            self.returns.append(episode.total)
            self.lengths.append(episode.length)
            for name, value in episode.metrics.items():
                self.extras.setdefault(name, deque(maxlen=WINDOW)).append(value)
            for name, value in episode.returns.items():
                self.policies.setdefault(name, deque(maxlen=WINDOW)).append(value)
                for metric, number in episode.metrics.items() if len(episode.returns) == 1 else ():
                    self.alone.setdefault(f"{name}/{metric}", deque(maxlen=WINDOW)).append(number)
        found = dict(report.metrics)
        if self.returns:
            found["train/return"] = sum(self.returns) / len(self.returns)
            found["train/return_min"], found["train/return_max"] = min(self.returns), max(self.returns)
            found["train/length"] = sum(self.lengths) / len(self.lengths)
        found |= {f"episode/{name}": sum(values) / len(values) for name, values in self.extras.items()}
        found |= {f"policy/{name}/return": sum(values) / len(values) for name, values in self.policies.items()}
        for key, values in self.alone.items():
            name, _, metric = key.partition("/")
            found[f"policy/{name}/episode/{metric}"] = sum(values) / len(values)
        self.latest |= found
        return found

    def forget(self, policy: str) -> None:
        """What a policy has reached in its episodes: it is another one now."""
        self.policies.pop(policy, None)
        self.alone = {key: values for key, values in self.alone.items() if not key.startswith(f"{policy}/")}

    @property
    def train_return(self) -> float | None:
        """Mean return of the last training episodes, once there are enough: early ones are the short ones."""
        return sum(self.returns) / WINDOW if len(self.returns) == WINDOW else None

    def score(self, save: Save, env_steps: int) -> float | None:
        """The metric that ranks checkpoints; an evaluation counts only for the very weights it measured."""
        if save.metric.startswith("eval/") and self.evaluated_at != env_steps:
            return None
        score = self.latest.get(save.metric)
        return score if score is not None and math.isfinite(score) else None

    def improves(self, save: Save, env_steps: int) -> bool:
        """Whether the policy as just measured is the best so far, which makes it worth a checkpoint."""
        score = self.score(save, env_steps)
        if score is None or save.best == 0:
            return False
        better = self.best is None or (score > self.best if save.mode == "max" else score < self.best)
        self.best = score if better else self.best
        return better

    def recorded_to(self, env_steps: int) -> int:
        """Up to which env step the records stand for a checkpoint at `env_steps`: one that waits is written again."""
        return env_steps if self.unrecorded is None else env_steps - 1

    def dump(self) -> Tree:
        windows = {"extras": self.extras, "policies": self.policies, "alone": self.alone}
        lists = {what: {name: list(values) for name, values in each.items()} for what, each in windows.items()}
        plain = {"returns": list(self.returns), "lengths": list(self.lengths), **lists}
        kept = {"latest": self.latest, "evaluated_at": self.evaluated_at, "best": self.best}
        waiting = {"unrecorded": self.unrecorded, "selection": self.selection}
        return {**plain, **kept, **waiting, "saved": asdict(self.saved)}

    @staticmethod
    def read(tree: Tree, now: Experiment) -> LoopState:
        """What a checkpoint's ledger still says under the settings of now (a fork may have changed them)."""
        then = tree.get("terms") or score_terms(now)
        if then.get("episodes", score_terms(now)["episodes"]) != score_terms(now)["episodes"]:
            return LoopState()  # returns of another env mean nothing here
        ledger = LoopState._read(tree)
        if then["eval"] != score_terms(now)["eval"]:
            ledger.latest = {name: value for name, value in ledger.latest.items() if not name.startswith("eval/")}
            ledger.evaluated_at, ledger.best = -1, None
        if then["score"] != score_terms(now)["score"]:
            ledger.best = None
        return ledger

    @staticmethod
    def _read(tree: Tree) -> LoopState:
        extras, policies, alone = (
            {name: deque(values, maxlen=WINDOW) for name, values in tree.get(windows, {}).items()}
            for windows in ("extras", "policies", "alone")
        )
        return LoopState(
            deque(tree["returns"], maxlen=WINDOW),
            deque(tree["lengths"], maxlen=WINDOW),
            extras,
            policies,
            alone,
            dict(tree["latest"]),
            tree["evaluated_at"],
            tree["best"],
            Progress(**tree["saved"]),
            tree.get("unrecorded"),
            tree.get("selection"),
        )


def score_terms(experiment: Experiment) -> dict[str, Any]:
    """What the numbers of a ledger depend on: the env, how it is measured, who plays, and what counts as best."""
    measured = experiment.eval.model_dump(mode="json", include={"episodes", "greedy", "seed", "time_limit"})
    if experiment.policies or experiment.match:  # older checkpoints do not say
        players = {name: member.from_ or _past(member) for name, member in experiment.policy_settings.items()}
        measured |= {"policies": players, "match": experiment.match}
    return {
        "episodes": experiment.env.episode_digest(),
        "eval": measured,
        "score": {"metric": experiment.save.metric, "mode": experiment.save.mode},
    }


def _past(member: PolicySettings) -> dict[str, Any] | None:
    return None if member.past is None else member.past.model_dump(mode="json")


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
        """Speeds and shares of time for a record; what comes now counts for the next one."""
        elapsed = max(time.monotonic() - self.began, 1e-9)
        # What nobody measured (records, status, the screen) is other too: the shares add up to one.
        self.add({"other": max(0.0, elapsed - sum(self.spent.values()))})
        found = {
            "speed/env_steps_per_second": (progress.env_steps - self.since.env_steps) / elapsed,
            "speed/frames_per_second": (progress.frames - self.since.frames) / elapsed,
            **{f"time/{part}": seconds / elapsed for part, seconds in self.spent.items()},
        }
        self.since, self.began, self.spent = progress, time.monotonic(), {}
        return found
