"""Which episodes are for validation: decided by a hash of an episode's seed alone, so an episode never changes sides.

The hash is SplitMix64 (Steele, Lea and Flood, 2014), a fixed function of 64 bits. An episode is in validation if its
hash, as a fraction of 2^64, is below the wanted fraction: a dataset that grows keeps its split, and the validation set
for 0.1 is part of that for 0.2. The fraction is met on average, not exactly.
"""

from __future__ import annotations

import numpy as np

from tiltyard.errors import UseError
from tiltyard.types import Array

_STEP, _FIRST, _SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def is_validation(seeds: Array, share: float) -> Array:
    """bool [N]: whether the episodes with these seeds (int [N]) are for validation, at this fraction of all."""
    if not 0 <= share <= 1:
        raise UseError(f"validation = {share:g} must be a fraction from 0 to 1", "0.1 takes a tenth of the episodes")
    fraction = (mixed(seeds) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # exact, below 1
    return np.asarray(fraction < share)


def mixed(seeds: Array) -> Array:
    """uint64 [N]: SplitMix64 of each seed. Arithmetic is modulo 2^64."""
    bits = np.asarray(seeds, np.int64).reshape(-1).view(np.uint64) + _STEP
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return np.asarray(bits ^ (bits >> np.uint64(31)))
