"""The script of a Slurm job, as text: a pure function of run and profile.

    script(job)   what `sbatch` gets: #SBATCH lines, the profile's set-up, one agent per node, and what follows
    head, set_up, step      its parts, for short jobs that are no runs

The script of an array is the same with the run looked up by the task's number, and a turn of its sweep at the end.
Everything that a user named goes through a file or is quoted; nothing of it is ever run by a shell.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiltyard.config.site import ENTERED, Nodes, Profile
from tiltyard.run.redact import looks_secret
from tiltyard.run.status import root_of
from tiltyard.slurm import FOLDER, JOB_NUMBER, JOB_VARIABLE, NEVER_SUBMITTED, SCRIPT, SECRETS, TRIALS

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,+@%-]+")


RUN_AGAIN = 10  # exit code of a sweep's turn: the task's own trial is due again, in the same job


@dataclass(frozen=True)
class Array:
    """A job with a task for each of several runs: those named in a file, in its folder in their sweep's folder."""

    tasks: int
    at_once: int
    pause: float = 0.0
    """seconds between the starts of two of them"""


@dataclass(frozen=True)
class Job:
    """A run, or the folder of an array, and the profile that it is submitted with."""

    name: str
    folder: Path
    profile: Profile
    python: str = sys.executable
    excluded: tuple[str, ...] = ()
    """nodes that are left out beside those of the profile"""
    array: Array | None = None


def script(job: Job) -> str:
    """The whole script of a run's job, or of an array."""
    return "\n".join([*_beginning(job), *_middle(job), *_end(job)]) + "\n"


def _beginning(job: Job) -> list[str]:
    """What is asked for, the profile's set-up, and then which run it is: a set-up may have variables of any name."""
    profile, folder, array = job.profile, job.folder, job.array
    named = _can_be_escaped(str(folder))
    output = str(folder).replace("%", "%%") + ("/%a.out" if array else "/logs/job-%j.out")
    told = f"{_one_line(job.name)}, profile {_one_line(profile.name)}"
    if array is None:
        root, quoted = root_of(folder), shlex.quote(str(folder))
        logged = [] if named else [f'exec >>{quoted}/logs/job-"$SLURM_JOB_ID".out 2>&1']
        said, found = f"# Run {told}. It may be submitted by hand, too.", [f"run={quoted}", *_ID]
    else:
        root, found, logged = folder.parents[3], _task(folder), _log_of_task(folder)
        said = f"# Trials {told}. One may be submitted by hand, too: sbatch --array=TASK {SCRIPT}"
    return [
        *head(profile, job.name, output if named else "/dev/null", excluded=job.excluded, array=array),
        "",
        said,
        *logged,
        *setup_lines(profile, shlex.quote(str((folder if array else folder / FOLDER) / SECRETS))),
        f"export {ENTERED}={shlex.quote(profile.name)} TILTYARD_RUNS={shlex.quote(str(root))}",
        "",
        *found,
    ]


_ID = (
    "id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
    "id=${id:-$SLURM_JOB_ID}",
)
_LINE = '"$((SLURM_ARRAY_TASK_ID + 1))p"'


def _log_of_task(folder: Path) -> list[str]:
    log = '"$trial/logs/job-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out"'
    return [
        f"trial=$(sed -n {_LINE} {shlex.quote(str(folder / TRIALS))})",
        f"exec >>{shlex.quote(str(folder.parents[1]))}/{log} 2>&1",
    ]


def _task(folder: Path) -> list[str]:
    """Which trial a task is. The array's number is written by its tasks too: whoever submitted it may be gone."""
    return [
        f"array={shlex.quote(str(folder))} sweep={shlex.quote(str(folder.parents[1]))}",
        f'run=$sweep/$(sed -n {_LINE} "$array/{TRIALS}")',
        *_ID,
        f'[ ! -e "$array/{NEVER_SUBMITTED}" ] || exit 0',
        f'[ -s "$array/{JOB_NUMBER}" ] || echo "$SLURM_ARRAY_JOB_ID" >"$array/.$id"',
        f'[ ! -e "$array/.$id" ] || mv "$array/.$id" "$array/{JOB_NUMBER}"',
        f'export {JOB_VARIABLE}="slurm/${{array##*/}}"',
    ]


# A node that hangs would hold the others until the time limit: what is left a minute after the verdict is ended.
_GUARD = '(until [ -s "$run/job/verdict" ]; do sleep 5; done; sleep 60; kill "$agents" 2>/dev/null) & guard=$!'


