"""A run as a job of a real Slurm: submitted, followed, listed, stopped, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.slurm.cluster import Cluster, needs_slurm, wait_for
from tiltyard.run.events import read_events
from tiltyard.run.folder import find

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm")]
SMALL = ["engine.envs=4", "algo.rollout=16", "algo.minibatch=64", "algo.epochs=1", "eval.at_end=false"]
SHORT = [*SMALL, "stop.env_steps=2048"]
LONG = [*SMALL, "stop.env_steps=1e9", "save.env_steps=1024"]


def test_a_run_is_submitted_followed_and_finished(tiltyard: Command, cluster: Cluster, runs: Path) -> None:
    said = tiltyard("train", "CartPole-v1", *SHORT, "--on", "cluster", "--json")
    outcome = json.loads(said.stdout)
    run = find(outcome["folder"])
    assert (outcome["state"], outcome["progress"]["env_steps"]) == ("finished", 2048)
    status = run.status()
    assert status["job"]["id"] == outcome["job"] and status["job"]["profile"] == "cluster"
    assert f"job {outcome['job']} runs on node1" in said.stderr
    assert "finished: stop.env_steps=2,048 reached" in said.stderr  # the run's own log
    wait_for(lambda: cluster.state(outcome["job"]) == "COMPLETED", "the end of the job")
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("started") == 2 and kinds.index("submitted") < kinds.index("started")
