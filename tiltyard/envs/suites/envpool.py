"""Compiled envs of EnvPool that step in threads, `envpool:NAME`: one row (EnvPool) or many (EnvPoolVector).

Both use EnvPool's pool, so training and evaluation use the same env. Needs envpool (`pip install 'tiltyard[envpool]'`),
0.75 GB with its games and models. A pool is seeded when it is made, which takes milliseconds for CartPole and half a
second for an Atari game; a reset without a seed does not need a new pool.

    EnvPool's step       of a running row   its next observation
                         of an ended row    the first observation of the next episode; the action is ignored
    EnvPool's truncated  at the time limit, also if the episode terminates in that step: see `_Rows.step`
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

import envpool
import gymnasium
import numpy as np
from envpool.registration import registry
from gymnasium import spaces

from tiltyard.envs.episodes import row_seeds
from tiltyard.errors import ConfigError, Problem, UseError, did_you_mean
from tiltyard.plugins.resolve import short
from tiltyard.processes.resources import usable_cores
from tiltyard.types import Array

_ATARI = "envpool.atari"
# EnvPool's packages whose time limit only truncates. In others it may be a rule: MiniGrid rewards the time left.
_LIMIT_TRUNCATES = {f"envpool.{name}" for name in ("classic_control", "box2d", "toy_text")} | {
    f"envpool.mujoco.{name}" for name in ("gym", "dmc", "metaworld", "robotics")
}
# Packages that draw without a screen. MuJoCo's need OpenGL and end the process if there is none.
_DRAWS = {f"envpool.{name}" for name in ("atari", "classic_control", "box2d", "minigrid", "highway", "jumanji", "pgx")}
_UNSUPPORTED = {
    "envpool.vizdoom": "it writes files into the current folder; use doom:basic, ..., which are ViZDoom's scenarios"
}
_TILTYARD_SETTINGS = {
    "num_envs": "set engine.envs",
    "num_threads": "remove it; there is one thread per usable core",
    "max_num_players": "remove it",
    "seed": "set seed",
    "env_seed": "set seed",
    "reward_clip": "set env.reward_clip=1, which does not change reported returns",
    **dict.fromkeys(("batch_size", "thread_affinity_offset", "base_path", "gym_reset_return_info"), "remove it"),
    **dict.fromkeys(("task", "task_name", "env_name"), "remove it; env.id names the env"),
}
_AT_LEAST_ONE = ("max_episode_steps", "frame_skip", "stack_num", "frame_stack", "noop_max", "img_height", "img_width")


class EnvPool(gymnasium.Env[Any, Any]):
    """One row. Equal seeds and actions give equal episodes. `options` are env.options."""

    def __init__(self, name: str, *, render_mode: str | None = None, **options: Any) -> None:
        self._name, self._package = name, _package_of(name)
        self._options = options
        _check_options(name, options)
        with warnings.catch_warnings():  # about bounds that are rounded to float32
            warnings.simplefilter("ignore")
            spec = envpool.make_spec(name, **options)
            self.observation_space = _observation_space(spec.observation_space)
            self.action_space = _action_space(spec.action_space)
        if spec.config.max_num_players > 1:
            message = f"envpool:{name} has {spec.config.max_num_players} players; envpool: supports one"
            raise UseError(message, "for several agents use a PettingZoo env")
        self._limit: int = spec.config.max_episode_steps
        self.frames_per_step: int = spec.config.frame_skip if self._package == _ATARI else 1
        rendered = self._package in _DRAWS
        self.metadata = {"render_modes": ["rgb_array"] if rendered else []}
        if self._package == _ATARI:
            self.metadata["render_fps"] = 60
        self.render_mode = render_mode if rendered else None
        self._row: _Rows | None = None

    def many(self, seeds: Array, threads: int) -> _Rows:
        """A pool of this env, one row per seed."""
        extra: dict[str, Any] = {"render_mode": self.render_mode} if self.render_mode else {}
        limit = self._limit if self._package in _LIMIT_TRUNCATES and self._limit < 2**30 else None
        if limit is not None:
            extra["max_episode_steps"] = limit + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = envpool.make_gymnasium(
                self._name,
                num_envs=len(seeds),
                num_threads=threads,
                env_seed=seeds.tolist(),
                **{**self._options, **extra},
            )
            return _Rows(pool, self.action_space, limit)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Without a seed, the env's random stream continues."""
        super().reset(seed=seed)
        if seed is None and self._row is None:
            seed = int(self.np_random.integers(2**31))
        if seed is not None:
            self._row = None  # ends its thread
            self._row = self.many(np.array([seed % 2**31]), 1)
        assert self._row is not None
        return self._row.begin(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._row is not None, "call reset() first"
        obs, reward, terminated, truncated = self._row.step([action])
        return _of_row(obs, 0), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        return None if self._row is None else self._row.pool.render()[0]

    def close(self) -> None:
        self._row = None


class _Rows:
    """A pool whose rows are reset on request and whose flags say why a row ended.

    `limit` is applied here; the pool has a longer one, so an episode that ends in the pool has terminated.
    """

    def __init__(self, pool: Any, action: spaces.Space[Any], limit: int | None) -> None:
        self.pool, self._limit = pool, limit
        self._ids = np.arange(pool.num_envs, dtype=np.int32)
        self._over = np.zeros(pool.num_envs, bool)  # rows that ended in the pool
        self._late = np.zeros(pool.num_envs, bool)  # rows that were truncated here
        self._idle = np.zeros((pool.num_envs, *(action.shape or ())), action.dtype)
        first, _ = pool.reset()
        self._waiting = {row: _of_row(first, row) for row in range(pool.num_envs)}  # whose first episode has not begun

    def begin(self, row: int) -> Any:
        """The first observation of a row's next episode; the row's random stream continues."""
        if row not in self._waiting:
            if self._over[row]:
                # Only the pool's own step continues an Atari game with `episodic_life` with its next life.
                begun = self._ids[self._over]
                obs = self.pool.step(self._idle[begun], begun)[0]
                self._over[begun] = False
            else:
                begun = self._ids[self._late] if self._late[row] else self._ids[row : row + 1]
                obs, _ = self.pool.reset(begun)
                self._late[begun] = False
            # Reset all rows that ended in this step by one call, because each call wakes a thread.
            self._waiting |= {each: _of_row(obs, index) for index, each in enumerate(begun.tolist())}
        return self._waiting.pop(row)

    def step(self, actions: list[Any]) -> tuple[Any, Array, Array, Array]:
        obs, reward, terminated, truncated, info = self.pool.step(np.asarray(actions))
        self._over = terminated | truncated
        if self._limit is not None:
            truncated = (info["elapsed_step"] >= self._limit) & ~terminated
            self._late = truncated.copy()
        elif "terminated" in info:  # Atari: the game is over, even in the step of the limit
            terminated = terminated | (self._over & (info["terminated"] != 0))
            truncated = truncated & ~terminated
        return obs, reward.astype(np.float64), terminated, truncated


class EnvPoolVector:
    """Many rows of one env, stepped by `threads` threads; by default one per usable core.

    All rows are seeded once, from the seed of the first episode; later episodes continue their row's random stream. So
    a row's episodes equal those of an EnvPool that is first reset with the row's seed (`row_seeds`), then without one.
    """

    restore_mode = "fresh"

    def __init__(self, name: str, rows: int, options: dict[str, Any], threads: int | None) -> None:
        self._one = EnvPool(name, **options)
        self.observation_space: gymnasium.Space[Any] = self._one.observation_space
        self._count, self._threads = rows, min(rows, threads or usable_cores())
        self._rows: _Rows | None = None  # made when the first seed is known

    def step(self, actions: list[Any]) -> tuple[Any, Array, Array, Array]:
        assert self._rows is not None
        return self._rows.step(actions)

    def reset_row(self, row: int, seed: int | None) -> Any:
        if self._rows is None:
            assert seed is not None
            self._rows = self._one.many(row_seeds(seed, self._count), self._threads)
        return self._rows.begin(row)

    def close(self) -> None:
        self._rows = None  # ends its threads


# ---------------------------------------------------------------------------------------------- names and options


def _package_of(name: str) -> str:
    """The package of EnvPool that an env belongs to."""
    if name not in registry.specs:
        newest = {_stem(known): known for known in sorted(registry.specs)}
        near = difflib.get_close_matches(_stem(name), newest, n=1)
        hint = f"did you mean {newest[near[0]]!r}?" if near else "envpool.list_all_envs() lists them"
        raise UseError(f"EnvPool has no env {name!r}", hint)
    package: str = registry.specs[name][0]
    if package in _UNSUPPORTED:
        raise UseError(f"envpool:{name} is not supported", _UNSUPPORTED[package])
    return package


def _stem(name: str) -> str:
    return name.rpartition("-v")[0].lower() or name.lower()


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check env.options against EnvPool's own; refuse those that are settings of Tiltyard."""
    defaults = envpool.make_spec(name).config._asdict()
    known = [key for key in defaults if key not in _TILTYARD_SETTINGS]
    found: list[Problem] = []
    for key, value in options.items():
        what, hint = "", ""
        if key in defaults and key in _TILTYARD_SETTINGS:
            what, hint = "cannot be set in env.options", _TILTYARD_SETTINGS[key]
        elif key not in defaults:
            what, hint = f"envpool:{name} has no option {key!r}", did_you_mean(key, known)
        elif not _fits(value, defaults[key]):
            what, hint = f"must be of type {type(defaults[key]).__name__}", f"EnvPool's default is {defaults[key]!r}"
        elif key in _AT_LEAST_ONE and value < 1:
            what, hint = "must be an integer, at least 1", f"EnvPool's default is {defaults[key]!r}"
        if what:
            found.append(Problem(f"env.options.{key}", short(value), what, hint))
    if found:
        raise ConfigError(found, "the env's options")


def _fits(value: Any, default: Any) -> bool:
    """Whether a value has the type of EnvPool's default; an int may be a float and a list a tuple."""
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, tuple | list):
        return isinstance(value, tuple | list)
    return type(value) is type(default)


