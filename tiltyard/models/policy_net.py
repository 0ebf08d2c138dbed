"""PolicyNet: a model with its normalisation and action distribution. Its state is all that a policy needs to act.

    obs -> float32 -> running mean and variance -> model -> parameters -> ActionDist
                                                        \\-> normalised value -> value in units of reward

The layers belong to the model. Where the model is a plain MLP, acting goes through `fast_mlp` instead of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiltyard.algos.fast_mlp import Dense, Layers, is_plain
from tiltyard.config.experiment import Model
from tiltyard.errors import ConfigError, Problem, TiltyardError, UseError
from tiltyard.models import distributions
from tiltyard.models.actor_critic import ActorCritic
from tiltyard.models.normalise import Normaliser, scale_images
from tiltyard.models.recurrent import State
from tiltyard.models.user_model import build_module, check_model, model_error
from tiltyard.plugins import resolve
from tiltyard.types import EnvSpec

BUILTIN_MODELS = {"actor_critic": "tiltyard.models.actor_critic:ActorCritic"}
EMPTY = np.zeros(0, np.float32)

Array = NDArray[Any]
ObsIn = Mapping[str, Tensor | Array]
Dist = distributions.ActionDist | distributions.SquashedDist


class PolicyOutput(NamedTuple):
    """Rows [B]: flat action, its log probability, value in units of reward, state after the step (on the device)."""

    action: Array
    log_prob: Array
    value: Array
    state: State


def choose_action(
    dist: Dist, value: Array, after: State, *, greedy: bool, generator: torch.Generator | None
) -> PolicyOutput:
    """Take the most likely action, or sample one."""
    action = dist.mode() if greedy else dist.sample(generator)
    return PolicyOutput(action, dist.log_prob(action), value, after)


class PolicyNet(nn.Module):
    """Build it, move it to a device, then give it to the learner, which lays the parameters out in one vector."""

    def __init__(self, spec: EnvSpec, model: Model, base: Sequence[Path], seed: int, *, squashed: bool = False) -> None:
        super().__init__()
        if squashed:  # the critics of such a policy take actions too and are not part of it
            model = model.model_copy(update={"critic": "shared"})
        self.spec = spec
        self.settings = model
        self.squashed = squashed
        outputs = distributions.outputs(spec.action) * (2 if squashed else 1)
        with torch.random.fork_rng(devices=[]):  # leaves the global generator alone
            torch.manual_seed(seed)
            self.model = _build_model(spec, model, base, outputs)
            self.recurrent: bool = getattr(self.model, "recurrent", hasattr(self.model, "initial_state"))
            stds = 0 if squashed else distributions.continuous_columns(spec.action)
            self.log_std = nn.Parameter(torch.full((stds,), model.log_std))
            self._max_log_std = torch.tensor([] if squashed else distributions.max_log_std(spec.action))
            self.clamp_log_std()
            self.normaliser = Normaliser(spec, model.normalise)
            self.obs_stats = nn.ModuleList(self.normaliser.obs_stats)
            self.return_stats = self.normaliser.return_stats
            if not isinstance(self.model, ActorCritic):
                check_model(self, outputs)
        self.dense = Dense(self.model) if isinstance(self.model, ActorCritic) and is_plain(self.model) else None

    @property
    def device(self) -> torch.device:
        return self.log_std.device

    # ------------------------------------------------------------------------------------------ acting

    def initial_state(self, rows: int) -> State:
        """Recurrent state at the start of an episode; {} without memory."""
        if not self.recurrent:
            return {}
        state = cast(State, self.model.initial_state(rows))  # type: ignore[operator]
        return {name: memory.to(self.log_std.device) for name, memory in state.items()}

    def act(
        self,
        obs: ObsIn,
        state: State,
        first: Tensor | Array,
        mask: Tensor | Array | None,
        *,
        greedy: bool,
        generator: torch.Generator | None = None,
        with_value: bool = True,
    ) -> PolicyOutput:
        """Decide for B rows. Rows with `first` start from the initial state.

        Without `with_value`, a separate critic is not computed and the value is empty.
        """
        layers = None if with_value else self._fast_layers()
        if self.dense is not None and layers is not None and len(layers.towers) > 1:
            params, value, after = self.dense.params(self._fast_inputs(obs, self.dense), layers), EMPTY, state
        else:
            params, value, after = self.infer(obs, state, first)
        dist: Dist
        if self.squashed:
            dist = distributions.SquashedDist(params)
        else:
            dist = self.distribution(params, mask.cpu().numpy() if isinstance(mask, Tensor) else mask)
        value = self.normaliser.denormalise_value(value)
        return choose_action(dist, value, after, greedy=greedy, generator=generator)

    def value(self, obs: ObsIn, state: State, first: Tensor | Array) -> Array:
        """Values [B] in units of reward."""
        layers = self._fast_layers()
        if layers is not None and self.dense is not None:
            value = self.dense.value(self._fast_inputs(obs, self.dense), layers)
        else:
            value = self.infer(obs, state, first)[1]
        return self.normaliser.denormalise_value(value)

    @property
    def batched_values(self) -> bool:
        """Whether it is faster to act without values and compute those of many steps at once."""
        layers = self._fast_layers()
        return layers is not None and len(layers.towers) > 1

    def distribution(self, params: Array, mask: Array | None) -> distributions.ActionDist:
        """The distribution with parameters [..., outputs]; not for squashed policies."""
        log_std = self.log_std.detach().cpu().numpy() if self._max_log_std.numel() else EMPTY
        return distributions.ActionDist(self.spec.action, params, log_std, mask)

    def infer(self, obs: ObsIn, state: State, first: Tensor | Array) -> tuple[Array, Array, State]:
        """Parameters [B, outputs], normalised value [B] and the next state, without gradients."""
        dense, layers = self.dense, self._fast_layers()
        if dense is not None and layers is not None:
            return *dense.forward(self._fast_inputs(obs, dense), layers), state
        with torch.no_grad():  # as a decorator it costs three times as much
            params, value, after = self._step(self.normaliser.prepare(obs, self.log_std.device), state, first)
            return params.cpu().numpy(), value.cpu().numpy(), after

    def _fast_layers(self) -> Layers | None:
        return None if self.dense is None else self.dense.layers()

    def _fast_inputs(self, obs: ObsIn, dense: Dense) -> Array:
        """Prepared and encoded observations; the usual case, one float32 vector, without torch."""
        if dense.identity_obs is not None:
            x = np.asarray(obs[dense.identity_obs])
            if x.dtype == np.float32:
                return self.normaliser.normalise_array(x) if self.normaliser.names else x
        return dense.encoded(self.normaliser.prepare(obs, self.log_std.device)).numpy()

    def _step(self, obs: dict[str, Tensor], state: State, first: Tensor | Array) -> tuple[Tensor, Tensor, State]:
        try:
            if not isinstance(self.model, ActorCritic):
                obs = scale_images(obs)
            if not self.recurrent:
                params, value = self.model(obs)
                return params, value, state
            starts = torch.as_tensor(first, device=self.log_std.device)
            if not isinstance(self.model, ActorCritic):
                state = self._reset_rows(state, starts)
            return cast(tuple[Tensor, Tensor, State], self.model(obs, state, starts))
        except (TiltyardError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise model_error(self.settings, error) from error

    def _reset_rows(self, state: State, first: Tensor) -> State:
        """Give rows that start an episode their initial state, so that user models need not do it."""
        if not bool(first.any()):
            return state
        fresh = self.initial_state(first.shape[0])
        return {
            name: torch.where(first.view(-1, *[1] * (memory.dim() - 1)), fresh[name], memory)
            for name, memory in state.items()
        }

    # ------------------------------------------------------------------------------------------ learning

    def unroll(self, obs: ObsIn, state0: State, first: Tensor, *, prepared: bool = False) -> tuple[Tensor, Tensor]:
        """T steps of B rows with gradients: parameters [T, B, outputs] and normalised value [T, B].

        Without memory T and B are any split of the rows. `prepared` observations come from `Normaliser.prepare`, which
        does not depend on parameters and is done once for all gradient steps.
        """
        inputs = cast(dict[str, Tensor], obs) if prepared else self.normaliser.prepare(obs, self.log_std.device)
        steps, rows = first.shape
        if not self.recurrent:
            params, value, _ = self._step({name: x.flatten(0, 1) for name, x in inputs.items()}, state0, first)
            return params.view(steps, rows, -1), value.view(steps, rows)
        if isinstance(self.model, ActorCritic):
            try:
                return self.model.unroll(inputs, state0, first)
            except (TiltyardError, KeyboardInterrupt):
                raise
            except BaseException as error:
                raise model_error(self.settings, error) from error
        state, outs, values = state0, [], []
        for t in range(steps):
            params, value, state = self._step({name: x[t] for name, x in inputs.items()}, state, first[t])
            outs.append(params)
            values.append(value)
        return torch.stack(outs), torch.stack(values)

    @torch.no_grad()
    def clamp_log_std(self) -> None:
        """Limit log_std after a gradient step; free without continuous actions."""
        if self.log_std.numel():
            torch.minimum(self.log_std, self._max_log_std.to(self.log_std.device), out=self.log_std.data)

    # ------------------------------------------------------------------------------------------ state

    def arrays(self) -> dict[str, Array]:
        """A copy of all parameters and statistics, by name."""
        return {name: item.detach().cpu().numpy().copy() for name, item in self.state_dict().items()}

    @torch.no_grad()
    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Load the result of `arrays` in place; missing, extra or differently shaped arrays raise a UseError."""
        own = self.state_dict()
        wrong = [
            f"{name}: {_shape(arrays.get(name))} there, {_shape(own.get(name))} here"
            for name in sorted({*own, *arrays})
            if _shape(arrays.get(name)) != _shape(own.get(name))
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UseError(
                f"the weights belong to another model or env ({'; '.join(wrong[:3])}{more})",
                "use the env and model settings that they were trained with, or model.init to take what fits",
            )
        for name, item in own.items():
            item.copy_(torch.as_tensor(arrays[name]))
        self.normaliser.refresh()

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def describe(self) -> str:
        """One line: class, origin and size of the model."""
        kind = type(self.model)
        origin = kind.__module__ if kind is ActorCritic else self.settings.id
        return f"{kind.__name__} ({origin}): {self.parameter_count:,} parameters"


def _build_model(spec: EnvSpec, settings: Model, base: Sequence[Path], outputs: int) -> nn.Module:
    """Build the built-in model, or the user's."""
    target = resolve.load(resolve.parse(settings.id, BUILTIN_MODELS, "CustomModel", base))
    if target is ActorCritic:
        if settings.options:
            value, reason = str(settings.options), "is only for your own models"
            raise ConfigError([Problem("model.options", value, reason, "use model.hidden and others")])
        return ActorCritic(spec, outputs, settings=settings, base=base)
    return build_module(settings, target, (spec, outputs), "model", "model.id")


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(np.shape(array))
