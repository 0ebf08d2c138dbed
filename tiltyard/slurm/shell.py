"""Commands with a profile's set-up: on a node of a job that runs, or on one that Slurm is asked for.

The set-up and the profile's variables travel in the environment, which no process list shows. What a set-up writes goes
to stderr: stdout is the command's.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiltyard.config.site import Profile
from tiltyard.errors import TiltyardError, UseError
from tiltyard.processes.child import die_with
from tiltyard.slurm.commands import environment, run_command
from tiltyard.slurm.script import asked_for, secret_environment, setup_lines

SET_UP = "TILTYARD_SET_UP"
TIMEOUT = 60.0
_RUN = f'eval "${SET_UP}" >&2; unset {SET_UP}; exec "$@"'
# The set-up is read by the shell itself: functions and aliases of it stay.
_OPEN = (
    f"exec bash --rcfile <(echo '[ ! -r ~/.bashrc ] || . ~/.bashrc'; printf '%s\\n' \"${SET_UP}\" 'unset {SET_UP}') -i"
)


@dataclass(frozen=True)
class Group:
    """Nodes of a job; a heterogeneous one has several groups, with numbers."""

    nodes: tuple[str, ...]
    number: str | None = None


def groups_of(job: str) -> list[Group]:
    """Where a job runs; nothing when it does not."""
    lines = _ask(["squeue", "--noheader", "--states=RUNNING", f"--jobs={job}", "--format=%i|%N"])
    found = []
    for line in lines:
        name, _, nodes = line.partition("|")
        found.append(Group(tuple(hostnames(nodes)), name.partition("+")[2] or None))
    return found


def hostnames(nodes: str) -> list[str]:
    """node[1-3] -> node1, node2, node3, as Slurm reads it."""
    return _ask(["scontrol", "show", "hostnames", nodes])


def _ask(command: list[str]) -> list[str]:
    try:
        done = run_command(command, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise TiltyardError(f"{command[0]} gives no answer: {error}", "type this where Slurm is") from error
    return done.stdout.split() if done.returncode == 0 else []


def in_job(
    job: str, groups: Sequence[Group], profile: Profile, words: Sequence[str], *, terminal: bool = False
) -> list[str]:
    """`words`, or a shell, once on every node of these groups, beside what the job does there."""
    told: list[str] = []
    for group in groups:
        count = len(group.nodes)
        options = [f"--het-group={group.number}"] if group.number is not None else []
        options += [f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(group.nodes)}"]
        told += [*([":"] if told else []), *options, *_with_set_up(profile, words)]
    return ["srun", f"--jobid={job}", "--overlap", "--export=ALL", *_pty(terminal), *told]


def on_new_node(profile: Profile, words: Sequence[str], *, terminal: bool = False) -> list[str]:
    """`words`, or a shell, on a node of their own, with the profile's resources."""
    asked = [word for option in asked_for(profile, nodes=1) for word in shlex.split(option)]
    # After the profile's own options, which may say the opposite.
    asked += ["--job-name=tiltyard-shell", "--export=ALL", *_pty(terminal)]
    return ["srun", *asked, *_with_set_up(profile, words)]


def _pty(terminal: bool) -> list[str]:
    return ["--pty"] if terminal else []


def _with_set_up(profile: Profile, words: Sequence[str]) -> list[str]:
    container = shlex.split(profile.slurm.container or "")
    if words or container:
        return ["bash", "-c", _RUN, "tiltyard", *container, *(words or ["bash", "-i"])]
    return ["bash", "-c", _OPEN]


def variables(profile: Profile, exports: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment that srun passes to the nodes. `exports` are set there after the profile's own setup."""
    return {
        **environment(),
        **secret_environment(profile.environment),
        SET_UP: "\n".join(
            [*setup_lines(profile), *(f"export {name}={shlex.quote(value)}" for name, value in (exports or {}).items())]
        ),
    }


def call(command: Sequence[str], variables: dict[str, str]) -> int:
    """Give the terminal to a command until it ends, Ctrl-C and all; returns its exit code."""
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with(parent)

    sys.stderr.flush()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the command
    try:
        code = subprocess.Popen(command, env=variables, preexec_fn=prepare).wait()
    except OSError as error:
        raise UseError(f"{command[0]} cannot be started: {error.strerror}", "type this where Slurm is") from error
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
