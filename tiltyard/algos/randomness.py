"""The process-wide random generators. Nothing of ours draws from them, but a plug-in's dropout or env may.

Whoever runs such code puts its own generators in place for as long as it runs: a training's belong to its seed and its
checkpoints, an evaluation's to the evaluation's seed, and the program around them goes on as if nothing had been drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tiltyard.types import Tree


class Generators:
    """Python's, numpy's and torch's process-wide generators as they are for one user of them."""

    def __init__(self, seed: int) -> None:
        before = _read()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        self._state = _read()
        _write(before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """What is drawn inside comes from these; outside nothing has changed."""
        before = _read()
        _write(self._state)
        try:
            yield
        finally:
            self._state = _read()
            _write(before)

    def save(self) -> Tree:
        return self._state

    def load(self, tree: Tree) -> None:
        self._state = tree


def _read() -> Tree:
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    tree = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {**legacy, "state": dict(legacy["state"])},
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tree["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    return tree


def _write(tree: Tree) -> None:
    python = tree["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    np.random.set_state(tree["numpy"])
    torch.set_rng_state(torch.from_numpy(tree["torch"]))
    if "cuda" in tree and len(tree["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in tree["cuda"]])
