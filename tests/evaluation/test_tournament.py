"""Matches between policies: wins per seat, and ratings."""

import csv
import itertools
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard as product
from tests.conftest import Command
from tests.engines.test_policies import TRAIN
from tiltyard.evaluation.tournament import Bout, match, ratings
from tiltyard.run.checkpoint import list_checkpoints

RUN: dict[str, Any] = {
    **TRAIN,
    "env": "visitors",
    "save": {"env_steps": 64, "last": 999},
    "eval": {"at_end": False, "every": 0},
}


@pytest.fixture
def coin(runs: Path) -> str:
    """Id of a run whose policy is untrained and acts at random."""
    still = {**RUN["algo"], "lr": 0.0}
    return product.train({**RUN, "name": "coin", "algo": still, "stop": {"updates": 1}}, live=False).id


@pytest.fixture
def able(coin: str) -> str:
    """Id of a run whose policy has learned the task."""
    algo = {"rollout": 24, "minibatch": 48, "epochs": 2, "lr": 0.02}
    file = {**RUN, "name": "able", "algo": algo, "save": {}, "stop": {"env_steps": 1_500}}
    return product.train(file, live=False).id


def test_trained_policy_beats_an_untrained_one(tiltyard: Command, able: str, coin: str) -> None:
    """The first policy has the seats host and early (6 and 2 decisions), the second has the seat late (3 decisions)."""
    words = ("match", coin, able, "--episodes", "60", "--sample", "--seed", "7")
    found = json.loads(tiltyard(*words, "--json").stdout)
    assert [each["policy"] for each in found["ratings"]] == [able, coin], "the stronger first"
    best, worst = found["ratings"]
    assert best["low"] > 1600 and worst["high"] < 1400, "and surely so"
    assert best["elo"] + worst["elo"] == pytest.approx(3000)
    assert [(each["one"], each["other"]) for each in found["bouts"]] == [(coin, able), (able, coin)]
    second, first = found["bouts"]
    assert second["losses"] > 40 and first["wins"] > 50, "in both seats"
    for bout in found["bouts"]:
        assert bout["wins"] + bout["draws"] + bout["losses"] == 60
        seats = bout["seats"]
        assert bout["returns"] == pytest.approx([(seats["host"] + seats["early"]) / 2, seats["late"]])
    assert first["seats"]["host"] > 5 > 4 > second["seats"]["host"], "of 6; by chance 3"
    assert json.loads(tiltyard(*words, "--json").stdout) == found, "the same seed, the same episodes"
    rows = list(csv.DictReader(StringIO(tiltyard(*words, "--csv").stdout)))
    assert [int(row["wins"]) for row in rows] == [each["wins"] for each in found["bouts"]]
    output = tiltyard(*words).stdout
    assert "60 episodes of each pair in each seating, sampled, seed 7" in output
    assert output.splitlines()[-2].split()[0] == able


def test_policies_can_be_named_by_run_step_folder_and_name(able: str, coin: str) -> None:
    run = product.train({**RUN, "name": "third", "stop": {"env_steps": 256}}, live=False)
    first, *_, last = list_checkpoints(run)
    found = match([f"{run.id}@{first.env_steps}", str(last.folder), f"{able}:main"], episodes=5, greedy=True)
    assert len(found.bouts) == 6 and len(found.ratings) == 3
    assert found.episodes == 5 and found.greedy


def test_order_of_policies_does_not_change_the_ratings(coin: str, able: str) -> None:
    there, back = (match(pair, episodes=50, greedy=False) for pair in ([coin, able], [able, coin]))
    assert {(each.one, each.wins, each.losses) for each in there.bouts} == {
        (each.one, each.wins, each.losses) for each in back.bouts
    }
    assert [(each.policy, round(each.elo, 6)) for each in there.ratings] == [
        (each.policy, round(each.elo, 6)) for each in back.ratings
    ]


