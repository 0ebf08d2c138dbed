"""What the training loop remembers from update to update beyond the engine's own state; saved with every checkpoint."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from tiltyard.config.experiment import Experiment, episode_digest
from tiltyard.config.policies import PolicySettings
from tiltyard.config.sections import Save
from tiltyard.types import Progress, Report, Tree

WINDOW = 100  # training episodes that train/return is the mean of


@dataclass
class LoopState:
    """Windows of recent returns, latest metrics, best score; loop.* in a checkpoint."""

    returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    extras: dict[str, deque[float]] = field(default_factory=dict)
    policies: dict[str, deque[float]] = field(default_factory=dict)
    alone: dict[str, deque[float]] = field(default_factory=dict)
    """POLICY/METRIC: what the env reported at the end of episodes that a single policy played"""
    latest: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    best: float | None = None
    saved: Progress = field(default_factory=Progress)
    unrecorded: dict[str, float] | None = None
    """metrics of the update before an evaluation, until both are written as one record"""
    selection: Tree = None
    """the PbtState of a population of policies"""

    def add(self, report: Report) -> dict[str, float]:
        """Take in an engine step; returns the metrics of its record."""
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
        """Drop the returns of a policy that was replaced by a copy of another."""
        self.policies.pop(policy, None)
        self.alone = {key: values for key, values in self.alone.items() if not key.startswith(f"{policy}/")}

    @property
    def train_return(self) -> float | None:
        """Mean return of the last 100 training episodes; None before, because short episodes end first."""
        return sum(self.returns) / WINDOW if len(self.returns) == WINDOW else None

    def score(self, save: Save, env_steps: int) -> float | None:
        """The metric that ranks checkpoints; an evaluation counts only for the weights it measured."""
        if save.metric.startswith("eval/") and self.evaluated_at != env_steps:
            return None
        score = self.latest.get(save.metric)
        return score if score is not None and math.isfinite(score) else None

    def improves(self, save: Save, env_steps: int) -> bool:
        """Whether the policy just measured is the best so far, and so worth a checkpoint."""
        score = self.score(save, env_steps)
        if score is None or save.best == 0:
            return False
        better = self.best is None or (score > self.best if save.mode == "max" else score < self.best)
        self.best = score if better else self.best
        return better

    def recorded_to(self, env_steps: int) -> int:
        """The last env step whose record is complete in a checkpoint at `env_steps`."""
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
        """Read a checkpoint's loop.*, without what the present settings (of a fork, say) make meaningless."""
        then = tree.get("terms") or score_terms(now)
        if then.get("episodes", score_terms(now)["episodes"]) != score_terms(now)["episodes"]:
            return LoopState()  # returns of another env
        state = LoopState._read(tree)
        if then["eval"] != score_terms(now)["eval"]:
            state.latest = {name: value for name, value in state.latest.items() if not name.startswith("eval/")}
            state.evaluated_at, state.best = -1, None
        if then["score"] != score_terms(now)["score"]:
            state.best = None
        return state

    @staticmethod
    def _read(tree: Tree) -> LoopState:
        windows: dict[str, Any] = {name: deque(tree[name], maxlen=WINDOW) for name in ("returns", "lengths")}
        for name in ("extras", "policies", "alone"):
            windows[name] = {key: deque(values, maxlen=WINDOW) for key, values in tree.get(name, {}).items()}
        kept = {name: tree.get(name) for name in ("evaluated_at", "best", "unrecorded", "selection")}
        return LoopState(**windows, **kept, latest=dict(tree["latest"]), saved=Progress(**tree["saved"]))


def score_terms(experiment: Experiment) -> dict[str, Any]:
    """What scores depend on: the env, the evaluation, the policies that play, and the metric."""
    measured = experiment.eval.model_dump(mode="json", include={"episodes", "greedy", "seed", "time_limit"})
    if experiment.policies or experiment.match:  # older checkpoints do not say
        players = {name: member.from_ or _past(member) for name, member in experiment.policy_settings.items()}
        measured |= {"policies": players, "match": experiment.match}
    return {
        "episodes": episode_digest(experiment.env),
        "eval": measured,
        "score": {"metric": experiment.save.metric, "mode": experiment.save.mode},
    }


def _past(member: PolicySettings) -> dict[str, Any] | None:
    return None if member.past is None else member.past.model_dump(mode="json")
