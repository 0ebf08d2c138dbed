"""kill -9 of every kind of process of a training, at random moments: the run continues or is resumed, and finishes.

Nothing hangs, nothing starts from scratch, no process is left, and no error is an internal one.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.counts import LONG, count
from tests.faults.test_kill import SETTINGS, wait_until
from tiltyard.processes.proc import read, tree
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

KINDS = ("driver", "fork server", "worker", "reaper", "simulator")
TIMEOUT = 200.0
SMALLER = ["engine.workers=2", "save.env_steps=512", "eval.at_end=false"]
ENV = """
import subprocess
from gymnasium.envs.classic_control import CartPoleEnv
class Simulated(CartPoleEnv):
    def __init__(self):
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "4711"], start_new_session=True)
    def step(self, action):
        if self.simulator.poll() is not None:
            raise RuntimeError("the simulator is gone")
        return super().step(action)
    def close(self):
        self.simulator.kill()
        self.simulator.wait()
"""
# A process with torch imported runs one command after another, each in a fork of its own: imports take seconds.
COMMANDS = """
import json, os, sys
import tiltyard.cli.train, tiltyard.engines.local.engine
from tiltyard.cli import main
for line in sys.stdin:
    words, log = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        main(words)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Commands:
    """Runs commands, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = 0

    def start(self, *words: str) -> None:
        self.process.stdin.write(json.dumps([[*words, "--plain"], str(self.log)]).encode() + b"\n")
        self.pid = int(self._line(TIMEOUT))

    def exit_code(self, seconds: float = TIMEOUT) -> int:
        code = int(self._line(seconds))
        self.pid = 0
        return code

    def has_exited(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def _line(self, seconds: float) -> bytes:
        assert select.select([self.process.stdout], [], [], seconds)[0], f"nothing happened in time:\n{self.output()}"
        return self.process.stdout.readline()

    def close(self) -> None:
        for each in tree(self.pid) if self.pid else []:
            os.kill(each.pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def commands(tmp_path: Path):
    made = Commands(tmp_path)
    yield made
    made.close()


def kind_of(pid: int, command: str, driver: int) -> str | None:
    try:
        name = Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return None
    if pid == driver or name.startswith("tiltyard-w"):
        return "driver" if pid == driver else "worker"
    found = {"reaper.py": "reaper", "sleep 4711": "simulator", "fork_server": "fork server"}
    return next((kind for word, kind in found.items() if word in command), None)


def processes(driver: int) -> dict[int, str | None]:
    return {each.pid: kind_of(each.pid, each.command, driver) for each in tree(driver)}


def newest(run: Run) -> int:
    found, complaints = checkpoint.newest_valid(run)
    assert found is not None and complaints == []
    return found.env_steps


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 600)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_run_survives_a_storm_of_kills(runs: Path, tmp_path: Path, commands: Commands) -> None:
    rng, kills = random.Random(19), count(200)
    (tmp_path / "simulated.py").write_text(ENV)
    small = [word for word in SETTINGS[1:] if "save.env_steps" not in word]
    commands.start("train", "simulated.py:Simulated", *small, *SMALLER)
    wait_until(lambda: list(runs.glob("*/0*/checkpoints/0*")), TIMEOUT)
    run, done, seen = find("last", runs), Counter[str](), set[int]()
    first = reached = newest(run)
    # Fatal kills cost a start each, so there are fewer of them.
    for number in range(kills):
        kind = "driver" if number == kills - 1 else rng.choice((*KINDS, "worker", "simulator", "reaper"))
        if rng.random() < 0.7:
            wait_until(lambda: newest(run) > reached or commands.has_exited(), TIMEOUT)  # noqa: B023
        time.sleep(rng.uniform(0.0, 0.3))
        found = processes(commands.pid)
        seen |= found.keys()
        targets = [pid for pid, each in found.items() if each == kind] or [commands.pid]
        target = rng.choice(targets)
        done[found.get(target) or "driver"] += 1
        if not commands.has_exited():
            try:
                os.kill(target, signal.SIGKILL)
            except ProcessLookupError:
                continue
        at = reached = max(reached, newest(run))
        seen |= processes(commands.pid).keys()
        if found.get(target) in ("worker", "reaper", "simulator"):
            wait_until(lambda: newest(run) > at or commands.has_exited(), TIMEOUT)  # noqa: B023
        if found.get(target) in ("driver", "fork server") or commands.has_exited():
            code = commands.exit_code()
            assert code in (-signal.SIGKILL, 1, 75) and "internal error" not in commands.output(), commands.output()
            wait_until(lambda: not any(map(read, seen)), TIMEOUT)  # noqa: B023 - no process is left
            seen.clear()
            assert newest(run) >= reached
            reached = newest(run)
            end = [f"stop.env_steps={reached + 1024}"] if number == kills - 1 else []
            commands.start("resume", str(run.folder), *end)
    assert commands.exit_code() == 0, commands.output()
    assert run.state == "finished" and sum(done.values()) == kills and set(done) == set(KINDS), done
    starts = [event for event in read_events(run) if event["sentence"] == f"checkpoint at env step {first:,}"]
    assert len(starts) == 1, "it never started from scratch"
    steps = [record["env_steps"] for record in metrics.read(run)]
    assert steps == sorted(set(steps)) and steps[-1] >= reached + 1024
    assert newest(run) >= reached + 1024
