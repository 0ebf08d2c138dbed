"""`--expect 'return>=475'`: a condition on a metric of the finished run, for the exit code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiltyard.errors import UseError

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.run.folder import Run

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
SHORT = {"return": "eval/return", "train_return": "train/return"}  # as below `stop`


@dataclass(frozen=True)
class Expectation:
    """`return>=475`: a metric, a comparison, a number."""

    text: str
    metric: str
    comparison: str
    number: float

    @staticmethod
    def parse(text: str) -> Expectation:
        match = re.fullmatch(r"\s*([\w/.-]+)\s*(>=|<=|==|>|<)\s*(\S+)\s*", text)
        try:
            number = float(match[3]) if match else float("nan")
        except ValueError:
            number = float("nan")
        if match is None or number != number:
            raise UseError(f"--expect {text!r} is not METRIC>=NUMBER", "write --expect 'return>=475'")
        return Expectation(text, SHORT.get(match[1], match[1]), match[2], number)

    def check(self, experiment: Experiment) -> None:
        """UseError if the metric will not be recorded, so that the run cannot meet the expectation."""
        from tiltyard.training.preflight import evaluates, require_metric

        require_metric(self.metric, f"--expect {self.text!r}: {self.metric}", also=[*SHORT])
        if self.metric.startswith("eval/") and not evaluates(experiment):
            raise UseError(
                f"--expect {self.text!r} needs an evaluation, but eval.every = 0 and eval.at_end = false",
                "set eval.at_end=true, or expect train_return",
            )
        if self.metric in ("eval/return_low", "eval/return_high") and experiment.eval.episodes == 1:
            raise UseError(
                f"--expect {self.text!r}: one episode has no interval (eval.episodes = 1)",
                "set eval.episodes higher",
            )

    def missed(self, run: Run, latest: dict[str, float]) -> str | None:
        """Why it is not met, or None."""
        from tiltyard.run import metrics

        value = latest.get(self.metric)
        if value is None:  # speed and time are only in the recorded metrics
            value = metrics.latest(metrics.read(run), self.metric)
        if value is None:
            return f"expected {self.text}, but {self.metric} was never recorded"
        if not COMPARISONS[self.comparison](value, self.number):
            return f"expected {self.text}, but {self.metric} is {value:.6g}"
        return None
