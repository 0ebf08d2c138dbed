"""The stepper of the sampler: with every kind of stepping, each env is stepped and reset at the end of an episode."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tiltyard.config.sections import Env
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.single_agent_vector import NativeStepping
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.errors import EnvError
from tiltyard.tuning.sampler import ACTION_SETS, EnvStepper

BASE = [Path(__file__).parents[1] / "cli"]
PAUSES = "pauses.py:Pauses"


def stepper_of(env: Env, rows: int = 3) -> tuple[EnvStepper, EnvGroup]:
    group = make_group(GroupConfig(env, spec_from_json(examine(env, BASE, False)), rows, 0, BASE))
    return EnvStepper(group, group.reset()), group


def counted(group: EnvGroup) -> list[int]:
    """Count the resets of each env from now on."""
    found = [0] * len(group.envs)

    def count(row: int, made: Any) -> Any:
        reset = made.reset

        def begin(**more: Any) -> Any:
            found[row] += 1
            return reset(**more)

        return begin

    for row, made in enumerate(group.envs):
        made.reset = count(row, made)
    return found


@pytest.mark.parametrize(
    ("more", "resets", "frames"),
    [
        ({}, 4, 60),  # 20 steps, episodes of 5 steps
        ({"time_limit": 4}, 5, 60),
        # An episode has 3 env steps of 2 + 2 + 1 frames. 20 env steps are 6 episodes and 4 frames, in 3 envs.
        ({"frameskip": 2}, 6, 102),
        ({"isolate": "thread"}, 4, 60),  # like in training
    ],
)
def test_single_envs_are_stepped_and_reset(more: dict[str, Any], resets: int, frames: int) -> None:
    stepper, group = stepper_of(Env(id=PAUSES, **more))
    found = counted(group)
    for _ in range(20):
        stepper.step()
    assert (stepper.env_steps, stepper.frames, found) == (60, frames, [resets] * 3)
    group.close()


@pytest.mark.parametrize(("limit", "resets"), [(None, 1), (5, 4)])
def test_native_rows_are_stepped_in_one_call(limit: int | None, resets: int) -> None:
    stepper, group = stepper_of(Env(id="CartPole-v1", time_limit=limit), rows=4)
    assert isinstance(group.stepping, NativeStepping)
    found = counted(group)
    states = np.zeros((4, 4))
    for _ in range(20):
        stepper.step()
        assert not (states == group.stepping.vector._all.state).all()  # type: ignore[attr-defined]
        states = group.stepping.vector._all.state.copy()  # type: ignore[attr-defined]
    assert (stepper.env_steps, stepper.frames) == (80, 80)
    assert sum(found) >= 4 * resets if limit else 0 < sum(found) < 8
    group.close()


def test_agents_are_counted_like_in_training() -> None:
    stepper, group = stepper_of(Env(id="tiltyard.envs.toys.games:Pennies"), rows=4)
    for _ in range(3):
        stepper.step()
    assert (stepper.env_steps, stepper.frames) == (12, 3 * group.copies)
    group.close()


def test_env_errors_are_reported_with_row_and_step() -> None:
    stepper, group = stepper_of(Env(id=PAUSES, options={"fails_at": 200}))
    for _ in range(199):
        stepper.step()
    with pytest.raises(EnvError, match="row 0, env step 597: step\\(\\) raised RuntimeError: out of fuel"):
        stepper.step()
    group.close()


class Doubling(gymnasium.Env[Any, Any]):
    """An env that modifies its action."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.abs(action).max() <= 1
        action *= 2
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_env_may_modify_its_action() -> None:
    stepper, group = stepper_of(Env(id=f"{__name__}:Doubling", time_limit=10))
    for _ in range(2 * ACTION_SETS):
        stepper.step()
    assert stepper.env_steps == 6 * ACTION_SETS
    group.close()
