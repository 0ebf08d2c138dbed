"""The Ray that the agents of a job have started over its nodes (launch/ray_nodes.py), seen from the trainer."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.errors import TiltyardError

ALLOCATION = "TILTYARD_RAY"  # variable: what a job's first agent tells the trainer


@dataclass(frozen=True)
class Allocation:
    """A Ray over the nodes of a job. `cpus` are those for runners; in `folder` and `logs` agents say how they fare."""

    address: str
    nodes: list[str]
    cpus: int
    wait: float
    folder: str
    logs: str


def allocation() -> Allocation | None:
    """That of the job which this process is part of, if there is one."""
    told = os.environ.get(ALLOCATION)
    return Allocation(**json.loads(told)) if told else None


def wait_for_nodes(job: Allocation) -> None:
    """Until every node of a job has joined and done a first task; an error names those that have not."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here: Any = ray.remote(num_cpus=0)(_process)
    deadline, probes = time.monotonic() + job.wait, dict[str, Any]()
    while True:
        for node in ray.nodes():
            if node["Alive"] and node["NodeName"] in job.nodes and node["NodeName"] not in probes:
                place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                probes[node["NodeName"]] = here.options(scheduling_strategy=place).remote()
        done, _ = ray.wait(list(probes.values()), num_returns=len(probes), timeout=0.2) if probes else ([], [])
        missing = [name for name in job.nodes if name not in probes or probes[name] not in done]
        if not missing:
            ray.get(list(probes.values()))
            return
        failed = [sentence for name in missing if (sentence := _failure(job, name))]
        if failed:
            raise TiltyardError(failed[0], f"the output of its agent is in {job.logs}", "\n".join(failed))
        if time.monotonic() > deadline:
            raise TiltyardError(
                f"{', '.join(missing)} did not join the job's Ray within {job.wait:g} s (slurm.wait)",
                "look at these nodes with: tiltyard doctor --on PROFILE",
                "\n".join(f"{name}: {_last_lines(job, name)}" for name in missing),
            )
        time.sleep(0.2)


def _process() -> int:
    return os.getpid()


def _failure(job: Allocation, node: str) -> str:
    try:
        told = json.loads((Path(job.folder) / f"{node}.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(told["said"][-1]) if told["state"] == "failed" else ""


def _last_lines(job: Allocation, node: str) -> str:
    try:
        return "\n".join((Path(job.logs) / f"{node}.out").read_text(errors="replace").splitlines()[-20:])
    except OSError:
        return "nothing was heard of it"
