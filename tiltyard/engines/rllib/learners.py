"""RLlib's learners with what they lack: our PPO loss, schedules that they do not know, statistics, and times.

    Ppo      our loss on RLlib's minibatches: the same number as on the local engine for the same samples
    Impala, Appo, Dqn, Sac, TheirPpo, Tqc    RLlib's own losses

What a learner keeps beside weights and optimiser, and RLlib forgets to save, is `extra_state`.
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

from tiltyard.algos.ppo import CHANGEABLE, RISES_WITH_KL
from tiltyard.algos.schedules import ScheduledValue
from tiltyard.config.algos import Ppo as PpoSettings
from tiltyard.engines.rllib.connectors import OLD_VALUE, Advantages, Memories, WithOldPolicy
from tiltyard.engines.rllib.replay_buffer import Replayed
from tiltyard.engines.rllib.worker_spec import KEY, SECONDS, UPDATES, WorkerSpec
from tiltyard.types import Tree

FORGOTTEN = ("curr_kl_coeffs_per_module", "curr_log_alpha")  # appo's and sac's, which RLlib's state leaves out


class _Ours:
    """Before RLlib's own class: which parameters learn, Adam's epsilon, how long it took."""

    config: Any
    module: Any
    metrics: Any
    _device: Any
    _learner_connector: Any

    def build(self) -> None:
        self.task = WorkerSpec.heard(self.config.learner_config_dict)
        threads = self.task.experiment.engine.threads
        torch.set_num_threads(threads if isinstance(threads, int) else 1)
        super().build()  # type: ignore[misc]
        self._put_in(AddStatesFromEpisodesToBatch, Memories())

    def _put_in(self, theirs: type[Any], ours: Any) -> None:
        """A part of ours in RLlib's pipeline, in the place of its own."""
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
        """Ours by name, out of what RLlib wraps them in."""
        return {name: module.unwrapped() for name, module in self.module._rl_modules.items()}


class _OneAdam(_Ours):
    """A single Adam for everything that learns, with the epsilon of the settings where they have one."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        params = self.get_parameters(self.module[module_id])
        eps = getattr(self.task.experiment.algo, "adam_eps", 1e-8)
        adam = torch.optim.Adam(params, eps=eps)
        self.register_optimizer(  # type: ignore[attr-defined]
            module_id=module_id, optimizer=adam, params=params, lr_or_lr_schedule=config.lr
        )


class _Observing:
    """Every batch that is learned from is added to the running statistics, after its loss."""

    module: Any

    def compute_loss_for_module(self, *, module_id: str, batch: Any, **more: Any) -> Tensor:
        loss: Tensor = super().compute_loss_for_module(module_id=module_id, batch=batch, **more)  # type: ignore[misc]
        self.module[module_id].unwrapped().observe(batch)
        return loss


class Impala(_Observing, _OneAdam, IMPALATorchLearner):  # type: ignore[misc]
    pass


class Appo(_Observing, _OneAdam, APPOTorchLearner):  # type: ignore[misc]
    pass


class _Replaying:
    """Learns from draws of our own replay buffer, which are batches already."""

    _learner_connector: Any
    _device: Any

    def build(self) -> None:
        super().build()  # type: ignore[misc]
        self._learner_connector.connectors = [Replayed(self._device)]


class Dqn(_Replaying, _Observing, _OneAdam, DQNTorchLearner):  # type: ignore[misc]
    pass


class Sac(_Replaying, _Observing, _Ours, SACTorchLearner):  # type: ignore[misc]
    pass


class _Counted:
    """RLlib's TQC counts the rows of a batch by its observations, taking them for one tensor."""

    def compute_loss_for_module(self, *, batch: Any, **more: Any) -> Tensor:
        told = {**batch, Columns.OBS: batch[Columns.REWARDS]}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using a target size")  # each quantile meets each of the target's
            loss: Tensor = super().compute_loss_for_module(batch=told, **more)  # type: ignore[misc]
        return loss


class Tqc(_Replaying, _Observing, _Counted, _Ours, TQCTorchLearner):  # type: ignore[misc]
    pass


class TheirPpo(_Observing, _OneAdam, PPOTorchLearner):  # type: ignore[misc]
    def build(self) -> None:
        super().build()
        for place, part in enumerate(self._learner_connector.connectors):
            if isinstance(part, GeneralAdvantageEstimation):
                self._learner_connector.connectors[place] = WithOldPolicy(gamma=part.gamma, lambda_=part.lambda_)


# ------------------------------------------------------------------------------------------------ PPO


