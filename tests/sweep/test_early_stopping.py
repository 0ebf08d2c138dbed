"""Early stopping rules on synthetic curves with a known best arm."""

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweep.fake import fake_sweep
from tiltyard.config.sweep_plan import EarlyStop, Plan, load_plan
from tiltyard.run.curve import Curve, Points
from tiltyard.sweep.early_stopping import asha, behind, below_median

ARMS, TOP, EVERY = 27, 27_000, 500
Rule = Callable[[EarlyStop, dict[int, Curve], set[int]], dict[int, str]]


def curves_of(points: dict[int, Points]) -> dict[int, Curve]:
    return {arm: Curve.of(each) for arm, each in points.items()}


def race(rule: EarlyStop, judge: Rule, seed: int, slots: int = 4) -> tuple[int, dict[int, Points], set[int]]:
    """Run noisy arms with different heights and speeds, `slots` in parallel, in random order.

    Return the best arm, the curves and the ended arms.
    """
    rng = random.Random(seed)
    heights = {arm: arm / ARMS for arm in range(ARMS)}
    speeds = {arm: rng.uniform(1500, 4000) for arm in range(ARMS)}
    waiting = list(range(ARMS))
    rng.shuffle(waiting)
    curves: dict[int, Points] = {}
    running: set[int] = set()
    ended: set[int] = set()
    while waiting or running:
        while waiting and len(running) < slots:
            arm = waiting.pop()
            running.add(arm)
            curves[arm] = []
        for arm in sorted(running):
            step = len(curves[arm]) * EVERY + EVERY
            value = heights[arm] * (1 - math.exp(-step / speeds[arm])) + rng.gauss(0, 0.01)
            curves[arm].append((step, value))
        out = set(judge(rule, curves_of(curves), running))
        ended |= out
        running = {arm for arm in running - out if curves[arm][-1][0] < TOP}
    return max(heights, key=heights.__getitem__), curves, ended


def test_asha_keeps_the_best_of_27_arms_in_19_of_20_seeds_and_saves_half_of_the_steps() -> None:
    rule = EarlyStop(rule="asha", after=3000, factor=3)
    kept, steps = 0, []
    for seed in range(20):
        best, curves, ended = race(rule, asha, seed)
        kept += best not in ended
        steps.append(sum(curve[-1][0] for curve in curves.values()))
    assert kept >= 19
    assert max(steps) < 0.5 * ARMS * TOP, "less than half of what it costs to run all of them"


def test_median_rule_keeps_the_best_and_ends_bad_arms() -> None:
    rule = EarlyStop(rule="median", after=3000, least=5)
    kept, share = 0, []
    for seed in range(20):
        best, _, ended = race(rule, below_median, seed)
        kept += best not in ended
        share.append(len(ended) / ARMS)
    assert kept >= 19
    assert 0.15 < sum(share) / len(share) < 0.6


def test_asha_matches_a_hand_computed_example() -> None:
    rule = EarlyStop(rule="asha", after=10, factor=3)
    points: dict[int, Points] = {n: [(5, 99.0 if n == 1 else 0.0), (10, float(n))] for n in range(1, 7)}
    curves = curves_of(points)
    # without last=True the best value so far counts, and arm 1 had 99 before the first rung
    assert set(asha(rule, curves, set(curves))) == {2, 3, 4, 5}
    assert set(asha(rule, curves, set(curves), last=True)) == {1, 2, 3, 4}
    assert asha(rule, curves, {6}) == {}
    assert asha(rule, curves_of({1: [(9, 0.0)], 2: [(9, 1.0)]}), {1, 2}) == {}, (
        "nobody has come as far as the first rung"
    )
    assert asha(rule, {1: curves[1], 2: curves[2]}, {1, 2}) == {}, "two are too few to tell a third from"
    curves[6] = Curve.of([*points[6], (30, 0.0)])
    assert 6 not in asha(rule, curves, {6}), "alone at its rung, whatever it shows"
    output = asha(rule, curves, {2})[2]
    assert output == "rank 6 of 6 at 10 env steps; the best 2 continue"


@pytest.mark.parametrize(("goal", "out"), [("maximise", {1}), ("minimise", {7})])
def test_minimise_ends_the_largest_values(goal: str, out: set[int]) -> None:
    plan: Plan = load_plan({"experiment": "x", "goal": goal, "stop": {"rule": "median", "after": 10, "least": 3}})
    curves = curves_of({n: [(10, float(n))] for n in range(1, 8)})
    assert set(behind(plan, curves, {1, 4, 7})) == out


@pytest.mark.parametrize(("goal", "one"), [("maximise", -1200.0), ("minimise", -800.0)])
def test_reason_shows_values_with_their_sign(goal: str, one: float) -> None:
    plan: Plan = load_plan({"experiment": "x", "goal": goal, "stop": {"rule": "median", "after": 10, "least": 3}})
    curves = curves_of({n: [(10, -1000.0)] for n in range(1, 8)} | {8: [(10, one)]})
    assert behind(plan, curves, {8})[8].endswith(f"{one:g}, and the median of 7 others is -1000")


def test_no_trial_is_ended_without_a_rule() -> None:
    plan = load_plan({"experiment": "x"})
    assert behind(plan, curves_of({1: [(10, 0.0)], 2: [(10, 1.0)]}), {1, 2}) == {}


JUDGE = """
import sys
from pathlib import Path
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.tick import stop_worst

def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])

before = bytes_read()
stop_worst(Sweep(Path(sys.argv[1])), 0.0)
print(bytes_read() - before)
"""


def test_a_look_at_the_trials_reads_only_what_was_added_since_the_last(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, 4, 1, records=8000, stop={"rule": "median", "after": 10})
    size = sum(file.stat().st_size for file in sweep.folder.glob("*/metrics.jsonl"))
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", JUDGE, str(sweep.folder)]
        found.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert found[0] > size and found[1] < size / 2, (size, found)
