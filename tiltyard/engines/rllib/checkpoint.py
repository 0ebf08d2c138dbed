"""The whole state of an RLlib algorithm as a tree of plain values, and back.

RLlib's get_state and set_state do most of it. Added here is what they omit: KL coefficient, temperature, replay buffer,
the learners' random streams and the runners' envs; and counters are set before they are read. Of RLlib's metrics only
the algorithm's own are kept, for their counters.
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
    """The state of each runner's envs, and of everything else. Arrays share memory with the algorithm."""
    state = algo.get_state()
    state.get("learner_group", {}).get("learner", {}).pop(METRICS, None)
    learner = next(iter(algo.learner_group.foreach_learner(extra_state))).get()
    tree = {"rllib": to_plain(state), "learner": to_plain(learner)}
    buffer = getattr(algo, "local_replay_buffer", None)
    if buffer is not None:
        tree["replay"] = buffer.pack()
    # Envs, recurrent states and random streams.
    groups = _on_runners(algo, lambda runner: runner.episodes and runner.episodes.collector.tree())
    return [group for group in groups if group is not None], tree


def set_engine_state(algo: Any, tree: Tree, groups: list[Tree]) -> list[str]:
    """Restore what `engine_state` returned; returns sentences about what could not be restored."""
    state = from_plain(tree["rllib"])
    algo.metrics.set_state(state[METRICS])  # first: set_state sends the runners the env steps found here
    algo.set_state(state)
    extra = from_plain(tree["learner"])
    algo.learner_group.foreach_learner(lambda learner: set_extra_state(learner, extra))
    buffer = getattr(algo, "local_replay_buffer", None)
    warnings = buffer.unpack(tree["replay"]) if buffer is not None and "replay" in tree else []
    steps = algo.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
    for sentences in _on_runners(algo, lambda runner: _restore_group(runner, groups, int(steps))):
        warnings += sentences
    return warnings


def _restore_group(runner: Any, groups: list[Tree], steps: int) -> list[str]:
    runner.num_env_steps_sampled_lifetime = steps
    if runner.episodes is None:
        return []
    group = runner.episodes.group
    if group >= len(groups):
        return [f"the checkpoint has no envs of runner {group + 1}: they begin new episodes"]
    return list(runner.episodes.collector.take(groups[group]))


def _on_runners(algo: Any, call: Any) -> list[Any]:
    """The results of `call` on all runners with envs, in order."""
    group = algo.env_runner_group
    return list(group.foreach_env_runner(call, local_env_runner=group.num_remote_env_runners() == 0))


def set_weights(algo: Any, arrays: dict[str, Arrays]) -> None:
    """Set the learners' weights and send them to the runners."""
    group = algo.learner_group
    state = group.get_state(components=COMPONENT_LEARNER + "/" + COMPONENT_RL_MODULE)[COMPONENT_LEARNER]
    modules = {
        module: {**weights, **{f"net.{name}": np.array(array) for name, array in arrays[module].items()}}
        for module, weights in state[COMPONENT_RL_MODULE].items()
        if module in arrays
    }
    for weights in modules.values():  # target networks start as copies
        for name in weights:
            for prefix in ("target.", "pi_encoder.net."):
                if name.startswith(prefix):
                    weights[name] = weights.get(f"net.{name.removeprefix(prefix)}", weights[name])
    version = int(state.get(WEIGHTS_SEQ_NO, 0)) + 1
    group.set_state({COMPONENT_LEARNER: {COMPONENT_RL_MODULE: modules, WEIGHTS_SEQ_NO: version}})
    algo.env_runner_group.sync_weights(from_worker_or_learner_group=group, inference_only=True)


MARK = "$"


def to_plain(value: Any, path: str = "") -> Tree:
    """Convert to nested dicts and lists of arrays, numbers, strings, booleans and None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {MARK: "tensor", "items": value.detach().cpu().numpy()}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    if isinstance(value, np.generic):
        return {MARK: "number", "dtype": value.dtype.str, "items": value.item()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != MARK for key in value):
            return {key: to_plain(each, f"{path}.{key}") for key, each in value.items()}
        pairs = [[to_plain(key, path), to_plain(each, f"{path}.{key}")] for key, each in value.items()]
        return {MARK: "pairs", "items": pairs}
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = [to_plain(each, f"{path}[]") for each in value]
        if isinstance(value, deque):
            return {MARK: "deque", "length": value.maxlen, "items": items}
        return (
            items if isinstance(value, list) else {MARK: "tuple" if isinstance(value, tuple) else "set", "items": items}
        )
    what = f"a {type(value).__module__}.{type(value).__name__} at {path or 'its top'}"
    hint = "remove the option that puts it there, or use another engine"
    raise TiltyardError(f"RLlib's state has {what}, which a checkpoint cannot store", hint)


def from_plain(tree: Tree) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(tree, list):
        return [from_plain(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(MARK)
    if kind is None:
        return {key: from_plain(each) for key, each in tree.items()}
    items = tree["items"]
    if kind == "tensor":
        return torch.from_numpy(np.array(items))
    if kind == "number":
        return np.dtype(tree["dtype"]).type(items)
    if kind == "pairs":
        return {from_plain(key): from_plain(each) for key, each in items}
    made = [from_plain(each) for each in items]
    if kind == "deque":
        return deque(made, maxlen=tree["length"])
    return tuple(made) if kind == "tuple" else set(made)
