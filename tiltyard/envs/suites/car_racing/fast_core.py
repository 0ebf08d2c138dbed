"""Gymnasium's CarRacing with a leaner car and a small picture: rewards, ends and poses are identical, bit for bit.

`step` is Gymnasium's own. The car and the contact listener do the same operations in the same order as theirs, with
fewer calls into Box2D and without numpy's scalars. The picture is drawn when it is asked for (raster.py).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pygame
from Box2D import b2Filter, b2Vec2
from gymnasium import Env
from gymnasium.envs.box2d import car_dynamics, car_racing

from tiltyard.envs.suites.car_racing import raster
from tiltyard.types import Array

_SIDEWAYS = b2Vec2(1, 0)
_STIFFNESS = 205000 * car_dynamics.SIZE * car_dynamics.SIZE
_POWER, _INERTIA = car_dynamics.ENGINE_POWER, car_dynamics.WHEEL_MOMENT_OF_INERTIA
_ROAD_GRIP = car_dynamics.FRICTION_LIMIT
_GRASS_GRIP = _ROAD_GRIP * 0.6


class FastCore(car_racing.CarRacing):  # type: ignore[misc]
    """CarRacing whose `step` returns no picture; `picture()` is that of the newest frame."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listener = _Contacts(self, self.lap_complete_percent)
        self.world.contactListener = self._listener
        self._pose = np.zeros(26)
        self._score = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As Gymnasium's, with this file's car and the track as arrays."""
        Env.reset(self, seed=seed)
        self._destroy()
        self.reward = self.prev_reward = self.t = 0.0
        self.tile_visited_count, self.new_lap = 0, False
        self.road_poly: list[Any] = []
        if self.domain_randomize:
            self._reinit_colors((options or {}).get("randomize", True))
        while not self._create_track():
            pass
        self.car = _Car(self.world, *self.track[0][1:4])
        self._track = self._as_arrays()
        return self.step(None)[0], {}

    def _as_arrays(self) -> tuple[Array, ...]:
        """The track as `raster.draw` takes it: quads, their colours, and the palette in two forms."""
        road = self.road_color
        shades = (road, road + 2.55, road + 5.1)
        rgb = [(0,) * 3, self.bg_color, self.grass_color, *shades, (255,) * 3, (255, 0, 0), car_dynamics.WHEEL_WHITE]
        palette = np.array([*rgb, [int(255 * part) for part in self.car.hull.color]]).astype(np.int64)
        colours, self._tiles = [raster.GROUND] + [raster.GRASS] * (len(_GROUND) - 1), []
        for _, colour in self.road_poly:
            if isinstance(colour, tuple):
                colours.append(raster.RED if colour[1] == 0 else raster.WHITE)
            else:
                self._tiles.append(len(colours))
                colours.append(raster.ROAD + (len(self._tiles) - 1) % 3)
        colours += [raster.BLACK] * 8 + [raster.HULL] * len(raster.HULL_QUADS)
        quads = [*_GROUND, *(corners for corners, _ in self.road_poly), *np.zeros((raster.CAR, 4, 2))]
        flat = np.maximum(palette - 2, 0).astype(np.uint8)
        return np.array(quads), np.array(colours, np.uint8), palette @ np.array([1, 1 << 16, 1 << 32]), flat

    def touched(self, tile: int) -> None:
        """A car part has touched a tile, which takes the plain colour of the road."""
        self._track[1][self._tiles[tile]] = raster.ROAD

    def picture(self) -> Array:
        """State pixels, uint8 [96, 96, 3]."""
        hull, pose = self.car.hull, self._pose
        at, speed = hull.position, hull.linearVelocity
        values = [at.x, at.y, hull.angle, speed.x, speed.y, hull.angularVelocity]
        for wheel in self.car.wheels:
            at = wheel.position
            values += (at.x, at.y, wheel.angle, wheel.phase, wheel.omega)
        pose[:] = values
        zoom = 0.1 * car_racing.SCALE * max(1 - self.t, 0) + car_racing.ZOOM * car_racing.SCALE * min(self.t, 1)
        image = np.empty((raster.SIDE, raster.SIDE, 3), np.uint8)
        raster.draw(image, _scratch(), self._track, _score_image(self._score), pose, zoom)
        return image

    def _render(self, mode: str) -> Any:
        if mode == "state_pixels":
            self._score = int(self.reward)  # the picture of a step shows the score before the step's -0.1
            return None
        for tile, quad in zip(self.road, self._tiles, strict=True):
            if self._track[1][quad] == raster.ROAD:
                tile.color[:] = self.road_color
        return super()._render(mode)


class _Car(car_dynamics.Car):  # type: ignore[misc]
    """Gymnasium's car. The hull takes part in no contacts: they only colour tiles, which `raster.draw` does."""

    def __init__(self, world: Any, *pose: float) -> None:
        super().__init__(world, *pose)
        for fixture in self.hull.fixtures:
            fixture.filterData = b2Filter(categoryBits=1, maskBits=0, groupIndex=0)

    def gas(self, gas: float) -> None:
        wanted = min(max(float(gas), 0.0), 1.0)
        for wheel in self.wheels[2:4]:
            wheel.gas += min(wanted - wheel.gas, 0.1)

    def step(self, dt: float) -> None:
        for wheel in self.wheels:
            joint, omega, brake, gas = wheel.joint, wheel.omega, wheel.brake, wheel.gas
            error = wheel.steer - joint.angle
            rate = min(50.0 * abs(error), 3.0)
            joint.motorSpeed = rate if error > 0 else -rate
            grip = _ROAD_GRIP if wheel.tiles else _GRASS_GRIP
            side, speed = wheel.GetWorldVector(_SIDEWAYS), wheel.linearVelocity
            cos, sin, vx, vy = side.x, side.y, speed.x, speed.y  # forwards is (-sin, cos)
            omega += dt * _POWER * gas / _INERTIA / (abs(omega) + 5.0)
            self.fuel_spent += dt * _POWER * gas
            if brake >= 0.9:
                omega = 0.0
            elif brake > 0:
                slower = min(15 * brake, abs(omega))
                omega += -slower if omega > 0 else slower
            wheel.phase += omega * dt
            forth = (-(-sin * vx + cos * vy) + omega * wheel.wheel_rad) * _STIFFNESS
            across = -(cos * vx + sin * vy) * _STIFFNESS
            force = math.sqrt(forth * forth + across * across)
            self._skid(wheel, force > 2.0 * grip)
            if force > grip:
                forth, across = forth / force * grip, across / force * grip
            wheel.omega = omega - dt * forth * wheel.wheel_rad / _INERTIA
            wheel.ApplyForceToCenter((across * cos + forth * -sin, across * sin + forth * cos), True)

    def _skid(self, wheel: Any, skids: bool) -> None:
        """Skid marks, which only videos show."""
        if not skids:
            wheel.skid_start = wheel.skid_particle = None
            return
        mark, at, grass = wheel.skid_particle, wheel.position, not wheel.tiles
        if mark and mark.grass == grass and len(mark.poly) < 30:
            mark.poly.append((at[0], at[1]))
        elif wheel.skid_start is None:
            wheel.skid_start = at
        else:
            wheel.skid_particle, wheel.skid_start = self._create_particle(wheel.skid_start, at, grass), None


