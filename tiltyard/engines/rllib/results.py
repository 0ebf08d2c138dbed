"""Reading RLlib's results and log lines: notes of runners, metrics under our names, time shares, lost runners."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Iterable
from typing import Any

from tiltyard.engines.rllib.worker_spec import KEY

Note = dict[str, Any]
"""what a runner reports after a sample: steps, frames, time spent, ended episodes, or the failure of its envs"""

METRIC_NAMES = {
    "policy_loss": "loss/policy",
    "mean_pi_loss": "loss/policy",
    "vf_loss": "loss/value",
    "mean_vf_loss": "loss/value",
    "entropy": "loss/entropy",
    "mean_kl_loss": "loss/kl",
    "curr_kl_coeff": "setting/kl",
    "curr_entropy_coeff": "setting/entropy",
    "default_optimizer_learning_rate": "setting/lr",
    "policy_learning_rate": "setting/lr",
    "qf_loss": "loss/q",
    "qf_mean": "learn/q",
    "td_error_mean": "learn/td_error",
    "alpha_value": "learn/temperature",
    "diff_num_grad_updates_vs_sampler_policy": "lag/mean",
    "gradients_default_optimizer_global_norm": "learn/gradient_norm",
}


def lookup(tree: Any, *path: str) -> Any:
    """The value at a path of nested dicts; None if it is missing."""
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree


def number(value: Any) -> float:
    """A number of RLlib's, which is NaN where nothing was measured; 0 then."""
    return 0.0 if value is None or math.isnan(float(value)) else float(value)


def read_notes(result: Any) -> list[Note]:
    """The runners' notes in a result; RLlib returns a single one without its list."""
    lines = lookup(result, "env_runners", KEY)
    return [json.loads(line) for line in ([lines] if isinstance(lines, str) else lines or []) if isinstance(line, str)]


def learner_metrics(learned: dict[str, Any], *, several: bool) -> dict[str, float]:
    """The learner's metrics under our names, per policy if there are several."""
    found: dict[str, float] = {}
    for module, numbers in learned.items():
        if module == "__all_modules__" or not isinstance(numbers, dict):
            continue
        prefix = f"policy/{module}/" if several else ""
        for name, value in sorted(numbers.items(), key=lambda pair: "/" not in pair[0]):  # ours win over RLlib's
            ours = name if "/" in name else METRIC_NAMES.get(name)
            with contextlib.suppress(TypeError, ValueError):
                if ours is not None and not math.isnan(float(value)):
                    found.setdefault(f"{prefix}{ours}", float(value))
    return found


def runner_shares(notes: Iterable[Note]) -> dict[str, float]:
    """Shares of the remote runners' time."""
    spent = [note["spent"] for note in notes if "spent" in note and note["runner"] > 0]
    total = sum(each["all"] for each in spent)
    if not total:
        return {}
    return {f"workers/{part}": sum(each[part] for each in spent) / total for part in ("env", "inference")}


def time_split(notes: Iterable[Note], total: float, learned: float, *, remote: bool) -> dict[str, float]:
    """Seconds of the driver's time per activity; with remote runners it only learns and waits."""
    learned = min(learned, total)
    if remote:
        return {"learn": learned, "wait": max(0.0, total - learned)}
    spent = {part: sum(note["spent"][part] for note in notes if "spent" in note) for part in ("env", "inference")}
    spent["learn"] = learned
    return {**spent, "other": max(0.0, total - sum(spent.values()))}


class LostRunners(logging.Handler):
    """Turns RLlib's log lines about lost runners into sentences."""

    LOGGERS = ("ray.rllib.utils.actor_manager", "ray.rllib.env.env_runner_group")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []
        for name in self.LOGGERS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if "out of service" in line:
            actor, cause = re.search(r"actor (\d+)", line), re.search(r"(\w+Error)", line)
            runner, why = f"runner {actor[1]}" if actor else "a runner", cause[1] if cause else "no reason given"
            self.sentences.append(f"{runner} was lost ({why}); it is being replaced")

    def poll_events(self) -> list[str]:
        """Sentences about runners that were lost since the last call."""
        found, self.sentences = list(dict.fromkeys(self.sentences)), []
        return found

    def close(self) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeHandler(self)
        super().close()
