"""Rollouts of an evaluation: whole episodes with fixed seeds, several envs at a time, by a trained or scripted policy.

Episode i has the same seed in every process. Env r of R plays episodes r, r + R, r + 2R, ... to their ends, so that
short episodes are not favoured. When a budget of steps is used up, running episodes are finished and none starts.
With several agents an episode's return is the mean of theirs; with several policies, of the first policy's agents.

A scripted policy (`eval --policy file.py:Name`) is a class, built as `Name(spec)`, with two methods:

    reset(seed)              an episode starts; its seed (each further agent of the env has a seed derived from it)
    act(obs, mask) -> action for the env's `step`; obs is an array, or {name: array} if there are several;
                             mask has the allowed options of categorical actions, or is None
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Env
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.envs.actions import ActionCodec, random_action
from tiltyard.envs.episodes import episode_seed
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.envs.watchdog import RESETTING, calling_envs
from tiltyard.errors import TiltyardError, raised
from tiltyard.evaluation.recording import EpisodeRecorder, Keep, VideoRecorder, VideoTarget
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins import resolve
from tiltyard.types import Array, Arrays, EnvSpec, EpisodeEnd


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


@dataclass
class _Slot:
    """One env: the episode it plays now, and those it still has to play."""

    playing: int | None
    queue: Iterator[int]


def play_episodes(
    make_actor: MakeActor,
    wanted: EpisodeSet,
    *,
    video: VideoTarget | None = None,
    keep: Keep | None = None,
    policies: MultiPolicyActor | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[EpisodeResult]:
    """Play the episodes to their ends; `keep` gets each with its index.

    `policies` is the actor if it plays several policies. Raises Cancelled at most one env step after `cancelled`
    returns true.
    """
    envs, agents = min(wanted.envs, len(wanted.episodes)), len(wanted.spec.agents)
    shares = [wanted.episodes[slot::envs] for slot in range(envs)]
    slots = [_Slot(share[0], iter(share[1:])) for share in shares]
    group = _make_group(wanted, shares, render=video is not None, single=video is not None or keep is not None)
    camera = VideoRecorder(video, group) if video is not None else None
    recorder = EpisodeRecorder(group, keep, policies) if keep is not None else None
    results: list[EpisodeResult] = []
    steps = 0
    try:
        choose = make_actor(group)
        with calling_envs(RESETTING):
            now = group.reset()
        while any(slot.playing is not None for slot in slots):
            if cancelled():
                raise Cancelled
            if camera is not None:
                camera.add(now.obs)
            action = choose(now.obs, now.first, now.mask)
            playing = np.repeat([slot.playing is not None for slot in slots], agents)
            rows = np.flatnonzero(group.acting & playing).tolist()
            steps += len(rows)
            if recorder is not None:
                recorder.before_step(rows, now.obs, action)
            with calling_envs():
                now = group.step(action, before_reset=camera.end if camera is not None else None)
            if recorder is not None:
                recorder.after_step(rows, now, [slot.playing for slot in slots])
            for end in now.episodes:
                slot = slots[end.row // agents]
                if slot.playing is None:
                    continue
                total, returns = (end.total, {}) if policies is None else _policy_returns(end, policies)
                results.append(EpisodeResult(slot.playing, end.seed, total, end.length, {**end.metrics, **returns}))
                slot.playing = next(slot.queue, None) if wanted.steps is None or steps < wanted.steps else None
    finally:
        with calling_envs(RESETTING):
            group.close()
        if camera is not None:
            camera.discard()
    return sorted(results, key=lambda result: result.index)


def _make_group(wanted: EpisodeSet, shares: Sequence[range], *, render: bool, single: bool) -> EnvGroup:
    """The envs; `single` ones where a video or recording needs them."""

    def seeds(slot: int, number: int) -> int:
        share = shares[slot]  # an env that has finished its share keeps stepping, ignored, until the others are done
        return episode_seed(
            wanted.seed, "eval", share[number] if number < len(share) else number, int(number >= len(share))
        )

    rows = len(shares) * len(wanted.spec.agents)
    config = GroupConfig(
        wanted.env,
        wanted.spec,
        rows,
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


def trained_actor(net: PolicyNet | MultiPolicyActor, greedy: bool, seed: int) -> MakeActor:
    """Act with a trained net or several; recurrent states are kept between calls."""
    generator = torch.Generator().manual_seed(seed)

    def begin(group: EnvGroup) -> Choose:
        state = net.initial_state(group.rows)

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            nonlocal state
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

    def begin(group: EnvGroup) -> Choose:
        scripted: list[ScriptedPolicy] = [_call(text, lambda: maker(spec)) for _ in range(group.rows)]

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            rows = []
            for row, policy in enumerate(scripted):
                if not group.acting[row]:  # the agent is not in the env now
                    rows.append(np.zeros(spec.action.columns, np.float32))
                    continue
                if first[row]:
                    _call(text, lambda: policy.reset(_seed(group, row)))  # noqa: B023 - called at once
                seen = {name: array[row].copy() for name, array in obs.items()}
                allowed = None if mask is None else mask[row].copy()
                view = seen["obs"] if list(seen) == ["obs"] else seen
                rows.append(_call(text, lambda: group.codec.encode(policy.act(view, allowed))))  # noqa: B023
            return np.stack(rows)

        return choose

    return begin


def _seed(group: EnvGroup, row: int) -> int:
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
