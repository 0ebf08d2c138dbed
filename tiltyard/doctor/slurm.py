"""Checks of what this site's Slurm allows: whether it answers, requeue, preemption, the time to save, arrays."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

from tiltyard.doctor.finding import Finding
from tiltyard.slurm.commands import environment

SHORT_KILL_WAIT = 15  # seconds from SIGTERM to SIGKILL: a save of a large model takes longer
TIMEOUT = 20.0
ABSENT = "no Slurm at hand"


def settings() -> dict[str, str] | None:
    """`scontrol show config`, by name; empty where Slurm does not answer, None where there is none."""
    if shutil.which("scontrol") is None:
        return None
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"],
            env=environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    if done.returncode != 0:
        return {}
    pairs = (re.match(r"(\w+)\s*=\s*(.*?)\s*$", line) for line in done.stdout.splitlines())
    return {pair[1]: pair[2] for pair in pairs if pair}


@cache
def _known() -> dict[str, str] | None:
    return settings()


def check_slurm() -> Finding:
    known = _known()
    if known is None:
        return Finding("slurm", "ok", ABSENT)
    if not known:
        hint = "wait, or tell the site: jobs can neither be submitted nor looked at now"
        return Finding("slurm", "note", "its controller gives no answer", hint)
    return Finding("slurm", "ok", f"cluster {known.get('ClusterName', '?')}, {known.get('SLURM_VERSION', '?')}")


def check_requeue() -> Finding:
    """Whether a job may go back into the queue, and how often."""
    known = _known()
    if not known:
        return Finding("requeue", "ok", ABSENT if known is None else "not known")
    most = known.get("MaxBatchRequeue", "")
    if known.get("JobRequeue") == "0":
        hint = "nothing to do: a job that may not be requeued submits itself again"
        return Finding("requeue", "note", "JobRequeue=0: not unless a job asks for it", hint)
    return Finding("requeue", "ok", f"jobs may be requeued{f', MaxBatchRequeue={most}' if most else ''}")


def check_preemption() -> Finding:
    """How jobs are taken off their nodes, and how long they have to save."""
    known = _known()
    if not known:
        return Finding("preemption", "ok", ABSENT if known is None else "not known")
    mode = known.get("PreemptMode", "OFF")
    seconds = re.match(r"\d+", known.get("KillWait", ""))
    found = f"PreemptMode={mode}, KillWait={known.get('KillWait', '?')}"
    if seconds and int(seconds[0]) < SHORT_KILL_WAIT:
        hint = "a job that is preempted or cancelled may be killed while it saves: set save.seconds lower"
        return Finding("preemption", "note", found, hint)
    return Finding("preemption", "ok", found)


def check_arrays() -> Finding:
    known = _known()
    if not known:
        return Finding("arrays", "ok", ABSENT if known is None else "not known")
    most = known.get("MaxArraySize", "")
    if most.isdecimal() and int(most) < 2:
        return Finding("arrays", "note", f"MaxArraySize={most}: none", "submit the runs one by one")
    return Finding("arrays", "ok", f"MaxArraySize={most or '?'}")
