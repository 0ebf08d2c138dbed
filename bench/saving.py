"""How long training waits for a checkpoint, with save.async and without it, as medians of several saves.

python bench/saving.py [--mebibytes 4 64 240] [--saves 9] [--folder /scratch/me]

The state is one array, as of a large model or a replay buffer. The loop waits for a copy of it, or for files,
checksums, fsync and rename; the ratio of both is what save.async gains. The folder's disk decides the second number.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import tiltyard
from tiltyard.training.saving import save_checkpoint

ALGO = """
import numpy as np

class CustomAlgo:
    def __init__(self, net, rng, *, mebibytes):
        self.state = np.ones(mebibytes * 2**17)

    def update(self, rollout, env_steps):
        self.state += 1.0
        return {}

    def save(self):
        return {"state": self.state}

    def load(self, tree):
        self.state = tree["state"]
"""


def waits(folder: Path, mebibytes: int, saves: int, asynchronous: bool) -> tuple[float, float]:
    """Median seconds that the loop waits for a checkpoint, and until the checkpoint is complete."""
    settings = {
        "env": "CartPole-v1",
        "engine": {"envs": 2, "workers": 0, "threads": 1},
        "algo": {"id": str(folder / "own_algo.py"), "rollout": 16, "options": {"mebibytes": mebibytes}},
        "save": {"seconds": 1e6, "last": 1, "best": 0, "async": asynchronous},
        "eval": {"every": 0, "at_end": False},
        "track": {"tensorboard": False},
        "stop": {"updates": saves},
    }
    waited, complete = [], []
    with tiltyard.iterate(settings, live=False) as training:
        for _ in training:
            mark = time.perf_counter()
            save_checkpoint(training._attempt, background=True)  # as the loop does
            waited.append(time.perf_counter() - mark)
            training._attempt.saving.wait()
            complete.append(time.perf_counter() - mark)
    return statistics.median(waited), statistics.median(complete)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[4, 64, 240])
    parser.add_argument("--saves", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    print("   state   save.async=true   complete after   save.async=false   ratio")
    for mebibytes in asked.mebibytes:
        folder = Path(tempfile.mkdtemp(dir=asked.folder))
        try:
            (folder / "own_algo.py").write_text(ALGO)
            os.environ["TILTYARD_RUNS"] = str(folder / "runs")
            shorter, complete = waits(folder, mebibytes, asked.saves, True)
            longer, _ = waits(folder, mebibytes, asked.saves, False)
        finally:
            shutil.rmtree(folder)
        times = f"{shorter * 1e3:>12.1f} ms {complete * 1e3:>13.1f} ms {longer * 1e3:>15.1f} ms"
        print(f"{mebibytes:>4} MiB {times} {longer / shorter:>7.1f}")


if __name__ == "__main__":
    main()
