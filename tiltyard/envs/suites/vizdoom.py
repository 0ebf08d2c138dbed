"""The Doom scenarios of ViZDoom, `doom:NAME`, directly on its engine: one player, rendered small, resized once.

Needs vizdoom (`pip install 'tiltyard[vizdoom]'`). Each env has its own engine process with shared memory and a
temporary folder; if this process is killed, its reaper removes them.

    actions "one"      Discrete: nothing, or one of the scenario's buttons             (doom:basic: 4 choices)
            "any"      MultiBinary: any set of buttons
            "groups"   MultiDiscrete: opposite buttons are one choice of none, first, second; the others are on or off

Buttons that take a number (TURN_LEFT_RIGHT_DELTA, ...) are omitted. Bobbing of view and weapon is off: the weapon's
position would carry over to the next episode, and no episode could be re-run exactly.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import vizdoom
from gymnasium import spaces
from PIL import Image

from tiltyard.errors import UseError, did_you_mean
from tiltyard.processes import reaper

if TYPE_CHECKING:
    from tiltyard.types import Array

TICS_PER_SECOND = 35
# Scenarios that one player cannot play with the shipped files, and why.
_UNPLAYABLE = {
    "doom": "it needs the commercial doom.wad",
    "doom2": "it needs the commercial doom2.wad",
    "cig": "it needs other players",
    "multi_duel": "it needs another player",
}
_MAPS = {"freedoom1": "E1M1"}  # where the map that the scenario names does not exist
_OPPOSITE = (
    ("MOVE_LEFT", "MOVE_RIGHT"),
    ("TURN_LEFT", "TURN_RIGHT"),
    ("MOVE_FORWARD", "MOVE_BACKWARD"),
    ("LOOK_UP", "LOOK_DOWN"),
    ("SELECT_NEXT_WEAPON", "SELECT_PREV_WEAPON"),
)
# What an engine leaves when its owner is killed, which it does not notice: files named after its instance.
_INSTANCE = "+viz_instance_id"
_SEGMENTS = [f"/dev/shm/ViZDoom{name}" for name in ("SM", "MQCtr", "MQDoom")]
# Ctrl-C and a cluster's SIGTERM would reach the engine too and end it: only `close` may.
_BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class Doom(gymnasium.Env[Any, Any]):
    """One player in one scenario. Equal seeds and actions give equal frames.

    The keyword arguments are the keys of `env.options`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": TICS_PER_SECOND}

    def __init__(
        self,
        scenario: str,
        *,
        frameskip: int = 4,
        height: int = 72,
        width: int = 128,
        resolution: str = "160x120",
        grey: bool = False,
        variables: bool = False,
        actions: str = "one",
        skill: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        for name, value in {"frameskip": frameskip, "height": height, "width": width}.items():
            if type(value) is not int or value < 1:
                raise UseError(f"env.options.{name} = {value!r} must be an integer, at least 1", f"set {name}=4")
        self.frames_per_step = frameskip
        self.render_mode = render_mode
        self._grey, self._size = grey, (width, height)
        self._game = _game(scenario, resolution, grey)
        if skill is not None:
            self._game.set_doom_skill(skill)
        names = [button.name for button in self._game.get_available_buttons()]
        self._pressed, self.action_space = _actions(actions, names)
        image = spaces.Box(0, 255, (1 if grey else 3, height, width), np.uint8)
        self._variables = self._game.get_available_game_variables_size() if variables else 0
        if variables and not self._variables:
            raise UseError(f"doom:{scenario} has no game variables", "remove env.options.variables")
        self.observation_space: spaces.Space[Any] = image
        if variables:
            numbers = spaces.Box(-np.inf, np.inf, (self._variables,), np.float32)
            self.observation_space = spaces.Dict({"screen": image, "variables": numbers})
        self._folder: Path | None = None
        self._screen: Array = np.zeros(0, np.uint8)
        self._obs: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.set_seed(int(self.np_random.integers(2**32)) if seed is None else seed % 2**32)
        if self._folder is None:
            self._start()
        else:
            self._game.new_episode()
        self._observe()
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self._game.make_action(self._buttons(action), self.frames_per_step)
        finished = bool(self._game.is_episode_finished())
        late = finished and bool(self._game.is_episode_timeout_reached()) and not self._game.is_player_dead()
        if not finished:
            self._observe()  # the engine has no screen after the end: the last observation stays
        return self._obs, float(reward), finished and not late, late, {}

    def render(self) -> Any:
        return np.repeat(self._screen[..., None], 3, 2) if self._grey else self._screen

    def close(self) -> None:
        if self._folder is not None:
            self._game.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tiltyard-doom-"))
        reaper.own().announce(self._folder, _INSTANCE, _SEGMENTS)
        self._game.set_doom_config_path(str(self._folder / "vizdoom.ini"))
        with _child_environment(self._folder):  # the engine creates a folder where it starts
            self._game.init()
        reaper.own().announce(self._folder, _INSTANCE, _SEGMENTS, self._game.get_instance_id())

    def _observe(self) -> None:
        state = self._game.get_state()
        self._screen = state.screen_buffer
        small = np.asarray(Image.fromarray(self._screen).resize(self._size, Image.Resampling.BOX))
        planes = small[None] if self._grey else np.ascontiguousarray(np.moveaxis(small, 2, 0))
        if self._variables:
            self._obs = {"screen": planes, "variables": np.asarray(state.game_variables, np.float32)}
        else:
            self._obs = planes

    def _buttons(self, action: Any) -> list[int]:
        """The pressed buttons: 0 or 1 for each."""
        if isinstance(self.action_space, spaces.Discrete):
            return self._pressed[0][int(action)]
        parts = [choices[int(chosen)] for choices, chosen in zip(self._pressed, action, strict=True)]
        return [max(each) for each in zip(*parts, strict=True)]


def scenarios() -> list[str]:
    """The names of the shipped scenarios that one player can play."""
    found = [path.stem for path in Path(vizdoom.scenarios_path).glob("*.cfg")]
    return sorted(name for name in found if name not in _UNPLAYABLE)


def _game(scenario: str, resolution: str, grey: bool) -> Any:
    if scenario not in scenarios():
        why = _UNPLAYABLE.get(scenario)
        if why is not None:
            raise UseError(f"doom:{scenario} is not supported: {why}", f"known: {', '.join(scenarios())}")
        raise UseError(f"unknown Doom scenario {scenario!r}", did_you_mean(scenario, scenarios()))
    sizes = {name.removeprefix("RES_").lower(): name for name in vizdoom.ScreenResolution.__members__}
    if resolution not in sizes:
        hint = did_you_mean(resolution, sizes)
        raise UseError(f"env.options.resolution = {resolution!r} is not a screen size of Doom", hint)
    game = vizdoom.DoomGame()
    game.load_config(str(Path(vizdoom.scenarios_path) / f"{scenario}.cfg"))
    if scenario in _MAPS:
        game.set_doom_map(_MAPS[scenario])
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_window_visible(False)
    game.set_screen_resolution(getattr(vizdoom.ScreenResolution, sizes[resolution]))
    game.set_screen_format(vizdoom.ScreenFormat.GRAY8 if grey else vizdoom.ScreenFormat.RGB24)
    for switch in ("depth", "labels", "automap", "audio", "notifications"):
        getattr(game, f"set_{switch}_buffer_enabled")(False)
    buttons = game.get_available_buttons()
    game.set_available_buttons([button for button in buttons if not vizdoom.is_delta_button(button)])
    game.add_game_args("+movebob 0")
    return game


def _actions(kind: str, names: list[str]) -> tuple[list[list[list[int]]], spaces.Space[Any]]:
    """For each part of the action the buttons that its choices press, and the action space."""
    nothing = [0] * len(names)
    alone = [[int(other == name) for other in names] for name in names]
    if kind == "one":
        return [[nothing, *alone]], spaces.Discrete(len(names) + 1)
    if kind == "any":
        return [[nothing, button] for button in alone], spaces.MultiBinary(len(names))
    if kind == "groups":
        pairs = [pair for pair in _OPPOSITE if set(pair) <= set(names)]
        paired = {name for pair in pairs for name in pair}
        parts = [[nothing, *(alone[names.index(name)] for name in pair)] for pair in pairs]
        parts += [[nothing, alone[index]] for index, name in enumerate(names) if name not in paired]
        return parts, spaces.MultiDiscrete([len(part) for part in parts])
    raise UseError(f"unknown env.options.actions = {kind!r}", "set one, any or groups")


@contextmanager
def _child_environment(folder: Path) -> Iterator[None]:
    """Change to a folder and block signals while entered, so that a process started here inherits both."""
    before = Path.cwd()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
