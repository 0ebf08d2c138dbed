"""Atari 2600 games with the usual preprocessing, `atari:NAME`: one row (Atari) or many in one call (AtariVector).

Both use ALE's vectorised env, so training and evaluation see the same pixels. Needs ale-py (`pip install
'tiltyard[atari]'`), which is under the GPL. Rewards are the game's own; `env.reward_clip` clips them. Seeding reloads
the game and takes 0.1 s, as long as 200 env steps; a reset without a seed takes 6 ms.

    reset(seed)   power on, FIRE, up to `noop_max` idle frames
    env step      `frameskip` frames; the last two are merged (`maxpool`), converted to grey and `size` x `size`
    observation   the last `stack` of those, oldest first
"""

from __future__ import annotations

import re
from typing import Any

import ale_py  # noqa: F401 - first, so that an error names it if it is missing
import gymnasium
import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces

from tiltyard.envs.episodes import row_seeds
from tiltyard.errors import UseError, did_you_mean
from tiltyard.processes.resources import usable_cores
from tiltyard.types import Array

SCREEN = (210, 160)  # pixels of the console, height and width
_NO_SEED = -1  # what ALE takes for none


class Atari(gymnasium.Env[Any, Any]):
    """One game. Equal seeds and actions give equal frames, also with sticky actions.

    The keyword arguments are the keys of `env.options`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}

    def __init__(
        self,
        game: str,
        *,
        frameskip: int = 4,
        stack: int = 4,
        size: int = 84,
        grey: bool = True,
        maxpool: bool = True,
        noop_max: int = 30,
        fire_reset: bool = True,
        sticky: float = 0.0,
        episodic_life: bool = False,
        full_actions: bool = False,
        max_frames: int = 108_000,
        render_mode: str | None = None,
    ) -> None:
        known = roms.get_all_rom_ids()
        if game not in known:
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", game).lower()  # MsPacman, as Gymnasium calls it
            raise UseError(f"unknown Atari game {game!r}", did_you_mean(snake, known))
        whole = {"frameskip": frameskip, "stack": stack, "size": size, "max_frames": max_frames}
        for name, value in {**whole, "noop_max": noop_max}.items():
            lowest = 0 if name == "noop_max" else 1
            if type(value) is not int or value < lowest:
                raise UseError(f"env.options.{name} = {value!r} must be an integer, at least {lowest}", f"set {name}=4")
        if not 0 <= sticky < 1:
            raise UseError(f"env.options.sticky = {sticky!r} must be a probability below 1", "0.25 is usual, 0 is off")
        self.frames_per_step = frameskip
        self.render_mode = render_mode
        self._game, self._grey = game, grey
        self._rules: dict[str, Any] = {
            "frameskip": frameskip,
            "noop_max": noop_max,
            "use_fire_reset": fire_reset,
            "repeat_action_probability": float(sticky),
            "episodic_life": episodic_life,
            "full_action_space": full_actions,
            "max_num_frames_per_episode": max_frames,
            "reward_clipping": False,
        }
        self._view: dict[str, Any] = {
            "img_height": size,
            "img_width": size,
            "grayscale": grey,
            "stack_num": stack,
            "maxpool": maxpool,
        }
        self._one = self.many(1, 1)
        self.action_space = spaces.Discrete(int(self._one.single_action_space.n))
        channels = stack if grey else 3 * stack
        self.observation_space = spaces.Box(0, 255, (channels, size, size), np.uint8)
        # Observations have no colours: a second env with the same seed and actions shows the real screen.
        self._screen: Any = self._make_screen() if render_mode == "rgb_array" else None
        self._drawn: Array | None = None
        self._seeded = False

    def many(self, rows: int, threads: int) -> Any:
        """ALE's vectorised env of this game with these settings."""
        # ALE resets a row in the step after its end, unless it was reset before: here it always was.
        return AtariVectorEnv(self._game, rows, num_threads=threads, **self._rules, **self._view)

    def _make_screen(self) -> Any:
        height, width = SCREEN
        view: dict[str, Any] = {"img_height": height, "img_width": width, "grayscale": False, "stack_num": 1}
        return AtariVectorEnv(self._game, 1, num_threads=1, **self._rules, **view)

    def planes(self, obs: Array) -> Array:
        """[B, stack, H, W] as it is; [B, stack, H, W, 3] as [B, stack * 3, H, W]."""
        if self._grey:
            return obs
        rows, _, height, width, _ = obs.shape
        return np.moveaxis(obs, -1, -3).reshape(rows, -1, height, width)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Without a seed, the random stream of starts and sticky actions continues."""
        super().reset(seed=seed)
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(2**31))
        self._seeded = True
        chosen = np.array([_NO_SEED if seed is None else seed % 2**31])
        obs, _ = self._one.reset(seed=chosen)
        if self._screen is not None:
            self._drawn = self._screen.reset(seed=chosen)[0][0, 0]
        return self.planes(obs)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = np.array([action])
        obs, reward, terminated, truncated, _ = self._one.step(actions)
        if self._screen is not None:
            self._drawn = self._screen.step(actions)[0][0, 0]
        return self.planes(obs)[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        return self._drawn

    def close(self) -> None:
        self._one = self._screen = None  # ends their threads


class AtariVector:
    """Many rows of one game, stepped by `threads` threads; by default one per usable core.

    All rows are seeded once, from the seed of the first episode; later episodes continue their row's random stream. So
    a row's episodes equal those of an Atari that is first reset with the row's seed (`row_seeds`), then without one.
    """

    restore_mode = "fresh"

    def __init__(self, game: str, rows: int, options: dict[str, Any], threads: int | None) -> None:
        one = Atari(game, **options)
        self.observation_space: gymnasium.Space[Any] = one.observation_space
        self._planes = one.planes
        self._all = one.many(rows, min(rows, threads or usable_cores()))
        self._waiting: dict[int, Array] = {}  # first observations of rows whose first episode has not begun
        self._seeded = False
        self._rows = rows
        self._mask = np.zeros(rows, bool)
        one.close()

    def step(self, actions: list[Any]) -> tuple[Array, Array, Array, Array]:
        obs, reward, terminated, truncated, _ = self._all.step(np.asarray(actions))
        return self._planes(obs), reward.astype(np.float64), terminated, truncated

    def reset_row(self, row: int, seed: int | None) -> Array:
        if not self._seeded:
            assert seed is not None
            self._seeded = True
            obs, _ = self._all.reset(seed=row_seeds(seed, self._rows))
            self._waiting = dict(enumerate(self._planes(obs).copy()))
        if row in self._waiting:
            return self._waiting.pop(row)
        self._mask[row] = True
        obs, _ = self._all.reset(seed=np.array([_NO_SEED]), options={"reset_mask": self._mask})
        self._mask[row] = False
        first: Array = self._planes(obs)[row]
        return first

    def close(self) -> None:
        self._all = None
