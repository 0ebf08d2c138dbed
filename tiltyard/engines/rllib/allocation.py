"""The Ray that a job's agents have started on its nodes (slurm/ray_nodes.py), as the trainer sees it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.errors import TiltyardError
from tiltyard.run.logs import last_lines

ALLOCATION = "TILTYARD_RAY"  # variable: an Allocation as JSON, from the job's first agent


@dataclass(frozen=True)
class Allocation:
    """A job's Ray. `cpus` are for runners; agents write their state to `folder`, their output to `logs`."""

    address: str
    nodes: list[str]
    cpus: int
    wait: float
    folder: str
    logs: str


def allocation() -> Allocation | None:
    """The allocation of the surrounding job, if there is one."""
    text = os.environ.get(ALLOCATION)
    return Allocation(**json.loads(text)) if text else None


def wait_for_nodes(job: Allocation) -> None:
    """Wait until every node has joined and run a first task; an error names those that have not."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe: Any = ray.remote(num_cpus=0)(_process)
    deadline, probes = time.monotonic() + job.wait, dict[str, Any]()
    while True:
        for node in ray.nodes():
            if node["Alive"] and node["NodeName"] in job.nodes and node["NodeName"] not in probes:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                probes[node["NodeName"]] = probe.options(scheduling_strategy=strategy).remote()
        done, _ = ray.wait(list(probes.values()), num_returns=len(probes), timeout=0.2) if probes else ([], [])
        missing = [name for name in job.nodes if name not in probes or probes[name] not in done]
        if not missing:
            ray.get(list(probes.values()))
            return
        failed = [sentence for name in missing if (sentence := _failure(job, name))]
        if failed:
            raise TiltyardError(failed[0], f"the output of its agent is in {job.logs}", "\n".join(failed))
        if time.monotonic() > deadline:
            message = f"{', '.join(missing)} did not join the job's Ray within {job.wait:g} s (slurm.wait)"
            outputs = "\n".join(f"{name}: {_output(job, name)}" for name in missing)
            raise TiltyardError(message, "check these nodes with: tiltyard doctor --on PROFILE", outputs)
        time.sleep(0.2)


def _process() -> int:
    return os.getpid()


def _failure(job: Allocation, node: str) -> str:
    try:
        report = json.loads((Path(job.folder) / f"{node}.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(report["said"][-1]) if report["state"] == "failed" else ""


def _output(job: Allocation, node: str) -> str:
    return "\n".join(last_lines(Path(job.logs) / f"{node}.out", 20)) or "no output"
