"""Our connectors in RLlib's learner pipeline, which turns episodes into batches.

RecurrentStates    the recurrent state before each chunk of an episode
Advantages         advantages and value targets of our PPO, whose settings may change while training
GaeWithOldPolicy   RLlib's advantages, and the action distribution of the policy that acted
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets

STATE_BEFORE = "state_before"  # column: the recurrent state before the action
OLD_VALUE = "old_value"  # column: the value estimate when it acted, normalised


class Advantages(GeneralAdvantageEstimation):  # type: ignore[misc]
    """Advantages and targets as in algos.ppo: advantages not yet normalised, targets and old values normalised.

    RLlib extends episodes by one step to estimate the last value; that step is not a sample.
    """

    def __init__(self, learner: Any) -> None:
        super().__init__(gamma=0.0, lambda_=0.0)
        self.learner = learner

    def __call__(self, *, rl_module: Any, episodes: list[Any], batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        every = list(self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False))
        for module_id, data in batch.items():
            module, now = rl_module[module_id].unwrapped(), self.learner.now(module_id)
            lengths = [len(each) for each in every if each.module_id in (None, module_id)]
            with torch.no_grad():
                outputs = module.compute_values(data)
            shape = outputs.shape
            flat = unpadded(outputs.cpu().numpy(), lengths)
            values = module.net.normaliser.denormalise_value(flat)
            targets = compute_value_targets(
                values=values,
                rewards=unpadded(data[Columns.REWARDS].cpu().numpy(), lengths),
                terminateds=unpadded(data[Columns.TERMINATEDS].cpu().numpy(), lengths),
                truncateds=unpadded(data[Columns.TRUNCATEDS].cpu().numpy(), lengths),
                gamma=now["gamma"],
                lambda_=now["gae_lambda"],
            )
            real = np.ones(len(flat), bool)
            real[np.cumsum(lengths) - 1] = False
            module.net.normaliser.observe_returns(targets[real])
            made = {
                Postprocessing.ADVANTAGES: targets - values,
                Postprocessing.VALUE_TARGETS: module.net.normaliser.normalise_value(targets),
                OLD_VALUE: flat,
            }
            for name, array in made.items():
                tensor = torch.as_tensor(padded(array, lengths, shape), dtype=torch.float32, device=outputs.device)
                data[name] = tensor
            self.learner.seen[module_id] = data
        return batch


class GaeWithOldPolicy(GeneralAdvantageEstimation):  # type: ignore[misc]
    """Also adds the action distribution of the policy that acted, from which the KL divergence is measured."""

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], **more: Any) -> dict[str, Any]:
        batch = super().__call__(rl_module=rl_module, batch=batch, **more)
        for name, data in batch.items():
            with torch.no_grad():
                found = rl_module[name].unwrapped()._forward(data)[Columns.ACTION_DIST_INPUTS]
            data[Columns.ACTION_DIST_INPUTS] = found
        return batch


def unpadded(array: np.ndarray[Any, Any], lengths: list[int]) -> np.ndarray[Any, Any]:
    """[N, T], where episodes are cut into rows of T and padded, as [sum of lengths]; 1-d arrays unchanged."""
    if array.ndim == 1:
        return array
    found, row, width = [], 0, array.shape[1]
    for length in lengths:
        rows = -(-length // width)
        found.append(array[row : row + rows].reshape(-1)[:length])
        row += rows
    return np.concatenate(found)


def padded(array: np.ndarray[Any, Any], lengths: list[int], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The inverse of `unpadded`."""
    if len(shape) == 1:
        return array
    made, row, at, width = np.zeros(shape, array.dtype), 0, 0, shape[1]
    for length in lengths:
        rows = -(-length // width)
        part = np.zeros(rows * width, array.dtype)
        part[:length] = array[at : at + length]
        made[row : row + rows] = part.reshape(rows, width)
        row, at = row + rows, at + length
    return made


class RecurrentStates(ConnectorV2):  # type: ignore[misc]
    """The recurrent state before each chunk, from the runner's column. A chunk never crosses an episode's end."""

    def __call__(self, *, rl_module: Any, episodes: list[Any], batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            own = {
                name.removeprefix(f"{STATE_BEFORE}."): episode.extra_model_outputs.pop(name).data
                for name in [each for each in episode.extra_model_outputs if each.startswith(f"{STATE_BEFORE}.")]
            }
            if own:
                module = (
                    rl_module[episode.module_id] if episode.module_id else next(iter(rl_module._rl_modules.values()))
                )
                every = module.unwrapped().model_config["max_seq_len"]
                chunks = -(-len(episode) // every)
                states = {name: array[: len(episode)][::every] for name, array in own.items()}
                self.add_n_batch_items(batch, Columns.STATE_IN, states, chunks, episode)
        for column in [each for each in batch if each.startswith(f"{STATE_BEFORE}.")]:
            del batch[column]
        return batch
