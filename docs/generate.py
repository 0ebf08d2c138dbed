"""Writes the reference pages that are read off the code: `python docs/generate.py`, or `make docs`.

    docs/reference/settings.md    every setting, from the settings classes
    docs/reference/plans.md       every setting of a sweep's plan, from its class
    docs/reference/metrics.md     every metric, from the table in tiltyard.run.metrics
    the tables of floors          in docs/concepts/architecture.md and CONTRIBUTING.md, from docs/floors.py

A test compares the pages with what this script would write. Everything else in docs/ is written by hand.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from tiltyard.config import reference
from tiltyard.run import metrics

DOCS = Path(__file__).parent
HERE = DOCS / "reference"
WITH_FLOORS = (DOCS / "concepts" / "architecture.md", DOCS.parent / "CONTRIBUTING.md")
MARKED = re.compile(r"(?<=<!-- floors: written by docs/generate.py -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)

METRICS = """# Metrics

Written by `python docs/generate.py`.
Every record of `metrics.jsonl` holds some of these under `metrics`. TensorBoard and W&B get the same names.
Losses and the like are there once per update; `eval/...` where an evaluation was made.

"""
PLANS = """# Plans of sweeps

Written by `python docs/generate.py`. [Sweeps](../guides/sweeps.md) shows them at work.
`metric: eval/return` is short for `metric: {name: eval/return}`.

"""


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    return {
        HERE / "settings.md": reference.reference_page(),
        HERE / "plans.md": PLANS + reference.plan_page(),
        HERE / "metrics.md": METRICS + metrics.reference_page(),
        **{path: with_floors(path.read_text(encoding="utf-8")) for path in WITH_FLOORS},
    }


def with_floors(text: str) -> str:
    """The page with the table of floors between its two marks."""
    table = runpy.run_path(str(DOCS / "floors.py"))["table"]()
    written, places = MARKED.subn(lambda _: table, text)
    if places != 1:
        raise SystemExit("error: the marks of the table of floors are missing")
    return written


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        sys.stderr.write(f"wrote {path}\n")
