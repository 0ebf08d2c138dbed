"""Where engines put what they are, below a checkpoint's `engine` folder, so that one can go on where another stopped.

state      progress, the learner's state, the version of its weights, how many groups of envs and threads there are, and
           whether these were cut: of a step that failed there are none
group-N    envs, memory and random streams of one group, written by whoever has it
past-NAME  past versions of a policy, where there is a pool of them
serial     all of that in one, as written before version 0.2
"""

from __future__ import annotations

from pathlib import Path

from tiltyard.run.checkpoint import read_tree
from tiltyard.types import Tree


def read_state(folder: Path) -> Tree:
    """The tree `state` of a checkpoint."""
    if not _is_old(folder):
        return read_tree(folder / "engine", "state")
    old = read_tree(folder / "engine", "serial")
    learner = {"seed": old.get("seed"), "algo": old["algo"], "generators": old["random"]["global"]}
    return {"groups": 1, "progress": old["progress"], "learner": learner}


def read_env_steps(folder: Path) -> int:
    """How far the run was."""
    return int(read_state(folder)["progress"]["env_steps"])


def read_group(folder: Path, group: int) -> Tree | None:
    """The tree of one group; None when the checkpoint has fewer, or those of an engine that keeps them otherwise."""
    if not _is_old(folder):
        state = read_state(folder)
        continued = group < state["groups"] and not state.get("cut") and state.get("engine") != "rllib"
        return read_tree(folder / "engine", f"group-{group}") if continued else None
    old = read_tree(folder / "engine", "serial")
    parts = {"seed": old.get("seed"), "draws": old["random"]["draws"], "generators": old["random"]["global"]}
    return {**parts, "envs": old["envs"], "memory": old["memory"]} if group == 0 else None


def groups_left_out(state: Tree, groups: int) -> list[str]:
    """A sentence about groups of a checkpoint's envs that an engine with fewer of them does not continue."""
    there = state["groups"]
    words = f"of the checkpoint's {there} groups of envs {groups} are left: the episodes of the others were cut"
    return [words] if there > groups else []


def _is_old(folder: Path) -> bool:
    return (folder / "engine" / "serial.json").exists()
