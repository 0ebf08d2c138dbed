"""Does a long training grow? `python bench/soak.py --minutes 30 [EXPERIMENT key=value ...]`.

Trains, looks once a second at what the process tree uses, and compares the mean of the second half with that of the
first. More than 2 % growth of anything, or a training that ends by itself, is exit code 1.
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
SETTLE = 0.1  # share of the time at the start that is not looked at: imports, first episodes, first evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description="train for long and watch memory, files, threads and shared memory")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("experiment", nargs="*", default=["CartPole-v1"], help="and key=value (default: CartPole-v1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        # The last word on when to stop is ours, so it stands last.
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
            sys.exit(f"error: the training ended by itself with exit code {child.returncode}")
        if time.monotonic() > began + SETTLE * seconds:
            samples.append(usage(child.pid))
    return samples


def judge(samples: list[dict[str, int]]) -> bool:
    """Prints a line for each thing watched; True when none has grown too much."""
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
