"""Seeds of the episodes of a collected dataset: each number has its own, whichever process plays it.

For a given dataset seed, number -> seed is a permutation of 0 .. 2^31 - 1, so that no seed repeats: multiplication by
an odd number, addition and xor with a right shift can all be undone modulo 2^31.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

BITS = 31  # simulators take seeds below 2^31
_MASK = (1 << BITS) - 1


def episode_seed(dataset_seed: int, number: int) -> int:
    """The seed of episode `number`, 31 bits."""
    if not 0 <= number <= _MASK:
        raise ValueError(f"episode number {number} is not in 0 .. {_MASK}")
    factor, offset, other = _keys(dataset_seed)
    bits = (number * factor + offset) & _MASK
    bits ^= bits >> 16
    bits = (bits * other) & _MASK
    return bits ^ (bits >> 15)


@lru_cache(maxsize=64)
def _keys(dataset_seed: int) -> tuple[int, int, int]:
    """An odd factor, an offset and another odd factor."""
    one, two, three = np.random.SeedSequence(dataset_seed).generate_state(3).tolist()
    return one | 1, two, three | 1
