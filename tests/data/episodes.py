"""Episodes for the tests of datasets: their spec, random contents by seed, and an empty dataset."""

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from tiltyard.config.sections import Env
from tiltyard.data import dataset_file
from tiltyard.data.dataset_file import About
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import observation_specs
from tiltyard.types import EnvSpec, Episode

SPACE = spaces.Dict(
    {
        "eye": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "arm": spaces.Box(-1, 1, (3,), np.float32),
        "code": spaces.Discrete(5),
    }
)
SPEC = EnvSpec(obs=observation_specs(SPACE, 1), action=action_spec(spaces.Box(-1, 1, (2,), np.float32)))


def episode(steps: int, seed: int, **meta: Any) -> Episode:
    rng = np.random.default_rng(seed)
    return Episode(
        obs={
            "eye": rng.integers(0, 256, (steps + 1, 8, 8, 3)).astype(np.uint8),
            "arm": rng.normal(size=(steps + 1, 3)).astype(np.float32),
            "code": rng.integers(0, 5, steps + 1),
        },
        action=rng.normal(size=(steps, 2)).astype(np.float32),
        reward=rng.normal(size=steps).astype(np.float32),
        terminated=seed % 2 == 0,
        truncated=seed % 2 == 1,
        seed=seed,
        info=[{"i": i, "position": np.arange(2), "odd": float("nan")} for i in range(steps)],
        meta={"index": seed, **meta},
    )


def assert_equal(one: Episode, two: Episode) -> None:
    assert list(one.obs) == list(two.obs)
    for left, right in [
        *((one.obs[n], two.obs[n]) for n in one.obs),
        (one.action, two.action),
        (one.reward, two.reward),
    ]:
        assert left.dtype == right.dtype and np.array_equal(left, right)
    assert (one.terminated, one.truncated, one.seed) == (two.terminated, two.truncated, two.seed)


def new_dataset(folder: Path, env: str = "CartPole-v1", *, spec: EnvSpec = SPEC, seed: int = 3) -> About:
    """Make a dataset without episodes."""
    about = dataset_file.about_env(Env(id=env), spec, seed=seed)
    return dataset_file.create_or_check(folder, about, dataset_file.provenance(["test"]))


def writer(folder: Path, *, save_info: bool = False, **meta: Any) -> DatasetWriter:
    """A writer to a dataset, which is made if it is not there."""
    return DatasetWriter(folder, new_dataset(folder), meta, save_info=save_info)
