"""Draw CarRacing's state pixels directly at 96 x 96, and reduce them; compiled by numba.

Gymnasium paints a window of 1000 x 800 pixels and scales it down. Here a buffer of palette indices holds SUB x SUB
samples per pixel of the result; quads are painted into it back to front, and each pixel is the mean of its samples.

    quads   field, grass patches, road and kerbs (world coordinates, constant), then the car: CAR quads
    pose    hull x, y, angle, velocity x, y, angular velocity; then x, y, angle, phase, omega of each wheel

Compiling takes 2 s once per process; nothing is stored on disk. The code uses plain loops because numba compiles them
several times as fast as array expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from gymnasium.envs.box2d import car_dynamics, car_racing
from numba import njit

from tiltyard.types import Array

SIDE = car_racing.STATE_W
SUB = 4  # samples per pixel and axis; a pixel's row of samples is one uint32
WIDTH, HEIGHT = car_racing.WINDOW_W, car_racing.WINDOW_H
BAR_TOP = HEIGHT - 5 * HEIGHT // 40  # the dashboard covers the window below
ROWS = SIDE * BAR_TOP // HEIGHT  # rows of the result above the dashboard
SAMPLES = SIDE * SUB
FIELD = car_racing.PLAYFIELD

# Indices of the palette; of the three shades of the road the first is also that of a tile that was touched.
BLACK, GROUND, GRASS, ROAD, WHITE, RED, RIM, HULL, HIDDEN = 0, 1, 2, 3, 6, 7, 8, 9, 255

_SIZE = car_dynamics.SIZE
_WHEEL_X, _WHEEL_Y = car_dynamics.WHEEL_W * _SIZE, car_dynamics.WHEEL_R * _SIZE
_NOSE, _NECK, _BODY, _TAIL = (
    [(x * _SIZE, y * _SIZE) for x, y in corners]
    for corners in (car_dynamics.HULL_POLY1, car_dynamics.HULL_POLY2, car_dynamics.HULL_POLY3, car_dynamics.HULL_POLY4)
)
# The hull as quads; its body has eight corners, which are cut into three.
_b = _BODY
HULL_QUADS = np.array(
    [_NOSE, _NECK, [_b[0], _b[1], _b[6], _b[7]], [_b[1], _b[2], _b[5], _b[6]], [_b[2], _b[3], _b[4], _b[5]], _TAIL]
)
CAR = 8 + len(HULL_QUADS)  # four wheels, each with a mark that turns
_TOUCH = 0.02  # metres at which Box2D counts two shapes as touching
_LONGEST = 25.0  # metres: no quad but the field has a corner farther from its first one


Arrays = tuple[Array, ...]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile at the first call; like C, without errors for a division by zero."""
    return njit(error_model="numpy")(function)  # type: ignore[no-any-return]


@compiled
def _fill(samples: Array, xs: Array, ys: Array, colour: int, grow: float, left: Array, right: Array) -> None:
    """Paint a convex quad given in window pixels, y upwards.

    As SDL does, corners are truncated to pixels, and the quad grows by half a pixel, sideways by `grow`.
    """
    step, scale = HEIGHT / SAMPLES, SAMPLES / WIDTH
    x_min, x_max, y_min, y_max = 1e9, -1e9, 1e9, -1e9
    for i in range(4):
        x, y = float(int(xs[i])), HEIGHT - 1.0 - int(ys[i])
        xs[i], ys[i] = x, y
        x_min, x_max, y_min, y_max = min(x_min, x), max(x_max, x), min(y_min, y), max(y_max, y)
    if x_max < -1 or x_min > WIDTH or y_max < -1 or y_min > BAR_TOP:
        return
    # Row k samples the ordinate (k + 0.5) * step - 0.5, because pixel centres are integers.
    first, last = max(0, math.ceil(y_min / step - 0.5)), min(ROWS * SUB, math.floor((y_max + 1) / step + 0.5))
    for k in range(first, last):
        left[k], right[k] = 1e9, -1e9
    for i in range(4):
        xa, ya, xb, yb = xs[i], ys[i], xs[(i + 1) & 3], ys[(i + 1) & 3]
        if ya > yb:
            xa, ya, xb, yb = xb, yb, xa, ya
        low, high = min(xa, xb), max(xa, xb)
        slope = (xb - xa) / (yb - ya) if yb > ya else 0.0
        side = max(grow, 0.5 * abs(slope))
        for k in range(max(0, math.ceil(ya / step - 0.5)), min(ROWS * SUB, math.floor((yb + 1) / step + 0.5))):
            x = min(max(xa + ((k + 0.5) * step - 0.5 - ya) * slope, low), high)
            if ya == yb:
                left[k], right[k] = min(left[k], low - side), max(right[k], high + side)
            else:
                left[k], right[k] = min(left[k], x - side), max(right[k], x + side)
    for k in range(first, last):
        begin = max(0, math.ceil((max(left[k], x_min - grow) + 0.5) * scale - 0.5))
        end = min(SAMPLES, math.ceil((min(right[k], x_max + grow) + 0.5) * scale - 0.5))
        if end > begin:
            samples[k, begin:end] = colour


