"""Population-based training with simulated members, which are only numbers."""

import math
from dataclasses import asdict

import numpy as np
import pytest

from tests.counts import count
from tiltyard.algos.pb2 import Bandit, Gain, cholesky, propose
from tiltyard.algos.pbt import Exploit, Member, Rules, is_ahead, is_due, rank, replacements, schedule, source_for
from tiltyard.algos.tunables import Number, Options, perturb, random_settings, reward_weights, with_reward_weights
from tiltyard.errors import UseError

ALWAYS = Rules(period=100, start=100, replace=0.25, gap=0.0, relative_gap=0.0, rate=1.0)
LR = Number("algo.lr", 1e-5, 1e-1, log=True)
GAMMA = Number("algo.gamma", 0.9, 0.9999)
EPOCHS = Number("algo.epochs", 1, 8, whole=True)
LEAN = Number("env.options.lean", -1.0, 1.0)
ROWS = Options(("algo.rollout", "algo.minibatch"), ((64, 128), (128, 256), (256, 256)))
WORD = Options(("model.activation",), (("relu",), ("tanh",), ("silu",)))
TUNABLES = (LR, GAMMA, EPOCHS, LEAN, ROWS, WORD)


def rng(*seed):
    return np.random.default_rng(seed or 0)


def members(*scores, env_steps=100, decided=0):
    return [Member(i, env_steps, score, decided) for i, score in enumerate(scores)]


# ------------------------------------------------------------------------------------------------ replacements


def test_members_are_ranked_by_score_and_those_without_one_are_left_out():
    found = members(1.0, None, 3.0, math.nan, -2.0, 3.0, math.inf)
    assert [each.number for each in rank(found)] == [2, 5, 0, 4]
    assert [each.number for each in rank(found, maximise=False)] == [4, 0, 2, 5]


@pytest.mark.parametrize(
    ("scores", "maximise", "found"),
    [
        ((4.0, 3.0, 2.0, 1.0), True, {3: 0}),
        ((4.0, 3.0, 2.0, 1.0), False, {0: 3}),
        ((-4.0, -3.0, -2.0, -1.0), True, {0: 3}),  # all scores below zero
        ((-4.0, -3.0, -2.0, -1.0), False, {3: 0}),
        ((-5.0, 0.0, 5.0, 1.0), True, {0: 2}),
        ((-5.0, None, 5.0, 1.0), True, {0: 2}),
        ((2.0, 2.0, 2.0, 2.0), True, {}),
        ((None, None, None, 1.0), True, {}),
        ((None, None, None, None), True, {}),
    ],
)
def test_worst_member_copies_the_best(scores, maximise, found):
    rules = Rules(period=100, start=100, replace=0.25, gap=1e-6, relative_gap=0.1, maximise=maximise)
    assert replacements(rules, members(*scores), rng()) == found


@pytest.mark.parametrize(
    ("better", "worse", "ahead"),
    [
        (100.0, 91.0, False),
        (100.0, 89.0, True),
        (-91.0, -100.0, False),
        (-89.0, -100.0, True),
        (-100.0, -89.0, False),
        (0.0, 0.0, False),
        (1e-7, 0.0, False),  # the relative gap is 1, but the absolute gap is too small
        (0.0, -1e-7, False),
        (0.0, -1.0, True),
        (1.0, -1.0, True),
        (0.05, -0.05, True),
        (None, 0.0, False),
        (0.0, None, False),
    ],
)
def test_gap_rules_match_a_calculation_by_hand(better, worse, ahead):
    first, second = members(better, worse)
    assert is_ahead(Rules(gap=1e-6, relative_gap=0.1), first, second) is ahead
    turned = members(*(None if each is None else -each for each in (better, worse)))
    assert is_ahead(Rules(gap=1e-6, relative_gap=0.1, maximise=False), *turned) is ahead


