"""`config`: the resolved settings of an experiment, the JSON schema and the reference page.

show TARGET [key=value ...] [--origin] [--json] [--on PROFILE]     reads files, imports no plug-in
schema                                                             JSON schema for editors
reference                                                          every setting, as Markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tiltyard.errors import EXIT_DONE, UseError, did_you_mean

VERBS = ("show", "schema", "reference")


def configure_config(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard config`."""
    parser.add_argument("what", metavar="show|schema|reference", help="what to print")
    parser.add_argument("target", nargs="?", help="show: experiment file (YAML) or env id")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="show: changed settings, e.g. algo.lr=3e-4")
    parser.add_argument("--origin", action="store_true", help="show: print where each value comes from")
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML or a table")
    parser.add_argument("--on", metavar="PROFILE", help="show: apply a profile of the site file")


def run_config(args: argparse.Namespace) -> int:
    """Run `show`, `schema` or `reference`."""
    if args.what not in VERBS:
        raise UseError(f"unknown action {args.what!r} of `tiltyard config`", did_you_mean(args.what, VERBS))
    if args.what == "show":
        return _show(args)
    extra = [flag for flag, given in (("--origin", args.origin), ("--on", args.on)) if given]
    if args.target or args.overrides or extra:
        unwanted = args.target or (args.overrides or extra)[0]
        raise UseError(f"config {args.what} does not take {unwanted!r}", f"tiltyard config {args.what}")
    from tiltyard.config.reference import describe, reference_page, schema

    if args.what == "schema":
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    elif args.json:
        rows = [dict(zip(("setting", "type", "default", "meaning"), row, strict=True)) for row in describe()]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        sys.stdout.write(reference_page())
    return EXIT_DONE


def _show(args: argparse.Namespace) -> int:
    from tiltyard.config.load import load, resolved_yaml
    from tiltyard.config.site import load_site, pick_profile

    if args.target is None:
        raise UseError("config show needs a YAML file or an env id", "tiltyard config show CartPole-v1")
    profile = None
    if args.on:
        site, path = load_site()
        profile = pick_profile(site, args.on, path)
    loaded = load(args.target, args.overrides, profile=profile)
    for warning in loaded.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    values = loaded.experiment.model_dump(mode="json", by_alias=True)
    if args.json:
        shown: Any = {"experiment": values, "origins": loaded.origins} if args.origin else values
        sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    elif args.origin:
        sys.stdout.write(_origin_table(values, loaded.origins))
    else:
        sys.stdout.write(resolved_yaml(loaded.experiment))
    return EXIT_DONE


def _origin_table(values: dict[str, Any], origins: dict[str, str]) -> str:
    """A table with one line per value: name, value, origin."""
    from tiltyard.config.fields import flat
    from tiltyard.config.reference import inline

    rows = [(".".join(path), inline(value), origins[".".join(path)]) for path, value in flat(values)]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(40, max(len(value) for _, value, _ in rows))
    return "".join(f"{name:<{name_width}}  {value:<{value_width}}  {origin}\n" for name, value, origin in rows)