@compiled
def _place_car(quads: Array, colours: Array, pose: Array) -> None:
    """Write the car's quads, in world coordinates, behind those of the track."""
    at = len(quads) - CAR
    for wheel in range(4):
        x0, y0, angle, phase = pose[6 + 5 * wheel], pose[7 + 5 * wheel], pose[8 + 5 * wheel], pose[9 + 5 * wheel]
        cos, sin = math.cos(angle), math.sin(angle)
        sin1, sin2, cos1, cos2 = math.sin(phase), math.sin(phase + 1.2), math.cos(phase), math.cos(phase + 1.2)
        if sin1 > 0:
            cos1 = 1.0 if cos1 > 0 else -1.0
        if sin2 > 0:
            cos2 = 1.0 if cos2 > 0 else -1.0
        colours[at + 1] = HIDDEN if sin1 > 0 and sin2 > 0 else RIM
        for mark in range(2):
            for i in range(4):
                x = _WHEEL_X if i == 1 or i == 2 else -_WHEEL_X
                front, back = (cos1, cos2) if mark else (1.0, -1.0)
                y = _WHEEL_Y * (front if i < 2 else back)
                quads[at, i, 0], quads[at, i, 1] = x0 + cos * x - sin * y, y0 + sin * x + cos * y
            at += 1
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    for part in range(len(HULL_QUADS)):
        for i in range(4):
            x, y = HULL_QUADS[part, i, 0], HULL_QUADS[part, i, 1]
            quads[at, i, 0], quads[at, i, 1] = pose[0] + cos * x - sin * y, pose[1] + sin * x + cos * y
        at += 1


@compiled
def _touches(quads: Array, tile: int) -> bool:
    """Whether a corner of the hull is on a tile. Tiles are longer than the hull is wide: a corner is the first."""
    for part in range(len(quads) - len(HULL_QUADS), len(quads)):
        for corner in range(4):
            x, y = quads[part, corner, 0], quads[part, corner, 1]
            inside, outside = True, True  # of all four sides, seen clockwise and counter-clockwise
            for i in range(4):
                xa, ya = quads[tile, i, 0], quads[tile, i, 1]
                dx, dy = quads[tile, (i + 1) & 3, 0] - xa, quads[tile, (i + 1) & 3, 1] - ya
                away = (dx * (y - ya) - dy * (x - xa)) / math.sqrt(dx * dx + dy * dy)
                inside, outside = inside and away > -_TOUCH, outside and away < _TOUCH
            if inside or outside:
                return True
    return False


