"""Seconds and peak memory of reading a large metrics.jsonl, including process start.

Aim: 10 million lines with an index in under 2 s and 200 MB.

python bench/metrics_reading.py [LINES ...]      default: 200,000 and 10 million, which needs 8 GB below /tmp

    every line   json.loads of every line, as a reader without an index must at least
    first        `tiltyard show` without an index, which it leaves behind
    show, plot   `tiltyard show --json` and `tiltyard show --plot` with the index
    mean         the exact mean up to an env step in the middle, as the median rule of a sweep asks for it
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = (
    *("train/return", "train/return_min", "train/return_max", "train/length", "loss/policy", "loss/value"),
    *("loss/entropy", "loss/kl", "loss/clipped", "speed/env_steps_per_second", "time/env", "time/act", "time/learn"),
    *("time/other", "setting/lr", "loss/gradient_norm", "loss/explained_variance"),
)
AIM_SECONDS, AIM_MB = 2.0, 200
REPEATS = 3
EVERY_LINE = "import json, sys\nfor line in open(sys.argv[1], 'rb'): json.loads(line)"
MEAN = """
import sys
from pathlib import Path
from tiltyard.run.metrics import curve
found = curve(Path(sys.argv[1]), "train/return")
print(found.mean_until(found.last_step // 2))
"""


def write(file: Path, lines: int) -> None:
    """Records as of PPO, with an evaluation every 100 and a resume every 100,000."""
    rng = random.Random(0)
    bodies = [
        ", ".join(f'"{name}": {rng.gauss(0, 100)}' for name in NAMES)
        + (f', "eval/return": {rng.gauss(0, 100)}' if number % 100 == 0 else "")
        for number in range(1000)
    ]
    with file.open("w", buffering=1 << 20) as out:
        for n in range(lines):
            if n % 100_000 == 99_999:
                out.write(f'{{"rewind_to": {2048 * (n - 500)}, "attempt": {n // 100_000 + 2}}}\n')
                continue
            head = f'"env_steps": {2048 * n}, "frames": {2048 * n}, "updates": {n}, "episodes": {3 * n}'
            time_of = f'"seconds": {n / 7:.6f}, "time": {1.7e9 + n / 7:.3f}, "attempt": {n // 100_000 + 1}'
            out.write(f'{{{head}, {time_of}, "metrics": {{{bodies[n % 1000]}}}}}\n')


def measure(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak resident MB of a command."""
    start = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} exited with code {child.returncode}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    sizes = [int(word.replace(",", "")) for word in sys.argv[1:]] or [200_000, 10_000_000]
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "TILTYARD_RUNS": f"{place}/runs", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        tiltyard = [sys.executable, "-m", "tiltyard"]
        train = [*tiltyard, "train", "CartPole-v1", "stop.env_steps=2048", "eval.at_end=false"]
        subprocess.run(train, env=environment, check=True, capture_output=True)
        (file,) = Path(place).glob("runs/*/*/metrics.jsonl")
        missed = False
        for lines in sizes:
            write(file, lines)
            file.with_name("metrics.index").unlink(missing_ok=True)
            print(f"{lines:,} lines, {file.stat().st_size / 1e6:,.0f} MB", flush=True)
            show = [*tiltyard, "show", "last"]
            cases = {
                "every line": ([sys.executable, "-c", EVERY_LINE, str(file)], 1),
                "first": ([*show, "--json"], 1),
                "show": ([*show, "--json"], REPEATS),
                "plot": ([*show, "--plot", f"{place}/curve.png"], REPEATS),
                "mean": ([sys.executable, "-c", MEAN, str(file)], REPEATS),
            }
            alone = 0.0
            for what, (command, repeats) in cases.items():
                found = [measure(command, environment) for _ in range(repeats)]
                seconds, busy = min(each[0] for each in found), min(each[1] for each in found)
                memory = max(each[2] for each in found)
                alone = alone or busy
                ratio = f"{busy / alone:.4f} of every line's"
                print(f"  {what:<11} {seconds:8.2f} s  {busy:8.2f} s of CPU, {ratio}  {memory:4.0f} MB", flush=True)
                missed |= what == "show" and (seconds > AIM_SECONDS or memory > AIM_MB)
            print(f"  index       {file.with_name('metrics.index').stat().st_size / 1e6:8.2f} MB")
    sys.exit(f"missed the aim of {AIM_SECONDS:g} s and {AIM_MB} MB" if missed else 0)


if __name__ == "__main__":
    main()
