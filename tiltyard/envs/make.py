"""One env from its settings: Gymnasium id, built-in, `package.module:Class` or `path/file.py:Class`, then its wrappers.

Time limits registered with Gymnasium are left out here and given back as a number (`registered_limit`): the group of
envs (vector.py) cuts episodes itself, so that there is one place where `truncated` is made.

    env.id ──> constructor ──check env.options──> env ──> wrappers, innermost first ──> the env that is stepped
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.envs.registration import load_env_creator

from tiltyard import refs
from tiltyard.config.experiment import Env
from tiltyard.errors import ConfigError, Problem, TiltyardError, UseError, did_you_mean, raised

BUILTIN_ENVS: Mapping[str, str] = {
    "identity": "tiltyard.envs.toy:Identity",
    "basic": "tiltyard.envs.toy:Basic",
    "memory": "tiltyard.envs.toy:Memory",
    "delay": "tiltyard.envs.toy:Delay",
    "timeout": "tiltyard.envs.toy:Timeout",
    "masked": "tiltyard.envs.toy_spaces:Masked",
    "kitchen_sink": "tiltyard.envs.toy_spaces:KitchenSink",
    "CarPass-v0": "tiltyard.envs.car_pass:CarPass",
}

BUILTIN_WRAPPERS: Mapping[str, str] = {
    "flatten_multi_discrete": "tiltyard.envs.wrappers:FlattenMultiDiscrete",
    "discrete_steps": "tiltyard.envs.wrappers:DiscreteSteps",
    "grey_image": "tiltyard.envs.wrappers:GreyImage",
    "resize_image": "tiltyard.envs.wrappers:ResizeImage",
}

RENDER_MODE = "rgb_array"
# Pictures are arrays here: SDL needs neither sound nor screen for that, and MuJoCo aborts the process without a screen.
_WITHOUT_SCREEN = {"SDL_AUDIODRIVER": "dummy", "SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": "egl"}
_PIP = re.compile(r"pip install [^`;\n]+")


def make_env(env: Env, base: Sequence[Path], render: bool = False) -> gymnasium.Env[Any, Any]:
    """The env with its wrappers; with `render` it can draw itself as RGB arrays."""
    if render and not os.environ.get("DISPLAY"):
        for name, value in _WITHOUT_SCREEN.items():
            os.environ.setdefault(name, value)
    made = _make_bare(env, base, render)
    for index, plugin in enumerate(env.wrappers):
        setting = f"env.wrappers.{index}"
        ref = refs.parse(plugin.id, BUILTIN_WRAPPERS, refs.CONVENTIONAL["wrapper"], base)
        wrapper = _callable(refs.load(ref), f"{setting}.id", plugin.id)
        _refuse(refs.check_options(wrapper, plugin.options, 1, f"{setting}.options"))
        made = _construct(partial(wrapper, made, **plugin.options), f"wrapper {plugin.id}")
        if not isinstance(made, gymnasium.Env):
            raise UseError(
                f"{setting}.id = {plugin.id} made a {type(made).__name__}, not an env", "return a gymnasium.Wrapper"
            )
    return made


def _make_bare(env: Env, base: Sequence[Path], render: bool) -> gymnasium.Env[Any, Any]:
    if refs.kind_of(env.id, BUILTIN_ENVS) is None:
        return _make_registered(env, render)
    creator = _callable(refs.load(refs.parse(env.id, BUILTIN_ENVS, refs.CONVENTIONAL["env"], base)), "env.id", env.id)
    _refuse(refs.check_options(creator, env.options, 0, "env.options"))
    options = dict(env.options)
    if render and _takes(creator, "render_mode"):
        options["render_mode"] = RENDER_MODE
    made = _construct(lambda: creator(**options), f"env {env.id}")
    if not isinstance(made, gymnasium.Env):
        bases = ", ".join(f"{b.__module__}.{b.__qualname__}" for b in type(made).__mro__[1:-1]) or "nothing"
        raise UseError(
            f"env.id = {env.id} made a {type(made).__name__} (derived from {bases}), which is no gymnasium.Env",
            "derive the class from gymnasium.Env; an env of the old gym package needs a small conversion",
        )
    return made


def _make_registered(env: Env, render: bool) -> gymnasium.Env[Any, Any]:
    registered = _registered(env.id)
    if "max_episode_steps" in env.options:
        hint = f"set env.time_limit={env.options['max_episode_steps']}"
        raise ConfigError(
            [Problem("env.options.max_episode_steps", "", "time limits are a setting of their own", hint)]
        )
    if isinstance(registered.entry_point, str) or registered.entry_point is None:
        entry = registered.entry_point or ""
        creator = _construct(lambda: load_env_creator(entry), f"env {env.id}")
    else:
        creator = registered.entry_point
    own = {name: value for name, value in env.options.items() if name != "render_mode"}
    _refuse(refs.check_options(creator, {**registered.kwargs, **own}, 0, "env.options"))
    options = dict(env.options)
    if render:
        options["render_mode"] = RENDER_MODE
    made: gymnasium.Env[Any, Any] = _construct(
        lambda: gymnasium.make(registered, max_episode_steps=-1, disable_env_checker=True, **options), f"env {env.id}"
    )
    return made


def _registered(name: str) -> Registered:
    """Gymnasium's own entry for an id, also `module:Id-v0`, which imports the module that registers it."""
    try:
        if ":" in name:
            module, _, rest = name.partition(":")
            _construct(lambda: __import__(module), f"env {name}")
            name = rest
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ValueError) as error:
        known = {*gymnasium.registry, *BUILTIN_ENVS}
        stem = name.rsplit("-v", 1)[0]
        versions = sorted(id_ for id_ in known if id_.rsplit("-v", 1)[0].lower() == stem.lower())
        hint = f"did you mean {versions[-1]!r}?" if versions else did_you_mean(name, known)
        fallback = "a Gymnasium id, a built-in name, package.module:Class or path/file.py:Class is needed"
        shown = name if name.isprintable() else repr(name)
        raise UseError(f"env.id = {shown} is no env that is known here", hint or fallback) from error


