"""Rules of CarPass: bounds of the return, outcomes, rendering, state."""

import math

import numpy as np
import pytest

from tests.counts import count
from tiltyard.envs.toys.car_pass import CarPass

SUPREMUM = 216.0


def drive(env: CarPass, actions: list[tuple[float, float]]) -> tuple[float, bool, bool, dict, int]:
    env.reset()
    total, steps = 0.0, 0
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(np.array(action, np.float32))
        assert env.observation_space.contains(obs)
        total, steps = total + reward, steps + 1
        if terminated or truncated:
            break
    return total, terminated, truncated, info, steps


def towards(env: CarPass, x: float, y: float, speed: float = 3.0) -> tuple[float, float]:
    """Return the action that drives towards a point."""
    heading = math.degrees(math.atan2(x - env._x, y - env._y)) % 360
    distance = min(speed, math.hypot(x - env._x, y - env._y))
    return (distance - 1.5) / 1.5, (heading - 180) / 180


def scripted(env: CarPass, clearance: float, speed: float) -> float:
    """Pass the parked car on the left, so close that every step approaches the target; return the score."""
    env.reset()
    total, over = 0.0, False
    points = [(2.0 - clearance, -1.0), (2.0 - clearance, 1.5), (2.0, 5.0)]
    while not over:
        if points[:-1] and math.hypot(env._x - points[0][0], env._y - points[0][1]) < 0.01:
            points.pop(0)
        action = np.array(towards(env, *points[0], speed), np.float32)
        _, reward, terminated, truncated, _ = env.step(action)
        total, over = total + reward, terminated or truncated
    return total


def test_scripted_drive_scores_more_than_210() -> None:
    best = max(scripted(CarPass(), clearance, speed) for clearance in (2.4, 2.6, 2.8) for speed in (2.0, 2.5, 3.0))
    assert 210 < best < SUPREMUM


def test_random_drives_score_about_minus_122() -> None:
    env, rng, returns, lengths = CarPass(), np.random.default_rng(0), [], []
    for _ in range(count(20_000)):
        total, _, _, _, steps = drive(env, rng.uniform(-1, 1, (25, 2)).tolist())
        returns.append(total)
        lengths.append(steps)
    error = np.std(returns) / math.sqrt(len(returns))
    assert abs(np.mean(returns) + 121.9) < 4 * error + 0.5
    assert abs(np.mean(lengths) - 6.9) < 0.3
    assert max(returns) < SUPREMUM


def test_no_return_exceeds_the_upper_bound() -> None:
    """Noisy drives towards the target are the most likely to exceed it."""
    env, rng, best = CarPass(), np.random.default_rng(1), -math.inf
    for _ in range(count(20_000)):
        env.reset()
        total, over, noise, side = 0.0, False, rng.uniform(0, 0.1), rng.uniform(-2.9, -2.4)
        while not over:
            goal = (2 + side, rng.uniform(-1, 1)) if env._y < 1 else (2.0, 5.0)
            speed, heading = towards(env, *goal, speed=rng.uniform(1.5, 3))
            action = np.array([speed, heading + rng.normal() * noise], np.float32)
            _, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        best = max(best, total)
    assert 200 < best < SUPREMUM


def test_crash_timeout_leaving_the_road_and_arrival_have_their_rewards() -> None:
    env = CarPass()
    full_ahead, stop = (1.0, 1.0), (-1.0, 1.0)
    total, terminated, _, info, steps = drive(env, [full_ahead] * 25)
    assert terminated and info["crashed"] == 1 and steps == 4
    assert total == pytest.approx(3 * 3 - 100, abs=1e-5)
    total, terminated, truncated, info, steps = drive(env, [stop] * 30)
    assert truncated and not terminated and steps == 25 and total == -250 and not any(info.values())
    total, terminated, _, info, _ = drive(env, [(1.0, 0.0)])
    assert terminated and info["left_road"] == 1 and total == -100
    env.reset()
    env.set_state({"x": 2.0, "y": 3.5, "steps": 0})
    _, reward, terminated, _, info = env.step(np.array([-0.3, 1.0], np.float32))
    assert reward == 200 and terminated and info["reached"] == 1


def test_speed_is_clipped_and_heading_is_not() -> None:
    env = CarPass()
    env.reset()
    env.step(np.array([9.0, 3.0], np.float32))  # 720 degrees is straight ahead
    assert env.get_state()["y"] == pytest.approx(-9) and env.get_state()["x"] == pytest.approx(2)


def test_state_is_restored_exactly() -> None:
    env, other, rng = CarPass(), CarPass(), np.random.default_rng(2)
    env.reset()
    other.reset()
    for _ in range(3):
        env.step(rng.uniform(-1, 0, 2).astype(np.float32))
    other.set_state(env.get_state())
    action = np.array([0.1, 0.2], np.float32)
    for left, right in zip(env.step(action)[:4], other.step(action)[:4], strict=True):
        assert np.array_equal(left, right)


def test_image_shows_both_cars_and_the_target() -> None:
    env = CarPass(render_mode="rgb_array")
    env.reset()
    picture = env.render()
    assert picture is not None and picture.shape == (600, 240, 3) and picture.dtype == np.uint8
    car, parked, target, road = picture[540, 180], picture[180, 180], picture[30, 180], picture[300, 30]
    assert len({tuple(pixel) for pixel in (car, parked, target, road)}) == 4
    assert CarPass().render() is None
