from collections import deque

import numpy as np
import pytest
import torch

from tests.run.test_state_file import peak
from tiltyard.config.rllib_algos import Replay
from tiltyard.engines.rllib.checkpoint import from_plain, to_plain
from tiltyard.engines.rllib.connectors import ReplayBuffer
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


def ring(size):
    return ReplayBuffer(Replay(size=size), gamma=0.9, n_step=1, seed=0)


def rows(count, width=2, start=0):
    numbers = np.arange(start, start + count, dtype=np.float32)
    return {"obs.obs": np.repeat(numbers[:, None], width, 1), "reward": numbers, "terminated": numbers % 2 == 0}


def stored(buffer, folder):
    write_tree(folder, "state", {"replay": buffer.pack()})
    return read_tree(folder, "state", on_disk="replay/")["replay"]


@pytest.mark.parametrize(
    ("put", "size", "kept"), [(5, 8, 5), (8, 8, 8), (11, 8, 8), (11, 20, 8), (11, 3, 3), (5, 3, 3)]
)
def test_replay_buffer_is_restored_from_the_oldest_that_fits_to_the_newest(tmp_path, put, size, kept):
    first, second = ring(8), ring(size)
    for number in range(put):
        first._put(rows(1, start=number))
        first.drawn = np.array([number % 8])
        first.update_priorities([float(number)])
    notes = second.unpack(stored(first, tmp_path))
    newest = np.arange(put - kept, put, dtype=np.float32)
    assert (second.filled, second.at, second.most) == (kept, kept % size, first.most)
    assert second.columns["reward"][:kept].tolist() == newest.tolist()
    assert (second.columns["obs.obs"][:kept] == newest[:, None]).all()
    assert (second.columns["terminated"][:kept] == (newest % 2 == 0)).all()
    places = (newest % 8).astype(int)
    np.testing.assert_array_equal(second.tree.at(np.arange(kept)), first.tree.at(places))
    assert second.tree.total == pytest.approx(first.tree.at(places).sum())
    assert second.random.bit_generator.state == first.random.bit_generator.state
    assert [f"{min(put, 8) - kept} oldest" in note for note in notes] == [True] * (min(put, 8) > kept)


def test_replay_buffer_is_saved_and_restored_without_copies(tmp_path):
    first, second = ring(50_000), ring(50_000)
    first._put(rows(40_000, width=250))  # 38 MiB
    first._put(rows(20_000, width=250))
    size = sum(array.nbytes for array in first.columns.values())
    assert peak(lambda: stored(first, tmp_path)) < 16 * 2**20
    tree = stored(first, tmp_path)
    assert peak(lambda: second.unpack(tree)) < size + 16 * 2**20
    assert second.columns["reward"][-1] == 19_999 and second.columns["reward"][0] == 10_000
