from collections import deque

import numpy as np
import pytest
import torch

from tiltyard.engines.rllib.checkpoint import from_plain, to_plain
from tiltyard.errors import TiltyardError
from tiltyard.run.state_file import read_tree, write_tree


def test_state_survives_a_round_trip(tmp_path):
    state = {
        "adam": {0: {"step": torch.tensor(3.0), "moment": np.arange(4.0, dtype=np.float32)}, 1: None},
        "betas": (0.9, 0.999),
        "window": deque([1.0, float("nan")], maxlen=5),
        "count": np.int64(2**40),
        "names": {"a"},
        "$": "a key like the mark",
    }
    write_tree(tmp_path, "state", to_plain(state))
    back = from_plain(read_tree(tmp_path, "state"))
    assert back["adam"][0]["step"].item() == 3.0 and torch.is_tensor(back["adam"][0]["step"])
    np.testing.assert_array_equal(back["adam"][0]["moment"], np.arange(4.0, dtype=np.float32))
    assert back["adam"][1] is None and back["betas"] == (0.9, 0.999)
    assert back["window"].maxlen == 5 and np.isnan(back["window"][1])
    assert back["count"] == 2**40 and isinstance(back["count"], np.int64)
    assert back["names"] == {"a"} and back["$"] == "a key like the mark"


def test_unknown_types_are_refused_by_name():
    with pytest.raises(TiltyardError) as refused:
        to_plain({"learner": {"made": object()}})
    assert "builtins.object" in refused.value.message and "learner.made" in refused.value.message