@compiled
def _average(image: Array, samples: Array, words: Array, palette: Array, flat: Array) -> None:
    """Palette samples to colours.

    pygame scales in two passes that each round down: a flat colour v becomes v - 2 (`flat`), a mean its ceiling - 2.
    `palette` has a colour's channels in one integer, 16 bits each, so that one sum adds all three.
    """
    for row in range(ROWS):
        for col in range(SIDE):
            word = words[row * SUB, col]
            colour = word & np.uint32(255)
            differ = word ^ (colour * np.uint32(0x01010101))
            for k in range(1, SUB):
                differ |= word ^ words[row * SUB + k, col]
            if differ == 0:
                for channel in range(3):
                    image[row, col, channel] = flat[colour, channel]
            else:
                total = 0
                for k in range(SUB):
                    for i in range(SUB):
                        total += palette[samples[row * SUB + k, col * SUB + i]]
                for channel in range(3):
                    mean = (((total >> (16 * channel)) & 0xFFFF) - SUB * SUB - 1) // (SUB * SUB)
                    image[row, col, channel] = max(mean, 0)


@compiled
def _dashboard(image: Array, bars: Array, score: Array, pose: Array) -> None:
    """Black, the score, and seven bars by the area that each covers of a pixel."""
    for row in range(SIDE - ROWS):
        for col in range(SIDE):
            for channel in range(3):
                bars[row, col, channel] = 0.0
    unit_x, unit_y = WIDTH / 40.0, HEIGHT / 40.0
    speed = math.sqrt(pose[3] * pose[3] + pose[4] * pose[4])
    for bar in range(7):
        red, green, blue = 0.0, 0.0, 255.0
        if bar < 5:  # upright: speed and the four wheels, whose bars touch; the next one owns the common column
            value = speed if bar == 0 else pose[5 + 5 * bar]
            x0, y0, y1 = (5 if bar == 0 else 6 + bar) * unit_x, 39 * unit_y, 39 * unit_y
            x1 = x0 + unit_x - (1 if 0 < bar < 4 else 0)
            y0 -= unit_y * value * (0.02 if bar == 0 else 0.01)
            red, green = (255.0 if bar == 0 else 0.0 if bar < 3 else 51.0), (255.0 if bar == 0 else 0.0)
        else:  # lying: steering and turning
            value = pose[8] - pose[2] if bar == 5 else pose[5]
            x0, y0, y1 = (20 if bar == 5 else 30) * unit_x, 36 * unit_y, 38 * unit_y
            x1 = x0 - value * unit_x * (10.0 if bar == 5 else 0.8)
            red, green, blue = (0.0, 255.0, 0.0) if bar == 5 else (255.0, 0.0, 0.0)
        if abs(value) <= 1e-4:
            continue
        x0, x1, y0, y1 = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
        x0, x1 = max(int(x0) * SIDE / WIDTH, 0.0), min((int(x1) + 1.0) * SIDE / WIDTH, float(SIDE))
        y0, y1 = max(int(y0) * SIDE / HEIGHT, float(ROWS)), min((int(y1) + 1.0) * SIDE / HEIGHT, float(SIDE))
        for row in range(int(y0), math.ceil(y1)):
            for col in range(int(x0), math.ceil(x1)):
                area = (min(y1, row + 1.0) - max(y0, float(row))) * (min(x1, col + 1.0) - max(x0, float(col)))
                bars[row - ROWS, col, 0] += area * red
                bars[row - ROWS, col, 1] += area * green
                bars[row - ROWS, col, 2] += area * blue
    for row in range(SIDE - ROWS):
        for col in range(SIDE):
            for channel in range(3):
                if col < score.shape[1]:
                    image[row + ROWS, col, channel] = score[row, col, channel]
                else:
                    image[row + ROWS, col, channel] = int(max(bars[row, col, channel] - 1.01, 0.0))


