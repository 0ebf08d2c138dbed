"""Check a profile's nodes: submit a job of a few minutes that runs all checks on each node, and follow it to its end.

Its files are in a hidden folder in the runs folder, which all nodes share; the folder is removed afterwards.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tiltyard.config.site import Profile
from tiltyard.doctor.bad_nodes import PLACE
from tiltyard.doctor.finding import Finding
from tiltyard.doctor.node_probe import REPORT, nodes_with
from tiltyard.doctor.system import CLOCK_TOLERANCE
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.logs import last_lines
from tiltyard.slurm import SCRIPT, SECRETS
from tiltyard.slurm.commands import cancel, sbatch
from tiltyard.slurm.job_state import JobState, JobWatch, query_jobs
from tiltyard.slurm.script import header_lines, quoted, script_text, setup_lines, step_lines, with_nodes
from tiltyard.slurm.shell import hostnames
from tiltyard.slurm.submit import write_secrets

TIME_LIMIT = "5"  # minutes
LONGEST_WAIT = 60.0  # seconds that nodes wait for each other; well within the time limit
POLL_SECONDS = 0.25
FILE_DELAY = 5.0  # seconds until files written by the job are visible here
OUTPUT = "output"


def check_nodes(profile: Profile, root: Path, nodes: str | None, notify: Callable[[str], object]) -> list[Finding]:
    """The findings of all nodes: as many as the profile requests, or `nodes`. `notify` gets the job's states."""
    names = hostnames(nodes) if nodes else []
    if nodes and not names:
        raise UseError(f"--nodes {nodes!r} names no nodes", "examples: --nodes node3, --nodes 'node[3,7-9]'")
    if names:
        profile = _only(profile, names)
    resources, samplers = profile.resources, profile.slurm.samplers
    count = resources.nodes + (samplers.nodes if samplers else 0)
    with _folder(root) as folder:
        _write(folder, profile, root, count)
        with _job(folder, profile) as job:
            job_nodes, state = _follow(job, folder, count, notify)
        reports = {node: atomic.read_json(folder / f"{node}{REPORT}") for node in nodes_with(folder, REPORT)}
        if not reports:
            sentence = state.describe(job) if state else f"job {job} reported nothing"
            hint = f"check slurm.python and slurm.setup of profile {profile.name}"
            raise TiltyardError(f"no node was checked: {sentence}", hint, _tail(folder))
        found = [Finding(**{**each, "node": node}) for node in sorted(reports) for each in reports[node]["findings"]]
        missing = [node for node in names or job_nodes if node not in reports]
        silent = f"no report; the job's output ends with: {_tail(folder, 1)}"
        return [*found, *compare(reports), *(Finding("checkup", "bad", silent, "", node) for node in missing)]


def _only(profile: Profile, names: list[str]) -> Profile:
    """The profile for exactly these nodes."""
    extra = [*profile.slurm.extra, f"--nodelist={','.join(names)}"]
    slurm = profile.slurm.model_copy(update={"extra": extra, "exclude": None})
    return with_nodes(profile.model_copy(update={"slurm": slurm}), len(names))


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[Path]:
    folder = atomic.absolute(root) / PLACE / f"visit-{atomic.unique()}"
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        hint = "set TILTYARD_RUNS to a folder that you may write to"
        raise UseError(f"cannot create {folder}: {error.strerror}", hint) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # only if it is empty: it may hold the list of bad nodes


def _write(folder: Path, profile: Profile, root: Path, count: int) -> None:
    """Write the job's script, and its secrets in a separate file."""
    write_secrets(folder, profile)
    place, wait = quoted(str(folder)), min(profile.slurm.wait, LONGEST_WAIT)
    lines = [
        *header_lines(profile, f"doctor-{folder.name}", "/dev/null", time=TIME_LIMIT, requeue=False),
        f"exec >{place}/{OUTPUT} 2>&1",
        *setup_lines(profile, f"{place}/{SECRETS}"),
        f"export TILTYARD_RUNS={quoted(str(atomic.absolute(root)))}",
        *step_lines(profile, ["-m", "tiltyard.doctor.node_probe"], f"{place} {count} {wait:g}"),
    ]
    (folder / SCRIPT).write_text(script_text(lines), errors="surrogateescape")


@contextlib.contextmanager
def _job(folder: Path, profile: Profile) -> Iterator[str]:
    """Submit the job; it is cancelled if this block ends before the job does."""
    try:
        job = sbatch(folder / SCRIPT, f"doctor-{folder.name}")
    except TiltyardError as error:
        raise TiltyardError(error.message, f"correct profile {profile.name}", error.details) from error
    try:
        yield job
        deadline = time.monotonic() + FILE_DELAY
        while _may_run(job) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        if _may_run(job):
            with contextlib.suppress(TiltyardError, OSError, subprocess.SubprocessError):
                cancel(job)


