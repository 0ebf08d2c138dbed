"""The rows of a group of envs as arrays [B, ...], shared by the group (vector.py) and the code that steps its envs.

Owns the memory that a `Step` shows, the masks, and the errors that name a row; calls no env. episodes.py counts, saves
and restores episodes, watchdog.py explains the heartbeat.

    frame stack of 3, oldest first:   reset a -> a a a    step b -> a a b    step c -> a b c
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from tiltyard.config.sections import Env
from tiltyard.envs import spaces
from tiltyard.envs.actions import flat_mask
from tiltyard.envs.checks import mask_fault, mask_in, obs_fault, structure_fault
from tiltyard.envs.env_errors import InvalidEnvData, diverged, env_error
from tiltyard.envs.env_options import EnvOptions
from tiltyard.envs.episodes import EpisodeStats, History, Seeds, episode_seed, first_limits
from tiltyard.envs.watchdog import PROCESS_HEARTBEAT
from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import Array, Arrays, EnvSpec, EpisodeEnd


@dataclass(frozen=True)
class GroupConfig:
    """What a group of envs is made from."""

    env: Env
    spec: EnvSpec
    rows: int  # one per agent of each copy of the env
    seed: int
    base: Sequence[Path] = ()  # folders of plug-in files
    role: str = "train"  # name of the random stream that episode seeds come from
    render: bool = False  # whether row 0 can draw itself
    previous: bool = False  # whether observations include the previous action and reward
    first_row: int = 0  # number of row 0 among all rows of the run
    seeds: Seeds | None = None  # seeds of episodes; by default drawn from seed, role and row
    heartbeat: Array | None = None  # [0] counts env calls, [1] is the phase; by default that of this process

    @property
    def agents(self) -> int:
        return len(self.spec.agents)

    @property
    def copies(self) -> int:
        return self.rows // self.agents

    @property
    def first_copy(self) -> int:
        return self.first_row // self.agents

    def make_stats(self) -> EpisodeStats:
        """Counters of the running episodes, with their seeds and limits."""
        env, first = self.env, None
        if env.decorrelate and self.role == "train":
            copies = range(self.first_copy, self.first_copy + self.copies)
            first = first_limits(self.seed, self.role, copies, env.decorrelate)
        seeds = partial(episode_seed, self.seed, self.role) if self.seeds is None else self.seeds
        limit = env.time_limit or self.spec.episode_limit
        return EpisodeStats(self.rows, self.agents, self.first_row, seeds, self.spec.frameskip, limit, first)


def all_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite. Summing first takes half the time of isfinite."""
    return math.isfinite(np.add.reduce(array, axis=None)) or bool(np.isfinite(array).all())


class _Slot:
    """The arrays of one leaf, and views of them for writing frames."""

    def __init__(self, leaf: spaces.Leaf, rows: int, stack: int) -> None:
        self.leaf = leaf
        spec = spaces.stacked(leaf.spec, stack)
        self.now = np.zeros((rows, *spec.shape), spec.dtype)
        self.final = np.zeros((rows, *spec.shape), spec.dtype)
        self.stack = stack
        self.floats = self.now.dtype.kind == "f"
        self.newest = self.now  # [B, *frame]: where the latest frame of each row goes
        space = leaf.space
        copied = isinstance(space, gym_spaces.Box) and space.shape == leaf.spec.shape
        self.plain = (space.shape, space.dtype) if copied else None  # of a value that needs no encoding
        self.categories = (int(space.start), int(space.n)) if isinstance(space, gym_spaces.Discrete) else None
        if stack > 1:
            axis = 1 + (spaces.stack_axis(leaf.spec) if leaf.spec.shape else 0)
            width = leaf.spec.shape[axis - 1] if leaf.spec.shape else 1
            before: list[slice] = [slice(None)] * axis
            self.newest = self.now[(*before, slice(-width, None))]
            self.older = self.now[(*before, slice(None, -width))]
            self.younger = self.now[(*before, slice(width, None))]
            if not leaf.spec.shape:
                self.newest = self.newest[:, 0]

    def write_plain(self, row: int, value: Any) -> bool:
        """Store a frame that is exactly what the space declares; False if it needs checks or encoding."""
        if self.plain is not None:
            if type(value) is np.ndarray and (value.shape, value.dtype) == self.plain:
                self.newest[row] = value
                return True
        elif self.categories is not None and type(value) in (int, np.int64):
            index = value - self.categories[0]
            if 0 <= index < self.categories[1]:
                self.newest[row] = index
                return True
        return False


