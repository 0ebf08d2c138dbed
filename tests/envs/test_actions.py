"""Encoding and decoding actions of every kind of space."""

import numpy as np
import pytest
from gymnasium import spaces

from tests.counts import count
from tiltyard.envs.actions import ActionCodec, action_spec, flat_mask, random_action
from tiltyard.errors import UseError

SPACES = {
    "discrete": spaces.Discrete(4),
    "start": spaces.Discrete(3, start=-2),
    "multi": spaces.MultiDiscrete([2, 5], start=[3, 0]),
    "matrix": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([6.0, 0.2], np.float32)),
    "double": spaces.Box(-3, 7, (2, 2), np.float64),
    "integers": spaces.Box(0, 10, (2,), np.int32),
    "open": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "mixed": spaces.Tuple(
        (
            spaces.Discrete(3),
            spaces.Dict({"b": spaces.MultiBinary(2), "a": spaces.Box(0, 1, (1,), np.float32)}),
            spaces.MultiDiscrete([2, 2]),
        )
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_random_actions_are_in_the_space_and_survive_encoding(name: str) -> None:
    space, rng = SPACES[name], np.random.default_rng(0)
    codec = ActionCodec(action_spec(space))
    for _ in range(count(200)):
        row = codec.random_rows(rng, 1)[0]
        assert row.dtype == np.float32 and row.shape == (codec.spec.columns,)
        action = codec.decode(row)
        assert space.contains(action), (name, row, action)
        again = codec.decode(codec.encode(action))
        assert space.contains(again)
        for left, right in zip(_leaves(action), _leaves(again), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def _leaves(action: object) -> list[object]:
    if isinstance(action, tuple):
        return [leaf for part in action for leaf in _leaves(part)]
    if isinstance(action, dict):
        return [leaf for part in action.values() for leaf in _leaves(part)]
    return [action]


@pytest.mark.parametrize("name", SPACES)
def test_samples_of_the_space_survive_encoding(name: str) -> None:
    space = SPACES[name]
    space.seed(1)
    spec = action_spec(space)
    for _ in range(20):
        sample = space.sample()
        back = ActionCodec(spec).decode(ActionCodec(spec).encode(sample))
        for left, right in zip(_leaves(sample), _leaves(back), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_continuous_columns_are_clipped_and_mapped_onto_bounds() -> None:
    spec = action_spec(SPACES["box"])
    assert ActionCodec(spec).decode(np.array([-1, 1], np.float32)).tolist() == [-2.0, np.float32(0.2)]
    assert ActionCodec(spec).decode(np.array([9, -9], np.float32)).tolist() == [6.0, np.float32(0.1)]
    assert ActionCodec(spec).decode(np.array([0, 0], np.float32))[0] == 2.0
    half_open = action_spec(spaces.Box(np.array([0.0], np.float32), np.array([np.inf], np.float32)))
    assert ActionCodec(half_open).decode(np.array([-4], np.float32)).tolist() == [0.0]
    assert ActionCodec(half_open).decode(np.array([40], np.float32)).tolist() == [40.0]


def test_nested_space_has_columns_and_mask_size_of_all_parts() -> None:
    spec = action_spec(SPACES["mixed"])
    assert spec.columns == 1 + 2 + 1 + 2 and spec.mask_size == 3 + 2 + 2
    keys = list(SPACES["mixed"][1].spaces)
    middle = [{"b": "binary", "a": "continuous"}[key] for key in keys]
    assert [part.kind for part in spec.parts] == ["categorical", *middle, "categorical", "categorical"]


def test_rows_decoded_together_equal_rows_decoded_one_by_one() -> None:
    rng = np.random.default_rng(3)
    for space in SPACES.values():
        codec = ActionCodec(action_spec(space))
        rows = codec.random_rows(rng, 6)
        for row, action in zip(rows, codec.decode_rows(rows), strict=True):
            for left, right in zip(_leaves(action), _leaves(codec.decode(row)), strict=True):
                np.testing.assert_array_equal(left, right)


def test_random_actions_obey_masks_and_are_uniform() -> None:
    spec = action_spec(spaces.MultiDiscrete([3, 2]))
    mask = flat_mask(spec, (np.array([1, 0, 1]), np.array([0, 1])))
    rng = np.random.default_rng(0)
    rows = np.array([random_action(spec, rng, mask) for _ in range(400)])
    assert set(rows[:, 0]) == {0.0, 2.0} and set(rows[:, 1]) == {1.0}
    assert 150 < (rows[:, 0] == 0).sum() < 250


def test_mask_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 entries.*5 options"):
        flat_mask(action_spec(spaces.MultiDiscrete([3, 2])), np.ones(3))


def test_unsupported_action_spaces_are_refused() -> None:
    for space in (spaces.Text(4), spaces.Tuple(())):
        with pytest.raises(UseError):
            action_spec(space)
