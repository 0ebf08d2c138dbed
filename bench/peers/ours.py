"""Tiltyard, started as a user would start it: `tiltyard train` in its own process, observed through its run folder.

Give the options of the measurement, then the experiment and its key=value settings:
python bench/peers/ours.py --seconds 15 CartPole-v1 algo.epochs=4
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import Report


def records(runs: Path, child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield every record of the single run in `runs` as it is written, until training ends."""
    offset = 0
    while True:
        ended = child.poll() is not None
        for file in runs.glob("*/*/metrics.jsonl"):
            with file.open("rb") as lines:
                lines.seek(offset)
                whole = lines.read().rpartition(b"\n")[0]
                offset += len(whole) + bool(whole)
            yield from map(json.loads, whole.splitlines())
        if ended:
            return
        time.sleep(0.02)


def main() -> None:
    report = Report()
    options = report.options
    changes = [f"seed={report.seed}", f"stop.env_steps={options.steps or 10**9}", "stop.return=null"]
    if options.steps:
        changes += [f"eval.every={options.every}", "eval.episodes=20"]
    else:
        changes += ["eval.every=0", "eval.at_end=false"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tiltyard", "train", *options.arguments, *changes, "--plain"]
        environment = os.environ | {"TILTYARD_RUNS": folder}
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        for record in records(Path(folder), child):
            if "metrics" not in record:
                continue
            steps, at, metrics = record["env_steps"], record["time"], record["metrics"]
            if not report.started:
                report.start(at - record["seconds"])
            if "eval/return" in metrics:
                report.score(steps, metrics["eval/return"], metrics["eval/seconds"], at)
            if report.update(steps, at):
                break
        if child.poll() is None:
            child.terminate()
        child.wait(60)
    report.settings = {"arguments": options.arguments}
    report.finish("tiltyard", "gymnasium", "torch")
    sys.exit(0 if report.first else child.returncode)


if __name__ == "__main__":
    main()
