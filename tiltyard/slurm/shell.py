"""Run a command with a profile's setup, on the nodes of a running job or on a new node from Slurm.

Setup lines and variables travel in the environment, which no process list shows. The setup's output goes to stderr;
stdout belongs to the command.
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
from tiltyard.processes.lifetime import die_with
from tiltyard.slurm.commands import environment, run_command
from tiltyard.slurm.script import resource_options, secret_environment, setup_lines, with_nodes

SETUP = "TILTYARD_SET_UP"
TIMEOUT = 60.0
_RUN = f'eval "${SETUP}" >&2; unset {SETUP}; exec "$@"'
# The interactive shell reads the setup itself, so that its functions and aliases stay.
_OPEN = (
    f"exec bash --rcfile <(echo '[ ! -r ~/.bashrc ] || . ~/.bashrc'; printf '%s\\n' \"${SETUP}\" 'unset {SETUP}') -i"
)


@dataclass(frozen=True)
class Group:
    """Nodes of a job; a heterogeneous job has several numbered groups."""

    nodes: tuple[str, ...]
    number: str | None = None


def groups_of(job: str) -> list[Group]:
    """The nodes of a running job; empty if it is not running."""
    lines = _output_words(["squeue", "--noheader", "--states=RUNNING", f"--jobs={job}", "--format=%i|%N"])
    pairs = [line.partition("|") for line in lines]
    return [Group(tuple(hostnames(nodes)), name.partition("+")[2] or None) for name, _, nodes in pairs]


def hostnames(nodes: str) -> list[str]:
    """Expand node[1-3] to node1, node2, node3, as Slurm does."""
    return _output_words(["scontrol", "show", "hostnames", nodes])


def _output_words(command: list[str]) -> list[str]:
    try:
        done = run_command(command, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise TiltyardError(f"{command[0]} does not answer: {error}", "run this on a machine with Slurm") from error
    return done.stdout.split() if done.returncode == 0 else []


def in_job(
    job: str, groups: Sequence[Group], profile: Profile, words: Sequence[str], *, terminal: bool = False
) -> list[str]:
    """An srun that runs `words`, or a shell, once on every node of these groups, beside the job's own processes."""
    steps: list[str] = []
    for group in groups:
        count = len(group.nodes)
        options = [f"--het-group={group.number}"] if group.number is not None else []
        options += [f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(group.nodes)}"]
        steps += [*([":"] if steps else []), *options, *_with_setup(profile, words)]
    return ["srun", f"--jobid={job}", "--overlap", "--export=ALL", *(["--pty"] if terminal else []), *steps]


def on_new_node(profile: Profile, words: Sequence[str], *, terminal: bool = False) -> list[str]:
    """An srun that runs `words`, or a shell, on a new node with the profile's resources."""
    options = [word for option in resource_options(with_nodes(profile, 1)) for word in shlex.split(option)]
    # After the profile's own options, so that these win.
    options += ["--job-name=tiltyard-shell", "--export=ALL", *(["--pty"] if terminal else [])]
    return ["srun", *options, *_with_setup(profile, words)]


def _with_setup(profile: Profile, words: Sequence[str]) -> list[str]:
    container = shlex.split(profile.slurm.container or "")
    if words or container:
        return ["bash", "-c", _RUN, "tiltyard", *container, *(words or ["bash", "-i"])]
    return ["bash", "-c", _OPEN]


def variables(profile: Profile, exports: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment that srun passes to the nodes. `exports` are set there after the profile's own setup."""
    return {
        **environment(),
        **secret_environment(profile.environment),
        SETUP: "\n".join(
            [*setup_lines(profile), *(f"export {name}={shlex.quote(value)}" for name, value in (exports or {}).items())]
        ),
    }


def call(command: Sequence[str], variables: dict[str, str]) -> int:
    """Run a command in the foreground, Ctrl-C included; returns its exit code."""
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with(parent)

    sys.stderr.flush()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    try:
        code = subprocess.Popen(command, env=variables, preexec_fn=prepare).wait()
    except OSError as error:
        raise UseError(f"cannot start {command[0]}: {error.strerror}", "run this on a machine with Slurm") from error
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
