"""Sweeps on the local machine: each trial runs exactly once despite kills; retries, extensions, stops.

Most trials here are small programs: they follow the same code path as trainings in a fraction of the time.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.counts import LONG, count
from tests.sweep.pbt_sweep import ENV
from tests.sweep.talker import PROGRAM, output, write_plan
from tiltyard.config.yaml import dump_yaml
from tiltyard.processes import proc
from tiltyard.run import atomic, metrics
from tiltyard.run.checkpoint import list_checkpoints
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.status import list_runs, write_status
from tiltyard.sweep import optuna_search, preflight
from tiltyard.sweep.backends.local import AT_WORK
from tiltyard.sweep.controller import Controller
from tiltyard.sweep.folder import Sweep, find_sweep
from tiltyard.sweep.report import summarize

STARTED: "list[subprocess.Popen[str]]" = []


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """Kill the processes that a failing test leaves behind."""
    yield
    while STARTED:
        child = STARTED.pop()
        child.kill()
        child.wait()
    for folder in tmp_path.glob("runs/*/sweep-*"):
        kill_trials(Sweep(folder))


def controller(*words: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-m", "tiltyard", "sweep", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(child)
    return child


def wait_until(condition: Any, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)


def kill_trials(sweep: Sweep) -> None:
    """Send SIGKILL to all processes of all trials; each trial has its own session."""
    for mark in (sweep.folder / AT_WORK).glob("*"):
        try:
            pid = json.loads(mark.read_text())["pid"]
            if os.fsencode(sweep.folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.killpg(pid, signal.SIGKILL)
        except (OSError, ValueError, KeyError):
            pass


def test_grid_of_programs_runs_each_trial_once_on_its_own_cores(tiltyard: Command) -> None:
    odd = 'it\'s "$(touch x)"; a\nb'
    write_plan(space={"x": [1, 2], "text": [odd, "--"]}, seeds=2, max_parallel=2, environment={"ODD": odd})
    out = tiltyard("sweep", "start", "plan.yaml")
    assert "8: 8 finished" in out.stdout
    done = output("done")
    assert len(done) == 8
    assert len({line["trial"] for line in done}) == 8
    assert Counter((line["given"]["x"], line["given"]["text"], line["given"]["seed"]) for line in done) == Counter(
        (x, text, seed) for x in "12" for text in (odd, "--") for seed in "01"
    )
    assert all(line["odd"] == odd for line in done)
    usable = sorted(os.sched_getaffinity(0))
    shares = {tuple(line["cores"]) for line in done}
    assert {core for share in shares for core in share} <= set(usable)
    assert all(len(share) == max(1, len(usable) // 2) for share in shares)
    assert {line["threads"] for line in done} == {str(len(share)) for share in shares}
    assert not Path("x").exists()
    # Starting the same plan again runs nothing; only --new creates a second sweep.
    assert "continuing sweep" in tiltyard("sweep", "start", "plan.yaml").stderr
    assert len(output("done")) == 8
    tiltyard("sweep", "start", "plan.yaml", "--new")
    assert len(output("done")) == 16


def test_failed_trials_are_retried_with_back_off_and_by_command(tiltyard: Command) -> None:
    write_plan(space={"x": [1, 2, 3]}, bad="2", retries=2, back_off=0.3, max_parallel=3)
    out = tiltyard("sweep", "start", "plan.yaml", expect=1)
    assert "3: 2 finished, 1 failed" in out.stdout
    assert "trial 2 failed: exit code 1: x is bad today" in out.stdout
    began = [line["time"] for line in output("began") if line["given"]["x"] == "2"]
    assert len(began) == 3
    assert began[1] - began[0] >= 0.3
    assert began[2] - began[1] >= 0.6
    assert tiltyard("sweep", "status", expect=1).stdout == out.stdout
    tiltyard("sweep", "start", "toy", expect=1)
    assert len(output("began")) == 5, "a trial that failed for good is started by `retry` only"

    Path("bad").write_text("")
    assert "trial 2" in tiltyard("sweep", "retry", "--failed", "--dry-run").stderr
    assert "3: 3 finished" in tiltyard("sweep", "retry", "--failed").stdout
    assert [line["given"]["x"] for line in output("began")[5:]] == ["2"]
    assert "no trial" in tiltyard("sweep", "retry", "--failed").stderr


def test_extensions_add_trials(tiltyard: Command) -> None:
    write_plan(space={"x": {"range": [0.0, 1.0]}}, search="random", trials=2, seeds=2, max_parallel=2)
    tiltyard("sweep", "start", "plan.yaml")
    tiltyard("sweep", "extend", "--trials", "1")
    tiltyard("sweep", "extend", "--seeds", "1", "--dry-run")
    tiltyard("sweep", "extend", "--seeds", "1")
    found = Counter((line["given"]["x"], line["given"]["seed"]) for line in output("done"))
    assert set(found.values()) == {1}
    assert len(found) == 3 * 3
    assert {seed for _, seed in found} == {"0", "1", "2"}
    assert "--seeds" in tiltyard("sweep", "extend", expect=2).stderr
    write_plan(name="grid", space={"x": [1]})
    tiltyard("sweep", "start", "plan.yaml")
    assert "is a grid" in tiltyard("sweep", "extend", "grid", "--trials", "1", expect=2).stderr


def test_command_runs_a_decision_that_the_exiting_controller_did_not_read(tiltyard: Command, runs: Path) -> None:
    write_plan(space={"x": [1, 2]}, seeds=1)
    tiltyard("sweep", "start", "plan.yaml")
    held = Lock.acquire(Run(find_sweep("toy").folder))  # stands for a controller that is about to exit
    threading.Timer(0.7, held.release).start()
    tiltyard("sweep", "extend", "--seeds", "1")
    assert summarize(find_sweep("toy")).counts == {"finished": 4}


def test_options_of_other_subcommands_are_refused(tiltyard: Command, runs: Path) -> None:
    write_plan(space={"x": [1]})
    tiltyard("sweep", "start", "plan.yaml")
    for words, printed in (
        (("status", "--every", "5"), "unknown option --every of tiltyard sweep status"),
        (("extend", "--seed", "5"), "did you mean '--seeds'?"),
        (("status", "--json", "--csv"), "not allowed with"),
    ):
        assert printed in tiltyard("sweep", *words, expect=2).stderr


def test_help_lists_the_actions_and_the_options_of_each(tiltyard: Command) -> None:
    printed = tiltyard("sweep", "--help").stdout
    assert all(f"\n  {action} " in printed for action in ("start", "status", "extend", "stop"))
    printed = tiltyard("sweep", "start", "--help").stdout
    assert "--leave-stopped" in printed and "--failed" not in printed and "--csv" not in printed


def test_pause_between_and_random_order_are_applied(tiltyard: Command) -> None:
    write_plan(space={"x": list(range(8))}, order="random", pause_between=0.4, max_parallel=8)
    tiltyard("sweep", "start", "plan.yaml")
    started = [
        float(event["time"][17:23]) + 60 * float(event["time"][14:16])
        for event in atomic.read_lines(find_sweep("last").folder / "events.jsonl")[0]
        if event["kind"] == "started"
    ]
    assert all((after - before) % 3600 >= 0.39 for before, after in itertools.pairwise(started))
    order = [trial.settings["x"] for trial in find_sweep("last").trials()]
    assert sorted(order) == list(range(8)) != order


def test_dry_run_and_refused_plan_write_nothing(tiltyard: Command, runs: Path) -> None:
    write_plan(space={"x": [1, 2]})
    out = tiltyard("sweep", "start", "plan.yaml", "--dry-run")
    assert [line.split() for line in out.stdout.splitlines()[1:]] == [["1", "0", "1"], ["2", "0", "2"]]
    write_plan(space={"x": list(range(200)), "y": list(range(200))})
    assert "40,000 trials" in tiltyard("sweep", "start", "plan.yaml", expect=2).stderr
    write_plan(program=["no-such-program-anywhere"])
    assert "command not found" in tiltyard("sweep", "start", "plan.yaml", expect=2).stderr
    assert not runs.exists()
    assert "no sweep" in tiltyard("sweep", "status", expect=2).stderr
    assert "did you mean 'status'" in tiltyard("sweep", "statsu", expect=2).stderr
    assert "unknown option --csv of tiltyard sweep best" in tiltyard("sweep", "best", "--csv", expect=2).stderr


@pytest.mark.parametrize("way", ["sweep stop", "SIGTERM"])
def test_stopped_sweep_continues_when_started_again(way: str, tiltyard: Command) -> None:
    write_plan(space={"x": [1, 2, 3, 4], "sleep": [20.0]}, max_parallel=2)
    child = controller("start", "plan.yaml")
    wait_until(lambda: len(output("began")) == 2)
    assert "is already running" in tiltyard("sweep", "start", "last", expect=2).stderr
    if way == "SIGTERM":
        child.terminate()
    else:
        tiltyard("sweep", "stop")
    assert child.wait(60) == 75
    assert summarize(find_sweep("last")).counts == {"stopped": 2, "waiting": 2}
    assert output("done") == []
    Path("program.py").write_text(PROGRAM.replace("time.sleep", "float"))
    assert "4: 4 finished" in tiltyard("sweep", "start", "last").stdout
    assert len(output("done")) == 4


def test_detached_sweep_runs_in_the_background(tiltyard: Command) -> None:
    write_plan(space={"x": [1, 2]}, seeds=2, max_parallel=4)
    name = tiltyard("sweep", "start", "plan.yaml", "--detach").stdout.strip()
    os.chdir("/")  # programs run where the sweep was started, not here
    wait_until(lambda: summarize(find_sweep(name)).state == "finished")
    assert "4: 4 finished" in tiltyard("sweep", "watch", name).stdout


def test_running_controller_applies_new_decisions(tiltyard: Command) -> None:
    write_plan(space={"x": [1, 2]}, bad="2", max_parallel=3)
    wait = 'while given["x"] == "1" and not pathlib.Path("go").exists():\n    time.sleep(0.1)\n'
    Path("program.py").write_text(PROGRAM.replace("time.sleep(float", wait + "time.sleep(float"))
    child = controller("start", "plan.yaml")
    wait_until(lambda: summarize(find_sweep("last")).failed if list(Path("runs").glob("*/sweep-*")) else False)
    assert summarize(find_sweep("last")).state == "running", "a trial that failed is not the end"
    Path("bad").write_text("")
    assert "its controller takes this up" in tiltyard("sweep", "retry", "--failed").stderr
    assert "its controller takes this up" in tiltyard("sweep", "extend", "--seeds", "1").stderr
    wait_until(lambda: len(output("done")) == 2)
    Path("go").touch()
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert summarize(find_sweep("last")).counts == {"finished": 4}
    assert len(output("done")) == 4


def test_program_ends_when_its_trial_process_is_killed(runs: Path) -> None:
    """Otherwise the trial could be started again while its program still runs."""
    write_plan(space={"sleep": [100]})
    child = controller("start", "plan.yaml")
    wait_until(lambda: [path for path in runs.glob("toy/sweep-0001/0*/mine") if path.read_text()])
    (mine,) = runs.glob("toy/sweep-0001/0*/mine")
    program = int(mine.read_text().split()[0])
    child.kill()
    child.wait()
    os.kill(json.loads((runs / "toy" / "sweep-0001" / AT_WORK / "0001").read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: proc.read(program) is None)


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_child_of_a_shell_script_ends_with_the_trial(way: str, runs: Path) -> None:
    """A shell exits on the signal without stopping its child, which would then run in parallel with the next attempt."""
    Path("run.sh").write_text("python program.py $1\necho never\n")
    write_plan(program=["bash", "run.sh"], space={"sleep": [100]})
    child = controller("start", "plan.yaml")
    wait_until(lambda: [path for path in runs.glob("toy/sweep-0001/0*/mine") if path.read_text()])
    (mine,) = runs.glob("toy/sweep-0001/0*/mine")
    inner = int(mine.read_text().split()[0])
    if way == "stopped":
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=100)
        assert child.returncode == 75
        assert proc.read(inner) is None
        return
    child.kill()
    child.wait()
    os.kill(json.loads((runs / "toy" / "sweep-0001" / AT_WORK / "0001").read_text())["pid"], signal.SIGKILL)
    child = controller("start", "plan.yaml")
    wait_until(lambda: len(output("began")) == 2)
    assert output("overlap") == []
    assert proc.read(inner) is None
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=100)


class Desk:
    """A backend with two slots, whose trials end when the test says so."""

    queues = False

    def __init__(self) -> None:
        self.started: list[int] = []
        self.work: set[int] = set()
        self.ended: dict[int, str] = {}
        self.jobs: dict[int, str] = {}
        self.gone: dict[int, str] = {}

    def adopt(self, numbers: Any) -> set[int]:
        return set(self.work)

    def has_capacity(self, number: int | None) -> bool:
        return len(self.work) < 2

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        if number in self.work:
            return False
        self.started.append(number)
        self.work.add(number)
        return True

    def poll(self) -> dict[int, str]:
        ended, self.ended = self.ended, {}
        return ended

    def cancel(self, numbers: Any) -> None:
        raise AssertionError("nobody asked for that")

    def end(self, sweep: Sweep, number: int, state: str) -> None:
        write_status(
            Run(sweep.place(number)), state=state, reason="reported by the program", attempt=self.started.count(number)
        )
        self.work.discard(number)
        self.ended[number] = "exit code 1"


def desk(**more: Any) -> tuple[Sweep, Desk, Controller]:
    write_plan(space={"x": [1, 2, 3]}, max_parallel=2, **more)
    sweep, place = preflight.begin(preflight.prepare("plan.yaml")), Desk()
    return sweep, place, Controller(sweep, sweep.plan(), place, print)


def test_retry_of_a_running_trial_does_not_start_it_twice(runs: Path) -> None:
    sweep, place, one = desk()
    for _ in range(3):
        one.step(stop=False)
    assert place.started == [1, 2]
    place.end(sweep, 1, "failed")
    place.work.add(1)  # the backend has not reported the end yet
    sweep.decide("retry", trial=1)
    one.step(stop=False)
    place.work.discard(1)
    for _ in range(2):
        one.step(stop=False)
    assert place.started == [1, 2, 1]
    sweep.decide("retry", trial=1)  # from a user who still saw `failed`
    place.end(sweep, 2, "finished")
    for _ in range(2):
        one.step(stop=False)
    assert place.started == [1, 2, 1, 3]
    for number in (1, 3):
        place.end(sweep, number, "finished")
    for _ in range(2):
        one.step(stop=False)
    assert place.started == [1, 2, 1, 3]
    assert one.over and one.exit_code() == 0


def test_retry_decided_before_the_failure_is_recorded_still_counts(runs: Path) -> None:
    sweep, place, one = desk(retries=0)
    one.step(stop=False)
    place.end(sweep, 1, "failed")  # and the controller is killed before it polls
    sweep.decide("retry", trial=1)
    other = Desk()
    two = Controller(sweep, sweep.plan(), other, print)
    two.step(stop=False)
    assert other.started == [1]


def test_trial_waiting_for_a_retry_does_not_count_as_failed(tiltyard: Command, runs: Path) -> None:
    sweep, place, one = desk(retries=1, back_off=60)
    one.step(stop=False)
    place.end(sweep, 1, "failed")
    one.step(stop=False)
    printed = [event["sentence"] for event in read_events(Run(sweep.folder)) if event["kind"] == "failed"]
    assert printed == ["Trial 1 failed: reported by the program; it restarts in 60 s"]
    now = summarize(sweep)
    assert now.counts["to retry"] == 1 and now.state == "stopped" and not now.failed
    asked = tiltyard("sweep", "retry", "--failed", "--dry-run").stderr
    assert "to be retried: trial 1" in asked
    sweep.decide("failed", trial=1, attempt=2, reason="again")
    assert summarize(sweep).counts["failed"] == 1


def test_trial_whose_disk_failed_for_too_long_starts_again_and_uses_no_retry(runs: Path) -> None:
    sweep, place, one = desk(retries=0, back_off=0)
    one.step(stop=False)
    for attempt in range(1, 4):
        write_status(Run(sweep.place(1)), attempt=attempt, failure="retried in place")
        place.end(sweep, 1, "stopped")
        one.step(stop=False)
        assert place.started.count(1) == attempt + 1
    write_status(Run(sweep.place(1)), attempt=4, failure=None)
    place.end(sweep, 1, "stopped")  # on request
    for _ in range(3):
        one.step(stop=False)
    assert place.started.count(1) == 4
    assert [each.get("class") for each in sweep.decisions("failed")] == ["retried in place"] * 3


def test_retry_command_does_not_wait_for_the_back_off(runs: Path) -> None:
    sweep, place, one = desk(retries=1, back_off=3600)
    one.step(stop=False)
    place.end(sweep, 1, "failed")
    for _ in range(3):
        one.step(stop=False)
    assert place.started == [1, 2, 3]
    place.end(sweep, 2, "finished")
    sweep.decide("retry", trial=1)
    one.step(stop=False)
    assert place.started == [1, 2, 3, 1]


def test_invalid_point_does_not_end_a_tick(runs: Path) -> None:
    """If trials are jobs, no later tick would ask for the next point."""
    envs = ("one.py", "two.py")
    for name in envs:
        Path(name).write_text(ENV)
    space = {"env.id": [f"{name}:Steady" for name in envs], "algo.lr": {"log": [1e-4, 1e-2]}}
    made = {"name": "toy", "experiment": {**TINY, "env": "one.py:Steady"}, "space": space, "search": "tpe"}
    Path("plan.yaml").write_text(dump_yaml({**made, "trials": 20}))
    sweep, place = preflight.begin(preflight.prepare("plan.yaml")), Desk()
    place.queues = True
    gone = optuna_search.ask(sweep.plan(), [], 1)["env.id"].removesuffix(":Steady")
    for folder in (Path(), sweep.folder / "plugins"):
        (folder / gone).unlink()
    Controller(sweep, sweep.plan(), place, print).tick(stop=False)
    trials = sweep.trials()
    assert trials[0].refused and gone in trials[0].refused
    assert place.started == [trial.number for trial in trials if not trial.refused]
    assert len(place.started) == 2, "as many as there is room for"


def test_search_warns_if_no_trial_recorded_the_metric(tiltyard: Command) -> None:
    write_plan(space={"x": {"range": [1, 3]}}, search="tpe", trials=5, metric="scores")
    done = tiltyard("sweep", "start", "plan.yaml")
    assert (
        done.stderr.count("None of the 3 finished trials recorded scores: the search has nothing to learn from.") == 1
    )
    assert "warning  none of the 5 trials that are over recorded scores" in done.stdout


def test_watch_waits_for_trials_without_a_controller(tiltyard: Command) -> None:
    write_plan(space={"x": [1, 2]}, max_parallel=2)
    Path("wait").write_text("")
    child = controller("start", "plan.yaml")
    wait_until(lambda: len(output("began")) == 2)
    child.kill()
    child.wait()
    assert "state    stopped, but 2 trials are still running without a controller" in tiltyard("sweep", "status").stdout
    watching = controller("watch", "--every", "0.1")
    time.sleep(1.0)
    assert watching.poll() is None
    Path("wait").unlink()
    assert watching.wait(60) == 0
    assert len(output("done")) == 2


def test_environment_of_the_profile_is_kept_for_retries(tiltyard: Command) -> None:
    Path("tiltyard.yaml").write_text(dump_yaml({"profiles": {"lab": {"environment": {"ODD": "of the lab"}}}}))
    write_plan(space={"x": [1, 2]}, bad="2")
    tiltyard("sweep", "start", "plan.yaml", "--on", "lab", expect=1)
    Path("bad").write_text("")
    os.environ.pop("ODD", None)  # as in another shell
    tiltyard("sweep", "retry", "--failed")
    assert [line["odd"] for line in output("began")] == ["of the lab"] * 3
    os.environ.pop("ODD", None)


@pytest.mark.slow
@pytest.mark.timeout(3000 if LONG else 300)
@pytest.mark.parametrize("kind", ["grid", "tpe"])
def test_kill_9_of_controllers_and_trials_loses_and_repeats_nothing(kind: str, runs: Path) -> None:
    """No trial has two processes at once, and none runs again after its end is known. If only controllers are killed
    (grid), each program runs exactly once; a program that is killed itself (tpe) starts again."""
    rng, size = random.Random(5), 40 if LONG else 6
    values: Any = list(range(size)) if kind == "grid" else {"range": [0.0, 1.0]}
    learning: dict[str, Any] = {} if kind == "grid" else {"search": "tpe", "trials": size}
    space = {"x": values, "sleep": [0.3]}
    write_plan(space=space, seeds=2, max_parallel=3, retries=100, back_off=0.0, **learning)
    child = controller("start", "plan.yaml")
    wait_until(lambda: list(runs.glob("toy/sweep-0001/manifest.jsonl")))
    sweep = find_sweep("toy", runs)
    for number in range(count(60)):
        time.sleep(rng.uniform(0.0, 1.5))
        first = rng.random() < 0.5
        if kind == "tpe" and first:
            kill_trials(sweep)
        child.kill()
        child.wait()
        if kind == "tpe" and not first:
            kill_trials(sweep)
        child = controller("start", "plan.yaml" if number % 2 else str(sweep.folder))
    _, errors = child.communicate(timeout=1000 if LONG else 200)
    assert child.returncode == 0, errors
    assert list(runs.glob("toy/sweep-*")) == [sweep.folder]
    assert output("overlap") == []
    done = Counter(line["trial"] for line in output("done"))
    assert set(done) == {sweep.place(trial.number).name for trial in sweep.trials()}
    assert kind == "tpe" or set(done.values()) == {1}
    for row in summarize(sweep).rows:
        assert row.folder is not None
        kinds = [
            event["kind"] for event in atomic.read_lines(row.folder / "events.jsonl")[0] if event["kind"] != "recovered"
        ]
        assert "finished" not in kinds[:-1], "it was started again after its end"
        assert row.value == row.trial.settings["x"]
    assert len(list_runs(runs)) == 2 * size
    assert len({json.dumps(trial.settings) for trial in sweep.trials()}) == size
    assert not list(sweep.folder.glob(".new-*"))


TINY = {
    "env": "CartPole-v1",
    "name": "tiny",
    "engine": {"kind": "serial", "envs": 4},
    "algo": {"rollout": 16, "minibatch": 64, "epochs": 1},
    "stop": {"env_steps": 4096},
    "eval": {"every": 1024, "episodes": 2},
    "save": {"env_steps": 256},
    "track": {"tensorboard": False},
}


@pytest.mark.slow
@pytest.mark.timeout(3000 if LONG else 300)
def test_grid_of_trainings_killed_half_way_finishes_every_trial_once(runs: Path) -> None:
    """Kill the controller and the trials. TILTYARD_LONG=1 runs the 3 x 2 grid with 5 seeds."""
    space = {"algo.lr": [1e-3, 3e-4, 1e-4] if LONG else [1e-3, 1e-4], "algo.gamma": [0.98, 0.99] if LONG else [0.99]}
    plan = {"experiment": TINY, "space": space, "seeds": 5 if LONG else 2, "max_parallel": 2, "back_off": 0.0}
    Path("plan.yaml").write_text(dump_yaml(plan))
    child = controller("start", "plan.yaml")
    total = 30 if LONG else 4
    if LONG:
        wait_until(lambda: sum(row["state"] == "finished" for row in list_runs(runs)) >= 15, 1000)
    wait_until(lambda: any(_is_early(row) for row in list_runs(runs)))
    sweep = find_sweep("tiny", runs)
    child.kill()
    child.wait()
    kill_trials(sweep)
    wait_until(lambda: "running" not in summarize(sweep).counts)
    killed = {row.trial.number for row in summarize(sweep).rows if row.state == "lost"}
    assert killed
    child = controller("start", "plan.yaml")
    _, errors = child.communicate(timeout=2000 if LONG else 250)
    assert child.returncode == 0, errors
    rows = list_runs(runs)
    assert [row["state"] for row in rows] == ["finished"] * total
    assert {row["env_steps"] for row in rows} == {4096}
    report = summarize(sweep)
    assert len({(row.trial.seed, json.dumps(row.trial.settings)) for row in report.rows}) == total
    assert all(row.value is not None for row in report.rows)
    assert {row.trial.number for row in report.rows if row.attempt != 1} == killed, "nobody else began again"
    assert {row.attempt for row in report.rows if row.trial.number in killed} == {2}
    records = {row.trial.number: metrics.read(sweep.place(row.trial.number)) for row in report.rows}
    for each in records.values():
        assert [record["env_steps"] for record in each] == list(range(64, 4097, 64)), "every update once"
    assert any({record["attempt"] for record in records[number]} == {1, 2} for number in killed), "it went on"


def _is_early(row: dict[str, Any]) -> bool:
    """Whether a run is running and has a checkpoint, but is far from its end."""
    saved = list_checkpoints(Run(Path(row["folder"])))
    return row["state"] == "running" and bool(saved) and saved[-1].env_steps <= 1024


# Records what a training would: ten steps, and `x` per step.
LEARNER = """
import json, os, sys, time, signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
x = int(sys.argv[1].split("=")[1])
with open(os.environ["TILTYARD_TRIAL"] + "/metrics.jsonl", "a", buffering=1) as file:
    for step in range(1, 11):
        file.write(json.dumps({"env_steps": 10 * step, "metrics": {"eval/return": x * step}}) + "\\n")
        time.sleep(1.0)
"""


@pytest.mark.slow
def test_early_stopping_is_final(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(space={"x": [5, 1, 2]}, max_parallel=3, stop={"rule": "asha", "after": 30})
    Path("program.py").write_text(LEARNER)
    from tiltyard.sweep import controller as controlling
    from tiltyard.sweep import preflight
    from tiltyard.sweep.backends.local import Local

    monkeypatch.setattr(controlling, "EARLY_STOP_SECONDS", 0.2)
    sweep = preflight.begin(preflight.prepare("plan.yaml"))
    assert controlling.run_controller(sweep, Local, print) == 0
    states = {row.trial.settings["x"]: row.state for row in summarize(sweep).rows}
    assert states == {5: "finished", 1: "ended", 2: "ended"}
    reasons = [row.reason for row in summarize(sweep).rows if row.state == "ended"]
    assert all("at 30 env steps" in reason for reason in reasons)
    before = [row.updated for row in summarize(sweep).rows]
    assert controlling.run_controller(sweep, Local, print) == 0
    assert [row.updated for row in summarize(sweep).rows] == before, "nobody is started again"
    assert summarize(sweep).groups[0].value == 50
