"""Envs of EnvPool, which are compiled and step in threads, `envpool:NAME`: one row (EnvPool) or many (EnvPools).

Both are its own pool, so that what is trained on and what is evaluated are the same env. Needs envpool
(`pip install 'tiltyard[envpool]'`), three quarters of a gigabyte with its games and models. A pool is seeded when it is
made, which takes milliseconds for CartPole and half a second for an Atari game; to go on without a seed takes neither.

    EnvPool's step      on a row that goes on   its next observation
                        on one that has ended   the first of the next episode; its action is not looked at
    EnvPool's truncated in the step of the limit, also of episodes that end by themselves in it: see `_Rows.step`
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import envpool
import gymnasium
import numpy as np
from envpool.registration import registry
from gymnasium import spaces

from tiltyard.envs.episode_stats import row_seeds
from tiltyard.errors import ConfigError, Problem, UseError, did_you_mean
from tiltyard.plugins.resolve import short
from tiltyard.processes.resources import usable_cores

if TYPE_CHECKING:
    from tiltyard.types import Array

_ATARI = "envpool.atari"
# By EnvPool's own packages. Those whose limit only cuts: elsewhere it may be a rule, MiniGrid pays by the time left.
_ONLY_CUT = {f"envpool.{name}" for name in ("classic_control", "box2d", "toy_text")} | {
    f"envpool.mujoco.{name}" for name in ("gym", "dmc", "metaworld", "robotics")
}
# Those that draw without a screen. MuJoCo's need OpenGL and end the process where there is none.
_DRAWN = {f"envpool.{name}" for name in ("atari", "classic_control", "box2d", "minigrid", "highway", "jumanji", "pgx")}
_LEFT_OUT = {
    "envpool.vizdoom": "it writes files into the folder it is started in; doom:basic, ... are ViZDoom's scenarios",
}
_OURS = {
    "num_envs": "set engine.envs",
    "num_threads": "leave it out: there is one per usable core",
    "max_num_players": "leave it out",
    "seed": "set seed",
    "env_seed": "set seed",
    "reward_clip": "set env.reward_clip=1, which leaves reported returns whole",
    **dict.fromkeys(("batch_size", "thread_affinity_offset", "base_path", "gym_reset_return_info"), "leave it out"),
    **dict.fromkeys(("task", "task_name", "env_name"), "the name after envpool: says it"),
}
_FROM_ONE = ("max_episode_steps", "frame_skip", "stack_num", "frame_stack", "noop_max", "img_height", "img_width")


class EnvPool(gymnasium.Env[Any, Any]):
    """One row. Equal seeds and actions give equal episodes."""

    def __init__(self, name: str, *, render_mode: str | None = None, **options: Any) -> None:
        self._name, self._home = name, _home(name)
        self._options = options
        _check_options(name, options)
        with warnings.catch_warnings():  # of bounds that are rounded to float32
            warnings.simplefilter("ignore")
            spec = envpool.make_spec(name, **options)
            self.observation_space = _observed(spec.observation_space)
            self.action_space = _acted(spec.action_space)
        if spec.config.max_num_players > 1:
            said = f"envpool:{name} has {spec.config.max_num_players} players, and envpool: takes envs with one"
            raise UseError(said, "envs with several agents are those of PettingZoo's kind")
        self._limit: int = spec.config.max_episode_steps
        self.frames_per_step: int = spec.config.frame_skip if self._home == _ATARI else 1
        drawn = self._home in _DRAWN
        self.metadata = {"render_modes": ["rgb_array"] if drawn else []}
        if self._home == _ATARI:
            self.metadata["render_fps"] = 60
        self.render_mode = render_mode if drawn else None
        self._row: _Rows | None = None

    def many(self, seeds: Array, threads: int) -> _Rows:
        """A pool of this env, one row per seed."""
        more: dict[str, Any] = {"render_mode": self.render_mode} if self.render_mode else {}
        cut = self._limit if self._home in _ONLY_CUT and self._limit < 2**30 else None
        if cut is not None:
            more["max_episode_steps"] = cut + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = envpool.make_gymnasium(
                self._name,
                num_envs=len(seeds),
                num_threads=threads,
                env_seed=seeds.tolist(),
                **{**self._options, **more},
            )
            return _Rows(pool, self.action_space, cut)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Without a seed the env's random stream goes on where it is."""
        super().reset(seed=seed)
        if seed is None and self._row is None:
            seed = int(self.np_random.integers(2**31))
        if seed is not None:
            self._row = None  # ends its thread
            self._row = self.many(np.array([seed % 2**31]), 1)
        assert self._row is not None
        return self._row.begin(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._row is not None, "reset() comes first"
        obs, reward, terminated, truncated = self._row.step([action])
        return _of_row(obs, 0), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        return None if self._row is None else self._row.pool.render()[0]

    def close(self) -> None:
        self._row = None


class _Rows:
    """A pool whose rows begin when they are told to and whose flags say why a row ended.

    `cut` is the limit that is kept here, where the pool was given a longer one: what ends in the pool ends by itself.
    """

    def __init__(self, pool: Any, action: spaces.Space[Any], cut: int | None) -> None:
        self.pool, self._cut = pool, cut
        self._ids = np.arange(pool.num_envs, dtype=np.int32)
        self._over = np.zeros(pool.num_envs, bool)  # which rows the pool itself has brought to an end
        self._late = np.zeros(pool.num_envs, bool)  # which were ended here
        self._idle = np.zeros((pool.num_envs, *(action.shape or ())), action.dtype)
        first, _ = pool.reset()
        self._waiting = {row: _of_row(first, row) for row in range(pool.num_envs)}  # that nobody has begun yet

    def begin(self, row: int) -> Any:
        """The first observation of a row's next episode; the row's random stream goes on."""
        if row not in self._waiting:
            if self._over[row]:
                # By the pool's own step: an Atari game with `episodic_life` goes on with the next life only then.
                begun = self._ids[self._over]
                obs = self.pool.step(self._idle[begun], begun)[0]
                self._over[begun] = False
            else:
                begun = self._ids[self._late] if self._late[row] else self._ids[row : row + 1]
                obs, _ = self.pool.reset(begun)
                self._late[begun] = False
            # All that ended together at once, because the others are about to begin too: a call wakes a thread.
            self._waiting |= {each: _of_row(obs, index) for index, each in enumerate(begun.tolist())}
        return self._waiting.pop(row)

    def step(self, actions: list[Any]) -> tuple[Any, Array, Array, Array]:
        obs, reward, terminated, truncated, info = self.pool.step(np.asarray(actions))
        self._over = terminated | truncated
        if self._cut is not None:
            truncated = (info["elapsed_step"] >= self._cut) & ~terminated
            self._late = truncated.copy()
        elif "terminated" in info:  # Atari: the game is over, also in the step of the limit
            terminated = terminated | (self._over & (info["terminated"] != 0))
            truncated = truncated & ~terminated
        return obs, reward.astype(np.float64), terminated, truncated


class EnvPools:
    """Many rows of one env, stepped by `threads` threads: as many as there are usable cores when not said.

    All rows are seeded once, from the seed of the first episode; later episodes continue their row's random stream. So
    a row's episodes are those of an EnvPool that is reset with the row's seed (`row_seeds`) and then without one.
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


def _home(name: str) -> str:
    """EnvPool's own package that an env is of."""
    if name not in registry.specs:
        newest = {_stem(known): known for known in sorted(registry.specs)}
        near = difflib.get_close_matches(_stem(name), newest, n=1)
        hint = f"did you mean {newest[near[0]]!r}?" if near else "envpool.list_all_envs() names them all"
        raise UseError(f"EnvPool has no env {name!r}", hint)
    home: str = registry.specs[name][0]
    if home in _LEFT_OUT:
        raise UseError(f"envpool:{name} cannot be used here", _LEFT_OUT[home])
    return home


def _stem(name: str) -> str:
    return name.rpartition("-v")[0].lower() or name.lower()


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Options are the settings of the env that EnvPool itself names; those that are ours by other names are refused."""
    usual = envpool.make_spec(name).config._asdict()
    known = [key for key in usual if key not in _OURS]
    found: list[Problem] = []
    for key, value in options.items():
        what, hint = "", ""
        if key in usual and key in _OURS:
            what, hint = "is not for env.options", _OURS[key]
        elif key not in usual:
            what, hint = f"envpool:{name} takes no option {key!r}", did_you_mean(key, known)
        elif not _fits(value, usual[key]):
            what, hint = f"is no {type(usual[key]).__name__}", f"EnvPool's own is {usual[key]!r}"
        elif key in _FROM_ONE and value < 1:
            what, hint = "is no whole number from 1 on", f"EnvPool's own is {usual[key]!r}"
        if what:
            found.append(Problem(f"env.options.{key}", short(value), what, hint))
    if found:
        raise ConfigError(found, "the env's options")


def _fits(value: Any, usual: Any) -> bool:
    """Whether a value has the type of EnvPool's own; whole numbers are numbers too, and lists are tuples."""
    if isinstance(usual, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(usual, tuple | list):
        return isinstance(value, tuple | list)
    return type(value) is type(usual)


# ---------------------------------------------------------------------------------------------- spaces


def _observed(space: Any) -> spaces.Space[Any]:
    """The space of what really comes: without bounds where there are none, bits as bool."""
    if isinstance(space, Mapping | spaces.Dict):
        return spaces.Dict({key: _observed(inner) for key, inner in space.items()})
    if isinstance(space, spaces.MultiBinary):
        return spaces.Box(0, 1, space.shape, np.bool_)  # type: ignore[arg-type]
    return _unbounded(space)


def _acted(space: Any) -> spaces.Space[Any]:
    """A box of whole numbers is a choice per number."""
    if isinstance(space, Mapping | spaces.Dict):
        raise UseError("this env of EnvPool's takes actions of several parts", "choose one whose action is one array")
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "i":
        return spaces.MultiDiscrete(space.high - space.low + 1, dtype=np.dtype(space.dtype).name, start=space.low)
    return _unbounded(space)


def _unbounded(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """EnvPool writes the smallest positive and the largest float where it means that there is no bound."""
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
        return space
    kind: Any = np.dtype(space.dtype).type
    ends = np.finfo(kind)
    low = np.where(space.low == ends.tiny, -np.inf, space.low)
    high = np.where(space.high == ends.max, np.inf, space.high)
    return spaces.Box(low, high, space.shape, kind)


def _of_row(obs: Any, row: int) -> Any:
    """One row's observation of those of several."""
    if isinstance(obs, Mapping):
        return {key: _of_row(inner, row) for key, inner in obs.items()}
    return obs[row]