def test_invalid_matches_are_refused(tiltyard: Command, coin: str) -> None:
    other = product.train({**TRAIN, "env": "identity", "name": "other"}, live=False)
    steps = list_checkpoints(other)[-1].env_steps
    assert "two or more different policies" in tiltyard("match", coin, expect=2).stderr
    assert "two or more different policies" in tiltyard("match", coin, coin, expect=2).stderr
    assert "there is no run 'nobody'" in tiltyard("match", coin, "nobody", expect=2).stderr
    assert f"{other.id}: the policy was trained with observations" in tiltyard("match", coin, other.id, expect=2).stderr
    assert "env identity has one agent" in tiltyard("match", other.id, f"{other.id}@{steps}", expect=2).stderr
    assert "has no policy 'rival'" in tiltyard("match", coin, f"{coin}:rival", expect=2).stderr


# ------------------------------------------------------------------------------------------------ ratings


def bout(one: str, other: str, wins: int, draws: int, losses: int) -> Bout:
    return Bout(one, other, wins, draws, losses, (0.0, 0.0), {})


def test_ten_wins_per_loss_are_400_points() -> None:
    strong, weak = ratings(["w", "s"], [bout("s", "w", 100_000, 0, 10_000)], 0)
    assert (strong.policy, round(strong.elo - weak.elo)) == ("s", 400)
    assert strong.low < strong.elo < strong.high and strong.high - strong.low < 10


def test_ratings_recover_the_simulated_strengths() -> None:
    true, rng = {"a": 1700.0, "b": 1550.0, "c": 1400.0, "d": 1350.0}, np.random.default_rng(0)
    bouts = []
    for one in true:
        for other in [name for name in true if name != one]:
            wins = int(rng.binomial(400, 1 / (1 + 10 ** ((true[other] - true[one]) / 400))))
            bouts.append(bout(one, other, wins, 0, 400 - wins))
    found = {each.policy: each for each in ratings(list(true), bouts, 0)}
    assert list(found) == ["a", "b", "c", "d"]
    assert all(abs(found[name].elo - true[name]) < 40 for name in true)
    assert sum(found[name].low <= true[name] <= found[name].high for name in true) >= 3


def test_few_episodes_give_wide_intervals_even_if_all_results_are_equal() -> None:
    for few in (bout("a", "b", 3, 0, 0), bout("a", "b", 0, 3, 0)):
        many = Bout("a", "b", few.wins * 100, few.draws * 100, 0, (0.0, 0.0), {})
        wide, narrow = (ratings(["a", "b"], [each], 0)[0] for each in (few, many))
        assert wide.low <= wide.elo <= wide.high and wide.high - wide.low > 50
        assert narrow.high - narrow.low < (wide.high - wide.low) * 0.9


def test_ratings_are_finite_without_losses_and_equal_for_draws() -> None:
    strong, weak = ratings(["a", "b"], [bout("a", "b", 20, 0, 0)], 0)
    assert 400 < strong.elo - weak.elo < 1000
    even = ratings(["a", "b"], [bout("a", "b", 0, 9, 0), bout("b", "a", 3, 0, 3)], 0)
    assert [round(each.elo) for each in even] == [1500, 1500]
    assert [(each.wins, each.draws, each.losses) for each in even] == [(3, 9, 3), (3, 9, 3)]


def test_expected_scores_match_the_real_scores_for_any_difference_in_strength() -> None:
    names = "abcdef"
    bouts = [bout(one, other, 1000, 0, 0) for one, other in itertools.combinations(names, 2)]
    found = [each.elo for each in ratings(names, bouts, 0)]
    for place, elo in enumerate(found):
        # The sum has a game of the policy against itself, which is subtracted.
        expected = sum(1001 / (1 + 10 ** ((other - elo) / 400)) for other in found) - 1001 / 2
        assert expected == pytest.approx(1000 * (5 - place) + 5 / 2, abs=1e-3)  # one additional draw per pair
