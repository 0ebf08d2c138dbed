"""RLlib's learners with our additions: the PPO loss, schedules, running statistics and times.

    Ppo                                    our loss on RLlib's minibatches, equal to the local engine's
    Impala, Appo, Dqn, Sac, RllibPpo, Tqc  RLlib's own losses

`extra_state` is the part of a learner's state that RLlib does not save.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.algorithms.sac.torch.sac_torch_learner import SACTorchLearner
from ray.rllib.algorithms.tqc.torch.tqc_torch_learner import TQCTorchLearner
from ray.rllib.connectors.learner import AddStatesFromEpisodesToBatch, GeneralAdvantageEstimation
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import ALL_MODULES, NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor

from tiltyard.algos.minibatches import Minibatch, normalised
from tiltyard.algos.ppo import CHANGEABLE, KL, RISES_WITH_KL
from tiltyard.algos.ppo_loss import COLUMNS, Outputs, ppo_loss
from tiltyard.algos.schedules import ScheduledValue
from tiltyard.config.algos import Ppo as PpoSettings
from tiltyard.config.fields import is_number
from tiltyard.engines.rllib.connectors import OLD_VALUE, Advantages, GaeWithOldPolicy, RecurrentStates, ReplayBatch
from tiltyard.engines.rllib.worker_spec import KEY, SECONDS, UPDATES, WorkerSpec
from tiltyard.envs.spaces import MASK
from tiltyard.types import Tree

UNSAVED = ("curr_kl_coeffs_per_module", "curr_log_alpha")  # of appo and sac, missing in RLlib's state


class _TiltyardLearner:
    """A mixin for RLlib's learner classes: trainable parameters, recurrent states, time and update counts.

    RLlib's only extension point is overriding methods of its learners, so our additions are mixins before its classes.
    """

    config: Any
    module: Any
    metrics: Any
    _device: Any
    _learner_connector: Any

    def build(self) -> None:
        self.worker_spec = WorkerSpec.from_config(self.config.learner_config_dict)
        threads = self.worker_spec.experiment.engine.threads
        torch.set_num_threads(threads if isinstance(threads, int) else 1)
        super().build()  # type: ignore[misc]
        self._replace_connector(AddStatesFromEpisodesToBatch, RecurrentStates())

    def _replace_connector(self, theirs: type[Any], ours: Any) -> None:
        """Replace one of RLlib's connectors in the pipeline by ours."""
        pipeline = self._learner_connector
        if pipeline is not None:
            pipeline.connectors = [ours if isinstance(each, theirs) else each for each in pipeline.connectors]

    def get_parameters(self, module: Any) -> list[torch.nn.Parameter]:
        return [each for each in module.parameters() if each.requires_grad and each.numel()]

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        self._began = perf_counter()
        super().before_gradient_based_update(timesteps=timesteps)  # type: ignore[misc]

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)  # type: ignore[misc]
        for module in self.modules().values():
            module.net.clamp_log_std()
        self.metrics.log_value((ALL_MODULES, SECONDS), perf_counter() - self._began, reduce="sum")
        self.metrics.log_value((ALL_MODULES, UPDATES), 1, reduce="sum")

    def modules(self) -> dict[str, Any]:
        """Our modules by name, without RLlib's wrappers."""
        return {name: module.unwrapped() for name, module in self.module._rl_modules.items()}


