"""Windows as a torch IterableDataset: each window once per epoch, over all ranks and all workers of a DataLoader.

    loader = DataLoader(dataset.windows(32, batch=16).torch(), batch_size=None, num_workers=2)

Ranks and workers divide the reads of an epoch among themselves; each yields whole batches of tensors. By default epochs
follow each other without an end, so that all ranks can take the same number of steps: in one epoch their numbers of
batches may differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tiltyard.data.windows import Batch, Windows, require_identity
from tiltyard.errors import UseError
from tiltyard.types import Array


class TorchWindows(IterableDataset[Batch]):
    """Batches of tensors. Give it to a DataLoader with batch_size=None.

    The rank is that of torch.distributed, or of RANK and WORLD_SIZE (torchrun), when this object is made; a `shard` of
    the windows replaces both.
    """

    def __init__(self, windows: Windows) -> None:
        index, count = windows.plan.shard
        rank, ranks = (index, count) if count > 1 else _rank()
        self._windows = windows.sharded(rank, ranks)
        self._epoch, self._batches, self._workers = 0, 0, -1

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch. Needed before each one if `epochs` is 1."""
        self._epoch, self._batches, self._workers = epoch, 0, -1

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, ranks = self._windows.plan.shard
        if self._batches and self._workers != workers:
            message = f"the state is of a DataLoader with {self._workers} processes, but this one has {workers}"
            raise UseError(message, "set num_workers as before")
        mine = [self._windows.sharded(rank * workers + each, ranks * workers) for each in range(workers)]
        for each in mine:
            each.begin(self._epoch)
        if self._batches:
            counts, following = delivered([each.batches_left() for each in mine], self._batches)
            worker = (worker + following) % workers  # a new DataLoader begins with its worker 0
            mine[worker].skip(counts[worker])
        for batch in mine[worker]:
            yield _tensors(batch)

    def state(self, batches: int, workers: int = 0) -> dict[str, Any]:
        """The position after so many batches of this rank's DataLoader, as JSON values.

        The DataLoader reads ahead, so only the caller knows how many batches it took. They count from the beginning, or
        from `set_epoch`; after `restore`, add those of the state. `workers` is its num_workers.
        """
        position = {"epoch": self._epoch, "batches": batches, "workers": max(1, workers)}
        return {"schema": 1, **position, **self._windows.identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue at a position. UseError if it is of other episodes or another plan."""
        require_identity(state, self._windows.identity(), "the dataset")
        position = [state.get(name) for name in ("epoch", "batches", "workers")]
        if not all(type(value) is int and value >= 0 for value in position):
            message = f"the state of windows is damaged: epoch, batches, workers = {position}"
            raise UseError(message, "start from the beginning")
        self._epoch, self._batches, self._workers = (int(value) for value in position)  # type: ignore[arg-type]


def delivered(left: list[int | None], batches: int) -> tuple[list[int], int]:
    """How many of the first batches each worker has delivered, and the worker that is next.

    `left` is how many batches each has, None without an end. A DataLoader takes one from each worker that has any,
    then starts again with the first.
    """
    most = np.array([batches + 1 if each is None else min(each, batches + 1) for each in left])
    low, high = 0, batches
    while low < high:  # the number of complete rounds
        rounds = (low + high + 1) // 2
        low, high = (rounds, high) if np.minimum(most, rounds).sum() <= batches else (low, rounds - 1)
    counts: Array = np.minimum(most, low)
    active = np.flatnonzero(most > low)
    extra = batches - int(counts.sum())
    counts[active[:extra]] += 1
    return [int(each) for each in counts], int(active[extra]) if extra < len(active) else 0


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def _tensors(batch: Batch) -> Batch:
    return {
        name: _tensors(value) if isinstance(value, dict) else torch.from_numpy(value) for name, value in batch.items()
    }
