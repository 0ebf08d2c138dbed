"""Options of envs that change while they run: each copy is given them by its set_options() before its next reset.

def set_options(self, *, level):     in the env or one of its wrappers; gets the options that have changed
    self.level = level
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiltyard.envs.isolation.proxy import EnvProxy
from tiltyard.envs.pettingzoo import Parallel


def options_layer(env: Any) -> Any:
    """The outermost env or wrapper with set_options(), or None."""
    layer = env.inner if isinstance(env, Parallel) else env
    if isinstance(layer, EnvProxy):  # its server has looked
        return layer if layer.takes_options else None
    while layer is not None and not hasattr(type(layer), "set_options"):
        layer = getattr(layer, "env", None)
    return layer


class EnvOptions:
    """The options of each copy of an env: those of its present episode, and those of its next one."""

    def __init__(self, options: Mapping[str, Any], copies: int) -> None:
        self.now = [dict(options)] * copies
        self.next = list(self.now)

    def change(self, options: Mapping[str, Any]) -> None:
        """Give all copies these options from their next episode on."""
        self.next = [dict(options)] * len(self.now)

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Begin with the options that each copy had when it was saved."""
        self.next[: len(saved)] = [dict(each) for each in saved[: len(self.now)]]

    def before_reset(self, copy: int, env: Any) -> None:
        before, options = self.now[copy], self.next[copy]
        if before is not options:
            changed = {name: value for name, value in options.items() if before.get(name) != value}
            if changed:
                options_layer(env).set_options(**changed)
            self.now[copy] = options
