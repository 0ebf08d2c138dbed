"""Early stopping: successive halving (ASHA) and the median rule. Pure: curves in, trials to stop and reasons out.

    asha     at env steps after, after*factor, after*factor^2, ... (rungs) only the best 1/factor of the trials that
             reached the rung continue, once `factor` have; no trial waits for others, so early ones pass more easily
             and are ranked again as others arrive
    median   a trial stops if its best so far is below the median of the other trials' means up to the same env step

Each call uses the curves alone, so a decision that was lost is made again by the next call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import fmean, median

from tiltyard.config.sweep_plan import EarlyStop, Plan
from tiltyard.sweep.results import Curve


def behind(plan: Plan, curves: Mapping[int, Curve], running: Collection[int]) -> dict[int, str]:
    """Which of the running trials the plan's rule stops, and why. `curves` are those of all trials."""
    if plan.stop is None:
        return {}
    signed = {trial: [(step, plan.better * value) for step, value in curve] for trial, curve in curves.items()}
    if plan.stop.rule == "asha":
        return asha(plan.stop, signed, running, last=plan.metric.of == "last")
    return below_median(plan.stop, signed, running, plan.better)


def asha(
    rule: EarlyStop, curves: Mapping[int, Curve], running: Collection[int], *, last: bool = False
) -> dict[int, str]:
    """Trials that are not among the best at the furthest rung that they reached. Higher values are better here."""
    found: dict[int, str] = {}
    scores: dict[int, dict[int, float]] = {}
    for trial, curve in curves.items():
        rung = rule.after
        while curve and rung <= curve[-1][0]:
            scores.setdefault(rung, {})[trial] = _at(curve, rung, last)
            rung *= rule.factor
    for trial in running:
        reached = [rung for rung, known in scores.items() if trial in known]
        if not reached:
            continue
        rung = max(reached)
        others = scores[rung]
        rank = 1 + sum(score > others[trial] for score in others.values())
        places = math.ceil(len(others) / rule.factor)
        if len(others) >= rule.factor and rank > places:
            found[trial] = f"rank {rank} of {len(others)} at {rung:,} env steps; the best {places} continue"
    return found


def _at(curve: Curve, rung: int, last: bool) -> float:
    """The value of a trial when it reached the rung: its newest, or its best so far."""
    end = next(i for i, (step, _) in enumerate(curve) if step >= rung)
    return curve[end][1] if last else max(value for _, value in curve[: end + 1])


def below_median(
    rule: EarlyStop, curves: Mapping[int, Curve], running: Collection[int], better: float = 1
) -> dict[int, str]:
    """Trials whose best is below the median of the others' means up to the same env step. Higher values are better
    here; `better` is -1 if the metric is minimised and the curves are negated."""
    found: dict[int, str] = {}
    for trial in running:
        curve = curves.get(trial)
        if not curve or curve[-1][0] < rule.after:
            continue
        now = curve[-1][0]
        means = [
            fmean(value for step, value in other if step <= now)
            for number, other in curves.items()
            if number != trial and other and other[-1][0] >= now and other[0][0] <= now
        ]
        if len(means) < rule.least:
            continue
        best, middle = max(value for _, value in curve), median(means)
        if best < middle:
            values = f"{better * best:.6g}, and the median of {len(means)} others is {better * middle:.6g}"
            found[trial] = f"below the median at {now:,} env steps: {values}"
    return found
