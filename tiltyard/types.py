"""The dataclasses and protocols that data flows through. Imports the standard library only (numpy in annotations).

Arrays are time-major: [T, B, ...] is T steps of B rows, a row being one agent of one env. `terminated` means that
the value of the next state is zero; `truncated` means that it is not, and `final_obs` is what to bootstrap from;
`first` marks rows whose recurrent state is reset before they act; `valid` is false for rows without a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Arrays = dict[str, NDArray[Any]]
else:  # at run time the names exist and numpy need not
    Array = Any
    Arrays = dict[str, Any]

# What checkpoints are made of: nested dicts and lists of arrays, numbers, strings, booleans and None.
Tree = Any


# ---------------------------------------------------------------------------------------------- what an env is


@dataclass(frozen=True)
class ArraySpec:
    """One observation as it is stored: shape and dtype after conversion, and what its numbers mean.

    kind: box (numbers), discrete (one category of `options[0]`), multi_discrete (one category per element),
    multi_binary (0/1 per element), text (hashed word ids, 0 is padding).
    """

    kind: Literal["box", "discrete", "multi_discrete", "multi_binary", "text"]
    shape: tuple[int, ...]
    dtype: str
    options: tuple[int, ...] = ()
    image: bool = False  # three dimensions, the smallest of first and last being channels: conv nets apply


@dataclass(frozen=True)
class ActionPart:
    """One leaf of an action space: some columns of the flat action, which is float32 [..., columns].

    categorical: one column holding an index below `options`; binary: `columns` columns of 0/1;
    continuous: `columns` columns in [-1, 1] (mapped to [low, high]) where bounds are finite, raw numbers elsewhere.
    """

    kind: Literal["categorical", "binary", "continuous"]
    columns: int
    options: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class ActionSpec:
    """The flat action's parts in order, and the tree that puts an env's own action back together."""

    parts: tuple[ActionPart, ...]
    tree: Mapping[str, Any]

    @property
    def columns(self) -> int:
        return sum(part.columns for part in self.parts)

    @property
    def mask_size(self) -> int:
        """Width of an action mask: the options of all categorical parts, one after another."""
        return sum(part.options for part in self.parts if part.kind == "categorical")


@dataclass(frozen=True)
class EnvSpec:
    """What models, engines and data need to know about an env, found by probing it in a child process."""

    obs: Mapping[str, ArraySpec]
    action: ActionSpec
    agents: tuple[str, ...] = ("agent",)  # the agents of one env, one row each; at times some have nothing to decide
    parallel: bool = False  # agents act at the same time and have names, as in PettingZoo's parallel envs
    masked: bool = False  # the env has action masks
    frameskip: int = 1  # simulator frames per env step: the setting times the frames that the env skips itself
    episode_limit: int | None = None
    restore_mode: Literal["state", "rerun", "fresh"] = "rerun"  # how a running episode is restored from a checkpoint
    renders: bool = False  # the env renders RGB arrays
    takes_options: bool = False  # the env has set_options(): its options can change while it is trained in
    env_bytes: int = 0  # memory per env, measured by the probe
    step_seconds: float = 0.0  # time per step, measured by the probe
    notes: tuple[str, ...] = ()  # messages from the probe to the user

    @property
    def filmable(self) -> bool:
        """Whether there is anything to film: a rendering or an image observation."""
        return self.renders or any(item.image for item in self.obs.values())


# ---------------------------------------------------------------------------------------------- what flows


@dataclass(frozen=True)
class EpisodeEnd:
    """A finished episode of one env, whose first row is `row`. With several agents `total` is their mean return."""

    row: int
    number: int
    seed: int
    total: float
    length: int
    frames: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    returns: Mapping[str, float] = field(default_factory=dict)
    """with several policies: the mean return of each policy's agents"""
    begun: int = 0  # with several policies: the version of the weights that it began with


@dataclass
class Step:
    """What a group of envs returns: the next observations and the results of the last actions. Arrays are [B, ...]."""

    obs: Arrays
    reward: Array
    terminated: Array
    truncated: Array
    first: Array
    valid: Array
    final_obs: Arrays
    """rows where terminated or truncated: the last observation of the ended episode; other rows are undefined"""
    mask: Array | None  # [B, mask_size] bool: allowed categorical options for `obs`
    episodes: list[EpisodeEnd]


