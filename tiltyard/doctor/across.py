"""What only nodes side by side show: other versions, clocks that differ, and who cannot reach whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tiltyard.doctor.finding import Finding
from tiltyard.doctor.system import OFF

Reports = Mapping[str, Mapping[str, Any]]
ALIKE = ("python", "tiltyard", "torch", "numpy", "gymnasium", "ray")  # where they differ, nodes do not work together


def compare(reports: Reports) -> list[Finding]:
    """A finding of each kind for every node, by name."""
    if len(reports) < 2:
        return []
    wrong = [*_versions(reports), *_clocks(reports), *_reach(reports)]
    return [
        finding
        for node in sorted(reports)
        for what, fine in (
            ("versions", "as on the other nodes"),
            ("clocks", "as on the other nodes"),
            ("reach", f"{len(reports) - 1} other nodes reached, and by them"),
        )
        for finding in [each for each in wrong if (each.node, each.what) == (node, what)]
        or [Finding(what, "ok", fine, node=node)]
    ]


def _versions(reports: Reports) -> list[Finding]:
    """Against what most nodes have; the first by name where that is a tie."""
    found = []
    packages = sorted({package for report in reports.values() for package in report["versions"]})
    for package in packages:
        has = {node: reports[node]["versions"].get(package) for node in sorted(reports)}
        usual = Counter(has.values()).most_common(1)[0][0]
        for node, version in has.items():
            if version != usual:
                said = f"{package} {version or 'is not installed'}, and {usual or 'none'} on the other nodes"
                hint = "use one environment on a shared file system, or the same container (slurm.setup, slurm.python)"
                found.append(Finding("versions", "bad" if package in ALIKE else "note", said, hint, node))
    return found


def _clocks(reports: Reports) -> list[Finding]:
    """A node whose clock most of the others see as wrong; of two that disagree, the second by name."""
    found = []
    nodes = sorted(reports)
    for node in nodes:
        seen = [reports[other]["clocks"][node] for other in nodes if node in reports[other]["clocks"]]
        off = sorted(seen)[len(seen) // 2] if seen else 0.0
        if abs(off) > OFF and not (len(nodes) == 2 and node == nodes[0]):
            said = f"{off:+.1f} s against the other nodes"
            found.append(Finding("clocks", "bad", said, "have the site set its clock (chronyc makestep)", node))
    return found


def _reach(reports: Reports) -> list[Finding]:
    """Blamed is who cannot be reached; but a node that reaches none of several others itself is the one to blame."""
    hint = "a firewall between the nodes, or a wrong address for its name: tell the site; Ray needs all ports"
    deaf = {
        node for node, report in reports.items() if len(reports) > 2 and len(report["unreached"]) == len(reports) - 1
    }
    found = [
        Finding("reach", "bad", f"cannot reach any other node: {', '.join(reports[node]['unreached'])}", hint, node)
        for node in sorted(deaf)
    ]
    for node in sorted(set(reports) - deaf):
        by = {other: report["unreached"][node] for other, report in reports.items() if node in report["unreached"]}
        if by := {other: why for other, why in by.items() if other not in deaf}:
            whys = "; ".join(f"from {other} ({why})" for other, why in sorted(by.items()))
            found.append(Finding("reach", "bad", f"cannot be reached {whys}", hint, node))
    return found
