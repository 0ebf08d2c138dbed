"""The doctor on a profile's nodes: a job of a few minutes that runs the checkup on each, followed to its end.

Everything is in a hidden folder below the runs folder, which all nodes see, and is gone afterwards.
"""

from __future__ import annotations

import contextlib
import shlex
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
from tiltyard.doctor.node_probe import REPORT, named
from tiltyard.doctor.system import OFF
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.slurm.commands import cancel, sbatch
from tiltyard.slurm.job_state import Backoff, JobState, query_jobs
from tiltyard.slurm.script import header_lines, secret_environment, setup_lines, step_lines
from tiltyard.slurm.shell import hostnames

LIMIT = "5"  # minutes
LONGEST_WAIT = 60.0  # seconds that nodes wait for each other: they start together, and have to end within the limit
POLL_SECONDS = 0.25  # seconds between looks at the folder
LATE = 5.0  # seconds that files may take to be seen here after the job has ended
OUTPUT, SCRIPT, SECRETS = "output", "script.sh", "secrets.sh"


def check_nodes(profile: Profile, root: Path, nodes: str | None, say: Callable[[str], object]) -> list[Finding]:
    """The findings of every node: as many as the profile asks for, or those named by `nodes`. `say` hears the queue."""
    names = hostnames(nodes) if nodes else []
    if nodes and not names:
        raise UseError(f"{nodes!r} names no nodes", "as in: --nodes node3 or --nodes 'node[3,7-9]'")
    if names:
        profile = _only(profile, names)
    resources, samplers = profile.resources, profile.slurm.samplers
    count = resources.nodes + (samplers.nodes if samplers else 0)
    with _folder(root) as folder:
        _write(folder, profile, root, count)
        with _job(folder, profile) as job:
            on, told = _follow(job, folder, count, say)
        reports = {node: atomic.read_json(folder / f"{node}{REPORT}") for node in named(folder, REPORT)}
        if not reports:
            sentence = told.describe(job) if told else f"job {job} said nothing"
            hint = f"is slurm.python or slurm.setup of profile {profile.name} wrong?"
            raise TiltyardError(f"no node was checked: {sentence}", hint, _tail(folder))
        return [*_findings(reports), *_silent(names or on, reports, folder)]


