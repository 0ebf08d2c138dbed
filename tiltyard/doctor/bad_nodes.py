"""Nodes that the doctor found bad, with the day and the reason, until it finds them well again.

Kept below the runs folder, which a cluster's users have one of. Profiles with `slurm.exclude_failed` leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiltyard.config.site import Profile
from tiltyard.doctor.finding import Finding
from tiltyard.run import atomic

PLACE = ".doctor"
FILE = "nodes.json"


def bad_nodes(root: Path) -> dict[str, str]:
    """Why, by name: node7 -> 2026-03-01: shm: /dev/shm, 3 MiB free."""
    try:
        found = atomic.read_json(root / PLACE / FILE)
    except (OSError, ValueError):
        return {}
    return {name: why for name, why in found.items() if isinstance(why, str)}


def excluded_nodes(profile: Profile, root: Path) -> dict[str, str]:
    """Those that a job with this profile leaves out, and why."""
    return bad_nodes(root) if profile.slurm.exclude_failed else {}


def record_findings(root: Path, findings: Sequence[Finding]) -> list[str]:
    """Remember what was found of each node; returns what has changed, as sentences.

    What is wrong on every one of several nodes is the site's or the profile's fault, and no node is remembered for it.
    """
    known = bad_nodes(root)
    visited = list(dict.fromkeys(finding.node for finding in findings))
    said = []
    for node in visited:
        bad = [each for each in findings if each.node == node and each.state == "bad"]
        own = [each for each in bad if len(visited) == 1 or not _everywhere(each.what, findings, visited)]
        if own:
            known[node] = f"{atomic.now()[:10]}: {own[0].what}: {own[0].found}"
            said.append(f"{node} is remembered as bad; slurm.exclude_failed: true leaves it out of jobs")
        elif not bad and known.pop(node, None) is not None:
            said.append(f"{node} is well again, and no longer left out")
    if said:
        (root / PLACE).mkdir(parents=True, exist_ok=True)
        atomic.write_json(root / PLACE / FILE, known)
    return said


def _everywhere(what: str, findings: Sequence[Finding], visited: Sequence[str]) -> bool:
    return {each.node for each in findings if each.what == what and each.state == "bad"} == set(visited)
