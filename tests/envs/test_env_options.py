"""Options that change while envs run: each copy gets them before its next reset, also after a restore."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiltyard.config.sections import Env
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.vector import EnvGroup, make_group

ENVS = """
import gymnasium
import numpy as np

SPACE, ACTIONS = gymnasium.spaces.Box(0, 99, (1,), np.float32), gymnasium.spaces.Discrete(2)

class Levels(gymnasium.Env):
    '''Rewards its level, in episodes of 1 to 4 steps.'''
    observation_space, action_space = SPACE, ACTIONS

    def __init__(self, *, level=1, size=5):
        self.level, self.size = level, size

    def set_options(self, *, level):
        self.level = level

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, self.size))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(self.level), self.left == 0, False, {}

class Wrapped(gymnasium.Wrapper):
    def __init__(self, *, level=1, size=5):
        super().__init__(Levels(level=level, size=size))

class Pair:
    possible_agents = ["a", "b"]
    metadata = {}

    def __init__(self, *, level=1, size=5):
        self.one = Levels(level=level, size=size)

    def observation_space(self, agent):
        return SPACE

    def action_space(self, agent):
        return ACTIONS

    def set_options(self, *, level):
        self.one.set_options(level=level)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, self.one.reset(seed=seed)[0]), {}

    def step(self, actions):
        answer = self.one.step(0)
        self.agents = [] if answer[2] else self.agents
        return tuple(dict.fromkeys(actions, value) for value in answer)

    def close(self):
        pass
"""


def group_of(folder: Path, name: str, level: int) -> EnvGroup:
    env = Env(id=f"levels.py:{name}", options={"level": level, "size": 5})
    spec = spec_from_json(examine(env, [folder], False))
    assert spec.takes_options
    return make_group(GroupConfig(env, spec, 6 * len(spec.agents), 3, [folder]))


def rewards(group: EnvGroup, steps: int) -> Any:
    """Rewards [steps, copies], and whether each copy began a new episode after the step."""
    rows = []
    for _ in range(steps):
        now = group.step(np.zeros((group.rows, 1), np.float32))
        rows.append((now.reward[:: group.agents].copy(), now.first[:: group.agents].copy()))
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


@pytest.mark.parametrize("name", ["Levels", "Wrapped", "Pair"])
def test_copies_get_options_at_their_own_next_reset(tmp_path: Path, name: str) -> None:
    (tmp_path / "levels.py").write_text(ENVS)
    group = group_of(tmp_path, name, 1)
    group.reset()
    rewards(group, 2)
    group.set_options({"level": 7, "size": 5})
    saved = group.save()
    got, first = rewards(group, 6)
    begun = np.vstack([np.zeros(6, bool), np.cumsum(first, 0)[:-1] > 0])
    assert np.array_equal(got, np.where(begun, 7, 1)) and 0 < begun[1].sum() < 6, "at different times"

    again = group_of(tmp_path, name, 7)  # as a resume makes them
    assert again.load(saved) == [], "no episode is cut"
    assert np.array_equal(rewards(again, 6)[0], got)
