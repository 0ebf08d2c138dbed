"""The `engine` folder of a checkpoint, from which any engine can continue.

state      progress, the learner's state, the version of its weights, the number of env groups and threads, and `cut`:
           whether groups are missing because the last step failed
group-N    envs, recurrent memory and random streams of one group, written by its process
past-NAME  past versions of a policy, if it has an opponent pool
serial     all of this in one file, as written before version 0.2
"""

from __future__ import annotations

from pathlib import Path

from tiltyard.run.state_file import read_tree
from tiltyard.types import Tree


def read_state(folder: Path, *, arrays: bool = True) -> Tree:
    """Read `state` of a checkpoint, with its arrays or only the rest."""
    if not _is_old(folder):
        return read_tree(folder / "engine", "state", on_disk=None if arrays else "")
    old = read_tree(folder / "engine", "serial")
    learner = {"seed": old.get("seed"), "algo": old["algo"], "generators": old["random"]["global"]}
    return {"groups": 1, "progress": old["progress"], "learner": learner}


def read_env_steps(folder: Path) -> int:
    """Read the env steps of a checkpoint."""
    return int(read_state(folder, arrays=False)["progress"]["env_steps"])


def read_group(folder: Path, group: int) -> Tree | None:
    """Read one group; None if the checkpoint has fewer, or is from an engine without groups."""
    if not _is_old(folder):
        state = read_state(folder, arrays=False)
        continued = group < state["groups"] and not state.get("cut") and state.get("engine") != "rllib"
        return read_tree(folder / "engine", f"group-{group}") if continued else None
    old = read_tree(folder / "engine", "serial")
    parts = {"seed": old.get("seed"), "draws": old["random"]["draws"], "generators": old["random"]["global"]}
    return {**parts, "envs": old["envs"], "memory": old["memory"]} if group == 0 else None


def dropped_groups(state: Tree, groups: int) -> list[str]:
    """A note about env groups of the checkpoint that an engine with fewer groups drops."""
    there = state["groups"]
    note = f"only {groups} of the checkpoint's {there} env groups continue; the episodes of the others were cut"
    return [note] if there > groups else []


def _is_old(folder: Path) -> bool:
    return (folder / "engine" / "serial.json").exists()
