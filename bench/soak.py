"""Does the resource use of a long training grow? `python bench/soak.py --minutes 30 [EXPERIMENT key=value ...]`.

Trains, samples the resources of the process tree once a second, and compares the mean of the second half with that of
the first. The exit code is 1 if any of them grows by more than 2 %, or if training exits early.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from statistics import mean

from peers.process_tree import usage

ALLOWED = 1.02
SETTLE = 0.1  # fraction at the start that is ignored: imports, first episodes, first evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description="train for long and watch memory, files, threads and shared memory")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("experiment", nargs="*", default=["CartPole-v1"], help="and key=value (default: CartPole-v1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        # Given last, so that it overrides a stop condition of the user.
        command = [sys.executable, "-m", "tiltyard", "train", *options.experiment, "stop.env_steps=1_000_000_000_000"]
        environment = os.environ | {"TILTYARD_RUNS": runs}
        child = subprocess.Popen([*command, "--plain"], stdout=subprocess.DEVNULL, env=environment)
        try:
            samples = watch(child, options.minutes * 60)
        finally:
            child.terminate()
            child.wait(120)
    sys.exit(0 if judge(samples) else 1)


def watch(child: subprocess.Popen[bytes], seconds: float) -> list[dict[str, int]]:
    began, samples = time.monotonic(), []
    while time.monotonic() < began + seconds:
        time.sleep(min(1.0, seconds / 100))
        if child.poll() is not None:
            sys.exit(f"error: training exited early with code {child.returncode}")
        if time.monotonic() > began + SETTLE * seconds:
            samples.append(usage(child.pid))
    return samples


def judge(samples: list[dict[str, int]]) -> bool:
    """Print one line per resource; return True if none has grown too much."""
    half, good = len(samples) // 2, True
    for name in samples[0]:
        first, second = (mean(sample[name] for sample in part) for part in (samples[:half], samples[half:]))
        growth = second / first if first else float(bool(second)) + 1
        good &= growth <= ALLOWED
        unit = 2**20 if "memory" in name or name == "resident" else 1
        print(f"{name:16}  first half {first / unit:10,.1f}  second half {second / unit:10,.1f}  {growth - 1:+.1%}")
    return good


if __name__ == "__main__":
    main()
