"""Policies that collect: what may be typed, their statistics, mixtures, and the user's own code."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from tiltyard.collection import policies
from tiltyard.collection.actors import Mixture, Noise, _reflected, epsilon_actor, pick
from tiltyard.collection.policies import PolicyChoice
from tiltyard.data.seeds import episode_seed
from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import observation_specs
from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import EnvSpec

BOX = action_spec(spaces.Box(-2, 4, (2,), np.float32))
CHOICE = action_spec(spaces.Discrete(5))
MIXED = action_spec(spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (1,)), "c": spaces.MultiBinary(2)}))
SPEC = EnvSpec(obs=observation_specs(spaces.Box(-1, 1, (3,), np.float32), 1), action=BOX)


def actions(kind: str, space: Any, steps: int = 4_000, mask: Any = None, **numbers: float) -> np.ndarray[Any, Any]:
    noise = Noise(kind, {**policies.NOISE[kind], **numbers}, space)
    noise.reset(3)
    return np.array([noise.act(mask) for _ in range(steps)])


def correlation(values: np.ndarray[Any, Any], lag: int) -> float:
    return float(np.corrcoef(values[:-lag], values[lag:])[0, 1])


# ---------------------------------------------------------------------------------------------- noise


def test_random_actions_are_uniform_and_independent() -> None:
    drawn = actions("random", BOX)
    assert np.all(np.abs(drawn.mean(axis=0)) < 0.05) and np.all(np.abs(drawn.std(axis=0) - 3**-0.5) < 0.02)
    assert abs(correlation(drawn[:, 0], 1)) < 0.05
    assert all(700 < times < 900 for times in Counter(actions("random", CHOICE)[:, 0].tolist()).values())


@pytest.mark.parametrize("space", [BOX, CHOICE])
def test_sticky_actions_repeat_with_their_chance(space: Any) -> None:
    drawn = actions("sticky", space, p=0.8)
    again = float(np.all(drawn[1:] == drawn[:-1], axis=1).mean())
    by_chance = 0.2 / 5 if space is CHOICE else 0.0
    assert again == pytest.approx(0.8 + by_chance, abs=0.025)
    assert len(np.unique(actions("sticky", BOX, p=0.0)[:, 0])) == 4_000
    assert len(np.unique(actions("sticky", BOX, 50, p=1.0), axis=0)) == 1


def test_ou_noise_has_its_autocorrelation_and_spread() -> None:
    theta, sigma = 0.2, 0.1
    drawn = actions("ou", BOX, 20_000, theta=theta, sigma=sigma)
    for lag in (1, 3, 6):
        assert correlation(drawn[:, 0], lag) == pytest.approx((1 - theta) ** lag, abs=0.05)
    assert drawn.std() == pytest.approx(sigma / np.sqrt(1 - (1 - theta) ** 2), rel=0.08)
    assert abs(correlation(drawn[:, 0], 1) - correlation(actions("ou", BOX, 20_000, theta=1.0)[:, 0], 1)) > 0.7


def test_brownian_motion_has_its_steps_and_stays_inside() -> None:
    drawn = actions("brownian", BOX, 20_000, sigma=0.05)
    assert np.abs(drawn).max() <= 1.0
    assert np.diff(drawn, axis=0).std() == pytest.approx(0.05, rel=0.05)
    long = actions("brownian", BOX, 40_000, sigma=0.5)[:, 0]
    assert np.histogram(long, 4, (-1, 1))[0] == pytest.approx([10_000] * 4, rel=0.1), "uniform: reflected at the ends"
    free = actions("brownian", action_spec(spaces.Box(-np.inf, np.inf, (1,))), 5_000, sigma=1.0)
    assert np.abs(free).max() > 10, "an unbounded action is not reflected"
    assert _reflected(np.array([0.3, 1.2, -1.2, 3.5, -5.0])) == pytest.approx([0.3, 0.8, -0.8, -0.5, -1.0])


@pytest.mark.parametrize("kind", ["ou", "brownian"])
def test_smooth_noise_lets_discrete_actions_last(kind: str) -> None:
    drawn = actions(kind, CHOICE, 20_000)[:, 0]
    changes = float((drawn[1:] != drawn[:-1]).mean())
    assert changes < 0.4, "independent actions change with 0.8"
    assert all(abs(times / 20_000 - 0.2) < 0.1 for times in Counter(drawn.tolist()).values())
    mixed = actions(kind, MIXED, 500)
    assert (
        mixed.shape == (500, 4) and set(np.unique(mixed[:, 0])) <= {0, 1, 2} and set(np.unique(mixed[:, 2:])) == {0, 1}
    )


@pytest.mark.parametrize("kind", list(policies.NOISE))
def test_masked_options_are_never_chosen(kind: str) -> None:
    mask = np.array([True, False, True, False, False])
    assert set(actions(kind, CHOICE, 300, mask)[:, 0].tolist()) == {0, 2}
    noise = Noise("sticky", {"p": 1.0}, CHOICE)
    noise.reset(0)
    first = int(noise.act(None)[0])
    assert int(noise.act(np.arange(5) != first)[0]) != first, "a repeated action must be allowed"


@pytest.mark.parametrize("kind", list(policies.NOISE))
def test_noise_follows_from_the_seed(kind: str) -> None:
    noise = Noise(kind, policies.NOISE[kind], MIXED)
    found = []
    for seed in (1, 2, 1):
        noise.reset(seed)
        found.append(np.array([noise.act(None) for _ in range(20)]))
    assert np.array_equal(found[0], found[2]) and not np.array_equal(found[0], found[1])


# ---------------------------------------------------------------------------------------------- in a group


def group(seed: int = 1) -> Any:
    """What actors use of a group of envs: one row."""
    stats = SimpleNamespace(seeds=[seed])
    from tiltyard.envs.actions import ActionCodec

    return SimpleNamespace(stats=stats, rows=1, agents=1, copies=1, acting=np.ones(1, bool), codec=ActionCodec(BOX))


def played(make: Callable[[Any], Any], seeds: list[int], steps: int = 40) -> list[np.ndarray[Any, Any]]:
    """The actions of an actor in one episode for each seed."""
    envs = group()
    choose, found = make(envs), []
    for seed in seeds:
        envs.stats.seeds[0] = seed
        obs = {"obs": np.full((1, 3), 0.25, np.float32)}
        found.append(np.array([choose(obs, np.array([step == 0]), None)[0].copy() for step in range(steps)]))
    return found


def test_epsilon_replaces_its_share_of_the_actions() -> None:
    def constant(envs: Any) -> Any:
        return lambda obs, first, mask: np.full((1, 2), 0.5, np.float32)

    for epsilon in (0.0, 0.3, 1.0):
        (drawn,) = played(epsilon_actor(constant, epsilon, BOX), [5], 3_000)
        changed = np.any(drawn != 0.5, axis=1)
        assert changed.mean() == pytest.approx(epsilon, abs=0.03)
        if epsilon == 0.3:
            assert np.abs(drawn[changed]).max() > 0.9
    once, again = played(epsilon_actor(constant, 0.3, BOX), [5, 6]), played(epsilon_actor(constant, 0.3, BOX), [6, 5])
    assert np.array_equal(once[0], again[1]) and np.array_equal(once[1], again[0])


def test_mixture_respects_weights_and_depends_on_the_seed_alone() -> None:
    choices = policies.parse(["0.5=random", "3=sticky:0.9", "1.5=ou"], None)
    seeds = [episode_seed(9, number) for number in range(5_000)]
    drawn = [pick(choices, seed) for seed in seeds]
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    assert shares == pytest.approx([0.1, 0.6, 0.3], abs=0.025)
    mixture = Mixture(choices, SPEC, False)
    some = seeds[:12]
    forwards, backwards = played(mixture.begin, some), played(Mixture(choices, SPEC, False).begin, some[::-1])
    assert all(np.array_equal(one, two) for one, two in zip(forwards, backwards[::-1], strict=True))
    for seed, place, taken in zip(some, drawn, forwards, strict=False):
        assert mixture.describe(0, seed) == {"policy": ["random", "sticky:0.9", "ou"][place]}
        repeats = float((taken[1:] == taken[:-1]).all(axis=1).mean())
        assert (repeats > 0.6) == (place == 1), "each policy acts as itself"


OWN = """
import numpy as np

