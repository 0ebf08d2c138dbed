"""The process-wide random generators. Nothing of ours draws from them, but a plug-in's dropout or env may.

Whoever runs such code puts its own generators in place for as long as it runs: a training's belong to its seed and its
checkpoints, an evaluation's to the evaluation's seed, and the program around them goes on as if nothing had been drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    def active(self) -> Iterator[None]:
        """What is drawn inside comes from these; outside nothing has changed."""
        before = _read()
        _write(self._state)
        try:
            yield
        finally:
            self._state = _read()
            _write(before)

    def save(self) -> Tree:
        version, words, gauss = self._state.python
        tree = {
            "python": {"version": version, "words": list(words), "gauss": gauss},
            "numpy": {**self._state.numpy, "state": dict(self._state.numpy["state"])},
            "torch": self._state.torch.numpy(),
        }
        return tree | ({"cuda": [state.numpy() for state in self._state.cuda]} if self._state.cuda else {})

    def load(self, tree: Tree) -> None:
        python = tree["python"]
        self._state = _State(
            (python["version"], tuple(python["words"]), python["gauss"]),
            tree["numpy"],
            torch.from_numpy(tree["torch"]),
            [torch.from_numpy(state) for state in tree.get("cuda", [])],
        )


class _State(NamedTuple):
    """As the libraries give and take it: put in place twice per update, and seldom saved."""

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor
    cuda: list[torch.Tensor]


def _read() -> _State:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return _State(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda)


def _write(state: _State) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)
    if state.cuda and len(state.cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state.cuda)
