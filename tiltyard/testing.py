"""Checks for plug-in authors. Each raises a TiltyardError that explains the problem.

check_env("envs/maze.py:Maze", options={"size": 9})     an env: interface, spaces, seeding, restoring

def test_maze():
    tiltyard.testing.check_env("envs/maze.py:Maze")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.config.sections import Env
from tiltyard.errors import EnvError
from tiltyard.types import EnvSpec

if TYPE_CHECKING:
    from tiltyard.envs.vector import EnvGroup
    from tiltyard.types import Step

_SEED = 7


def check_env(
    env: Env | str,
    *,
    options: Mapping[str, Any] | None = None,
    base: Sequence[Path] | None = None,
    steps: int = 200,
    rows: int = 2,
) -> EnvSpec:
    """Probe the env, act at random in `rows` copies for `steps` env steps, restore them half way; returns the EnvSpec.

    Checked beyond the probe: equal seeds and actions give equal answers, and a group saved, loaded into fresh envs
    and continued equals one that was never interrupted (unless `restore_mode` is fresh).
    """
    from tiltyard.envs.probe import probe

    settings = env if isinstance(env, Env) else Env(id=env, options=dict(options or {}))
    places = [Path.cwd()] if base is None else list(base)
    spec = probe(settings, base=places)
    first, second = (_group(settings, spec, rows, places) for _ in range(2))
    third = _group(settings, spec, rows, places)
    try:
        one, two = first.reset(), second.reset()
        _same(settings, one, two, "reset")
        for index in range(steps):
            if index == steps // 2 and spec.restore_mode != "fresh":
                _restore(settings, first, third)
                first, third = third, first
                one = first.current()
                _same(settings, one, two, "restored")
            action = _actions(first, index, one)
            one, two = first.step(action), second.step(action.copy())
            if spec.restore_mode != "fresh":
                _same(settings, one, two, f"env step {index + 1}")
    finally:
        for group in (first, second, third):
            group.close()
    return spec


def _group(env: Env, spec: EnvSpec, rows: int, base: Sequence[Path]) -> EnvGroup:
    from tiltyard.envs.row_data import GroupConfig
    from tiltyard.envs.vector import make_group

    return make_group(GroupConfig(env, spec, rows * len(spec.agents), _SEED, base), native="never")


def _actions(group: EnvGroup, index: int, now: Step) -> Any:
    import numpy as np

    rng = np.random.default_rng([_SEED, index])
    return group.codec.random_rows(rng, group.rows, now.mask)


def _restore(env: Env, old: EnvGroup, new: EnvGroup) -> None:
    messages = new.load(old.save())
    if messages:
        hint = "set env.restore_mode=fresh, or make it repeatable"
        raise EnvError(f"env {env.id} was not restored: {messages[0]}", hint)


def _same(env: Env, one: Step, two: Step, when: str) -> None:
    import numpy as np

    pairs = [(f"observation {name!r}", array, two.obs[name]) for name, array in one.obs.items()]
    pairs += [(name, getattr(one, name), getattr(two, name)) for name in ("reward", "terminated", "truncated", "first")]
    for name, left, right in pairs:
        if not np.array_equal(left, right):
            raise EnvError(
                f"env {env.id}, {when}: {name} differs between copies with equal seeds and actions: {left} and {right}",
                "draw all randomness from self.np_random, which reset(seed=...) seeds; share nothing between copies",
            )
