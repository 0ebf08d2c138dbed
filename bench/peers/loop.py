"""PPO in one plain file, in the style of CleanRL: a vector env, a network, a loop. No framework.

`plain` is what most people would write. `tuned` is the same loop optimised for a CPU: ALE's own vector env,
channels_last and a second torch thread. Both are baselines and do not use Tiltyard.

python bench/peers/loop.py pong tuned --seconds 15
"""

import time
from functools import partial

import ale_py
import gymnasium
import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from evaluate import Evaluation
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from net import Net, loss
from report import Report
from torch import nn

MLP = {"envs": 8, "rollout": 128, "epochs": 4, "minibatch": 256, "lr": 2.5e-4, "clip": 0.2, "entropy": 0.01}
CNN = MLP | {"clip": 0.1}
ONE_EPOCH = CNN | {"envs": 64, "rollout": 32, "epochs": 1}
SETTINGS = {
    "cartpole": {"plain": MLP},
    "lunarlander": {"plain": MLP},
    "pong": {
        "plain": CNN | {"threads": 2},
        "tuned": ONE_EPOCH | {"threads": 2, "native": True, "channels_last": True},
    },
    "doom_basic": {
        "plain": CNN | {"threads": 2},
        "tuned": ONE_EPOCH | {"envs": 32, "threads": 2, "channels_last": True},
    },
}
ENVS = {"cartpole": "CartPole-v1", "lunarlander": "LunarLander-v3"}
GAMMA, LAMBDA = 0.99, 0.95


def one_env(task: str) -> gymnasium.Env:
    if task == "doom_basic":
        from doom import DoomBasic  # needs the game; the other tasks do not

        return DoomBasic()
    if task == "pong":
        env = gymnasium.make("PongNoFrameskip-v4")
        return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)
    return gymnasium.make(ENVS[task])


def make_envs(task: str, count: int, native: bool = False) -> gymnasium.vector.VectorEnv:
    if native:
        return AtariVectorEnv("pong", count, autoreset_mode=AutoresetMode.SAME_STEP)
    return SyncVectorEnv([partial(one_env, task)] * count, autoreset_mode=AutoresetMode.SAME_STEP)


def advantages(reward: torch.Tensor, done: torch.Tensor, value: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """GAE over [T, N]; `done[t]` is true if the episode ended with step t."""
    found, running = torch.zeros_like(reward), torch.zeros_like(last)
    for t in reversed(range(len(reward))):
        going = 1.0 - done[t]
        delta = reward[t] + GAMMA * going * last - value[t]
        running = delta + GAMMA * LAMBDA * going * running
        found[t], last = running, value[t]
    return found


def main() -> None:
    gymnasium.register_envs(ale_py)
    report = Report(SETTINGS)
    s = report.settings
    torch.set_num_threads(s.get("threads", 1))
    torch.manual_seed(report.seed)
    envs = make_envs(report.task, s["envs"], s.get("native", False))
    space = envs.single_observation_space
    net = Net(space.shape, int(envs.single_action_space.n), s.get("channels_last", False))
    adam = torch.optim.Adam(net.parameters(), lr=s["lr"], eps=1e-5)
    evaluation = Evaluation(ENVS[report.task]) if report.options.steps else None

    length, rows = s["rollout"], s["envs"]
    stored = torch.zeros((length, rows, *space.shape), dtype=torch.from_numpy(np.zeros(1, space.dtype)).dtype)
    action = torch.zeros((length, rows), dtype=torch.int64)
    old, value, reward, done = (torch.zeros((length, rows)) for _ in range(4))
    report.start()
    obs, steps = envs.reset(seed=report.seed)[0], 0
    while not steps or not report.update(steps):
        for t in range(length):
            stored[t] = torch.from_numpy(obs)
            with torch.no_grad():
                logits, value[t] = net(stored[t])
            chosen = torch.distributions.Categorical(logits=logits)
            action[t] = chosen.sample()
            old[t] = chosen.log_prob(action[t])
            obs, r, terminated, truncated, _ = envs.step(action[t].numpy())
            reward[t], done[t] = torch.from_numpy(np.float32(r)), torch.from_numpy(np.float32(terminated | truncated))
        with torch.no_grad():
            last = net(torch.from_numpy(obs))[1]
        advantage = advantages(reward, done, value, last)
        batch = [x.flatten(0, 1) for x in (stored, action, old, advantage, advantage + value)]
        for _ in range(s["epochs"]):
            for rows_of in torch.randperm(length * rows).split(s["minibatch"]):
                adam.zero_grad()
                loss(net, tuple(x[rows_of] for x in batch), s["clip"], s["entropy"]).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                adam.step()
        steps += length * rows
        if evaluation and report.evaluation_due(steps):
            began = time.time()
            with torch.no_grad():
                found = evaluation(lambda seen: net(torch.from_numpy(seen))[0].argmax(1).numpy())
            report.score(steps, found, time.time() - began)
    report.finish("torch", "gymnasium", "ale-py")


if __name__ == "__main__":
    main()