def _only(profile: Profile, names: list[str]) -> Profile:
    """The profile for just these nodes."""
    extra = [*profile.slurm.extra, f"--nodelist={','.join(names)}"]
    slurm = profile.slurm.model_copy(update={"extra": extra, "exclude": None, "samplers": None})
    resources = profile.resources.model_copy(update={"nodes": len(names)})
    return profile.model_copy(update={"slurm": slurm, "resources": resources})


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[Path]:
    folder = atomic.absolute(root) / PLACE / f"visit-{atomic.unique()}"
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UseError(
            f"{folder} cannot be made: {error.strerror}", "set TILTYARD_RUNS to a folder of yours"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # unless nodes are remembered in it


def _write(folder: Path, profile: Profile, root: Path, count: int) -> None:
    """The script, and what it must not show."""
    hidden = secret_environment(profile.environment)
    (folder / SECRETS).write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in hidden.items()))
    quoted, wait = shlex.quote(str(folder)), min(profile.slurm.wait, LONGEST_WAIT)
    lines = [
        *header_lines(profile, f"doctor-{folder.name}", "/dev/null", time=LIMIT, requeue=False),
        f"exec >{quoted}/{OUTPUT} 2>&1",
        *setup_lines(profile, f"{quoted}/{SECRETS}"),
        f"export TILTYARD_RUNS={shlex.quote(str(atomic.absolute(root)))}",
        *step_lines(profile, ["-m", "tiltyard.doctor.node_probe"], f"{quoted} {count} {wait:g}"),
    ]
    (folder / SCRIPT).write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def _job(folder: Path, profile: Profile) -> Iterator[str]:
    """The visit's job; whoever leaves before its end takes it along."""
    try:
        job = sbatch(folder / SCRIPT, f"doctor-{folder.name}")
    except TiltyardError as error:
        raise TiltyardError(error.message, f"correct profile {profile.name}", error.details) from error
    try:
        yield job
        deadline = time.monotonic() + LATE
        while _is_open(_ask(job)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        if _is_open(_ask(job)):
            with contextlib.suppress(TiltyardError, OSError, subprocess.SubprocessError):
                cancel(job)


def _ask(job: str) -> JobState | None:
    return (query_jobs([job]) or {}).get(job)


def _is_open(told: JobState | None) -> bool:
    return told is None or told.pending or told.running


def _follow(job: str, folder: Path, count: int, say: Callable[[str], object]) -> tuple[list[str], JobState | None]:
    """Wait until every node has reported, or the job has ended. Returns its nodes, and what Slurm said last."""
    pace, said, due, nodes = Backoff(), "", 0.0, ""
    told: JobState | None = None
    ended: float | None = None
    while len(named(folder, REPORT)) < count:
        now = time.monotonic()
        if ended is not None and now > ended + LATE:
            break
        if ended is None and now >= due:
            told = _ask(job)
            sentence = told.describe(job) if told else f"Slurm does not answer about job {job}"
            nodes = told.nodes if told and told.nodes else nodes
            if sentence != said:
                said = sentence
                pace.reset()
                say(sentence)
            ended = now if told is not None and not _is_open(told) else None
            due = now + pace.next_pause()
        time.sleep(POLL_SECONDS)
    return hostnames(nodes) if nodes else [], told


def _findings(reports: dict[str, dict[str, Any]]) -> list[Finding]:
    each = [Finding(**{**found, "node": node}) for node in sorted(reports) for found in reports[node]["findings"]]
    return [*each, *compare(reports)]


def _silent(names: list[str], reports: dict[str, dict[str, Any]], folder: Path) -> list[Finding]:
    return [
        Finding("checkup", "bad", f"it told nothing; the job's output ends with: {_tail(folder, 1)}", "", node)
        for node in names
        if node not in reports
    ]


def _tail(folder: Path, lines: int = 20) -> str:
    try:
        whole = (folder / OUTPUT).read_text(errors="replace").strip()
    except OSError:
        return "(nothing)"
    return "\n".join(whole.splitlines()[-lines:]) or "(nothing)"


Reports = Mapping[str, Mapping[str, Any]]
ALIKE = ("python", "tiltyard", "torch", "numpy", "gymnasium", "ray")  # where they differ, nodes do not work together


def compare(reports: Reports) -> list[Finding]:
    """A finding of each kind for every node, by name."""
    if len(reports) < 2:
        return []
    wrong = [*_versions(reports), *_clocks(reports), *_reach(reports)]
    return [
        finding
        for node in sorted(reports)
        for what, fine in (
            ("versions", "as on the other nodes"),
            ("clocks", "as on the other nodes"),
            ("reach", f"{len(reports) - 1} other nodes reached, and by them"),
        )
        for finding in [each for each in wrong if (each.node, each.what) == (node, what)]
        or [Finding(what, "ok", fine, node=node)]
    ]


def _versions(reports: Reports) -> list[Finding]:
    """Against what most nodes have; the first by name where that is a tie."""
    found = []
    packages = sorted({package for report in reports.values() for package in report["versions"]})
    for package in packages:
        has = {node: reports[node]["versions"].get(package) for node in sorted(reports)}
        usual = Counter(has.values()).most_common(1)[0][0]
        for node, version in has.items():
            if version != usual:
                said = f"{package} {version or 'is not installed'}, and {usual or 'none'} on the other nodes"
                hint = "use one environment on a shared file system, or the same container (slurm.setup, slurm.python)"
                found.append(Finding("versions", "bad" if package in ALIKE else "note", said, hint, node))
    return found


def _clocks(reports: Reports) -> list[Finding]:
    """A node whose clock most of the others see as wrong; of two that disagree, the second by name."""
    found = []
    nodes = sorted(reports)
    for node in nodes:
        seen = [reports[other]["clocks"][node] for other in nodes if node in reports[other]["clocks"]]
        off = sorted(seen)[len(seen) // 2] if seen else 0.0
        if abs(off) > OFF and not (len(nodes) == 2 and node == nodes[0]):
            said = f"{off:+.1f} s against the other nodes"
            found.append(Finding("clocks", "bad", said, "have the site set its clock (chronyc makestep)", node))
    return found


def _reach(reports: Reports) -> list[Finding]:
    """Blamed is who cannot be reached; but a node that reaches none of several others itself is the one to blame."""
    hint = "a firewall between the nodes, or a wrong address for its name: tell the site; Ray needs all ports"
    deaf = {
        node for node, report in reports.items() if len(reports) > 2 and len(report["unreached"]) == len(reports) - 1
    }
    found = [
        Finding("reach", "bad", f"cannot reach any other node: {', '.join(reports[node]['unreached'])}", hint, node)
        for node in sorted(deaf)
    ]
    for node in sorted(set(reports) - deaf):
        by = {other: report["unreached"][node] for other, report in reports.items() if node in report["unreached"]}
        if by := {other: why for other, why in by.items() if other not in deaf}:
            whys = "; ".join(f"from {other} ({why})" for other, why in sorted(by.items()))
            found.append(Finding("reach", "bad", f"cannot be reached {whys}", hint, node))
    return found
