"""The observations of all rows as preallocated arrays [B, ...]: store frames, stack them, find invalid ones.

Owns `obs` and `final_obs` of a group of envs, which change in place; knows nothing of episodes.

    frame stack of 3, oldest first:   reset a -> a a a    step b -> a a b    step c -> a b c
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces as gym_spaces

from tiltyard.envs.checks import obs_fault, structure_fault
from tiltyard.envs.env_errors import InvalidEnvData
from tiltyard.envs.spaces import (
    Leaf,
    encode_leaf,
    encode_leaves,
    fill_stack,
    observation_leaves,
    pick,
    stack_axis,
    stacked,
)

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays


def all_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite. Summing first takes half the time of isfinite."""
    return math.isfinite(np.add.reduce(array, axis=None)) or bool(np.isfinite(array).all())


class _Slot:
    """The arrays of one leaf, and views of them for writing frames."""

    def __init__(self, leaf: Leaf, rows: int, stack: int) -> None:
        self.leaf = leaf
        spec = stacked(leaf.spec, stack)
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
            axis = 1 + (stack_axis(leaf.spec) if leaf.spec.shape else 0)
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
        self._slots = [_Slot(leaf, rows, stack) for leaf in observation_leaves(space)]
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
                value = pick(obs, slot.leaf.path)
            except (KeyError, IndexError, TypeError):
                fault = structure_fault(self._leaves, obs) or f"observation {slot.leaf.name!r} is missing"
                raise InvalidEnvData(fault, slot.leaf.name, obs) from None
            if not slot.write_plain(row, value):
                broken = obs_fault(slot.leaf, value, self._strict)
                if broken:
                    raise InvalidEnvData(broken, slot.leaf.name, value)
                slot.newest[row] = encode_leaf(slot.leaf, value)

    def write_all(self, obs: Any) -> None:
        """Store the latest frames of all rows unchecked, [B, ...] per leaf, for envs that step them in one call."""
        if self.plain[1] is not None:
            self.plain[0][...] = obs
            return
        for slot in self._slots:
            slot.newest[...] = encode_leaves(slot.leaf, pick(obs, slot.leaf.path))

    def restart(self, row: int, obs: Any) -> None:
        """Store the first frame of an episode, repeated over the stack."""
        self.write(row, obs)
        if self._stack > 1:
            for slot in self._slots:
                slot.now[row] = fill_stack(slot.newest[row].copy(), slot.now.shape[1:])

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
