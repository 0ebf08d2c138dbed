"""A window that shows frames as they come, at the speed of the env."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiltyard.errors import UseError
from tiltyard.evaluation.video import fit, to_rgb


class Window:
    """Takes frames as VideoWriter does. Closing the window ends the program as ^C does."""

    def __init__(self, fps: float) -> None:
        try:
            import pygame
        except ModuleNotFoundError as error:
            message = "a window needs the package 'pygame', which is not installed"
            raise UseError(message, "pip install 'tiltyard[classic]'") from error
        self._pygame, self._fps = pygame, fps
        pygame.display.init()
        self._clock = pygame.time.Clock()
        self._screen: Any = None

    def add(self, frame: Any) -> None:
        pygame, image = self._pygame, fit(to_rgb(frame))
        size = (image.shape[1], image.shape[0])
        if self._screen is None or self._screen.get_size() != size:
            self._screen = pygame.display.set_mode(size)
        self._screen.blit(pygame.surfarray.make_surface(np.swapaxes(image, 0, 1)), (0, 0))
        pygame.display.flip()
        self._clock.tick(self._fps)
        if any(event.type == pygame.QUIT for event in pygame.event.get()):
            raise KeyboardInterrupt

    def close(self) -> None:
        self._pygame.display.quit()

    discard = close
