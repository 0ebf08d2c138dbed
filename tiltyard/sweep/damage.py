"""What is damaged in a sweep's own files, and how the process that holds its lock repairs that.

sweep.json        read from its copy in events.jsonl, and written again
plan.yaml         refused: see Sweep.plan
manifest.jsonl    trials are read from their folders, or follow from the plan, and are added again
decisions.jsonl   lines are skipped; a population, whose history they are, is not continued
"""

from __future__ import annotations

from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import TiltyardError
from tiltyard.run import atomic
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.sweep.folder import DECISIONS, FACTS, MANIFEST, Sweep, read_facts


def find_damage(sweep: Sweep, plan: Plan) -> list[str]:
    """A sentence about each damaged file and line."""
    found = []
    try:
        read_facts(sweep.folder)
    except (OSError, ValueError) as error:
        found.append(f"{FACTS} ({error}); its copy in events.jsonl is used")
    for name, what in ((MANIFEST, "a trial"), (DECISIONS, "a decision")):
        found += [f"line {number} of {name}, {what}" for number in _broken_lines(sweep, name)]
    if plan.search == "population":
        from tiltyard.sweep.pbt.lineage import find_gaps

        found += find_gaps(sweep)
    return found


def repair(sweep: Sweep) -> None:
    """Write a damaged sweep.json again. Needs the sweep's lock."""
    try:
        read_facts(sweep.folder)
    except (OSError, ValueError) as error:
        atomic.write_sealed(sweep.folder / FACTS, sweep.facts())
        log_event(Run(sweep.folder), "recovered", f"{FACTS} was damaged ({error}); it was restored from its copy.")


def require_whole_history(sweep: Sweep) -> None:
    """TiltyardError if a decision of a population is lost: its members would continue with wrong settings."""
    if lines := _broken_lines(sweep, DECISIONS):
        raise lost_history(sweep, f"line {lines[0]} is damaged")


def lost_history(sweep: Sweep, why: str) -> TiltyardError:
    hint = "restore the file; the members are runs, which `tiltyard eval` and `tiltyard fork` can use alone"
    return TiltyardError(f"{sweep.folder / DECISIONS}, the history of the population, is incomplete: {why}", hint)


def _broken_lines(sweep: Sweep, name: str) -> list[int]:
    """Numbers (from 1) of damaged lines. A line that a crash tore was never acted on, and does not count."""
    path = sweep.folder / name
    broken = atomic.read_lines(path)[1]
    lines = path.read_bytes().split(b"\n") if broken else []
    return [number for number in broken if lines[number - 1].endswith(b"}")]
