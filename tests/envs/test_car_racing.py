"""CarRacing: the fast env equals Gymnasium's on recorded actions, its pictures nearly so; options, errors, a whole run."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.box2d import car_racing

from tests.conftest import Command
from tests.counts import count, only_when_long
from tiltyard.config.sections import Env
from tiltyard.envs.make import make_any
from tiltyard.envs.suites.car_racing import raster
from tiltyard.envs.suites.car_racing.family import CarRacing
from tiltyard.envs.suites.car_racing.fast_core import FastCore
from tiltyard.errors import ConfigError, UseError

pytestmark = pytest.mark.xdist_group("car_racing")  # the drawing is compiled once
BASE = [Path(__file__).parent]
PIXEL_BAR = 0.5  # mean error, of 255 levels


class Undrawn(car_racing.CarRacing):
    """Gymnasium's env without its pictures, which take 98 % of the time."""

    def _render(self, mode: str) -> None:
        return None


def steer(core: Any, speed: float = 35.0) -> np.ndarray:
    """Follow the track: towards a point ahead, slower in bends."""
    hull, track = core.car.hull, core.track
    x, y = hull.position
    near = min(range(len(track)), key=lambda i: (track[i][2] - x) ** 2 + (track[i][3] - y) ** 2)
    ahead = track[(near + 5) % len(track)]
    angle = math.remainder(math.atan2(ahead[3] - y, ahead[2] - x) - hull.angle - math.pi / 2, math.tau)
    wanted = speed if abs(angle) < 0.2 else 0.5 * speed
    now = math.hypot(*hull.linearVelocity)
    return np.array([min(max(-2 * angle, -1), 1), 0.5 * (now < wanted), 0.3 * (now > 1.3 * wanted)], np.float32)


def recorded(kind: str, seed: int, frames: int) -> list[Any]:
    """The actions of a driver who crosses bends on the grass, of a random one, or of one who goes straight on until the field ends."""
    rng, core, actions = np.random.default_rng(seed), FastCore(continuous=kind != "discrete"), []
    core.reset(seed=seed)
    for frame in range(frames):
        if kind == "drive":
            action = steer(core)
        elif kind == "discrete":
            action = rng.integers(5) if frame % 4 == 0 else actions[-1]
        elif kind == "random":
            action = rng.uniform((-1, 0, 0), 1).astype(np.float32)
        else:
            action = np.array([0, 0.1, 0], np.float32)
        actions.append(action)
        if core.step(action)[2]:
            break
    return actions


def state(core: Any) -> list[Any]:
    car = core.car
    bodies = [
        (*body.position, body.angle, *body.linearVelocity, body.angularVelocity) for body in (car.hull, *car.wheels)
    ]
    wheels = [(float(w.phase), float(w.omega), float(w.gas), sorted(tile.idx for tile in w.tiles)) for w in car.wheels]
    return [bodies, wheels, core.tile_visited_count]


@pytest.mark.parametrize(
    ("kind", "seed", "frames"),
    [("drive", 1, 3000), ("drive", 2, 1000), ("random", 3, 1000), ("discrete", 4, 1000), ("leave", 5, 1000)],
)
def test_rewards_ends_and_poses_equal_gymnasiums_bit_for_bit(kind: str, seed: int, frames: int) -> None:
    actions = recorded(kind, seed, frames)
    rules = {"continuous": kind != "discrete", "domain_randomize": seed == 2}
    fast, official = FastCore(**rules), Undrawn(**rules)
    for start in (seed, None):  # the second track comes from the env's own random stream
        assert fast.reset(seed=start) == official.reset(seed=start)
        assert fast.track == official.track
        for action in actions:
            _, *ours = fast.step(action)
            _, *theirs = official.step(action)
            assert ours == theirs and state(fast) == state(official)
            if ours[1]:
                break
        if start is not None and seed in (1, 5):
            assert ours[1] and ours[3]["lap_finished"] == (kind == "drive")


