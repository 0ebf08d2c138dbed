"""The sentence about the bottleneck: for given time shares, and for real runs that are slow on purpose."""

from pathlib import Path

import pytest

import tiltyard as product
from tests.conftest import Command
from tiltyard.track.bottleneck import bottleneck

QUICK = ["eval.at_end=false", "track.tensorboard=false", "engine.envs=4", "algo.rollout=32", "algo.minibatch=64"]
SLOW_ENV = """
import time
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)
"""


@pytest.mark.parametrize(
    ("time", "workers", "begins"),
    [
        (
            {"learn": 0.97, "env": 0.02, "other": 0.01},
            {},
            "learner-bound: 97 % of the time is gradient steps; more workers",
        ),
        (
            {"learn": 0.7, "read": 0.3},
            {},
            "learner-bound: 70 % of the time is gradient steps; try a larger algo.minibatch",
        ),
        ({"learn": 0.3, "read": 0.7}, {}, "reading-bound: 70 %"),
        ({"env": 0.7, "inference": 0.1, "learn": 0.2}, {}, "env-bound: 70 %"),
        ({"env": 0.1, "inference": 0.6, "learn": 0.3}, {}, "inference-bound: 60 %"),
        (
            {"wait": 0.8, "learn": 0.2},
            {"env": 0.9, "inference": 0.1},
            "starved learner, env-bound: the learner waits 80 %",
        ),
        ({"wait": 0.8, "learn": 0.2}, {"env": 0.2, "inference": 0.8}, "starved learner, inference-bound"),
        (
            {"wait": 0.53, "learn": 0.47},
            {"env": 0.3, "inference": 0.19, "wait": 0.51},
            "alternating: the learner waits 53 %",
        ),
        ({"wait": 0.9, "learn": 0.1}, {"env": 0.2, "wait": 0.8}, "starved learner: the learner waits 90 %"),
        ({"eval": 0.5, "learn": 0.5}, {}, "eval-bound: 50 % of the time is evaluations"),
        ({"learn": 0.52, "env": 0.45, "other": 0.03}, {}, "learner-bound: 52 % of the time is gradient steps; 45 % is"),
        ({"eval": 0.2, "learn": 0.5, "env": 0.3}, {}, "learner-bound: 62 %"),  # of the time without evaluations
        (
            {"learn": 0.4, "env": 0.25, "inference": 0.2, "other": 0.15},
            {},
            "nothing stands out: learn 40 %, env 25 %, inf",
        ),
        ({}, {}, ""),
    ],
)
def test_bottleneck_sentence_matches_the_time_shares(
    time: dict[str, float], workers: dict[str, float], begins: str
) -> None:
    output = bottleneck(time, workers)
    assert output.startswith(begins) and bool(output) == bool(begins)


def bound(run: product.Run, tiltyard: Command) -> str:
    lines = [line for line in tiltyard("show", run.id).stdout.splitlines() if line.startswith("bound")]
    return lines[0].split(None, 1)[1] if lines else ""


def test_slow_env_slow_learner_and_starved_learner_are_distinguished(
    runs: Path, tmp_path: Path, tiltyard: Command
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_ENV)
    slow_env = product.train("slow.py", [*QUICK, "stop.updates=2", "engine.workers=0", "algo.epochs=1"], live=False)
    assert bound(slow_env, tiltyard).startswith("env-bound")
    slow_learner = product.train(
        "CartPole-v1", [*QUICK, "stop.updates=2", "engine.workers=0", "algo.epochs=60"], live=False
    )
    assert bound(slow_learner, tiltyard).startswith("learner-bound")
    starved = product.train(
        "slow.py", [*QUICK, "stop.updates=3", "engine.workers=1", "engine.mode=async", "algo.epochs=1"], live=False
    )
    assert bound(starved, tiltyard).startswith("starved learner, env-bound")
