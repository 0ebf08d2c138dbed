"""Tournaments of policies in an env with several agents: every pair plays in both seatings, wins become Elo ratings.

    A B C  ──>  A-B  B-A  A-C  C-A  B-C  C-B     the same seeds each  ──>  wins  ──>  Elo

In a pair one policy plays the first, third, ... agent of the env, the other the rest; then they change seats. The
policy whose agents have the higher mean return wins the episode.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.config.policies import PolicySettings
from tiltyard.engines.policies.frozen import source_of
from tiltyard.engines.policies.matchmaking import Match
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError, UseError
from tiltyard.evaluation.rollouts import EpisodeResult, EpisodeSet, episode_set, play_episodes, trained_actor
from tiltyard.models.policy import Policy, load_policy
from tiltyard.run import trust
from tiltyard.run.folder import run_of
from tiltyard.types import EnvSpec

ONE, OTHER = "one", "other"  # names of the two policies of a pair
MIDDLE, SCALE = 1500.0, 400.0  # of Elo ratings: their mean, and the difference for odds of ten to one
RESAMPLES = 1000
_ROUNDS, _CLOSE = 1_000, 1e-9


@dataclass(frozen=True)
class Bout:
    """A pair in one seating; `one` has the first seat. Wins are `one`'s."""

    one: str
    other: str
    wins: int
    draws: int
    losses: int
    returns: tuple[float, float]  # mean return of each
    seats: dict[str, float]  # mean return of each agent of the env


@dataclass(frozen=True)
class Rating:
    """Elo rating of a policy with its 95 % interval; 400 more are odds of ten to one."""

    policy: str
    elo: float
    low: float
    high: float
    wins: int
    draws: int
    losses: int


@dataclass(frozen=True)
class Table:
    """All bouts, and the ratings, strongest first."""

    env: str
    episodes: int
    seed: int
    greedy: bool
    bouts: list[Bout]
    ratings: list[Rating]


def match(
    sources: Sequence[str],
    *,
    episodes: int = 100,
    seed: int | None = None,
    greedy: bool | None = None,
    trust_code: bool = False,
) -> Table:
    """Play every pair of policies in both seatings, `episodes` each, in the env of the first policy's run.

    A source is a run (RUN, RUN@STEP, RUN@best) or a checkpoint folder, with :NAME for a policy other than the first.
    """
    if len(sources) < 2 or len(set(sources)) < len(sources):
        raise UseError("a match needs two or more different policies", "tiltyard match RUN@best OTHER-RUN")
    torch.set_num_threads(1)
    policies, experiment, base = _contenders(sources, trust_code)
    spec = probe(experiment.env, base=base, previous=experiment.model.previous)
    if len(spec.agents) < 2:
        raise UseError(f"env {experiment.env.id} has one agent, but a match needs two", "compare with `tiltyard eval`")
    for source, policy in policies.items():
        try:
            policy.require_same(spec)
        except UseError as error:
            raise UseError(f"{source}: {error.message}", "all policies of a match need the same env") from error
    seed = experiment.eval.seed if seed is None else seed
    greedy = experiment.eval.greedy if greedy is None else greedy
    wanted, bouts = episode_set(experiment, spec, base, range(episodes), seed), []
    for one, other in [seats for pair in itertools.combinations(sources, 2) for seats in (pair, pair[::-1])]:
        pair = {ONE: policies[one], OTHER: policies[other]}
        bouts.append(_bout(one, other, _played(pair, experiment, wanted, greedy), spec))
    return Table(experiment.env.id, episodes, seed, greedy, bouts, ratings(list(sources), bouts, seed))


def _contenders(sources: Sequence[str], trust_code: bool) -> tuple[dict[str, Policy], Experiment, Sequence[Path]]:
    """The policies by source, the experiment of the first, and the folders of its plug-ins."""
    policies = {}
    for text in sources:
        named, _, name = text.partition(":")
        source = source_of(named, ())
        policies[text] = load_policy(source.folder, name=name or None, base=(source.home,), trust_code=trust_code)
    run = run_of(source_of(sources[0].partition(":")[0], ()).folder)
    experiment = run.experiment()
    trust.require_own_code(run, trust_code, experiment)
    trust.enter_profile(run, trust_code)
    return policies, experiment, run.base


# ------------------------------------------------------------------------------------------------ playing


