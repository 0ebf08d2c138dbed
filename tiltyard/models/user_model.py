"""Models and encoders written by users: build one, check its output shapes, explain the errors it raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tiltyard.config.experiment import Model
from tiltyard.config.fields import Plugin
from tiltyard.errors import ConfigError, TiltyardError, UseError, raised
from tiltyard.models.normalise import scale_images
from tiltyard.plugins import resolve

if TYPE_CHECKING:
    from tiltyard.models.policy_net import PolicyNet


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
        raise UseError(
            f"{id_setting} = {plugin.id}: the constructor {raised(error)}",
            f"check {setting}.options and the constructor",
            resolve.user_traceback(error),
        ) from None
    if not isinstance(module, nn.Module):
        raise UseError(
            f"{id_setting} = {plugin.id} made a {type(module).__name__}, not a torch.nn.Module",
            "derive the class from nn.Module",
        )
    return module.float()


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
        raise UseError(
            f"model.id = {net.settings.id}: a test call of {name} {raised(error)}",
            "forward gets {name: [N, ...]}; shapes are in the spec given to the constructor",
            resolve.user_traceback(error),
        ) from None
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
