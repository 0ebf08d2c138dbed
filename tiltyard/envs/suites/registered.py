"""Envs that other packages register with Gymnasium: what an id needs to be found, made and filmed.

    ALE/Pong-v5                      ale_py      extra atari       the screen as Gymnasium gives it
    MiniGrid-..., BabyAI-...         minigrid    extra minigrid    an image of object codes, a direction, a mission text
    HalfCheetah-v5, Hopper-v5, ...   mujoco      extra mujoco      the ids are Gymnasium's own

The other ids of Gymnasium (classic control, toy texts, Box2D) need nothing here.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import gymnasium

from tiltyard.errors import UseError
from tiltyard.plugins.resolve import REGISTERING

_HINTS = {"ALE/": "; atari:pong is Pong with the usual preprocessing, ALE/Pong-v5 without it"}
# Images are arrays here: SDL needs no sound or screen for that, and MuJoCo, which reads its variable when it is
# imported, aborts the process without a screen.
_WITHOUT_SCREEN = {"SDL_AUDIODRIVER": "dummy", "SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": "egl"}


def prepare_display() -> None:
    """Make libraries that draw do without a screen where there is none; called before they are imported."""
    if not os.environ.get("DISPLAY"):
        for name, value in _WITHOUT_SCREEN.items():
            os.environ.setdefault(name, value)


def import_package(env_id: str) -> None:
    """Import the package that registers an id; UseError with the pip command if it is missing."""
    for prefix, (package, extra) in REGISTERING.items():
        if env_id.startswith(prefix):
            try:
                gymnasium.register_envs(importlib.import_module(package))
            except ModuleNotFoundError as error:
                hint = f"pip install 'tiltyard[{extra}]'{_HINTS.get(prefix, '')}"
                message = f"env {env_id} needs the package {error.name!r}, which is not installed"
                raise UseError(message, hint) from error


def redirect_warnings(entry: Any) -> None:
    """Make MuJoCo's warnings Python's; by itself it appends them to MUJOCO_LOG.TXT in the working folder."""
    if "mujoco" in str(entry):
        try:
            mujoco = importlib.import_module("mujoco")
        except ModuleNotFoundError:  # Gymnasium's own error names what is missing
            return
        mujoco.set_mju_user_warning(_warn)


def _warn(text: str) -> None:
    """Deprecated attributes are in Gymnasium's files, where only Gymnasium can change them."""
    category = DeprecationWarning if "deprecated" in text else RuntimeWarning
    warnings.warn(f"MuJoCo: {text}", category, stacklevel=2)


def simplify_drawing(made: gymnasium.Env[Any, Any]) -> None:
    """Turn off MuJoCo's shadows and multisampling, which take most of the time of a frame drawn without a GPU."""
    inner: Any = made.unwrapped
    if hasattr(inner, "mujoco_renderer"):
        inner.model.vis.quality.offsamples = 0
        inner.model.vis.quality.shadowsize = 0
