"""What RLlib's learners learn from: our connectors in their pipeline, which turn episodes into batches, and our buffer.

RecurrentStates    the recurrent state before each chunk of an episode
Advantages         advantages and value targets of our PPO, whose settings may change while training
GaeWithOldPolicy   RLlib's advantages, and the action distribution of the policy that acted
ReplayBatch        a batch of transitions from the ReplayBuffer

RLlib's replay buffer makes a Python object of every sampled step, which takes several times as long as learning from
it, and is not part of its checkpoints. Ours has one array per column.

    add(pieces)  ->  rows of a ring     sample(n)  ->  one Draw per learner     pack, unpack  ->  disk
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets
from ray.rllib.utils.postprocessing.zero_padding import split_and_zero_pad_n_episodes, unpad_data_if_necessary
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

from tiltyard.config.rllib_algos import Replay as Settings
from tiltyard.run.safetensors_file import StoredArray
from tiltyard.types import Array, Arrays, Tree

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
            flat = unpad_data_if_necessary(lengths, outputs.cpu().numpy())
            values = module.net.normaliser.denormalise_value(flat)
            columns = (Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS)
            steps = {name: unpad_data_if_necessary(lengths, data[name].cpu().numpy()) for name in columns}
            targets = compute_value_targets(values=values, **steps, gamma=now["gamma"], lambda_=now["gae_lambda"])
            real = np.ones(len(flat), bool)
            real[np.cumsum(lengths) - 1] = False
            module.net.normaliser.observe_returns(targets[real])
            made = {
                Postprocessing.ADVANTAGES: targets - values,
                Postprocessing.VALUE_TARGETS: module.net.normaliser.normalise_value(targets),
                OLD_VALUE: flat,
            }
            for name, array in made.items():
                if outputs.ndim > 1:
                    array = np.stack(split_and_zero_pad_n_episodes(array, lengths, outputs.shape[1]))
                data[name] = torch.as_tensor(array, dtype=torch.float32, device=outputs.device)
            self.learner.seen[module_id] = data
        return batch


class GaeWithOldPolicy(GeneralAdvantageEstimation):  # type: ignore[misc]
    """Also adds the action distribution of the policy that acted, from which the KL divergence is measured."""

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], **more: Any) -> dict[str, Any]:
        batch = super().__call__(rl_module=rl_module, batch=batch, **more)
        for name, data in batch.items():
            with torch.no_grad():
                outputs = rl_module[name].unwrapped()._forward(data)
            data[Columns.ACTION_DIST_INPUTS] = outputs[Columns.ACTION_DIST_INPUTS]
        return batch


class RecurrentStates(ConnectorV2):  # type: ignore[misc]
    """The recurrent state before each chunk, from the runner's column. A chunk never crosses an episode's end."""

    def __call__(self, *, rl_module: Any, episodes: list[Any], batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            own = {
                name.removeprefix(f"{STATE_BEFORE}."): episode.extra_model_outputs.pop(name).data
                for name in [each for each in episode.extra_model_outputs if each.startswith(f"{STATE_BEFORE}.")]
            }
            if own:
                module = rl_module[episode.module_id or next(iter(rl_module._rl_modules))]
                every = module.unwrapped().model_config["max_seq_len"]
                chunks = -(-len(episode) // every)
                states = {name: array[: len(episode)][::every] for name, array in own.items()}
                self.add_n_batch_items(batch, Columns.STATE_IN, states, chunks, episode)
        for column in [each for each in batch if each.startswith(f"{STATE_BEFORE}.")]:
            del batch[column]
        return batch


# ---------------------------------------------------------------------------------------------- replay


MIN_PRIORITY = 1e-6  # so that every transition can be sampled


class Draw:
    """Sampled transitions, with the methods of an episode that RLlib uses to count and slice it."""

    def __init__(self, columns: Arrays) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["reward"])

    def __getitem__(self, part: slice, **_: Any) -> Draw:
        return Draw({name: array[part] for name, array in self.columns.items()})

    slice = __getitem__


class ReplayBuffer(PrioritizedEpisodeReplayBuffer):  # type: ignore[misc]
    """A ring of `settings.size` transitions. `n_step` rewards are summed within a piece.

    RLlib requires a subclass of its buffer.
    """

    def __init__(self, settings: Settings, *, gamma: float, n_step: int, seed: int) -> None:
        super().__init__(capacity=1)  # RLlib also reads its metrics
        self.settings, self.gamma, self.steps_ahead = settings, gamma, n_step
        self.random = np.random.default_rng(seed)
        self.columns: Arrays = {}
        self.at = self.filled = 0
        self.tree = SumTree(settings.size) if settings.prioritised else None
        self.most = 1.0  # priority of new transitions
        self.drawn: NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, episodes: list[Any], **_: Any) -> None:
        for episode in episodes if isinstance(episodes, list) else [episodes]:
            self._put(self._transitions(episode))

    def _transitions(self, episode: Any) -> Arrays:
        count, obs = len(episode), episode.observations.data
        rewards = np.asarray(episode.rewards.data, np.float32)
        ahead = np.minimum(np.arange(count) + self.steps_ahead, count)  # index of the observation to bootstrap from
        paid, length = np.zeros(count, np.float32), ahead - np.arange(count)
        for step in range(self.steps_ahead):
            reached = length > step
            paid[reached] += self.gamma**step * rewards[np.flatnonzero(reached) + step]
        return {
            **{f"obs.{name}": array[:count] for name, array in obs.items()},
            **{f"next.{name}": array[ahead] for name, array in obs.items()},
            "action": np.asarray(episode.actions.data),
            "reward": paid,
            "n_step": length.astype(np.float32),
            "terminated": (ahead == count) & bool(episode.is_terminated),
        }

    def _put(self, rows: Arrays) -> None:
        count, size = len(rows["reward"]), self.settings.size
        if not self.columns:
            self.columns = {name: np.zeros((size, *array.shape[1:]), array.dtype) for name, array in rows.items()}
        places = (self.at + np.arange(count)) % size
        for name, array in rows.items():
            self.columns[name][places] = array
        if self.tree is not None:
            self.tree.set(places, np.full(count, self.most))
        self.at, self.filled = (self.at + count) % size, min(size, self.filled + count)

    def sample(self, num_items: int, **_: Any) -> list[Draw]:
        weights = np.ones(num_items, np.float32)
        if self.tree is None:
            self.drawn = self.random.integers(0, self.filled, num_items)
        else:
            self.drawn = np.minimum(self.tree.draw(self.random.random(num_items)), self.filled - 1)
            chance = self.tree.at(self.drawn) / self.tree.total
            weights = ((self.filled * np.maximum(chance, 1e-12)) ** -self.settings.beta).astype(np.float32)
            weights /= weights.max()
        return [Draw({**{name: array[self.drawn] for name, array in self.columns.items()}, "weight": weights})]

    def update_priorities(self, priorities: Any, *_: Any) -> None:
        """Set the priorities of the transitions that were sampled last, from their TD errors."""
        if self.tree is not None:
            found = (np.abs(np.asarray(priorities, np.float64).reshape(-1)) + MIN_PRIORITY) ** self.settings.alpha
            self.tree.set(self.drawn[: len(found)], found)
            self.most = max(self.most, float(found.max()))

    # ------------------------------------------------------------------------------------------ disk

    def pack(self) -> Tree:
        """The filled part, without copying it."""
        tree: dict[str, Any] = {
            "columns": {name: array[: self.filled] for name, array in self.columns.items()},
            "at": self.at,
            "filled": self.filled,
            "most": self.most,
            "random": self.random.bit_generator.state,
        }
        if self.tree is not None:
            tree["priorities"] = self.tree.nodes[self.tree.leaves :][: self.filled]
        return tree

    def unpack(self, tree: Tree) -> list[str]:
        """Restore what `pack` returned, as read with the arrays on disk; a smaller buffer drops the oldest transitions.

        The oldest one that is kept comes first. Needs no memory beside the buffer's own.
        """
        self.random.bit_generator.state = tree["random"]
        self.most = tree["most"]
        kept = min(tree["filled"], self.settings.size)
        if not kept:
            return []
        first = (tree["at"] + tree["filled"] - kept) % tree["filled"]
        ahead = min(kept, tree["filled"] - first)  # rows up to the end of the ring

        def read(stored: StoredArray, target: Array) -> None:
            stored.read_into(target[:ahead], first)
            stored.read_into(target[ahead:kept])

        for name, stored in tree["columns"].items():
            self.columns[name] = np.zeros((self.settings.size, *stored.shape[1:]), stored.dtype)
            read(stored, self.columns[name])
        self.at, self.filled = kept % self.settings.size, kept
        if self.tree is not None:
            priorities = np.full(kept, self.most)
            if "priorities" in tree:
                read(tree["priorities"], priorities)
            self.tree.set(np.arange(kept), priorities)
        left = tree["filled"] - kept
        note = f"the replay buffer is smaller than in the checkpoint: its {left:,} oldest env steps are dropped"
        return [note] if left else []


class SumTree:
    """A binary tree of sums, vectorised, to sample indices in proportion to their values."""

    def __init__(self, size: int) -> None:
        self.leaves = 1 << max(0, size - 1).bit_length()
        self.nodes = np.zeros(2 * self.leaves)

    @property
    def total(self) -> float:
        return float(self.nodes[1])

    def at(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.nodes[self.leaves + places]

    def set(self, places: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        nodes = self.leaves + np.asarray(places)
        self.nodes[nodes] = values
        while nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def draw(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """The indices at these shares (0 .. 1) of the sum."""
        left = shares * self.nodes[1]
        nodes = np.ones(len(shares), np.int64)
        while nodes[0] < self.leaves:
            nodes = 2 * nodes
            right = left >= self.nodes[nodes]
            left = np.where(right, left - self.nodes[nodes], left)
            nodes = nodes + right
        return nodes - self.leaves


class ReplayBatch(ConnectorV2):  # type: ignore[misc]
    """Turns Draws into a batch of tensors: the learner's whole pipeline."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device

    def __call__(self, *, episodes: list[Draw], **_: Any) -> dict[str, Any]:
        def tensor(name: str) -> torch.Tensor:
            parts = [draw.columns[name] for draw in episodes]
            return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(self.device)

        def seen(front: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(front): tensor(name) for name in episodes[0].columns if name.startswith(front)}

        return {
            DEFAULT_MODULE_ID: {
                Columns.OBS: seen("obs."),
                Columns.NEXT_OBS: seen("next."),
                Columns.ACTIONS: tensor("action"),
                Columns.REWARDS: tensor("reward"),
                Columns.TERMINATEDS: tensor("terminated"),
                "n_step": tensor("n_step"),
                "weights": tensor("weight"),
            }
        }
