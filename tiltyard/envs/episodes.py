"""The running episode of every row of a group: its number, seed, length, return and time limit; saved and restored.

The rows of one copy of an env with several agents begin and end together, so their numbers, seeds and lengths are
equal. How the env of a running episode is restored from a checkpoint:

    state    by its own get_state() and set_state(state): trees of arrays and scalars
    rerun    by repeating the episode's actions from its seed; the result must equal what was saved, bit for bit
    fresh    not at all: every row begins a new episode, and a warning counts those that were cut

Episodes with other env settings (a fork may change them) are cut too, whatever the env can do. Observations, stacks and
counters are always saved as they are; only the env below them has to be restored.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from tiltyard.config.experiment import episode_digest
from tiltyard.envs.isolation.proxy import EnvProxy
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import restore_mode_in
from tiltyard.errors import EnvError, TiltyardError, UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.types import Array, Arrays, EpisodeEnd, Tree

if TYPE_CHECKING:
    from tiltyard.envs.vector import EnvGroup

Seeds = Callable[[int, int], int]
"""(number of the copy in the run, number of its episode) -> seed"""


def episode_seed(seed: int, role: str, row: int, number: int) -> int:
    """The seed of one episode, 31 bits: depends on the run's seed, the role, the row and the episode's number only."""
    key = (zlib.crc32(role.encode()), row, number)
    return int(np.random.SeedSequence(entropy=seed, spawn_key=key).generate_state(1)[0]) >> 1


def row_seeds(seed: int, rows: int) -> Array:
    """The seeds of all rows, 31 bits, from the first episode's: for simulators that seed each row once."""
    return (np.random.SeedSequence(seed).generate_state(rows) >> 1).astype(np.int64)


def first_limits(seed: int, role: str, copies: Sequence[int], longest: int) -> Array:
    """The env steps after which the first episode of each copy is cut, drawn from 1 .. `longest`."""
    draws = [np.random.default_rng(episode_seed(seed, f"{role}/first", copy, 0)) for copy in copies]
    return np.array([each.integers(1, longest, endpoint=True) for each in draws], np.int64)


