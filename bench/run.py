"""Tiltyard and its peers side by side: `python bench/run.py --tasks cartpole pong --blocks 5 --seconds 15`.

Systems run one at a time in alternating order, A B C C B A ... Each run is a new process tree that measures itself with
bench/peers/report.py; its memory is sampled from outside. Results go to bench/results: JSON, a table, a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import machine
from peers import process_tree
from summary import picture, table
from systems import BENCH, TASKS, System, Task

LONGEST = 3600.0  # timeout of a run to a goal, in seconds
STARTUP = 300.0  # seconds that a throughput run may take in addition to its window
EXIT_TIMEOUT = 20.0  # seconds that a system may take to exit after its last line


def main() -> None:
    parser = argparse.ArgumentParser(description="compare Tiltyard with its peers on this machine")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--systems", nargs="+", default=[], help="only systems whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a throughput window")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds from the first update to the window")
    parser.add_argument("--blocks", type=int, help="rounds, or seeds for the tasks with a goal (default: the task's)")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the first block")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args()
    for name in options.tasks:
        compare(name, TASKS[name], options)


def compare(name: str, task: Task, options: argparse.Namespace) -> None:
    chosen = [x for x in task.systems if not options.systems or any(part in x for part in options.systems)]
    missing = [x for x in chosen if shutil.which(task.systems[x].command[0]) is None]
    if missing:
        say(f"{name}: left out, not installed (python bench/peers/install.py): {', '.join(missing)}")
    chosen = [x for x in chosen if x not in missing]
    result: dict[str, Any] = {"task": name, "title": task.title, "frames": task.frames, "machine": machine.describe()}
    result |= {"date": date.today().isoformat(), "goal": task.goal, "limit": task.steps}
    result |= {"left_out": missing, "runs": []}
    for block in range(options.blocks or task.blocks):
        for system in chosen if block % 2 == 0 else reversed(chosen):
            load = {"load_average": os.getloadavg()[0], "busy_before": machine.busy_cores()}
            limit = LONGEST if task.steps else STARTUP + 2 * (options.seconds + options.warmup)
            found = run(task.systems[system], measurement(task, options, options.seed + block), limit)
            result["runs"].append({"system": system, "block": block} | load | found)
            say(f"{name} block {block} {system}: {brief(found)}")
            write(options.out, result)


def measurement(task: Task, options: argparse.Namespace, seed: int) -> list[str]:
    if task.steps is None:
        return [f"--seconds={options.seconds}", f"--warmup={options.warmup}", f"--seed={seed}"]
    goal = [] if task.goal is None else [f"--goal={task.goal}"]
    return [f"--steps={task.steps}", f"--every={task.every}", f"--seed={seed}", "--warmup=0", *goal]


def run(system: System, options: list[str], limit: float) -> dict[str, Any]:
    """Run one system; return its last line with start-up time, peak memory and seconds from launch to the goal."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [*system.command, *options, *system.arguments]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        launched = time.time()
        # New session: Ctrl-C reaches only this process. New folder: some games write to the current one.
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=folder, start_new_session=True
        )
        memory = Memory(child.pid)
        alarm = threading.Timer(limit, lambda: end(*process_tree.pids(child.pid)))
        alarm.start()
        last: dict[str, Any] = {}
        try:
            for line in child.stdout or []:
                if line.startswith(b'{"event": "end"'):
                    last = json.loads(line)
                    break
        finally:
            memory.stop()
            alarm.cancel()
            family = process_tree.pids(child.pid)
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=EXIT_TIMEOUT if last else 0)
            end(*family)
            child.wait()
        if not last:
            errors.seek(0)
            return {"failed": errors.read().decode(errors="replace")[-2000:] or "exited without a result line"}
    last |= {"peak_pss": memory.peak, "startup_seconds": last["first_update"] - launched}
    if last.get("solved"):
        last["solved"]["seconds_from_launch"] = last["solved"]["time"] - launched
    return last


class Memory(threading.Thread):
    """Peak PSS of a process tree, sampled once a second: reading it slows down the processes that are read."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.over = pid, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(1.0):
            self.peak = max(self.peak, process_tree.pss(self.pid))

    def stop(self) -> None:
        self.over.set()
        self.join()


def end(*pids: int) -> None:
    """Kill the remaining processes of a run, children first: some may have outlived their parents."""
    for pid in reversed(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def write(folder: Path, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{result['date']}-{result['task']}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(result))
    picture(result, stem.with_suffix(".png"))


def brief(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed'].strip().splitlines()[-1]}"
    if "curve" in found:
        return f"solved {found['solved']}" if found["solved"] else f"last evaluation {found['curve'][-1]}"
    return f"{found.get('steps_per_second', 0):,.0f} env steps/s, others used {found.get('others_cores', 0):.2f} cores"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
