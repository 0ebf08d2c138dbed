"""Splitting work: every item is in exactly one part, for any number of items and parts."""

import itertools
import random

import pytest

from tests.counts import count
from tiltyard.data.partition import part, parts


def test_every_item_is_in_exactly_one_part() -> None:
    rng = random.Random(0)
    cases = [(0, 1), (0, 7), (1, 1), (1, 9), (7, 7), (10**12, 3)]
    cases += [(rng.randrange(3000), rng.randrange(1, 60)) for _ in range(count(3000))]
    for items, number in cases:
        found = parts(items, number)
        assert found == [part(items, number, index) for index in range(number)]
        assert found[0].start == 0 and found[-1].stop == items
        assert all(one.stop == other.start for one, other in itertools.pairwise(found))
        sizes = [each.stop - each.start for each in found]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("items", "number", "index"), [(-1, 1, 0), (3, 0, 0), (3, 2, 2), (3, 2, -1)])
def test_part_that_does_not_exist_is_an_error(items: int, number: int, index: int) -> None:
    with pytest.raises(ValueError, match="no part"):
        part(items, number, index)