@compiled
def draw(image: Array, scratch: Arrays, track: Arrays, score: Array, pose: Array, zoom: float) -> None:
    """Write one picture, `image` [96, 96, 3], and give the tiles that the hull touches their colour.

    Frames that are not drawn do not look for such tiles: with a frame skip, a shade may change some frames later.
    """
    samples, words, left, right, bars, xs, ys = scratch
    quads, colours, palette, flat = track
    x0, y0 = pose[0], pose[1]
    cos, sin = math.cos(-pose[2]) * zoom, math.sin(-pose[2]) * zoom
    reach = math.sqrt(WIDTH * WIDTH / 4.0 + 0.5625 * HEIGHT * HEIGHT) / zoom + 1.0  # metres to the farthest corner
    only_field = abs(x0) + reach < FIELD and abs(y0) + reach < FIELD
    ground = GROUND if only_field else BLACK
    for row in range(samples.shape[0]):
        for col in range(samples.shape[1]):
            samples[row, col] = ground
    _place_car(quads, colours, pose)
    for quad in range(1 if only_field else 0, len(quads)):
        far = (quads[quad, 0, 0] - x0) ** 2 + (quads[quad, 0, 1] - y0) ** 2
        if (quad and far > (reach + _LONGEST) ** 2) or colours[quad] == HIDDEN:
            continue
        for i in range(4):
            x, y = quads[quad, i, 0] - x0, quads[quad, i, 1] - y0
            xs[i], ys[i] = cos * x - sin * y + WIDTH / 2, sin * x + cos * y + HEIGHT / 4
        _fill(samples, xs, ys, colours[quad], 0.6 if quad < len(quads) - CAR else 0.5, left, right)
        shaded = colours[quad] == ROAD + 1 or colours[quad] == ROAD + 2
        if shaded and far < _LONGEST**2 and _touches(quads, quad):
            colours[quad] = ROAD  # from the next frame on: Box2D looks for contacts before it moves the car
    _average(image, samples, words, palette, flat)
    _dashboard(image, bars, score, pose)


def make_scratch() -> Arrays:
    """The memory that `draw` works in; what it holds between two calls does not matter."""
    samples = np.zeros((ROWS * SUB, SAMPLES), np.uint8)
    edges = [np.zeros(ROWS * SUB) for _ in range(2)]
    corners = [np.zeros(4) for _ in range(2)]
    return samples, samples.view(np.uint32), *edges, np.zeros((SIDE - ROWS, SIDE, 3), np.float32), *corners


# ------------------------------------------------------------------------------------------------ from 96 x 96


def overlaps(size: int) -> tuple[Array, Array]:
    """For each of `size` pixels along an axis, the first pixel of 96 that it covers, and how much of that and the next.

    Lengths are in units of 1 / size pixel of the 96, so that they are integers; those of a pixel add up to 96.
    """
    ends = SIDE * np.arange(size + 1)
    span = min(SIDE, -(-SIDE // size) + 1)
    first = np.minimum(ends[:-1] // size, SIDE - span)
    at = size * (first[:, None] + np.arange(span))
    covered = np.minimum(at + size, ends[1:, None]) - np.maximum(at, ends[:-1, None])
    return first, np.maximum(covered, 0).astype(np.float32)


@compiled
def shrink(image: Array, small: Array, first: Array, covered: Array) -> None:
    """Reduce `image` [96, 96, 3] to `small` [size, size, 3], or to brightness [size, size, 1]: means of areas, rounded.

    `first` and `covered` are from `overlaps`. Brightness is that of the wrapper grey_image. Every number is an integer
    that float32 holds exactly: results are the same on every machine.
    """
    size, channels = small.shape[0], small.shape[2]
    line = np.empty(SIDE * channels, np.float32)  # sums over the rows of `image` that a row of `small` covers
    for row in range(size):
        line[:] = 0
        for k in range(covered.shape[1]):
            y, weight = first[row] + k, covered[row, k]
            if weight == 0:
                continue
            for x in range(SIDE):
                if channels == 1:
                    red, green, blue = np.uint32(image[y, x, 0]), np.uint32(image[y, x, 1]), np.uint32(image[y, x, 2])
                    grey = np.uint32(77) * red + np.uint32(150) * green + np.uint32(29) * blue
                    line[x] += weight * np.float32(grey >> np.uint32(8))
                else:
                    for channel in range(3):
                        line[3 * x + channel] += weight * np.float32(image[y, x, channel])
        for col in range(size):
            for channel in range(channels):
                total = np.float32(0)
                for k in range(covered.shape[1]):
                    total += covered[col, k] * line[(first[col] + k) * channels + channel]
                small[row, col, channel] = (np.uint32(total) + np.uint32(SIDE * SIDE // 2)) // np.uint32(SIDE * SIDE)