def _middle(job: Job) -> list[str]:
    """One start of the agents, and what the first of them decided; of an array again, as long as there are turns."""
    array, several = job.array, bool(_names_of_nodes(job.profile))
    return [
        "# The time limit, for an agent that was not told of it in time.",
        ': "${SLURM_JOB_END_TIME:=$(SLURM_TIME_FORMAT=%s squeue -h -j "$id" -o %e)}"',
        "export SLURM_JOB_END_TIME",
        *_names_of_nodes(job.profile),
        *([f'{{ flock 9; sleep {array.pause:g}; }} 9>"$sweep/slurm/pause"'] if array and array.pause else []),
        "",
        *([] if array is None else ["while of=; do"]),
        "# One agent on every node. Signals go to the agents; this shell only waits, whatever it is sent.",
        *(['rm -f "$run/job/verdict"'] if several else []),
        *step(job.profile, ["-m", "tiltyard.slurm.node_agent"], '"$run"', python=job.python, background=True),
        "agents=$!",
        "trap 'scancel --signal=TERM \"$id\" 2>/dev/null' TERM INT  # srun itself would kill them at once",
        "trap : USR2",
        *([_GUARD] if several else []),
        'while wait "$agents"; code=$?; kill -0 "$agents" 2>/dev/null; do :; done',
        *(['kill "$guard" 2>/dev/null'] if several else []),
        "",
        "# What the agent of the first node decided, if it is about this very start of the job.",
        'read -r of restart verdict 2>/dev/null <"$run/job/verdict"',
        '[ "${of:-} ${restart:-}" = "$id ${SLURM_RESTART_COUNT:-0}" ] || verdict=none',
        'echo "job $id: ${verdict:-none} (exit code $code)"',
        "# Ended while it saved: by the limit, or by somebody who does not want it back?",
        '[ "${verdict:-}" = late ] && [ "$(squeue -h -j "$id" -o %r)" = TimeLimit ] && verdict=requeue',
        *_what_next(job),
    ]


def _what_next(job: Job) -> list[str]:
    if job.array is None:
        return ['[ "${verdict:-none}" = requeue ] || exit "$code"']
    return [
        '[ "${verdict:-none}" = requeue ] && break',
        "# What comes next in the sweep; perhaps more of the same.",
        tick_command(job.profile, job.python),
        f'[ $? = {RUN_AGAIN} ] || exit "$code"',
        "done",
    ]


def tick_command(profile: Profile, python: str) -> str:
    """A turn of the sweep in whose trial's job this is: outside of any container, where jobs can be submitted."""
    chosen = python if profile.slurm.container else profile.slurm.python or python
    return f'{shlex.quote(chosen)} -m tiltyard.sweep.tick "$sweep" --own "$run"'


def _end(job: Job) -> list[str]:
    """Back into the queue, by requeue or by the same script submitted again."""
    again, name = '"$run/job/script.sh"', "${again%%;*}"
    if job.array is not None:
        again, name = '--array="$task" "$array/script.sh"', "${again%%;*}_$task"
    return [
        'scontrol requeue "$id" && exit 0',
        'echo "job $id may not be requeued; the same script is submitted again"',
        *([] if job.array is None else ["task=$SLURM_ARRAY_TASK_ID"]),
        "again=$(conf=${SLURM_CONF-}",
        '  unset "${!SLURM_@}" "${!SBATCH_@}"',
        '  [ -z "$conf" ] || export SLURM_CONF="$conf"',
        f'  sbatch --parsable {again}) || {{ echo "go on with: tiltyard resume $run"; exit 1; }}',
        f'echo "{name}" >"$run/job/submitted-again"',
        f'echo "job {name} goes on with it"',
    ]


def _names_of_nodes(profile: Profile) -> list[str]:
    """For an agent that has to name one that is missing; Slurm's commands are only sure to be here."""
    if profile.slurm.samplers is not None:
        listed = "$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"
    elif profile.resources.nodes > 1:
        listed = "$SLURM_JOB_NODELIST"
    else:
        return []
    return [f'export TILTYARD_NODES=$(scontrol show hostnames "{listed}" | paste -sd,)']


