"""The floors of the package, top to bottom: what the tables in the documents show and what a test enforces.

Imports point down or stay on their floor. Entries ending in "/" are packages, the others are modules.
"""

from __future__ import annotations

from typing import NamedTuple


class Floor(NamedTuple):
    number: int
    entries: tuple[str, ...]
    owns: str


FLOORS = (
    Floor(
        7,
        ("cli/", "testing", "__init__", "__main__"),
        "faces: the commands, checks for your own envs, the Python names",
    ),
    Floor(
        6, ("slurm/", "sweep/", "doctor/"), "many runs and many machines: jobs, sweeps, what a machine has and lacks"
    ),
    Floor(
        5,
        ("training/", "evaluation/", "collection/", "tuning/", "api"),
        "activities: train a run, measure a policy, collect data, measure a machine",
    ),
    Floor(4, ("engines/",), "the processes that learn"),
    Floor(3, ("envs/", "models/", "algos/", "data/"), "pieces of learning"),
    Floor(2, ("run/", "processes/", "track/"), "things on disk, child processes, the console and trackers"),
    Floor(1, ("config/", "plugins/"), "what an experiment says; names in it to objects"),
    Floor(0, ("types", "errors", "failures"), "the words everything else uses"),
)


def table() -> str:
    """The floors as a Markdown table."""
    rows = ["| floor | modules | what it owns |", "| --- | --- | --- |"]
    for floor in FLOORS:
        entries = ", ".join(f"`{entry}`" for entry in floor.entries if not entry.startswith("__"))
        rows.append(f"| {floor.number} | {entries} | {floor.owns} |")
    return "\n".join(rows) + "\n"
