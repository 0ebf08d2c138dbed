"""Lineage of a population from its decisions, and initial settings from its plan; no files and no processes."""

from typing import Any

import numpy as np
import pytest

from tiltyard.algos.pb2 import Gain
from tiltyard.algos.pbt import Member
from tiltyard.algos.tunables import latin_hypercube
from tiltyard.config.sweep_plan import Plan, load_plan
from tiltyard.sweep.folder import Trial, planned_pairs
from tiltyard.sweep.pbt.lineage import Lineage
from tiltyard.sweep.pbt.members import first_settings, tunables
from tiltyard.sweep.report import describe_copy

TRIALS = [Trial(number, number, 6 + number, {"algo.lr": number / 10}) for number in (1, 2, 3)]


def period(trial: int, number: int, env_steps: int, score: float | None) -> dict[str, Any]:
    return {"kind": "period", "trial": trial, "period": number, "env_steps": env_steps, "score": score}


def exploit(trial: int, number: int, source: int, at: int, source_at: int, after: float, **more: Any) -> dict[str, Any]:
    made = {"kind": "exploit", "trial": trial, "period": number, "source": source, "source_period": number}
    made |= {"env_steps": at, "source_env_steps": source_at, "counts_from": source_at, "attempt": 2}
    before, scores = {"algo.lr": trial / 10}, {"score": 1.0, "source_score": 9.0}
    return {**made, "before": before, "after": {"algo.lr": after}, **scores, **more}


STORY = [
    period(1, 1, 100, 9.0),
    period(2, 1, 110, 5.0),
    period(3, 1, 120, 1.0),
    exploit(3, 1, 1, 120, 100, 0.15),
    period(1, 2, 200, 10.0),
    period(3, 2, 200, 12.0),
    period(2, 2, 220, None),
    exploit(2, 2, 3, 220, 200, 0.2, source_score=12.0),
]


def test_lineage_has_the_state_of_every_member() -> None:
    story = Lineage(TRIALS, STORY)
    assert story.members() == [Member(1, 200, 10.0, 100), Member(2, 220, None, 110), Member(3, 200, 12.0, 100)]
    replaced = Lineage(TRIALS, STORY[:4])
    assert replaced.members()[2] == Member(3, 120, 1.0, 0), "as it was before it became a copy"
    assert [story.begins(member) for member in (1, 2, 3)] == [200, 200, 200]
    assert [story.settings(member)["algo.lr"] for member in (1, 2, 3)] == [0.1, 0.2, 0.15]
    assert story.settings(3, 1) == {"algo.lr": 0.3}
    assert story.settings(3, 2) == {"algo.lr": 0.15}
    assert [story.count(member) for member in (1, 2, 3)] == [2, 2, 2]
    assert [story.undecided(member) for member in (1, 2, 3)] == [True, False, True]
    stays = {"kind": "stays", "trial": 1, "period": 2}
    assert [Lineage(TRIALS, [*STORY, stays]).undecided(member) for member in (1, 2, 3)] == [False, False, True]
    fresh = Lineage(TRIALS, [])
    assert not fresh.undecided(1)
    assert fresh.members() == []
    assert fresh.begins(2) == 0


def test_gains_are_score_differences_of_periods() -> None:
    gains = Lineage(TRIALS, STORY).gains(1.0)
    # the gain of member 3 starts from the 9 of its source; member 2 has none, because its last score is missing
    assert gains == [Gain({"algo.lr": 0.1}, 200, 1.0), Gain({"algo.lr": 0.15}, 200, 3.0)]
    assert [each.gain for each in Lineage(TRIALS, STORY).gains(-1.0)] == [-1.0, -3.0]


def test_schedule_of_a_member_has_the_settings_and_seeds_of_its_ancestors() -> None:
    story = Lineage(TRIALS, STORY)
    assert story.schedule(1) == [(0, {"algo.lr": 0.1, "seed": 7})]
    assert story.schedule(3) == [(0, {"algo.lr": 0.1, "seed": 7}), (100, {"algo.lr": 0.15, "seed": 9})]
    assert story.schedule(2) == [*story.schedule(3), (200, {"algo.lr": 0.2, "seed": 8})]


def test_exploit_is_described_in_one_sentence() -> None:
    first, second = Lineage(TRIALS, STORY).copies
    assert describe_copy(first) == (
        "Member 3 became a copy of member 1 (9 against 1) at env step 120, now 100: algo.lr 0.3 -> 0.15."
    )
    assert "with the same settings" in describe_copy(second)


# ------------------------------------------------------------------------------------------------ initial settings


def population(**more: Any) -> Plan:
    values = {
        "experiment": {"env": {"id": "x", "options": {"rewards": {"hit": 2.0, "deep": {"walk": -1}, "on": True}}}}
    }
    output: dict[str, Any] = {"search": "population", "trials": 8, "seeds": [5], **values, **more}
    return load_plan(output)


def test_initial_members_are_spread_over_the_space() -> None:
    plan = population(space={"algo.lr": {"log": [1e-5, 1e-1]}, "algo.gamma": {"range": [0.9, 0.999]}})
    first = first_settings(plan, 8)
    places = sorted(int((np.log10(each["algo.lr"]) + 5) * 2) for each in first)
    assert places == list(range(8)), "each eighth of the logarithms is somebody's"
    assert first == first_settings(plan, 8)
    other = population(space=plan.space, seed=1)
    assert first != first_settings(other, 8)
    assert planned_pairs(plan, 8, ()) == [(member, 4 + member) for member in range(1, 9)], "a seed each"
    assert plan.metric.of == "last"
    assert population(space=plan.space, metric={"name": "x", "of": "best"}).metric.of == "best"


def test_each_number_of_a_mapping_is_varied() -> None:
    plan = population(space={"env.options.rewards": {"weights": True}, "algo.lr": [0.1, 0.2]})
    names = {"env.options.rewards.hit", "env.options.rewards.deep.walk"}
    assert {key for tunable in tunables(plan) for key in tunable.keys} == {"algo.lr", *names}
    first, *others = first_settings(plan, 8)
    assert {name: first[name] for name in names} == {
        "env.options.rewards.hit": 2.0,
        "env.options.rewards.deep.walk": -1.0,
    }
    for each in others:
        assert all(each[name] * first[name] > 0 and each[name] != first[name] for name in names)
    assert len({each["env.options.rewards.hit"] for each in others}) == 7


def test_given_points_are_the_initial_settings() -> None:
    points = [{"algo.lr": 0.1}, {"algo.lr": 0.2}]
    plan = population(trials=2, points=points, space={"algo.lr": {"log": [1e-5, 1.0]}})
    assert first_settings(plan, 2) == points


def test_latin_hypercube_covers_choices_evenly() -> None:
    plan = population(space={"algo.epochs": [1, 2, 4, 8]})
    found = [each["algo.epochs"] for each in latin_hypercube(tunables(plan), 8, np.random.default_rng(0))]
    assert sorted(found) == [1, 1, 2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize("rules", [{"replace": 0.6}, {"factors": [0.5, 2]}, {"relative_gap": 1.0}, {"rate": 2}])
def test_out_of_range_rules_are_refused(rules: dict[str, Any]) -> None:
    from tiltyard.errors import ConfigError

    with pytest.raises(ConfigError):
        population(space={"algo.lr": [0.1, 0.2]}, population=rules)
