"""`eval --save-rollouts`: the episodes of an evaluation in a dataset. Evaluating again writes none of them twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiltyard.config.sections import Env
from tiltyard.data import dataset_file
from tiltyard.data.folder import read_manifest
from tiltyard.data.writer import DatasetWriter
from tiltyard.errors import UseError
from tiltyard.evaluation.recording import with_own_names
from tiltyard.types import EnvSpec, Episode


class SavedRollouts:
    """Adds episodes of one policy to a dataset. `policy` says which: run, checkpoint and how it acts."""

    def __init__(
        self, folder: Path, env: Env, spec: EnvSpec, policy: Mapping[str, Any], made: list[str] | None, save_info: bool
    ) -> None:
        """`made` is the command to note in dataset.json; None if another process does that."""
        entry = None if made is None else dataset_file.provenance(made, **policy)
        _refuse_collected(folder)
        about = dataset_file.create_or_check(folder, dataset_file.about_env(env, spec), entry)
        self._there = _seeds(folder, policy)
        name = f"{policy['acting']}:{policy['run']}@{policy['checkpoint']}"
        self._writer = DatasetWriter(folder, about, {"policy": name, **policy}, save_info=save_info)
        self.repeated = 0
        """episodes that were there already"""

    def keep(self, index: int, episodes: list[Episode]) -> None:
        """Write an episode of the evaluation: those of all agents of an env."""
        if episodes[0].seed in self._there:
            self.repeated += 1
            return
        self._writer.append([replace(each, meta={**each.meta, "episode": index}) for each in with_own_names(episodes)])

    def close(self) -> None:
        self._writer.close()


def _refuse_collected(folder: Path) -> None:
    """The episodes of `data collect` have seeds that follow from their numbers; others would take these numbers."""
    there = dataset_file.read(folder)
    if there is not None and there.seed is not None:
        hint = f"give another folder; to join both: tiltyard data merge {folder} OTHER --out NEW"
        raise UseError(f"{folder} was made by `tiltyard data collect`, and evaluations cannot be added to it", hint)


def _seeds(folder: Path, policy: Mapping[str, Any]) -> set[int]:
    """The seeds of the episodes that this policy has played into the dataset before."""
    found = set()
    for entry in read_manifest(folder):
        meta = json.loads(entry.meta)
        if all(meta.get(name) == value for name, value in policy.items()):
            found.add(entry.seed)
    return found
