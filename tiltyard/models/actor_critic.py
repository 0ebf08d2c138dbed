"""The built-in model: an encoder per observation, dense layers, optional memory, two heads.

    obs -> encoders -> hidden -> memory -> policy head        parameters [N, outputs], read by `distributions`
    obs -> encoders -> hidden -> memory -> value head         value [N]

A shared critic uses the first tower for both heads. Normalisation is done outside, in `policy_net`.

An encoder is an nn.Module, `Encoder(spec, *, options)`, with `size`; forward maps [N, *shape] to [N, size].
Numbers and binaries arrive as float32 (bytes scaled to 0..1), categories and words as int64.

    flat     numbers unchanged, categories one-hot          nature   3 convolutions, the Atari DQN
    mlp      flat, then dense layers                        impala   2 convolutions, IMPALA's small net
    simple   3 convolutions of stride 2, any image size     resnet   residual blocks, IMPALA's large net
    text     word embeddings through a GRU                  auto     text, simple, nature or flat
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiltyard.config.fields import Plugin
from tiltyard.config.sections import Model
from tiltyard.errors import ConfigError, UseError, did_you_mean, raised
from tiltyard.models.image_encoders import NATURE_MIN_SIDE, Nature, Simple, image_shape
from tiltyard.models.layers import Mlp, bytes_to_float
from tiltyard.models.recurrent import Core, State
from tiltyard.plugins import resolve
from tiltyard.plugins.namespaces import import_hint
from tiltyard.types import ArraySpec, EnvSpec

BUILTIN_ENCODERS = {
    "auto": "tiltyard.models.actor_critic:auto",
    "mlp": "tiltyard.models.actor_critic:MlpEncoder",
    "simple": "tiltyard.models.image_encoders:Simple",
    "nature": "tiltyard.models.image_encoders:Nature",
    "impala": "tiltyard.models.image_encoders:Impala",
    "resnet": "tiltyard.models.image_encoders:ResNet",
    "text": "tiltyard.models.actor_critic:Text",
}
IMAGE_ENCODERS = ("simple", "nature", "impala", "resnet")
MAX_ONE_HOT = 1024  # categories; beyond it they get a learned embedding
EMBEDDING = 64
WORDS = 4096  # hashed word ids are 1..4095, 0 is padding


class Flat(nn.Module):
    """Numbers flattened; categories one-hot, or embedded when there are very many."""

    starts: Tensor

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        if spec.kind == "text":
            raise UseError("the flat and mlp encoders cannot read text", "use the encoder text or auto")
        self.elements = math.prod(spec.shape)
        self.categories: tuple[int, ...] = ()
        self.table: nn.Embedding | None = None
        self.size = self.elements
        self.is_identity = spec.kind not in ("discrete", "multi_discrete") and len(spec.shape) == 1
        if spec.kind in ("discrete", "multi_discrete"):
            options = spec.options if len(spec.options) == self.elements else spec.options[:1] * self.elements
            self.categories = options
            self.size = sum(options)
            if self.size > MAX_ONE_HOT:
                self.table = nn.Embedding(self.size, EMBEDDING)
                self.size = EMBEDDING * self.elements
            starts = torch.tensor([sum(options[:at]) for at in range(len(options))])
            self.register_buffer("starts", starts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.categories:
            return x if self.is_identity else x.reshape(x.shape[0], self.elements)
        places = x.reshape(x.shape[0], self.elements) + self.starts  # [N, elements]: every element has its own range
        if self.table is not None:
            return F.embedding(places, self.table.weight).flatten(1)
        hot = torch.zeros(x.shape[0], self.size, device=x.device)
        return hot.scatter_(1, places, 1.0)


class MlpEncoder(nn.Module):
    """Dense layers on the flat observation."""

    def __init__(self, spec: ArraySpec, *, hidden: Sequence[int] = (64, 64), activation: str = "tanh") -> None:
        super().__init__()
        if not hidden or any(not isinstance(width, int) or width < 1 for width in hidden):
            hint = "for example hidden: [64, 64]"
            raise UseError(f"the mlp encoder's hidden = {list(hidden)} must be a list of widths", hint)
        self.flat = Flat(spec)
        self.layers = Mlp([self.flat.size, *hidden], activation)
        self.size = hidden[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers.forward(self.flat.forward(x))


class Text(nn.Module):
    """Hashed words [N, words], padded with 0: embeddings, then the state of a GRU after the last word."""

    def __init__(self, spec: ArraySpec, *, size: int = 64, embedding: int = 32) -> None:
        super().__init__()
        if spec.kind != "text":
            raise UseError(f"the text encoder needs text, but the observation is a {spec.kind}", "use encoder: auto")
        self.table = nn.Embedding(spec.options[0] if spec.options else WORDS, embedding, padding_idx=0)
        self.core = nn.GRU(embedding, size, batch_first=True)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":  # counting distinct rows would move data to the CPU
            return self._read(x)
        rows, which = torch.unique(x, dim=0, return_inverse=True)  # a batch repeats few different texts
        words = max(1, int((rows != 0).sum(1).max()))
        return self._read(rows[:, :words])[which]

    def _read(self, x: Tensor) -> Tensor:
        out, _ = self.core(self.table(x))  # [N, words, size]
        length = (x != 0).sum(1)
        last = (length - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, self.size)
        return torch.gather(out, 1, last).squeeze(1) * (length > 0).unsqueeze(1)


def auto(spec: ArraySpec) -> nn.Module:
    """Choose by the observation: text, small or large image, or numbers."""
    if spec.kind == "text":
        return Text(spec)
    if spec.image:
        _, height, width, _ = image_shape(spec, "auto")
        return Nature(spec) if min(height, width) >= NATURE_MIN_SIDE else Simple(spec)
    return Flat(spec)


# ---------------------------------------------------------------------------------------------- the model


POLICY_GAIN = 0.01  # nearly uniform first actions
VALUE_GAIN = 1.0


def build_module(
    plugin: Plugin | Model, target: Any, args: tuple[Any, ...], setting: str, id_setting: str
) -> nn.Module:
    """Call target(*args, **options) after checking the options; its errors name the plug-in."""
    problems = resolve.check_options(target, plugin.options, len(args), f"{setting}.options")
    if problems:
        raise ConfigError(problems)
    try:
        module = target(*args, **plugin.options)
    except (UseError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - a plug-in may raise anything
        message = import_hint(error) or f"check {setting}.options and the constructor"
        hint = resolve.user_traceback(error)
        raise UseError(f"{id_setting} = {plugin.id}: the constructor {raised(error)}", message, hint) from None
    if not isinstance(module, nn.Module):
        hint = "derive the class from nn.Module"
        raise UseError(f"{id_setting} = {plugin.id} made a {type(module).__name__}, not a torch.nn.Module", hint)
    return module.float()


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
                hint = did_you_mean(name, spec.obs)
                raise UseError(f"model.encoders.{name}: the env has no observation {name!r}", hint)
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

    def unroll(
        self, obs: Mapping[str, Tensor], state: State, first: Tensor, starts: Collection[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """A chunk with memory: obs [T, B, ...], first [T, B] -> parameters [T, B, outputs], value [T, B]."""
        steps, rows = first.shape
        flat = {name: x.flatten(0, 1) for name, x in obs.items()}
        features = self.actor.features(flat).view(steps, rows, -1)
        x, _ = self._run_core("actor", self.actor, features, state, first, starts)
        y = x
        if self.critic is not None:
            features = self.critic.features(flat).view(steps, rows, -1)
            y, _ = self._run_core("critic", self.critic, features, state, first, starts)
        return self.policy_head.forward(x), self.value_head.forward(y).squeeze(-1)

    def _run_core(
        self, prefix: str, tower: Tower, x: Tensor, state: State, first: Tensor, starts: Collection[int] | None = None
    ) -> tuple[Tensor, State]:
        """Run x through the tower's core: one step when first is [B], a chunk when it is [T, B]."""
        core = tower.core
        assert core is not None
        own = {name: state[f"{prefix}.{name}"] for name in core.names}
        out, after = core.forward(x, own, first) if first.dim() == 1 else core.unroll(x, own, first, starts)
        return out, {f"{prefix}.{name}": memory for name, memory in after.items()}
