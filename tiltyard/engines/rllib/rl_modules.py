"""RLlib modules around our nets: the methods that RLlib's learners call, answered by a PolicyNet.

    ActorCritic   ppo, impala, appo   the whole model, possibly recurrent: distribution parameters and values
    Dueling       dqn                 Q-values: the model's outputs are the advantages, its value the value stream
    Squashed      sac                 an actor with mean and standard deviation per column, and two critics
    Quantiles     rllib:TQC           the same actor, and critics with several outputs each

Runners act with the net itself, not with the module, so a policy needs no Ray.
A module's output for RLlib is one row of numbers: the model's parameters, log_std, and the mask as 0 and 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import torch
from ray.rllib.algorithms.dqn.dqn_learner import QF_NEXT_PREDS, QF_PREDS, QF_TARGET_NEXT_PREDS
from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
from ray.rllib.algorithms.tqc.torch.default_tqc_torch_rl_module import DefaultTQCTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchDistribution, TorchSquashedGaussian
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.rl_module.apis import (
    TARGET_NETWORK_ACTION_DIST_INPUTS,
    InferenceOnlyAPI,
    QNetAPI,
    TargetNetworkAPI,
    ValueFunctionAPI,
)
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from tiltyard.engines.rllib.worker_spec import KEY, WorkerSpec
from tiltyard.envs.spaces import MASK
from tiltyard.models import distributions
from tiltyard.models.actor_critic import VALUE_GAIN, Tower
from tiltyard.models.distributions import FORBIDDEN
from tiltyard.models.layers import Mlp
from tiltyard.models.policy_net import PolicyNet
from tiltyard.models.torch_distributions import TorchActionDist
from tiltyard.types import ArraySpec, EnvSpec

Batch = Mapping[str, Any]
ACTION = "action"  # key of the action among a critic's observations


class _TiltyardModule(TorchRLModule):  # type: ignore[misc]
    """A base for our modules, whose policy is `self.net`. RLlib requires subclasses of its modules."""

    net: PolicyNet

    def setup(self) -> None:
        self.worker_spec = WorkerSpec.from_config(self.model_config)
        self.net = self.worker_spec.net(self.model_config[KEY].get("policy"))
        for parameter in self.net.parameters():
            parameter.requires_grad_(parameter.numel() > 0)  # several learners wait for the gradient of each trainable

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.net.normaliser.refresh()

    def observe(self, batch: Batch) -> None:
        """Add a batch to the running statistics."""
        if not self.net.normaliser.names:
            return
        obs = {name: batch[Columns.OBS][name].cpu().numpy() for name in self.net.normaliser.names}
        first = next(iter(obs.values()))
        rows = first.ndim - len(self.net.spec.obs[self.net.normaliser.names[0]].shape)
        valid = batch[Columns.LOSS_MASK].cpu().numpy() if Columns.LOSS_MASK in batch else None
        shape = first.shape[:rows]
        if rows == 1:  # [N, ...] as one step of N rows
            obs, shape = {name: x[None] for name, x in obs.items()}, (1, *shape)
        flags = torch.ones(shape, dtype=torch.bool).numpy() if valid is None else valid.reshape(shape)
        self.net.normaliser.observe(obs, flags)


class _TargetModule(_TiltyardModule, TargetNetworkAPI, InferenceOnlyAPI):  # type: ignore[misc]
    """A base for modules with a copy of the net as target."""

    def make_target_networks(self) -> None:
        self.target = make_target_network(self.net)

    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.net, self.target)]

    def get_non_inference_attributes(self) -> list[str]:
        return ["target"]


class ActorCritic(_TargetModule, ValueFunctionAPI):  # type: ignore[misc]
    """Batches are [B, T, ...] with a recurrent model, else [B, ...]."""

    def get_initial_state(self) -> dict[str, Tensor]:
        return {name: memory[0] for name, memory in self.net.initial_state(1).items()}

    def get_train_action_dist_cls(self) -> Any:
        return SimpleNamespace(from_logits=partial(Actions, self.net.spec))  # all that RLlib uses of the class

    get_exploration_action_dist_cls = get_inference_action_dist_cls = get_train_action_dist_cls

    def _forward(self, batch: Batch, **_: Any) -> dict[str, Any]:
        params, value = _unrolled(self.net, batch)
        return {
            Columns.ACTION_DIST_INPUTS: inputs(self.net, params, batch[Columns.OBS].get(MASK)),
            Columns.EMBEDDINGS: value,
        }

    def compute_values(self, batch: Batch, embeddings: Tensor | None = None) -> Tensor:
        """[B] or [B, T] values, normalised if `model.normalise.returns` is set."""
        return _unrolled(self.net, batch)[1] if embeddings is None else embeddings

    def forward_target(self, batch: Batch) -> dict[str, Any]:
        """Forward pass of appo's target network."""
        with torch.no_grad():
            params, _ = _unrolled(self.target, batch)
            row = inputs(self.target, params, batch[Columns.OBS].get(MASK))
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: row}


