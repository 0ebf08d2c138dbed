"""Make one env from its settings, with its wrappers, or copies of it.

The id is Gymnasium's, built-in, `family:name`, `package.module:Class` or `path/file.py:Class`. Time limits registered
with Gymnasium are not applied here but returned by `registered_limit`: the group (vector.py) truncates episodes.

    env.id ──> constructor ──check env.options──> env ──> wrappers, innermost first ──> the env that is stepped
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.envs.registration import load_env_creator

from tiltyard.config.sections import Env
from tiltyard.envs.builtin import BUILTIN_ENVS, BUILTIN_WRAPPERS
from tiltyard.envs.env_errors import construction_error, unknown_env
from tiltyard.envs.pettingzoo import Parallel, as_parallel, is_parallel
from tiltyard.envs.suites.registered import (
    import_package,
    prepare_display,
    redirect_warnings,
    simplify_drawing,
)
from tiltyard.envs.watchdog import PROCESS_HEARTBEAT
from tiltyard.errors import ConfigError, Problem, TiltyardError, UseError
from tiltyard.plugins import resolve
from tiltyard.plugins.namespaces import is_own
from tiltyard.processes import reaper
from tiltyard.types import Array

RENDER_MODE = "rgb_array"

_project_envs: dict[tuple[str, str], Registered] = {}  # by registering module and id: two projects may use one id


def make_any(env: Env, base: Sequence[Path], render: bool = False) -> gymnasium.Env[Any, Any] | Parallel:
    """Make an env and its wrappers; with `render` it can draw itself as RGB arrays.

    A wrapper of an env with several agents takes and returns such an env.
    """
    prepare_display()
    made = _make_bare(env, base, render)
    for index, plugin in enumerate(env.wrappers):
        setting = f"env.wrappers.{index}"
        ref = resolve.parse(plugin.id, BUILTIN_WRAPPERS, resolve.CONVENTIONAL["wrapper"], base)
        wrapper = _callable(resolve.load(ref), f"{setting}.id", plugin.id)
        _refuse(resolve.check_options(wrapper, plugin.options, 1, f"{setting}.options"))
        made = as_parallel(_construct(partial(wrapper, made, **plugin.options), f"wrapper {plugin.id}"))
        if not isinstance(made, gymnasium.Env) and not is_parallel(made):
            hint = "return a gymnasium.Wrapper"
            raise UseError(f"{setting}.id = {plugin.id} returned a {type(made).__name__}, not an env", hint)
    return made if isinstance(made, gymnasium.Env) else Parallel(made, env.id)


def make_copies(
    env: Env, base: Sequence[Path], copies: int, *, render: bool = False, seed: int = 0, heartbeat: Array | None = None
) -> list[Any]:
    """Make `copies` of an env as `env.isolate` says, the first of which can draw itself with `render`.

    `heartbeat[0]` counts the finished ones. While the first copy lives, processes started here end with this one.
    """
    beat = PROCESS_HEARTBEAT if heartbeat is None else heartbeat
    made: list[Any] = []
    reaper.begin()
    try:
        if env.isolate != "none":
            from tiltyard.envs.isolation.pool import make_isolated

            made += make_isolated(env, base, copies, render, seed, beat)
        while len(made) < copies:
            made.append(make_any(env, base, render and not made))
            beat[0] += 1
    except BaseException:
        reaper.end()
        raise
    weakref.finalize(made[0], reaper.end).atexit = False
    return made


def _make_bare(env: Env, base: Sequence[Path], render: bool) -> Any:
    if _is_registered(env.id):
        return _make_registered(env, base, render)
    creator, names = _creator(env, base)
    _refuse(resolve.check_options(creator, env.options, len(names), "env.options"))
    options = dict(env.options)
    if render and _takes(creator, "render_mode"):
        options["render_mode"] = RENDER_MODE
    made = as_parallel(_construct(lambda: creator(*names, **options), f"env {env.id}"))
    if not isinstance(made, gymnasium.Env) and not is_parallel(made):
        bases = ", ".join(f"{b.__module__}.{b.__qualname__}" for b in type(made).__mro__[1:-1]) or "nothing"
        raise UseError(
            f"env.id = {env.id} made a {type(made).__name__} (derived from {bases}), which is not a gymnasium.Env",
            "derive the class from gymnasium.Env, or from pettingzoo.ParallelEnv for several agents; an env of the old "
            "gym package needs a small conversion",
        )
    return made


def _is_registered(env_id: str) -> bool:
    """Whether an id is one of Gymnasium's registry, not the name of a class."""
    return not (resolve.family_of(env_id) or resolve.kind_of(env_id) or env_id in BUILTIN_ENVS)


