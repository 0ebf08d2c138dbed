"""CarPass-v0: drive past a parked car to the target behind it. The documented example of a custom env.

It has what an env needs and nothing else: spaces, reset, step, optionally render, optionally get_state and set_state
(then a resumed run restores running episodes by them instead of repeating their actions).

       x -4 ........ 4      road 8 wide, y from -14 to 6; at most 25 steps
    y  6 |     T    |       T  target (2, 5), reached below a distance of 1: +200
       0 |     P    |       P  parked car, radius 1, at (2, 0); touching it or leaving the road: -100
     -12 |     C    |       C  the car, radius 1.5, starts at (2, -12); the gap right of P is too narrow

The return is always below 216 (16 of progress before the target, and 200); random actions get about -122.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tiltyard.types import Array

LEFT, RIGHT, BOTTOM, TOP = -4.0, 4.0, -14.0, 6.0
START, PARKED, TARGET = (2.0, -12.0), (2.0, 0.0), (2.0, 5.0)
CAR_RADIUS, PARKED_RADIUS, TARGET_RADIUS = 1.5, 1.0, 1.0
STEPS = 25
PIXELS = 30  # per unit: an image of 600 rows and 240 columns


class CarPass(gymnasium.Env["Array", "Array"]):
    """Action: speed and heading, both in [-1, 1]. Speed 1 is 3 units per step; heading 1 and -1 are straight ahead.

    Observation: x and y scaled to [-1, 1]. A step towards the target is rewarded with its progress, any other costs 10
    or more.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}

    def __init__(self, *, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._x, self._y, self._steps = *START, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._x, self._y, self._steps = *START, 0
        return self._observe(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        before = self._distance(TARGET)
        speed = 1.5 * min(1.0, max(-1.0, float(action[0]))) + 1.5
        heading = math.radians(180.0 * float(action[1]) + 180.0)
        self._x += speed * math.sin(heading)
        self._y += speed * math.cos(heading)
        self._steps += 1
        reward, ended, outcome = self._reward(before)
        truncated = not ended and self._steps >= STEPS
        info = {name: float(name == outcome) for name in ("reached", "crashed", "left_road")}
        return self._observe(), reward, ended, truncated, info if ended or truncated else {}

    def _reward(self, before: float) -> tuple[float, bool, str]:
        """The reward, whether the episode ends, and the outcome."""
        if self._distance(PARKED) <= CAR_RADIUS + PARKED_RADIUS:
            return -100.0, True, "crashed"
        if not (LEFT <= self._x <= RIGHT and BOTTOM <= self._y <= TOP):
            return -100.0, True, "left_road"
        after = self._distance(TARGET)
        if after < TARGET_RADIUS:
            return 200.0, True, "reached"
        progress = before - after
        return progress if progress > 0 else min(progress, -10.0), False, ""

    def _distance(self, point: tuple[float, float]) -> float:
        return math.hypot(self._x - point[0], self._y - point[1])

    def _observe(self) -> Array:
        scaled = [self._x / 4, (self._y + 4) / 10]
        return np.array([min(1.0, max(-1.0, value)) for value in scaled], np.float32)

    # Optional: the whole state, as numbers, strings, lists, dicts and arrays.

    def get_state(self) -> dict[str, Any]:
        return {"x": self._x, "y": self._y, "steps": self._steps}

    def set_state(self, state: dict[str, Any]) -> None:
        self._x, self._y, self._steps = float(state["x"]), float(state["y"]), int(state["steps"])

    # Optional: an image, uint8 [600, 240, 3]. Drawn with numpy alone, so it needs no display.

    def render(self) -> Array | None:  # type: ignore[override]
        if self.render_mode != "rgb_array":
            return None
        picture = np.full((int((TOP - BOTTOM) * PIXELS), int((RIGHT - LEFT) * PIXELS), 3), (58, 61, 66), np.float64)
        _paint(picture, TARGET, TARGET_RADIUS, (88, 160, 96))
        _paint(picture, PARKED, PARKED_RADIUS, (196, 84, 72))
        _paint(picture, (self._x, self._y), CAR_RADIUS, (86, 138, 214))
        return picture.astype(np.uint8)


def _paint(picture: Array, centre: tuple[float, float], radius: float, colour: tuple[int, int, int]) -> None:
    """A disc with a soft edge of one pixel."""
    rows, columns = np.ogrid[: picture.shape[0], : picture.shape[1]]
    x, y = LEFT + (columns + 0.5) / PIXELS, TOP - (rows + 0.5) / PIXELS
    distance = np.hypot(x - centre[0], y - centre[1])
    cover = np.clip((radius - distance) * PIXELS + 0.5, 0, 1)[..., None]
    picture[:] = picture * (1 - cover) + np.asarray(colour) * cover
