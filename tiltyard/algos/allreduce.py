"""Sums over several learners of one policy: each takes its part of every minibatch, all take the same gradient step.

    learner 0    its part of the minibatch -> gradient --\\
    learner 1    its part of the minibatch -> gradient ---+-- sum -> clip -> Adam, the same in each

The processes belong to engines.local. Shuffling and `kl_stop` need no message: all compute them from equal numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from tiltyard.data.partition import part
from tiltyard.errors import TiltyardError
from tiltyard.types import Array

TIMEOUT = timedelta(minutes=5)  # between the first and the last learner to reach a sum


class PeerLostError(TiltyardError):
    """Another learner exited or does not answer; the process that started it knows why."""


class LearnerGroup(Protocol):
    """The learners of one policy, seen from one of them."""

    size: int

    def share(self, count: int) -> slice:
        """This learner's part of `count` items."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor of each learner by the sum over all, bit-identical everywhere."""

    def total(self, array: Array) -> Array:
        """The sum of an array over all learners."""


class SingleProcess:
    """One learner: all items are its part, every sum is its own value."""

    size = 1

    def share(self, count: int) -> slice:
        return slice(None)

    def sum_(self, tensor: Tensor) -> None:
        return

    def total(self, array: Array) -> Array:
        return array


class ProcessGroup:
    """One of several learner processes, connected over loopback (gloo) or between GPUs (nccl).

    They find each other through a file in `folder`. `poll` is called while waiting for a GPU and raises when another
    learner has died: gloo notices that itself, nccl does not.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, device: torch.device, poll: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.size = rank, size
        self._device, self._poll = device, poll
        store = distributed.FileStore(str(folder / "meeting"), size)  # type: ignore[attr-defined]
        store.set_timeout(TIMEOUT)
        self._group = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)

    def share(self, count: int) -> slice:
        """Sizes differ by at most one; with fewer items than learners some are empty."""
        mine = part(count, self.size, self.rank)
        return slice(mine.start, mine.stop)

    def sum_(self, tensor: Tensor) -> None:
        try:
            work = self._group.allreduce([tensor])
            while self._device.type == "cuda" and not work.is_completed():
                self._poll()
                time.sleep(0)
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(
                f"the connection between the learners was lost: {error}", "see the messages above"
            ) from error

    def total(self, array: Array) -> Array:
        tensor = torch.tensor(array, device=self._device)
        self.sum_(tensor)
        return np.asarray(tensor.cpu().numpy())


def _gloo(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = TIMEOUT
    # Only loopback: no connection from other machines.
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return distributed.ProcessGroupNCCL(store, rank, size, options)