class Ppo(_OneAdam, PPOTorchLearner):  # type: ignore[misc]
    """`values` are the settings that change while training, of each policy."""

    def build(self) -> None:
        super().build()
        experiment = self.task.experiment
        self.values: dict[str, dict[str, ScheduledValue]] = {}
        for name, policy in self.policies().items():
            algo = experiment.algo_of(policy)
            self.values[name] = {
                setting: ScheduledValue(
                    getattr(algo, setting), experiment.stop.env_steps, rises_with_kl=setting in RISES_WITH_KL
                )
                for setting in CHANGEABLE
            }
        self.env_steps = 0  # before the batch that is learned from
        self._counted = 0
        self._put_in(GeneralAdvantageEstimation, Advantages(self))

    def policies(self) -> dict[str, str]:
        """Our name of each module's policy."""
        return {
            name: module.model_config[KEY].get("policy") or self.task.experiment.learning[0]
            for name, module in self.modules().items()
        }

    def now(self, module_id: str) -> dict[str, float]:
        return {name: value.at(self.env_steps) for name, value in self.values[module_id].items()}

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self.env_steps, self._counted = self._counted, int(timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))
        for module_id in self.values:
            for _, optimizer in self.get_optimizers_for_module(module_id):
                self._set_optimizer_lr(optimizer, lr=self.now(module_id)["lr"])
        self.seen: dict[str, Any] = {}  # what each module learns from
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
        now, algo = self.now(module_id), self.task.experiment.algo
        assert isinstance(algo, PpoSettings)
        dist = module.get_train_action_dist_cls().from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        samples = Samples(
            log_prob=dist.logp(batch[Columns.ACTIONS]),
            entropy=dist.entropy(),
            value=module.compute_values(batch, embeddings=fwd_out[Columns.EMBEDDINGS]),
            old_log_prob=batch[Columns.ACTION_LOGP],
            old_value=batch[OLD_VALUE],
            advantage=batch[Postprocessing.ADVANTAGES],
            target=batch[Postprocessing.VALUE_TARGETS],
            valid=batch.get(Columns.LOSS_MASK),
        )
        losses = ppo_losses(samples, algo, now)
        self.divergences.setdefault(module_id, []).append(float(losses["loss/kl"].detach()))
        total = losses.pop("total")
        self.metrics.log_dict(losses, key=module_id, window=1)
        return total


class Samples:
    """One minibatch, every tensor of the same shape."""

    def __init__(
        self,
        *,
        log_prob: Tensor,
        entropy: Tensor,
        value: Tensor,
        old_log_prob: Tensor,
        old_value: Tensor,
        advantage: Tensor,
        target: Tensor,
        valid: Tensor | None,
    ) -> None:
        chosen = slice(None) if valid is None else valid.bool()
        self.log_prob, self.entropy, self.value = log_prob[chosen], entropy[chosen], value[chosen]
        self.old_log_prob, self.old_value = old_log_prob[chosen], old_value[chosen]
        self.advantage, self.target = advantage[chosen], target[chosen]


def ppo_losses(samples: Samples, algo: PpoSettings, now: Mapping[str, float]) -> dict[str, Tensor]:
    """As in algos.ppo, over valid samples, by autograd: the loss and its terms."""
    advantage = samples.advantage
    if algo.normalise_advantage:
        centred = advantage - advantage.mean()
        advantage = centred / (centred.square().mean().sqrt() + 1e-8)
    log_ratio = samples.log_prob - samples.old_log_prob
    ratio = log_ratio.exp()
    capped = ratio.clamp(1 - now["clip"], 1 + now["clip"])
    policy = -torch.minimum(ratio * advantage, capped * advantage).mean()
    squares = (samples.value - samples.target).square()
    if algo.value_clip is not None:
        moved = samples.old_value + (samples.value - samples.old_value).clamp(-algo.value_clip, algo.value_clip)
        squares = torch.maximum(squares, (moved - samples.target).square())
    value = 0.5 * squares.mean()
    entropy = samples.entropy.mean()
    divergence = (torch.expm1(log_ratio) - log_ratio).mean()
    total = policy + now["value_coef"] * value - now["entropy"] * entropy + now["kl"] * divergence
    beyond = ((ratio - 1).abs() > now["clip"]).float().mean()
    return {
        "total": total,
        "loss/policy": policy,
        "loss/value": value,
        "loss/entropy": entropy,
        "loss/kl": divergence,
        "learn/clip_fraction": beyond,
    }


# ------------------------------------------------------------------------------------------------ state


def extra_state(learner: Any) -> Tree:
    """What a learner knows and RLlib does not save."""
    tree: dict[str, Any] = {"torch": torch.get_rng_state().numpy()}
    for name in FORGOTTEN:
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
    """Take it back, in place: an optimiser holds on to what it optimises."""
    torch.set_rng_state(torch.from_numpy(np.asarray(tree["torch"])))
    for name in FORGOTTEN:
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
