"""The global random generators of Python, numpy and torch, which only plug-ins use (dropout, an env).

Code that runs plug-ins makes its own Generators active: those of training follow its seed and checkpoints, those of an
evaluation its seed, and the surrounding program is not disturbed.
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
    """A private state of the global generators."""

    def __init__(self, seed: int) -> None:
        before = _read()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        self._state = _read()
        _write(before)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use these as the global generators inside the context; restore the others after it."""
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
    """In the libraries' own format: swapped twice per update, rarely saved."""

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
