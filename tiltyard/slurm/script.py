"""The script of a Slurm job as text: a pure function of run and profile.

    script(job)                          #SBATCH lines, the profile's setup, one agent per node, requeue or exit
    header_lines, setup_lines, step_lines   its parts, also used by doctor jobs

In an array's script the task number selects the run, and a tick of the sweep follows each trial.
Every name from a user is quoted or read from a file; the shell never evaluates it. `script_text` makes the text of
every generated script and refuses a line with a control character: part of a name would be a line of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiltyard.config.site import ENTERED, Nodes, Profile
from tiltyard.errors import UseError
from tiltyard.run.redact import looks_secret
from tiltyard.run.status import root_of
from tiltyard.slurm import FOLDER, JOB_NUMBER, JOB_VARIABLE, NEVER_SUBMITTED, SCRIPT, SECRETS, TRIALS

CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")  # all but the tab
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,+@%-]+")
RUN_AGAIN = 10  # exit code of a sweep tick: run this task's trial again in the same job


@dataclass(frozen=True)
class Array:
    """An array job with one task per trial; the file `trials` in its folder lists them."""

    tasks: int
    at_once: int
    pause: float = 0.0
    """seconds between the starts of two tasks"""


@dataclass(frozen=True)
class Job:
    """A run, or an array of trials, with its profile. `folder` is the run's or the array's."""

    name: str
    folder: Path
    profile: Profile
    python: str = sys.executable
    excluded: tuple[str, ...] = ()
    """nodes to exclude besides the profile's"""
    array: Array | None = None


def script(job: Job) -> str:
    """The whole script of a run's job or of an array."""
    return script_text([*_preamble(job), *_run_agents(job), *_requeue(job)])


def script_text(lines: Iterable[str]) -> str:
    """The text of a script; UseError for a line with a control character, which could begin another line."""
    text = ""
    for line in lines:
        if CONTROL.search(line):
            hint = "remove it from the setting or the folder's name"
            raise UseError(f"a line of the job script contains a control character: {line!r}", hint)
        text += f"{line}\n"
    return text


def quoted(text: str) -> str:
    """A word for bash, on one line: with control characters it is written with escapes."""
    if not CONTROL.search(text):
        return shlex.quote(text)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{''.join(plain)}'"


def _preamble(job: Job) -> list[str]:
    """#SBATCH lines and setup, then the script's own variables: a setup may use any variable names."""
    profile, folder, array = job.profile, job.folder, job.array
    can_escape = str(folder).isprintable() and "\\" not in str(folder)  # a backslash would disable sbatch's %j
    output = str(folder).replace("%", "%%") + ("/%a.out" if array else "/logs/job-%j.out")
    title = f"{one_line(job.name)}, profile {one_line(profile.name)}"
    if array is None:
        root, place = root_of(folder), quoted(str(folder))
        redirect = [] if can_escape else [f'exec >>{place}/logs/job-"$SLURM_JOB_ID".out 2>&1']
        comment, variables = f"# Run {title}. It can also be submitted by hand.", [f"run={place}", *_ID]
    else:
        root, variables, redirect = folder.parents[3], _task_variables(folder), _task_log(folder)
        comment = f"# Trials {title}. One can also be submitted by hand: sbatch --array=TASK {SCRIPT}"
    return [
        *header_lines(profile, job.name, output if can_escape else "/dev/null", excluded=job.excluded, array=array),
        "",
        comment,
        *redirect,
        *setup_lines(profile, quoted(str((folder if array else folder / FOLDER) / SECRETS))),
        f"export {ENTERED}={quoted(profile.name)} TILTYARD_RUNS={quoted(str(root))}",
        "",
        *variables,
    ]


_ID = ("id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}", "id=${id:-$SLURM_JOB_ID}")
_LINE = '"$((SLURM_ARRAY_TASK_ID + 1))p"'


def _task_log(folder: Path) -> list[str]:
    log = '"$trial/logs/job-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out"'
    return [
        f"trial=$(sed -n {_LINE} {quoted(str(folder / TRIALS))})",
        f"exec >>{quoted(str(folder.parents[1]))}/{log} 2>&1",
    ]


def _task_variables(folder: Path) -> list[str]:
    """Find the task's trial. Tasks write the array's job id too, in case the submitting process died before it did."""
    return [
        f"array={quoted(str(folder))} sweep={quoted(str(folder.parents[1]))}",
        f'run=$sweep/$(sed -n {_LINE} "$array/{TRIALS}")',
        *_ID,
        f'[ ! -e "$array/{NEVER_SUBMITTED}" ] || exit 0',
        f'[ -s "$array/{JOB_NUMBER}" ] || echo "$SLURM_ARRAY_JOB_ID" >"$array/.$id"',
        f'[ ! -e "$array/.$id" ] || mv "$array/.$id" "$array/{JOB_NUMBER}"',
        f'export {JOB_VARIABLE}="slurm/${{array##*/}}"',
    ]


