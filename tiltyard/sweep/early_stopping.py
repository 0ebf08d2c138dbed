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
from statistics import median

from tiltyard.config.sweep_plan import EarlyStop, Plan
from tiltyard.run.curve import Curve


def behind(plan: Plan, curves: Mapping[int, Curve], running: Collection[int]) -> dict[int, str]:
    """Which of the running trials the plan's rule stops, and why. `curves` are those of all trials."""
    if plan.stop is None:
        return {}
    if plan.stop.rule == "asha":
        return asha(plan.stop, curves, running, plan.better, last=plan.metric.of == "last")
    return below_median(plan.stop, curves, running, plan.better)


def asha(
    rule: EarlyStop, curves: Mapping[int, Curve], running: Collection[int], better: float = 1, *, last: bool = False
) -> dict[int, str]:
    """Trials that are not among the best at the furthest rung that they reached. `better` is -1 if lower is better."""
    found: dict[int, str] = {}
    scores: dict[int, dict[int, float]] = {}
    for trial, curve in curves.items():
        rung = rule.after
        while curve and rung <= curve.last_step:
            reached = curve.until(rung)
            scores.setdefault(rung, {})[trial] = better * (reached.last if last else reached.best(better))
            rung *= rule.factor
    for trial in running:
        rungs = [rung for rung, known in scores.items() if trial in known]
        if not rungs:
            continue
        rung = max(rungs)
        others = scores[rung]
        rank = 1 + sum(score > others[trial] for score in others.values())
        places = math.ceil(len(others) / rule.factor)
        if len(others) >= rule.factor and rank > places:
            found[trial] = f"rank {rank} of {len(others)} at {rung:,} env steps; the best {places} continue"
    return found


def below_median(
    rule: EarlyStop, curves: Mapping[int, Curve], running: Collection[int], better: float = 1
) -> dict[int, str]:
    """Trials whose best is worse than the median of the others' means up to the same env step. `better` is -1 if lower
    is better."""
    judged = {trial: curves[trial].last_step for trial in running if curves.get(trial)}
    means: dict[int, list[float]] = {trial: [] for trial, now in judged.items() if now >= rule.after}
    for number, other in curves.items():
        for trial in sorted(means, key=judged.__getitem__):  # env steps in order: the records of a part are read once
            now = judged[trial]
            if number != trial and other and other.first_step <= now <= other.last_step:
                means[trial].append(other.mean_until(now))
    found: dict[int, str] = {}
    for trial, others in means.items():
        if len(others) < rule.least:
            continue
        best, middle = curves[trial].best(better), median(others)
        if better * best < better * middle:
            values = f"{best:.6g}, and the median of {len(others)} others is {middle:.6g}"
            found[trial] = f"below the median at {judged[trial]:,} env steps: {values}"
    return found
