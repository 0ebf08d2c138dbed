"""Datasets for the tests of cloning: episodes that a scripted policy plays in a real env."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from tiltyard.config.sections import Env
from tiltyard.data import dataset_file
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.actions import ActionCodec
from tiltyard.envs.probe import probe
from tiltyard.envs.toys.single import Memory
from tiltyard.types import EnvSpec, Episode

Rule = Callable[[list[Any]], Any]
"""gets all observations of the episode so far, and returns the env's own action"""


def spec_of(env: Env, *, previous: bool = False) -> EnvSpec:
    """The spec of an env, probed once in all tests of this process."""
    return _probed(env.model_dump_json(), previous)


@cache
def _probed(env: str, previous: bool) -> EnvSpec:
    return probe(Env.model_validate_json(env), base=[], previous=previous)


def record(folder: Path, env: gymnasium.Env[Any, Any], settings: Env, rule: Rule, seeds: range) -> Path:
    """Add one episode for each seed to a dataset, which is made if it is not there."""
    spec = spec_of(settings)
    about = dataset_file.create_or_check(
        folder, dataset_file.about_env(settings, spec, seed=0), dataset_file.provenance(["test"])
    )
    codec, writer = ActionCodec(spec.action), DatasetWriter(folder, about, {"policy": "scripted"})
    for seed in seeds:
        seen, actions, rewards, over = [env.reset(seed=seed)[0]], [], [], (False, False)
        while not any(over):
            action = rule(seen)
            obs, reward, terminated, truncated, _ = env.step(action)
            seen.append(obs)
            actions.append(codec.encode(action))
            rewards.append(reward)
            over = terminated, truncated
        arrays = {"obs": np.asarray(seen, np.float32)}
        writer.commit(seed, [Episode(arrays, np.stack(actions), np.asarray(rewards, np.float32), *over, seed)])
    writer.close()
    return folder


def balance(seen: list[Any]) -> int:
    """A rule for CartPole that never falls."""
    place, speed, angle, turning = seen[-1]
    return int(angle + 0.5 * turning + 0.05 * place + 0.1 * speed > 0)


def cartpole(folder: Path, episodes: int = 10, first: int = 0, limit: int = 500) -> Path:
    settings = Env(id="CartPole-v1", time_limit=None if limit == 500 else limit)
    env = gymnasium.make("CartPole-v1", max_episode_steps=limit)
    return record(folder, env, settings, balance, range(first, first + episodes))


def pendulum(folder: Path, episodes: int = 4) -> Path:
    """A rule that swings up: with the torque of a damped spring."""

    def rule(seen: list[Any]) -> Any:
        cosine, sine, turning = seen[-1]
        return np.clip(np.array([-8 * np.arctan2(sine, cosine) - 2 * turning], np.float32), -2, 2)

    settings = Env(id="Pendulum-v1", time_limit=100)
    return record(folder, gymnasium.make("Pendulum-v1", max_episode_steps=100), settings, rule, range(episodes))


def remembered(folder: Path, length: int, episodes: int) -> Path:
    """In the toy env `memory`: the action is always the cue, which only the first observation shows."""
    settings = Env(id="memory", options={"length": length})
    return record(folder, Memory(length=length), settings, lambda seen: int(np.argmax(seen[0])), range(episodes))
