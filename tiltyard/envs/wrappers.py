"""Built-in wrappers (builtin.py has their names). None has state, so episodes can still be re-run exactly.

flatten_multi_discrete   MultiDiscrete [3, 4] actions as one Discrete(12), the last element counting fastest
discrete_steps           a bounded Box of actions as `steps` evenly spaced values per element, ends included
grey_image               uint8 [H, W, 3] -> uint8 [1, H, W], brightness as the eye sees it
resize_image             uint8 images to `height` x `width`, averaging areas
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tiltyard.errors import UseError
from tiltyard.types import Array


class FlattenMultiDiscrete(gymnasium.ActionWrapper[Any, Any, Any]):
    """One Discrete over all combinations of a MultiDiscrete."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        inner = env.action_space
        if not isinstance(inner, spaces.MultiDiscrete):
            hint = "remove the wrapper"
            raise UseError(f"flatten_multi_discrete needs a MultiDiscrete action space, not {inner}", hint)
        self._inner, self._options = inner, np.asarray(inner.nvec).reshape(-1)
        self.action_space = spaces.Discrete(int(np.prod(self._options)))

    def action(self, action: Any) -> Array:
        flat = np.array(np.unravel_index(int(action), tuple(int(n) for n in self._options)))
        shifted: Array = flat.reshape(self._inner.shape) + np.asarray(self._inner.start)
        return shifted.astype(self._inner.dtype)


class DiscreteSteps(gymnasium.ActionWrapper[Any, Any, Any]):
    """A choice among values instead of a number: unlike a normal, a policy can then prefer both extremes."""

    def __init__(self, env: gymnasium.Env[Any, Any], *, steps: int = 11) -> None:
        super().__init__(env)
        inner = env.action_space
        if not isinstance(inner, spaces.Box) or not (np.isfinite(inner.low) & np.isfinite(inner.high)).all():
            hint = "remove the wrapper"
            raise UseError(f"discrete_steps needs a Box action space with finite bounds, not {inner}", hint)
        if not 2 <= steps <= 1000:
            raise UseError(f"steps of discrete_steps must be from 2 to 1000, not {steps}", "11 is a good start")
        low, high = inner.low.astype(np.float64).reshape(-1), inner.high.astype(np.float64).reshape(-1)
        self._inner = inner
        self._values = np.linspace(low, high, steps, axis=1)  # [elements, steps]
        self.action_space = spaces.MultiDiscrete([steps] * len(low))

    def action(self, action: Any) -> Array:
        chosen: Array = np.take_along_axis(self._values, np.asarray(action).reshape(-1, 1), 1)
        return chosen.reshape(self._inner.shape).astype(self._inner.dtype)


class GreyImage(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Colour images to brightness."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        height, width, channels = _image_shape(env.observation_space, "grey_image")
        if channels != 3:
            raise UseError(f"grey_image needs 3 channels at the end, not {channels}", "remove the wrapper")
        self.observation_space = spaces.Box(0, 255, (1, height, width), np.uint8)

    def observation(self, observation: Array) -> Array:
        # Integer weights (sum 256): exact on every machine, unlike a float product.
        weighted = observation.astype(np.uint16) @ np.array([77, 150, 29], np.uint16)
        return (weighted >> 8).astype(np.uint8)[None]


class ResizeImage(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Images in another size; the channel axis stays."""

    def __init__(self, env: gymnasium.Env[Any, Any], *, height: int, width: int) -> None:
        super().__init__(env)
        shape = _image_shape(env.observation_space, "resize_image")
        if height < 1 or width < 1:
            hint = "84 is usual"
            raise UseError(f"height and width of resize_image must be at least 1, not {height} and {width}", hint)
        self._first = shape[0] < shape[2]
        self._size = (width, height)
        out = (shape[0], height, width) if self._first else (height, width, shape[2])
        self.observation_space = spaces.Box(0, 255, out, np.uint8)

    def observation(self, observation: Array) -> Array:
        from PIL import Image

        planes = observation if self._first else np.moveaxis(observation, 2, 0)
        boxes = [
            Image.fromarray(np.ascontiguousarray(plane)).resize(self._size, Image.Resampling.BOX) for plane in planes
        ]
        stacked = np.stack([np.asarray(plane, np.uint8) for plane in boxes])
        return stacked if self._first else np.ascontiguousarray(np.moveaxis(stacked, 0, 2))


def _image_shape(space: spaces.Space[Any], name: str) -> tuple[int, int, int]:
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
        raise UseError(f"{name} needs uint8 observations of three dimensions, not {space}", "remove the wrapper")
    first, second, third = space.shape
    return int(first), int(second), int(third)
