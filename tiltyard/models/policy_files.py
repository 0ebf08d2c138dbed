"""The files of a policy in a checkpoint.

policies/main.safetensors   weights and running statistics, by name
policies/main.json          schema, env spec, model settings, reward and frame settings, versions
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import tiltyard
from tiltyard.config.experiment import Experiment
from tiltyard.envs.spaces import spec_to_json
from tiltyard.errors import UseError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run import atomic
from tiltyard.types import EnvSpec, Tree

POLICY_SCHEMA = 1


def policy_tree(name: str, net: PolicyNet, spec: EnvSpec, experiment: Experiment) -> dict[str, Tree]:
    """The tree policies/`name` of a checkpoint. It shares the net's memory."""
    tree = {
        "schema": POLICY_SCHEMA,
        "place": list(experiment.policy_settings).index(name) if name in experiment.policy_settings else 0,
        "spec": spec_to_json(spec),
        "model": experiment.model.model_dump(mode="json"),
        "squashed": net.squashed,
        "env": {
            "id": experiment.env.id,
            "frame_stack": experiment.env.frame_stack,
            "reward_scale": experiment.env.reward_scale,
            "reward_clip": experiment.env.reward_clip,
        },
        "versions": {"tiltyard": tiltyard.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
        "weights": net.views(),
    }
    return {f"policies/{name}": tree}


def saved_policies(folder: Path) -> list[str]:
    """Names of the policies of a checkpoint, in order; the first is the one that training evaluated."""
    files = sorted((folder / "policies").glob("*.json"))
    if not files:
        raise UseError(f"{folder} contains no policy", "name a run or one of its checkpoints")
    if len(files) == 1:
        return [files[0].stem]
    places = {path.stem: atomic.read_json(path)["tree"].get("place", 0) for path in files}
    return sorted(places, key=lambda name: places[name])
