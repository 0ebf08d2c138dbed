"""Outcomes of trainer exits as a table, and the node agent with a real trainer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiltyard as product
from tests.cluster.cluster import wait_for
from tiltyard.config.site import Profile, Slurm
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.run.status import write_status
from tiltyard.slurm import FOLDER
from tiltyard.slurm.job_outcome import Counts, TrainerExit, decide_outcome, lead_needed
from tiltyard.slurm.job_state import JobState, combined_state, poll_job, query_jobs
from tiltyard.slurm.submit import task


def end(code: int, asked: str | None = None, **changes: Any) -> TrainerExit:
    return TrainerExit(
        **{"code": code, "asked": asked, "stop": False, "began": 100, "ended": 200, "tries_left": 2, **changes}
    )


@pytest.mark.parametrize(
    ("how", "counts", "outcome", "after"),
    [
        (end(0), Counts(), "done", Counts()),
        (end(0, "SIGUSR2"), Counts(), "done", Counts()),
        (end(75, "SIGUSR2"), Counts(3, 1), "requeue", Counts(4, 0)),
        (end(-9, "SIGUSR2"), Counts(), "requeue", Counts(1, 0)),
        (end(75, "SIGUSR2", ended=100), Counts(3, 0), "requeue", Counts(4, 1)),
        (end(75, "SIGUSR2", ended=100), Counts(3, 1), "failed", Counts(3, 2)),
        (end(75, "SIGUSR2", began=None, ended=None), Counts(3, 1), "requeue", Counts(4, 0)),
        (end(75, "SIGUSR2"), Counts(10, 0), "stopped", Counts(10, 0)),
        (end(75, "SIGUSR2", stop=True), Counts(), "stopped", Counts()),
        (end(75, "SIGTERM"), Counts(), "stopped", Counts()),
        (end(75, "SIGTERM", near=True), Counts(3, 1), "late", Counts(4, 0)),
        (end(75, "SIGTERM", near=True, stop=True), Counts(), "stopped", Counts()),
        (end(-15, "SIGTERM"), Counts(), "stopped", Counts()),
        (end(75), Counts(), "stopped", Counts()),
        (end(75, failure="retried in place"), Counts(), "again", Counts()),
        (end(75, failure="retried in place", tries_left=0, ended=100), Counts(3, 1), "requeue", Counts(4, 1)),
        (end(75, failure="retried in place", tries_left=0), Counts(10), "stopped", Counts(10)),
        (end(75, "SIGTERM", failure="retried in place"), Counts(), "stopped", Counts()),
        (end(75, failure="retried in place", stop=True), Counts(), "stopped", Counts()),
        (end(75, "SIGUSR2", failure="retried in place"), Counts(), "requeue", Counts(1)),
        (end(-9), Counts(), "again", Counts()),
        (end(-11, tries_left=0), Counts(), "failed", Counts()),
        (end(1), Counts(), "failed", Counts()),
        (end(2, "SIGUSR2"), Counts(), "failed", Counts()),
        (end(-9, lost="gone"), Counts(1, 1, 0), "requeue", Counts(1, 1, 1)),
        (end(1, lost="gone"), Counts(1, 1, 3), "failed", Counts(1, 1, 3)),
        (end(1, "SIGTERM", lost="gone"), Counts(), "stopped", Counts()),
        (end(1, "SIGTERM", lost="gone", near=True), Counts(), "late", Counts(1)),
        (end(-9, "SIGUSR2", lost="gone", stop=True), Counts(), "stopped", Counts()),
    ],
)
def test_outcome_of_each_trainer_exit(how: TrainerExit, counts: Counts, outcome: str, after: Counts) -> None:
    assert (decide_outcome(how, counts, 10, retry=3)[0], decide_outcome(how, counts, 10, retry=3)[2]) == (
        outcome,
        after,
    )


def test_outcomes_have_reasons() -> None:
    assert "was killed by SIGKILL (" in decide_outcome(end(-9), Counts(), 10)[1]
    assert (
        "no progress: 2 jobs in a row ended at env step 100"
        in decide_outcome(end(75, "SIGUSR2", ended=100), Counts(3, 1), 9)[1]
    )
    assert "no requeues are left (slurm.requeues = 1)" in decide_outcome(end(75, "SIGUSR2"), Counts(1), 1)[1]
    assert (
        "saved at env step 200, back in the queue (requeue 1 of at most 9)"
        in decide_outcome(end(75, "SIGUSR2"), Counts(), 9)[1]
    )


@pytest.mark.parametrize(
    ("state", "job", "now"),
    [
        ("queued", "PENDING", "queued"),
        ("stopped", "PENDING", "queued"),
        ("lost", "REQUEUED", "queued"),
        ("finished", "PENDING", "finished"),
        ("queued", "RUNNING", "running"),
        ("lost", "RUNNING", "running"),
        ("stopped", "COMPLETING", "stopped"),
        ("queued", "CANCELLED", "lost"),
        ("created", "UNKNOWN", "lost"),
        ("lost", "NODE_FAIL", "lost"),
        ("stopped", "COMPLETED", "stopped"),
        ("failed", "FAILED", "failed"),
        ("queued", None, "queued"),
    ],
)
def test_state_combines_folder_and_slurm(state: str, job: str | None, now: str) -> None:
    assert combined_state(state, JobState(job) if job else None) == now


# ------------------------------------------------------------------------------------------------ the agent


@pytest.fixture
def stopped(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A small stopped run with a job folder, ready for an agent."""
    monkeypatch.setenv("TILTYARD_HEARTBEAT", "1")
    Path("slow.py").write_text(
        "import os, time\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class SlowStart(CartPoleEnv):\n    def __init__(self, render_mode=None):\n"
        "        super().__init__(render_mode=render_mode)\n        time.sleep(float(os.environ.get('START_SECONDS', '0')))\n"
    )
    settings = {
        "env": "slow.py:SlowStart",
        "engine": {"kind": "serial", "envs": 2},
        "algo": {"rollout": 16, "minibatch": 32, "epochs": 1},
        "stop": {"env_steps": 64},
        "eval": {"at_end": False},
        "save": {"env_steps": 256},
        "track": {"tensorboard": False},
    }
    run = product.train(settings, live=False)
    (run.folder / FOLDER).mkdir()
    return run


