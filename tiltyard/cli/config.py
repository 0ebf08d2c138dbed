"""`config show`, `schema` and `reference`: settings in effect, the JSON schema, the reference page."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tiltyard.cli.arguments import add
from tiltyard.errors import UseError


def configure_show(parser: argparse.ArgumentParser) -> None:
    add(parser, "target", "overrides")
    about = "print where each value comes from, and the site file in effect"
    parser.add_argument("--origin", action="store_true", help=about)
    add(parser, "--json")
    add(parser, "--on", help="apply a profile of the site file")


def run_show(args: argparse.Namespace) -> None:
    from tiltyard.config.load import load, resolved_yaml
    from tiltyard.config.site import load_site, pick_profile

    profile = None
    if args.on:
        site, path = load_site()
        profile = pick_profile(site, args.on, path)
    loaded = load(args.target, args.overrides, profile=profile)
    for warning in loaded.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    values = loaded.experiment.model_dump(mode="json", by_alias=True)
    if args.json:
        shown: Any = values
        if args.origin:
            shown = {"experiment": values, "origins": loaded.origins, "site": _site_file()[0]}
        sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    elif args.origin:
        used, why_not = _site_file()
        sys.stdout.write(f"{_origin_table(values, loaded.origins)}site file: {used or 'none'}{why_not}\n")
    else:
        sys.stdout.write(resolved_yaml(loaded.experiment))


def _site_file() -> tuple[str | None, str]:
    """The path of the site file in effect; if there is none because it is refused, the reason."""
    from tiltyard.config.site_file import find_site

    try:
        path = find_site()
    except UseError as error:
        return None, f" ({error.message})"
    return (str(path) if path else None), ""


def _origin_table(values: dict[str, Any], origins: dict[str, str]) -> str:
    """A table with one line per value: name, value, origin."""
    from tiltyard.config.fields import flat
    from tiltyard.config.reference import inline

    rows = [(".".join(path), inline(value), origins[".".join(path)]) for path, value in flat(values)]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(40, max(len(value) for _, value, _ in rows))
    return "".join(f"{name:<{name_width}}  {value:<{value_width}}  {origin}\n" for name, value, origin in rows)


def configure_schema(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Write it to a file, and name that file in the YAML settings of your editor."


def run_schema(args: argparse.Namespace) -> None:
    from tiltyard.config.reference import schema

    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")


def configure_reference(parser: argparse.ArgumentParser) -> None:
    add(parser, "--json")


def run_reference(args: argparse.Namespace) -> None:
    from tiltyard.config.reference import describe, reference_page

    if args.json:
        rows = [dict(zip(("setting", "type", "default", "meaning"), row, strict=True)) for row in describe()]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        sys.stdout.write(reference_page())
