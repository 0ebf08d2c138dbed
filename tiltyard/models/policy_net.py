"""PolicyNet: a model with what belongs around it, as one nn.Module whose state is everything a policy needs to act.

Owns normalisation, the unrolling of memories over time and the distribution head; not the layers, which are a model's.

    obs -> to float32 -> running mean and variance -> model -> parameters -> ActionDist
                                                           \\-> value, normalised -> in units of reward

Acting takes the short way of `dense` where the model is plain.

Running statistics change only in `observe` and `observe_returns`, which the learner calls.
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
from tiltyard.errors import ConfigError, Problem, TiltyardError, UseError, raised
from tiltyard.models import distributions
from tiltyard.models.actor_critic import ActorCritic, build_module
from tiltyard.models.encoders import as_numbers
from tiltyard.models.recurrent import State
from tiltyard.plugins import resolve
from tiltyard.types import ArraySpec, EnvSpec

BUILTIN_MODELS = {"actor_critic": "tiltyard.models.actor_critic:ActorCritic"}
OBS_CLIP = np.float32(10)  # standard deviations: what lies further out is an outlier, or statistics too young to trust
TINY = 1e-8
IMAGES_EVERY = 8  # steps: neighbouring frames are nearly the same, and every pixel of them would have to be counted
NOTHING = np.zeros(0, np.float32)

ObsIn = Mapping[str, Tensor | NDArray[Any]]


class PolicyOutput(NamedTuple):
    """Rows [B]: the flat action, its log probability, the value in units of reward, and the memory after it, which
    alone stays on the model's device."""

    action: NDArray[Any]
    log_prob: NDArray[Any]
    value: NDArray[Any]
    state: State


def choose_action(
    dist: distributions.ActionDist | distributions.SquashedDist,
    value: NDArray[Any],
    after: State,
    *,
    greedy: bool,
    generator: torch.Generator | None,
) -> PolicyOutput:
    """The likeliest action or a draw, with what belongs to it."""
    action = dist.mode() if greedy else dist.sample(generator)
    return PolicyOutput(action, dist.log_prob(action), value, after)


class RunningStats(nn.Module):
    """Mean and variance of everything seen, in float64; `shift` and `scale` are their float32 form, ready to apply."""

    count: Tensor
    mean: Tensor
    squares: Tensor  # sum of squared distances from the mean
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape), persistent=False)
        self.register_buffer("scale", torch.ones(shape), persistent=False)

    def observe(self, x: NDArray[Any]) -> None:
        """Add [N, *shape] (Chan et al. 1979: exact merging of two sets' moments)."""
        if len(x) == 0:
            return
        x = x.astype(np.float64)
        mean, count = x.mean(0), float(self.count)
        moved = mean - self.mean.cpu().numpy()
        total = count + len(x)
        squares = np.square(x - mean).sum(0) + np.square(moved) * (count * len(x) / total)
        self.squares += torch.as_tensor(squares, device=self.squares.device)
        self.mean += torch.as_tensor(moved * (len(x) / total), device=self.mean.device)
        self.count.fill_(total)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive shift and scale; also needed after the buffers were loaded."""
        if float(self.count) == 0:
            return
        self.shift.copy_(self.mean)
        self.scale.copy_((self.squares / self.count + TINY).sqrt())


def _build_model(spec: EnvSpec, settings: Model, base: Sequence[Path], outputs: int) -> nn.Module:
    """The built-in model, or the user's, its options checked against the constructor."""
    target = resolve.load(resolve.parse(settings.id, BUILTIN_MODELS, "CustomModel", base))
    if target is ActorCritic:
        if settings.options:
            problem = Problem(
                "model.options", str(settings.options), "is for models of your own", "use model.hidden and others"
            )
            raise ConfigError([problem])
        return ActorCritic(spec, outputs, settings=settings, base=base)
    return build_module(settings, target, (spec, outputs), "model", "model.id")


