"""Minari datasets: write one, and read one. Minari is asked for local files only, never for the network.

    FOLDER/data/metadata.json, main_data.hdf5    Minari's own; images are stored as they are, not as JPEG
    FOLDER/data/tiltyard.jsonl                   what Minari has no place for: spec, env settings, meta data

Observations are those of the dataset, as a Dict space by name or as a single array. Actions are the env's own: a
continuous action outside of the env's bounds is clipped to them. Info dicts are left out. Every agent's episode is one
episode of Minari's. Observations of float64 are rounded to float32 when they are read, as everywhere in Tiltyard.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from tiltyard.config.sections import Env
from tiltyard.data.dataset_file import About, about_env
from tiltyard.data.env_actions import action_space, decode_actions
from tiltyard.data.exchange import FORMAT, Recording, about_in, spec_json
from tiltyard.data.rollouts import Rollout
from tiltyard.envs.actions import ActionCodec, action_spec
from tiltyard.envs.spaces import BARE, encode_leaves, hash_words, observation_leaves, observation_specs, pick
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.types import Array, Arrays, ArraySpec, EnvSpec

SIDECAR = "tiltyard.jsonl"
METADATA = "metadata.json"
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AssertionError, AttributeError, RuntimeError)


def _minari() -> Any:
    try:
        import h5py  # noqa: F401 - Minari finds out late that it is missing
        import minari
    except ImportError as error:
        raise UseError(f"Minari requires the package {error.name}", "pip install 'tiltyard[data]'") from error
    return minari


# ---------------------------------------------------------------------------------------------- writing


def writer(about: About, name: str) -> Callable[[Path, Iterator[list[Recording]], int], list[str]]:
    """A function that writes all episodes as the Minari dataset with this id. UseError if it cannot be one."""
    minari = _minari()
    try:
        minari.dataset.minari_dataset.parse_dataset_id(name)
    except (ValueError, TypeError):
        hint = "the folder's name is the id of the dataset: letters, digits, _ and -, and a version, as in cartpole-v0"
        raise UseError(f"--out .../{name} is not the name of a Minari dataset", hint) from None
    odd = [key for key in about.spec.obs if "/" in key or key in ("", ".")]
    if odd:
        raise UseError(f"HDF5 cannot hold an observation with the name {odd[0]!r}", "use --to npz or tfrecord")

    def write(draft: Path, groups: Iterator[list[Recording]], count: int) -> list[str]:
        return _write(minari, draft / "data", groups, about, name)

    return write


def _write(minari: Any, folder: Path, groups: Iterator[list[Recording]], about: About, name: str) -> list[str]:
    observed, codec = observation_space(about.spec.obs), ActionCodec(about.spec.action)
    folder.mkdir()
    storage = minari.dataset.minari_storage.MinariStorage.new(
        folder, observed, action_space(about.spec.action), jpeg_encoding=False
    )
    storage.update_metadata({"dataset_id": name, "minari_version": minari.__version__})
    head = {"format": FORMAT, "env": about.env, "digest": about.digest, "dataset_seed": about.seed}
    lines = [atomic.to_line({**head, "spec": spec_json(about)})]
    infos = 0
    for group in groups:
        storage.update_episodes([_buffer(minari, each, codec, observed) for each in group])
        lines += [atomic.to_line(_facts(each)) for each in group]
        infos += sum(bool(each.episode.info) for each in group)
    atomic.write_text(folder / SIDECAR, "".join(f"{line}\n" for line in lines))
    for path in folder.iterdir():
        _sync(path)
    return [f"info dicts of {infos:,} episodes are left out: Minari has no place for them"] if infos else []


def _facts(recording: Recording) -> dict[str, Any]:
    episode = recording.episode
    return {
        "episode": recording.number,
        "agent": recording.agent,
        "seed": episode.seed,
        "length": len(episode.action),
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "meta": dict(episode.meta),
    }


def _buffer(minari: Any, recording: Recording, codec: ActionCodec, observed: spaces.Space[Any]) -> Any:
    episode, steps = recording.episode, len(recording.episode.action)
    ends = np.zeros((2, steps), bool)
    ends[:, -1:] = [[episode.terminated], [episode.truncated]]
    return minari.data_collector.episode_buffer.EpisodeBuffer(
        seed=episode.seed,
        observations=dict(episode.obs) if isinstance(observed, spaces.Dict) else next(iter(episode.obs.values())),
        actions=decode_actions(codec, episode.action),
        rewards=episode.reward,
        terminations=ends[0],
        truncations=ends[1],
    )


def observation_space(obs: Mapping[str, ArraySpec]) -> spaces.Space[Any]:
    """The space of stored observations: a Dict by name, or the one space of a bare observation."""
    found = {name: _leaf(item) for name, item in obs.items()}
    return found[BARE] if list(found) == [BARE] else spaces.Dict(found)


def _leaf(item: ArraySpec) -> spaces.Space[Any]:
    if item.kind == "discrete":
        return spaces.Discrete(item.options[0])
    if item.kind == "multi_discrete":
        return spaces.MultiDiscrete(np.asarray(item.options).reshape(item.shape))
    dtype = np.dtype(item.dtype)
    if item.kind == "multi_binary":
        return spaces.Box(0, 1, item.shape, np.uint8)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, item.shape, dtype.type)
    return spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, item.shape, dtype.type)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------- reading


def find(source: str) -> Path | None:
    """The data folder of a Minari dataset: given by its folder, or by its id below MINARI_DATASETS_PATH."""
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")
    for place in (Path(source), root / source):
        for folder in (place / "data", place):
            if (folder / METADATA).is_file():
                return folder
    return None


class Reader:
    """A Minari dataset that was opened. `about` is what it says about its env; no env is made for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            saved = atomic.read_json(folder / METADATA)
            if not (isinstance(saved.get("observation_space"), str) and isinstance(saved.get("action_space"), str)):
                # Minari would make the env that the file names, and thereby run code that the file chooses
                hint = "write it again with a newer Minari, which stores the spaces"
                raise UseError(f"{folder} does not say what its observations and actions are", hint)
            self._storage = _minari().dataset.minari_storage.MinariStorage.read(folder)
            self._observed = self._storage.observation_space
            self._leaves = observation_leaves(self._observed)
            self.count = int(saved["total_episodes"])
            self._lines = self._sidecar()
            self.about = about_in(self._lines[0], str(folder)) if self._lines else self._about(saved)
        except _READ_ERRORS as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> TiltyardError:
        text = f"{type(error).__name__}: {error}"
        return TiltyardError(f"{self.folder} is not a readable Minari dataset: {text}", "restore it from a copy")

    def _sidecar(self) -> list[dict[str, Any]]:
        """What our own export wrote next to it; nothing if the dataset was changed since, or is another program's."""
        lines, broken = atomic.read_lines(self.folder / SIDECAR)
        if broken:
            raise ValueError(f"line {broken[0]} of {SIDECAR} is damaged")
        if lines and len(lines) != self.count + 1:
            warnings.warn(f"{self.folder / SIDECAR} is not used: the dataset was changed since", stacklevel=2)
            return []
        return lines

    def _about(self, saved: Mapping[str, Any]) -> About:
        spec = EnvSpec(observation_specs(self._observed), action_spec(self._storage.action_space))
        text = saved.get("env_spec")
        named = json.loads(text) if isinstance(text, str) else {}
        if not named.get("id"):
            return About({"id": "unknown"}, spec, created=atomic.now())
        try:
            return about_env(Env(id=named["id"], options=named.get("kwargs") or {}), spec)
        except ValueError:  # options that an experiment cannot have
            return About({"id": str(named["id"])}, spec, created=atomic.now())

    @property
    def own(self) -> bool:
        """Whether Tiltyard wrote it."""
        return bool(self._lines)

    def __iter__(self) -> Iterator[tuple[int, Rollout]]:
        """(number, episode) of all episodes; those of several agents follow each other."""
        for index in range(self.count):
            try:
                (data,) = self._storage.get_episodes([index])
                (known,) = self._storage.get_episode_metadata([index])
                facts = self._lines[index + 1] if self._lines else {}
                yield int(facts.get("episode", index)), self._rollout(data, known, facts)
            except _READ_ERRORS as error:
                raise self._unreadable(error) from error

    def _rollout(self, data: Mapping[str, Any], known: Mapping[str, Any], facts: Mapping[str, Any]) -> Rollout:
        reward, over, cut = (np.asarray(data[name]) for name in ("rewards", "terminations", "truncations"))
        steps = len(reward)
        if not steps or len(over) != steps or len(cut) != steps or np.any(over[:-1] | cut[:-1]):
            raise ValueError(f"episode {data['id']} does not end with its last step")
        obs = self._stored(data["observations"]) if self._lines else self._encoded(data["observations"])
        if any(len(array) != steps + 1 for array in obs.values()):
            raise ValueError(f"episode {data['id']} has {steps} steps, but not {steps + 1} observations")
        terminated, truncated = bool(over[-1]), bool(cut[-1])
        seed = known.get("seed")
        meta = dict(facts.get("meta", {}))
        ended = terminated or truncated or bool(facts)
        return Rollout(
            obs, data["actions"], reward, terminated, truncated or not ended, None if seed is None else int(seed), meta
        )

    def _stored(self, observations: Any) -> Arrays:
        """Observations of our own export, which are in the form of a dataset already."""
        return dict(observations) if isinstance(self._observed, spaces.Dict) else {BARE: np.asarray(observations)}

    def _encoded(self, observations: Any) -> Arrays:
        found: dict[str, Array] = {}
        for leaf in self._leaves:
            value = pick(observations, leaf.path)
            if leaf.spec.kind == "text":
                found[leaf.name] = np.stack([hash_words(text) for text in value])
            else:
                found[leaf.name] = encode_leaves(leaf, np.asarray(value))
        return found
