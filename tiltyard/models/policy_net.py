"""PolicyNet: a model with its normalisation and action distribution. Its state is all that a policy needs to act.

    obs -> float32 -> running mean and variance -> model -> parameters -> ActionDist
                                                        \\-> normalised value -> value in units of reward

The layers belong to the model. Where the model is a plain MLP, acting goes through `dense` instead of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from tiltyard.config.sections import Model
from tiltyard.errors import ConfigError, Problem, TiltyardError, UseError, raised
from tiltyard.models import distributions
from tiltyard.models.actor_critic import ActorCritic, build_module
from tiltyard.models.dense import Dense, Layers, is_plain
from tiltyard.models.normalise import Normaliser, scale_images
from tiltyard.models.recurrent import State
from tiltyard.plugins import resolve
from tiltyard.types import Array, EnvSpec

BUILTIN_MODELS = {"actor_critic": "tiltyard.models.actor_critic:ActorCritic"}
EMPTY = np.zeros(0, np.float32)

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

    _max_log_std: Tensor

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
            limits = torch.tensor([] if squashed else distributions.max_log_std(spec.action))
            self.register_buffer("_max_log_std", limits, persistent=False)
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
        if first.device.type == "cpu" and not bool(first.any()):  # elsewhere the answer takes longer than the reset
            return state
        fresh = self.initial_state(first.shape[0])
        return {
            name: torch.where(first.view(-1, *[1] * (memory.dim() - 1)), fresh[name], memory)
            for name, memory in state.items()
        }

    # ------------------------------------------------------------------------------------------ learning

    def unroll(
        self, obs: ObsIn, state0: State, first: Tensor, *, prepared: bool = False, starts: Collection[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """T steps of B rows with gradients: parameters [T, B, outputs] and normalised value [T, B].

        Without memory T and B are any split of the rows. `prepared` observations come from `Normaliser.prepare`, which
        does not depend on parameters and is done once for all gradient steps. `starts` are the steps at which any row
        has `first`, for callers that know them without waiting for an accelerator.
        """
        inputs = cast(dict[str, Tensor], obs) if prepared else self.normaliser.prepare(obs, self.log_std.device)
        steps, rows = first.shape
        if not self.recurrent:
            params, value, _ = self._step({name: x.flatten(0, 1) for name, x in inputs.items()}, state0, first)
            return params.view(steps, rows, -1), value.view(steps, rows)
        return self._unroll_recurrent(inputs, state0, first, starts)

    def _unroll_recurrent(
        self, inputs: dict[str, Tensor], state0: State, first: Tensor, starts: Collection[int] | None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(self.model, ActorCritic):
            try:
                return self.model.unroll(inputs, state0, first, starts)
            except (TiltyardError, KeyboardInterrupt):
                raise
            except BaseException as error:
                raise model_error(self.settings, error) from error
        state, outs, values = state0, [], []
        for t in range(len(first)):
            params, value, state = self._step({name: x[t] for name, x in inputs.items()}, state, first[t])
            outs.append(params)
            values.append(value)
        return torch.stack(outs), torch.stack(values)

    @torch.no_grad()
    def clamp_log_std(self) -> None:
        """Limit log_std after a gradient step; free without continuous actions."""
        if self.log_std.numel():
            torch.minimum(self.log_std, self._max_log_std, out=self.log_std.data)

    # ------------------------------------------------------------------------------------------ state

    def views(self) -> dict[str, Array]:
        """All parameters and statistics, by name; on the CPU they share the net's memory."""
        return {name: item.detach().cpu().numpy() for name, item in self.state_dict().items()}

    def arrays(self) -> dict[str, Array]:
        """A copy of all parameters and statistics, by name."""
        return {name: array.copy() for name, array in self.views().items()}

    def require_fit(self, arrays: Mapping[str, Array]) -> None:
        """UseError for missing, extra or differently shaped arrays."""
        own = self.state_dict()
        wrong = [
            f"{name}: {_shape(arrays.get(name))} there, {_shape(own.get(name))} here"
            for name in sorted({*own, *arrays})
            if _shape(arrays.get(name)) != _shape(own.get(name))
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            hint = "use the env and model settings that they were trained with, or model.init to take what fits"
            raise UseError(f"the weights belong to another model or env ({'; '.join(wrong[:3])}{more})", hint)

    @torch.no_grad()
    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Load the result of `arrays` in place; UseError if they do not fit."""
        self.require_fit(arrays)
        for name, item in self.state_dict().items():
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


def check_model(net: PolicyNet, outputs: int) -> None:
    """Run one step of two rows through a user's model and check the shapes of its outputs."""
    name, rows = type(net.model).__name__, 2
    obs = {key: torch.zeros(rows, *item.shape, dtype=getattr(torch, item.dtype)) for key, item in net.spec.obs.items()}
    try:
        with torch.no_grad():
            state = net.initial_state(rows)
            inputs = scale_images(net.normaliser.prepare(obs))
            returned = net.model(inputs, *((state, torch.ones(rows, dtype=torch.bool)) if net.recurrent else ()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a plug-in may raise anything
        message = "forward gets {name: [N, ...]}; shapes are in the spec given to the constructor"
        hint = resolve.user_traceback(error)
        raise UseError(f"model.id = {net.settings.id}: a test call of {name} {raised(error)}", message, hint) from None
    expected = [(rows, outputs), (rows,)]
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    found = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts[:2]]
    if found != expected or len(parts) != (3 if net.recurrent else 2):
        raise UseError(
            f"model.id = {net.settings.id}: {name} must return parameters {expected[0]} and value {expected[1]} "
            f"{'and state ' if net.recurrent else ''}for {rows} rows; it returned {len(parts)} values: {found}",
            "return (params [N, outputs], value [N])" + (", state" if net.recurrent else "") + " from forward",
        )


def model_error(settings: Model, error: BaseException) -> TiltyardError:
    """The error of a model that raised while acting or learning."""
    own = [text for _, _, text in resolve.model_plugins(settings) if resolve.kind_of(text)]
    hint = "the traceback points into the model" if own else "the model is built in; the usual cause is device memory"
    return TiltyardError(f"model {', '.join(own) or settings.id} {raised(error)}", hint, resolve.user_traceback(error))
