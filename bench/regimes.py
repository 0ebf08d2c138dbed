"""Does asynchronous training learn as well as synchronous training? `python bench/regimes.py [SEEDS]`.

For each seed, the same experiment runs with one worker in both modes. They are compared by the mean greedy return over
the first 50,000 env steps, evaluated every 5,000. The interval is that of the ratio of means, from 10,000 bootstrap
resamples of the seeds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from statistics import mean
from typing import Any

import numpy as np
from summary import area

STEPS = 50_000
EXPERIMENT = {
    "env": "CartPole-v1",
    "algo": {"rollout": 16, "minibatch": 256, "epochs": 4, "lr": 1e-3},
    "engine": {"workers": 1, "envs": 16},
    "stop": {"env_steps": STEPS},
    "eval": {"every": 5_000, "episodes": 20},
    "track": {"tensorboard": False, "every": 1},
}


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    areas: dict[str, list[float]] = {"sync": [], "async": []}
    lags: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILTYARD_RUNS"] = folder
        for seed in range(seeds):
            for mode in ("sync", "async") if seed % 2 else ("async", "sync"):
                records = train(mode, seed)
                curve = [
                    [r["env_steps"], r["metrics"]["eval/return"]] for r in records if "eval/return" in r["metrics"]
                ]
                areas[mode].append(area(curve, STEPS))
                if mode == "async":
                    lags.append(mean(r["metrics"]["lag/mean"] for r in records if "lag/mean" in r["metrics"]))
            print(
                f"seed {seed}: sync {areas['sync'][-1]:.0f}, async {areas['async'][-1]:.0f}, lag {lags[-1]:.2f}",
                flush=True,
            )
    low, middle, high = interval(np.array(areas["async"]), np.array(areas["sync"]))
    print(f"async / sync over {seeds} seeds: {middle:.3f} [{low:.3f}, {high:.3f}] at a lag of {mean(lags):.2f} updates")


def train(mode: str, seed: int) -> list[dict[str, Any]]:
    import tiltyard
    from tiltyard.run import metrics

    run = tiltyard.train(EXPERIMENT, [f"engine.mode={mode}", f"seed={seed}"], live=False)
    return [record for record in metrics.read(run) if "metrics" in record]


def interval(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """2.5 %, 50 % and 97.5 % quantiles of the ratio of means."""
    draws = np.random.default_rng(0).integers(len(ours), size=(10_000, len(ours)))
    low, middle, high = np.quantile(ours[draws].mean(1) / theirs[draws].mean(1), [0.025, 0.5, 0.975])
    return float(low), float(middle), float(high)


if __name__ == "__main__":
    main()
