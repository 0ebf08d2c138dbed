"""A runner: one group of envs and a copy of the policy, in a process that RLlib places on a node.

    RLlib ── sample() ──> runner ── episodes ──> learner          and set_state(weights) the other way

It samples with the collector of the other engines, so that settings of envs, wrappers and models mean the same.
Its notes (steps, ended episodes, failures) travel as JSON among RLlib's metrics, under `KEY`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    NUM_AGENT_STEPS_SAMPLED,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_MODULE_STEPS_SAMPLED,
    NUM_MODULE_STEPS_SAMPLED_LIFETIME,
    WEIGHTS_SEQ_NO,
)

from tiltyard.algos.schedules import ScheduledValue
from tiltyard.engines.policies.frozen import frozen_nets
from tiltyard.engines.policies.policy_set import make_actor
from tiltyard.engines.rllib.episode_collector import Decision, EpisodeCollector
from tiltyard.engines.rllib.settings_map import epsilon
from tiltyard.engines.rllib.worker_spec import KEY, WorkerSpec
from tiltyard.errors import TiltyardError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Array


class NoEnv(gymnasium.Env[Any, Any]):
    """A placeholder for RLlib: runners make their own envs."""


class Runner(EnvRunner, Checkpointable):  # type: ignore[misc]
    """RLlib numbers runners from 1; runner 0 is in the driver and has envs only without other runners.

    RLlib requires a subclass of EnvRunner.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        torch.set_num_threads(1)
        self.worker_spec = WorkerSpec.from_config(config.env_config)
        self.version = 0
        self.instances = 0
        self.failed: dict[str, str] | None = None  # why the last envs failed
        self.episodes: EpisodeCollector | None = None
        self.make_module()
        if self.worker_index or config.num_env_runners == 0:
            self.make_env(again=_is_restarted())
        wanted = epsilon(self.worker_spec.experiment.algo, config)
        self.epsilon = None if wanted is None else ScheduledValue(wanted, self.worker_spec.experiment.stop.env_steps)

    # ------------------------------------------------------------------------------------------ called by RLlib

    def make_module(self) -> None:
        spaces = self.get_spaces()
        experiment = self.worker_spec.experiment
        self.nets: dict[str, PolicyNet]
        if experiment.several_policies:
            self.module = self.config.get_multi_rl_module_spec(spaces=spaces, inference_only=True).build()
            self.nets = {name: self.module[name].net for name in experiment.learning}
        else:
            self.module = self.config.get_rl_module_spec(spaces=spaces, inference_only=True).build()
            self.nets = {experiment.learning[0]: self.module.net}

    def make_env(self, *, again: bool = False) -> None:
        """Make the group of envs. `again`: an earlier group has used their seeds, so episodes are skipped."""
        experiment, spec = self.worker_spec.experiment, self.worker_spec.spec
        if self.episodes is not None:
            self.episodes.close()
        self.instances += 1
        group = max(0, (self.worker_index or 1) - 1)
        instance = f"{self.worker_spec.attempt}.{os.getpid()}.{self.instances}"
        actor = make_actor(experiment, spec, self.nets, frozen_nets(experiment, spec, self.worker_spec.base), {})
        self.episodes = EpisodeCollector(self.worker_spec, actor, self.config.num_envs_per_env_runner, group, instance)
        if again:
            self.episodes.collector.envs.skip_episodes(int(time.time()) % 2**24)

    def get_spaces(self) -> dict[str, Any]:
        experiment = self.worker_spec.experiment
        modules = experiment.learning if experiment.several_policies else [DEFAULT_MODULE_ID]
        both = tuple(self.worker_spec.spaces().values())
        return dict.fromkeys((INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, *modules), both)

    def assert_healthy(self) -> None:
        assert self.module is not None

    def sample(self, **_: Any) -> list[SingleAgentEpisode]:
        """Pieces of episodes; none if the envs failed, which a note reports."""
        episodes, began = self.episodes, time.perf_counter()
        assert episodes is not None
        episodes.spent = {"env": 0.0, "inference": 0.0}
        frames = -episodes.collector.envs.stats.frames_taken
        steps = self.config.get_rollout_fragment_length(self.worker_index)
        try:
            pieces, ends = episodes.collect(steps, self._choose_actions)
        except TiltyardError as error:
            self.failed = {"message": error.message, "hint": error.hint, "details": error.details}
            self.failed["life"] = episodes.instance
            self._note(failed=self.failed)
            self.make_env(again=True)
            self._count(0, 0)
            # Without steps, RLlib would sample again within the same iteration and drop the note.
            self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, self.config.total_train_batch_size, reduce="sum")
            return []
        steps = sum(len(piece) for piece in pieces)
        self._count(steps, len(ends))
        frames += episodes.collector.envs.stats.frames_taken
        spent = {**episodes.spent, "all": time.perf_counter() - began}
        self._note(steps=steps, frames=frames, spent=spent, ends=[asdict(end) for end in ends])
        return pieces

    def _note(self, **facts: Any) -> None:
        """Report facts to the driver as one line of JSON."""
        line = json.dumps({"ends": [], **facts, "runner": self.worker_index or 0})
        self.metrics.log_value(KEY, line, reduce="item_series")

    def _count(self, steps: int, episodes: int) -> None:
        """Log the counters that RLlib's algorithms read."""
        for now, lifetime in (
            (NUM_ENV_STEPS_SAMPLED, NUM_ENV_STEPS_SAMPLED_LIFETIME),
            ((NUM_AGENT_STEPS_SAMPLED, DEFAULT_AGENT_ID), (NUM_AGENT_STEPS_SAMPLED_LIFETIME, DEFAULT_AGENT_ID)),
            ((NUM_MODULE_STEPS_SAMPLED, DEFAULT_MODULE_ID), (NUM_MODULE_STEPS_SAMPLED_LIFETIME, DEFAULT_MODULE_ID)),
        ):
            self.metrics.log_value(now, steps, reduce="sum")
            self.metrics.log_value(lifetime, steps, reduce="lifetime_sum")
        self.metrics.log_value(NUM_EPISODES, episodes, reduce="sum")
        self.num_env_steps_sampled_lifetime += steps

    def get_metrics(self) -> Any:
        return self.metrics.reduce()

    def stop(self) -> None:
        if self.episodes is not None:
            self.episodes.close()
            self.episodes = None

    # ------------------------------------------------------------------------------------------ acting

    def _choose_actions(self, obs: dict[str, torch.Tensor], first: torch.Tensor, mask: Array | None) -> Decision:
        assert self.episodes is not None
        rows = self.episodes.collector
        allowed = None if mask is None else torch.from_numpy(mask)
        greedy = self.epsilon is not None
        acted = rows.actor.act(obs, rows.state, first, allowed, greedy=greedy, generator=rows.draws, with_value=False)
        columns = {WEIGHTS_SEQ_NO: np.full(len(acted.action), self.version, np.int64)}
        if self.epsilon is None:
            return acted.action, {Columns.ACTION_LOGP: acted.log_prob, **columns}, acted.state
        share = self.epsilon.at(self.num_env_steps_sampled_lifetime)
        return self._explore(acted.action, share, mask, rows.draws), columns, acted.state

    def _explore(self, action: Array, share: float, mask: Array | None, generator: torch.Generator) -> Array:
        """Replace a share of the actions by random allowed ones."""
        (part,), count = self.worker_spec.spec.action.parts, len(action)
        draws = torch.rand(2, count, generator=generator).numpy()
        allowed = np.ones((count, part.options), bool) if mask is None else mask
        pick = np.minimum((draws[1] * allowed.sum(1)).astype(np.int64), allowed.sum(1) - 1)
        drawn = np.argsort(~allowed, axis=1, kind="stable")[np.arange(count), pick]
        return np.where(draws[0][:, None] < share, drawn[:, None].astype(np.float32), action)

    # ------------------------------------------------------------------------------------------ state

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = {NUM_ENV_STEPS_SAMPLED_LIFETIME: self.num_env_steps_sampled_lifetime}
        if self._check_component(COMPONENT_RL_MODULE, components, not_components):
            state[COMPONENT_RL_MODULE] = self.module.get_state(**kwargs)
            state[WEIGHTS_SEQ_NO] = self.version
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        if COMPONENT_RL_MODULE in state:
            version = state.get(WEIGHTS_SEQ_NO, 0)
            if version == 0 or self.version < version:
                weights = state[COMPONENT_RL_MODULE]
                weights = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
                single = not self.worker_spec.experiment.several_policies
                self.module.set_state(weights.get(DEFAULT_MODULE_ID, weights) if single else weights)
            self.version = version or self.version
        if NUM_ENV_STEPS_SAMPLED_LIFETIME in state:
            self.num_env_steps_sampled_lifetime = state[NUM_ENV_STEPS_SAMPLED_LIFETIME]

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"config": self.config}


def _is_restarted() -> bool:
    """Whether Ray started this process in place of one that died."""
    context = ray.get_runtime_context()
    return bool(context.get_actor_id() and context.was_current_actor_reconstructed)