class _OneAdam(_TiltyardLearner):
    """A mixin: one Adam for all trainable parameters, with `algo.adam_eps` if the algorithm has it."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        params = self.get_parameters(self.module[module_id])
        eps = getattr(self.worker_spec.experiment.algo, "adam_eps", 1e-8)
        adam = torch.optim.Adam(params, eps=eps)
        self.register_optimizer(  # type: ignore[attr-defined]
            module_id=module_id, optimizer=adam, params=params, lr_or_lr_schedule=config.lr
        )


class _UpdatesStatistics:
    """A mixin: adds every batch to the running statistics after its loss."""

    module: Any

    def compute_loss_for_module(self, *, module_id: str, batch: Any, **more: Any) -> Tensor:
        loss: Tensor = super().compute_loss_for_module(module_id=module_id, batch=batch, **more)  # type: ignore[misc]
        self.module[module_id].unwrapped().observe(batch)
        return loss


class Impala(_UpdatesStatistics, _OneAdam, IMPALATorchLearner):  # type: ignore[misc]
    pass


class Appo(_UpdatesStatistics, _OneAdam, APPOTorchLearner):  # type: ignore[misc]
    pass


class _UsesReplayBuffer:
    """A mixin: learns from batches of our replay buffer."""

    _learner_connector: Any
    _device: Any

    def build(self) -> None:
        super().build()  # type: ignore[misc]
        self._learner_connector.connectors = [ReplayBatch(self._device)]


class Dqn(_UsesReplayBuffer, _UpdatesStatistics, _OneAdam, DQNTorchLearner):  # type: ignore[misc]
    pass


class Sac(_UsesReplayBuffer, _UpdatesStatistics, _TiltyardLearner, SACTorchLearner):  # type: ignore[misc]
    pass


class _CountsRewards:
    """A mixin: RLlib's TQC takes the batch size from the observations, which must be one tensor; rewards are."""

    def compute_loss_for_module(self, *, batch: Any, **more: Any) -> Tensor:
        countable = {**batch, Columns.OBS: batch[Columns.REWARDS]}
        with warnings.catch_warnings():
            # Every quantile is compared with every target quantile.
            warnings.filterwarnings("ignore", "Using a target size")
            loss: Tensor = super().compute_loss_for_module(batch=countable, **more)  # type: ignore[misc]
        return loss


class Tqc(_UsesReplayBuffer, _UpdatesStatistics, _CountsRewards, _TiltyardLearner, TQCTorchLearner):  # type: ignore[misc]
    pass


class RllibPpo(_UpdatesStatistics, _OneAdam, PPOTorchLearner):  # type: ignore[misc]
    def build(self) -> None:
        super().build()
        for place, part in enumerate(self._learner_connector.connectors):
            if isinstance(part, GeneralAdvantageEstimation):
                self._learner_connector.connectors[place] = GaeWithOldPolicy(gamma=part.gamma, lambda_=part.lambda_)


# ------------------------------------------------------------------------------------------------ PPO