def test_member_is_kept_if_the_gap_is_not_exceeded():
    assert not is_ahead(Rules(gap=1.0, relative_gap=0.0), *members(3.0, 2.0))
    assert is_ahead(Rules(gap=0.99, relative_gap=0.0), *members(3.0, 2.0))


def test_member_is_due_once_per_period_after_the_start():
    rules = Rules(period=100, start=500)
    counts = [(400, 0), (499, 0), (500, 0), (599, 500), (600, 500), (650, 600)]
    due = [is_due(rules, Member(0, env_steps, 1.0, decided)) for env_steps, decided in counts]
    assert due == [False, False, True, False, True, False]
    others = members(5.0, 4.0, 3.0, env_steps=400)
    assert replacements(rules, [*others, Member(3, 499, 0.0)], rng()) == {}
    assert set(replacements(rules, [*others, Member(3, 500, 0.0)], rng())) == {3}


def test_only_bad_due_members_behind_the_gap_are_replaced_by_one_of_the_best():
    for seed in range(count(2000)):
        draws = rng(1, seed)
        size = int(draws.integers(1, 9))
        scale = 10.0 ** draws.integers(-3, 4)
        scores = np.round(draws.normal(draws.choice([-3, 0, 3]), 1, size) * scale, 3)
        found = [
            Member(i, int(draws.integers(0, 400)), None if draws.random() < 0.2 else float(score))
            for i, score in enumerate(scores)
        ]
        rules = Rules(
            period=100,
            start=50,
            maximise=bool(draws.integers(2)),
            replace=float(draws.random()),
            relative_gap=float(draws.random() * 0.5),
        )
        made = replacements(rules, found, rng(2, seed))
        assert made == replacements(rules, found[::-1], rng(2, seed))  # the order of members does not matter
        order = [each.number for each in rank(found, rules.maximise)]
        most = math.ceil(rules.replace * len(order))
        assert not set(made) & set(made.values())
        assert len(made) <= min(most, len(order) // 2)
        for number, source in made.items():
            assert order.index(source) < most and order.index(number) >= len(order) - most
            assert is_due(rules, found[number]) and is_ahead(rules, found[source], found[number])


def test_source_is_sampled_from_all_of_the_best():
    rules = Rules(period=100, start=100, replace=0.5)
    assert {source_for(rules, members(9.0, 8.0, 1.0, 0.0), 3, rng(seed)) for seed in range(20)} == {0, 1}
    assert source_for(rules, members(9.0, 8.0, 1.0, 0.0), 1, rng()) is None
    assert replacements(Rules(period=100, start=100, replace=0.0), members(9.0, 0.0), rng()) == {}


# ------------------------------------------------------------------------------------------------ settings


def test_random_settings_are_within_bounds_and_choices():
    made = [random_settings(TUNABLES, rng(seed)) for seed in range(300)]
    assert made[7] == random_settings(TUNABLES, rng(7)) != made[8]
    assert {each["algo.epochs"] for each in made} == set(range(1, 9))
    assert {(each["algo.rollout"], each["algo.minibatch"]) for each in made} == set(ROWS.values)
    assert all(1e-5 <= each["algo.lr"] <= 1e-1 and 0.9 <= each["algo.gamma"] <= 0.9999 for each in made)
    assert 0.4 < np.mean([each["algo.lr"] < 1e-3 for each in made]) < 0.6  # uniform in the logarithm
    assert 0.4 < np.mean([each["algo.gamma"] < 1 - math.sqrt(0.1 * 1e-4) for each in made]) < 0.6


def test_perturbed_settings_stay_close_in_bounds_and_of_the_same_type():
    rules = Rules(rate=1.0, factors=(1.1, 1.5))
    for seed in range(count(3000)):
        before = random_settings(TUNABLES, rng(3, seed))
        after = perturb(TUNABLES, before, rules, rng(4, seed))
        assert after == perturb(TUNABLES, before, rules, rng(4, seed))
        assert after.keys() == before.keys()
        assert 1e-5 <= after["algo.lr"] <= 1e-1 and 0.9 <= after["algo.gamma"] <= 0.9999
        factor = after["algo.lr"] / before["algo.lr"]
        assert 1 / 1.5001 < factor < 1.5001 and (abs(math.log(factor)) > 0.095 or after["algo.lr"] in (1e-5, 1e-1))
        assert 1 / 1.501 < (1 - after["algo.gamma"]) / (1 - before["algo.gamma"]) < 1.501
        assert type(after["algo.epochs"]) is int and 1 <= after["algo.epochs"] <= 8
        assert after["algo.epochs"] != before["algo.epochs"] or after["algo.epochs"] in (1, 8)
        assert -1 <= after["env.options.lean"] <= 1
        places = [ROWS.values.index((each["algo.rollout"], each["algo.minibatch"])) for each in (before, after)]
        assert abs(places[0] - places[1]) == 1
        assert (after["model.activation"],) in WORD.values


def test_perturbation_factors_match_a_calculation_by_hand():
    twice = Rules(rate=1.0, factors=(2.0, 2.0))

    def results(tunable, value):
        return sorted({perturb([tunable], {tunable.key: value}, twice, rng(seed))[tunable.key] for seed in range(20)})

    assert results(LR, 1e-3) == [5e-4, 2e-3]
    assert results(LR, 8e-2) == [4e-2, 1e-1]
    assert results(GAMMA, 0.99) == [0.98, 0.995]
    assert results(GAMMA, 0.92) == [0.9, 0.96]
    assert results(EPOCHS, 3) == [2, 6]
    assert results(Number("x", 1, 8, log=True, whole=True), 1) == [1, 2]
    assert results(Number("x", 0.1, 0.9), 0.4) == [0.2, 0.8]
    assert results(LEAN, 0.25) == [-0.75, 1.0]  # an added step, because a factor never changes the sign
    assert results(Number("x", 0.0, 0.4), 0.0) == [0.0, 0.2]  # likewise, because a factor never changes 0
    assert results(Number("x", 0, 4, whole=True), 0) == [0, 2]
    assert results(Number("x"), -3.0) == [-6.0, -1.5]
    assert results(Number("x"), 0.0) == [0.0]


def test_rate_and_resample_control_how_many_settings_change():
    before = random_settings(TUNABLES, rng())
    assert perturb(TUNABLES, before, Rules(rate=0.0), rng()) == before
    many = [perturb([LR], {"algo.lr": 1e-3}, Rules(rate=0.15), rng(5, seed))["algo.lr"] for seed in range(2000)]
    assert 0.12 < np.mean([each != 1e-3 for each in many]) < 0.18
    anew = Rules(rate=1.0, resample=1.0)
    far = [perturb([LR], {"algo.lr": 1e-3}, anew, rng(6, seed))["algo.lr"] for seed in range(50)]
    assert min(far) < 1e-4 and max(far) > 1e-2
    endless = [perturb([Number("x")], {"x": 2.0}, anew, rng(6, seed))["x"] for seed in range(50)]
    assert 2 / 1.5 <= min(endless) < max(endless) <= 2 * 1.5  # no bounds to sample from: a factor is used


def test_unknown_choices_are_resampled_and_strings_have_no_neighbours():
    assert perturb([WORD], {"model.activation": "gelu"}, ALWAYS, rng())["model.activation"] in (
        "relu",
        "tanh",
        "silu",
    )
    found = {perturb([WORD], {"model.activation": "relu"}, ALWAYS, rng(s))["model.activation"] for s in range(40)}
    assert found == {"relu", "tanh", "silu"}
    assert perturb([Options(("x",), ((3,),))], {"x": 3}, ALWAYS, rng()) == {"x": 3}


def test_reward_weights_are_numbers_with_dotted_names():
    shaping = {"kill": 1, "delta": {"health": [1, 2], "ammo": -0.02, "on": True}, "kind": "dense"}
    flat = reward_weights(shaping, "env.shaping")
    assert flat == {"env.shaping.kill": 1.0, "env.shaping.delta.ammo": -0.02}
    assert with_reward_weights(shaping, "env.shaping", flat) == shaping
    made = perturb([Number(key) for key in flat], flat, ALWAYS, rng())
    after = with_reward_weights(shaping, "env.shaping", made)
    assert (
        after["kill"] == made["env.shaping.kill"] != 1 and after["delta"]["ammo"] == made["env.shaping.delta.ammo"] < 0
    )
    assert after["delta"]["health"] == [1, 2] and after["delta"]["on"] is True and shaping["kill"] == 1
    with pytest.raises(UseError, match=r"'a\.b'"):
        reward_weights({"a.b": 1}, "env.shaping")


@pytest.mark.parametrize(
    "wrong", [("x", 2.0, 1.0), ("x", 0.0, 1.0, True), ("algo.gamma", 0.9, 1.0), ("x", math.nan, 1.0)]
)
def test_invalid_bounds_are_refused(wrong):
    with pytest.raises(UseError):
        Number(*wrong)


def test_setting_without_bounds_cannot_be_sampled():
    with pytest.raises(UseError, match="no bounds"):
        random_settings([Number("x")], rng())
    with pytest.raises(UseError, match="no bounds"):
        propose([Number("x")], [Gain({"x": 1.0}, 100, 1.0)] * 9, [], ALWAYS, rng())


def test_shares_convert_to_settings_and_back():
    for tunable in TUNABLES:
        for seed in range(50):
            settings = random_settings([tunable], rng(7, seed))
            again = tunable.at(tunable.share(settings))
            assert again == (settings if isinstance(tunable, Options) else pytest.approx(settings, rel=1e-8))
    assert LR.at(0.5)["algo.lr"] == pytest.approx(1e-3)
    assert EPOCHS.columns(np.array([0.0, 0.05, 0.1, 1.0]))[:, 0] == pytest.approx([0, 0, 1 / 7, 1])
    apart = WORD.columns(np.array([0.1, 0.5, 0.9]))
    assert [float(np.linalg.norm(apart[i] - apart[j])) for i, j in ((0, 1), (0, 2), (1, 2))] == pytest.approx([1, 1, 1])


# ------------------------------------------------------------------------------------------------ PB2


def test_bandit_predicts_recent_data_and_forgets_old_data():
    points, times = np.linspace(0, 1, 9)[:, None], np.zeros(9)
    bandit = Bandit(points, times, np.sin(6 * points[:, 0]))
    bandit.forgetting = 0.2
    bandit._solve()
    mean, deviation = bandit._predict(points, 0.0)
    assert mean == pytest.approx(np.sin(6 * points[:, 0]), abs=0.1) and deviation.max() < 0.2
    later, unsure = bandit._predict(points, 50.0)
    assert np.abs(later).max() < 0.01 and unsure.min() > 0.99
    before = bandit.bound(points[:1], 5.0)[0]
    bandit.add_pending(points[:1], 5.0)
    assert bandit.bound(points[:1], 5.0)[0] < before


def test_cholesky_handles_equal_points():
    factor = cholesky(np.ones((5, 5)))
    assert factor @ factor.T == pytest.approx(np.ones((5, 5)), abs=1e-6)
    with pytest.raises(np.linalg.LinAlgError):
        cholesky(-10 * np.eye(2))


def test_pb2_samples_at_random_first_and_then_maximises_the_gain():
    tunables = (LR, LEAN)
    few = [Gain(random_settings(tunables, rng(8, i)), 100, 1.0) for i in range(5)]
    assert propose(tunables, few, [], ALWAYS, rng(1)) == random_settings(tunables, rng(1))
    assert propose(tunables, [*few, Gain(few[0].settings, 100, math.nan)], [], ALWAYS, rng(1)) == random_settings(
        tunables, rng(1)
    )
    points = [random_settings(tunables, rng(9, i)) for i in range(40)]
    gains = [
        Gain(each, 100 + i // 4 * 100, -((LR.share(each) - 0.3) ** 2) - (LEAN.share(each) - 0.6) ** 2)
        for i, each in enumerate(points)
    ]
    found = [propose(tunables, gains, points[:2], ALWAYS, rng(seed)) for seed in range(5)]
    assert found[2] == propose(tunables, gains[::-1], points[:2], ALWAYS, rng(2))
    for each in found:
        assert (LR.share(each), LEAN.share(each)) == pytest.approx((0.3, 0.6), abs=0.2)


def test_pb2_handles_integers_choices_and_strings():
    gains = []
    for i in range(60):
        each = random_settings(TUNABLES, rng(10, i))
        right = (
            (each["algo.epochs"] == 5) + 2 * (each["algo.rollout"] == 256) + 2 * (each["model.activation"] == "tanh")
        )
        gains.append(Gain(each, 100 + i // 6 * 100, float(right)))
    found = propose(TUNABLES, gains, [], ALWAYS, rng())
    assert found["model.activation"] == "tanh" and (found["algo.rollout"], found["algo.minibatch"]) == (256, 256)
    assert type(found["algo.epochs"]) is int


def test_pb2_accepts_equal_gains_and_equal_settings():
    same = [Gain({"algo.lr": 1e-3}, 100 * i, 2.0) for i in range(20)]
    assert 1e-5 <= propose([LR], same, [{"algo.lr": 1e-3}] * 3, ALWAYS, rng())["algo.lr"] <= 1e-1


PERIODS, SIZE = 25, 5
TUNED = (LR, Number("algo.clip", 0.05, 0.5))


def away(settings, time, phase):
    """Distance of settings from an optimum that moves on a circle with a period of 80."""
    angle = 2 * math.pi * time / 80 + phase
    best = (0.35 + 0.3 * math.sin(angle), 0.55 + 0.25 * math.cos(angle))
    return math.dist([tunable.share(settings) for tunable in TUNED], best)


def trained(seed, guided):
    """Train a population whose members learn faster close to the optimum, with initial scores far below zero.

    Return the distance of the best member and of all members in the last five periods, and the negated best score."""
    rules = Rules(period=100, start=100, gap=0.0, relative_gap=0.0, rate=1.0, factors=(1.1, 2.0))
    draws, noise = rng(11, seed), rng(12, seed)
    phase = draws.uniform(0, 2 * math.pi)
    settings = [random_settings(TUNED, draws) for _ in range(SIZE)]
    scores, gains, far = [-100.0] * SIZE, [], []
    for time in range(1, PERIODS + 1):
        for i in range(SIZE):
            gain = math.exp(-(away(settings[i], time, phase) ** 2) / (2 * 0.2**2)) + 0.03 * noise.normal()
            gains.append(Gain(settings[i], 100 * time, gain))
            scores[i] += gain
        found = members(*scores, env_steps=100 * time, decided=100 * (time - 1))
        apart = [away(each, time, phase) for each in settings]
        far.append((apart[rank(found)[0].number], np.mean(apart)))
        for i, source in replacements(rules, found, draws).items():
            scores[i] = scores[source]
            others = settings[:i] + settings[i + 1 :]
            settings[i] = (
                propose(TUNED, gains, others, rules, draws)
                if guided
                else perturb(TUNED, settings[source], rules, draws)
            )
    return (*np.mean(far[-5:], axis=0), -max(scores))


def test_pb2_gets_closer_to_the_optimum_than_random_perturbation():
    guided, random = (np.array([trained(seed, each) for seed in range(20)]) for each in (True, False))
    best, all_of_them, score = (guided < random).sum(axis=0)
    assert min(best, all_of_them, score) >= 16, (best, all_of_them, score)
    assert guided[:, 0].mean() < 0.7 * random[:, 0].mean()


# ------------------------------------------------------------------------------------------------ lineage


def exploit(member, source, at, source_at, after, counts_from=None):
    return Exploit(member, source, at, source_at, source_at if counts_from is None else counts_from, {}, {"lr": after})


FIRST = {0: {"lr": 0.0}, 1: {"lr": 1.0}, 2: {"lr": 2.0}}


def test_schedule_matches_a_calculation_by_hand():
    made = [exploit(1, 0, 90, 100, 10.0), exploit(2, 1, 200, 150, 20.0), exploit(1, 0, 300, 310, 11.0)]
    assert schedule(0, made, FIRST) == [(0, {"lr": 0.0})]
    assert schedule(1, made, FIRST) == [(0, {"lr": 0.0}), (310, {"lr": 11.0})]
    assert schedule(2, made, FIRST) == [(0, {"lr": 0.0}), (100, {"lr": 10.0}), (150, {"lr": 20.0})]
    assert schedule(2, [], FIRST) == [(0, {"lr": 2.0})]


def test_schedule_counts_the_env_steps_of_the_weights():
    own = [exploit(1, 0, 90, 100, 10.0, counts_from=90), exploit(2, 1, 200, 150, 20.0, counts_from=200)]
    assert schedule(2, own, FIRST) == [(0, {"lr": 0.0}), (100, {"lr": 10.0}), (160, {"lr": 20.0})]


def test_schedule_of_a_copy_made_before_the_source_changed():
    made = [exploit(0, 0, 100, 100, 5.0), exploit(1, 0, 90, 100, 10.0), exploit(2, 0, 90, 80, 20.0)]
    assert schedule(0, made, FIRST) == [(0, {"lr": 0.0}), (100, {"lr": 5.0})]
    assert schedule(1, made, FIRST) == [(0, {"lr": 0.0}), (100, {"lr": 10.0})]
    assert schedule(2, made, FIRST) == [(0, {"lr": 0.0}), (80, {"lr": 20.0})]


def test_exploit_round_trips_through_a_dict():
    one = exploit(1, 0, 90, 100, 10.0)
    assert Exploit(**asdict(one)) == one


@pytest.mark.parametrize("copied_along", [True, False], ids=["source's count", "own count"])
def test_repeating_the_schedule_alone_gives_the_same_weights(copied_along):
    """The weights depend on the settings of every step in order; members have different speeds and are due separately."""
    for seed in range(count(200)):
        draws = rng(13, seed)
        size = int(draws.integers(2, 6))
        first = {i: random_settings(TUNED, draws) for i in range(size)}
        settings = dict(first)
        counts = [0] * size
        weights_of = [0.0] * size
        seen = [0] * size
        decided = [0] * size
        made = []
        for _ in range(60):
            i = int(draws.integers(size))
            for _ in range(int(draws.integers(1, 8))):
                weights_of[i] = step(weights_of[i], settings[i])
                counts[i], seen[i] = counts[i] + 1, seen[i] + 1
            now = [Member(j, counts[j], weights_of[j] or None, decided[j]) for j in range(size)]
            source = source_for(Rules(period=5, start=5, replace=0.5, relative_gap=0.0), now, i, draws)
            if source is not None:
                after = perturb(TUNED, settings[source], ALWAYS, draws)
                own = counts[source] if copied_along else counts[i]
                made.append(Exploit(i, source, counts[i], counts[source], own, settings[i], after))
                settings[i], weights_of[i], seen[i] = after, weights_of[source], seen[source]
                counts[i] = decided[i] = own
        assert made
        for member in range(size):
            plan = schedule(member, made, first)
            assert plan[0][0] == 0 and [at for at, _ in plan] == sorted({at for at, _ in plan})
            alone = 0.0
            for done in range(seen[member]):
                alone = step(alone, next(each for at, each in reversed(plan) if at <= done))
            assert alone == weights_of[member]
            assert plan[-1][1] == settings[member]


def step(weight, settings):
    return 0.9 * weight + math.sin(1e4 * settings["algo.lr"]) + settings["algo.clip"]
