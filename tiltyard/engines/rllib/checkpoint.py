"""The whole state of one of RLlib's algorithms as a tree, and back.

RLlib's get_state and set_state do most of it. What they leave out or mix up is done here: counters are set before
anybody asks for them, the KL coefficient, the temperature, the replay buffer and the learners' random streams are kept,
and so are the runners' envs. Of RLlib's metrics only the algorithm's own are kept, for their counters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME, WEIGHTS_SEQ_NO

from tiltyard.engines.rllib.learners import extra_state, set_extra_state
from tiltyard.errors import TiltyardError
from tiltyard.types import Arrays, Tree

METRICS = "metrics_logger"


def engine_state(algo: Any) -> tuple[list[Tree], dict[str, Any]]:
    """Of each runner's envs, and of everything else."""
    state = algo.get_state()
    state.get("learner_group", {}).get("learner", {}).pop(METRICS, None)
    tree = {"rllib": plain(state), "learner": plain(_first_learner(algo))}
    buffer = getattr(algo, "local_replay_buffer", None)
    if buffer is not None:
        tree["replay"] = buffer.pack()
    groups = _runners(algo, lambda runner: runner.tree())
    return [group for group in groups if group is not None], tree


def set_engine_state(algo: Any, tree: Tree, groups: list[Tree]) -> list[str]:
    """Go on from what `engine_state` gave; sentences about what could not be brought back."""
    state = lively(tree["rllib"])
    algo.metrics.set_state(state[METRICS])  # first: set_state tells runners the env steps that it finds here
    algo.set_state(state)
    extra = lively(tree["learner"])
    group = algo.learner_group
    if group.is_local:
        set_extra_state(group._learner, extra)
    else:
        group.foreach_learner(lambda learner: set_extra_state(learner, extra))
    buffer = getattr(algo, "local_replay_buffer", None)
    said = buffer.unpack(tree["replay"]) if buffer is not None and "replay" in tree else []
    steps = algo.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
    found = _runners(algo, lambda runner: _resume(runner, groups, int(steps)))
    for sentences in found:
        said += sentences
    return said


def _resume(runner: Any, groups: list[Tree], steps: int) -> list[str]:
    runner.num_env_steps_sampled_lifetime = steps
    if runner.rows is None:
        return []
    if runner.rows.group >= len(groups):
        return [f"the checkpoint has no envs of runner {runner.rows.group + 1}: they begin new episodes"]
    return list(runner.take(groups[runner.rows.group]))


def _first_learner(algo: Any) -> Tree:
    group = algo.learner_group
    if group.is_local:
        return extra_state(group._learner)
    return next(iter(group.foreach_learner(extra_state))).get()


def _runners(algo: Any, ask: Any) -> list[Any]:
    """Answers of all that have envs, in their order."""
    group = algo.env_runner_group
    remote = group.num_remote_env_runners() > 0
    return list(group.foreach_env_runner(ask, local_env_runner=not remote))


def give_weights(algo: Any, arrays: dict[str, Arrays]) -> None:
    """Set what is learned, and let the runners know."""
    group = algo.learner_group
    state = group.get_state(components=COMPONENT_LEARNER + "/" + COMPONENT_RL_MODULE)[COMPONENT_LEARNER]
    modules = {
        module: {**weights, **{f"net.{name}": np.array(array) for name, array in arrays[module].items()}}
        for module, weights in state[COMPONENT_RL_MODULE].items()
        if module in arrays
    }
    for weights in modules.values():  # slower copies start as copies
        for name in weights:
            if name.startswith("target.") and f"net.{name.removeprefix('target.')}" in weights:
                weights[name] = weights[f"net.{name.removeprefix('target.')}"]
            if name.startswith("pi_encoder.net."):
                weights[name] = weights[f"net.{name.removeprefix('pi_encoder.net.')}"]
    version = int(state.get(WEIGHTS_SEQ_NO, 0)) + 1
    group.set_state({COMPONENT_LEARNER: {COMPONENT_RL_MODULE: modules, WEIGHTS_SEQ_NO: version}})
    algo.env_runner_group.sync_weights(from_worker_or_learner_group=group, inference_only=True)


MARK = "$"


def plain(value: Any, path: str = "") -> Tree:
    """`value` as nested dicts and lists of arrays, numbers, text, booleans and None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {MARK: "tensor", "items": value.detach().cpu().numpy().copy()}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    if isinstance(value, np.generic):
        return {MARK: "number", "dtype": value.dtype.str, "items": value.item()}
    if isinstance(value, list):
        return [plain(each, f"{path}[]") for each in value]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {MARK: kind, "items": [plain(each, path) for each in value]}
    if isinstance(value, deque):
        return {MARK: "deque", "length": value.maxlen, "items": [plain(each, path) for each in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != MARK for key in value):
            return {key: plain(each, f"{path}.{key}") for key, each in value.items()}
        return {
            MARK: "pairs",
            "items": [[plain(key, path), plain(each, f"{path}.{key}")] for key, each in value.items()],
        }
    raise TiltyardError(
        f"RLlib's state has a {type(value).__module__}.{type(value).__name__} at {path or 'its top'}, "
        "which a checkpoint cannot hold",
        "leave out what keeps it there, or train with another engine",
    )


def lively(tree: Tree) -> Any:
    """The inverse of `plain`."""
    if isinstance(tree, list):
        return [lively(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(MARK)
    if kind is None:
        return {key: lively(each) for key, each in tree.items()}
    items = tree["items"]
    if kind == "tensor":
        return torch.from_numpy(np.array(items))
    if kind == "number":
        return np.dtype(tree["dtype"]).type(items)
    if kind == "pairs":
        return {lively(key): lively(each) for key, each in items}
    made = [lively(each) for each in items]
    if kind == "deque":
        return deque(made, maxlen=tree["length"])
    return tuple(made) if kind == "tuple" else set(made)