def pause_lines(seconds: float, place: str) -> list[str]:
    """Let the trials of a sweep start one after another, so many seconds apart. One that had to wait for ten minutes
    starts anyway: the one before it may be suspended."""
    if not seconds:
        return []
    return [f'( umask 077; exec 9>>"$sweep/{place}/pause"; flock -w 600 9; sleep {seconds:g} )']


# A hung node would hold the others until the time limit, so agents are killed a minute after the verdict.
_GUARD = '(until [ -s "$run/job/verdict" ]; do sleep 5; done; sleep 60; kill "$agents" 2>/dev/null) & guard=$!'


def _run_agents(job: Job) -> list[str]:
    """Start the agents and read the first one's verdict; in an array, loop while a tick wants the trial again."""
    array, several = job.array, bool(_node_names(job.profile))
    lines = [
        "# The time limit, for agents that Slurm does not signal in time.",
        ': "${SLURM_JOB_END_TIME:=$(SLURM_TIME_FORMAT=%s squeue -h -j "$id" -o %e)}"',
        "export SLURM_JOB_END_TIME",
        *_node_names(job.profile),
        *(pause_lines(array.pause, "slurm") if array else []),
        "",
        *([] if array is None else ["while of=; do"]),
        "# One agent on every node. Signals are for the agents; this shell ignores them and waits.",
        *(['rm -f "$run/job/verdict"'] if several else []),
        *step_lines(job.profile, ["-m", "tiltyard.slurm.node_agent"], '"$run"', python=job.python, background=True),
        "agents=$!",
        "trap 'scancel --signal=TERM \"$id\" 2>/dev/null' TERM INT  # srun itself would kill them at once",
        "trap : USR2",
        *([_GUARD] if several else []),
        'while wait "$agents"; code=$?; kill -0 "$agents" 2>/dev/null; do :; done',
        *(['kill "$guard" 2>/dev/null'] if several else []),
        "",
        "# The verdict of the first node's agent, if it belongs to this start of the job.",
        'read -r of restart verdict 2>/dev/null <"$run/job/verdict"',
        '[ "${of:-} ${restart:-}" = "$id ${SLURM_RESTART_COUNT:-0}" ] || verdict=none',
        'echo "job $id: ${verdict:-none} (exit code $code)"',
        "# Ended while saving: by the time limit, or by scancel?",
        '[ "${verdict:-}" = late ] && [ "$(squeue -h -j "$id" -o %r)" = TimeLimit ] && verdict=requeue',
    ]
    if array is None:
        return [*lines, '[ "${verdict:-none}" = requeue ] || exit "$code"']
    return [
        *lines,
        '[ "${verdict:-none}" = requeue ] && break',
        "# A tick of the sweep decides what comes next; it may be this trial again.",
        tick_command(job.profile, job.python),
        f'[ $? = {RUN_AGAIN} ] || exit "$code"',
        "done",
    ]


def tick_command(profile: Profile, python: str) -> str:
    """A tick of the trial's sweep, outside any container, where jobs can be submitted."""
    chosen = python if profile.slurm.container else profile.slurm.python or python
    return f'{quoted(chosen)} -m tiltyard.sweep.tick "$sweep" --own "$run"'


def _requeue(job: Job) -> list[str]:
    """Requeue the job, or submit the same script again where requeueing is forbidden."""
    again, name = '"$run/job/script.sh"', "${again%%;*}"
    if job.array is not None:
        again, name = '--array="$task" "$array/script.sh"', "${again%%;*}_$task"
    return [
        'scontrol requeue "$id" && exit 0',
        'echo "job $id cannot be requeued; submitting the same script again"',
        *([] if job.array is None else ["task=$SLURM_ARRAY_TASK_ID"]),
        "again=$(conf=${SLURM_CONF-}",
        '  unset "${!SLURM_@}" "${!SBATCH_@}"',
        '  [ -z "$conf" ] || export SLURM_CONF="$conf"',
        f'  sbatch --parsable {again}) || {{ echo "continue with: tiltyard resume $run"; exit 1; }}',
        f'echo "{name}" >"$run/job/submitted-again"',
        f'echo "job {name} continues the run"',
    ]


