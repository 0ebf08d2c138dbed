"""The process-wide random generators. Nothing of ours draws from them, but a plug-in's dropout or env may.

They are part of a checkpoint, and an evaluation in the middle of a training leaves them as it found them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tiltyard.types import Tree


def global_state() -> Tree:
    """Python's, numpy's and torch's generators as a tree."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {**legacy, "state": dict(legacy["state"])},
        "torch": torch.get_rng_state().numpy(),
    }


def restore_global_state(tree: Tree) -> None:
    """Put them where `global_state` found them."""
    python = tree["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    np.random.set_state(tree["numpy"])
    torch.set_rng_state(torch.from_numpy(tree["torch"]))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on outside as if nothing had been."""
    before = global_state()
    try:
        yield
    finally:
        restore_global_state(before)
