"""Checks of the site's Slurm: whether it answers, requeue, preemption and the time to save, arrays."""

from __future__ import annotations

import re
from functools import cache

from tiltyard.doctor.finding import Finding
from tiltyard.slurm.job_state import site_config

SHORT_KILL_WAIT = 15  # seconds from SIGTERM to SIGKILL; saving a large model takes longer
ABSENT = "Slurm not found"

_known = cache(site_config)


def check_slurm() -> Finding:
    known = _known()
    if known is None:
        return Finding("slurm", "ok", ABSENT)
    if not known:
        hint = "wait, or ask the site's administrators: jobs can be neither submitted nor listed now"
        return Finding("slurm", "note", "the controller does not answer", hint)
    return Finding("slurm", "ok", f"cluster {known.get('ClusterName', '?')}, {known.get('SLURM_VERSION', '?')}")


def check_requeue() -> Finding:
    """Whether jobs may be requeued, and how often."""
    known = _known()
    if not known:
        return Finding("requeue", "ok", ABSENT if known is None else "unknown")
    most = known.get("MaxBatchRequeue", "")
    if known.get("JobRequeue") == "0":
        hint = "nothing to do: a job that cannot be requeued is submitted again"
        return Finding("requeue", "note", "JobRequeue=0: only jobs that request it are requeued", hint)
    return Finding("requeue", "ok", f"jobs may be requeued{f', MaxBatchRequeue={most}' if most else ''}")


def check_preemption() -> Finding:
    """How jobs are preempted, and how long they have to save."""
    known = _known()
    if not known:
        return Finding("preemption", "ok", ABSENT if known is None else "unknown")
    mode = known.get("PreemptMode", "OFF")
    seconds = re.match(r"\d+", known.get("KillWait", ""))
    found = f"PreemptMode={mode}, KillWait={known.get('KillWait', '?')}"
    if seconds and int(seconds[0]) < SHORT_KILL_WAIT:
        hint = "a preempted or cancelled job may be killed while it saves: use a smaller save.seconds"
        return Finding("preemption", "note", found, hint)
    return Finding("preemption", "ok", found)


def check_arrays() -> Finding:
    known = _known()
    if not known:
        return Finding("arrays", "ok", ABSENT if known is None else "unknown")
    most = known.get("MaxArraySize", "")
    if most.isdecimal() and int(most) < 2:
        return Finding("arrays", "note", f"MaxArraySize={most}: job arrays are disabled", "submit the runs one by one")
    return Finding("arrays", "ok", f"MaxArraySize={most or '?'}")
