"""A small program as the trial of a sweep: it logs its start, failure and end, with its arguments and environment.

It waits while the file `wait` exists, sleeps for `--sleep` seconds, and fails if the file `bad` contains its `--x`. It
logs `overlap` if another process runs the same trial.
"""

from pathlib import Path
from typing import Any

from tiltyard.config.yaml import dump_yaml
from tiltyard.run import atomic

PROGRAM = """
import json, os, pathlib, sys, time
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
place = pathlib.Path(os.environ["TILTYARD_TRIAL"])
def say(what):
    with open("said.jsonl", "a") as file:
        file.write(json.dumps({"what": what, "trial": place.name, "time": time.time(), "given": given,
            "argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)),
            "threads": os.environ.get("OMP_NUM_THREADS"), "odd": os.environ.get("ODD"),
            "hidden": os.environ.get("ODD_TOKEN"), "job": os.environ.get("SLURM_JOB_ID")}) + "\\n")
def fields(pid):
    return pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
def alive(pid, start):  # a pid may be reused, by a process that started later
    try:
        return fields(pid)[0] not in "ZX" and fields(pid)[19] == start
    except OSError:
        return False
mine = place / "mine"
known = mine.read_text().split() if mine.exists() else []
if len(known) == 2 and alive(*known):  # empty if it was killed while it wrote
    say("overlap")
mine.write_text(f"{os.getpid()} {fields('self')[19]}")
say("began")
while pathlib.Path("wait").exists():
    time.sleep(0.05)
time.sleep(float(given.get("sleep", 0.0)))
if given.get("x") in pathlib.Path("bad").read_text().split():
    say("failed")
    sys.exit("x is bad today")
with open(place / "metrics.jsonl", "a") as file:
    file.write(json.dumps({"env_steps": 1, "metrics": {"eval/return": float(given.get("x", 0))}}) + "\\n")
say("done")
mine.unlink()
"""


def write_plan(**values: Any) -> Path:
    """Write plan.yaml and the program; `bad` lists the values of x with which it fails."""
    Path("program.py").write_text(PROGRAM)
    Path("bad").write_text(values.pop("bad", ""))
    made = {"name": "toy", "program": ["python", "program.py"], "retries": 0, "back_off": 0.0, **values}
    Path("plan.yaml").write_text(dump_yaml(made))
    return Path("plan.yaml")


def output(what: str) -> list[dict[str, Any]]:
    return [line for line in atomic.read_lines(Path("said.jsonl"))[0] if line["what"] == what]


def most_at_once() -> int:
    """Largest number of programs that ran in parallel, from their own logs."""
    lines = atomic.read_lines(Path("said.jsonl"))[0]
    moments = [(line["time"], {"began": 1, "failed": -1, "done": -1}.get(line["what"], 0)) for line in lines]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most
