"""CarRacing with a frame skip and small pictures, `car-racing:NAME`: train on `fast`, report numbers on `official`.

Both take the same options and differ in nothing but the time they need and the last bits of some pixels. Needs box2d,
pygame-ce and numba (`pip install 'tiltyard[car-racing]'`).

    fast       rewards, ends and poses of `official`, bit for bit; pictures are drawn small, 0.1 of 255 levels off
    official   Gymnasium's own CarRacing-v3, which paints a window of 1000 x 800 pixels in every frame
    env step   `frameskip` frames with one action, the rewards summed; the last picture is the observation
"""

from __future__ import annotations

from typing import Any

import Box2D  # noqa: F401 - this and pygame first, so that an error names them if they are missing
import gymnasium
import numpy as np
import pygame  # noqa: F401
from gymnasium import spaces
from gymnasium.envs.box2d import car_racing

from tiltyard.envs.suites.car_racing import raster
from tiltyard.envs.suites.car_racing.fast_core import FastCore
from tiltyard.errors import UseError, did_you_mean
from tiltyard.types import Array

MAX_FRAMES = 1000  # Gymnasium's limit of an episode
_NAMES = ("fast", "official")


class CarRacing(gymnasium.Env[Any, Any]):
    """One car on a random track. Equal seeds and actions give equal episodes.

    The keyword arguments are the keys of `env.options`; the last three are Gymnasium's.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": car_racing.FPS}

    def __init__(
        self,
        name: str,
        *,
        frameskip: int = 1,
        size: int = raster.SIDE,
        grey: bool = False,
        max_frames: int = MAX_FRAMES,
        continuous: bool = True,
        domain_randomize: bool = False,
        lap_complete_percent: float = 0.95,
        render_mode: str | None = None,
    ) -> None:
        if name not in _NAMES:
            raise UseError(f"unknown env car-racing:{name}", did_you_mean(name, _NAMES))
        _require_integer("frameskip", frameskip, MAX_FRAMES)
        _require_integer("size", size, raster.SIDE)
        _require_integer("max_frames", max_frames, 10**9)
        for option, value in {"grey": grey, "continuous": continuous, "domain_randomize": domain_randomize}.items():
            if not isinstance(value, bool):
                raise UseError(f"env.options.{option} = {value!r} must be true or false", f"set {option}=true")
        if isinstance(lap_complete_percent, bool) or not 0 < lap_complete_percent <= 1:
            message = f"env.options.lap_complete_percent = {lap_complete_percent!r} must be above 0 and at most 1"
            raise UseError(message, "0.95 is Gymnasium's")
        self.frames_per_step = frameskip
        self.render_mode = render_mode
        self._max_frames, self._frames = max_frames, 0
        rules = {"continuous": continuous, "domain_randomize": domain_randomize}
        made = FastCore if name == "fast" else car_racing.CarRacing
        self._core = made(render_mode=render_mode, lap_complete_percent=lap_complete_percent, **rules)
        self.action_space = self._core.action_space
        self._size, self._grey, self._overlaps = size, grey, raster.overlaps(size)
        shape = (1, size, size) if grey else (size, size, 3)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Without a seed, the env's random stream continues."""
        self._frames = 0
        self._core.reset(seed=seed, options=options)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.frames_per_step):
            _, reward, terminated, _, info = self._core.step(action)
            total += reward
            self._frames += 1
            truncated = self._frames >= self._max_frames
            if terminated or truncated:
                break
        return self._observe(), float(total), terminated, truncated, info

    def _observe(self) -> Array:
        core = self._core
        picture = core.picture() if isinstance(core, FastCore) else core.state
        if self._size == raster.SIDE and not self._grey:
            return picture
        small = np.empty((self._size, self._size, 1 if self._grey else 3), np.uint8)
        raster.shrink(picture, small, *self._overlaps)
        return small.reshape(self.observation_space.shape)

    def render(self) -> Any:
        return self._core.render()

    def close(self) -> None:
        self._core.close()


def _require_integer(option: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise UseError(f"env.options.{option} = {value!r} must be an integer from 1 to {most:,}", f"remove {option}")