@dataclass
class Rollout:
    """T steps of B rows, learned from once. Arrays are [T, B, ...] unless noted otherwise."""

    obs: Arrays
    first: Array
    action: Array  # [T, B, columns] float32
    mask: Array | None
    log_prob: Array
    value: Array  # in units of reward
    reward: Array
    terminated: Array
    truncated: Array
    bootstrap: Array
    """value of the observation after step t, where that is not value[t + 1]: at truncations and at t = T - 1"""
    valid: Array
    state0: Arrays  # [T / bptt, B, ...] recurrent state before each chunk of bptt steps; empty without a recurrent core
    policy_version: Array
    policy: Array | None = None
    """with several policies: the index of the one that acted; it changes only where an episode begins"""

    def rows(self, first: int, end: int) -> Rollout:
        """A view of some rows."""
        return self._columns(slice(first, end))

    def played_by(self, place: int, since: int = 0) -> Rollout | None:
        """Copies of the rows in which policy number `place` acted, valid where it did; None if there are none.

        Rows of a version before `since` belong to a policy that was replaced.
        """
        if self.policy is None:
            return self
        own = self.valid & (self.policy == place)
        if since:
            own &= self.policy_version >= since
        rows = own.any(0).nonzero()[0]
        if not len(rows):
            return None
        part = self._columns(rows) if len(rows) < own.shape[1] else replace(self)
        part.valid = own[:, rows]
        return part

    def _columns(self, chosen: Any) -> Rollout:
        parts: dict[str, Any] = {name: array[:, chosen] for name, array in self.columns().items()}
        obs = {name: array[:, chosen] for name, array in self.obs.items()}
        state0 = {name: array[:, chosen] for name, array in self.state0.items()}
        return Rollout(**{"mask": None, **parts}, obs=obs, state0=state0)

    def columns(self) -> Arrays:
        """Every array but observations and recurrent states."""
        own = {name: value for name, value in vars(self).items() if name not in ("obs", "state0")}
        return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class Progress:
    """How far a run is, counted across resumes."""

    env_steps: int = 0
    frames: int = 0
    updates: int = 0
    episodes: int = 0
    seconds: float = 0.0

    def plus(self, env_steps: int, frames: int, updates: int, episodes: int, seconds: float) -> Progress:
        """The progress after one more engine step."""
        more = (env_steps, frames, updates, episodes, seconds)
        return Progress(*(own + new for own, new in zip(vars(self).values(), more, strict=True)))


@dataclass(frozen=True)
class Report:
    """What one engine step did."""

    progress: Progress
    metrics: Mapping[str, float]
    episodes: list[EpisodeEnd]
    time_split: Mapping[str, float]  # seconds spent on env, inference, learn, other in this step
    events: tuple[str, ...] = ()  # messages for events.jsonl


@dataclass
class PolicyState:
    """A policy between steps: weights with normalisers, optimiser, and the settings in effect."""

    weights: Arrays
    optimiser: Tree
    settings: dict[str, float]
    used: dict[str, float] = field(default_factory=dict)
    """settings used by the newest update; empty before the first, and with engines that report them only as metrics"""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    env_steps: int
    score: float | None
    progress: Progress


@dataclass
class Episode:
    """Recorded data of one episode: T decisions. `obs` has T + 1 entries, the last being the final observation."""

    obs: Arrays
    action: Array
    reward: Array
    terminated: bool
    truncated: bool
    seed: int
    info: list[dict[str, Any]] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- seams


class Engine(Protocol):
    """What happens inside the process tree that learns. The loop calls it, never the other way round."""

    def describe(self) -> list[str]:
        """Lines for the console at the start: model and parameter count, processes, batch, derived numbers."""

    def step(self) -> Report:
        """Collect one batch of experience and learn from it."""

    def save(self, folder: Path, *, cut: bool = False) -> dict[str, Tree]:
        """Private state, and each policy in the common format, as trees by their names in a checkpoint. Their arrays
        may share the engine's memory until its next step. Its processes write their own state below `folder`.
        `cut`, after a step that failed: the state before that step, without its running episodes."""

    def load(self, folder: Path) -> list[str]:
        """Restore a checkpoint; returns messages about what could not be restored exactly."""

    def snapshot(self, policy: str | None = None) -> PolicyState:
        """A copy of a policy's learning state, by default the first policy's; cheap."""

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        """Between steps: replace weights and change settings; returns the values now in effect. Samples collected with
        the former weights are not learned from."""

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Between steps: give every env these options before its next reset."""

    def past(self) -> dict[str, dict[int, Arrays]]:
        """A copy of the past versions of policies, by pool name and env step."""

    def close(self) -> None:
        """Close every process and handle that the engine opened."""
