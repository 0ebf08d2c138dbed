"""What every process of a run needs, as plain values: experiment, env spec, plug-in folders.

RLlib passes it on in its own settings: `env_config` for runners, `model_config` for modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from tiltyard.config.experiment import Experiment, family
from tiltyard.engines.collector import INIT, stream_seed
from tiltyard.envs.spaces import MASK, spec_from_json, spec_to_json
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import EnvSpec

KEY = "tiltyard"  # our entry beside the keys that RLlib adds
SECONDS, UPDATES = "tiltyard_seconds", "tiltyard_updates"  # our metrics of a learner, beside RLlib's


@dataclass(frozen=True)
class WorkerSpec:
    """`attempt` counts the starts of the run: random streams that cannot be restored get new seeds."""

    experiment: Experiment
    spec: EnvSpec
    base: tuple[Path, ...]
    attempt: int = 0

    def as_config(self) -> dict[str, Any]:
        """An entry for RLlib's settings, of plain values."""
        return {
            KEY: {
                "experiment": self.experiment.model_dump(mode="json", by_alias=True),
                "spec": spec_to_json(self.spec),
                "base": [str(Path(place).absolute()) for place in self.base],
                "attempt": self.attempt,
            }
        }

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> WorkerSpec:
        own = config[KEY]
        base = tuple(Path(place) for place in own["base"])
        return WorkerSpec(
            Experiment.model_validate(own["experiment"]), spec_from_json(own["spec"]), base, own["attempt"]
        )

    def net(self, policy: str | None = None) -> PolicyNet:
        """A policy's net with its first weights, which are the same on every engine."""
        place = list(self.experiment.policy_settings).index(policy or self.experiment.learning[0])
        seed = stream_seed(self.experiment.seed, INIT, place)
        return PolicyNet(self.spec, self.experiment.model, self.base, seed=seed, squashed=self.experiment.squashed)

    def spaces(self) -> dict[str, gymnasium.Space[Any]]:
        """RLlib's spaces: one row's stored observations with its action mask, and flat actions as the algorithm
        needs them."""
        spec, action, algo = self.spec, self.spec.action, family(self.experiment.algo)
        obs: dict[str, gymnasium.Space[Any]] = {}
        for name, item in spec.obs.items():
            dtype = np.dtype(item.dtype)
            low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            obs[name] = Box(low, high, item.shape, dtype.type)
        if spec.masked:
            obs[MASK] = Box(0, 1, (action.mask_size,), np.int8)
        bound = 1.0 if algo == "sac" else np.inf
        actions: gymnasium.Space[Any] = Box(-bound, bound, (action.columns,), np.float32)
        if algo == "dqn":
            actions = Discrete(action.parts[0].options)
        return {"observation_space": gymnasium.spaces.Dict(obs), "action_space": actions}
