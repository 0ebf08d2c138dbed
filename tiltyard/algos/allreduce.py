"""Several learners of one policy: each works through its part of every minibatch, and all take the same gradient step.

    learner 0    its part of the minibatch -> gradient --\\
    learner 1    its part of the minibatch -> gradient ---+-- sum -> clip -> Adam, in each of them alike

Owns who has which part and how a sum over all of them comes about; not what is summed, nor the processes. What is
drawn or decided for everybody, the shuffling or `kl_stop`, each of them works out from the same numbers.
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
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.errors import TiltyardError

Array = NDArray[Any]

TIMEOUT = timedelta(minutes=5)  # between the first and the last to come to a sum: their work is equally long


class PeerLostError(TiltyardError):
    """Another learner is gone or does not answer; why is known to whoever started it."""


class LearnerGroup(Protocol):
    """The learners of a policy, as one of them sees them."""

    size: int

    def share(self, count: int) -> slice:
        """Which of `count` things in a row are this learner's."""

    def sum_(self, tensor: Tensor) -> None:
        """Put the sum over all learners in place of each one's tensor. The same bits everywhere."""

    def total(self, array: Array) -> Array:
        """The sum over all learners of each one's array."""


class SingleProcess:
    """One learner: everything is its own, and the sum is what it has."""

    size = 1

    def share(self, count: int) -> slice:
        return slice(None)

    def sum_(self, tensor: Tensor) -> None:
        return

    def total(self, array: Array) -> Array:
        return array


class ProcessGroup:
    """One of several in processes of their own, which talk over loopback (gloo), or from GPU to GPU (nccl).

    They meet through a file in `folder`, which all of them can write and which is of no use once all are there.
    `look` is called while a GPU is waited for, and raises when that has become pointless: nccl does not notice that
    a process has died, gloo does.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, device: torch.device, look: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.size = rank, size
        self._device, self._look = device, look
        store = distributed.FileStore(str(folder / "meeting"), size)  # type: ignore[attr-defined]
        store.set_timeout(TIMEOUT)
        self._group = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)

    def share(self, count: int) -> slice:
        """Parts differ by one at most; with fewer things than learners some have none."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum_(self, tensor: Tensor) -> None:
        try:
            work = self._group.allreduce([tensor])
            while self._device.type == "cuda" and not work.is_completed():
                self._look()
                time.sleep(0)
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"the learners lost each other: {error}", "see the messages above") from error

    def total(self, array: Array) -> Array:
        tensor = torch.tensor(array, device=self._device)
        self.sum_(tensor)
        return np.asarray(tensor.cpu().numpy())

    def leave(self) -> None:
        """Wait for nobody any more."""
        if self._device.type == "cuda":
            self._group.abort()


def _gloo(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = TIMEOUT
    # Nobody from outside this machine is let in.
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return distributed.ProcessGroupNCCL(store, rank, size, options)
