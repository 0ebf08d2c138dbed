"""An episode as arrays by name and one JSON object: the form in which TFRecord, npz and WebDataset files hold it.

    arrays    obs.NAME [T + 1, ...]   action [T, columns]   reward [T]
    facts     format, episode, agent, seed, terminated, truncated, length, arrays (dtype and shape of each), meta, info,
              and what dataset.json says: env, digest, dataset_seed, spec

Nothing is lost: `restored` gives the same episode, bit for bit. Actions are as in the dataset, which is how models
see them (tiltyard.envs.actions); `spec` in the facts says what they mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.data import folder as layout
from tiltyard.data.dataset_file import About
from tiltyard.data.manifest import Entry, Manifest
from tiltyard.envs.spaces import spec_from_json, spec_to_json
from tiltyard.errors import UseError
from tiltyard.types import Arrays, Episode

FORMAT = 1
FACTS = "facts"  # name of the JSON among the arrays


@dataclass(frozen=True)
class Recording:
    """One agent's episode in a dataset."""

    number: int
    agent: str
    episode: Episode


def recordings(folder: Path, entries: Manifest) -> Iterator[list[Recording]]:
    """The recordings of each episode number, in order: one for each agent. A damaged one raises TiltyardError."""
    for _, group in itertools.groupby(entries, key=lambda entry: entry.episode):
        yield [_recording(folder, entry) for entry in group]


def _recording(folder: Path, entry: Entry) -> Recording:
    return Recording(entry.episode, entry.agent, layout.open_episode(folder, entry).episode())


def file_stem(recording: Recording, place: int, *, several: bool) -> str:
    """episode-000000123, or episode-000000123.1 for the second agent of several."""
    return f"episode-{recording.number:09d}" + (f".{place}" if several else "")


def arrays_of(episode: Episode) -> Arrays:
    observed = {f"obs.{name}": array for name, array in episode.obs.items()}
    return {**observed, "action": episode.action, "reward": episode.reward}


def facts_of(recording: Recording, about: About, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the arrays, as JSON values. `spec` is that of about.spec by spec_to_json, made once."""
    episode = recording.episode
    arrays = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays_of(episode).items()
    }
    return {
        "format": FORMAT,
        "episode": recording.number,
        "agent": recording.agent,
        "seed": episode.seed,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "length": len(episode.action),
        "arrays": arrays,
        "meta": dict(episode.meta),
        "info": episode.info,
        "env": about.env,
        "digest": about.digest,
        "dataset_seed": about.seed,
        "spec": spec,
    }


def spec_json(about: About) -> dict[str, Any]:
    return spec_to_json(about.spec)


def restored(facts: Mapping[str, Any], arrays: Arrays) -> Recording:
    """The recording of these facts and arrays. KeyError, TypeError or ValueError if they do not fit."""
    for name, saved in facts["arrays"].items():
        if arrays[name].dtype.name != saved["dtype"] or list(arrays[name].shape) != saved["shape"]:
            raise ValueError(f"{name} is not {saved['dtype']} {saved['shape']}")
    episode = Episode(
        obs={name[4:]: arrays[name] for name in facts["arrays"] if name.startswith("obs.")},
        action=arrays["action"],
        reward=arrays["reward"],
        terminated=bool(facts["terminated"]),
        truncated=bool(facts["truncated"]),
        seed=int(facts["seed"]),
        info=list(facts["info"]),
        meta=dict(facts["meta"]),
    )
    return Recording(int(facts["episode"]), str(facts["agent"]), episode)


def about_in(facts: Mapping[str, Any], name: str) -> About:
    """What the facts say about the dataset. UseError for files of a newer version. `name` is for messages."""
    if facts["format"] > FORMAT:
        raise UseError(f"{name} was written by a newer Tiltyard (format {facts['format']})", "update Tiltyard")
    return About(dict(facts["env"]), spec_from_json(facts["spec"]), str(facts["digest"]), facts["dataset_seed"])