def _may_run(job: str) -> bool:
    state = (query_jobs([job]) or {}).get(job)
    return state is None or state.active


def _follow(job: str, folder: Path, count: int, notify: Callable[[str], object]) -> tuple[list[str], JobState | None]:
    """Wait until every node has reported or the job has ended. Returns its nodes and its last state."""
    watch, nodes, deadline = JobWatch(notify), "", math.inf
    while len(nodes_with(folder, REPORT)) < count and time.monotonic() <= deadline:
        if deadline == math.inf:
            watch.poll(job)
            nodes = (watch.state and watch.state.nodes) or nodes
            if watch.state and not watch.state.active:
                deadline = time.monotonic() + FILE_DELAY
        time.sleep(POLL_SECONDS)
    return hostnames(nodes) if nodes else [], watch.state


def _tail(folder: Path, count: int = 20) -> str:
    return "\n".join(last_lines(folder / OUTPUT, count)) or "(nothing)"


Reports = Mapping[str, Mapping[str, Any]]
MUST_MATCH = ("python", "tiltyard", "torch", "numpy", "gymnasium", "ray")  # nodes with other versions cannot cooperate


def compare(reports: Reports) -> list[Finding]:
    """Compare versions, clocks, connections and file locks: one finding of each kind per node."""
    if len(reports) < 2:
        return []
    wrong = [*_versions(reports), *_clocks(reports), *_reach(reports), *_locks(reports)]
    return [
        finding
        for node in sorted(reports)
        for what, fine in (
            ("versions", "same as on the other nodes"),
            ("clocks", "same as on the other nodes"),
            ("reach", f"{len(reports) - 1} other nodes reached, in both directions"),
            ("locks", "those of the other nodes are seen"),
        )
        for finding in [each for each in wrong if (each.node, each.what) == (node, what)]
        or [Finding(what, "ok", fine, node=node)]
    ]


def _versions(reports: Reports) -> list[Finding]:
    """Nodes whose versions differ from the most common ones; in a tie the first node by name counts."""
    found = []
    packages = sorted({package for report in reports.values() for package in report["versions"]})
    for package in packages:
        has = {node: reports[node]["versions"].get(package) for node in sorted(reports)}
        usual = Counter(has.values()).most_common(1)[0][0]
        for node, version in has.items():
            if version != usual:
                text = f"{package} {version or 'is not installed'}, but {usual or 'none'} on the other nodes"
                hint = "use one environment on a shared file system, or the same container (slurm.setup, slurm.python)"
                found.append(Finding("versions", "bad" if package in MUST_MATCH else "note", text, hint, node))
    return found


def _clocks(reports: Reports) -> list[Finding]:
    """Nodes whose clock differs from most others'; of two that disagree, the second by name."""
    found = []
    nodes = sorted(reports)
    for node in nodes:
        seen = [reports[other]["clocks"][node] for other in nodes if node in reports[other]["clocks"]]
        off = sorted(seen)[len(seen) // 2] if seen else 0.0
        if abs(off) > CLOCK_TOLERANCE and not (len(nodes) == 2 and node == nodes[0]):
            text = f"{off:+.1f} s against the other nodes"
            hint = "ask the site's administrators to set its clock (chronyc makestep)"
            found.append(Finding("clocks", "bad", text, hint, node))
    return found


def _reach(reports: Reports) -> list[Finding]:
    """Nodes that cannot be reached. A node that reaches none of several others is at fault itself."""
    hint = "a firewall or a wrong address of the node: ask the site's administrators; Ray needs all ports"
    isolated = {
        node for node, report in reports.items() if len(reports) > 2 and len(report["unreached"]) == len(reports) - 1
    }
    found = [
        Finding("reach", "bad", f"cannot reach any other node: {', '.join(reports[node]['unreached'])}", hint, node)
        for node in sorted(isolated)
    ]
    for node in sorted(set(reports) - isolated):
        by = {other: report["unreached"][node] for other, report in reports.items() if node in report["unreached"]}
        if by := {other: why for other, why in by.items() if other not in isolated}:
            whys = "; ".join(f"from {other} ({why})" for other, why in sorted(by.items()))
            found.append(Finding("reach", "bad", f"cannot be reached {whys}", hint, node))
    return found


def _locks(reports: Reports) -> list[Finding]:
    """Nodes that can lock a file which another node has locked: two processes could write one run."""
    hint = "keep runs on a file system with locks between nodes: NFS 4 without local_lock, Lustre mounted with flock"
    return [
        Finding(
            "locks",
            "bad",
            f"a file that is locked on {', '.join(report['unlocked'])} is not seen as locked",
            hint,
            node,
        )
        for node, report in sorted(reports.items())
        if report["unlocked"]
    ]
