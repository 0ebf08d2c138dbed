"""Rollouts: whole episodes with fixed seeds, several envs at a time, by a trained or scripted policy.

    EpisodeSource.next(copy) ──> Player: reset and step the copies ──> EpisodeResult, and Episodes for a recorder

In an evaluation episode i has the same seed in every process. Env r of R plays episodes r, r + R, r + 2R, ... to their
ends, so that short episodes are not favoured. When a budget of steps is used up, running episodes are finished and none
starts. With several agents an episode's return is the mean of theirs; with several policies, of the first policy's
agents. Collecting (tiltyard/collection) has another source, which claims the episodes of a dataset one by one.

A scripted policy (`eval --policy file.py:Name`) is a class, built as `Name(spec)`, with two methods:

    reset(seed)              an episode starts; its seed (each further agent of the env has a seed derived from it)
    act(obs, mask) -> action for the env's `step`; obs is an array, or {name: array} if there are several;
                             mask has the allowed options of categorical actions, or is None
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Env
from tiltyard.envs.actions import ActionCodec, random_action
from tiltyard.envs.episodes import episode_seed
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.envs.watchdog import RESETTING, calling_envs
from tiltyard.errors import TiltyardError, raised
from tiltyard.evaluation.recording import EpisodeRecorder, Keep, VideoRecorder, VideoTarget
from tiltyard.plugins import resolve
from tiltyard.types import Array, Arrays, EnvSpec, EpisodeEnd, Step

if TYPE_CHECKING:  # these import torch, which processes that collect random episodes do not need
    from tiltyard.engines.policies.multi_policy import MultiPolicyActor
    from tiltyard.models.policy_net import PolicyNet


@dataclass(frozen=True)
class EpisodeSet:
    """The episodes to play, and in which envs."""

    env: Env
    spec: EnvSpec
    base: Sequence[Path]
    previous: bool
    episodes: range
    envs: int  # at most so many copies of the env
    seed: int
    steps: int | None = None  # start no episode after this many env steps


def episode_set(
    experiment: Experiment, spec: EnvSpec, base: Sequence[Path], episodes: range, seed: int, envs: int | None = None
) -> EpisodeSet:
    """Episodes of an experiment's env as in training, with a time limit if it has none."""
    env, settings = experiment.env, experiment.eval
    limit = env.time_limit if env.time_limit is not None or spec.episode_limit is not None else settings.time_limit
    env = env.model_copy(update={"time_limit": limit})
    return EpisodeSet(env, spec, base, experiment.model.previous, episodes, envs or settings.envs, seed)


@dataclass(frozen=True)
class EpisodeResult:
    """One finished episode of an evaluation."""

    index: int
    seed: int
    total: float
    length: int
    metrics: dict[str, float] = field(default_factory=dict)


class Cancelled(Exception):
    """The evaluation was cancelled between two env steps; it has no result."""


class EpisodeSource(Protocol):
    """Hands out episodes."""

    def next(self, copy: int) -> tuple[int, int] | None:
        """Index and seed of the next episode of a copy of the env; None if there is none now."""


class _Shares:
    """The episodes of an evaluation: copy r of R plays r, r + R, r + 2R, ..."""

    def __init__(self, wanted: EpisodeSet, copies: int) -> None:
        self._queues = [iter(wanted.episodes[copy::copies]) for copy in range(copies)]
        self._seed = wanted.seed

    def next(self, copy: int) -> tuple[int, int] | None:
        index = next(self._queues[copy], None)
        return None if index is None else (index, episode_seed(self._seed, "eval", index, 0))


class _Slots:
    """The episode that each copy of the env plays. A copy without one keeps stepping, ignored."""

    def __init__(self, source: EpisodeSource, wanted: EpisodeSet, copies: int) -> None:
        self._source, self._wanted = source, wanted
        self.playing: list[int | None] = [None] * copies
        self._begun: list[int | None] = [None] * copies  # since the last `advance`
        self.steps = 0  # env steps in episodes that count

    def begin(self, copy: int, number: int) -> int:
        """The seed of the episode that a copy begins now; its env calls this within step()."""
        enough = self._wanted.steps is not None and self.steps >= self._wanted.steps
        found = None if enough else self._source.next(copy)
        self._begun[copy], seed = found or (None, episode_seed(self._wanted.seed, "eval", number, 1))
        return seed

    def advance(self, copy: int) -> None:
        """After the end of a copy's episode was handled: play the one that it has begun."""
        self.playing[copy] = self._begun[copy]

    @property
    def any(self) -> bool:
        return any(index is not None for index in self.playing)


