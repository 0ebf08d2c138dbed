"""Several agents with one policy, in games with known solutions."""

import math

import numpy as np

from tests.engines.test_serial import build
from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.engines.serial import SerialEngine
from tiltyard.envs.probe import probe
from tiltyard.envs.toys.games import Pennies


def equilibrium(entropy: float) -> tuple[float, float]:
    """Probability of heads for even and odd if each maximises its reward plus `entropy` times its entropy."""

    def best(won: np.ndarray) -> float:
        return 1 / (1 + math.exp((won[1] - won[0]) / entropy))

    low, high = 0.0, 1.0
    while high - low > 1e-9:  # bisection: the best response of even falls if even shows heads more often
        even = (low + high) / 2
        odd = best(-([even, 1 - even] @ Pennies.PAYOFF))
        low, high = (even, high) if best(Pennies.PAYOFF @ [odd, 1 - odd]) > even else (low, even)
    return even, odd


def test_pennies_constants_are_an_equilibrium() -> None:
    """Against the other player both choices have the value of the game, and a small entropy bonus changes little."""
    even, odd = Pennies.HEADS["even"], Pennies.HEADS["odd"]
    assert np.allclose(Pennies.PAYOFF @ [odd, 1 - odd], Pennies.VALUE)
    assert np.allclose([even, 1 - even] @ Pennies.PAYOFF, Pennies.VALUE)
    assert np.allclose(equilibrium(0.02), (even, odd), atol=0.01)


def test_self_play_average_is_the_equilibrium() -> None:
    """One policy plays both players, which it distinguishes by observation. It circles around the equilibrium."""
    algo = {"id": "a2c", "rollout": 2, "lr": 0.01, "entropy": 0.5, "normalise_advantage": False, "max_grad_norm": None}
    loaded = load({"env": "pennies", "algo": algo, "model": {"hidden": [8]}, "engine": {"kind": "serial", "envs": 32}})
    engine = make_engine(loaded.experiment, probe(loaded.experiment.env, base=[]), [])
    assert isinstance(engine, SerialEngine)
    heads = []
    for _ in range(150):  # two circles
        engine.step()
        shown = engine.rollout.action[:, :, 0] == 0
        heads.append((shown[:, 0::2].mean(), shown[:, 1::2].mean()))
    engine.close()
    assert np.allclose(np.mean(heads, 0), equilibrium(0.5), atol=0.05), np.mean(heads, 0)


def test_agents_that_enter_and_leave_learn_the_task() -> None:
    settings = ("algo.rollout=24", "algo.minibatch=48", "algo.lr=0.01", "model.hidden=[16]", "engine.kind=serial")
    engine = build("visitors", "env.options.pauses=true", *settings)
    ends = [end for _ in range(25) for end in engine.step().episodes]
    engine.close()
    late = np.mean([end.total for end in ends[-30:]])
    assert 3.4 < late <= 3.5, "6, 3, 2 and 3 decisions, nearly all of them right; half of them at random"
