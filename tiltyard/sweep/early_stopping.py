"""Who falls behind: successive halving (ASHA) and the median rule. Pure: curves in, trials to end and why out.

    asha     at env steps after, after*factor, after*factor^2, ... only the best one in `factor` of those that came as
             far goes on, once `factor` have come; nobody waits for anybody, so early ones pass more easily and are
             judged again as others come
    median   whose best so far is worse than the median of the others' means up to the same env step is ended

Each call judges from the curves alone, so a decision that was lost is made again by whoever looks next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import fmean, median

from tiltyard.config.sweep_plan import EarlyStop, Plan
from tiltyard.sweep.results import Curve


def behind(plan: Plan, curves: Mapping[int, Curve], running: Collection[int]) -> dict[int, str]:
    """Which of the running trials the plan's rule ends, and why. `curves` are those of all trials."""
    if plan.stop is None:
        return {}
    turned = {trial: [(step, plan.better * value) for step, value in curve] for trial, curve in curves.items()}
    if plan.stop.rule == "asha":
        return asha(plan.stop, turned, running, last=plan.metric.of == "last")
    return below_median(plan.stop, turned, running, plan.better)


def asha(
    rule: EarlyStop, curves: Mapping[int, Curve], running: Collection[int], *, last: bool = False
) -> dict[int, str]:
    """Trials that are not among the best at the furthest rung that they reached. More is better here."""
    found: dict[int, str] = {}
    scores: dict[int, dict[int, float]] = {}
    for trial, curve in curves.items():
        for rung in _rungs(rule, curve[-1][0] if curve else 0):
            scores.setdefault(rung, {})[trial] = _at(curve, rung, last)
    for trial in running:
        reached = [rung for rung, known in scores.items() if trial in known]
        if not reached:
            continue
        rung = max(reached)
        others = scores[rung]
        rank = 1 + sum(score > others[trial] for score in others.values())
        places = math.ceil(len(others) / rule.factor)
        if len(others) >= rule.factor and rank > places:
            found[trial] = f"place {rank} of {len(others)} at {rung:,} env steps, and the first {places} go on"
    return found


def _rungs(rule: EarlyStop, steps: int) -> list[int]:
    rungs, rung = [], rule.after
    while rung <= steps:
        rungs.append(rung)
        rung *= rule.factor
    return rungs


def _at(curve: Curve, rung: int, last: bool) -> float:
    """What a trial had to show when it reached the rung."""
    end = next(i for i, (step, _) in enumerate(curve) if step >= rung)
    return curve[end][1] if last else max(value for _, value in curve[: end + 1])


def below_median(
    rule: EarlyStop, curves: Mapping[int, Curve], running: Collection[int], better: float = 1
) -> dict[int, str]:
    """Trials whose best is worse than the median of the others' means up to the same env step. More is better here;
    `better` is -1 where the metric itself was turned round for that."""
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
            said = f"{better * best:.6g}, where half of {len(means)} others have {better * middle:.6g}"
            found[trial] = f"behind at {now:,} env steps: {said}"
    return found
