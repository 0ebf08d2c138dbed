"""Self-play against past versions, in a game whose only equilibrium is known."""

from typing import Any

import numpy as np
import pytest

from tests.counts import LONG
from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.engines.serial import SerialEngine
from tiltyard.envs.probe import probe
from tiltyard.envs.toys.games import Pennies

pytestmark = pytest.mark.slow  # half a minute

SEEDS = (0, 1, 2) if LONG else (0,)


def heads(net: Any) -> tuple[float, float]:
    """Probability of heads for even and odd."""
    params = net.infer({"obs": np.eye(2, dtype=np.float32)}, net.initial_state(2), np.ones(2, bool))[0]
    odds = np.exp(params - params.max(1, keepdims=True))
    even, odd = odds[:, 0] / odds.sum(1)
    return float(even), float(odd)


def exploitability(even: float, odd: float) -> float:
    """Sum of what the best responses to both players win above the value of the game; 0 only at the equilibrium."""
    return float(max(Pennies.PAYOFF @ [odd, 1 - odd]) - min([even, 1 - even] @ Pennies.PAYOFF))


def versions(seed: int, opponents: str | dict[str, float]) -> list[tuple[float, float]]:
    """Train against these opponents. Return the probabilities of heads of each version."""
    algo = {"id": "a2c", "rollout": 2, "lr": 0.02, "entropy": 0.4, "normalise_advantage": False, "max_grad_norm": None}
    file = {
        "env": "pennies",
        "seed": seed,
        "algo": algo,
        "model": {"hidden": [8]},
        "engine": {"kind": "serial", "envs": 64},
        "policies": {"main": {}, "past": {"past": {"of": "main", "every": 1280, "keep": 100}}},
        "match": {"even": opponents, "odd": opponents},
    }
    experiment = load(file).experiment
    engine = make_engine(experiment, probe(experiment.env, base=[]), [])
    assert isinstance(engine, SerialEngine)
    for _ in range(180):
        engine.step()
    found = [heads(net) for _, net in sorted(engine.policies.version_pools["past"].versions.items())]
    engine.close()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_training_against_past_versions_converges_near_the_equilibrium(seed: int) -> None:
    """Against only itself, a policy circles around the equilibrium, and each of its versions can be exploited.

    The measured policies are those of the last quarter. The uniform policy at the start has exploitability 1."""
    pool, alone = versions(seed, {"main": 0.2, "past": 0.8}), versions(seed, "main")
    begun, late, circling = (
        np.mean([exploitability(*each) for each in part]) for part in (pool[:1], pool[-9:], alone[-9:])
    )
    assert begun > 0.8
    assert late < 0.5, f"{late:.2f} against past versions"
    assert circling > late + 0.25, f"{circling:.2f} against itself alone"
    assert np.allclose(np.mean(pool[-9:], 0), [Pennies.HEADS["even"], Pennies.HEADS["odd"]], atol=0.25)