class Ppo(_OneAdam, PPOTorchLearner):  # type: ignore[misc]
    """Our PPO loss. `values` are each policy's scheduled settings."""

    def build(self) -> None:
        super().build()
        experiment = self.worker_spec.experiment
        self.values: dict[str, dict[str, ScheduledValue]] = {}
        for name, module in self.modules().items():
            algo = experiment.algo_of(module.model_config[KEY].get("policy") or experiment.learning[0])
            self.values[name] = {
                setting: ScheduledValue(
                    getattr(algo, setting), experiment.stop.env_steps, rises_with_kl=setting in RISES_WITH_KL
                )
                for setting in CHANGEABLE
            }
        self.env_steps = 0  # before the current batch
        self._counted = 0
        self._replace_connector(GeneralAdvantageEstimation, Advantages(self))

    def now(self, module_id: str) -> dict[str, float]:
        return {name: value.at(self.env_steps) for name, value in self.values[module_id].items()}

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self.env_steps, self._counted = self._counted, int(timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))
        for module_id in self.values:
            for _, optimizer in self.get_optimizers_for_module(module_id):
                self._set_optimizer_lr(optimizer, lr=self.now(module_id)["lr"])
        self.seen: dict[str, Any] = {}  # the batch of each module
        self.divergences: dict[str, list[float]] = {}

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        for module_id, module in self.modules().items():
            now = self.now(module_id)
            self.metrics.log_dict(
                {f"setting/{name}": now[name] for name in ("lr", "clip", "entropy", "kl")}, key=module_id, window=1
            )
            divergences = self.divergences.get(module_id)
            if divergences:
                kl = float(np.mean(divergences[-max(1, len(divergences) // self.config.num_epochs) :]))
                self.metrics.log_value((module_id, "loss/kl"), kl, window=1)
                for value in self.values[module_id].values():
                    value.observe_kl(kl)
            if module_id in self.seen:
                module.observe(self.seen[module_id])

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Any, fwd_out: Mapping[str, Tensor]
    ) -> Tensor:
        module = self.module[module_id].unwrapped()
        now, algo = self.now(module_id), self.worker_spec.experiment.algo
        assert isinstance(algo, PpoSettings)
        valid = batch.get(Columns.LOSS_MASK)
        advantage, count = batch[Postprocessing.ADVANTAGES], float(batch[Postprocessing.ADVANTAGES].numel())
        if valid is not None:
            valid, count = valid.float(), float(valid.sum())
        samples = Minibatch(
            obs=batch[Columns.OBS],
            state0=batch.get(Columns.STATE_IN, {}),
            first=torch.zeros_like(advantage, dtype=torch.bool),
            starts=[],
            mask=batch[Columns.OBS].get(MASK),
            action=batch[Columns.ACTIONS],
            log_prob=batch[Columns.ACTION_LOGP],
            advantage=normalised(advantage, valid, count) if algo.normalise_advantage and count > 1 else advantage,
            target=batch[Postprocessing.VALUE_TARGETS],
            value=batch[OLD_VALUE],
            valid=valid,
            count=count,
        )
        dist = module.get_train_action_dist_cls().from_logits(fwd_out[Columns.ACTION_DIST_INPUTS]).dist
        value = module.compute_values(batch, embeddings=fwd_out[Columns.EMBEDDINGS])
        fixed = {name: value for name, value in algo if is_number(value)}
        total, *losses = ppo_loss(samples, Outputs(dist, value), fixed | now)
        self.divergences.setdefault(module_id, []).append(float(losses[KL].detach()))
        self.metrics.log_dict(dict(zip(COLUMNS, losses, strict=True)), key=module_id, window=1)
        return total


# ------------------------------------------------------------------------------------------------ state


def extra_state(learner: Any) -> Tree:
    """The part of a learner's state that RLlib does not save."""
    tree: dict[str, Any] = {"torch": torch.get_rng_state().numpy()}
    for name in UNSAVED:
        if hasattr(learner, name):
            found = getattr(learner, name)
            tree[name] = {key: found[key].detach().cpu().numpy().copy() for key in learner.modules()}
    for name in ("last_update_ts_by_mid", "_last_update_ts_by_mid"):
        if hasattr(learner, name):
            tree[name] = {key: int(value) for key, value in getattr(learner, name).items()}
    if isinstance(learner, Ppo):
        tree["counted"] = learner._counted
        tree["values"] = {
            module: {name: value.save() for name, value in values.items()} for module, values in learner.values.items()
        }
    return tree


def set_extra_state(learner: Any, tree: Tree) -> None:
    """Restore `extra_state`, in place: optimisers hold references to the tensors."""
    torch.set_rng_state(torch.from_numpy(np.asarray(tree["torch"])))
    for name in UNSAVED:
        for key, value in tree.get(name, {}).items():
            with torch.no_grad():
                getattr(learner, name)[key].data.copy_(torch.from_numpy(np.asarray(value)))
    for name in ("last_update_ts_by_mid", "_last_update_ts_by_mid"):
        for key, value in tree.get(name, {}).items():
            getattr(learner, name)[key] = int(value)
    if isinstance(learner, Ppo) and "values" in tree:
        learner._counted = int(tree["counted"])
        for module, values in tree["values"].items():
            for name, value in values.items():
                learner.values[module][name].load(value)