def registered_limit(env: Env) -> int | None:
    """The time limit that Gymnasium's registry holds for this id, in simulator frames."""
    if refs.kind_of(env.id, BUILTIN_ENVS) is not None:
        return None
    return _registered(env.id).max_episode_steps


def can_render(env: Env, made: gymnasium.Env[Any, Any], base: Sequence[Path]) -> bool:
    """Whether the env says that it draws RGB arrays and lets itself be told to."""
    modes = made.metadata.get("render_modes", ()) if isinstance(made.metadata, Mapping) else ()
    if RENDER_MODE not in modes:
        return False
    if refs.kind_of(env.id, BUILTIN_ENVS) is None:
        return True
    return _takes(refs.load(refs.parse(env.id, BUILTIN_ENVS, refs.CONVENTIONAL["env"], base)), "render_mode")


# ---------------------------------------------------------------------------------------------- what can go wrong


def _takes(creator: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(creator).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _callable(target: Any, setting: str, name: str) -> Callable[..., Any]:
    if not callable(target):
        raise UseError(f"{setting} = {name} names a {type(target).__name__}, not a class", "name a class or a function")
    return target  # type: ignore[no-any-return]


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems, "the env's options")


def _construct(build: Callable[[], Any], what: str) -> Any:
    """Run a constructor; whatever it raises becomes one sentence, a missing package the command that installs it."""
    try:
        return build()
    except TiltyardError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        commands = [command.strip() for command in _PIP.findall(str(error))]
        hint = " && ".join(commands) or "install the package it names"
        raise UseError(f"{what} needs a package that is not installed: {_first_line(error)}", hint) from error
    except ModuleNotFoundError as error:
        raise UseError(
            f"{what} needs the package {error.name!r}, which is not installed", f"pip install {error.name}"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise UseError(
            f"{what} could not be made: {f'it {raised(error)}' if isinstance(error, SystemExit) else reason}",
            "the traceback is the env's own; check env.options",
            refs.user_traceback(error),
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
