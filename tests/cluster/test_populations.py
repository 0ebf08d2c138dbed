"""A population on a real Slurm cluster: jobs of paused members run the ticks, without a process outside of jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.cluster import Cluster, needs_slurm, wait_for
from tests.cluster.test_sweeps import outside_of_jobs, over
from tests.conftest import Command, in_own_process
from tests.sweep.pbt_sweep import EXPERIMENT, plan, weights
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.sweep.folder import find_sweep
from tiltyard.sweep.report import summarize

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm")]


def test_population_finishes_without_a_controller_process(cluster: Cluster, tiltyard: Command, runs: Path) -> None:
    plan([3.0, 2.0, 1.0], max_parallel=2, experiment={**EXPERIMENT, "stop": {"env_steps": 96}})
    in_own_process("sweep", "start", "plan.yaml", "--on", "cluster")
    sweep, found = find_sweep("steady"), list[str]()
    wait_for(lambda: found.extend(outside_of_jobs(sweep)) or over(sweep), "the end of the population")
    assert found == []
    assert summarize(sweep).counts == {"finished": 3}
    made = [line for line in sweep.decisions() if line["kind"] == "exploit"]
    assert [(line["trial"], line["source"]) for line in made] == [(3, 1)]
    member, source = (
        weights(sweep.place(3), made[0]["counts_from"]),
        weights(sweep.place(1), made[0]["source_env_steps"]),
    )
    assert all(np.array_equal(member[name], source[name]) for name in source)
    assert Run(sweep.place(3)).experiment().algo.lr == made[0]["after"]["algo.lr"]
    assert {Run(sweep.place(number)).status()["attempt"] for number in (1, 2, 3)} == {2}, "a pause each"
    assert any(event["kind"] == "exploited" for event in read_events(Run(sweep.place(3))))
    assert "became a copy of member 1" in tiltyard("sweep", "lineage").stdout