class EpisodeStats:
    """Counters of `rows` rows, `agents` per copy. Limits are in env steps; `frames` are frames per env step."""

    def __init__(
        self,
        rows: int,
        agents: int,
        first_row: int,
        seeds: Seeds,
        frames: int,
        limit: int | None = None,
        first: Array | None = None,
    ) -> None:
        self.agents, self.first_row = agents, first_row
        self._seeds, self._frames = seeds, frames
        self._limit = sys.maxsize if limit is None else limit
        self._first = None if first is None else np.repeat(first, agents)
        self.number = np.full(rows, -1, np.int64)  # episodes begun by each row, minus one
        self.length = np.zeros(rows, np.int64)  # env steps of the running episode
        self.saved_frames = np.zeros(rows, np.int64)  # frames not taken because the episode ended within an env step
        self.total = np.zeros(rows, np.float64)  # return so far: raw rewards
        self.seeds = [0] * rows
        self._ended_frames = 0
        self.set_countdown()

    @property
    def counters(self) -> Arrays:
        """The arrays that a checkpoint keeps, by name."""
        return {"number": self.number, "length": self.length, "saved_frames": self.saved_frames, "total": self.total}

    def step(self, raw: Array) -> None:
        """Count an env step of every row with rewards `raw`, float64 [B]."""
        self.total += raw
        self.length += 1
        self.countdown -= 1

    def set_countdown(self) -> None:
        """Set the number of steps in which no row can reach its limit; rows that are reset meanwhile only add to it."""
        if self._first is None:
            self.countdown = self._limit - int(self.length.max())
        else:
            self.countdown = int((self._limits() - self.length).min())

    def _limits(self) -> Array | int:
        """The limits of the running episodes; a first one is known by its number, also after a resume."""
        if self._first is None:
            return self._limit
        return np.where(self.number == 0, np.minimum(self._first, self._limit), self._limit)

    def late(self) -> Array | None:
        """Which rows have reached their limit; None if none can have."""
        return None if self.countdown > 0 else self.length >= self._limits()

    def shortened(self, ended: Array) -> Array | None:
        """Which rows are late only because env.decorrelate shortens their first episode; not those that `ended`."""
        if self._first is None:
            return None
        late: Array = (self.number == 0) & (self.length >= self._first) & (self.length < self._limit)
        return late & ~ended

    def span(self, copy: int) -> slice:
        """The rows of one copy."""
        return slice(copy * self.agents, (copy + 1) * self.agents)

    def begin(self, copy: int) -> int:
        """Reset the counters of a copy for its next episode and return that episode's seed."""
        rows = self.span(copy)
        self.number[rows] += 1
        seed = self._seeds(self.first_row // self.agents + copy, int(self.number[rows.start]))
        self.seeds[rows] = [seed] * self.agents
        self.length[rows] = self.saved_frames[rows] = 0
        self.total[rows] = 0.0
        return seed

    def end(self, row: int, total: float, metrics: dict[str, float]) -> EpisodeEnd:
        """The summary of the episode of the copy whose first row is `row`; counts its frames as taken."""
        frames = self.frames(row)
        self._ended_frames += frames
        return EpisodeEnd(
            row=self.first_row + row,
            number=int(self.number[row]),
            seed=self.seeds[row],
            total=total,
            length=int(self.length[row]),
            frames=frames,
            metrics=metrics,
        )

    def frames(self, row: int) -> int:
        """Simulator frames of a row's running episode."""
        return int(self.length[row]) * self._frames - int(self.saved_frames[row])

    @property
    def frames_taken(self) -> int:
        """Simulator frames of all copies. A load may change it: compare values of one process only."""
        running = self.length[:: self.agents].sum() * self._frames - self.saved_frames[:: self.agents].sum()
        return self._ended_frames + int(running)


# ---------------------------------------------------------------------------------------------- saved and restored


# Counters that a re-run does not restore, or that are compared with its return
_SAVED_ONLY = ("number", "length", "total", "reward", "terminated", "truncated", "first")


class History:
    """The actions of every running episode: one shared array over time, so that a step is one copy for all rows."""

    def __init__(self, rows: int, columns: int) -> None:
        self._actions = np.zeros((256, rows, columns), np.float32)  # [time, B, columns]
        self._begin = np.zeros(rows, np.int64)  # time at which each row's episode began
        self._now = 0

    def append(self, action: Array) -> None:
        if self._now == len(self._actions):
            self._grow()
        self._actions[self._now] = action
        self._now += 1

    def _grow(self) -> None:
        """Drop what no running episode needs; double the array if more than half of it is still needed."""
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
    """The outermost env or wrapper, if it has get_state and set_state; with `anywhere`, also one further in.

    Gymnasium's own stateless wrappers are skipped. Others may have a state, which one further in would not restore.
    """
    layer: Any = env.inner if isinstance(env, Parallel) else env
    if isinstance(layer, EnvProxy):  # its server has looked
        return layer if layer.keeps_state else None
    while True:
        if hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state"):
            return layer
        stateless = isinstance(layer, gymnasium.wrappers.OrderEnforcing)
        if not isinstance(layer, gymnasium.Wrapper) or not (stateless or anywhere):
            return None
        layer = layer.env


def save(group: EnvGroup) -> dict[str, Any]:
    """The state of a group: common arrays, and what its restore mode needs of every copy of the env."""
    data = group.data
    tree: dict[str, Any] = {
        "restore_mode": data.restore_mode,
        "agents": group.agents,
        "settings": _digest(group),
        "seeds": list(group.stats.seeds),
        "obs": {name: array.copy() for name, array in group.obs.items()},
        "mask": None if group.mask is None else group.mask.copy(),
        "counters": {name: array.copy() for name, array in group.counters.items()},
    }
    if group.spec.parallel:
        tree["last_words"] = [dict(info) for info in data.last_infos]
    if group.spec.takes_options:
        tree["options"] = list(data.options.now)
    if data.restore_mode == "state":
        tree["states"] = [_call_keeper(group, copy, "get_state") for copy in range(group.copies)]
    elif data.restore_mode == "rerun":
        assert data.history is not None
        tree["actions"] = [data.history.of(row) for row in range(group.rows)]
    return tree


def _call_keeper(group: EnvGroup, copy: int, method: str, *state: Tree) -> Any:
    """Call get_state or set_state of a copy of the env."""
    group.data.heartbeat[0] += 1
    try:
        keeper = state_keeper(group.envs[copy], anywhere=True)
        if keeper is None:
            raise UseError(f"env {group.env.id} has no get_state() and set_state()", "set env.restore_mode=rerun")
        return getattr(keeper, method)(*state)
    except (TiltyardError, KeyboardInterrupt):
        raise
    except BaseException as error:
        message = f"env {group.env.id}, row {group.stats.span(copy).start}: {method}() {raised(error)}"
        hint = "the traceback is the env's own; env.restore_mode=rerun does not need this method"
        raise EnvError(message, hint, user_traceback(error)) from error


def load(group: EnvGroup, tree: Tree) -> list[str]:
    """Restore the rows; returns warnings about those that begin a new episode instead."""
    _require_same_obs(group, tree)
    data, now = group.data, _digest(group)
    same = tree.get("settings", now) == now  # older checkpoints do not have it
    if same and restore_mode_in(tree) == "fresh":  # a re-run has failed before: it is not tried again
        data.restore_mode, data.history = "fresh", None
    # Rows with another number of agents or other counters cannot be matched.
    alike = tree.get("agents", 1) == group.agents and tree["counters"].keys() == group.counters.keys()
    common = min(group.rows, len(tree["seeds"])) if alike else 0
    _load_counters(group, tree, common)
    group.stats.seeds[:common] = [int(seed) for seed in tree["seeds"][:common]]
    if data.history is not None:
        saved = tree.get("actions") or []
        data.history.fill(
            [saved[row] if row < min(common, len(saved)) else data.history.of(row)[:0] for row in range(group.rows)]
        )
    copies = common // group.agents
    data.options.restore(tree.get("options", [])[:copies])  # until their next reset
    broken = [copy for copy in range(copies) if not (same and _restore(group, tree, copy))]
    data.options.change(group.env.options)
    _load_counters(group, tree, common)  # again: restoring an episode resets them
    for name, array in group.obs.items():
        array[:common] = tree["obs"][name][:common]
    if group.mask is not None and tree["mask"] is not None:
        group.mask[:common] = tree["mask"][:common]
    group.stats.number[common:] = np.max(tree["counters"]["number"], initial=0)  # their seeds are unused
    for copy in [*broken, *range(copies, group.copies)]:
        group.first[group.stats.span(copy)] = True
        group.begin(copy)
    for row, info in enumerate(tree.get("last_words", [])[: group.rows]):
        if group.stats.length[row] > 0:  # else a new episode has begun
            data.last_infos[row] = dict(info)
    began = np.asarray(tree["counters"]["length"])[:common][:: group.agents] > 0
    running, cut = int(began.sum()), int(began[broken].sum())
    warnings = []
    if common < len(tree["seeds"]):
        before = len(tree["seeds"])
        warnings.append(f"{common} of the checkpoint's {before} rows are left: the episodes of the others were cut")
    if cut:
        warnings.append(_explain_cut(group, tree, f"{cut} of {running} running episodes were cut", same))
    return warnings


def _digest(group: EnvGroup) -> str:
    """The settings that running episodes need; options may differ if they can be set."""
    env = group.env.model_copy(update={"options": {}}) if group.spec.takes_options else group.env
    return episode_digest(env)


def _load_counters(group: EnvGroup, tree: Tree, rows: int) -> None:
    for name, array in group.counters.items() if rows else ():
        array[:rows] = tree["counters"][name][:rows]


def _require_same_obs(group: EnvGroup, tree: Tree) -> None:
    """Refuse the checkpoint of an env with other observations."""
    mine = {name: (list(array.shape[1:]), array.dtype.name) for name, array in group.obs.items()}
    theirs = {name: (list(array.shape[1:]), array.dtype.name) for name, array in tree["obs"].items()}
    if mine != theirs:
        hint = "use the env it was made with"
        raise UseError(f"the checkpoint's observations are {theirs} but the env's are {mine}", hint)


def _restore(group: EnvGroup, tree: Tree, copy: int) -> bool:
    """Put a copy of the env where it was; False if the result differs in any bit."""
    mode = group.data.restore_mode
    if restore_mode_in(tree) != mode or mode == "fresh":
        return False
    rows, counters = group.stats.span(copy), tree["counters"]
    group.stepping.reset(copy, group.stats.seeds[rows.start])
    if mode == "state":
        _call_keeper(group, copy, "set_state", tree["states"][copy])
        return True
    try:
        returns = group.stepping.rerun(copy, tree["actions"][rows])
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - it did not raise the first time, so the re-run differs
        return False
    if returns != [float(total) for total in counters["total"][rows]]:
        return False
    compared = {name: array for name, array in group.counters.items() if name not in _SAVED_ONLY}
    if not all(np.array_equal(array[rows], counters[name][rows]) for name, array in compared.items()):
        return False
    return all(np.array_equal(array[rows], tree["obs"][name][rows]) for name, array in group.data.buffer.now.items())


def _explain_cut(group: EnvGroup, tree: Tree, what: str, same: bool) -> str:
    """Why episodes were cut. If a re-run failed under the same settings, no further one is tried."""
    if not same:
        return f"the settings of env {group.env.id} changed: {what} and new ones begun"
    if restore_mode_in(tree) == group.data.restore_mode == "rerun":
        group.data.restore_mode, group.data.history = "fresh", None
        return (
            f"env {group.env.id} gives other results when re-run: {what} and new ones begun; from now on checkpoints "
            "keep no actions (env.restore_mode=fresh does this from the start)"
        )
    return f"env {group.env.id} begins new episodes after a resume: {what}"
