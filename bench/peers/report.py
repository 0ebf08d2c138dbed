"""Output of every runner: one JSON line per second during training, and the measured numbers as the last line.

    start     before the first env step                      update    after each update, with the env steps so far
    score     after each greedy evaluation                   end       printed by `finish`

Two kinds of measurement. Without --steps: throughput, learning included, from an update at least `--warmup` seconds
after the first to one at least `--seconds` later. With --steps: an evaluation every `--every` env steps, until one
reaches `--goal` or the steps are used up; training seconds exclude evaluations. Standard library only: every peer's
Python imports it.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import process_tree


class Report:
    def __init__(self, settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Parse the command line: a task, the name of one of the runner's `settings` for it, and options."""
        parser = argparse.ArgumentParser()
        if settings is not None:
            parser.add_argument("task", choices=list(settings))
            parser.add_argument("settings", help="; ".join(f"{task}: {', '.join(of)}" for task, of in settings.items()))
        parser.add_argument("--seconds", type=float, default=15.0)
        parser.add_argument("--warmup", type=float, default=5.0)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--steps", type=int, help="train for this many env steps, with evaluations")
        parser.add_argument("--goal", type=float, default=float("inf"), help="stop at an evaluation with this return")
        parser.add_argument("--every", type=int, default=2048, help="env steps between evaluations")
        if settings is None:
            parser.add_argument("arguments", nargs="+", help="the experiment and key=value settings")
        self.options = parser.parse_args()
        self.task: str = getattr(self.options, "task", "")
        self.seed: int = self.options.seed
        self.settings: dict[str, Any] = {}
        if settings is not None:
            if self.options.settings not in settings[self.task]:
                parser.error(f"settings of {self.task}: {', '.join(settings[self.task])}")
            self.settings = dict(settings[self.task][self.options.settings])
        self.started = self.first = self.reported = self.evaluating = 0.0
        self.opened: tuple[float, int, float, float] | None = None
        self.closed: tuple[float, int, float, float] | None = None
        self.curve: list[tuple[int, float]] = []
        self.solved: dict[str, float] | None = None

    def start(self, at: float | None = None) -> None:
        self.started = at or time.time()

    def update(self, steps: int, at: float | None = None) -> bool:
        """Record one update; `steps` is the number of env steps so far. Returns True if training can stop."""
        now = at or time.time()
        self.first = self.first or now
        over = self.opened is not None and now >= self.opened[0] + self.options.seconds
        if self.options.steps:
            over = steps >= self.options.steps or self.solved is not None
        opens = self.opened is None and now >= self.first + self.options.warmup
        if over or opens or now >= self.reported + 1:
            mark = (now, steps, process_tree.cpu_seconds(os.getpid()), process_tree.machine_seconds())
            self.opened, self.closed, self.reported = self.opened or (mark if opens else None), mark, now
            _print(event="update", time=now, steps=steps, cpu_seconds=mark[2])
        return over

    def evaluation_due(self, steps: int) -> bool:
        last = self.curve[-1][0] if self.curve else 0
        return bool(self.options.steps) and steps // self.options.every > last // self.options.every

    def score(self, steps: int, value: float, seconds: float, at: float | None = None) -> None:
        """Record an evaluation that took `seconds` and ended now (or `at`)."""
        now = at or time.time()
        self.evaluating += seconds
        self.curve.append((steps, value))
        if self.solved is None and value >= self.options.goal:
            self.solved = {"steps": steps, "seconds": now - self.started - self.evaluating, "time": now}
        _print(event="score", time=now, steps=steps, value=value)

    def finish(self, *packages: str) -> None:
        """Print the numbers with the versions of the packages."""
        numbers: dict[str, Any] = {"first_update": self.first, "evaluation_seconds": self.evaluating}
        if self.opened and self.closed and self.closed[0] > self.opened[0]:
            seconds, steps, cpu, busy = (b - a for a, b in zip(self.opened, self.closed, strict=True))
            numbers |= {"window_seconds": seconds, "steps": steps, "steps_per_second": steps / seconds}
            numbers |= {"cpu_seconds": cpu, "steps_per_cpu_second": steps / cpu if cpu else None}
            numbers["others_cores"] = max(0.0, (busy - cpu) / seconds)
        if self.curve:
            numbers |= {"curve": self.curve, "solved": self.solved}
        _print(event="end", settings=self.settings, versions={name: version(name) for name in packages}, **numbers)


def _print(**line: object) -> None:
    print("\n" + json.dumps(line), flush=True)  # the peer may have printed an incomplete line before it