def agent(run: Run, *overrides: str, lead: float = 60.0, retry: int = 1, **variables: str) -> subprocess.Popen[str]:
    settings = {**task(Profile(launcher="slurm", name="c"), overrides, False), "lead": lead, "retry": retry}
    (run.folder / FOLDER / "task.json").write_text(json.dumps(settings))
    return subprocess.Popen(
        [sys.executable, "-m", "tiltyard.slurm.node_agent", str(run.folder)],
        env={**os.environ, "SLURM_JOB_ID": "5", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def verdict(run: Run) -> str:
    return (run.folder / FOLDER / "verdict").read_text()


def wait_for_attempt(run: Run, number: int) -> None:
    """Wait until attempt `number` has saved a checkpoint."""
    log = run.folder / "events.jsonl"

    def saved() -> bool:
        after = log.read_text().partition(f"attempt {number} started")[2]
        return '"saved"' in after

    wait_for(saved, f"a checkpoint of attempt {number}")


@pytest.mark.slow
def test_killed_trainer_is_restarted_and_overrides_apply_once(stopped: Run) -> None:
    child = agent(stopped, "stop.env_steps=1e9", "notes=$(touch never) 'a' ; b", SLURM_RESTART_COUNT="3")
    wait_for_attempt(stopped, 2)
    assert stopped.experiment().notes == "$(touch never) 'a' ; b"
    os.kill(stopped.status()["pid"], signal.SIGKILL)
    wait_for_attempt(stopped, 3)
    assert stopped.state == "running"
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=100)
    assert child.returncode == 75, output
    assert verdict(stopped) == "5 3 stopped\n"
    assert stopped.status()["state"] == "stopped"
    sentences = [event["sentence"] for event in read_events(stopped)]
    killed = "the trainer was killed by SIGKILL ("
    assert sum(sentence.startswith(killed) for sentence in sentences) == 1
    assert sum("settings changed" in sentence for sentence in sentences) == 1
    assert not Path("never").exists()


@pytest.mark.slow
def test_agent_saves_before_the_limit_without_a_signal(stopped: Run) -> None:
    started = time.time()
    child = agent(stopped, "stop.env_steps=1e9", SLURM_JOB_END_TIME=str(int(started) + 50), lead=60.0)
    output, _ = child.communicate(timeout=100)
    assert 15 <= time.time() - started < 50, output
    assert child.returncode == 0 and verdict(stopped) == "5 0 requeue\n", output
    assert stopped.status()["state"] == "queued"
    sentences = [event["sentence"] for event in read_events(stopped)]
    assert "no signal came before the time limit; the agent requests the last save itself" in sentences
    assert any("back in the queue (requeue 1 of at most 100)" in sentence for sentence in sentences)


@pytest.mark.slow
def test_agent_saves_earlier_if_saves_take_long(stopped: Run) -> None:
    """In the job after one whose saves took long."""
    assert 0 < stopped.status()["save_seconds"] < 1000
    write_status(stopped, save_seconds=1000.0)
    limit = {"SLURM_JOB_END_TIME": str(int(time.time()) + 40)}
    child = agent(stopped, "stop.env_steps=1e9", "save.env_steps=1e9", lead=2.0, **limit)
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 0 and verdict(stopped) == "5 0 requeue\n", output
    assert re.search(r"saving took up to \d+ s; the agent requests the last save itself", output)


def test_lead_grows_with_the_time_of_saves_up_to_half_of_the_job() -> None:
    assert [lead_needed(120.0, seconds, 36_000.0) for seconds in (0.0, 30.0, 300.0, 20_000.0)] == [
        120,
        120,
        660,
        18_000,
    ]
    assert lead_needed(15.0, 1000.0, 20.0) == 15.0
    tasks = [task(Profile(launcher="slurm", slurm=Slurm(lead=lead))) for lead in (None, 90.0)]
    assert [(each["lead"], each["lead_set"]) for each in tasks] == [(120.0, False), (90.0, True)]


def test_run_without_progress_in_two_jobs_fails(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous job made no progress, and this one gets SIGUSR2 before its first update."""
    monkeypatch.setenv("START_SECONDS", "1.5")
    (stopped.folder / FOLDER / "counts.json").write_text('{"requeues": 1, "still": 1}')
    child = agent(stopped, "stop.env_steps=1e9")
    wait_for(lambda: "job 5 started" in stopped.events_file.read_text(), "the agent's start")
    child.send_signal(signal.SIGUSR2)
    output, _ = child.communicate(timeout=100)
    assert child.returncode == 75 and verdict(stopped) == "5 0 failed\n", output
    assert stopped.status()["state"] == "failed"
    assert stopped.status()["reason"].startswith("no progress: 2 jobs in a row ended at env step 64")


def test_run_with_a_stop_request_does_not_begin(stopped: Run) -> None:
    (stopped.folder / FOLDER / "stop").touch()
    child = agent(stopped, "stop.env_steps=1e9")
    assert child.communicate(timeout=100) and child.returncode == 75
    assert (verdict(stopped), stopped.status()["attempt"]) == ("5 0 stopped\n", 1)


def test_trainer_that_cannot_start_fails_and_is_not_requeued(stopped: Run) -> None:
    child = agent(stopped, "algo.lr=nonsense")
    output, _ = child.communicate(timeout=100)
    assert child.returncode == 2 and verdict(stopped) == "5 0 failed\n", output
    assert stopped.status()["reason"] == "the trainer exited with code 2; see logs/job-5.out"


def test_state_is_from_the_run_folder_if_slurm_does_not_answer(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiltyard.run.status import write_status

    monkeypatch.setenv("PATH", "/nowhere")
    assert query_jobs(["5"]) is None
    write_status(stopped, state="queued", job={"launcher": "slurm", "id": "5"})
    assert poll_job(stopped) == (
        "queued",
        "job 5, state unknown: Slurm does not answer on this machine",
    )
