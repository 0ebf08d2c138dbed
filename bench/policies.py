"""Env steps per second of four policies in one engine compared with one policy, at equal rows per policy.

python bench/policies.py [--seconds 5] [--rounds 5]

One policy has 16 envs; four policies share 64, so that each acts in 16 of them on average and learns from the same
number of samples per update. Minibatch and epochs are equal, and measurements alternate. Aim: 0.9 of the env steps per
second of one policy.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.envs.probe import probe
from tiltyard.types import Engine

AIM = 0.9
ROWS = 16
COMMON = ["algo.rollout=128", "algo.minibatch=256", "algo.epochs=4"]
FOUR = ["policies={a: {}, b: {}, c: {}, d: {}}", 'match={"*": {a: 1, b: 1, c: 1, d: 1}}', f"engine.envs={4 * ROWS}"]


def engine_of(env: str, settings: list[str]) -> Engine:
    experiment = load(env, [*COMMON, *settings]).experiment
    return make_engine(experiment, probe(experiment.env, base=()), ())


def speed(engine: Engine, seconds: float) -> float:
    """Env steps per second over about `seconds`."""
    before, began = engine.step().progress, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        now = engine.step().progress
    return (now.env_steps - before.env_steps) / spent


def main() -> None:
    parser = argparse.ArgumentParser(description="compare four policies in one engine with one policy")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for env, words in (
        ("CartPole-v1", ["engine.kind=serial"]),
        ("CartPole-v1", ["engine.workers=2"]),
        ("LunarLander-v3", ["engine.workers=2"]),
    ):
        one, four = engine_of(env, [f"engine.envs={ROWS}", *words]), engine_of(env, [*FOUR, *words])
        try:
            pairs = [(speed(one, options.seconds), speed(four, options.seconds)) for _ in range(options.rounds)]
        finally:
            one.close()
            four.close()
        ratio = median(both[1] / both[0] for both in pairs)
        alone, together = (median(side) for side in zip(*pairs, strict=True))
        result = "met" if ratio >= AIM else "missed"
        print(
            f"{env} {' '.join(words)}: one {alone:,.0f}, four {together:,.0f} env steps per second, "
            f"median ratio {ratio:.2f} (aim {AIM}, {result})",
            flush=True,
        )


if __name__ == "__main__":
    main()
