"""Observation spaces as named arrays, and specs as JSON."""

import json
import zlib

import numpy as np
import pytest
from gymnasium import spaces

from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import (
    encode,
    fill_stack,
    observation_leaves,
    observation_specs,
    previous_specs,
    spec_from_json,
    spec_to_json,
    stack_axis,
)
from tiltyard.errors import UseError
from tiltyard.types import ArraySpec, EnvSpec

NESTED = spaces.Dict(
    {
        "action_mask": spaces.MultiBinary(3),
        "arm": spaces.Tuple(
            (spaces.Dict({"angle": spaces.Box(-1, 1, (2,), np.float64)}), spaces.Discrete(4, start=-1))
        ),
        "eye": spaces.Box(0, 255, (20, 24, 3), np.uint8),
        "keys": spaces.MultiDiscrete([2, 3], start=[1, 5]),
        "bits": spaces.MultiBinary(3),
        "flag": spaces.Box(0, 1, (), bool),
        "ticks": spaces.Box(0, 9, (1,), np.uint16),
        "say": spaces.Text(40),
    }
)
OBS = {
    "action_mask": np.ones(3, np.int8),
    "arm": ({"angle": np.array([0.25, -1.0])}, 2),
    "eye": np.zeros((20, 24, 3), np.uint8),
    "keys": np.array([2, 7]),
    "bits": np.array([1, 0, 1], np.int8),
    "flag": np.array(True),
    "ticks": np.array([7], np.uint16),
    "say": "Go left, GO!",
}


def test_every_leaf_has_a_name_a_shape_and_a_stored_dtype() -> None:
    specs = observation_specs(NESTED, 1)
    assert {name: (spec.kind, spec.shape, spec.dtype) for name, spec in specs.items()} == {
        "arm.0.angle": ("box", (2,), "float32"),
        "arm.1": ("discrete", (), "int64"),
        "eye": ("box", (20, 24, 3), "uint8"),
        "keys": ("multi_discrete", (2,), "int64"),
        "bits": ("multi_binary", (3,), "uint8"),
        "flag": ("multi_binary", (), "uint8"),
        "ticks": ("box", (1,), "int32"),
        "say": ("text", (32,), "int32"),
    }
    assert specs["eye"].image and not specs["arm.0.angle"].image
    assert specs["arm.1"].options == (4,) and specs["keys"].options == (2, 3)


def test_encoding_counts_categories_from_zero_and_hashes_words() -> None:
    arrays = encode(observation_leaves(NESTED), OBS)
    assert arrays["arm.0.angle"].tolist() == [0.25, -1.0] and arrays["arm.0.angle"].dtype == np.float32
    assert arrays["arm.1"] == 3 and arrays["keys"].tolist() == [1, 2]
    assert arrays["flag"] == 1 and arrays["ticks"].tolist() == [7]
    words = [zlib.crc32(word) % 4095 + 1 for word in (b"go", b"left", b",", b"go", b"!")]
    assert arrays["say"].tolist() == words + [0] * 27
    assert "action_mask" not in arrays
    for name, spec in observation_specs(NESTED, 1).items():
        assert arrays[name].shape == spec.shape and arrays[name].dtype == spec.dtype


def test_long_text_is_cut() -> None:
    space = spaces.Text(1000)
    encoded = encode(observation_leaves(space), "word " * 100)["obs"]
    assert encoded.shape == (32,) and (encoded > 0).all()


@pytest.mark.parametrize(
    ("space", "stacked", "axis"),
    [
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), (84, 84, 12), 2),
        (spaces.Box(0, 255, (3, 84, 84), np.uint8), (12, 84, 84), 0),
        (spaces.Box(0, 255, (84, 84), np.uint8), (4, 84, 84), 0),
        (spaces.Box(-1, 1, (5,), np.float32), (20,), 0),
        (spaces.Discrete(3), (4,), 0),
        (spaces.MultiDiscrete([2, 3]), (8,), 0),
        (spaces.Box(-1, 1, (), np.float32), (4,), 0),
    ],
)
def test_stacking_widens_one_axis(space: spaces.Space, stacked: tuple[int, ...], axis: int) -> None:
    single, many = observation_specs(space, 1)["obs"], observation_specs(space, 4)["obs"]
    assert many.shape == stacked and stack_axis(single) == axis
    space.seed(0)
    encoded = fill_stack(encode(observation_leaves(space), space.sample())["obs"], many.shape)
    assert encoded.shape == stacked
    frames = np.split(encoded, 4, axis) if single.shape else list(encoded)
    assert all(np.array_equal(frame, frames[0]) for frame in frames)


def test_stack_with_more_channels_than_pixels_is_not_an_image() -> None:
    space = spaces.Box(0, 255, (7, 7, 3), np.uint8)
    assert observation_specs(space, 2)["obs"].image
    assert not observation_specs(space, 4)["obs"].image


def test_fill_stack_repeats_the_observation() -> None:
    assert fill_stack(np.array([1, 2]), (4,)).tolist() == [1, 2, 1, 2]
    assert fill_stack(np.int64(3), (2,)).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("space", "output"),
    [
        (spaces.Sequence(spaces.Discrete(2)), "Sequence"),
        (spaces.Dict({"action_mask": spaces.MultiBinary(2)}), "contains no observations"),
        (spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)}), "a.b": spaces.Discrete(2)}), "'a.b'"),
    ],
)
def test_unsupported_observation_spaces_are_refused(space: spaces.Space, output: str) -> None:
    with pytest.raises(UseError) as caught:
        observation_specs(space, 1)
    assert output in caught.value.message and caught.value.hint


def test_spec_survives_json() -> None:
    action = action_spec(
        spaces.Dict(
            {
                "z": spaces.Box(np.array([-np.inf, 0.0, -1], np.float32), np.array([np.inf, np.inf, 2], np.float32)),
                "a": spaces.Discrete(2),
            }
        )
    )
    spec = EnvSpec(
        obs={**observation_specs(NESTED, 2), **previous_specs(action)},
        action=action,
        masked=True,
        frameskip=3,
        episode_limit=17,
        restore_mode="fresh",
        renders=True,
        env_bytes=12,
        notes=("a note",),
    )
    text = json.dumps(spec_to_json(spec), allow_nan=False, sort_keys=True)
    assert spec_from_json(json.loads(text)) == spec
    assert spec.obs["previous.action"] == ArraySpec("box", (action.columns,), "float32")