def _played(pair: dict[str, Policy], experiment: Experiment, wanted: EpisodeSet, greedy: bool) -> list[EpisodeResult]:
    agents, seed = wanted.spec.agents, wanted.seed
    seated = {agent: {(ONE, OTHER)[place % 2]: 1.0} for place, agent in enumerate(agents)}
    both = {"policies": dict.fromkeys(pair, PolicySettings()), "match": seated}
    who = Match(experiment.model_copy(update=both), agents)
    players = MultiPolicyActor({name: policy.net for name, policy in pair.items()}, list(pair), who, {})
    with Generators(seed).active():
        return play_episodes(trained_actor(players, greedy, seed), wanted, policies=players)


def _bout(one: str, other: str, played: Sequence[EpisodeResult], spec: EnvSpec) -> Bout:
    names = [f"policy/{name}/return" for name in (ONE, OTHER)]
    both = [[each.metrics[name] for name in names] for each in played if all(name in each.metrics for name in names)]
    if not both:
        raise TiltyardError(f"no episode had agents of both {one} and {other}", "increase --episodes")
    wins, losses = sum(a > b for a, b in both), sum(a < b for a, b in both)
    own = {
        agent: [each.metrics[f"{agent}_return"] for each in played if f"{agent}_return" in each.metrics]
        for agent in spec.agents
    }
    seats = {agent: fmean(values) for agent, values in own.items() if values}
    returns = (fmean(a for a, _ in both), fmean(b for _, b in both))
    return Bout(one, other, wins, len(both) - wins - losses, losses, returns, seats)


# ------------------------------------------------------------------------------------------------ ratings


def ratings(policies: Sequence[str], bouts: Sequence[Bout], seed: int) -> list[Rating]:
    """Elo ratings by maximum likelihood (Bradley and Terry), strongest first.

    Intervals resample the shares of wins, draws and losses (Dirichlet, with a prior of one episode). Each pair gets one
    extra draw: otherwise a policy that never lost would be infinitely strong.
    """
    places = {name: place for place, name in enumerate(policies)}
    rng = np.random.default_rng(seed)
    counts = [np.array([bout.wins, bout.draws, bout.losses]) for bout in bouts]
    # wins of [row] against [column]; index 0: as played
    score = np.zeros((RESAMPLES + 1, len(policies), len(policies)))
    for bout, count in zip(bouts, counts, strict=True):
        resampled = rng.dirichlet(count + 1 / 3, RESAMPLES) * count.sum()
        wins, draws, losses = np.concatenate([count[None], resampled]).T
        score[:, places[bout.one], places[bout.other]] += wins + draws / 2
        score[:, places[bout.other], places[bout.one]] += losses + draws / 2
    score += 0.5 * (score + score.swapaxes(1, 2) > 0)
    elo = _strengths(score)
    low, high = np.percentile(elo[1:], [2.5, 97.5], axis=0)
    # A policy that won everything lies at the end of its interval.
    low, high = np.minimum(low, elo[0]), np.maximum(high, elo[0])
    totals = {name: np.zeros(3, int) for name in policies}  # wins, draws, losses
    for bout, count in zip(bouts, counts, strict=True):
        totals[bout.one] += count
        totals[bout.other] += count[::-1]
    found = [
        Rating(name, float(elo[0, place]), float(low[place]), float(high[place]), *totals[name].tolist())
        for name, place in places.items()
    ]
    return sorted(found, key=lambda each: -each.elo)


def _strengths(score: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The most likely ratings [R, N] of scores [R, N, N], by Newton's method with limited steps."""
    games, won = score + score.swapaxes(1, 2), score.sum(2)
    strength = np.zeros(won.shape)  # log strengths, mean 0
    for _ in range(_ROUNDS):
        chance = 1 / (1 + np.exp(strength[:, None, :] - strength[:, :, None]))
        missing = won - (games * chance).sum(2)
        bend = games * chance * chance.swapaxes(1, 2)
        curvature = bend.sum(2)[:, :, None] * np.eye(won.shape[1]) - bend + 1  # + 1 keeps the mean
        step = np.linalg.solve(curvature, missing[:, :, None])[:, :, 0]
        longest = np.abs(step).max(1, keepdims=True)
        strength += step / np.maximum(1, longest)
        if longest.max() < _CLOSE:
            break
    return np.asarray(MIDDLE + SCALE / np.log(10) * strength)
