"""Nodes that the doctor found bad, with date and reason, until they pass again.

Kept in the runs folder. Jobs of profiles with `slurm.exclude_failed: true` exclude them. The names become a line of the
job's script, so another user's list is ignored, and so is everything that cannot be the name of a node.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tiltyard.config.ownership import find_foreign
from tiltyard.config.site import Profile
from tiltyard.doctor.finding import Finding
from tiltyard.run import atomic

PLACE = ".doctor"
FILE = "nodes.json"
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


def bad_nodes(root: Path) -> dict[str, str]:
    """Bad nodes and why: node7 -> 2026-03-01: shm: /dev/shm, 3 MiB free."""
    path = root / PLACE / FILE
    if foreign := find_foreign(path, path.parent):
        sys.stderr.write(f"warning: {path} is ignored: {foreign.path} belongs to another user, {foreign.owner}\n")
        return {}
    try:
        found = atomic.read_json(path)
    except (OSError, ValueError):
        return {}
    wrong = [name for name, why in found.items() if not _NODE.fullmatch(name) or not isinstance(why, str)]
    if wrong:
        sys.stderr.write(f"warning: {path}: {', '.join(map(repr, wrong[:5]))} cannot be a bad node and is ignored\n")
    return {name: why for name, why in found.items() if name not in wrong}


def excluded_nodes(profile: Profile, root: Path) -> dict[str, str]:
    """The bad nodes that a job with this profile excludes, and why."""
    return bad_nodes(root) if profile.slurm.exclude_failed else {}


def record_findings(root: Path, findings: Sequence[Finding]) -> list[str]:
    """Update the list of bad nodes; returns the changes as sentences.

    A problem that all of several nodes have belongs to the site or the profile, so it marks no node.
    """
    known, changes = bad_nodes(root), []
    visited = list(dict.fromkeys(finding.node for finding in findings))
    affected = Counter(what for what, _ in {(each.what, each.node) for each in findings if each.state == "bad"})
    for node in visited:
        bad = [each for each in findings if each.node == node and each.state == "bad"]
        own = [each for each in bad if len(visited) == 1 or affected[each.what] < len(visited)]
        if own:
            known[node] = f"{atomic.now()[:10]}: {own[0].what}: {own[0].found}"
            changes.append(f"{node} is marked as bad; slurm.exclude_failed: true excludes it from jobs")
        elif not bad and known.pop(node, None) is not None:
            changes.append(f"{node} passed and was removed from the bad nodes")
    if changes:
        (root / PLACE).mkdir(parents=True, exist_ok=True)
        atomic.write_json(root / PLACE / FILE, known)
    return changes