# ---------------------------------------------------------------------------------------------- spaces


def _observation_space(space: Any) -> spaces.Space[Any]:
    """The space of the actual observations: infinite bounds where there are none, bits as bool."""
    if isinstance(space, Mapping | spaces.Dict):
        return spaces.Dict({key: _observation_space(inner) for key, inner in space.items()})
    if isinstance(space, spaces.MultiBinary):
        return spaces.Box(0, 1, space.shape, np.bool_)  # type: ignore[arg-type]
    return _unbounded(space)


def _action_space(space: Any) -> spaces.Space[Any]:
    """A Box of integers becomes a MultiDiscrete."""
    if isinstance(space, Mapping | spaces.Dict):
        raise UseError("EnvPool envs with several actions are not supported", "choose one whose action is one array")
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "i":
        return spaces.MultiDiscrete(space.high - space.low + 1, dtype=np.dtype(space.dtype).name, start=space.low)
    return _unbounded(space)


def _unbounded(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """EnvPool writes the smallest positive and the largest float to mean no bound."""
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
        return space
    kind: Any = np.dtype(space.dtype).type
    ends = np.finfo(kind)
    low = np.where(space.low == ends.tiny, -np.inf, space.low)
    high = np.where(space.high == ends.max, np.inf, space.high)
    return spaces.Box(low, high, space.shape, kind)


def _of_row(obs: Any, row: int) -> Any:
    """The observation of one row."""
    if isinstance(obs, Mapping):
        return {key: _of_row(inner, row) for key, inner in obs.items()}
    return obs[row]
