"""Adds episodes to a dataset: each appears whole or not at all, and is never written twice.

    bytes -> .tmp/NAME, synced -> linked as episodes/.../NUMBER.parquet -> a line in this writer's manifest

The link fails if the number exists, whichever process or machine wrote it, so no lock is needed. A file whose writer
was killed before it wrote the line is listed by the next writer that comes to its number.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tiltyard.data import folder as layout
from tiltyard.data import manifest
from tiltyard.data.dataset_file import About
from tiltyard.data.episode_file import encode
from tiltyard.data.manifest import Entry, ManifestWriter
from tiltyard.envs.spaces import spec_to_json
from tiltyard.errors import TiltyardError
from tiltyard.run import atomic
from tiltyard.run.lock import in_use, this_machine
from tiltyard.types import Episode

TEMPORARY = ".tmp"
_NAME = re.compile(r"([0-9a-f]{12})-(\d+)-.*")  # machine and process of the writer
_OLD = 86400.0  # seconds after which an unfinished file of another machine is removed; writing one takes seconds
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


class DatasetWriter:
    """One process that adds episodes to a dataset whose dataset.json exists."""

    def __init__(self, folder: Path, about: About, meta: Mapping[str, Any], *, save_info: bool = False) -> None:
        """`meta` is stored with every episode: policy, run, any JSON values."""
        self.folder, self._save_info = folder, save_info
        self._spec = spec_to_json(about.spec)
        env = {"env": about.env_id, "env_settings": about.env, "env_digest": about.digest, "dataset_seed": about.seed}
        self._meta = {**env, **meta}
        try:
            remove_leftovers(folder)
            self._manifest = ManifestWriter(folder, f"{_machine()}-{os.getpid()}-{atomic.unique()}")
        except OSError as error:
            raise self._cannot_write(error) from error
        self._next = 0
        self._committing = False  # between a file and its line
        self._shards: dict[str, frozenset[int]] = {}
        self._all_packed: frozenset[int] = frozenset()

    def _cannot_write(self, error: OSError) -> TiltyardError:
        reason = error.strerror or error
        return TiltyardError(f"cannot write an episode to {self.folder}: {reason}", "earlier episodes are intact")

    def commit(self, number: int, episodes: Sequence[Episode]) -> bool:
        """Write an episode under its number: several if the env has several agents. False if the number exists."""
        contents = [
            encode(each, self._spec, {**self._meta, **each.meta}, save_info=self._save_info) for each in episodes
        ]
        found = [self._entry(number, content, each) for content, each in zip(contents, episodes, strict=True)]
        return self.commit_bytes(number, list(zip(found, contents, strict=True)))

    def commit_bytes(self, number: int, encoded: Sequence[tuple[Entry, Any]]) -> bool:
        """Write an encoded episode, such as one of another dataset, under a number: the bytes for each of its agents.

        The entries' own number and place do not matter. False if the number exists.
        """
        several = len(encoded) > 1
        file = layout.episode_path(number, "tar" if several else "parquet")
        named = [(f"{number:09d}.{place}.parquet", content) for place, (_, content) in enumerate(encoded)]
        data = layout.to_tar(named) if several else named[0][1]
        try:
            if self.exists(number):
                return False
            self._committing = True
            if not self._link(data, self.folder / file):
                self._committing = False
                return False
            offset, entries = 0, []
            for entry, content in encoded:
                offset += layout.HEADER if several else 0
                entries.append(replace(entry, episode=number, file=file, offset=offset))
                offset += -(-len(content) // layout.HEADER) * layout.HEADER
            self._manifest.add(entries)
            self._committing = False
        except OSError as error:
            raise self._cannot_write(error) from error
        return True

    def append(self, episodes: Sequence[Episode]) -> int:
        """Write an episode under the next free number, and return that."""
        if not self._next:
            numbers = layout.read_manifest(self.folder).numbers()
            self._next = int(numbers[-1]) + 1 if len(numbers) else 0
        while not self.commit(self._next, episodes):
            self.list_existing(self._next)
            self._next += 1
        self._next += 1
        return self._next - 1

    def exists(self, number: int) -> bool:
        """Whether the number is taken, by a file of its own or in a shard."""
        # In this order: a pack lists a shard before it removes files.
        return self.has_file(number) or number in self._packed()

    def has_file(self, number: int) -> bool:
        """Whether there is a file of the episode alone, listed or not."""
        paths = (f"{self.folder}/{layout.episode_path(number, kind)}" for kind in ("parquet", "tar"))
        return any(os.path.exists(path) for path in paths)  # noqa: PTH110 - takes a tenth of the time of Path

    def _packed(self) -> frozenset[int]:
        """The numbers in shards. Their manifests never change."""
        listed = os.listdir(f"{self.folder}/{manifest.FOLDER}")  # noqa: PTH208 - at every commit
        names = {name for name in listed if name.startswith("shard-") and name.endswith(".jsonl")}
        if names != self._shards.keys():
            kept = {name: numbers for name, numbers in self._shards.items() if name in names}
            for name in names - kept.keys():
                table, _ = manifest.read_file(self.folder / manifest.FOLDER / name, f"{manifest.FOLDER}/{name}")
                kept[name] = frozenset(table.column("episode").to_pylist())
            self._shards, self._all_packed = kept, frozenset[int]().union(*kept.values())
        return self._all_packed

    def list_existing(self, number: int) -> bool:
        """List the file of a writer that was killed before it did; False if there is no such file."""
        for kind in ("parquet", "tar"):
            file = layout.episode_path(number, kind)
            if (self.folder / file).exists() and file not in self._listed(number):
                entries, damages = layout.entries_in(self.folder, file)
                if damages or not entries:
                    hint = f"tiltyard data repair {self.folder}"
                    raise TiltyardError(str(damages[0]) if damages else f"{file} holds no episode", hint)
                self._manifest.add(entries)
                return True
        return False

    def _listed(self, number: int) -> set[str]:
        found = manifest.read(self.folder)
        rows = found.column("episode") == number
        return set(found.table.filter(rows).column("file").to_pylist())

    def close(self) -> None:
        """Seal the manifest. A killed writer leaves it open, and so does one that was interrupted (^C) between a file
        and its line: readers then look for such files."""
        self._manifest.close(seal=not self._committing)

    def _entry(self, number: int, content: Any, episode: Episode) -> Entry:
        meta = {**self._meta, **episode.meta}
        return Entry(
            episode=number,
            agent=str(meta.get("agent", "")),
            file="",  # follows when all agents are encoded
            offset=0,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            rows=len(episode.action) + 1,
            seed=episode.seed,
            total=layout.total_reward(episode),
            terminated=episode.terminated,
            truncated=episode.truncated,
            meta=layout.meta_text(meta),
        )

    def _link(self, data: Any, path: Path) -> bool:
        """Create the file with these contents, synced; False if it exists."""
        temporary = temporary_path(self.folder)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic.sync_folder(path.parent.parent)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if path.exists():  # on a file system without links the claim alone keeps others away
                    return False
                temporary.rename(path)
            atomic.sync_folder(path.parent)
            return True
        finally:
            temporary.unlink(missing_ok=True)


def temporary_path(folder: Path) -> Path:
    """A new name for an unfinished file."""
    return folder / TEMPORARY / f"{_machine()}-{os.getpid()}-{atomic.unique()}"


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files of dead writers, and create their folder."""
    (folder / TEMPORARY).mkdir(exist_ok=True)
    for leftover in (folder / TEMPORARY).iterdir():
        with suppress(FileNotFoundError):  # its writer has just finished it
            if _is_abandoned(leftover):
                leftover.unlink()


@cache
def _machine() -> str:
    """This machine in the names of temporary files."""
    return hashlib.sha256("\n".join(this_machine().values()).encode()).hexdigest()[:12]


def _is_abandoned(temporary: Path) -> bool:
    """Whether its writer is dead: gone from this machine, or on another one and silent for a day."""
    name = _NAME.fullmatch(temporary.name)
    if name is not None and name[1] == _machine():
        return not in_use(int(name[2]))
    return time.time() - temporary.stat().st_mtime > _OLD
