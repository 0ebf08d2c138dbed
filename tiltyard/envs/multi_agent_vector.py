"""Copies of an env with several agents as a group of rows: row = copy x agents + the agent's place.

An agent acts while it is in the env's `agents`; meanwhile its row is valid. Otherwise the row sees zeros, what the
policy chooses for it goes nowhere, and `valid` is false. Episodes belong to the env, ends to agents:

    terminated or truncated   its part is over: the row waits, invalid, until the env's episode ends
    gone without either       counted as truncated where it went; it may come back, and then begins like a new one
    comes (late, or back)     `first` is true: it has no memory and no history
    nobody left, or the time limit is reached: the env is reset with its next seed, and every row begins

All rows of a copy have the same episode number, seed and length (calls of the env, not decisions of the agent).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.envs.checks import info_scalars
from tiltyard.envs.env_errors import attributed
from tiltyard.envs.obs_buffer import FaultyObs
from tiltyard.envs.spaces import PREVIOUS_ACTION, PREVIOUS_REWARD
from tiltyard.envs.vector import RESETTING, EnvGroup
from tiltyard.errors import TiltyardError
from tiltyard.types import EnvSpec, EpisodeEnd, Tree

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays


class ParallelGroup(EnvGroup):
    """An EnvGroup with as many copies of an env as its rows make, a row per agent."""

    def _allocate(self, previous: bool) -> None:
        super()._allocate(previous)
        self.over = np.zeros(self.rows, bool)  # whose part in the running episode is over for good
        self.decisions = np.zeros(self.rows, np.int64)  # of each agent in the running episode
        self.last_words: list[dict[str, float]] = [{} for _ in range(self.rows)]  # scalars of each agent's last info
        self._answers: list[tuple[Any, Any]] = [({}, {})] * self.copies  # obs and infos as the env last gave them

    # ------------------------------------------------------------------------------------------ stepping

    def _advance_all(self, actions: list[Any]) -> None:
        self.valid[:] = self.acting
        self.decisions += self.acting
        copy = 0
        try:
            for copy, ahead in enumerate(self._aheads):  # envs of their own step side by side
                at = copy * self.agents
                ahead({p: actions[at + p] for p in range(self.agents) if self.acting[at + p]}, self._frameskip)
            for copy in range(self.copies):
                self._beats[0] += 1
                self._advance(copy, actions[self.tally.span(copy)])
        except KeyboardInterrupt:  # the user's own
            raise
        except BaseException as error:
            raise self._blamed_on_copy(error, copy, "step") from error

    def _advance(self, copy: int, actions: list[Any]) -> None:
        """One env step of one copy: as many calls as frameskip says, fewer when somebody ends, comes or goes."""
        env, at = self.envs[copy], copy * self.agents
        acting = np.flatnonzero(self.acting[self.tally.span(copy)]).tolist()
        rewards = dict.fromkeys(acting, 0.0)
        left, over, cut = self._frameskip, {}, {}
        while left:
            answer = env.step({place: actions[place] for place in acting})
            left -= 1
            fault = env.step_fault(answer, acting)
            if fault:
                raise FaultyObs(fault, "", answer)
            obs, reward, terminated, truncated, infos = answer
            for place in acting:
                rewards[place] += float(env.of(reward, place))
            over = {place: bool(env.of(terminated, place)) for place in acting}
            cut = {place: bool(env.of(truncated, place)) for place in acting}
            there = {place for place in env.present() if not self.over[at + place]}
            if there != set(acting) or any(over.values()) or any(cut.values()):
                break
        self.tally.saved_frames[self.tally.span(copy)] += left * (self._frames // self._frameskip)
        for place in range(self.agents):
            row, acted = at + place, place in rewards
            self._raw[row] = rewards[place] if acted else 0.0
            self._over[row] = acted and over[place]
            self.over[row] |= acted and (over[place] or cut[place])
            self._cut[row] = acted and (cut[place] or place not in there)
            if acted:
                self.infos[row] = env.of(infos, place) or {}
                if env.of(obs, place) is not None or not over[place]:
                    self._see(copy, place, obs, infos, self.buffer.write)
        self._answers[copy] = obs, infos

    def _see(self, copy: int, place: int, obs: Any, infos: Any, store: Callable[[int, Any], None]) -> None:
        """Store what an agent sees now, and what it may do."""
        env, row = self.envs[copy], copy * self.agents + place
        try:
            store(row, env.of(obs, place))
            if self.mask is not None and not (self._over[row] or self._cut[row]):
                self._store_mask(row, env.of(obs, place), env.of(infos, place) or {})
        except FaultyObs as error:
            raise self._attributed(error, row, "step") from None

    # ------------------------------------------------------------------------------------------ coming and going

    def _finish_ended(self) -> list[EpisodeEnd]:
        late = self.tally.late()
        short = None
        if late is not None:
            short = self.tally.shortened(np.asarray(self._over) | np.asarray(self._cut) | ~self.acting)
            self._cut = [bool(cut) for cut in np.asarray(self._cut) | (late & self.acting)]
            self.over |= late
        self.terminated[:] = self._over
        self.truncated[:] = self._cut
        self.truncated &= ~self.terminated
        self.first[:] = False
        left = [copy for copy in range(self.copies) if not self._settle(copy)]
        ends = [self._finish(copy) for copy in left]
        if self._previous:
            self.obs[PREVIOUS_ACTION][~self.acting | self.first] = 0
            self.obs[PREVIOUS_REWARD][~self.acting | self.first] = 0
        if self.first.any():
            self._check_finite({})
        self.tally.set_countdown()
        if short is not None:  # whoever was cut short, the episode was
            short = np.repeat(short.reshape(-1, self.agents).any(axis=1), self.agents)
        return self._whole(ends, short)

    def _settle(self, copy: int) -> bool:
        """Let those go whose part ended, and those begin who came; whether anybody is left to act."""
        env, at = self.envs[copy], copy * self.agents
        for place in range(self.agents):
            row = at + place
            if self._over[row] or self._cut[row]:
                self._leave(row)
        try:
            for place in env.present():
                row = at + place
                if not self.acting[row] and not self.over[row]:
                    self._come(copy, place)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._blamed_on_copy(error, copy, "step") from error
        return bool(self.acting[self.tally.span(copy)].any())

    def _leave(self, row: int) -> None:
        self.buffer.keep_final(row)
        if self._previous:
            for name in (PREVIOUS_ACTION, PREVIOUS_REWARD):
                self.final_obs[name][row] = self.obs[name][row]
        self.last_words[row] = info_scalars(self.infos[row])
        self._clear(row)

    def _clear(self, row: int) -> None:
        self.acting[row] = False
        self.buffer.clear(row)
        if self.mask is not None:
            self.mask[row] = True

    def _come(self, copy: int, place: int) -> None:
        row = copy * self.agents + place
        self._over[row] = self._cut[row] = False
        self.acting[row] = self.first[row] = True
        self._see(copy, place, *self._answers[copy], self.buffer.restart)

    # ------------------------------------------------------------------------------------------ episodes

    def _finish(self, copy: int) -> EpisodeEnd:
        """Say how a copy's episode went, and begin the next one."""
        rows = self.tally.span(copy)
        if self.at_end is not None:
            self.at_end(rows.start)
        total = float(self.tally.total[rows][self.decisions[rows] > 0].mean())
        end = self.tally.end(rows.start, total, self._told(rows))
        self.begin(copy)
        self.first[rows] = True
        return end

    def _told(self, rows: slice) -> dict[str, float]:
        """What agents reported last, averaged by name, and the return of each that took part."""
        told: dict[str, list[float]] = {}
        for words in self.last_words[rows]:
            for name, value in words.items():
                told.setdefault(name, []).append(value)
        means = {name: sum(values) / len(values) for name, values in told.items()}
        took_part = np.flatnonzero(self.decisions[rows] > 0).tolist()
        totals = self.tally.total[rows].tolist()
        return means | {f"{self.spec.agents[place]}_return": totals[place] for place in took_part}

    def restart(self, copy: int, seed: int) -> None:
        """Reset a copy; those that are there see its beginning, the rows of others are empty."""
        self._beats[0] += 1
        before, self._beats[1] = self._beats[1], RESETTING
        rows = self.tally.span(copy)
        self.over[rows], self.decisions[rows] = False, 0
        self._over[rows] = self._cut[rows] = [False] * self.agents
        self.last_words[rows] = [{} for _ in range(self.agents)]
        for row in range(rows.start, rows.stop):
            self._clear(row)
        try:
            answer = self.envs[copy].reset(seed=seed)
            self._beats[1] = before
            fault = self.envs[copy].reset_fault(answer)
            if fault:
                raise FaultyObs(fault, "", answer)
            self._answers[copy] = answer
            for place in self.envs[copy].present():
                self._come(copy, place)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._blamed_on_copy(error, copy, "reset") from error

    def replay(self, copy: int, actions: list[Array]) -> list[float] | None:
        rows = self.tally.span(copy)
        totals = np.zeros(self.agents)
        self.tally.saved_frames[rows] = 0
        for together in zip(*(self.codec.decode_rows(own) for own in actions), strict=True):
            self.tick()
            self.decisions[rows] += self.acting[rows]
            for row in range(rows.start, rows.stop):
                self.buffer.shift_row(row)
            self._advance(copy, list(together))
            totals += self._raw[rows]
            if not self._settle(copy):
                return None
        return [float(total) for total in totals]

    @property
    def counters(self) -> Arrays:
        return {**super().counters, "acting": self.acting, "over": self.over, "decisions": self.decisions}

    def save(self) -> Tree:
        return {**super().save(), "last_words": [dict(words) for words in self.last_words]}

    def load(self, tree: Tree) -> list[str]:
        said = super().load(tree)
        for row, words in enumerate(tree.get("last_words", [])[: self.rows]):
            if self.tally.length[row] > 0:  # else its episode was cut
                self.last_words[row] = dict(words)
        return said

    def _where(self, row: int) -> str:
        return f"{super()._where(row)}, agent {self.spec.agents[row % self.agents]!r}"

    def _blamed_on_copy(self, error: BaseException, copy: int, doing: str) -> TiltyardError:
        """What is no single agent's fault."""
        row = self.tally.span(copy).start
        return attributed(error, super()._where(row), doing)


def group_class(spec: EnvSpec) -> type[EnvGroup]:
    """What steps the rows of an env copy by copy."""
    return ParallelGroup if spec.parallel else EnvGroup
