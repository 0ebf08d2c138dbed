"""`tiltyard.Dataset`: the episodes of a dataset, whole, as random windows, as single observations, or as a table.

    dataset = tiltyard.Dataset("FOLDER")
    for batch in dataset.windows(32, batch=16, epochs=1): ...

Opening reads the manifest, so a dataset has the episodes that were committed by then; it may grow or be packed while it
is read. Windows and their order are in windows.py, the reading of rows in episode_reader.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tiltyard.data import folder as layout
from tiltyard.data.episode_reader import Reader
from tiltyard.data.manifest import Manifest
from tiltyard.data.split import is_validation
from tiltyard.data.windows import Plan, Windows
from tiltyard.errors import UseError, did_you_mean
from tiltyard.types import Array, EnvSpec, Episode


class Dataset:
    """The episodes of a folder, or some of them: `rows` are indices into its manifest.

    An env with several agents has one episode for each of them.
    """

    def __init__(self, folder: str | Path, *, rows: Array | None = None) -> None:
        self.folder = Path(folder)
        found = layout.read_manifest(self.folder)
        self.about = layout.read_about(self.folder)
        self._open(found if rows is None else found.take(_indices(rows, len(found))))

    def _open(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._reader = Reader(self.folder, manifest)

    def select(self, rows: Array) -> Dataset:
        """Some of these episodes: indices, or a bool for each."""
        view = object.__new__(Dataset)
        view.folder, view.about = self.folder, self.about
        view._open(self.manifest.take(_indices(rows, len(self))))
        return view

    @property
    def spec(self) -> EnvSpec:
        return self.about.spec

    @property
    def steps(self) -> int:
        """Env steps of all episodes."""
        return int(self._reader.lengths.sum())

    def __len__(self) -> int:
        return len(self.manifest)

    def __iter__(self) -> Iterator[Episode]:
        """All episodes in the order of their numbers, each checked against the manifest. A damaged one raises."""
        return (self.episode(index) for index in range(len(self)))

    def episode(self, index: int) -> Episode:
        """One episode; catch TiltyardError to continue after a damaged one."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        return self._reader.episode(index % len(self))

    def split(self, validation: float = 0.1) -> tuple[Dataset, Dataset]:
        """(training, validation) by the hash of each episode's seed: episodes stay on their side when the set grows."""
        chosen = is_validation(self.manifest.column("seed"), validation)
        return self.select(~chosen), self.select(chosen)

    # ------------------------------------------------------------------------------------------ batches

    def windows(
        self,
        length: int,
        *,
        batch: int = 16,
        seed: int = 0,
        per_read: int = 8,
        pool: int = 64,
        names: Sequence[str] | None = None,
        final_obs: bool = False,
        epochs: int | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> Windows:
        """Random windows of `length` env steps; `.torch()` makes them a torch IterableDataset. `per_read=64` gives each
        window once per epoch.

        names       columns to read: obs.NAME, action, reward, terminated, truncated. Default: all
        final_obs   windows have the observation after their last step, too
        epochs      Default: without an end
        shard       this process and the number of processes that divide an epoch among themselves
        """
        if type(length) is int and length < 1:
            raise UseError(f"length = {length} must be 1 or more", "a window of 32 steps: length=32")
        plan = Plan(length, batch, seed, per_read, pool, tuple(names or ()), final_obs, epochs, shard)
        return Windows(self._reader, plan)

    def observations(
        self,
        *,
        batch: int = 64,
        seed: int = 0,
        per_read: int = 32,
        pool: int = 64,
        names: Sequence[str] | None = None,
        epochs: int | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> Windows:
        """Random single observations, with the final one of each episode. `names` are obs.NAME."""
        plan = Plan(0, batch, seed, per_read, pool, tuple(names or ()), False, epochs, shard)
        return Windows(self._reader, plan)

    # ------------------------------------------------------------------------------------------ tables

    def to_arrow(self, names: Sequence[str] | None = None) -> pa.Table:
        """A row for each row of the episodes, T + 1 of an episode: episode, agent, step and the columns `names`.

        Default: all columns but images, which may not fit into memory. Arrays are lists of a fixed size, in C order,
        and their shape is in the field's metadata. The last row of an episode has no action and no reward.
        """
        return pa.concat_tables(self._tables(names)) if len(self) else pa.table({})

    def to_pandas(self, names: Sequence[str] | None = None) -> Any:
        """`to_arrow` as a pandas DataFrame."""
        if find_spec("pandas") is None:
            raise UseError("to_pandas requires the package pandas", "pip install pandas, or use to_arrow")
        return self.to_arrow(names).to_pandas()

    def _tables(self, names: Sequence[str] | None) -> Iterator[pa.Table]:
        columns = self._reader.columns()
        images = {f"obs.{name}" for name, spec in self.spec.obs.items() if spec.image}
        chosen = [name for name in columns if name not in images] if names is None else list(names)
        for name in chosen:
            if name not in columns:
                raise UseError(f"names: unknown column {name!r}", did_you_mean(name, columns))
        for index, (number, agent) in enumerate(self._keys()):
            rows = int(self._reader.lengths[index]) + 1
            arrays = self._reader.rows(index, 0, rows, chosen)
            table = {"episode": np.full(rows, number), "agent": pa.array([agent] * rows, pa.string())}
            table |= {"step": np.arange(rows, dtype=np.int32)}
            fields = [pa.field("episode", pa.int64()), pa.field("agent", pa.string()), pa.field("step", pa.int32())]
            for name in chosen:
                column = _arrow(arrays[name], final=name in ("action", "reward"))
                fields.append(pa.field(name, column.type, metadata={"shape": str(list(columns[name][1]))}))
                table[name] = column
            yield pa.table(table, pa.schema(fields))

    def _keys(self) -> Iterator[tuple[int, str]]:
        table = self.manifest.table
        return zip(table.column("episode").to_pylist(), table.column("agent").to_pylist(), strict=True)


def _indices(rows: Array, count: int) -> Array:
    """Sorted indices of the rows of a manifest. UseError if there is no such row, or one occurs twice."""
    given = np.asarray(rows)
    if given.dtype == bool:
        if given.shape != (count,):
            raise UseError(f"rows has {len(given)} values for {count} episodes", "give one bool for each episode")
        return np.flatnonzero(given)
    if given.size and given.dtype.kind not in "iu":
        raise UseError("rows must be integers, or a bool for each episode", "use the indices of the manifest")
    chosen = np.unique(given.astype(np.int64))
    if len(chosen) != given.size or (len(chosen) and not 0 <= chosen[0] <= chosen[-1] < count):
        raise UseError(f"rows must be different integers from 0 to {count - 1}", "use the indices of the manifest")
    return chosen


def _arrow(array: Array, *, final: bool) -> pa.Array:
    """A column; the last row is null if `final`."""
    mask = np.arange(len(array)) == len(array) - 1 if final else None
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if array.ndim == 1:
        return pa.array(native, mask=mask)
    width = int(np.prod(array.shape[1:], dtype=np.int64))
    nulls = None if mask is None else pa.array(mask)
    return pa.FixedSizeListArray.from_arrays(pa.array(native.reshape(-1)), width, mask=nulls)
