"""The rows of a group of envs as arrays [B, ...], shared by the group (vector.py) and the code that steps its envs.

Owns the memory that a `Step` shows, the masks, and the errors that name a row; calls no env.

    obs_buffer.py     observations and their stacks        episode_stats.py  seeds, lengths, returns, time limits
    episode_state.py  saving and restoring episodes        watchdog.py       what the heartbeat means
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.envs.actions import flat_mask
from tiltyard.envs.checks import mask_fault, mask_in
from tiltyard.envs.env_errors import InvalidEnvData, diverged, env_error
from tiltyard.envs.episode_state import History
from tiltyard.envs.episode_stats import EpisodeStats, Seeds, episode_seed, first_limits
from tiltyard.envs.obs_buffer import ObsBuffer
from tiltyard.envs.spaces import PREVIOUS_ACTION, PREVIOUS_REWARD, previous_specs
from tiltyard.envs.watchdog import PROCESS_HEARTBEAT
from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import EnvSpec, EpisodeEnd

if TYPE_CHECKING:
    from gymnasium import Space

    from tiltyard.types import Array, Arrays


@dataclass(frozen=True)
class GroupConfig:
    """What a group of envs is made from."""

    env: Env
    spec: EnvSpec
    rows: int  # one per agent of each copy of the env
    seed: int
    base: Sequence[Path] = ()  # folders of plug-in files
    role: str = "train"  # name of the random stream that episode seeds come from
    render: bool = False  # whether row 0 can draw itself
    previous: bool = False  # whether observations include the previous action and reward
    first_row: int = 0  # number of row 0 among all rows of the run
    seeds: Seeds | None = None  # seeds of episodes; by default drawn from seed, role and row
    heartbeat: Array | None = None  # [0] counts env calls, [1] is the phase; by default that of this process

    @property
    def agents(self) -> int:
        return len(self.spec.agents)

    @property
    def copies(self) -> int:
        return self.rows // self.agents

    @property
    def first_copy(self) -> int:
        return self.first_row // self.agents

    def make_stats(self) -> EpisodeStats:
        """Counters of the running episodes, with their seeds and limits."""
        env, first = self.env, None
        if env.decorrelate and self.role == "train":
            copies = range(self.first_copy, self.first_copy + self.copies)
            first = first_limits(self.seed, self.role, copies, env.decorrelate)
        seeds = partial(episode_seed, self.seed, self.role) if self.seeds is None else self.seeds
        limit = env.time_limit or self.spec.episode_limit
        return EpisodeStats(self.rows, self.agents, self.first_row, seeds, self.spec.frameskip, limit, first)


class RowData:
    """Arrays and lists with one entry per row. Arrays are changed in place, never replaced."""

    def __init__(self, config: GroupConfig, space: Space[Any], restore_mode: str) -> None:
        rows, action = config.rows, config.spec.action
        self.config, self.restore_mode = config, restore_mode
        self.heartbeat = (PROCESS_HEARTBEAT if config.heartbeat is None else config.heartbeat).data
        self.stats = config.make_stats()
        self.buffer = ObsBuffer(space, rows, config.env.frame_stack, config.env.strict)
        self.obs: Arrays = dict(self.buffer.now)
        self.final_obs: Arrays = dict(self.buffer.final)
        if config.previous:
            for name, spec in previous_specs(action).items():
                self.obs[name] = np.zeros((rows, *spec.shape), np.float32)
                self.final_obs[name] = np.zeros((rows, *spec.shape), np.float32)
        self.mask = np.ones((rows, action.mask_size), bool) if config.spec.masked else None
        self._options = [part.options for part in action.parts if part.kind == "categorical"]
        self.reward = np.zeros(rows, np.float32)  # for learning: scaled and clipped
        self.terminated, self.truncated = np.zeros(rows, bool), np.zeros(rows, bool)
        self.first, self.valid = np.ones(rows, bool), np.ones(rows, bool)
        self.acting = np.ones(rows, bool)  # rows whose next action takes effect
        self.any_first = True
        self.history = History(rows, action.columns) if restore_mode == "rerun" else None
        self.infos: list[Any] = [{}] * rows  # of the last step: of the ended episode where one ended
        # As the envs returned them in the last step.
        self.raw_reward: list[float] = [0.0] * rows
        self.raw_terminated: list[bool] = [False] * rows
        self.raw_truncated: list[bool] = [False] * rows
        self._require_probed_shapes()

    def _require_probed_shapes(self) -> None:
        """Raise UseError when the env observes something else than when it was probed."""
        found = {name: (array.shape[1:], array.dtype.name) for name, array in self.obs.items()}
        probed = {name: (spec.shape, spec.dtype) for name, spec in self.config.spec.obs.items()}
        if found != probed:
            changed = "model.previous, env.frame_stack or the env itself" if self.config.previous else "the env itself"
            raise UseError(
                f"env {self.config.env.id} observes {found}; expected {probed} from its probe", f"{changed} changed"
            )

    def begin_episode(self, copy: int) -> int:
        """Reset the counters of a copy for its next episode and return that episode's seed."""
        rows, seed = self.stats.span(copy), self.stats.begin(copy)
        if self.history is not None:
            self.history.restart(rows)
        if self.config.previous:
            self.obs[PREVIOUS_ACTION][rows] = self.obs[PREVIOUS_REWARD][rows] = 0
        return seed

    def keep_final(self, row: int) -> None:
        """Copy a row's observation to `final_obs` before its next episode overwrites it."""
        self.buffer.keep_final(row)
        if self.config.previous:
            for name in (PREVIOUS_ACTION, PREVIOUS_REWARD):
                self.final_obs[name][row] = self.obs[name][row]

    def store_mask(self, row: int, obs: Any, info: Any) -> None:
        assert self.mask is not None
        given = mask_in(obs, info)
        if given is None:
            raise InvalidEnvData(
                "the action mask is missing: it must be in every observation or every info", "action_mask", None
            )
        mask = flat_mask(self.config.spec.action, given)
        fault = mask_fault(mask, self._options)
        if fault:
            raise InvalidEnvData(fault, "action_mask", given)
        self.mask[row] = mask

    def without_shortened(self, ends: list[EpisodeEnd], short: Array | None) -> list[EpisodeEnd]:
        """The episodes to report: the return of one that env.decorrelate shortened would mislead."""
        return ends if short is None else [end for end in ends if not short[end.row - self.config.first_row]]

    # ------------------------------------------------------------------------------------------ errors

    def where(self, row: int, *, agent: bool = True) -> str:
        """The place of a row in an error message; `agent` adds the agent's name where there are several."""
        stats, config = self.stats, self.config
        place = f"row {config.first_row + row}, episode {stats.number[row]}, env step {stats.length[row]}"
        name = f", agent {config.spec.agents[row % config.agents]!r}" if agent and config.spec.parallel else ""
        return f"env {config.env.id}, {place}{name}"

    def env_error(self, error: BaseException, row: int, method: str, *, agent: bool = True) -> TiltyardError:
        return env_error(error, self.where(row, agent=agent), method)

    def diverged(self, what: str, row: int, batch: dict[str, object]) -> TiltyardError:
        return diverged(what, self.where(row), batch)

    def check_finite(self, batch: dict[str, object]) -> None:
        """Raise DivergedError if an observation holds NaN or infinity; `batch` is saved with it."""
        bad = self.buffer.check_finite()
        if bad is not None:
            row, name, values = bad
            word = "NaN" if np.isnan(values).any() else "infinity"
            raise self.diverged(f"observation {name!r} holds {word}", row, {**batch, f"obs.{name}": values})
