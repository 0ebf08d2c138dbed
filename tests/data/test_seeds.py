"""Seeds of collected episodes: no seed repeats, and they depend on the dataset's seed and the number alone."""

import numpy as np
import pytest

from tiltyard.data.seeds import BITS, episode_seed

SEEDS = (0, 1, 2**31 - 1, 2**63 - 1)


@pytest.mark.parametrize("dataset_seed", SEEDS)
def test_no_seed_repeats(dataset_seed: int) -> None:
    numbers = {*range(20_000), *range(2**BITS - 5_000, 2**BITS), *(7 << shift for shift in range(28))}
    found = {episode_seed(dataset_seed, number) for number in numbers}
    assert len(found) == len(numbers)
    assert min(found) >= 0 and max(found) < 2**31


def test_steps_of_the_permutation_are_undone() -> None:
    """The whole domain of a smaller copy of the same steps: each of them is a bijection for any number of bits."""
    bits, mask = 16, 2**16 - 1
    values = np.arange(2**bits, dtype=np.int64)
    values = (values * 0x9E3B + 77) & mask
    values ^= values >> 8
    values = (values * 0x2C1D) & mask
    values ^= values >> 7
    assert len(np.unique(values)) == 2**bits


def test_seeds_are_spread_and_differ_between_datasets() -> None:
    rows = np.array([[episode_seed(dataset, number) for number in range(4_000)] for dataset in SEEDS])
    assert np.all(np.abs(rows.mean(axis=1) / 2**31 - 0.5) < 0.03)
    assert len({tuple(row[:5]) for row in rows.tolist()}) == len(SEEDS)
    for bit in (0, 15, 30):
        assert np.all(np.abs(((rows >> bit) & 1).mean(axis=1) - 0.5) < 0.05), bit
    assert episode_seed(5, 17) == episode_seed(5, 17)


@pytest.mark.parametrize("number", [-1, 2**31])
def test_numbers_out_of_range_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="is not in 0"):
        episode_seed(0, number)
