"""Envs with several agents as rows: acting agents, observations, ends, limits, masks, restoring, and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiltyard.config.sections import Env
from tiltyard.data.folder import read_episodes
from tiltyard.envs.probe import examine
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.errors import DivergedError, EnvError, UseError
from tiltyard.evaluation.rollouts import EpisodeSet, play_episodes, scripted_actor
from tiltyard.testing import check_env
from tiltyard.types import EnvSpec, Step

BASE = [Path(__file__).parent]
PAUSES = {"pauses": True}
HOST, LATE, EARLY, GUEST = range(4)
# Env steps of an episode in which each agent acts, as documented in Visitors.
THERE = {HOST: (0, 1, 2, 3, 4, 5), LATE: (2, 3, 4), EARLY: (0, 1), GUEST: (1, 4, 5)}


def probed(env: Env, previous: bool = False) -> EnvSpec:
    return spec_from_json(examine(env, BASE, previous))


def group_of(copies: int = 1, *, id: str = "visitors", previous: bool = False, **settings: Any) -> EnvGroup:
    env = Env(id=id, **settings)
    spec = probed(env, previous)
    return make_group(GroupConfig(env, spec, copies * len(spec.agents), 3, BASE, previous=previous))


def right(now: Step) -> np.ndarray:
    """Return the rewarded action, which equals the observation; actions of absent agents are ignored."""
    return now.obs["obs"][:, -2:].argmax(1).astype(np.float32)[:, None]


def test_rows_are_agents_and_only_present_agents_act() -> None:
    group = group_of(2, options=PAUSES)
    now, ends = group.reset(), []
    for tick in range(18):
        step = tick % 6
        there = np.array([step in THERE[row % 4] for row in range(8)])
        comes = np.array([step in THERE[row % 4] and step - 1 not in THERE[row % 4] for row in range(8)])
        assert np.array_equal(group.acting, there)
        assert np.array_equal(now.obs["obs"].any(1), there), "an absent agent observes zeros"
        assert np.array_equal(now.first, comes | (step == 0)), "an agent that joins has no memory"
        now = group.step(right(now))
        assert np.array_equal(now.valid, there)
        assert np.array_equal(now.reward, there.astype(np.float32))
        ends += now.episodes
    assert [end.row for end in ends] == [0, 4, 0, 4, 0, 4] and [end.number for end in ends] == [0, 0, 1, 1, 2, 2]
    assert len({end.seed for end in ends}) == 6
    for end in ends:
        assert (end.total, end.length, end.frames) == (3.5, 6, 6)
        returns = {name: value for name, value in end.metrics.items() if name.endswith("_return")}
        assert returns == {"host_return": 6, "late_return": 3, "early_return": 2, "guest_return": 3}
    assert group.stats.frames_taken == 36, "a frame counts once, however many agents observe it"


def test_each_agent_has_its_own_end() -> None:
    group = group_of(options=PAUSES)
    now = group.reset()
    ended = {}
    for step in range(6):
        now = group.step(right(now))
        for row in np.flatnonzero(now.terminated | now.truncated).tolist():
            kind = "terminated" if now.terminated[row] else "truncated"
            ended.setdefault(row, []).append((step, kind))
            assert now.final_obs["obs"][row].sum() == 1, "its last observation, not the zeros of an absent agent"
        assert not (now.terminated & now.truncated).any()
    assert ended == {
        HOST: [(5, "truncated")],
        LATE: [(4, "terminated")],
        EARLY: [(1, "terminated")],
        GUEST: [(1, "truncated"), (5, "truncated")],
    }


def test_time_limit_ends_the_episode_of_all_agents() -> None:
    group = group_of(time_limit=3)
    now = group.reset()
    for _ in range(3):
        now = group.step(right(now))
    assert now.truncated.tolist() == [True, True, False] and not now.terminated.any()
    assert [end.length for end in now.episodes] == [3] and now.episodes[0].total == pytest.approx((3 + 1 + 2) / 3)
    assert group.acting.tolist() == [True, False, True] and now.first.all()


def test_frameskip_repeats_actions_until_an_agent_ends_or_joins() -> None:
    """Agents join or end after calls 2, 5 and 6, so env steps of up to three calls take 2, 3 and 1."""
    group = group_of(frameskip=3)
    now, ends, ticks = group.reset(), [], 0
    while not ends:
        now = group.step(np.zeros((3, 1), np.float32))
        ends, ticks = now.episodes, ticks + 1
    assert ticks == ends[0].length == 3 and ends[0].frames == 6


def test_stacks_and_previous_actions_start_again_when_an_agent_joins() -> None:
    group = group_of(previous=True, frame_stack=2)
    now = group.reset()
    for step in range(4):
        now = group.step(np.ones((3, 1), np.float32))
        late = now.obs["obs"][LATE]
        if step == 1:  # the agent has just joined
            assert np.array_equal(late[:2], late[2:]) and late.any()
        assert bool(now.obs["previous.action"][LATE].any()) == (step >= 2)
        assert now.obs["previous.action"][HOST].all()
    assert not now.obs["previous.action"][EARLY].any(), "it is absent"


def test_each_agent_has_its_mask_and_absent_agents_have_none() -> None:
    group = group_of(id="agents.py:Masked", options=PAUSES)
    assert group.spec.masked
    now = group.reset()
    for _ in range(12):
        assert now.mask is not None
        assert np.array_equal(now.mask, np.where(group.acting[:, None], now.obs["obs"] > 0, True))
        now = group.step(right(now))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("visitors", {}),
        ("visitors", PAUSES),
        ("pennies", {}),
        ("agents.py:Masked", PAUSES),
        ("agents.py:Keeps", PAUSES),
    ],
)
def test_restored_envs_continue_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    spec = check_env(name, options=options, base=BASE, steps=31)
    assert spec.restore_mode == ("state" if "Keeps" in name else "rerun")


def test_checkpoint_keeps_the_last_infos_of_agents_that_left() -> None:
    one, two = group_of(), group_of()
    now = one.reset()
    for _ in range(4):
        now = one.step(right(now))
    assert two.load(one.save()) == []
    ends = []
    for group in (one, two):
        then = group.current()
        while not then.episodes:
            then = group.step(right(then))
        ends.append(then.episodes[0])
    assert ends[0] == ends[1] and "seen" in ends[0].metrics


def test_checkpoint_with_other_agents_begins_new_episodes() -> None:
    one, two = group_of(), group_of(options=PAUSES)
    one.reset()
    output = two.load(one.save())
    assert output == ["0 of the checkpoint's 3 rows are left: the episodes of the others were cut"]
    assert two.stats.number.tolist() == [1, 1, 1, 1], "episode 0 and its seeds belong to the other run"
    assert two.acting.tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "OtherView",
            "same observation space, but that of 'host' is Box(0.0, 1.0, (2,), float32) and that of 'late' is Box(0.0",
        ),
        ("NoAgents", "reset() left `agents` empty"),
        ("UnknownAgent", "agent 'spy' is in `agents` but not in `possible_agents`"),
        ("NoReward", "step() returned no reward for agent 'early', which acted"),
        ("NoObservation", "step() returned no observation for agent 'host'"),
        ("GymnasiumStep", "step() returned (dict, float, bool, bool, dict) instead of five dicts"),
        ("NotANumber", "the reward of agent 'late' is nan"),
        ("Raises", "step() number 1 raised ValueError: the host is ill"),
    ],
)
def test_invalid_env_is_refused_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UseError) as refused:
        examine(Env(id=f"agents.py:{name}"), BASE, False)
    assert sentence in refused.value.message and refused.value.hint


def test_wrapper_can_give_all_agents_the_same_space() -> None:
    wrappers = [{"id": "agents.py:Alike", "options": {"width": 3}}]
    spec = check_env(Env(id="agents.py:OtherView", wrappers=wrappers), base=BASE, steps=12)
    assert spec.obs["obs"].shape == (3,) and spec.agents == ("host", "late", "early")


def test_errors_after_the_probe_name_row_episode_and_agent() -> None:
    spec = probed(Env(id="visitors"))
    group = make_group(GroupConfig(Env(id="agents.py:NotANumber"), spec, 3, 0, BASE))
    now = group.step(right(group.step(right(group.reset()))))
    with pytest.raises(DivergedError, match=r"row 1, episode 0, env step 3, agent 'late': the reward is nan"):
        group.step(right(now))
    group = make_group(GroupConfig(Env(id="agents.py:Raises"), spec, 3, 0, BASE))
    with pytest.raises(EnvError, match=r"row 0, episode 0, env step 0: step\(\) raised ValueError: the host is ill"):
        group.step(right(group.reset()))


class Knowing:
    """A scripted policy that repeats its observation."""

    def __init__(self, spec: EnvSpec) -> None:
        self.seeds: list[int] = []

    def reset(self, seed: int) -> None:
        self.seeds.append(seed)

    def act(self, obs: Any, mask: Any) -> Any:
        assert obs.sum() == 1, "no action is requested for absent agents"
        return int(obs.argmax())


def test_evaluations_play_whole_episodes_of_all_agents(tmp_path: Path) -> None:
    env = Env(id="visitors", options=PAUSES)
    spec, kept = probed(env), []
    actor = scripted_actor(f"{__name__}:Knowing", spec, BASE)
    wanted = EpisodeSet(env, spec, BASE, previous=False, episodes=range(5), envs=2, seed=1)
    played = play_episodes(actor, wanted, keep=lambda index, episodes: kept.append((index, episodes)))
    assert [one.index for one in played] == [0, 1, 2, 3, 4]
    assert all((one.total, one.length, one.metrics["host_return"]) == (3.5, 6, 6.0) for one in played)
    for index in range(5):
        (own,) = [episodes for at, episodes in kept if at == index]
        assert sorted((e.meta["agent"], len(e.action), float(e.reward.sum())) for e in own) == [
            ("early", 2, 2.0),
            ("guest", 1, 1.0),
            ("guest", 2, 2.0),
            ("host", 6, 6.0),
            ("late", 3, 3.0),
        ]
        assert {e.seed for e in own} == {played[index].seed}
        assert all(len(e.obs["obs"]) == len(e.action) + 1 for e in own)
    steps = play_episodes(actor, replace(wanted, episodes=range(100), steps=20))
    assert len(steps) == 2, "two episodes begun at once have 28 decisions"


def test_random_agents_act_independently() -> None:
    env = Env(id="pennies")
    spec = probed(env)
    wanted = EpisodeSet(env, spec, BASE, previous=False, episodes=range(40), envs=4, seed=0)
    played = play_episodes(scripted_actor("random", spec, BASE), wanted)
    assert {one.metrics["even_heads"] == one.metrics["odd_heads"] for one in played} == {True, False}
    assert all(one.metrics["even_return"] == -one.metrics["odd_return"] for one in played)


def test_commands_train_evaluate_and_record_several_agents(tiltyard: Any, runs: Path, tmp_path: Path) -> None:
    little = ("stop.env_steps=300", "engine.envs=2", "algo.rollout=24", "algo.minibatch=48", "eval.episodes=2")
    output = tiltyard("train", "visitors", *little, "track.tensorboard=false")
    assert "3 agents with one policy" in output.stderr and "at most 144 env steps (6 rows x 24)" in output.stderr
    output = tiltyard("eval", "visitors", "--episodes", "2", "--save-rollouts", "data")
    assert "late_return" in output.stdout + output.stderr
    assert {episode.meta["agent"] for episode in read_episodes("data")} == {"host", "late", "early"}