def _unrolled(net: PolicyNet, batch: Batch) -> tuple[Tensor, Tensor]:
    """Distribution parameters and normalised values of a batch, in its shape."""
    obs = {name: batch[Columns.OBS][name] for name in net.spec.obs}
    if not net.recurrent:
        name, item = next(iter(net.spec.obs.items()))
        lead = obs[name].shape[: obs[name].dim() - len(item.shape)]
        flat = {key: x.reshape(1, -1, *net.spec.obs[key].shape) for key, x in obs.items()}
        params, value = net.unroll(flat, {}, torch.zeros(1, lead.numel(), dtype=torch.bool, device=net.device))
        return params.reshape(*lead, -1), value.reshape(lead)
    by_time = {name: x.transpose(0, 1) for name, x in obs.items()}
    steps, rows = next(iter(by_time.values())).shape[:2]
    first = torch.zeros(steps, rows, dtype=torch.bool, device=net.device)  # a chunk never crosses an episode's end
    params, value = net.unroll(by_time, dict(batch[Columns.STATE_IN]), first)
    return params.transpose(0, 1), value.transpose(0, 1)


class Dueling(_TargetModule, QNetAPI):  # type: ignore[misc]
    """The best action is the same by advantages as by Q-values, so the net acts on the advantages."""

    def setup(self) -> None:
        super().setup()
        self.dueling = bool(self.model_config["dueling"])
        if not self.dueling:
            _freeze_values(self.net)

    def compute_q_values(self, batch: Batch) -> dict[str, Tensor]:
        return {QF_PREDS: self._values(self.net, batch[Columns.OBS])}

    def _values(self, net: PolicyNet, obs: Mapping[str, Tensor]) -> Tensor:
        params, value = _unrolled(net, {Columns.OBS: obs})
        q = value.unsqueeze(-1) + params - params.mean(-1, keepdim=True) if self.dueling else params
        return torch.where(obs[MASK] > 0, q, float(FORBIDDEN)) if MASK in obs else q

    def _forward_train(self, batch: Batch, **_: Any) -> dict[str, Tensor]:
        later = batch[Columns.NEXT_OBS]
        with torch.no_grad():
            online, target = self._values(self.net, later), self._values(self.target, later)
        now = self._values(self.net, batch[Columns.OBS])
        return {QF_PREDS: now, QF_NEXT_PREDS: online, QF_TARGET_NEXT_PREDS: target}

    def forward_target(self, batch: Batch) -> dict[str, Tensor]:
        return {QF_PREDS: self._values(self.target, batch[Columns.OBS])}


class Squashed(_TiltyardModule, DefaultSACTorchRLModule):  # type: ignore[misc]
    """RLlib's forward passes with our actor and critics; its heads are identities."""

    def setup(self) -> None:
        super().setup()
        self.twin_q = True
        self.pi_encoder, self.pi = _Actor(self.net), nn.Identity()
        if not self.inference_only:
            first, second = _critics(self.worker_spec, self.net, 2)
            self.qf_encoder, self.qf = first, nn.Identity()
            self.qf_twin_encoder, self.qf_twin = second, nn.Identity()

    def get_train_action_dist_cls(self) -> Any:
        return TorchSquashedGaussian

    get_exploration_action_dist_cls = get_inference_action_dist_cls = get_train_action_dist_cls


