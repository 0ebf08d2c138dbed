"""Cost of acting and learning without an env, in microseconds: an MLP with 4 inputs and 2 actions, one torch thread.

python bench/learner.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from tiltyard.algos.ppo import Ppo
from tiltyard.config.algos import Ppo as Settings
from tiltyard.config.sections import Memory, Model
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import ActionPart, ActionSpec, ArraySpec, EnvSpec, Rollout

SPEC = EnvSpec({"obs": ArraySpec("box", (4,), "float32")}, ActionSpec((ActionPart("categorical", 1, 2),), {}))
STEPS, ROWS = 128, 8


def best(work: Callable[[], object], times: int, rounds: int) -> float:
    """Microseconds of one call in the fastest round: other programs can only slow it down."""
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - started) / times * 1e6)
    return min(found)


def rollout(net: PolicyNet, bptt: int) -> Rollout:
    """Random data of the right shapes; every tenth step starts an episode."""
    rng = np.random.default_rng(0)
    numbers, no = np.zeros((STEPS, ROWS), np.float32), np.zeros((STEPS, ROWS), bool)
    return Rollout(
        obs={"obs": rng.normal(size=(STEPS, ROWS, 4)).astype(np.float32)},
        first=rng.random((STEPS, ROWS)) < 0.1,
        action=rng.integers(0, 2, (STEPS, ROWS, 1)).astype(np.float32),
        mask=None,
        log_prob=numbers - 0.69,
        value=numbers,
        reward=rng.normal(size=(STEPS, ROWS)).astype(np.float32),
        terminated=no,
        truncated=no,
        bootstrap=numbers,
        valid=~no,
        state0={name: np.zeros((STEPS // bptt, *x.shape), np.float32) for name, x in net.initial_state(ROWS).items()},
        policy_version=np.zeros((STEPS, ROWS), np.int64),
    )


def main() -> None:
    torch.set_num_threads(1)
    for kind in ("none", "lstm", "gru"):
        memory = Memory(kind=kind, size=64)
        net = PolicyNet(SPEC, Model(memory=memory), (), seed=0)
        learner = Ppo(Settings(epochs=1), net, memory.bptt, None, seed=0)
        obs, first = {"obs": np.zeros((ROWS, 4), np.float32)}, np.zeros(ROWS, bool)
        state, generator = net.initial_state(ROWS), torch.Generator()
        acting = best(lambda: net.act(obs, state, first, None, greedy=False, generator=generator), 20, 100)  # noqa: B023
        batch = rollout(net, memory.bptt)
        learning = best(lambda: learner.update(batch, 0), 1, 30) / (STEPS * ROWS / 256)  # noqa: B023
        print(f"memory {kind:5s} act on {ROWS} rows {acting:6.0f} us   gradient step on 256 samples {learning:7.0f} us")


if __name__ == "__main__":
    main()
