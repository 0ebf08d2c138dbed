"""Many copies of one env stepped together as arrays [B, ...]: the only maker of `Step`.

Owns stepping: frameskip, reward scale and clip, previous action and reward, ends and beginnings. What else rows have:

    buffers.py   observations and their stacks      tally.py   seeds, lengths and returns of episodes, the time limit
    comeback.py  running episodes, to disk and back blame.py   sentences about what went wrong

    step(action): row t goes on      -> obs[t] = next observation, first[t] false
                  row t has ended    -> final_obs[t] = its last observation, obs[t] = first one of the next episode,
                                        first[t] true, terminated[t] or truncated[t] true (never both)

Every array of a Step belongs to the group and is overwritten by the next call: keep copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.envs import episode_state
from tiltyard.envs.actions import ActionCodec, flat_mask
from tiltyard.envs.checks import info_scalars, mask_fault, mask_in, reset_fault, reward_fault, shown
from tiltyard.envs.env_errors import attributed, diverged
from tiltyard.envs.episode_stats import EpisodeStats, Seeds, episode_seed, first_limits
from tiltyard.envs.isolation.pool import make_copies
from tiltyard.envs.make import require_agents
from tiltyard.envs.obs_buffer import FaultyObs, ObsBuffer, all_finite
from tiltyard.envs.spaces import PREVIOUS_ACTION, PREVIOUS_REWARD, previous_specs
from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import EnvSpec, EpisodeEnd, Step, Tree

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays


IDLE, STEPPING, RESETTING = range(3)  # what a group is doing, for whoever watches its beats
HERE = np.zeros(2, np.int64)  # beats of all groups in this process that were given none of their own


class EnvGroup:
    """`rows` copies of an env. `first_row` is the number of row 0 among all rows of the run; `render` is for row 0.

    Where an env has several agents (parallel_rows.py), `tally.span` tells which rows are those of one copy.
    """

    def __init__(
        self,
        env: Env,
        spec: EnvSpec,
        rows: int,
        seed: int,
        *,
        base: Sequence[Path],
        role: str = "train",
        render: bool = False,
        previous: bool = False,
        first_row: int = 0,
        seeds: Seeds | None = None,
        beats: Array | None = None,
    ) -> None:
        """In beats[0] env calls are counted and in beats[1] it is told what is going on: a reader can see a hang."""
        self._beats = (HERE if beats is None else beats).data
        self.env, self.spec, self.rows, self.first_row = env, spec, rows, first_row
        self.agents = len(spec.agents)  # rows of one copy
        self.copies = rows // self.agents
        self._frameskip = env.frameskip  # calls of the env's step per env step
        self._frames = spec.frameskip  # simulator frames per env step: more where the env skips frames itself
        self._seed_of_making = episode_seed(seed, f"{role}/make", first_row // self.agents, 0)
        own = partial(episode_seed, seed, role)
        limit = env.time_limit or spec.episode_limit
        places = range(first_row // self.agents, (first_row + rows) // self.agents)
        first = first_limits(seed, role, places, env.decorrelate) if env.decorrelate and role == "train" else None
        seeds = own if seeds is None else seeds
        self.tally = EpisodeStats(rows, self.agents, first_row, seeds, self._frames, limit, first)
        self.restore_mode = spec.restore_mode
        self.codec = ActionCodec(spec.action)
        self._options = [part.options for part in spec.action.parts if part.kind == "categorical"]
        self.envs: list[Any] = self._make_envs(base, render)
        self._calls = [made.step for made in self.envs]
        self._aheads = [made.ahead for made in self.envs] if env.isolate != "none" else []
        self.buffer = ObsBuffer(self.envs[0].observation_space, rows, env.frame_stack, env.strict)
        self._allocate(previous)
        self._compare(previous)

    def _make_envs(self, base: Sequence[Path], render: bool) -> list[Any]:
        made = make_copies(self.env, base, self.copies, render=render, seed=self._seed_of_making, told=self.tick)
        require_agents(self.env, made[0], several=self.spec.parallel)
        return made

    def _allocate(self, previous: bool) -> None:
        rows, columns = self.rows, self.spec.action.columns
        self.obs: Arrays = dict(self.buffer.now)
        self.final_obs: Arrays = dict(self.buffer.final)
        self._previous = previous
        if previous:
            for name, spec in previous_specs(self.spec.action).items():
                self.obs[name] = np.zeros((rows, *spec.shape), np.float32)
                self.final_obs[name] = np.zeros((rows, *spec.shape), np.float32)
        self.mask = np.ones((rows, self.spec.action.mask_size), bool) if self.spec.masked else None
        self.reward = np.zeros(rows, np.float32)  # for learning: scaled and clipped
        self.terminated, self.truncated = np.zeros(rows, bool), np.zeros(rows, bool)
        self.first, self.valid = np.ones(rows, bool), np.ones(rows, bool)
        self.acting = np.ones(rows, bool)  # which rows the next action is a decision in
        self.history = episode_state.History(rows, columns) if self.restore_mode == "rerun" else None
        self.infos: list[Any] = [{}] * rows  # as the last step gave them: of the ended episode where one ended
        self.at_end: Callable[[int], None] | None = None  # told a row whose episode has ended, before its env is reset
        self._raw: list[float] = [0.0] * rows
        self._over: list[bool] = [False] * rows
        self._cut: list[bool] = [False] * rows
        self._any_first = True

    def _compare(self, previous: bool) -> None:
        """The env made here must be the one that was probed."""
        found = {name: (array.shape[1:], array.dtype.name) for name, array in self.obs.items()}
        probed = {name: (spec.shape, spec.dtype) for name, spec in self.spec.obs.items()}
        if found != probed:
            raise UseError(
                f"env {self.env.id} observes {found}, and {probed} was expected",
                "model.previous, env.frame_stack or the env itself changed" if previous else "the env itself changed",
            )

    # ------------------------------------------------------------------------------------------ stepping

    def reset(self) -> Step:
        """Begin the next episode in every row."""
        for copy in range(self.copies):
            self.begin(copy)
        self.reward[:] = 0
        self.terminated[:] = self.truncated[:] = False
        self.first[:] = self._any_first = True
        self.tally.set_countdown()
        self._check_finite({})
        return self.current()

    def current(self, episodes: list[EpisodeEnd] | None = None) -> Step:
        """Where the rows are now: what the last reset, step or load left."""
        return Step(
            self.obs, self.reward, self.terminated, self.truncated, self.first, self.valid,
            self.final_obs, self.mask, [] if episodes is None else episodes,
        )  # fmt: skip

    def step(self, action: Array) -> Step:
        """Act in every row: float32 [B, columns]. Beyond the envs' own time: about 1 us per row and 15 us per call."""
        if not all_finite(action):
            row = int(np.flatnonzero(~np.isfinite(action).all(axis=1))[0])
            raise self._diverged(f"the action is {shown(action[row])}", row, {"action": action})
        if self.history is not None:
            self.history.append(action)
        self.buffer.shift()
        self._advance_all(self.codec.decode_rows(action))
        raw = np.array(self._raw, np.float64)
        self.tally.step(raw)
        if not math.isfinite(sum(self._raw)) and not np.isfinite(raw).all():
            row = int(np.flatnonzero(~np.isfinite(raw))[0])
            raise self._diverged(f"the reward is {raw[row]}", row, {"reward": raw, "action": action})
        self._check_finite({"action": action, "reward": raw})
        self._learning_reward(raw)
        if self._previous:
            self.obs[PREVIOUS_ACTION][:] = action
            self.obs[PREVIOUS_REWARD][:, 0] = self.reward
        return self.current(self._finish_ended())

    def _advance_all(self, actions: list[Any]) -> None:
        """One env step of every row: the hot loop. Its three branches are what most envs never need."""
        raw, over, cut, infos, write = self._raw, self._over, self._cut, self.infos, self.buffer.write
        masks, plain, row = self.mask is not None, self._frameskip == 1, 0
        target, shape, dtype = self.buffer.plain
        beats = self._beats
        try:
            for ahead, action in zip(self._aheads, actions, strict=False):  # envs of their own step side by side
                ahead(action, self._frameskip)
            for row, call in enumerate(self._calls):
                beats[0] += 1
                if plain:
                    obs, reward, over[row], cut[row], infos[row] = call(actions[row])
                    raw[row] = reward if type(reward) is float else _number(reward)
                else:
                    obs = self._skip(row, actions[row])
                if type(obs) is np.ndarray and obs.dtype == dtype and obs.shape == shape:
                    target[row] = obs
                else:
                    write(row, obs)
                if masks and not (over[row] or cut[row]):
                    self._store_mask(row, obs, infos[row])
        except KeyboardInterrupt:  # the user's own
            raise
        except BaseException as error:
            raise self._attributed(error, row, "step") from error

    def _skip(self, row: int, action: Any) -> Any:
        """One env step of several frames: rewards are added, an end ends it."""
        total, left = 0.0, self._frameskip
        while left:
            obs, reward, over, cut, info = self._calls[row](action)
            total += _number(reward)
            left -= 1
            if over or cut:
                break
        self.tally.saved_frames[row] += left * (self._frames // self._frameskip)
        self._raw[row], self._over[row], self._cut[row], self.infos[row] = total, over, cut, info
        return obs

    def _learning_reward(self, raw: Array) -> None:
        scale, clip = self.env.reward_scale, self.env.reward_clip
        scaled = raw * scale if scale != 1.0 else raw
        self.reward[:] = scaled if clip is None else np.clip(scaled, -clip, clip)

    # ------------------------------------------------------------------------------------------ episodes

    def _finish_ended(self) -> list[EpisodeEnd]:
        """Set terminated, truncated and first; close the episodes that ended and begin their rows' next ones."""
        late = self.tally.late()
        if self._any_first:
            self.terminated[:] = self.truncated[:] = self.first[:] = self._any_first = False
        if late is None and not (True in self._over or True in self._cut):
            return []
        self.terminated[:] = self._over
        self.truncated[:] = self._cut
        short = None
        if late is not None:
            short = self.tally.shortened(self.terminated | self.truncated)
            self.truncated |= late
        self.truncated &= ~self.terminated  # an end that is real is nothing to bootstrap from
        np.logical_or(self.terminated, self.truncated, out=self.first)
        ends = [self._finish(row) for row in np.flatnonzero(self.first).tolist()]
        if ends:
            self._any_first = True
            self._check_finite({})
        self.tally.set_countdown()
        return self._whole(ends, short)

    def _whole(self, ends: list[EpisodeEnd], short: Array | None) -> list[EpisodeEnd]:
        """Those that are told of: the return of an episode that was shortened would be no return."""
        return ends if short is None else [end for end in ends if not short[end.row - self.first_row]]

    def _finish(self, row: int) -> EpisodeEnd:
        """Keep a row's last observation, begin its next episode, and say how the ended one went."""
        self.buffer.keep_final(row)
        if self._previous:
            for name in (PREVIOUS_ACTION, PREVIOUS_REWARD):
                self.final_obs[name][row] = self.obs[name][row]
        if self.at_end is not None:
            self.at_end(row)
        info = self.infos[row]
        end = self.tally.end(row, float(self.tally.total[row]), info_scalars(info) if info else {})
        self.begin(row)
        return end

    def begin(self, copy: int) -> None:
        """The next episode of a copy, with its own seed."""
        rows, seed = self.tally.span(copy), self.tally.begin(copy)
        if self.history is not None:
            self.history.restart(rows)
        if self._previous:
            self.obs[PREVIOUS_ACTION][rows] = self.obs[PREVIOUS_REWARD][rows] = 0
        self.restart(copy, seed)

    def restart(self, row: int, seed: int) -> None:
        """Reset a row's env and store its first observation."""
        self._beats[0] += 1
        before, self._beats[1] = self._beats[1], RESETTING
        try:
            answer = self.envs[row].reset(seed=seed)
            self._beats[1] = before
            fault = reset_fault(answer)
            if fault:
                raise FaultyObs(fault, "", answer)
            self.buffer.restart(row, answer[0])
            if self.mask is not None:
                self._store_mask(row, *answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._attributed(error, row, "reset") from error

    def replay(self, row: int, actions: list[Array]) -> list[float] | None:
        """Act again as in an earlier life of this row; its return, or None when the episode ends on the way.

        Takes and gives lists, because a copy with several agents has several rows.
        """
        total = 0.0
        self.tally.saved_frames[row] = 0
        for action in self.codec.decode_rows(actions[0]):
            self.tick()
            obs = self._skip(row, action)
            if self._over[row] or self._cut[row]:
                return None
            total += self._raw[row]
            self.buffer.shift_row(row)
            self.buffer.write(row, obs)
        return [total]

    def _store_mask(self, row: int, obs: Any, info: Any) -> None:
        assert self.mask is not None
        given = mask_in(obs, info)
        if given is None:
            raise FaultyObs(
                "the action mask is missing: it must be in every observation or every info", "action_mask", None
            )
        mask = flat_mask(self.spec.action, given)
        fault = mask_fault(mask, self._options)
        if fault:
            raise FaultyObs(fault, "action_mask", given)
        self.mask[row] = mask

    # ------------------------------------------------------------------------------------------ faults

    def _where(self, row: int) -> str:
        now = self.tally
        return f"env {self.env.id}, row {self.first_row + row}, episode {now.number[row]}, env step {now.length[row]}"

    def _attributed(self, error: BaseException, row: int, doing: str) -> TiltyardError:
        return attributed(error, self._where(row), doing)

    def _diverged(self, what: str, row: int, batch: dict[str, object]) -> TiltyardError:
        return diverged(what, self._where(row), batch)

    def _check_finite(self, batch: dict[str, object]) -> None:
        bad = self.buffer.check_finite()
        if bad is not None:
            row, name, values = bad
            word = "NaN" if np.isnan(values).any() else "infinity"
            raise self._diverged(f"observation {name!r} holds {word}", row, {**batch, f"obs.{name}": values})

    # ------------------------------------------------------------------------------------------ the rest

    def tick(self) -> None:
        """Tell whoever watches that an env came back."""
        self._beats[0] += 1

    @property
    def counters(self) -> Arrays:
        """The arrays [B] that a checkpoint keeps, by name."""
        ends = {"terminated": self.terminated, "truncated": self.truncated, "first": self.first}
        return {**self.tally.counters, "reward": self.reward, **ends}

    @property
    def frames_taken(self) -> int:
        """Simulator frames of all copies, see Tally."""
        return self.tally.frames_taken

    def skip_episodes(self, count: int) -> None:
        """Leave out the next episodes of every row: others have had those seeds."""
        self.tally.number += count

    def save(self) -> Tree:
        """Everything needed to go on exactly here; running episodes are not disturbed."""
        return episode_state.save(self)

    def load(self, tree: Tree) -> list[str]:
        """Go on where `save` was called; sentences about episodes that could not be brought back."""
        said = episode_state.load(self, tree)
        self._any_first = True
        self.tally.set_countdown()
        return said

    def render_row(self, row: int) -> Array | None:
        """A row's current picture, as its env draws it."""
        try:
            frame: Any = self.envs[row // self.agents].render()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._attributed(error, row, "render") from error
        if isinstance(frame, list):
            frame = frame[-1] if frame else None
        return None if frame is None else np.asarray(frame)

    @property
    def raw_reward(self) -> list[float]:
        """What the envs themselves paid in the last step."""
        return self._raw

    @property
    def fps(self) -> float:
        """Env steps per second of the env's own time, for films."""
        metadata = self.envs[0].metadata or {}
        frames = metadata.get("render_fps")
        return max(1.0, float(frames) / self._frames) if isinstance(frames, int | float) and frames > 0 else 30.0

    def close(self) -> None:
        """Close every env. What a closing env raises is of no use to anybody any more."""
        for made in self.envs:
            try:
                made.close()
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001
                continue
        self.envs, self._calls, self._aheads = [], [], []


def _number(reward: Any) -> float:
    fault = reward_fault(reward)
    if fault and "instead" in fault:
        raise FaultyObs(fault, "reward", reward)
    return float(reward)
