"""From the chosen policies to actions: noise, trained policies, the user's code, and the mixture of all of them.

Every actor acts in one copy of an env, with a row for each agent, and draws its random numbers from the episode's seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.collection.policies import NOISE, PolicyChoice
from tiltyard.envs.actions import ActionCodec
from tiltyard.envs.episodes import episode_seed
from tiltyard.envs.vector import EnvGroup
from tiltyard.evaluation.rollouts import Choose, MakeActor, ScriptedPolicy, objects_actor, row_seed, trained_actor
from tiltyard.plugins import resolve
from tiltyard.types import ActionSpec, Array, Arrays, EnvSpec


def pick(choices: Sequence[PolicyChoice], seed: int) -> int:
    """The place of the policy that plays the episode with this seed, by the weights."""
    if len(choices) == 1:
        return 0
    shares = np.cumsum([choice.weight for choice in choices])
    drawn = np.random.default_rng(episode_seed(seed, "mixture", 0, 0)).random() * shares[-1]
    return min(int(np.searchsorted(shares, drawn, side="right")), len(choices) - 1)


class Mixture:
    """The chosen policies, loaded. Each episode is played by one of them."""

    def __init__(self, choices: Sequence[PolicyChoice], spec: EnvSpec, trust_code: bool) -> None:
        self._choices, self._metas = choices, [choice.meta for choice in choices]
        self._seats: list[Callable[[int], dict[str, Any]]] = [lambda row: {} for _ in choices]
        self._makers = [self._make(place, choice, spec, trust_code) for place, choice in enumerate(choices)]

    def _make(self, place: int, choice: PolicyChoice, spec: EnvSpec, trust_code: bool) -> MakeActor:
        if choice.kind in NOISE:
            return noise_actor(choice.kind, choice.numbers, spec.action)
        if choice.kind == "own":
            return own_actor(choice, spec)
        net = _load_run(choice, spec, trust_code)
        if (match := getattr(net, "match", None)) is not None:  # several policies play against each other
            self._seats[place] = lambda row: {"seat": match.policies[net.seats[row]]}
        actor = trained_actor(net, bool(choice.greedy), 0, per_episode=True)
        return epsilon_actor(actor, choice.numbers["epsilon"], spec.action) if choice.numbers else actor

    def begin(self, group: EnvGroup) -> Choose:
        """The actor of one copy of the env."""
        assert group.copies == 1
        actors = [make(group) for make in self._makers]
        seed, chosen = -1, actors[0]

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            nonlocal seed, chosen
            if group.stats.seeds[0] != seed:
                seed = group.stats.seeds[0]
                chosen = actors[pick(self._choices, seed)]
            return chosen(obs, first, mask)

        return choose

    def describe(self, row: int, seed: int) -> dict[str, Any]:
        """Meta data of a row's episode: its policy, and the run and checkpoint of that."""
        place = pick(self._choices, seed)
        return {**self._metas[place], **self._seats[place](row)}


def _load_run(choice: PolicyChoice, spec: EnvSpec, trust_code: bool) -> Any:
    """The net of a run's checkpoint, or all of its policies."""
    from tiltyard.engines.policies.frozen import frozen_nets
    from tiltyard.engines.policies.matchmaking import VersionPool, fill_version_pools, read_versions
    from tiltyard.engines.policies.policy_set import make_actor
    from tiltyard.models.policy import load_policy
    from tiltyard.run.folder import run_of

    folder = Path(choice.source)
    run = run_of(folder)
    experiment = run.experiment()
    nets = {}
    for name in experiment.learning:
        policy = load_policy(folder, name=name, trust_code=trust_code)
        policy.require_same(spec)
        nets[name] = policy.net
    pools = {name: VersionPool(past, experiment, spec, run.base) for name, past in experiment.past.items()}
    fill_version_pools(pools, {name: read_versions(folder, name) for name in pools})
    return make_actor(experiment, spec, nets, frozen_nets(experiment, spec, run.base), pools, measured=True)


# ---------------------------------------------------------------------------------------------- noise


