"""What an env did wrong, explained to the user: errors of its constructor, of its calls and of the data it returns.

Only called when something went wrong; the rules themselves are in checks.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

from tiltyard.errors import DivergedError, EnvError, TiltyardError, UseError, did_you_mean, raised
from tiltyard.plugins import resolve
from tiltyard.plugins.namespaces import import_hint

# Modules that call an env and unpack what it returns.
_UNPACKING = (
    "tiltyard.envs.single_agent_vector",
    "tiltyard.tuning.sampler",
    "tiltyard.envs.isolation.server",
    "tiltyard.envs.actions",
)
_HINTS = (
    ("dtype", "return np.asarray(obs, dtype=space.dtype), or set env.strict=false to have it converted"),
    ("numpy array", "return np.asarray(obs, dtype=space.dtype), or set env.strict=false to have it converted"),
    ("shape", "every observation must have the shape that observation_space declares"),
    ("NaN", "find where the env divides by zero; observations and rewards must be finite"),
    ("infinity", "find where the env overflows; observations and rewards must be finite"),
    ("instead of (obs", "the env has an older interface: see gymnasium.farama.org on migrating"),
    ("mask", "give one bool per option, at least one of them true, in every observation or every info"),
)
_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")
_PIP = re.compile(r"pip install [^`;\n]+")
# Packages with envs, by the missing module. Another name may be a typo, and a stranger may own it on PyPI.
_PACKAGES = {
    "Box2D": "'tiltyard[box2d]'",
    "ale_py": "'tiltyard[atari]'",
    "crafter": "crafter",
    "cv2": "opencv-python-headless",
    "envpool": "'tiltyard[envpool]'",
    "gymnasium_robotics": "gymnasium-robotics",
    "highway_env": "highway-env",
    "minigrid": "'tiltyard[minigrid]'",
    "miniworld": "miniworld",
    "mujoco": "'tiltyard[mujoco]'",
    "nle": "nle",
    "pettingzoo": "'tiltyard[pettingzoo]'",
    "pygame": "'tiltyard[classic]'",
    "vizdoom": "'tiltyard[vizdoom]'",
}
# By a word in Gymnasium's own message.
_EXTRAS = {"box2d": "tiltyard[box2d]", "mujoco": "tiltyard[mujoco]", "pygame": "tiltyard[classic]"}


class InvalidEnvData(Exception):
    """An env returned data that break the contract. `key` is the name of the observation, `value` what it returned."""

    def __init__(self, message: str, key: str, value: Any) -> None:
        super().__init__(message)
        self.key, self.value = key, value


def env_error(error: BaseException, where: str, method: str) -> TiltyardError:
    """Explain an exception that came out of an env's `method` to the user. Raises an interrupt, which is the user's."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, TiltyardError):
        return error
    if isinstance(error, InvalidEnvData):
        if "NaN" in str(error) or "infinity" in str(error):
            return diverged(str(error), where, {f"obs.{error.key}": np.asarray(error.value)})
        hint = "return what the env's spaces declare; env.strict=false converts dtypes"
        return EnvError(f"{where}: {error}", hint)
    if _raised_here(error):  # while unpacking or storing what the env returned
        hint = "reset() returns (obs, info) and step() (obs, reward, terminated, truncated, info)"
        return EnvError(f"{where}: {method}() returned a value of the wrong form: {error}", hint)
    hint = import_hint(error) or "the traceback is the env's own"
    return EnvError(f"{where}: {method}() {raised(error)}", hint, resolve.user_traceback(error))


def diverged(what: str, where: str, batch: dict[str, object]) -> DivergedError:
    """The error for NaN or infinity, with the arrays that hold it."""
    hint = "find where the env divides by zero or overflows; the offending arrays are saved"
    if what.startswith("the action"):
        hint = "it comes from the policy: lower algo.lr or normalise observations; the offending arrays are saved"
    return DivergedError(f"{where}: {what}", hint, batch)


def _raised_here(error: BaseException) -> bool:
    """Whether this package's code raised it, not the env's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") in _UNPACKING


def construction_error(error: BaseException, what: str) -> UseError:
    """Explain why an env or wrapper could not be made, with the install command for a missing package."""
    if isinstance(error, gymnasium.error.DependencyNotInstalled):
        commands = [command.strip() for command in _PIP.findall(str(error))]
        extras = [f"pip install '{extra}'" for word, extra in _EXTRAS.items() if word in str(error).lower()]
        hint = (extras or [" && ".join(commands) or "install the package it names"])[0]
        return UseError(f"{what} needs a package that is not installed: {_first_line(error)}", hint)
    if isinstance(error, ModuleNotFoundError):
        known = _PACKAGES.get((error.name or "").partition(".")[0])
        absent = "it is neither next to your code nor among the installed packages"
        hint = import_hint(error) or (f"pip install {known}" if known else absent)
        return UseError(f"{what} needs the package {error.name!r}, which is not installed", hint)
    unknown = _UNKNOWN_OPTION.search(str(error)) if isinstance(error, TypeError) else None
    if unknown:
        return UseError(f"{what} does not take the option {unknown[1]!r}", "see its documentation for its options")
    reason = f"{type(error).__name__}: {_first_line(error)}"
    message = f"{what} could not be made: {f'it {raised(error)}' if isinstance(error, SystemExit) else reason}"
    return UseError(message, "the traceback is the env's own; check env.options", resolve.user_traceback(error))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def unknown_env(name: str, builtin: Iterable[str]) -> UseError:
    """The error for an id that Gymnasium's registry does not have."""
    known = {*gymnasium.registry, *builtin}
    stem = name.rsplit("-v", 1)[0]
    versions = sorted(id_ for id_ in known if id_.rsplit("-v", 1)[0].lower() == stem.lower())
    hint = f"did you mean {versions[-1]!r}?" if versions else did_you_mean(name, known)
    fallback = "give a Gymnasium id, a built-in name, package.module:Class or path/file.py:Class"
    shown = name if name.isprintable() else repr(name)
    if os.path.isdir(name):  # noqa: PTH112 -- Path.is_dir raises for a name that is too long
        message = f"{shown} is a folder, and there is no env of that name"
        return UseError(message, hint or "give a YAML file or path/file.py:Class inside it")
    return UseError(f"env.id = {shown} is not a known env", hint or fallback)


def fault_hint(fault: str) -> str:
    """What to do about a violation of checks.py."""
    return next((hint for word, hint in _HINTS if word in fault), "the env must return what its spaces declare")
