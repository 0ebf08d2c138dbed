"""The split by seed: known values of the hash, even and nested parts, independent of the other episodes."""

import itertools

import numpy as np
import pytest

from tests.counts import count
from tiltyard.data.split import is_validation, mixed
from tiltyard.errors import UseError


def plain(seed: int) -> int:
    """SplitMix64 in plain integers."""
    most = 2**64 - 1
    bits = (seed + 0x9E3779B97F4A7C15) & most
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & most
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & most
    return bits ^ (bits >> 31)


def test_hash_has_its_published_values() -> None:
    # The first output of the generator with state 0 is that of seed 0; the second one that of one step further.
    assert mixed(np.asarray([0]))[0] == 0xE220A8397B1DCDAF
    assert mixed(np.asarray([0x9E3779B97F4A7C15 - 2**64]))[0] == 0x6E789E6AA1B965F4
    rng = np.random.default_rng(0)
    seeds = rng.integers(-(2**63), 2**63, count(2000), np.int64)
    assert mixed(seeds).tolist() == [plain(seed) for seed in seeds.tolist()]


@pytest.mark.parametrize("first", [0, 10**9, 2**62])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_fraction_is_met_on_average_for_consecutive_seeds(first: int, share: float) -> None:
    chosen = is_validation(np.arange(first, first + 20_000), share)
    deviation = np.sqrt(share * (1 - share) / len(chosen))
    assert abs(chosen.mean() - share) < 5 * deviation
    pairs = (chosen[1:] & chosen[:-1]).mean()  # neighbours are independent
    assert abs(pairs - share**2) < 5 * np.sqrt(share**2 / len(chosen))


def test_parts_nest_and_do_not_depend_on_other_episodes() -> None:
    rng = np.random.default_rng(1)
    seeds = rng.integers(-(2**63), 2**63, 3000, np.int64)
    shares = sorted([0.0, 1.0, *rng.random(count(200))])
    parts = [is_validation(seeds, share) for share in shares]
    assert not parts[0].any() and parts[-1].all()
    for smaller, larger in itertools.pairwise(parts):
        assert not (smaller & ~larger).any()
    some = rng.permutation(len(seeds))[:100]
    assert np.array_equal(is_validation(seeds[some], shares[3]), parts[3][some])
    assert [bool(is_validation(np.asarray([seed]), 0.3)[0]) for seed in seeds[:50]] == is_validation(
        seeds[:50], 0.3
    ).tolist()


def test_empty_list_of_seeds_has_no_validation() -> None:
    assert is_validation(np.zeros(0, np.int64), 0.5).shape == (0,)


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan")])
def test_wrong_fraction_is_refused(share: float) -> None:
    with pytest.raises(UseError, match="fraction from 0 to 1"):
        is_validation(np.arange(3), share)
