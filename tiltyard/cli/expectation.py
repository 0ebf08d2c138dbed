"""`--expect 'return>=475'`: a condition on a metric of the finished run, for the exit code."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiltyard.errors import UseError

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.run.folder import Run

COMPARISONS: dict[str, Callable[[float, float], bool]]
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
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
            message = f"--expect {self.text!r} needs an evaluation, but eval.every = 0 and eval.at_end = false"
            hint = "set eval.at_end=true, or expect train_return"
            raise UseError(message, hint)
        if self.metric in ("eval/return_low", "eval/return_high") and experiment.eval.episodes == 1:
            problem = f"--expect {self.text!r}: one episode has no interval (eval.episodes = 1)"
            raise UseError(problem, "set eval.episodes higher")

    def report(self, run: Run, latest: dict[str, float]) -> bool:
        """Whether it is met; if not, the reason is printed on stderr."""
        from tiltyard.run import metrics

        value = latest.get(self.metric)
        if value is None:  # speed and time are only in the recorded metrics
            newest = metrics.curve(run, self.metric).newest
            value = newest[1] if newest else None
        if value is not None and COMPARISONS[self.comparison](value, self.number):
            return True
        found = "was never recorded" if value is None else f"is {value:.6g}"
        sys.stderr.write(f"error: expected {self.text}, but {self.metric} {found}\n")
        return False