class ObsBuffer:
    """Arrays of all rows. The hot loop (single_agent_vector.py) copies plain frames itself, see `plain`."""

    def __init__(self, space: gym_spaces.Space[Any], rows: int, stack: int, strict: bool) -> None:
        self._slots = [_Slot(leaf, rows, stack) for leaf in spaces.observation_leaves(space)]
        self._leaves = [slot.leaf for slot in self._slots]
        self._strict = strict
        self._stack = stack
        self.now: Arrays = {slot.leaf.name: slot.now for slot in self._slots}
        self.final: Arrays = {slot.leaf.name: slot.final for slot in self._slots}
        # For a single Box that needs no encoding, comparing shape and dtype is enough.
        only = self._slots[0]
        alone = len(self._slots) == 1 and not only.leaf.path and only.plain is not None
        self.plain = (only.newest, *(only.plain if alone and only.plain else (None, None)))
        """the array for plain frames, and the shape and dtype they must have; None: use `write`"""

    def shift(self) -> None:
        """Shift the stacks of all rows for the next frame. Numpy handles the overlap."""
        if self._stack > 1:
            for slot in self._slots:
                slot.older[...] = slot.younger

    def shift_row(self, row: int) -> None:
        """Shift the stack of one row."""
        if self._stack > 1:
            for slot in self._slots:
                slot.older[row] = slot.younger[row]

    def write(self, row: int, obs: Any) -> None:
        """Check and store a row's latest frame. `check_finite` looks for NaN in plain frames."""
        for slot in self._slots:
            try:
                value = spaces.pick(obs, slot.leaf.path)
            except (KeyError, IndexError, TypeError):
                fault = structure_fault(self._leaves, obs) or f"observation {slot.leaf.name!r} is missing"
                raise InvalidEnvData(fault, slot.leaf.name, obs) from None
            if not slot.write_plain(row, value):
                broken = obs_fault(slot.leaf, value, self._strict)
                if broken:
                    raise InvalidEnvData(broken, slot.leaf.name, value)
                slot.newest[row] = spaces.encode_leaf(slot.leaf, value)

    def write_all(self, obs: Any) -> None:
        """Store the latest frames of all rows unchecked, [B, ...] per leaf, for envs that step them in one call."""
        if self.plain[1] is not None:
            self.plain[0][...] = obs
            return
        for slot in self._slots:
            slot.newest[...] = spaces.encode_leaves(slot.leaf, spaces.pick(obs, slot.leaf.path))

    def restart(self, row: int, obs: Any) -> None:
        """Store the first frame of an episode, repeated over the stack."""
        self.write(row, obs)
        if self._stack > 1:
            for slot in self._slots:
                slot.now[row] = spaces.fill_stack(slot.newest[row].copy(), slot.now.shape[1:])

    def clear(self, row: int) -> None:
        """Set a row's observation to zeros."""
        for slot in self._slots:
            slot.now[row] = 0

    def keep_final(self, row: int) -> None:
        """Copy a row's observation to `final` before a new episode overwrites it."""
        for slot in self._slots:
            slot.final[row] = slot.now[row]

    def check_finite(self) -> tuple[int, str, Array] | None:
        """(row, name, values) of the first observation with NaN or infinity."""
        for slot in self._slots:
            if slot.floats and not all_finite(slot.newest):
                bad = ~np.isfinite(slot.newest).reshape(len(slot.newest), -1).all(axis=1)
                row = int(np.flatnonzero(bad)[0])
                return row, slot.leaf.name, slot.newest[row].copy()
        return None