def _node_names(profile: Profile) -> list[str]:
    """The job's node names, for error messages of agents; only this script is sure to have Slurm's commands."""
    if profile.slurm.samplers is not None:
        listed = "$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"
    elif profile.resources.nodes > 1:
        listed = "$SLURM_JOB_NODELIST"
    else:
        return []
    return [f'export TILTYARD_NODES=$(scontrol show hostnames "{listed}" | paste -sd,)']


def header_lines(
    profile: Profile,
    name: str,
    output: str,
    *,
    time: str | None = None,
    requeue: bool = True,
    excluded: Sequence[str] = (),
    array: Array | None = None,
) -> list[str]:
    """The #! line and the #SBATCH lines. `output` is an sbatch file pattern; `time` replaces the profile's."""
    lines = [
        f"--job-name={_escaped(one_line(name))}",
        f"--output={_escaped(output)}",
        "--open-mode=append",
        *([f"--array=0-{array.tasks - 1}%{array.at_once}"] if array is not None else []),
        *(["--requeue", f"--signal=USR2@{profile.lead:.0f}"] if requeue else ["--no-requeue"]),
        *resource_options(profile, time=time, excluded=excluded),
    ]
    if (samplers := profile.slurm.samplers) is not None:
        partition = samplers.partition or profile.slurm.partition
        lines += ["hetjob", *_group_options(samplers, partition, samplers.constraint)]
    return ["#!/bin/bash", *(f"#SBATCH {line}" for line in lines)]


def with_nodes(profile: Profile, count: int) -> Profile:
    """The profile with `count` nodes and no samplers."""
    resources = profile.resources.model_copy(update={"nodes": count})
    slurm = profile.slurm.model_copy(update={"samplers": None})
    return profile.model_copy(update={"resources": resources, "slurm": slurm})


def resource_options(profile: Profile, *, time: str | None = None, excluded: Sequence[str] = ()) -> list[str]:
    """The resource options that sbatch and srun share; `slurm.extra` unchanged."""
    slurm, resources = profile.slurm, profile.resources
    names = ",".join(word for word in (slurm.exclude, *excluded) if word)
    return [
        *_option("time", time or resources.time),
        *_option("account", slurm.account),
        *_option("qos", slurm.qos),
        *_option("exclude", names),
        *slurm.extra,
        *_group_options(resources, slurm.partition, slurm.constraint),
    ]


def _group_options(nodes: Nodes, partition: str | None, constraint: str | None) -> list[str]:
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
    """The profile's setup and variables. `secrets` is the quoted path of the file with the secret ones."""
    hidden = secret_environment(profile.environment)
    shown = {name: value for name, value in profile.environment.items() if name not in hidden}
    kept = profile.slurm.keep_ld_preload
    warn = 'echo "LD_PRELOAD=$LD_PRELOAD is unset because it breaks Ray (slurm.keep_ld_preload: true keeps it)"'
    return [
        *(line for lines in profile.slurm.setup for line in lines.split("\n")),
        "set -uo pipefail",  # after the site's own scripts, many of which fail with it
        "export PYTHONUNBUFFERED=1",
        *(f"export {name}={quoted(value)}" for name, value in shown.items()),
        *([f". {secrets}"] if hidden and secrets else []),
        *([] if kept else [f'[ -z "${{LD_PRELOAD:-}}" ] || {{ {warn}; unset LD_PRELOAD; }}']),
    ]


def step_lines(
    profile: Profile, words: Sequence[str], target: str, *, python: str = sys.executable, background: bool = False
) -> list[str]:
    """One `srun` that runs Python with `words` once on every node; `target` must be quoted already."""
    slurm, resources = profile.slurm, profile.resources
    named = [*shlex.split(slurm.container or ""), slurm.python or python, *words]
    command = " ".join([*map(quoted, named), target])
    shared = "--cpu-bind=none --kill-on-bad-exit=0"
    end = " &" if background else ""
    if slurm.samplers is None:
        return [f"srun {_tasks(resources)} {shared} \\", f"  {command}{end}"]
    return [
        f"srun --het-group=0 {_tasks(resources)} {shared} \\",
        f"  {command} \\",
        f"  : --het-group=1 {_tasks(slurm.samplers)} {shared} \\",
        f"  {command}{end}",
    ]


def _tasks(nodes: Nodes) -> str:
    return f"--ntasks={nodes.nodes} --ntasks-per-node=1 --cpus-per-task={nodes.cpus}"


def secret_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must not appear in a script."""
    return {name: value for name, value in environment.items() if looks_secret(name)}


def _escaped(text: str) -> str:
    """Quote a value for an #SBATCH line, whose quoting is almost the shell's."""
    if _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def one_line(text: str) -> str:
    """A name for a comment or an option, with ? for what is not printable."""
    return "".join(each if each.isprintable() else "?" for each in text)
