"""The built-in model: encoders per observation, dense layers, an optional memory, and two heads.

Owns how those are put together; what the outputs mean is `heads`, normalisation is `net`. With a separate critic:

    obs -> encoders -> hidden -> memory -> policy head        parameters [N, outputs]
    obs -> encoders -> hidden -> memory -> value head         value [N]

and with a shared one both heads sit on one tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiltyard.config.experiment import Model
from tiltyard.config.fields import Plugin
from tiltyard.errors import ConfigError, UseError, did_you_mean, raised
from tiltyard.models.encoders import BUILTIN_ENCODERS, IMAGE_ENCODERS, Flat, Mlp, as_numbers
from tiltyard.models.recurrent import Core, State
from tiltyard.plugins import resolve
from tiltyard.types import ArraySpec, EnvSpec

POLICY_GAIN = 0.01  # nearly uniform first actions
VALUE_GAIN = 1.0


def build_module(
    plugin: Plugin | Model, target: Any, given: tuple[Any, ...], setting: str, id_setting: str
) -> nn.Module:
    """target(*given, **options) with the options checked first; what goes wrong in it is told as the plug-in's."""
    problems = resolve.check_options(target, plugin.options, len(given), f"{setting}.options")
    if problems:
        raise ConfigError(problems)
    try:
        module = target(*given, **plugin.options)
    except (UseError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises is the user's to see
        raise UseError(
            f"{id_setting} = {plugin.id}: its constructor {raised(error)}",
            f"check {setting}.options and the constructor",
            resolve.user_traceback(error),
        ) from None
    if not isinstance(module, nn.Module):
        raise UseError(f"{id_setting} = {plugin.id} makes no torch.nn.Module", "derive the class from nn.Module")
    return module.float()


def build_encoder(plugin: Plugin, spec: ArraySpec, base: Sequence[Path], setting: str) -> nn.Module:
    """The encoder that a setting names."""
    target = resolve.load(resolve.parse(plugin.id, BUILTIN_ENCODERS, "CustomEncoder", base))
    encoder = build_module(plugin, target, (spec,), setting, setting)
    if not isinstance(getattr(encoder, "size", None), int):
        raise UseError(f"{setting} = {plugin.id} has no `size`", "set self.size to the width of what forward returns")
    return encoder


def chosen_encoder(name: str, spec: EnvSpec, settings: Model) -> Plugin:
    """The observation's own encoder, else the one for all. One for images or words leaves other kinds to `auto`."""
    if name in settings.encoders:
        return settings.encoders[name]
    suited: set[str] = set()
    if settings.encoder.id in IMAGE_ENCODERS:
        suited = {key for key, item in spec.obs.items() if item.image}
    elif settings.encoder.id == "text":
        suited = {key for key, item in spec.obs.items() if item.kind == "text"}
    return Plugin(id="auto") if suited and name not in suited else settings.encoder


class Tower(nn.Module):
    """Observations -> features [N, size], with a memory of its own where asked for."""

    def __init__(self, spec: EnvSpec, settings: Model, base: Sequence[Path]) -> None:
        super().__init__()
        self.names = tuple(spec.obs)
        self.encoders = nn.ModuleList()
        for name in self.names:
            setting = f"model.encoders.{name}" if name in settings.encoders else "model.encoder"
            self.encoders.append(build_encoder(chosen_encoder(name, spec, settings), spec.obs[name], base, setting))
        widths = sum(int(encoder.size) for encoder in self.encoders)  # type: ignore[arg-type, misc]
        # The usual case, one vector of numbers, needs no encoder and is spared the call: it is made at every env step.
        bare = len(self.names) == 1 and isinstance(self.encoders[0], Flat) and self.encoders[0].passes
        self.plain = self.names[0] if bare else None
        self.hidden = Mlp([widths, *settings.hidden], settings.activation)
        self.size = self.hidden.size
        self.core: Core | None = None
        if settings.memory.kind != "none":
            self.core = Core(self.size, settings.memory.size, settings.memory.kind)
            self.size = settings.memory.size

    def features(self, obs: Mapping[str, Tensor]) -> Tensor:
        """[N, ...] -> [N, features before the memory]."""
        return self.hidden.forward(self.encoded(obs))

    def encoded(self, obs: Mapping[str, Tensor]) -> Tensor:
        """[N, ...] -> [N, what all encoders give]."""
        if self.plain is not None:
            return obs[self.plain]
        parts = [
            encoder(obs[name] if getattr(encoder, "takes_bytes", False) else as_numbers(obs[name]))
            for name, encoder in zip(self.names, self.encoders, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class ActorCritic(nn.Module):
    """`forward` is one step; `unroll` is the same over a chunk, with encoders and heads run once on all of it.

    With a memory both take and give the state, {"actor.h": [B, size], ...}; without, forward takes observations only.
    """

    def __init__(self, spec: EnvSpec, outputs: int, *, settings: Model, base: Sequence[Path]) -> None:
        super().__init__()
        for name in settings.encoders:
            if name not in spec.obs:
                raise UseError(f"model.encoders names {name!r}, which is no observation", did_you_mean(name, spec.obs))
        self.recurrent = settings.memory.kind != "none"
        self.actor = Tower(spec, settings, base)
        self.critic = Tower(spec, settings, base) if settings.critic == "separate" else None
        self.policy_head = Mlp([self.actor.size, outputs], "tanh", last_gain=POLICY_GAIN)
        self.value_head = Mlp([self.actor.size, 1], "tanh", last_gain=VALUE_GAIN)

    def initial_state(self, rows: int) -> State:
        """Empty memory; {} without one."""
        state: State = {}
        for prefix, tower in (("actor", self.actor), ("critic", self.critic)):
            if tower is not None and tower.core is not None:
                state |= {f"{prefix}.{name}": memory for name, memory in tower.core.initial_state(rows).items()}
        return state

    def forward(
        self, obs: Mapping[str, Tensor], state: State | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, State]:
        """[N, ...] -> parameters [N, outputs], value [N], and with a memory the state after this step."""
        x = self.actor.features(obs)
        y = x if self.critic is None else self.critic.features(obs)
        if state is None or first is None:
            return self.policy_head.forward(x), self.value_head.forward(y).squeeze(-1)
        x, after = self._remember("actor", self.actor, x, state, first)
        if self.critic is None:
            return self.policy_head.forward(x), self.value_head.forward(x).squeeze(-1), after
        y, more = self._remember("critic", self.critic, y, state, first)
        return self.policy_head.forward(x), self.value_head.forward(y).squeeze(-1), after | more

    def unroll(self, obs: Mapping[str, Tensor], state: State, first: Tensor) -> tuple[Tensor, Tensor]:
        """With memory, a chunk: obs [T, B, ...], first [T, B] -> parameters [T, B, outputs], value [T, B]."""
        steps, rows = first.shape
        flat = {name: x.flatten(0, 1) for name, x in obs.items()}
        x, _ = self._remember("actor", self.actor, self.actor.features(flat).view(steps, rows, -1), state, first)
        y = x
        if self.critic is not None:
            features = self.critic.features(flat).view(steps, rows, -1)
            y, _ = self._remember("critic", self.critic, features, state, first)
        return self.policy_head.forward(x), self.value_head.forward(y).squeeze(-1)

    def _remember(self, prefix: str, tower: Tower, x: Tensor, state: State, first: Tensor) -> tuple[Tensor, State]:
        """x through the tower's memory: one step when first is [B], a chunk when it is [T, B]."""
        core = tower.core
        assert core is not None
        own = {name: state[f"{prefix}.{name}"] for name in core.names}
        out, after = (core.forward if first.dim() == 1 else core.unroll)(x, own, first)
        return out, {f"{prefix}.{name}": memory for name, memory in after.items()}