class Player:
    """Copies of an env, the policy that acts in them, and what is recorded. Made by `players`."""

    def __init__(
        self, group: EnvGroup, choose: Choose, slots: _Slots, camera: VideoRecorder | None, recorder: Recorder | None
    ) -> None:
        self._group, self._choose, self._slots = group, choose, slots
        self._camera, self._recorder = camera, recorder

    def play(
        self, policies: MultiPolicyActor | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> list[EpisodeResult]:
        """Play until the source has no further episode; may be called again when it has."""
        group, slots, agents = self._group, self._slots, self._group.agents
        results: list[EpisodeResult] = []
        with calling_envs(RESETTING):
            now = group.reset()
        for copy in range(group.copies):
            slots.advance(copy)
        while slots.any:
            if cancelled():
                raise Cancelled
            if self._camera is not None:
                self._camera.add(now.obs)
            action = self._choose(now.obs, now.first, now.mask)
            playing = np.repeat([index is not None for index in slots.playing], agents)
            rows = np.flatnonzero(group.acting & playing).tolist()
            slots.steps += len(rows)
            if self._recorder is not None:
                self._recorder.before_step(rows, now.obs, action)
            with calling_envs():
                now = group.step(action, before_reset=self._camera.end if self._camera is not None else None)
            if self._recorder is not None:
                self._recorder.after_step(rows, now, slots.playing)
            for end in now.episodes:
                copy = end.row // agents
                index = slots.playing[copy]
                if index is not None:
                    total, returns = (end.total, {}) if policies is None else _policy_returns(end, policies)
                    results.append(EpisodeResult(index, end.seed, total, end.length, {**end.metrics, **returns}))
                    slots.advance(copy)
        return results


@contextmanager
def players(
    make_actor: MakeActor,
    wanted: EpisodeSet,
    source: EpisodeSource,
    *,
    video: VideoTarget | None = None,
    recorder: Callable[[EnvGroup], Recorder] | None = None,
) -> Iterator[Player]:
    """The envs of a set of episodes, open while entered."""
    copies = min(wanted.envs, len(wanted.episodes))
    slots = _Slots(source, wanted, copies)
    single = video is not None or recorder is not None
    group = _make_group(wanted, copies, slots.begin, render=video is not None, single=single)
    camera = VideoRecorder(video, group) if video is not None else None
    try:
        yield Player(group, make_actor(group), slots, camera, recorder(group) if recorder is not None else None)
    finally:
        with calling_envs(RESETTING):
            group.close()
        if camera is not None:
            camera.discard()


def play_episodes(
    make_actor: MakeActor,
    wanted: EpisodeSet,
    *,
    video: VideoTarget | None = None,
    keep: Keep | None = None,
    policies: MultiPolicyActor | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    save_info: bool = True,
) -> list[EpisodeResult]:
    """Play the episodes of an evaluation to their ends; `keep` gets each with its index, the data of every agent, and
    infos if `save_info`.

    `policies` is the actor if it plays several policies. Raises Cancelled at most one env step after `cancelled`
    returns true.
    """

    def recorder(group: EnvGroup) -> EpisodeRecorder:
        assert keep is not None
        return EpisodeRecorder(group, keep, _seat_names(policies), save_info=save_info)

    source = _Shares(wanted, min(wanted.envs, len(wanted.episodes)))
    with players(make_actor, wanted, source, video=video, recorder=recorder if keep else None) as player:
        results = player.play(policies, cancelled)
    return sorted(results, key=lambda result: result.index)


def _seat_names(policies: MultiPolicyActor | None) -> Callable[[int, int], dict[str, Any]]:
    """The policy of each row as meta data, where there are several."""
    if policies is None:
        return lambda row, seed: {}
    return lambda row, seed: {"policy": policies.match.policies[policies.seats[row]]}


def _make_group(
    wanted: EpisodeSet, copies: int, seeds: Callable[[int, int], int], *, render: bool, single: bool
) -> EnvGroup:
    """The envs; `single` ones where a video or recording needs them."""
    config = GroupConfig(
        wanted.env,
        wanted.spec,
        copies * len(wanted.spec.agents),
        wanted.seed,
        wanted.base,
        "eval",
        render=render,
        previous=wanted.previous,
        seeds=seeds,
    )
    with calling_envs(RESETTING):  # making an env may take as long as a reset
        return make_group(config, native="never" if single else "exact")


def _policy_returns(end: EpisodeEnd, policies: MultiPolicyActor) -> tuple[float, dict[str, float]]:
    """The return of the evaluated policy (of all agents if it had none in this episode), and that of each."""
    returns = policies.returns(end, first_row=0)
    first = policies.match.policies[policies.match.whom]
    return returns.get(first, end.total), {f"policy/{name}/return": value for name, value in returns.items()}


# ---------------------------------------------------------------------------------------------- actors


BUILTIN_POLICIES = {"random": "tiltyard.evaluation.rollouts:RandomPolicy"}

Choose = Callable[[Arrays, Array, Array | None], Array]
"""(obs, first, mask) -> action, for all rows"""
MakeActor = Callable[[EnvGroup], Choose]


class Recorder(Protocol):
    """Gets every step of the rows that play an episode which counts."""

    def before_step(self, rows: list[int], obs: Arrays, action: Array) -> None: ...
    def after_step(self, rows: list[int], now: Step, playing: Sequence[int | None]) -> None: ...


class ScriptedPolicy(Protocol):
    """A policy written by a user."""

    def reset(self, seed: int) -> None: ...
    def act(self, obs: Any, mask: Array | None) -> Any: ...


class RandomPolicy:
    """The baseline: all allowed actions are equally likely. The same episode always gets the same actions."""

    def __init__(self, spec: EnvSpec) -> None:
        self._action, self._codec = spec.action, ActionCodec(spec.action)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, obs: Any, mask: Array | None) -> Any:
        return self._codec.decode(random_action(self._action, self._rng, mask))


