"""How the policies of a population stand, as it travels with every checkpoint; and what each of them went through.

Pure but for reading it from a run: who decides is selection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tiltyard.algos.pbt import Exploit, Gain, Settings, schedule
from tiltyard.errors import UseError, did_you_mean
from tiltyard.run.checkpoint import newest_valid, read_tree
from tiltyard.run.folder import Run
from tiltyard.types import Tree

KEPT = 200  # gains: PB2 looks at the latest


@dataclass
class Standing:
    """What selection remembers from decision to decision; policies by name, and by their place in `names`."""

    names: list[str]
    first: dict[str, Settings] = field(default_factory=dict)
    settings: dict[str, Settings] = field(default_factory=dict)
    env_steps: dict[str, int] = field(default_factory=dict)
    """own ones: those that a policy has learned from"""
    decided: dict[str, int] = field(default_factory=dict)
    """own env steps at the last decision about a policy"""
    scores: dict[str, float] = field(default_factory=dict)
    """at the last decision about it; after a copy, its source's"""
    gains: list[Gain] = field(default_factory=list)
    exploits: list[Exploit] = field(default_factory=list)
    turns: int = 0

    def dump(self) -> Tree:
        return asdict(self)

    @staticmethod
    def read(tree: Tree) -> Standing:
        gains, exploits = [Gain(**each) for each in tree["gains"]], [Exploit(**each) for each in tree["exploits"]]
        return Standing(**{**tree, "gains": gains, "exploits": exploits})


def standing_of(run: Run) -> Standing:
    """That of a run's newest checkpoint."""
    found, _ = newest_valid(run)
    tree = None if found is None else read_tree(found.folder, "loop").get("selection")
    if tree is None:
        raise UseError(
            f"run {run.id} has no population, or no checkpoint of it yet", "set `population` in an experiment"
        )
    return Standing.read(tree)


def lineage(run: Run) -> dict[str, Any]:
    """Who came from whom, and for each policy of today the settings that a run alone would need to repeat it."""
    now = standing_of(run)
    return {
        "policies": {name: _policy(now, place) for place, name in enumerate(now.names)},
        "exploits": [
            {**asdict(each), "member": now.names[each.member], "source": now.names[each.source]}
            for each in now.exploits
        ],
    }


def _policy(now: Standing, place: int) -> dict[str, Any]:
    name = now.names[place]
    return {
        "env_steps": now.env_steps.get(name, 0),
        "score": now.scores.get(name),
        "settings": now.settings[name],
        "schedule": [{"from": at, "settings": settings} for at, settings in schedule_of(now, name)],
    }


def schedule_of(now: Standing, name: str) -> Sequence[tuple[int, Settings]]:
    """From which env step on which settings, for one policy alone."""
    if name not in now.names:
        raise UseError(f"the population has no policy {name!r}", did_you_mean(name, now.names))
    first = {place: now.first[each] for place, each in enumerate(now.names)}
    return schedule(now.names.index(name), now.exploits, first)