class RowData:
    """Arrays and lists with one entry per row. Arrays are changed in place, never replaced."""

    def __init__(self, config: GroupConfig, space: gym_spaces.Space[Any], restore_mode: str) -> None:
        rows, action = config.rows, config.spec.action
        self.config, self.restore_mode = config, restore_mode
        self.heartbeat = (PROCESS_HEARTBEAT if config.heartbeat is None else config.heartbeat).data
        self.stats = config.make_stats()
        self.buffer = ObsBuffer(space, rows, config.env.frame_stack, config.env.strict)
        self.obs: Arrays = dict(self.buffer.now)
        self.final_obs: Arrays = dict(self.buffer.final)
        if config.previous:
            for name, spec in spaces.previous_specs(action).items():
                self.obs[name] = np.zeros((rows, *spec.shape), np.float32)
                self.final_obs[name] = np.zeros((rows, *spec.shape), np.float32)
        self.mask = np.ones((rows, action.mask_size), bool) if config.spec.masked else None
        self._options = [part.options for part in action.parts if part.kind == "categorical"]
        self.reward = np.zeros(rows, np.float32)  # for learning: scaled and clipped
        self.terminated, self.truncated = np.zeros(rows, bool), np.zeros(rows, bool)
        self.first, self.valid = np.ones(rows, bool), np.ones(rows, bool)
        self.acting = np.ones(rows, bool)  # rows whose next action takes effect
        self.any_first = True
        self.history = History(rows, action.columns) if restore_mode == "rerun" else None
        self.options = EnvOptions(config.env.options, config.copies)
        self.infos: list[Any] = [{}] * rows  # of the last step: of the ended episode where one ended
        self.last_infos: list[dict[str, float]] = [{} for _ in range(rows)]  # of several agents: scalars of each one's
        # As the envs returned them in the last step.
        self.raw_reward: list[float] = [0.0] * rows
        self.raw_terminated: list[bool] = [False] * rows
        self.raw_truncated: list[bool] = [False] * rows
        self._require_probed_shapes()

    def _require_probed_shapes(self) -> None:
        """Raise UseError when the env observes something else than when it was probed."""
        found = {name: (array.shape[1:], array.dtype.name) for name, array in self.obs.items()}
        probed = {name: (spec.shape, spec.dtype) for name, spec in self.config.spec.obs.items()}
        if found != probed:
            changed = "model.previous, env.frame_stack or the env itself" if self.config.previous else "the env itself"
            hint = f"{changed} changed"
            raise UseError(f"env {self.config.env.id} observes {found}; expected {probed} from its probe", hint)

    def begin_episode(self, copy: int) -> int:
        """Reset the counters of a copy for its next episode and return that episode's seed."""
        rows, seed = self.stats.span(copy), self.stats.begin(copy)
        if self.history is not None:
            self.history.restart(rows)
        if self.config.previous:
            self.obs[spaces.PREVIOUS_ACTION][rows] = self.obs[spaces.PREVIOUS_REWARD][rows] = 0
        return seed

    def keep_final(self, row: int) -> None:
        """Copy a row's observation to `final_obs` before its next episode overwrites it."""
        self.buffer.keep_final(row)
        if self.config.previous:
            for name in (spaces.PREVIOUS_ACTION, spaces.PREVIOUS_REWARD):
                self.final_obs[name][row] = self.obs[name][row]

    def store_mask(self, row: int, obs: Any, info: Any) -> None:
        assert self.mask is not None
        given = mask_in(obs, info)
        if given is None:
            raise InvalidEnvData(
                "the action mask is missing: it must be in every observation or every info", "action_mask", None
            )
        mask = flat_mask(self.config.spec.action, given)
        fault = mask_fault(mask, self._options)
        if fault:
            raise InvalidEnvData(fault, "action_mask", given)
        self.mask[row] = mask

    def without_shortened(self, ends: list[EpisodeEnd], short: Array | None) -> list[EpisodeEnd]:
        """The episodes to report: the return of one that env.decorrelate shortened would mislead."""
        return ends if short is None else [end for end in ends if not short[end.row - self.config.first_row]]

    # ------------------------------------------------------------------------------------------ errors

    def where(self, row: int, *, agent: bool = True) -> str:
        """The place of a row in an error message; `agent` adds the agent's name where there are several."""
        stats, config = self.stats, self.config
        place = f"row {config.first_row + row}, episode {stats.number[row]}, env step {stats.length[row]}"
        name = f", agent {config.spec.agents[row % config.agents]!r}" if agent and config.spec.parallel else ""
        return f"env {config.env.id}, {place}{name}"

    def env_error(self, error: BaseException, row: int, method: str, *, agent: bool = True) -> TiltyardError:
        return env_error(error, self.where(row, agent=agent), method)

    def diverged(self, what: str, row: int, batch: dict[str, object]) -> TiltyardError:
        return diverged(what, self.where(row), batch)

    def check_finite(self, batch: dict[str, object]) -> None:
        """Raise DivergedError if an observation holds NaN or infinity; `batch` is saved with it."""
        bad = self.buffer.check_finite()
        if bad is not None:
            row, name, values = bad
            word = "NaN" if np.isnan(values).any() else "infinity"
            raise self.diverged(f"observation {name!r} holds {word}", row, {**batch, f"obs.{name}": values})