def errors(kind: str, seed: int, frames: int, **options: Any) -> np.ndarray:
    """Mean absolute pixel error of each frame against Gymnasium's picture."""
    fast, official = (CarRacing(name, **options) for name in ("fast", "official"))
    pairs = [(fast.reset(seed=seed)[0], official.reset(seed=seed)[0])]
    for action in recorded(kind, seed, frames):
        pairs.append((fast.step(action)[0], official.step(action)[0]))
    return np.array([np.abs(one.astype(int) - other).mean() for one, other in pairs])


@pytest.mark.parametrize(
    ("kind", "seed", "options"),
    [
        ("drive", 1, {}),
        ("random", 3, {"domain_randomize": True}),
        ("drive", 6, {"size": 64}),
        ("drive", 7, {"size": 48, "grey": True}),
    ],
)
def test_pictures_are_within_half_a_level_of_gymnasiums(kind: str, seed: int, options: dict[str, Any]) -> None:
    found = errors(kind, seed, count(1000), **options)
    assert found.mean() < PIXEL_BAR and found.max() < 2 * PIXEL_BAR
    assert found.mean() > 0  # two different envs


def test_tiles_that_only_the_hull_touches_change_their_colour_too() -> None:
    """Contacts of the hull are not simulated, so the drawing finds them."""
    official, fast = Undrawn(), FastCore()
    official.reset(seed=8)
    fast.reset(seed=8)
    wrong = 0
    for action in recorded("drive", 8, 300):
        official.step(action)
        fast.step(action)
        plain = [np.array_equal(tile.color, official.road_color) for tile in official.road]
        wrong += sum(
            touched != (fast._track[1][quad] == raster.ROAD) for touched, quad in zip(plain, fast._tiles, strict=True)
        )
        fast.picture()
    assert wrong <= 6  # frames in which a tile was early or late


def played(env: CarRacing, seed: int, steps: int) -> list[tuple]:
    rng, output = np.random.default_rng(0), [(env.reset(seed=seed)[0].tobytes(),)]
    for _ in range(steps):
        space = env.action_space
        action = rng.integers(5) if isinstance(space, spaces.Discrete) else rng.uniform(space.low, 1).astype(np.float32)
        obs, *rest = env.step(action)
        output.append((obs.tobytes(), *rest))
    return output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("frameskip", 3),
        ("size", 48),
        ("grey", True),
        ("max_frames", 2),
        ("continuous", False),
        ("domain_randomize", True),
        ("lap_complete_percent", 0.001),  # the first tile is enough
    ],
)
def test_every_option_has_an_effect_and_spaces_hold(option: str, value: Any) -> None:
    plain, changed = CarRacing("fast"), CarRacing("fast", **{option: value})
    assert changed.observation_space.contains(changed.reset(seed=0)[0])
    assert played(plain, 0, 3) != played(changed, 0, 3) == played(changed, 0, 3)
    official = CarRacing("official", **{option: value})
    assert official.observation_space == changed.observation_space and official.action_space == changed.action_space
    assert [rest for _, *rest in played(official, 0, 3)[1:]] == [rest for _, *rest in played(changed, 0, 3)[1:]]


def test_skipped_frames_add_up_and_the_last_one_is_shown() -> None:
    one, four = CarRacing("fast"), CarRacing("fast", frameskip=4, max_frames=30)
    one.reset(seed=3)
    four.reset(seed=3)
    rng, ended = np.random.default_rng(3), False
    assert four.frames_per_step == 4
    while not ended:
        action = rng.uniform((-1, 0, 0), 1).astype(np.float32)
        obs, reward, _, ended, _ = four.step(action)
        rewards = [one.step(action) for _ in range(4 if not ended else 2)]
        assert reward == sum(each[1] for each in rewards)
        # Tiles that only the hull touches are found in frames that are drawn: a shade of 5 levels may come later.
        assert np.abs(obs.astype(int) - rewards[-1][0]).max() <= 6
    assert four._frames == 30