class Noise:
    """Random actions of one row: float32 [columns], as `ActionCodec` encodes them.

    Brownian motion and Ornstein-Uhlenbeck noise move a number for each continuous column, which is the action, and one
    for each option of a categorical column, of which the highest that is allowed is chosen; a binary column is the sign
    of its number. So all options are equally likely, and choices last for a while.
    """

    def __init__(self, kind: str, numbers: dict[str, float], action: ActionSpec) -> None:
        self._kind, self._numbers, self._action = kind, numbers, action
        self._codec = ActionCodec(action)
        widths = [part.options if part.kind == "categorical" else part.columns for part in action.parts]
        self._size = sum(widths)
        self._bounded = np.ones(self._size, bool)  # reflected at -1 and 1
        for part, end in zip(action.parts, np.cumsum(widths).tolist(), strict=True):
            if part.kind == "continuous":
                self._bounded[end - part.columns : end] = np.isfinite(part.low) & np.isfinite(part.high)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(episode_seed(seed, "noise", 0, 0))
        self._last: Array | None = None

    def act(self, mask: Array | None) -> Array:
        if self._kind in ("random", "sticky"):
            again = self._last is not None and self._kind == "sticky" and self._rng.random() < self._numbers["p"]
            if not again or not self._allowed(mask):
                self._last = self._uniform(mask)
            assert self._last is not None
            return self._last
        self._last = self._moved()
        return self._to_action(self._last, mask)

    def _uniform(self, mask: Array | None) -> Array:
        return self._codec.random_rows(self._rng, 1, None if mask is None else mask[None])[0]  # type: ignore[no-any-return]

    def _allowed(self, mask: Array | None) -> bool:
        """Whether the last action is allowed now."""
        if mask is None or self._last is None:
            return True
        column = offset = 0
        for part in self._action.parts:
            if part.kind == "categorical":
                if not mask[offset + int(self._last[column])]:
                    return False
                offset += part.options
            column += part.columns
        return True

    def _moved(self) -> Array:
        """The numbers after one more step; the first are drawn from the distribution that they keep."""
        sigma = self._numbers["sigma"]
        if self._kind == "ou":
            keep = 1.0 - self._numbers["theta"]
            if self._last is None:
                return self._rng.normal(0.0, sigma / np.sqrt(1.0 - keep * keep), self._size)
            return keep * self._last + self._rng.normal(0.0, sigma, self._size)
        if self._last is None:
            return np.where(self._bounded, self._rng.uniform(-1, 1, self._size), self._rng.normal(size=self._size))
        moved = self._last + self._rng.normal(0.0, sigma, self._size)
        return np.where(self._bounded, _reflected(moved), moved)

    def _to_action(self, numbers: Array, mask: Array | None) -> Array:
        columns: list[Array] = []
        at = offset = 0
        for part in self._action.parts:
            if part.kind == "categorical":
                values = numbers[at : at + part.options]
                if mask is not None:
                    values = np.where(mask[offset : offset + part.options], values, -np.inf)
                columns.append(np.array([values.argmax()]))
                offset += part.options
                at += part.options
                continue
            values = numbers[at : at + part.columns]
            columns.append(values > 0 if part.kind == "binary" else values)
            at += part.columns
        return np.concatenate(columns, dtype=np.float32)


def _reflected(values: Array) -> Array:
    """Values beyond -1 or 1, mirrored there."""
    return np.abs((values - 1.0) % 4.0 - 2.0) - 1.0


def noise_actor(kind: str, numbers: dict[str, float], action: ActionSpec) -> MakeActor:
    def begin(group: EnvGroup) -> Choose:
        rows = [Noise(kind, numbers, action) for _ in range(group.rows)]
        chosen = np.zeros((group.rows, action.columns), np.float32)

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            for row, noise in enumerate(rows):
                if group.acting[row]:
                    if first[row]:
                        noise.reset(row_seed(group, row))
                    chosen[row] = noise.act(None if mask is None else mask[row])
            return chosen

        return choose

    return begin


def epsilon_actor(inner: MakeActor, epsilon: float, action: ActionSpec) -> MakeActor:
    """Act as `inner`, but at random with this chance. The inner actor sees every observation, for its memory."""

    def begin(group: EnvGroup) -> Choose:
        choose_inner = inner(group)
        random_rows = noise_actor("random", {}, action)(group)
        rngs = [np.random.default_rng(0)] * group.rows

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            chosen = choose_inner(obs, first, mask).copy()
            noise = random_rows(obs, first, mask)
            for row in range(group.rows):
                if first[row]:
                    rngs[row] = np.random.default_rng(episode_seed(row_seed(group, row), "epsilon", 0, 0))
                if rngs[row].random() < epsilon:
                    chosen[row] = noise[row]
            return chosen

        return choose

    return begin


# ---------------------------------------------------------------------------------------------- your own


class _Own:
    """The user's object or function behind the interface of a scripted policy."""

    def __init__(self, act: Callable[..., Any], reset: Callable[..., Any] | None) -> None:
        self._act, self._takes_mask = act, _takes(act, "mask", 1)
        self._reset, self._takes_seed = reset, reset is not None and _takes(reset, "seed", 0)

    def reset(self, seed: int) -> None:
        if self._reset is not None:
            self._reset(seed) if self._takes_seed else self._reset()

    def act(self, obs: Any, mask: Array | None) -> Any:
        return self._act(obs, mask) if self._takes_mask else self._act(obs)


def own_actor(choice: PolicyChoice, spec: EnvSpec) -> MakeActor:
    """Act with the user's class, one object per agent, or with a function or an object."""
    base = [Path(place) for place in choice.base]
    found: Any = resolve.load(resolve.parse(choice.source, {}, resolve.CONVENTIONAL["policy"], base))

    def make() -> ScriptedPolicy:
        build: Callable[..., Any] | None = found if inspect.isclass(found) else None
        made = found if build is None else build(spec) if _takes(build, "spec", 0) else build()
        return _Own(getattr(made, "act", made), getattr(made, "reset", None))

    return objects_actor(choice.source, make, spec)


def _takes(function: Callable[..., Any], name: str, place: int) -> bool:
    """Whether a function has a parameter of this name, or one at this place that it needs."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled code
        return True
    needed = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD and each.default is each.empty]
    return len(needed) > place or any(each.name == name for each in parameters)
