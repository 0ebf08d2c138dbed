"""Overhead of EnvGroup over bare env.step calls: CartPole, 8 rows, env steps per second.

Both balance the pole with the same rule and reset with seeds. They alternate, so that a busy machine slows both. Run:
python bench/env_group.py
"""

from pathlib import Path
from time import perf_counter

import gymnasium
import numpy as np

from tiltyard.config.sections import Env
from tiltyard.envs.probe import probe
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.vector import EnvGroup, make_group

ROWS, STEPS, ROUNDS = 8, 2000, 7


def balance(obs: np.ndarray) -> np.ndarray:
    return (obs[:, 2] + 0.5 * obs[:, 3] > 0).astype(np.float32)[:, None]


def group_seconds(group: EnvGroup, actions: list[np.ndarray] | None) -> float:
    now, spent = group.reset(), 0.0
    for t in range(STEPS):
        action = balance(now.obs["obs"]) if actions is None else actions[t]
        started = perf_counter()
        now = group.step(action)
        spent += perf_counter() - started
    return spent


def bare_seconds(envs: list[gymnasium.Env], actions: list[np.ndarray] | None) -> float:
    obs, spent, seed = np.stack([env.reset(seed=row)[0] for row, env in enumerate(envs)]), 0.0, 0
    for t in range(STEPS):
        chosen = (balance(obs) if actions is None else actions[t])[:, 0].astype(int).tolist()
        seen = []
        started = perf_counter()
        for env, action in zip(envs, chosen, strict=True):
            frame, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                seed += 1
                frame, _ = env.reset(seed=seed)
            seen.append(frame)
        spent += perf_counter() - started
        obs = np.stack(seen)
    return spent


def main() -> None:
    settings, base = Env(id="CartPole-v1"), [Path.cwd()]
    group = make_group(GroupConfig(settings, probe(settings, base=base), ROWS, 0, base), native="never")
    envs = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(ROWS)]
    rng = np.random.default_rng(0)
    random = [rng.integers(0, 2, (ROWS, 1)).astype(np.float32) for _ in range(STEPS)]
    for name, actions in (("balancing", None), ("random, an end every 22 steps", random)):
        pairs = [(bare_seconds(envs, actions), group_seconds(group, actions)) for _ in range(ROUNDS)]
        bare, ours = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        print(f"{name}: bare {ROWS * STEPS / bare:,.0f}/s, group {ROWS * STEPS / ours:,.0f}/s, {bare / ours:.0%}")


if __name__ == "__main__":
    main()
