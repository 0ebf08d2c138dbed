"""VizDoom's basic scenario as one small Gymnasium env: all systems of the doom_basic task use this file.

160 x 120 grey pixels from the game, every 4th frame, subsampled to 84 x 84, the last four stacked.
"""

from typing import Any

import gymnasium
import numpy as np
import vizdoom

SIZE, STACK, SKIP = 84, 4, 4


class DoomBasic(gymnasium.Env[np.ndarray, int]):
    def __init__(self) -> None:
        self.game = vizdoom.DoomGame()
        self.game.load_config(f"{vizdoom.scenarios_path}/basic.cfg")
        self.game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self.game.set_screen_format(vizdoom.ScreenFormat.GRAY8)
        self.game.set_window_visible(False)
        buttons = self.game.get_available_buttons_size()
        self.actions = [[0] * buttons, *np.eye(buttons, dtype=int).tolist()]  # no button, or one button
        self.observation_space = gymnasium.spaces.Box(0, 255, (STACK, SIZE, SIZE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self.actions))
        self.picks = np.ix_(np.arange(SIZE) * 120 // SIZE, np.arange(SIZE) * 160 // SIZE)
        self.frames = np.zeros((STACK, SIZE, SIZE), np.uint8)
        self.running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            self.game.set_seed(seed % 2**31)
        if not self.running:
            self.game.init()
            self.running = True
        self.game.new_episode()
        self.frames[:] = self._screen()
        return self.frames.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = self.game.make_action(self.actions[int(action)], SKIP)
        done = self.game.is_episode_finished()
        if not done:
            self.frames[:-1] = self.frames[1:]
            self.frames[-1] = self._screen()
        late = done and self.game.is_episode_timeout_reached()
        return self.frames.copy(), reward, done and not late, late, {}

    def _screen(self) -> np.ndarray:
        return self.game.get_state().screen_buffer[self.picks]

    def close(self) -> None:
        self.game.close()
