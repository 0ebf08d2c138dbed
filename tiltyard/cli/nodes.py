"""`shell` and `top`: a terminal or a command on a node, and a table of what a run's processes use."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add
from tiltyard.cli.output import clear_screen
from tiltyard.errors import TiltyardError, UseError
from tiltyard.processes.platforms import require_linux
from tiltyard.run.folder import Run, find
from tiltyard.run.lock import liveness, read_owner
from tiltyard.run.status import root_of

if TYPE_CHECKING:
    from tiltyard.config.site import Profile

POLL_SECONDS = 2.0


# ------------------------------------------------------------------------------------------------ shell


def configure_shell(parser: argparse.ArgumentParser) -> None:
    about = "a run whose job is running: open the terminal on its node"
    parser.add_argument("run", nargs="?", metavar="RUN", help=about)
    add(parser, "--on", help="open the terminal on a new node, with this profile's resources")
    parser.add_argument("--node", help="with RUN: one of the job's nodes (default: the first)")
    parser.add_argument("--time", help="with --on: time limit, e.g. 0:30:00")
    parser.add_argument("--cpus", help="with --on: number of CPUs")
    parser.add_argument("--gpus", help="with --on: number of GPUs")
    parser.add_argument("--memory", help="with --on: memory, e.g. 8G")
    parser.epilog = "-- COMMAND runs a command instead of a shell."
    parser.set_defaults(command=[])  # after --


def run_shell(args: argparse.Namespace) -> int:
    """Hand the terminal over to srun."""
    from tiltyard.slurm import shell

    if (args.run is None) == (args.on is None):
        raise UseError("tiltyard shell needs a RUN or --on PROFILE, and not both", "tiltyard ls lists the runs")
    terminal = sys.stdin.isatty()
    if not terminal and not args.command:
        hint = "give a command: tiltyard shell ... -- COMMAND"
        raise UseError("a shell needs a terminal, but stdin is not one", hint)
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
        raise UseError(f"profile {name} submits no jobs (launcher: local)", "use a profile with launcher: slurm")
    return profile


def _resized(profile: Profile, args: argparse.Namespace) -> Profile:
    """The profile with the resources of the command line."""
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
    """The run's job, its nodes and its profile."""
    from tiltyard.config.site import Profile
    from tiltyard.slurm import job_state, shell

    job = job_state.job_of(run)
    if job is None:
        raise UseError(f"run {run.id} is not a Slurm job", f"see: tiltyard show {run.typed}")
    groups = shell.groups_of(job)
    if not groups:
        raise UseError(f"run {run.id} is not running: {job_state.poll_job(run)[1]}", f"tiltyard show {run.typed}")
    try:
        profile = _job_profile(run.status()["job"]["profile"])
    except UseError as error:
        sys.stderr.write(f"warning: the profile's setup lines are not run: {error.message}\n")
        profile = Profile(launcher="slurm")
    return job_state.raw_job_id(job), groups, profile


# ------------------------------------------------------------------------------------------------ top


def configure_top(parser: argparse.ArgumentParser) -> None:
    add(parser, "run", help="a run that is running, on this machine or as a job")
    about = "print once, not every 2 seconds (default without a terminal)"
    parser.add_argument("--once", action="store_true", help=about)
    add(parser, "--json", help="print once, as JSON")


def run_top(args: argparse.Namespace) -> None:
    """Show what the run's processes use, until it ends or Ctrl-C."""
    run = find(args.run)
    once = args.once or args.json or not sys.stdout.isatty()
    owner = read_owner(run.folder)
    if run.status().get("job") is None or (owner is not None and not owner.get("job")):
        require_linux("tiltyard top of a run on this machine", "use the system's own monitor")
        snapshots = _local_snapshots(run, owner, 0.0 if once else POLL_SECONDS)
    else:
        snapshots = _job_snapshots(run, 0.0 if once else POLL_SECONDS)
    try:
        for nodes in snapshots:
            if args.json:
                sys.stdout.write(json.dumps(nodes) + "\n")
            else:
                if not once:
                    clear_screen()
                sys.stdout.write(drawn(nodes))
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("\n")


def _local_snapshots(run: Run, owner: dict[str, Any] | None, every: float) -> Iterator[list[dict[str, Any]]]:
    from tiltyard.processes import proc
    from tiltyard.slurm.usage import snapshots

    if owner is None or liveness(owner) == "dead":
        raise UseError(f"run {run.id} is not running ({run.state})", f"see: tiltyard show {run.typed}")
    if liveness(owner) == "unknown":
        hint = f"type this there: tiltyard top {run.id}"
        raise UseError(f"run {run.id} is running on host {owner.get('host')}", hint)
    for found in snapshots(lambda: proc.tree(owner["pid"]), every):
        if not found["processes"]:
            return
        yield [found]


def _job_snapshots(run: Run, every: float) -> Iterator[list[dict[str, Any]]]:
    """Run a job step on all nodes, each of which prints a line per snapshot."""
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
        start_new_session=True,  # keeps Ctrl-C in the terminal from it
    )
    assert step.stdout is not None
    found: dict[str, dict[str, Any]] = {}
    answered = False
    try:
        for line in step.stdout:
            if line.startswith("{"):
                node = json.loads(line)
                found[node["node"]] = node
            if len(found) == count:
                answered = True
                yield [found[name] for name in sorted(found)]
                found = {}
        if not answered:
            output = step.stderr.read().strip() if step.stderr else ""
            raise TiltyardError(f"{count - len(found)} of {count} nodes of job {job} do not answer", "", output)
    finally:
        step.terminate()
        step.wait()


def drawn(nodes: Sequence[dict[str, Any]]) -> str:
    """A table of processes, then the totals and GPUs of each node."""
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
