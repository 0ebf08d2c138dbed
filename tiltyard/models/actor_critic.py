"""The built-in model: an encoder per observation, dense layers, optional memory, two heads.

    obs -> encoders -> hidden -> memory -> policy head        parameters [N, outputs], read by `distributions`
    obs -> encoders -> hidden -> memory -> value head         value [N]

A shared critic uses the first tower for both heads. Normalisation is done outside, in `policy_net`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tiltyard.config.experiment import Model
from tiltyard.config.fields import Plugin
from tiltyard.errors import UseError, did_you_mean
from tiltyard.models.encoders import BUILTIN_ENCODERS, IMAGE_ENCODERS, Flat
from tiltyard.models.layers import Mlp, bytes_to_float
from tiltyard.models.recurrent import Core, State
from tiltyard.models.user_model import build_module
from tiltyard.plugins import resolve
from tiltyard.types import ArraySpec, EnvSpec

POLICY_GAIN = 0.01  # nearly uniform first actions
VALUE_GAIN = 1.0


def build_encoder(plugin: Plugin, spec: ArraySpec, base: Sequence[Path], setting: str) -> nn.Module:
    """Build the encoder that a setting names."""
    target = resolve.load(resolve.parse(plugin.id, BUILTIN_ENCODERS, "CustomEncoder", base))
    encoder = build_module(plugin, target, (spec,), setting, setting)
    if not isinstance(getattr(encoder, "size", None), int):
        raise UseError(f"{setting} = {plugin.id} has no `size`", "set self.size to the width of the output of forward")
    return encoder


def chosen_encoder(name: str, spec: EnvSpec, settings: Model) -> Plugin:
    """The encoder set for an observation, else model.encoder; if that is for images or text, others get `auto`."""
    if name in settings.encoders:
        return settings.encoders[name]
    suited: set[str] = set()
    if settings.encoder.id in IMAGE_ENCODERS:
        suited = {key for key, item in spec.obs.items() if item.image}
    elif settings.encoder.id == "text":
        suited = {key for key, item in spec.obs.items() if item.kind == "text"}
    return Plugin(id="auto") if suited and name not in suited else settings.encoder


class Tower(nn.Module):
    """Observations -> features [N, size], with an optional recurrent core."""

    def __init__(self, spec: EnvSpec, settings: Model, base: Sequence[Path]) -> None:
        super().__init__()
        self.names = tuple(spec.obs)
        self.encoders = nn.ModuleList()
        for name in self.names:
            setting = f"model.encoders.{name}" if name in settings.encoders else "model.encoder"
            self.encoders.append(build_encoder(chosen_encoder(name, spec, settings), spec.obs[name], base, setting))
        widths = sum(int(encoder.size) for encoder in self.encoders)  # type: ignore[arg-type, misc]
        # The usual case, one vector of numbers, needs no encoder: skip its call at every env step.
        bare = len(self.names) == 1 and isinstance(self.encoders[0], Flat) and self.encoders[0].is_identity
        self.identity_obs = self.names[0] if bare else None
        self.hidden = Mlp([widths, *settings.hidden], settings.activation)
        self.size = self.hidden.size
        self.core: Core | None = None
        if settings.memory.kind != "none":
            self.core = Core(self.size, settings.memory.size, settings.memory.kind)
            self.size = settings.memory.size

    def features(self, obs: Mapping[str, Tensor]) -> Tensor:
        """[N, ...] -> [N, hidden], before the memory."""
        return self.hidden.forward(self.encoded(obs))

    def encoded(self, obs: Mapping[str, Tensor]) -> Tensor:
        """[N, ...] -> [N, sum of the encoders' sizes]."""
        if self.identity_obs is not None:
            return obs[self.identity_obs]
        parts = [
            encoder(obs[name] if getattr(encoder, "takes_bytes", False) else bytes_to_float(obs[name]))
            for name, encoder in zip(self.names, self.encoders, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class ActorCritic(nn.Module):
    """`forward` is one step; `unroll` a chunk of steps, with encoders and heads run once on all of it.

    With memory both take and return the state, {"actor.h": [B, size], ...}; without, forward takes only observations.
    """

    def __init__(self, spec: EnvSpec, outputs: int, *, settings: Model, base: Sequence[Path]) -> None:
        super().__init__()
        for name in settings.encoders:
            if name not in spec.obs:
                raise UseError(
                    f"model.encoders.{name}: the env has no observation {name!r}", did_you_mean(name, spec.obs)
                )
        self.recurrent = settings.memory.kind != "none"
        self.actor = Tower(spec, settings, base)
        self.critic = Tower(spec, settings, base) if settings.critic == "separate" else None
        self.policy_head = Mlp([self.actor.size, outputs], "tanh", last_gain=POLICY_GAIN)
        self.value_head = Mlp([self.actor.size, 1], "tanh", last_gain=VALUE_GAIN)

    def initial_state(self, rows: int) -> State:
        """Zero state; {} without memory."""
        state: State = {}
        for prefix, tower in (("actor", self.actor), ("critic", self.critic)):
            if tower is not None and tower.core is not None:
                state |= {f"{prefix}.{name}": memory for name, memory in tower.core.initial_state(rows).items()}
        return state

    def forward(
        self, obs: Mapping[str, Tensor], state: State | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, State]:
        """[N, ...] -> parameters [N, outputs], value [N], and with memory the next state."""
        x = self.actor.features(obs)
        y = x if self.critic is None else self.critic.features(obs)
        if state is None or first is None:
            return self.policy_head.forward(x), self.value_head.forward(y).squeeze(-1)
        x, after = self._run_core("actor", self.actor, x, state, first)
        if self.critic is None:
            return self.policy_head.forward(x), self.value_head.forward(x).squeeze(-1), after
        y, more = self._run_core("critic", self.critic, y, state, first)
        return self.policy_head.forward(x), self.value_head.forward(y).squeeze(-1), after | more

    def unroll(self, obs: Mapping[str, Tensor], state: State, first: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk with memory: obs [T, B, ...], first [T, B] -> parameters [T, B, outputs], value [T, B]."""
        steps, rows = first.shape
        flat = {name: x.flatten(0, 1) for name, x in obs.items()}
        x, _ = self._run_core("actor", self.actor, self.actor.features(flat).view(steps, rows, -1), state, first)
        y = x
        if self.critic is not None:
            features = self.critic.features(flat).view(steps, rows, -1)
            y, _ = self._run_core("critic", self.critic, features, state, first)
        return self.policy_head.forward(x), self.value_head.forward(y).squeeze(-1)

    def _run_core(self, prefix: str, tower: Tower, x: Tensor, state: State, first: Tensor) -> tuple[Tensor, State]:
        """Run x through the tower's core: one step when first is [B], a chunk when it is [T, B]."""
        core = tower.core
        assert core is not None
        own = {name: state[f"{prefix}.{name}"] for name in core.names}
        out, after = (core.forward if first.dim() == 1 else core.unroll)(x, own, first)
        return out, {f"{prefix}.{name}": memory for name, memory in after.items()}