def _creator(env: Env, base: Sequence[Path]) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The class of an env that is not registered, and its first arguments: the name, if the class makes a family."""
    family = resolve.family_of(env.id)
    if family is not None:
        return resolve.load_family(family[0]), family[1:]
    if env.id.startswith("pettingzoo.") and importlib.util.find_spec("pettingzoo") is None:
        hint = "pip install 'tiltyard[pettingzoo]'"
        raise UseError(f"env {env.id} needs the package 'pettingzoo', which is not installed", hint)
    found = resolve.load(resolve.parse(env.id, BUILTIN_ENVS, resolve.CONVENTIONAL["env"], base))
    return _callable(found, "env.id", env.id), ()


def _make_registered(env: Env, base: Sequence[Path], render: bool) -> gymnasium.Env[Any, Any]:
    registered = _registered(env.id, base)
    if "max_episode_steps" in env.options:
        hint = f"set env.time_limit={env.options['max_episode_steps']}"
        raise ConfigError([Problem("env.options.max_episode_steps", "", "time limits are set by env.time_limit", hint)])
    if isinstance(registered.entry_point, str) or registered.entry_point is None:
        entry = registered.entry_point or ""
        creator = _construct(lambda: load_env_creator(entry), f"env {env.id}")
    else:
        creator = registered.entry_point
    own = {name: value for name, value in env.options.items() if name != "render_mode"}
    _refuse(resolve.check_options(creator, {**registered.kwargs, **own}, 0, "env.options"))
    options = dict(env.options)
    if render:
        options["render_mode"] = RENDER_MODE
    redirect_warnings(registered.entry_point)
    made: gymnasium.Env[Any, Any] = _construct(
        lambda: gymnasium.make(registered, max_episode_steps=-1, disable_env_checker=True, **options), f"env {env.id}"
    )
    if render:
        simplify_drawing(made)
    return made


def _registered(name: str, base: Sequence[Path]) -> Registered:
    """Gymnasium's registry entry for an id, also `module:Id-v0`, which imports the module that registers it."""
    try:
        ref = resolve.parse_registering(name, base)
        if ref is not None:
            name = ref.attribute
            if ref.path is not None:
                return _registered_by_own(ref, ref.path)
            _construct(lambda: importlib.import_module(str(ref.module)), f"env {ref.text}")
        else:
            import_package(name)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ValueError) as error:
        raise unknown_env(name, BUILTIN_ENVS) from error


def _registered_by_own(ref: resolve.Ref, folder: Path) -> Registered:
    """The entry of an id that a module of the project registers, with the class as that project imports it."""
    module = resolve.load_module(ref)
    key = (module.__name__, ref.attribute)
    if key not in _project_envs:
        entry = copy.deepcopy(gymnasium.spec(ref.attribute))
        if isinstance(entry.entry_point, str):
            place, _, name = entry.entry_point.partition(":")
            if is_own(folder, place):
                entry.entry_point = resolve.load(resolve.Ref(entry.entry_point, folder, place, name))
        _project_envs[key] = entry
    return _project_envs[key]


def registered_limit(env: Env, base: Sequence[Path]) -> int | None:
    """The time limit that Gymnasium's registry holds for this id, in simulator frames."""
    return _registered(env.id, base).max_episode_steps if _is_registered(env.id) else None


def frames_per_step(made: gymnasium.Env[Any, Any] | Parallel) -> int:
    """Simulator frames that one call of step takes: the env's attribute of this name, `frameskip` of ALE's, else 1."""
    inner: Any = made.unwrapped
    registered = getattr(inner, "spec", None)
    if isinstance(registered, Registered) and registered.id.startswith("ALE/"):
        skipped = registered.kwargs.get("frameskip")
        return skipped if isinstance(skipped, int) else 1
    frames = getattr(inner, "frames_per_step", 1)
    if not isinstance(frames, int) or frames < 1:
        raise UseError(f"frames_per_step of {type(inner).__name__} is {frames!r}", "set it to an integer, at least 1")
    return frames


def can_render(env: Env, made: gymnasium.Env[Any, Any] | Parallel, base: Sequence[Path]) -> bool:
    """Whether the env lists rgb_array among its render modes and takes render_mode."""
    modes = made.metadata.get("render_modes", ()) if isinstance(made.metadata, Mapping) else ()
    if RENDER_MODE not in modes:
        return False
    return _is_registered(env.id) or _takes(_creator(env, base)[0], "render_mode")


# ---------------------------------------------------------------------------------------------- options and errors


def _takes(creator: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(creator).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _callable(target: Any, setting: str, name: str) -> Callable[..., Any]:
    if not callable(target):
        raise UseError(f"{setting} = {name} is a {type(target).__name__}, not a class", "name a class or a function")
    return target  # type: ignore[no-any-return]


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems, "the env's options")


def _construct(build: Callable[[], Any], what: str) -> Any:
    """Run a constructor; what it raises becomes a UseError."""
    try:
        return build()
    except (TiltyardError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise construction_error(error, what) from error
