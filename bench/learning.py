"""Env steps and seconds that the two examples need to reach their goal: `python bench/learning.py [SEEDS]`.

Each seed is one run of the example file in a temporary folder; the goal is the file's stop.return.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILTYARD_RUNS"] = folder
        import tiltyard

        for name in ("cartpole.yaml", "car_pass.yaml"):
            steps, seconds, reached = [], [], 0
            for seed in range(seeds):
                settings = [f"seed={seed}", "track.tensorboard=false"]
                status = tiltyard.train(EXAMPLES / name, settings, live=False).status()
                reached += status["reason"].startswith("stop.return")
                steps.append(status["progress"]["env_steps"])
                seconds.append(status["progress"]["seconds"])
            print(f"{name}: goal reached by {reached} of {seeds} seeds")
            print(f"  env steps {min(steps):,} to {max(steps):,}, median {statistics.median(steps):,.0f}")
            print(f"  seconds {min(seconds):.1f} to {max(seconds):.1f}, median {statistics.median(seconds):.1f}")


if __name__ == "__main__":
    main()