class Quantiles(_TiltyardModule, DefaultTQCTorchRLModule):  # type: ignore[misc]
    """As Squashed, with critics that estimate quantiles of Q."""

    def setup(self) -> None:
        super().setup()
        settings = self.model_config
        self.n_critics, self.n_quantiles = settings["n_critics"], settings["n_quantiles"]
        self.top_quantiles_to_drop_per_net = settings["top_quantiles_to_drop_per_net"]
        self.quantiles_total = self.n_critics * self.n_quantiles
        self.catalog = SimpleNamespace(get_action_dist_cls=lambda framework: TorchSquashedGaussian)
        self.pi_encoder, self.pi = _Actor(self.net), nn.Identity()
        if not self.inference_only:
            self.qf_encoders = nn.ModuleList(_critics(self.worker_spec, self.net, self.n_critics, self.n_quantiles))
            self.qf_heads = nn.ModuleList(nn.Identity() for _ in range(self.n_critics))


def _critics(worker_spec: WorkerSpec, actor: PolicyNet, count: int, outputs: int = 1) -> list[_Critic]:
    """Critics with different first weights, determined by the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(worker_spec.experiment.seed)
        return [_Critic(actor, worker_spec, outputs) for _ in range(count)]


class _Actor(nn.Module):
    def __init__(self, net: PolicyNet) -> None:
        super().__init__()
        self.net = net
        _freeze_values(net)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {ENCODER_OUT: _unrolled(self.net, batch)[0]}


class _Critic(nn.Module):
    """Q of observations and an action, which is added to the observations. Uses the actor's normalisation."""

    def __init__(self, actor: PolicyNet, worker_spec: WorkerSpec, outputs: int) -> None:
        super().__init__()
        self._actor = [actor]  # in a list, so that it is not a submodule
        spec = actor.spec
        with_action = {**spec.obs, ACTION: ArraySpec("box", (spec.action.columns,), "float32")}
        self.tower = Tower(replace(spec, obs=with_action), worker_spec.experiment.model, worker_spec.base)
        self.head = Mlp([self.tower.size, outputs], "tanh", last_gain=VALUE_GAIN)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        actor = self._actor[0]
        seen = actor.normaliser.prepare(batch[Columns.OBS], actor.device)
        return {ENCODER_OUT: self.head(self.tower.features({**seen, ACTION: batch[Columns.ACTIONS]}))}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Critic:
        """Copy for a target network, which shares the actor's normalisation."""
        made = _Critic.__new__(_Critic)
        nn.Module.__init__(made)
        made._actor, made.tower, made.head = self._actor, copy.deepcopy(self.tower), copy.deepcopy(self.head)
        return made


def _freeze_values(net: PolicyNet) -> None:
    """Freeze the unused value head of a built-in model."""
    for name, parameter in net.named_parameters():
        if name.startswith(("model.value_head.", "model.critic.")):
            parameter.requires_grad_(False)


# ---------------------------------------------------------------------------------------------- action distributions


def inputs(net: PolicyNet, params: Tensor, mask: Tensor | None) -> Tensor:
    """A module's output: [..., outputs + columns of log_std + mask_size]."""
    parts = [params]
    if net.log_std.numel():
        parts.append(net.log_std.expand(*params.shape[:-1], -1))
    if mask is not None:
        parts.append(mask.to(params.dtype))
    return torch.cat(parts, -1) if len(parts) > 1 else params


class Actions(TorchDistribution):  # type: ignore[misc]
    """RLlib's names for a TorchActionDist."""

    def __init__(self, spec: EnvSpec, row: Tensor, **_: Any) -> None:
        outputs, stds = distributions.outputs(spec.action), distributions.continuous_columns(spec.action)
        mask = row[..., outputs + stds :] > 0.5 if spec.masked else None
        self.dist = TorchActionDist(spec.action, row[..., :outputs], row[..., outputs : outputs + stds], mask)

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        return self.dist.log_prob(value)

    def entropy(self) -> Tensor:
        return self.dist.entropy()

    def kl(self, other: Actions) -> Tensor:
        return self.dist.kl(other.dist)

    def _get_torch_distribution(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError  # unused: all methods are overridden above

    @staticmethod
    def required_input_dim(space: gymnasium.Space[Any], **_: Any) -> int:
        return math.prod(space.shape or (1,))
