"""One run alone that repeats what made a member of a population: all that its weights saw, one stretch after another.

It begins with the settings and the seed of the first of its ancestors, and changes both where a copy was made. With a
synchronous engine it comes to the same weights, to the bit; what replaced members did is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiltyard.algos.pbt import Settings
from tiltyard.errors import UseError
from tiltyard.run.folder import Run
from tiltyard.run.settings_schedule import Stretches
from tiltyard.sweep.folder import Sweep, Trial
from tiltyard.sweep.pbt import lineage
from tiltyard.sweep.pbt.lineage import Lineage
from tiltyard.sweep.preflight import new_run


def story_of(sweep: Sweep) -> Lineage:
    """The story of a sweep that is a population; UseError for others."""
    if sweep.plan().search != "population":
        raise UseError(f"{sweep.id} is no population: nobody is a copy of anybody", "tiltyard sweep status")
    return lineage.read(sweep)


def schedule_of(sweep: Sweep, member: int) -> list[tuple[int, Settings]]:
    """From which env step on which settings."""
    story = story_of(sweep)
    if member not in story.first:
        raise UseError(f"{sweep.id} has no member {member}", f"it has 1 to {len(story.first)}")
    return story.schedule(member)


def make(sweep: Sweep, member: int, command: Sequence[str]) -> Run:
    """The run, ready to be trained; made beside the sweep."""
    schedule = schedule_of(sweep, member)
    first = dict(schedule[0][1])
    trial = Trial(member, member, first.pop("seed"), first)
    return new_run(sweep, sweep.plan(), trial, command, stretches=Stretches(schedule))
