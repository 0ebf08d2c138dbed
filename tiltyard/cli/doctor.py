"""`doctor` and `version`: check this machine or the nodes of a profile, with a hint for everything that is missing."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from tiltyard import __version__
from tiltyard.cli.arguments import add
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, UseError
from tiltyard.run.provenance import package_version

if TYPE_CHECKING:
    from tiltyard.doctor.finding import Finding


def configure_version(parser: argparse.ArgumentParser) -> None:
    add(parser, "--json", help="print JSON, with the versions of Python and the main packages")


def run_version(args: argparse.Namespace) -> None:
    if args.json:
        packages = {name: package_version(name) for name in ("torch", "gymnasium", "numpy", "pydantic", "pyarrow")}
        whole = {"tiltyard": __version__, "python": platform.python_version(), **packages}
        sys.stdout.write(json.dumps(whole) + "\n")
    else:
        sys.stdout.write(f"{__version__}\n")


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    add(parser, "--on", help="check the nodes of this profile, by a short job")
    parser.add_argument("--nodes", metavar="NODES", help="with --on: only these nodes, in Slurm's form: node[3,7-9]")
    about = "first remove files that dead processes left on this machine"
    parser.add_argument("--clean", action="store_true", help=about)
    add(parser, "--json")


def run_doctor(args: argparse.Namespace) -> int:
    if args.nodes and not args.on:
        raise UseError("--nodes selects nodes of a profile", "name the profile with --on")
    if args.on and args.clean:
        raise UseError("--clean works on this machine only", "remove --on")
    if args.on:
        return _visit(args)
    from tiltyard.doctor.checkup import run_checks
    from tiltyard.doctor.storage import remove_leftovers

    if args.clean:
        for path in remove_leftovers():
            sys.stderr.write(f"removed {path}\n")
    findings = []
    for finding in run_checks():
        findings.append(finding)
        if not args.json:
            _print(finding)
    return _end(findings, args)


def _visit(args: argparse.Namespace) -> int:
    """The checks on the profile's nodes: by node what needs attention, and one line for each that is well."""
    from tiltyard.cli.jobs import job_profile
    from tiltyard.config.site_file import runs_root
    from tiltyard.doctor import bad_nodes
    from tiltyard.doctor.nodes import check_nodes

    profile = job_profile(args.on)
    if profile is None:
        raise UseError(f"profile {args.on} submits no jobs (launcher: local)", "without --on, this machine is checked")
    root = runs_root()
    findings = check_nodes(profile, root, args.nodes, lambda sentence: sys.stderr.write(f"{sentence}\n"))
    for change in bad_nodes.record_findings(root, findings):
        sys.stderr.write(f"{change}\n")
    if not args.json:
        _print_nodes(findings)
    return _end(findings, args)


def _print_nodes(findings: Sequence[Finding]) -> None:
    """A line for every node that is well, what is wrong on some of them, and once what is wrong on all."""
    nodes = list(dict.fromkeys(finding.node for finding in findings))
    seen = Counter(replace(finding, node="") for finding in findings)
    for node in nodes:
        of_node = [finding for finding in findings if finding.node == node]
        if not any(finding.state == "bad" for finding in of_node):
            fine = sum(finding.state == "ok" for finding in of_node)
            sys.stdout.write(f"ok    {node:<10} {fine} of {len(of_node)} checks are ok\n")
        for finding in of_node:
            if finding.state != "ok" and (len(nodes) == 1 or seen[replace(finding, node="")] < len(nodes)):
                _print(finding)
    for finding, count in seen.items():
        if finding.state != "ok" and count == len(nodes) > 1:
            _print(replace(finding, node=f"all {count}"))


def _print(finding: Finding) -> None:
    where = f"{finding.node:<10} " if finding.node else ""
    sys.stdout.write(f"{finding.state:<5} {where}{finding.what:<10} {finding.found}\n")
    if finding.hint:
        sys.stdout.write(f"{'':<{16 + len(where)}} hint: {finding.hint}\n")
    sys.stdout.flush()


def _end(findings: Sequence[Finding], args: argparse.Namespace) -> int:
    if args.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    return EXIT_FAILED if any(finding.state == "bad" for finding in findings) else EXIT_DONE
