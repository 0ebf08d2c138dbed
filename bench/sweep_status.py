"""Time of `tiltyard sweep status` with 1,000 finished trials, including process start. Aim: 2 s.

python bench/sweep_status.py [TRIALS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiltyard.config.sweep_plan import load_plan
from tiltyard.run import atomic
from tiltyard.sweep.folder import Sweep, Trial, make
from tiltyard.sweep.report import summarize
from tiltyard.sweep.results import keep

AIM = 2.0
REPEATS = 7
RECORDS = 500


def make_sweep(root: Path, number: int) -> Sweep:
    """A finished grid: each trial has a status and training records."""
    plan = load_plan({"experiment": {"env": {"id": "CartPole-v1"}}, "space": {"algo.lr": list(range(number))}})
    sweep = make(root, "bench", plan, [Trial(n, n, 0, {"algo.lr": n - 1}) for n in range(1, number + 1)])
    lines = "".join(
        atomic.to_json({"env_steps": 2048 * n, "updates": n, "metrics": {"train/return": n, "eval/return": n}}) + "\n"
        for n in range(RECORDS)
    )
    progress = {"env_steps": 2048 * RECORDS, "seconds": 100.0}
    for trial in sweep.trials():
        folder = sweep.place(trial.number)
        folder.mkdir()
        status = {"schema": 1, "state": "finished", "reason": "done", "updated": "now", "progress": progress}
        atomic.write_text(folder / "status.json", atomic.to_json(status))
        (folder / "metrics.jsonl").write_text(lines)
    return sweep


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as place:
        sweep = make_sweep(Path(place) / "runs", number)
        environment = {**os.environ, "TILTYARD_RUNS": str(Path(place) / "runs")}
        for what in ("values on record, as a controller leaves them", "and as --json"):
            if not (sweep.folder / "results.jsonl").exists():
                for row in summarize(sweep).rows:
                    keep(sweep, row)
            extra = ["--json"] if what.endswith("json") else []
            seconds = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                command = [sys.executable, "-m", "tiltyard", "sweep", "status", "bench", *extra]
                out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                seconds.append(time.perf_counter() - start)
                assert f"{number:,} finished" in out or f'"finished": {number}' in out
            median = statistics.median(seconds)
            verdict = "met" if median <= AIM else "missed"
            print(f"sweep status of {number:,} trials ({what}): {median:.3f} s (aim {AIM} s, {verdict})")


if __name__ == "__main__":
    main()
