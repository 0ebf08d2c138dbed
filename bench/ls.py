"""Time of `tiltyard ls` with 1,000 runs, including process start. Aim: 0.5 s.

python bench/ls.py [RUNS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiltyard.config.experiment import Experiment
from tiltyard.run import atomic
from tiltyard.run.status import first_status

AIM = 0.5
REPEATS = 7


def make_runs(root: Path, number: int) -> None:
    """Run folders as `ls` reads them: one status file each; every twentieth run is running."""
    experiment = Experiment.model_validate({"env": {"id": "CartPole-v1"}, "tags": ["bench"], "notes": "a fake run"})
    for index in range(number):
        folder = root / f"name{index % 10}" / f"{index + 1:04d}-brisk-otter"
        folder.mkdir(parents=True)
        status = first_status(f"{folder.parent.name}/{folder.name}", experiment, None, None)
        status["state"] = "running" if index % 20 == 0 else "finished"
        atomic.write_json(folder / "status.json", status)


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    outside = {name: value for name, value in os.environ.items() if name not in ("TILTYARD_RUNS", "TILTYARD_SITE")}
    with tempfile.TemporaryDirectory() as place:
        make_runs(Path(place) / "runs", number)
        runs = str(Path(place) / "runs")
        for what, extra, environment in (
            ("--root", ["--root", runs], {}),
            ("TILTYARD_RUNS", [], {"TILTYARD_RUNS": runs}),
            ("./runs, after looking for a site file", [], {}),
            ("--json", ["--json", "--root", runs], {}),
        ):
            seconds = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                command = [sys.executable, "-m", "tiltyard", "ls", *extra]
                out = subprocess.run(
                    command, cwd=place, capture_output=True, text=True, check=True, env={**outside, **environment}
                )
                seconds.append(time.perf_counter() - start)
                assert out.stdout.count("brisk-otter") >= number
            median = statistics.median(seconds)
            print(
                f"ls of {number:,} runs ({what}): {median:.3f} s (aim {AIM} s, {'met' if median <= AIM else 'missed'})"
            )


if __name__ == "__main__":
    main()
