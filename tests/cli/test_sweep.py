"""`tiltyard sweep`: decisions of the user about a sweep, and their effects."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.sweep.talker import PROGRAM, output, write_plan
from tests.sweep.test_preflight import EXPERIMENT
from tiltyard.config.sweep_plan import load_plan
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.run.status import write_status
from tiltyard.sweep.folder import Sweep, Trial, find_sweep, make
from tiltyard.sweep.report import summarize


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_stopped_trial_is_restarted_only_by_start(tiltyard: Command, detach: list[str]) -> None:
    write_plan(space={"x": [1, 2, 3]}, bad="1")
    Path("program.py").write_text(PROGRAM.replace("while pathlib", 'while given["x"] == "2" and pathlib'))
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--detach")
    sweep = find_sweep("toy")
    wait_until(lambda: len(output("began")) == 2)
    tiltyard("sweep", "stop")
    assert summarize(sweep).counts == {"failed": 1, "stopped": 1, "waiting": 1}
    Path("bad").write_text("")
    tiltyard("sweep", "retry", "--failed", *detach, expect=0 if detach else 75)
    wait_until(lambda: not sweep.controlled and len(output("done")) == 2)
    Path("wait").unlink()
    tiltyard("sweep", "extend", "--seeds", "1", *detach, expect=0 if detach else 75)
    wait_until(lambda: not sweep.controlled and len(output("done")) == 5)
    assert summarize(sweep).counts == {"finished": 5, "stopped": 1}
    tiltyard("sweep", "start", "toy")
    assert summarize(sweep).counts == {"finished": 6}


def test_trials_that_cannot_be_stopped_from_this_host_are_reported(tiltyard: Command) -> None:
    """The sweep has no controller, and one of its trials still runs on another host."""
    write_plan(space={"x": [1]})
    tiltyard("sweep", "start", "plan.yaml")
    trial = Run(find_sweep("toy").place(1))
    write_status(trial, state="running", reason="")
    atomic.write_json(trial.folder / "lock.json", {"host": "elsewhere", "pid": 1, "period": 10.0})
    printed = tiltyard("sweep", "stop", "--wait", "1", expect=1).stderr
    assert "trial 1 can only be stopped on host elsewhere" in printed and "they will save" not in printed


def test_extension_is_checked_before_anything_is_written(tiltyard: Command) -> None:
    """The checks of `start` apply: invalid samples and too many trials are refused."""

    def made(name: str, space: dict[str, Any], first: dict[str, Any]) -> Sweep:
        plan = load_plan({"experiment": EXPERIMENT, "space": space, "search": "random", "trials": 1})
        return make(Path("runs"), name, plan, [Trial(1, 1, 0, first)])

    made("fine", {"algo.lr": {"log": [1e-4, 1e-3]}}, {"algo.lr": 1e-3})
    assert "by 2 combinations" in tiltyard("sweep", "extend", "fine", "--trials", "2", "--dry-run").stderr
    sweep = made("tiny", {"algo.epochs": {"int": [0, 1]}}, {"algo.epochs": 1})
    printed = tiltyard("sweep", "extend", "tiny", "--trials", "9", expect=2).stderr
    assert "algo.epochs = 0: must be at least 1 (in algo.epochs=0" in printed
    assert "would have 10,001 trials" in tiltyard("sweep", "extend", "tiny", "--seeds", "10000", expect=2).stderr
    tiltyard("sweep", "extend", "tiny", "--seeds", "10000", "--yes", "--dry-run")
    assert sweep.decisions() == []
