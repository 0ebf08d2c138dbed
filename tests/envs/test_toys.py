"""Documented returns of the toy envs, and a proof that the timeout env separates truncation from termination."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.counts import count
from tiltyard.envs.toys.single import WORDS, Basic, Delay, Identity, KitchenSink, Masked, Memory, Timeout


def episode_return(env: gymnasium.Env, seed: int, choose: Any) -> float:
    obs, info = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        assert env.observation_space.contains(obs)
        obs, reward, terminated, truncated, info = env.step(choose(obs, info))
        total, over = total + reward, terminated or truncated
    return total


def identity_answer(env: Identity, shows: str) -> Any:
    return {
        "category": lambda obs, info: obs,
        "vector": lambda obs, info: int(obs.argmax()),
        "image": lambda obs, info: int(obs[0, 0].argmax()) * 4 // 36,
        "words": lambda obs, info: WORDS.index(obs.split()[2]),
        "number": lambda obs, info: obs,
    }[shows]


@pytest.mark.parametrize("shows", ["category", "vector", "image", "words", "number"])
def test_best_return_of_identity_is_its_length(shows: Any) -> None:
    env = Identity(options=4, length=7, shows=shows)
    for seed in range(5):
        assert episode_return(env, seed, identity_answer(env, shows)) == 7


def test_basic_rewards_only_the_third_lever() -> None:
    env = Basic()
    for action in range(5):
        assert episode_return(env, action, lambda obs, info, action=action: action) == (1 if action == 2 else -1)


def test_return_of_memory_is_1_with_memory_and_0_on_average_without() -> None:
    env = Memory(length=3, cues=3)
    cue: list[int] = []

    def recall(obs: np.ndarray, info: Any) -> int:
        if obs[:3].any():
            cue.append(int(obs[:3].argmax()))
        return cue[-1]

    assert all(episode_return(env, seed, recall) == 1 for seed in range(20))
    blind = np.mean([episode_return(env, seed, lambda obs, info: 0) for seed in range(600)])
    assert abs(blind) < 0.15  # exactly 0 in expectation; the standard error is 0.03
    obs, _ = env.reset(seed=0)
    seen = [obs]
    for _ in range(3):
        seen.append(env.step(0)[0])
    assert [int(o[-1]) for o in seen] == [0, 0, 0, 1] and not np.any(seen[1]) and not np.any(seen[2])


def test_delay_rewards_right_actions_later() -> None:
    env = Delay(length=6, delay=3)
    assert all(episode_return(env, seed, lambda obs, info: int(obs[1])) == 6 for seed in range(10))
    assert episode_return(env, 0, lambda obs, info: 1 - int(obs[1])) == 0
    obs, _ = env.reset(seed=1)
    rewards = []
    for _ in range(9):
        obs, reward, *_ = env.step(int(obs[1]))
        rewards.append(reward)
    assert rewards == [0, 0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("mask_in", ["obs", "info"])
def test_masked_rewards_the_lowest_allowed_option(mask_in: Any) -> None:
    env = Masked(options=5, length=6, mask_in=mask_in)

    def lowest(obs: Any, info: Any) -> int:
        return int(np.asarray((obs if mask_in == "obs" else info)["action_mask"]).argmax())

    assert all(episode_return(env, seed, lowest) == 6 for seed in range(10))
    obs, info = env.reset(seed=0)
    forbidden = int(np.asarray((obs if mask_in == "obs" else info)["action_mask"]).argmin())
    with pytest.raises(ValueError, match="forbidden"):
        env.step(forbidden)


def test_best_return_of_kitchen_sink_is_five_per_step() -> None:
    env = KitchenSink(length=4)

    def right(obs: Any, info: Any) -> Any:
        lit = int(obs["picture"][0, 0, 0] == 0)
        gates = np.array([lit == 0, lit == 1], np.int8)
        action = (
            obs["code"] - 4,
            (5 + 5 * obs["vector"]).astype(np.float32),
            obs["pair"][0],
            {"gates": gates, "side": int(obs["words"] == "right")},
        )
        assert env.action_space.contains(action)
        return action

    for seed in range(10):
        assert episode_return(env, seed, right) == pytest.approx(20, abs=1e-5)


# ---------------------------------------------------------------------------------------------- timeout


def observed(prize: float, limit: int) -> dict[tuple[int, int, int], tuple[float, int, bool, bool]]:
    """Return {(place, clock, action): (reward, next place, terminated, truncated)} as observed in the env."""
    env = Timeout(prize=prize, limit=limit)
    table = {}
    for seed in range(16):
        for plan in range(2**limit):
            place, _ = env.reset(seed=seed)
            for clock in range(limit):
                action = plan >> clock & 1
                after, reward, terminated, truncated, _ = env.step(action)
                table[place, clock, action] = (reward, after, terminated, truncated)
                place = after
                if terminated or truncated:
                    break
    return table


def action_values(table: dict, gamma: float, bootstrap: bool) -> np.ndarray:
    """Return the action values [place, action] of a learner that observes only the place, by value iteration.

    All times at which a place occurs have equal weight, as in the episodes of a policy that enters.
    """
    q = np.zeros((2, 2))
    value = {key[:2]: 0.0 for key in table}  # the true value if the clock is known, for targets without bootstrap
    for _ in range(5000):
        seen: dict[tuple[int, int], list[float]] = {}
        ahead = q.max(axis=1)
        for (place, clock, action), (reward, after, terminated, truncated) in table.items():
            if terminated:
                later = 0.0
            elif truncated:
                later = ahead[after] if bootstrap else 0.0
            else:
                later = ahead[after] if bootstrap else value[after, clock + 1]
            seen.setdefault((place, action), []).append(reward + gamma * later)
            if not bootstrap:
                value[place, clock] = max(value[place, clock], reward + gamma * later)
        for (place, action), targets in seen.items():
            q[place, action] = np.mean(targets)
    return q


@pytest.mark.parametrize("gamma", [0.9, 0.97, 0.99])
def test_treating_truncation_as_termination_changes_the_best_action(gamma: float) -> None:
    table = observed(prize=5.0, limit=4)
    right, wrong = action_values(table, gamma, bootstrap=True), action_values(table, gamma, bootstrap=False)
    assert right[1] == pytest.approx(1 / (1 - gamma)) and right[0, 1] == pytest.approx(1 / (1 - gamma))
    assert right[0, 0] == wrong[0, 0] == 5
    assert right[0].argmax() == 1
    assert wrong[0].argmax() == 0 and wrong[0, 1] == pytest.approx(sum(gamma**t for t in range(4)))


def test_no_stationary_policy_makes_the_wrong_learner_prefer_to_enter() -> None:
    """Try all probabilities of entering: if truncation is termination, entering always lowers the return."""
    gamma = 0.99
    cut_short = sum(gamma**t for t in range(4))
    chances = np.linspace(0, 1, 101)
    wrong = chances * cut_short + (1 - chances) * 5
    right = chances / (1 - gamma) + (1 - chances) * 5
    assert (np.diff(wrong) < 0).all() and (np.diff(right) > 0).all()


def test_timeout_reports_episodes_that_stayed() -> None:
    env, stayed = Timeout(), {0: set(), 1: set()}
    starts = []
    for seed in range(count(400)):
        for action in (0, 1):
            place, _ = env.reset(seed=seed)
            starts.append(place)
            over = False
            while not over:
                _, _, terminated, truncated, info = env.step(action)
                over = terminated or truncated
            assert truncated or (place == 0 and action == 0)
            assert ("stayed" in info) == (place == 0)
            if place == 0:
                stayed[action].add(info["stayed"])
    assert stayed == {0: {0.0}, 1: {1.0}} and 0.3 < np.mean(starts) < 0.7


def test_invalid_options_are_refused() -> None:
    for build in (
        lambda: Timeout(prize=3, limit=4),
        lambda: Memory(length=0),
        lambda: Delay(delay=0),
        lambda: Masked(options=1),
        lambda: Identity(options=99, shows="words"),
    ):
        with pytest.raises(ValueError):
            build()