def head(
    profile: Profile,
    name: str,
    output: str,
    *,
    time: str | None = None,
    nodes: int | None = None,
    requeue: bool = True,
    excluded: Sequence[str] = (),
    array: Array | None = None,
) -> list[str]:
    """The #! line and the #SBATCH lines. `output` is a pattern of sbatch; `time` and `nodes` replace the profile's."""
    lines = [
        f"--job-name={_escaped(_one_line(name))}",
        f"--output={_escaped(output)}",
        "--open-mode=append",
        *([f"--array=0-{array.tasks - 1}%{array.at_once}"] if array is not None else []),
        *(["--requeue", f"--signal=USR2@{profile.lead:.0f}"] if requeue else ["--no-requeue"]),
        *asked_for(profile, time=time, nodes=nodes, excluded=excluded),
    ]
    if profile.slurm.samplers is not None and nodes is None:
        samplers = profile.slurm.samplers
        lines += ["hetjob", *_group(samplers, samplers.partition or profile.slurm.partition, samplers.constraint)]
    return ["#!/bin/bash", *(f"#SBATCH {line}" for line in lines)]


def asked_for(
    profile: Profile, *, time: str | None = None, nodes: int | None = None, excluded: Sequence[str] = ()
) -> list[str]:
    """What sbatch and srun have in common: the options that say what is asked for, `extra` as the site file has it."""
    slurm, resources = profile.slurm, profile.resources
    first = resources if nodes is None else resources.model_copy(update={"nodes": nodes})
    names = ",".join(word for word in (slurm.exclude, *excluded) if word)
    return [
        *_option("time", time or resources.time),
        *_option("account", slurm.account),
        *_option("qos", slurm.qos),
        *_option("exclude", names),
        *slurm.extra,
        *_group(first, slurm.partition, slurm.constraint),
    ]


def _group(nodes: Nodes, partition: str | None, constraint: str | None) -> list[str]:
    return [
        *_option("partition", partition),
        *_option("constraint", constraint),
        f"--nodes={nodes.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={nodes.cpus}",
        *_option("gpus-per-node", nodes.gpus or None),
        *_option("mem", nodes.memory),
        *_option("tmp", nodes.tmp),
    ]


def _option(name: str, value: object) -> list[str]:
    return [f"--{name}={value}"] if value else []


def setup_lines(profile: Profile, secrets: str | None = None) -> list[str]:
    """The profile's own lines and variables. `secrets` names, quoted, the file with those that no script shows."""
    hidden = secret_environment(profile.environment)
    shown = {name: value for name, value in profile.environment.items() if name not in hidden}
    kept = profile.slurm.keep_ld_preload
    said = 'echo "LD_PRELOAD=$LD_PRELOAD of this site is unset: it breaks Ray (slurm.keep_ld_preload: true keeps it)"'
    return [
        *profile.slurm.setup,
        "set -uo pipefail",  # after the site's own scripts, many of which do not bear it
        "export PYTHONUNBUFFERED=1",
        *(f"export {name}={shlex.quote(value)}" for name, value in shown.items()),
        *([f". {secrets}"] if hidden and secrets else []),
        *([] if kept else [f'[ -z "${{LD_PRELOAD:-}}" ] || {{ {said}; unset LD_PRELOAD; }}']),
    ]


def step(
    profile: Profile,
    words: Sequence[str],
    target: str,
    *,
    python: str = sys.executable,
    background: bool = False,
    nodes: int | None = None,
) -> list[str]:
    """One `srun` that starts Python with `words` once on every node; `target` is added as it stands, quoted already."""
    slurm, resources = profile.slurm, profile.resources
    told = shlex.join([*shlex.split(slurm.container or ""), slurm.python or python, *words]) + f" {target}"
    shared = "--cpu-bind=none --kill-on-bad-exit=0"
    end = " &" if background else ""
    if slurm.samplers is None or nodes is not None:
        first = resources if nodes is None else resources.model_copy(update={"nodes": nodes})
        return [f"srun {_tasks(first)} {shared} \\", f"  {told}{end}"]
    return [
        f"srun --het-group=0 {_tasks(resources)} {shared} \\",
        f"  {told} \\",
        f"  : --het-group=1 {_tasks(slurm.samplers)} {shared} \\",
        f"  {told}{end}",
    ]


def _tasks(nodes: Nodes) -> str:
    return f"--ntasks={nodes.nodes} --ntasks-per-node=1 --cpus-per-task={nodes.cpus}"


def secret_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are written to no script."""
    return {name: value for name, value in environment.items() if looks_secret(name)}


def _can_be_escaped(path: str) -> bool:
    """Whether sbatch understands the path in an #SBATCH line: a backslash in it would switch off its %j."""
    return path.isprintable() and "\\" not in path


def _escaped(text: str) -> str:
    """As sbatch reads it from an #SBATCH line, whose quotes are nearly a shell's."""
    if _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