class _Contacts(car_racing.FrictionDetector):  # type: ignore[misc]
    """Gymnasium's listener. Each contact is one of a tile and a wheel."""

    def BeginContact(self, contact: Any) -> None:
        tile, wheel = _tile_and_wheel(contact)
        env = self.env
        wheel.tiles.add(tile)
        if not tile.road_visited:
            tile.road_visited = True
            env.touched(tile.idx)
            env.reward += 1000.0 / len(env.track)
            env.tile_visited_count += 1
            if tile.idx == 0 and env.tile_visited_count / len(env.track) > self.lap_complete_percent:
                env.new_lap = True

    def EndContact(self, contact: Any) -> None:
        tile, wheel = _tile_and_wheel(contact)
        wheel.tiles.remove(tile)


def _tile_and_wheel(contact: Any) -> tuple[Any, Any]:
    one, other = contact.fixtureA.body.userData, contact.fixtureB.body.userData
    return (other, one) if "tiles" in one.__dict__ else (one, other)


def _ground() -> Array:
    """The field, then the patches of grass on it."""
    square, side = np.array([(1, 0), (0, 0), (0, 1), (1, 1)]), car_racing.GRASS_DIM
    patches = [side * (square + np.array((x, y))) for x in range(-20, 20, 2) for y in range(-20, 20, 2)]
    return np.array([raster.FIELD * (2 * square - 1), *patches])


_GROUND = _ground()


@cache
def _scratch() -> tuple[Array, ...]:
    """One for all envs of a process: drawing holds the interpreter's lock."""
    return raster.make_scratch()


@cache
def _font() -> Any:
    pygame.font.init()
    return pygame.font.Font(pygame.font.get_default_font(), 42)


@cache
def _score_image(score: int) -> Array:
    """The digits as Gymnasium's window shows them, scaled as it is. There are at most some 1,100 scores."""
    side = raster.SIDE - raster.ROWS
    corner = pygame.Surface((raster.WIDTH * side // raster.SIDE, raster.HEIGHT - raster.BAR_TOP))
    digits = _font().render(f"{score:04d}", True, (255,) * 3, (0,) * 3)
    corner.blit(digits, digits.get_rect(center=(60, corner.get_height() // 2)))
    scaled = pygame.surfarray.array3d(pygame.transform.smoothscale(corner, (side, side)))
    return np.ascontiguousarray(scaled.transpose(1, 0, 2))