def steer(obs):
    return np.array([obs[0], 1.0], np.float32)

def masked(obs, mask):
    assert mask is None
    return [0.0, 0.0]

def optional(obs, loud=False):
    assert loud is False
    return [1.0, 1.0]

class Plain:
    def act(self, obs):
        return [2.0, 2.0]

class Full:
    def __init__(self, spec):
        self.columns = spec.action.columns
    def reset(self, seed):
        self.seed, self.steps = seed, 0
    def act(self, obs, mask):
        self.steps += 1
        return [float(self.seed), float(self.steps)][: self.columns]

class Restless:
    def reset(self):
        self.step = -1
    def act(self, obs):
        self.step += 1
        return [self.step, self.step]

class CustomPolicy(Plain):
    pass

ready = Plain()
silly = 5

class Mute:
    pass

def fails(obs):
    raise RuntimeError("no idea")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[np.ndarray[Any, Any]]]:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def play(name: str) -> list[np.ndarray[Any, Any]]:
        choices = [policies.locate(each, (), False)[0] for each in policies.parse([name], None)]
        encoded = played(Mixture(choices, SPEC, False).begin, [1, 3], 3)
        return [3.0 * rows + 1.0 for rows in encoded]  # of Box(-2, 4)

    return play


def test_own_functions_and_classes_act(own: Callable[[str], list[np.ndarray[Any, Any]]]) -> None:
    assert own("own.py:steer")[0] == pytest.approx(np.array([[0.25, 1.0]] * 3))
    assert own("own.py:masked")[0] == pytest.approx(np.zeros((3, 2)), abs=1e-6)
    assert own("own.py:optional")[0] == pytest.approx(np.ones((3, 2)))
    for name in ("own.py:Plain", "own.py:ready", "own.py", "0.5=own.py:Plain"):
        assert own(name)[0] == pytest.approx(np.full((3, 2), 2.0))
    first, second = own("own.py:Full")
    assert first == pytest.approx(np.array([[1, 1], [1, 2], [1, 3]])) and second[0] == pytest.approx([3, 1])
    assert own("own.py:Restless")[1][:, 0] == pytest.approx([0, 1, 2])