def trained_actor(
    net: PolicyNet | MultiPolicyActor, greedy: bool, seed: int, *, per_episode: bool = False
) -> MakeActor:
    """Act with a trained net or several; recurrent states are kept between calls.

    With `per_episode`, for a single copy of the env, the sampled actions of an episode follow from its seed alone.
    """
    import torch

    from tiltyard.engines.policies.multi_policy import MultiPolicyActor

    generator = torch.Generator().manual_seed(seed)

    def begin(group: EnvGroup) -> Choose:
        state, begun = net.initial_state(group.rows), -1
        assert group.copies == 1 or not per_episode

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            nonlocal state, begun
            if per_episode and group.stats.seeds[0] != begun:
                begun = group.stats.seeds[0]
                generator.manual_seed(episode_seed(begun, "policy", 0, 0))
            if isinstance(net, MultiPolicyActor):
                net.take_seats(group.stats.seeds)
            acted = net.act(obs, state, first, mask, greedy=greedy, generator=generator, with_value=False)
            state = acted.state
            return acted.action

        return choose

    return begin


def scripted_actor(text: str, spec: EnvSpec, base: Sequence[Path]) -> MakeActor:
    """Act with the class named by `text`, one object per row."""
    maker = resolve.load(resolve.parse(text, BUILTIN_POLICIES, resolve.CONVENTIONAL["policy"], base))
    return objects_actor(text, lambda: maker(spec), spec)


def objects_actor(text: str, make: Callable[[], ScriptedPolicy], spec: EnvSpec) -> MakeActor:
    """Act with scripted policies, one object per row; `text` names them in errors."""

    def begin(group: EnvGroup) -> Choose:
        scripted: list[ScriptedPolicy] = [_call(text, make) for _ in range(group.rows)]

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            rows = []
            for row, policy in enumerate(scripted):
                if not group.acting[row]:  # the agent is not in the env now
                    rows.append(np.zeros(spec.action.columns, np.float32))
                    continue
                if first[row]:
                    _call(text, lambda: policy.reset(row_seed(group, row)))  # noqa: B023 - called at once
                seen = {name: array[row].copy() for name, array in obs.items()}
                allowed = None if mask is None else mask[row].copy()
                view = seen["obs"] if list(seen) == ["obs"] else seen
                rows.append(_call(text, lambda: group.codec.encode(policy.act(view, allowed))))  # noqa: B023
            return np.stack(rows)

        return choose

    return begin


def row_seed(group: EnvGroup, row: int) -> int:
    """The episode's seed; for further agents of the same env a seed derived from it."""
    place = row % group.agents
    seed = group.stats.seeds[row]
    return episode_seed(seed, "agent", place, 0) if place else seed


def _call(text: str, action: Callable[[], Any]) -> Any:
    """Call a user's policy; its errors name it."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        message = "a policy is built with the env's spec and needs reset(seed) and act(obs, mask)"
        hint = resolve.user_traceback(error)
        raise TiltyardError(f"policy {text} {raised(error)}", message, hint) from error
