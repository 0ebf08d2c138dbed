"""PettingZoo envs by their usual names, and the built-in toy envs in PettingZoo's API test."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiltyard.config.sections import Env
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.toys.games import Pennies, Visitors
from tiltyard.envs.vector import make_group
from tiltyard.testing import check_env

pytest.importorskip("pettingzoo", reason="the extra `pettingzoo` is not installed")

BASE = [Path(__file__).parent]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("made", [Pennies(), Visitors()])
def test_toy_envs_pass_the_parallel_api_test(made: Any) -> None:
    from pettingzoo.test import parallel_api_test

    parallel_api_test(made, num_cycles=30)


def test_rock_paper_scissors_is_found_by_its_name() -> None:
    spec = check_env("pettingzoo.classic.rps_v2:parallel_env", options={"max_cycles": 5}, base=BASE, steps=12)
    assert spec.agents == ("player_0", "player_1") and spec.parallel and spec.action.parts[0].options == 3


def test_row_of_a_terminated_agent_waits_for_the_others() -> None:
    """Without `terminate_on_fall`, a walker that falls is done and the others continue."""
    env = Env(id="pettingzoo.sisl.multiwalker_v9:parallel_env", options={"terminate_on_fall": False, "max_cycles": 120})
    spec = spec_from_json(examine(env, BASE, False))
    assert spec.renders and len(spec.agents) == 3
    group, rng = make_group(GroupConfig(env, spec, 3, 0, BASE)), np.random.default_rng(0)
    now, decided = group.reset(), np.zeros(3, int)
    ends: list[Any] = []
    while not ends:
        there = group.acting.copy()
        now = group.step(group.codec.random_rows(rng, 3, None))
        assert np.array_equal(now.valid, there) and not now.reward[~there].any()
        decided += now.valid
        ends = now.episodes
    assert decided.max() == ends[0].length and decided.min() < ends[0].length, "an agent fell before the end"
    assert ends[0].total == pytest.approx(np.mean([ends[0].metrics[f"walker_{index}_return"] for index in range(3)]))
    group.close()
