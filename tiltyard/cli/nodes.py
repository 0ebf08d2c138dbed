"""`shell` and `top`: into the nodes, by a terminal or a command, and by a table of what a run's processes use there."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.errors import EXIT_DONE, TiltyardError, UseError
from tiltyard.processes.platforms import require_linux
from tiltyard.run.folder import Run, find, read_owner
from tiltyard.run.lock import liveness
from tiltyard.run.status import root_of

if TYPE_CHECKING:
    from tiltyard.config.site import Profile

EVERY = 2.0  # seconds between looks


# ------------------------------------------------------------------------------------------------ shell


def configure_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run whose job is running: a terminal beside it")
    parser.add_argument("--on", metavar="PROFILE", help="a terminal on a node of its own, as this profile asks for one")
    parser.add_argument("--node", help="with RUN: which of the job's nodes; the first when left out")
    parser.add_argument("--time", help="with --on: for how long, like 0:30:00")
    parser.add_argument("--cpus", help="with --on: how many CPUs")
    parser.add_argument("--gpus", help="with --on: how many GPUs")
    parser.add_argument("--memory", help="with --on: how much memory, like 8G")
    parser.set_defaults(command=[])  # what follows --: run in place of a shell


def run_shell(args: argparse.Namespace) -> int:
    """Hand the terminal over to srun."""
    from tiltyard.slurm import shell

    if (args.run is None) == (args.on is None):
        raise UseError("tiltyard shell needs a RUN or --on PROFILE, and not both", "tiltyard ls lists the runs")
    terminal = sys.stdin.isatty()
    if not terminal and not args.command:
        raise UseError(
            "a shell needs a terminal, and stdin is none", "or name a command: tiltyard shell ... -- COMMAND"
        )
    if args.on is not None:
        profile = _resized(_job_profile(args.on), args)
        return shell.call(shell.on_new_node(profile, args.command, terminal=terminal), shell.variables(profile))
    run = find(args.run)
    job, groups, profile = _running_job(run)
    node = args.node or groups[0].nodes[0]
    group = next((group for group in groups if node in group.nodes), None)
    if group is None:
        there = ", ".join(node for group in groups for node in group.nodes)
        raise UseError(f"job {job} of run {run.id} does not run on {node}", f"it runs on {there}")
    command = shell.in_job(job, [shell.Group((node,), group.number)], profile, args.command, terminal=terminal)
    return shell.call(command, shell.variables(profile, {"TILTYARD_RUNS": str(root_of(run.folder))}))


def _job_profile(name: str) -> Profile:
    from tiltyard.cli.jobs import job_profile

    profile = job_profile(name)
    if profile is None:
        raise UseError(f"profile {name} starts no jobs: launcher is local", "open a terminal of your own")
    return profile


def _resized(profile: Profile, args: argparse.Namespace) -> Profile:
    """The profile with what the command line says of resources."""
    from tiltyard.config.site import Resources
    from tiltyard.config.validation import validate

    given = {name: getattr(args, name) for name in ("time", "cpus", "gpus", "memory") if getattr(args, name)}
    numbers = {name: int(value) for name, value in given.items() if name in ("cpus", "gpus") and value.isdecimal()}
    resources, wrong = validate(Resources, {**profile.resources.model_dump(), **given, **numbers})
    if resources is None:
        problem = wrong[0][1]
        raise UseError(f"--{problem.setting} {problem.value}: {problem.message}", problem.hint)
    return profile.model_copy(update={"resources": resources})


def _running_job(run: Run) -> tuple[str, list[Any], Profile]:
    """The job that the run is, where it runs, and its profile."""
    from tiltyard.config.site import Profile
    from tiltyard.slurm import job_state, shell

    job = job_state.job_of(run)
    if job is None:
        raise UseError(f"run {run.id} is no job of Slurm", f"look at it with: tiltyard show {run.typed}")
    groups = shell.groups_of(job)
    if not groups:
        raise UseError(f"run {run.id} does not run now: {job_state.poll_job(run)[1]}", f"tiltyard show {run.typed}")
    try:
        profile = _job_profile(run.status()["job"]["profile"])
    except UseError as error:
        sys.stderr.write(f"warning: no set-up: {error.message}\n")
        profile = Profile(launcher="slurm")
    return job_state.raw_job_id(job), groups, profile


# ------------------------------------------------------------------------------------------------ top


def configure_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run that is running: here, or as a job")
    parser.add_argument("--once", action="store_true", help="look once, as without a terminal; else every 2 seconds")
    parser.add_argument("--json", action="store_true", help="look once, and print it as JSON")


def run_top(args: argparse.Namespace) -> int:
    """Show what the run's processes use, until it ends or somebody presses Ctrl-C."""
    run = find(args.run)
    once = args.once or args.json or not sys.stdout.isatty()
    owner = read_owner(run.folder)
    if run.status().get("job") is None or (owner is not None and not owner.get("job")):
        require_linux("tiltyard top of a run on this machine", "use the system's own monitor")
        looks = _looks_here(run, owner, 0.0 if once else EVERY)
    else:
        looks = _looks_at_job(run, 0.0 if once else EVERY)
    try:
        for nodes in looks:
            if args.json:
                sys.stdout.write(json.dumps(nodes) + "\n")
            else:
                sys.stdout.write(f"{'' if once else chr(27) + '[H' + chr(27) + '[J'}{drawn(nodes)}")
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
    return EXIT_DONE


