"""Running episodes of a group of envs into a checkpoint and back.

    state    the env's own get_state() / set_state(state), trees of arrays and scalars
    replay   the episode's seed and its actions since then; what comes out must equal what was saved, to the bit
    fresh    nothing: every row begins a new episode, and how many were cut is said

Episodes of other settings (a fork may change them) are cut too: they cannot go on in this env, which is no fault of it.
Observations, stacks and counters are always saved as they are; the env below them is what has to be brought back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from tiltyard.envs.isolation.proxy import EnvProxy
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import restore_mode_in
from tiltyard.errors import EnvError, TiltyardError, UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.types import Tree

if TYPE_CHECKING:
    from tiltyard.envs.vector import EnvGroup
    from tiltyard.types import Array

# Counters that a replayed episode does not bring back by itself, or that its return is compared with
_SAVED_ONLY = ("number", "length", "total", "reward", "terminated", "truncated", "first")


class History:
    """The actions of every running episode: one shared array over time, so that a step is one copy for all rows."""

    def __init__(self, rows: int, columns: int) -> None:
        self._actions = np.zeros((256, rows, columns), np.float32)  # [time, B, columns]
        self._begin = np.zeros(rows, np.int64)  # time at which each row's episode began
        self._now = 0

    def append(self, action: Array) -> None:
        if self._now == len(self._actions):
            self._make_room()
        self._actions[self._now] = action
        self._now += 1

    def _make_room(self) -> None:
        """Drop what no running episode needs; double the array when that is less than half of it."""
        oldest = int(self._begin.min())
        kept = self._actions[oldest : self._now]
        if len(kept) > len(self._actions) // 2:
            self._actions = np.concatenate(
                [kept, np.zeros((len(self._actions) * 2 - len(kept), *kept.shape[1:]), np.float32)]
            )
        else:
            self._actions[: len(kept)] = kept.copy()
        self._begin -= oldest
        self._now -= oldest

    def restart(self, rows: int | slice) -> None:
        self._begin[rows] = self._now

    def of(self, row: int) -> Array:
        """float32 [length, columns]."""
        return self._actions[self._begin[row] : self._now, row].copy()

    def fill(self, episodes: list[Array]) -> None:
        """Begin with these actions per row, all ending now."""
        longest = max((len(actions) for actions in episodes), default=0)
        rows, columns = self._actions.shape[1:]
        self._actions = np.zeros((max(256, 2 * longest), rows, columns), np.float32)
        self._now = longest
        for row, actions in enumerate(episodes):
            self._begin[row] = longest - len(actions)
            self._actions[self._begin[row] : longest, row] = actions


def state_keeper(env: gymnasium.Env[Any, Any] | Parallel | EnvProxy, *, anywhere: bool) -> Any:
    """The env or wrapper that has get_state and set_state; the outermost that is not Gymnasium's own, or any.

    A wrapper between may have a state of its own, so a keeper further in counts only when the user asks for it.
    """
    layer: Any = env.inner if isinstance(env, Parallel) else env
    if isinstance(layer, EnvProxy):  # looked up where it lives
        return layer if layer.keeps_state else None
    while True:
        if hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state"):
            return layer
        stateless = isinstance(layer, gymnasium.wrappers.OrderEnforcing)
        if not isinstance(layer, gymnasium.Wrapper) or not (stateless or anywhere):
            return None
        layer = layer.env


def save(group: EnvGroup) -> Tree:
    """The tree of a group: common arrays, and per copy of the env what its kind of coming back needs."""
    tree: dict[str, Any] = {
        "restore_mode": group.restore_mode,
        "agents": group.agents,
        "settings": group.env.episode_digest(),
        "seeds": list(group.tally.seeds),
        "obs": {name: array.copy() for name, array in group.obs.items()},
        "mask": None if group.mask is None else group.mask.copy(),
        "counters": {name: array.copy() for name, array in group.counters.items()},
    }
    if group.restore_mode == "state":
        tree["states"] = [_get_state(group, copy) for copy in range(group.copies)]
    elif group.restore_mode == "rerun":
        assert group.history is not None
        tree["actions"] = [group.history.of(row) for row in range(group.rows)]
    return tree


def _get_state(group: EnvGroup, copy: int) -> Tree:
    group.tick()
    try:
        return _keeper(group, copy).get_state()
    except (TiltyardError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _attributed(group, copy, "get_state", error) from error


def _set_state(group: EnvGroup, copy: int, state: Tree) -> None:
    group.tick()
    try:
        _keeper(group, copy).set_state(state)
    except (TiltyardError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _attributed(group, copy, "set_state", error) from error


def _attributed(group: EnvGroup, copy: int, doing: str, error: BaseException) -> EnvError:
    return EnvError(
        f"env {group.env.id}, row {group.tally.span(copy).start}: {doing}() {raised(error)}",
        "the traceback is the env's own; env.restore_mode=rerun does without it",
        user_traceback(error),
    )


def _keeper(group: EnvGroup, copy: int) -> Any:
    keeper = state_keeper(group.envs[copy], anywhere=True)
    if keeper is None:
        raise UseError(f"env {group.env.id} has no get_state() and set_state()", "set env.restore_mode=rerun")
    return keeper


def load(group: EnvGroup, tree: Tree) -> list[str]:
    """Bring the rows back; sentences about those that begin a new episode instead."""
    _fit(group, tree)
    now = group.env.episode_digest()
    same = tree.get("settings", now) == now  # older checkpoints do not say
    if same and restore_mode_in(tree) == "fresh":  # once found not to replay, it stays that way
        group.restore_mode, group.history = "fresh", None
    # Rows of more or fewer agents are others, and so are those of an env that counts otherwise.
    alike = tree.get("agents", 1) == group.agents and tree["counters"].keys() == group.counters.keys()
    common = min(group.rows, len(tree["seeds"])) if alike else 0
    _take_counters(group, tree, common)
    group.tally.seeds[:common] = [int(seed) for seed in tree["seeds"][:common]]
    if group.history is not None:
        saved = tree.get("actions") or []
        group.history.fill(
            [saved[row] if row < min(common, len(saved)) else group.history.of(row)[:0] for row in range(group.rows)]
        )
    copies = common // group.agents
    broken = [copy for copy in range(copies) if not (same and _bring_back(group, tree, copy))]
    _take_counters(group, tree, common)  # again: bringing back begins anew first
    for name, array in group.obs.items():
        array[:common] = tree["obs"][name][:common]
    if group.mask is not None and tree["mask"] is not None:
        group.mask[:common] = tree["mask"][:common]
    group.counters["number"][common:] = np.max(tree["counters"]["number"], initial=0)  # seeds that nobody has had
    for copy in [*broken, *range(copies, group.copies)]:
        group.first[group.tally.span(copy)] = True
        group.begin(copy)
    began = np.asarray(tree["counters"]["length"])[:common][:: group.agents] > 0
    running, cut = int(began.sum()), int(began[broken].sum())
    said = _fewer(len(tree["seeds"]), common)
    return said if cut == 0 else [*said, _cut(group, tree, f"{cut} of {running} running episodes were cut", same)]


def _take_counters(group: EnvGroup, tree: Tree, rows: int) -> None:
    for name, array in group.counters.items() if rows else ():
        array[:rows] = tree["counters"][name][:rows]


def _fit(group: EnvGroup, tree: Tree) -> None:
    """A checkpoint of another env is refused with both shapes."""
    mine = {name: (list(array.shape[1:]), array.dtype.name) for name, array in group.obs.items()}
    theirs = {name: (list(array.shape[1:]), array.dtype.name) for name, array in tree["obs"].items()}
    if mine != theirs:
        raise UseError(
            f"the checkpoint's observations are {theirs} and the env's are {mine}", "use the env it was made with"
        )


def _bring_back(group: EnvGroup, tree: Tree, copy: int) -> bool:
    """Put a copy of the env where it was; False when that does not work out to the bit."""
    if restore_mode_in(tree) != group.restore_mode or group.restore_mode == "fresh":
        return False
    rows, counters = group.tally.span(copy), tree["counters"]
    group.restart(copy, group.tally.seeds[rows.start])
    if group.restore_mode == "state":
        _set_state(group, copy, tree["states"][copy])
        return True
    try:
        replayed = group.replay(copy, tree["actions"][rows])
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - an env that raises now and did not before is one that does not replay
        return False
    if replayed != [float(total) for total in counters["total"][rows]]:
        return False
    told = {name: array for name, array in group.counters.items() if name not in _SAVED_ONLY}
    if not all(np.array_equal(array[rows], counters[name][rows]) for name, array in told.items()):
        return False
    return all(np.array_equal(array[rows], tree["obs"][name][rows]) for name, array in group.buffer.now.items())


def _fewer(then: int, now: int) -> list[str]:
    words = f"of the checkpoint's {then} rows {now} are left: the episodes of the others were cut"
    return [words] if now < then else []


def _cut(group: EnvGroup, tree: Tree, what: str, same: bool) -> str:
    """Why episodes were cut. An env that does not replay under the same settings is not asked to again."""
    if not same:
        return f"the settings of env {group.env.id} changed: {what} and new ones begun"
    if restore_mode_in(tree) == group.restore_mode == "rerun":
        group.restore_mode, group.history = "fresh", None
        return (
            f"env {group.env.id} does not replay exactly: {what} and new ones begun; from now on checkpoints keep no "
            "actions (set env.restore_mode=fresh to say so from the start)"
        )
    return f"env {group.env.id} begins new episodes after a resume: {what}"