def test_reduced_pictures_are_means_of_areas() -> None:
    image = np.random.default_rng(0).integers(0, 256, (96, 96, 3)).astype(np.uint8)
    grey = ((image.astype(np.uint16) @ np.array([77, 150, 29], np.uint16)) >> 8)[..., None]
    for size in (1, 42, 64, 96):
        edges = np.arange(size + 1) * 96
        at = np.arange(96) * size
        weights = np.clip(np.minimum(at + size, edges[1:, None]) - np.maximum(at, edges[:-1, None]), 0, None)
        for source in (image, grey):
            small = np.empty((size, size, source.shape[2]), np.uint8)
            raster.shrink(image, small, *raster.overlaps(size))
            expected = np.einsum("ip,jq,pqc->ijc", weights, weights, source.astype(np.int64))
            assert np.array_equal(small, (expected + 96 * 96 // 2) // (96 * 96))


@pytest.mark.parametrize(
    ("name", "options", "output", "hint"),
    [
        ("car-racing:fats", {}, "unknown env car-racing:fats", "fast"),
        ("car-racing:fast", {"size": 97}, "env.options.size = 97 must be an integer from 1 to 96", "size"),
        ("car-racing:fast", {"frameskip": 0}, "env.options.frameskip = 0", "frameskip"),
        ("car-racing:fast", {"max_frames": 1.5}, "env.options.max_frames = 1.5", "max_frames"),
        ("car-racing:fast", {"grey": "yes"}, "env.options.grey = 'yes' must be true or false", "grey"),
        ("car-racing:fast", {"lap_complete_percent": 95}, "lap_complete_percent = 95", "0.95"),
    ],
)
def test_invalid_names_and_options_are_refused_in_one_sentence(
    name: str, options: dict, output: str, hint: str
) -> None:
    with pytest.raises(UseError) as caught:
        make_any(Env(id=name, options=options), BASE)
    assert output in caught.value.message and hint in caught.value.hint


def test_unknown_option_has_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        make_any(Env(id="car-racing:fast", options={"gray": True}), BASE)
    assert caught.value.problems[0].hint == "did you mean 'grey'?"


@pytest.mark.parametrize("module", ["Box2D", "numba", "pygame"])
def test_without_the_extra_the_hint_is_the_install_command(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # marks the module as missing
    for name in ("family", "fast_core", "raster"):
        monkeypatch.delitem(sys.modules, f"tiltyard.envs.suites.car_racing.{name}")
        monkeypatch.delattr(f"tiltyard.envs.suites.car_racing.{name}")
    with pytest.raises(UseError) as caught:
        make_any(Env(id="car-racing:fast"), BASE)
    assert f"{module!r}, which is not installed" in caught.value.message
    assert caught.value.hint == "pip install 'tiltyard[car-racing]'"


@pytest.mark.slow
@pytest.mark.timeout(900)  # every process compiles
@pytest.mark.parametrize("workers", [0, 1])
def test_run_is_resumed_and_then_measured_and_filmed_on_the_official_env(
    tiltyard: Command, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    if workers:
        only_when_long("half a minute")
    monkeypatch.delenv("DISPLAY", raising=False)
    small = ["env.options={continuous: false, frameskip: 4, size: 32, grey: true, max_frames: 40}", "env.frame_stack=2"]
    size = [
        "algo.rollout=16",
        "algo.minibatch=32",
        "engine.envs=2",
        f"engine.workers={workers}",
        "env.start_timeout=250",
    ]
    words = [*small, *size, "stop.env_steps=64", "track.tensorboard=false", "name=car"]
    tiltyard("train", "car-racing:fast", *words)
    resumed = json.loads(tiltyard("resume", "last", "stop.env_steps=128", "--json").stdout)
    assert resumed["state"] == "finished" and resumed["progress"]["env_steps"] == 128
    output = tiltyard("eval", "last", "env.id=car-racing:official", "--episodes", "2", "--video", "--json")
    measured = json.loads(output.stdout)
    assert measured["overrides"] == ["env.id=car-racing:official"]
    assert len(measured["returns"]) == 2 and Path(measured["files"]["video"]).stat().st_size > 1000
    written = [path.name for path in Path(raster.__file__).parent.rglob("*.nb?")]
    assert written == []  # numba stores nothing
    assert "'sieze'" in tiltyard("train", "car-racing:fast", "env.options.sieze=3", expect=2).stderr