def _looks_here(run: Run, owner: dict[str, Any] | None, every: float) -> Iterator[list[dict[str, Any]]]:
    from tiltyard.processes import proc
    from tiltyard.slurm.usage import snapshots

    if owner is None or liveness(owner) == "dead":
        raise UseError(f"run {run.id} is not running ({run.state})", f"look at it with: tiltyard show {run.typed}")
    if liveness(owner) == "unknown":
        raise UseError(
            f"run {run.id} is written on host {owner.get('host')}", f"type this there: tiltyard top {run.id}"
        )
    for told in snapshots(lambda: proc.tree(owner["pid"]), every):
        if not told["processes"]:
            return
        yield [told]


def _looks_at_job(run: Run, every: float) -> Iterator[list[dict[str, Any]]]:
    """One step on all nodes of the job, each telling a line whenever it has looked."""
    from tiltyard.slurm import shell

    job, groups, profile = _running_job(run)
    count = sum(len(group.nodes) for group in groups)
    python = profile.slurm.python or sys.executable
    command = shell.in_job(job, groups, profile, [python, "-m", "tiltyard.slurm.usage", job, str(every)])
    step = subprocess.Popen(
        command,
        env=shell.variables(profile),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if not every else subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # a Ctrl-C is for us
    )
    assert step.stdout is not None
    told: dict[str, dict[str, Any]] = {}
    looked = False
    try:
        for line in step.stdout:
            if line.startswith("{"):
                node = json.loads(line)
                told[node["node"]] = node
            if len(told) == count:
                looked = True
                yield [told[name] for name in sorted(told)]
                told = {}
        if not looked:
            said = step.stderr.read().strip() if step.stderr else ""
            raise TiltyardError(
                f"job {job} cannot be looked at: {count - len(told)} of its nodes say nothing", "", said
            )
    finally:
        step.terminate()
        step.wait()


def drawn(nodes: Sequence[dict[str, Any]]) -> str:
    """A table: every process, then what each node uses in all, then its GPUs."""
    rows, below = [], []
    for node in nodes:
        for each in node["processes"]:
            sizes = [_mebibytes(each["resident"]), _mebibytes(each["proportional"])]
            rows.append(
                [node["node"], str(each["pid"]), str(each["cpu"]), str(each["threads"]), *sizes, each["command"]]
            )
        whole = {
            name: sum(each[name] or 0 for each in node["processes"])
            for name in ("cpu", "threads", "resident", "proportional")
        }
        used = f"{_mebibytes(whole['proportional'] or whole['resident'])} MiB"
        count = len(node["processes"])
        below.append(f"{node['node']}: {count} processes, {whole['threads']} threads, {whole['cpu']} % CPU, {used}")
        below += [
            f"{node['node']}: GPU {gpu['index']} {gpu['name']}, {gpu['busy']} %, {gpu['used']} of {gpu['total']} MiB"
            for gpu in node["gpus"]
        ]
    head = ("NODE", "PID", "CPU %", "THREADS", "RSS MiB", "PSS MiB", "COMMAND")
    return formatting.table(head, rows, right=(1, 2, 3, 4, 5)) + "".join(
        f"{formatting.clean(line)}\n" for line in below
    )


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"