class PolicyNet(nn.Module):
    """Build, then move to a device, then give to the learner, which lays the parameters out in one vector."""

    def __init__(self, spec: EnvSpec, model: Model, base: Sequence[Path], seed: int, *, squashed: bool = False) -> None:
        super().__init__()
        if squashed:  # critics of such a policy judge actions too: they are no part of it
            model = model.model_copy(update={"critic": "shared"})
        self.spec = spec
        self.settings = model
        self.squashed = squashed
        outputs = distributions.outputs(spec.action) * (2 if squashed else 1)
        with torch.random.fork_rng(devices=[]):  # the process's own generator is left as it was
            torch.manual_seed(seed)
            self.model = _build_model(spec, model, base, outputs)
            self.recurrent: bool = getattr(self.model, "recurrent", hasattr(self.model, "initial_state"))
            stds = 0 if squashed else distributions.continuous_columns(spec.action)
            self.log_std = nn.Parameter(torch.full((stds,), model.log_std))
            self._widest = torch.tensor([] if squashed else distributions.max_log_std(spec.action))
            self.clamp_log_std()
            self.obs_stats = nn.ModuleList()  # in the order of `normalised`
            chosen = model.normalise
            self.normalised = tuple(
                name
                for name, item in spec.obs.items()
                if item.kind == "box" and (chosen.images if item.image else chosen.obs)
            )
            self.obs_stats.extend(RunningStats(spec.obs[name].shape) for name in self.normalised)
            self._stats = tuple(cast(RunningStats, stats) for stats in self.obs_stats)
            self.return_stats = RunningStats(()) if model.normalise.returns else None
            if not isinstance(self.model, ActorCritic):
                self._try_out(outputs)
        self.dense = Dense(self.model) if isinstance(self.model, ActorCritic) and is_plain(self.model) else None

    @property
    def device(self) -> torch.device:
        return self.log_std.device

    # ------------------------------------------------------------------------------------------ acting

    def initial_state(self, rows: int) -> State:
        """Memory at an episode's start; {} without one."""
        if not self.recurrent:
            return {}
        state = cast(State, self.model.initial_state(rows))  # type: ignore[operator]
        return {name: memory.to(self.log_std.device) for name, memory in state.items()}

    def act(
        self,
        obs: ObsIn,
        state: State,
        first: Tensor | NDArray[Any],
        mask: Tensor | NDArray[Any] | None,
        *,
        greedy: bool,
        generator: torch.Generator | None = None,
        with_value: bool = True,
    ) -> PolicyOutput:
        """One decision for each of B rows. Rows with `first` forget before they act.

        When it need not be `valued` and the critic has layers of its own, they are left out, and the value is empty.
        """
        layers = None if with_value else self._plain_layers()
        if self.dense is not None and layers is not None and len(layers.towers) > 1:
            params, value, after = self.dense.params(self._inputs(obs, self.dense), layers), NOTHING, state
        else:
            params, value, after = self.infer(obs, state, first)
        return choose_action(
            self._means(params, mask), self.denormalise_value(value), after, greedy=greedy, generator=generator
        )

    def _means(
        self, params: NDArray[Any], mask: Tensor | NDArray[Any] | None
    ) -> distributions.ActionDist | distributions.SquashedDist:
        if self.squashed:
            return distributions.SquashedDist(params)
        return self.distribution(params, mask.cpu().numpy() if isinstance(mask, Tensor) else mask)

    def value(self, obs: ObsIn, state: State, first: Tensor | NDArray[Any]) -> NDArray[Any]:
        """[B] in units of reward."""
        layers = self._plain_layers()
        if layers is not None and self.dense is not None:
            return self.denormalise_value(self.dense.value(self._inputs(obs, self.dense), layers))
        return self.denormalise_value(self.infer(obs, state, first)[1])

    @property
    def batched_values(self) -> bool:
        """Whether acting is cheaper without values, and values of many rows are cheaper than of a few many times."""
        layers = self._plain_layers()
        return layers is not None and len(layers.towers) > 1

    def _plain_layers(self) -> Layers | None:
        return None if self.dense is None else self.dense.layers()

    def distribution(self, params: NDArray[Any], mask: NDArray[Any] | None) -> distributions.ActionDist:
        """What the model's parameters [..., outputs] mean, where they are not squashed."""
        return distributions.ActionDist(self.spec.action, params, self._log_std(), mask)

    def infer(self, obs: ObsIn, state: State, first: Tensor | NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], State]:
        """Parameters [B, outputs], value [B] normalised and the memory after it, without gradients."""
        dense, layers = self.dense, self._plain_layers()
        if dense is not None and layers is not None:
            return *dense.forward(self._inputs(obs, dense), layers), state
        with torch.no_grad():  # as a decorator it costs three times as much
            params, value, after = self._step(self.prepare(obs), state, first)
            return params.cpu().numpy(), value.cpu().numpy(), after

    def _inputs(self, obs: ObsIn, dense: Dense) -> NDArray[Any]:
        """`prepare` and encoders for a plain model; the usual case, met at every env step, without torch."""
        if dense.plain is not None:
            x = np.asarray(obs[dense.plain])
            if x.dtype == np.float32:
                if not self.normalised:
                    return x
                (stats,) = self._stats
                x = x - stats.shift.numpy()
                x /= stats.scale.numpy()
                return cast(NDArray[Any], np.minimum(np.maximum(x, -OBS_CLIP, out=x), OBS_CLIP, out=x))
        return dense.encoded(self.prepare(obs)).numpy()

    def _log_std(self) -> NDArray[Any]:
        return self.log_std.detach().cpu().numpy() if self._widest.numel() else NOTHING

    def _step(self, obs: dict[str, Tensor], state: State, first: Tensor | NDArray[Any]) -> tuple[Tensor, Tensor, State]:
        try:
            if not isinstance(self.model, ActorCritic):
                obs = _seen(obs)
            if not self.recurrent:
                params, value = self.model(obs)
                return params, value, state
            starts = self._tensor(first)
            if not isinstance(self.model, ActorCritic):
                state = self._forget(state, starts)
            return cast(tuple[Tensor, Tensor, State], self.model(obs, state, starts))
        except (TiltyardError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self._attributed(error) from error

    def _forget(self, state: State, first: Tensor) -> State:
        """Rows that start an episode get their initial memory, so that a model of the user's need not think of it."""
        if not bool(first.any()):
            return state
        fresh = self.initial_state(first.shape[0])
        return {
            name: torch.where(first.view(-1, *[1] * (memory.dim() - 1)), fresh[name], memory)
            for name, memory in state.items()
        }

    # ------------------------------------------------------------------------------------------ learning

    def unroll(self, obs: ObsIn, state0: State, first: Tensor, *, prepared: bool = False) -> tuple[Tensor, Tensor]:
        """T steps of B rows with gradients: parameters [T, B, outputs] and the value [T, B], normalised.

        Without memory the steps are independent: T and B are any split of the rows. `prepared` observations have been
        through `prepare` already, which depends on no parameter and need not be repeated for each gradient step.
        """
        ready = cast(dict[str, Tensor], obs) if prepared else self.prepare(obs)
        try:
            return self._unrolled(ready, state0, first)
        except (TiltyardError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self._attributed(error) from error

    def _unrolled(self, obs: dict[str, Tensor], state: State, first: Tensor) -> tuple[Tensor, Tensor]:
        steps, rows = first.shape
        if not self.recurrent:
            params, value, _ = self._step({name: x.flatten(0, 1) for name, x in obs.items()}, state, first)
            return params.view(steps, rows, -1), value.view(steps, rows)
        if isinstance(self.model, ActorCritic):
            return self.model.unroll(obs, state, first)
        outs, values = [], []
        for t in range(steps):
            out, worth, state = self._step({name: x[t] for name, x in obs.items()}, state, first[t])
            outs.append(out)
            values.append(worth)
        return torch.stack(outs), torch.stack(values)

    def _attributed(self, error: BaseException) -> TiltyardError:
        """What a model raised in the midst of acting or learning, told as its own."""
        own = [text for _, _, text in resolve.model_plugins(self.settings) if resolve.kind_of(text)]
        hint = "the traceback is the model's own" if own else "it is a built-in one: device memory is the usual reason"
        return TiltyardError(
            f"model {', '.join(own) or self.settings.id} {raised(error)}", hint, resolve.user_traceback(error)
        )

    @torch.no_grad()
    def clamp_log_std(self) -> None:
        """Bring back what a gradient step moved out of its range; free without continuous actions."""
        if self.log_std.numel():
            torch.minimum(self.log_std, self._widest.to(self.log_std.device), out=self.log_std.data)

    def observe(self, obs: Mapping[str, NDArray[Any]], valid: NDArray[Any]) -> None:
        """Add observations [T, B, ...] of valid rows to the running statistics."""
        for name, stats in zip(self.normalised, self._stats, strict=True):
            every = IMAGES_EVERY if self.spec.obs[name].image else 1
            stats.observe(obs[name][::every][valid[::every]])

    def observe_returns(self, returns: NDArray[Any]) -> None:
        """Add returns [N], in units of reward."""
        if self.return_stats is not None:
            self.return_stats.observe(returns)

    # ------------------------------------------------------------------------------------------ units

    def prepare(self, obs: ObsIn) -> dict[str, Tensor]:
        """Numbers as float32 (bytes as 0..1, statistics applied), categories and words as int64. Images of bytes stay
        as they are, a quarter of the size, until a model sees them: as 0..1 too, a minibatch at a time."""
        device = self.log_std.device
        ready = {
            name: _prepared(torch.as_tensor(obs[name], device=device), item, name in self.normalised)
            for name, item in self.spec.obs.items()
        }
        for name, module in zip(self.normalised, self.obs_stats, strict=True):
            stats = cast(RunningStats, module)
            ready[name] = ((ready[name] - stats.shift).div_(stats.scale)).clamp_(-float(OBS_CLIP), float(OBS_CLIP))
        return ready

    def denormalise_value(self, value: NDArray[Any]) -> NDArray[Any]:
        """Normalised values in units of reward."""
        stats = self.return_stats
        return value if stats is None else value * float(stats.scale) + float(stats.shift)

    def normalise_value(self, value: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `in_rewards`."""
        stats = self.return_stats
        return value if stats is None else (value - float(stats.shift)) / float(stats.scale)

    def _tensor(self, array: Tensor | NDArray[Any]) -> Tensor:
        return torch.as_tensor(array, device=self.log_std.device)

    # ------------------------------------------------------------------------------------------ state

    def arrays(self) -> dict[str, NDArray[Any]]:
        """A copy of everything: parameters and statistics by name."""
        return {name: item.detach().cpu().numpy().copy() for name, item in self.state_dict().items()}

    @torch.no_grad()
    def load_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `arrays` gave, in place; anything missing, left over or of another shape is a UseError."""
        own = self.state_dict()
        wrong = [
            f"{name}: {_shape(arrays.get(name))} there, {_shape(own.get(name))} here"
            for name in sorted({*own, *arrays})
            if _shape(arrays.get(name)) != _shape(own.get(name))
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UseError(
                f"the weights are of another model or env ({'; '.join(wrong[:3])}{more})",
                "use the env and model settings that they were trained with, or model.init to take what fits",
            )
        for name, item in own.items():
            item.copy_(torch.as_tensor(arrays[name]))
        self.refresh()

    def refresh(self) -> None:
        """Derive what depends on loaded statistics."""
        for module in self.modules():
            if isinstance(module, RunningStats):
                module.refresh()

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def describe(self) -> str:
        """One line: which class is used, where it comes from, how large it is."""
        kind = type(self.model)
        place = kind.__module__ if kind is ActorCritic else self.settings.id
        return f"{kind.__name__} ({place}): {self.parameter_count:,} parameters"

    def _try_out(self, outputs: int) -> None:
        """One step of two rows through a model of the user's: what it gives must have the promised shapes."""
        name, rows = type(self.model).__name__, 2
        zeros = {
            key: torch.zeros(rows, *item.shape, dtype=getattr(torch, item.dtype)) for key, item in self.spec.obs.items()
        }
        try:
            with torch.no_grad():
                state = self.initial_state(rows)
                given = self.model(
                    _seen(self.prepare(zeros)), *((state, torch.ones(rows, dtype=torch.bool)) if self.recurrent else ())
                )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises is the user's to see
            raise UseError(
                f"model.id = {self.settings.id}: when tried out, {name} {raised(error)}",
                "forward gets {name: [N, ...]}; shapes are in the spec given to the constructor",
                resolve.user_traceback(error),
            ) from None
        wanted = [(rows, outputs), (rows,)]
        parts = list(given) if isinstance(given, tuple) else [given]
        found = [_shape(part) for part in parts[:2]]
        if found != wanted or len(parts) != (3 if self.recurrent else 2):
            raise UseError(
                f"model.id = {self.settings.id}: {name} must return parameters {wanted[0]} and value {wanted[1]} "
                f"{'and state ' if self.recurrent else ''}for {rows} rows; it returned {len(parts)} things: {found}",
                "return (params [N, outputs], value [N])" + (", state" if self.recurrent else "") + " from forward",
            )


def _prepared(x: Tensor, item: ArraySpec, normalised: bool) -> Tensor:
    if item.kind in ("discrete", "multi_discrete", "text"):
        return x.to(torch.int64)
    if item.kind == "box" and x.dtype is torch.uint8 and not normalised:
        return x if item.image else as_numbers(x)
    return x if x.dtype is torch.float32 else x.to(torch.float32)


def _seen(obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a model of the user's is given: images too as 0..1."""
    return {name: as_numbers(x) for name, x in obs.items()}


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(np.shape(array) if not isinstance(array, Tensor) else array.shape)