def test_errors_of_own_policies_name_them(own: Callable[[str], list[np.ndarray[Any, Any]]]) -> None:
    with pytest.raises(TiltyardError, match=r"policy own\.py:fails raised RuntimeError: no idea"):
        own("own.py:fails")
    for name in ("own.py:silly", "own.py:Mute"):
        with pytest.raises(UseError, match="neither a function of the observation nor"):
            own(name)
    with pytest.raises(UseError, match="has no 'Stear'"):
        own("own.py:Stear")
    with pytest.raises(UseError, match=r"there is no file mine\.py"):
        own("mine.py:Plain")


# ---------------------------------------------------------------------------------------------- what is typed


def test_policies_are_parsed() -> None:
    def parsed(text: str, run: str | None = "here") -> PolicyChoice:
        (choice,) = policies.parse([text], run)
        return choice

    assert parsed("random") == PolicyChoice("random")
    assert parsed("sticky:0.5").numbers == {"p": 0.5} and parsed("sticky").numbers == {"p": 0.9}
    assert parsed("ou:sigma=0.2").numbers == {"theta": 0.15, "sigma": 0.2}
    assert parsed("brownian:0.3").numbers == parsed("brownian:sigma=0.3").numbers == {"sigma": 0.3}
    assert (parsed("0.7=random").weight, parsed("7e-1=random").weight, parsed(".5=random").weight) == (0.7, 0.7, 0.5)
    assert parsed("a/0001-x") == PolicyChoice("a/0001-x", kind="run", source="a/0001-x")
    best = parsed("a/0001-x@best")
    assert (best.source, best.at, best.greedy) == ("a/0001-x", "best", None)
    assert parsed("greedy") == PolicyChoice("greedy", kind="run", source="here", greedy=True)
    assert (parsed("sampled:a@1_000").at, parsed("sampled:a@1_000").greedy) == ("1_000", False)
    epsilon = parsed("epsilon:0.1:a@best")
    assert (epsilon.numbers, epsilon.source, epsilon.at, epsilon.greedy) == ({"epsilon": 0.1}, "a", "best", True)
    assert parsed("epsilon:0.1").source == "here"
    assert parsed("pack.mod:Name").kind == parsed("file.py").kind == parsed("x/file.py:f").kind == "own"
    assert policies.parse([], "here")[0].source == "here" and policies.parse([], None) == [PolicyChoice("random")]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "--policy is empty", "--policy random"),
        ("sticky:2", "p = 2 must be a number from 0 to 1", "write --policy sticky:0.9"),
        ("sticky:often", "p = often must be a number", "write --policy sticky:0.9"),
        ("ou:0.1", "ou has no setting '0.1'", "write --policy ou:theta=0.15,sigma=0.3"),
        ("ou:thet=0.1", "ou has no setting 'thet'", "did you mean 'theta'"),
        ("ou:sigma=0", "sigma = 0 must be", "write --policy ou:"),
        ("ou:sigma=nan", "sigma = nan must be", "write --policy ou:"),
        ("random:0.1", "random has no setting '0.1'", "write --policy random"),
        ("epsilon:a", "epsilon = a must be a number from 0 to 1", ""),
        ("epsilon", "--policy epsilon has no number", "epsilon:0.1:RUN"),
        ("greedy", "names no run", "write --policy greedy:RUN"),
        ("0=random", "the weight must be a finite number above 0", "0.7=random"),
        ("-1=random", "the weight must be a finite number above 0", "0.7=random"),
        ("inf=random", "the weight must be a finite number above 0", "0.7=random"),
    ],
)
def test_wrong_policies_are_refused_with_a_hint(text: str, message: str, hint: str) -> None:
    with pytest.raises(UseError) as error:
        policies.parse([text], None)
    assert message in error.value.message and hint in error.value.hint


def test_mixture_in_which_only_some_have_weights_is_refused() -> None:
    with pytest.raises(UseError, match=r"sticky:0\.9 has no weight, but another has one"):
        policies.parse(["0.5=random", "sticky:0.9"], None)


def test_unknown_run_is_refused(runs: Path) -> None:
    with pytest.raises(UseError, match="--policy randm: ") as error:
        policies.locate(policies.parse(["randm"], None)[0], (), False)
    assert "other policies: random, sticky" in error.value.hint
