"""The lowest possible cost of training on this machine, and how close a measured speed comes to it.

    floor = cores / (env + inference + epochs x training)      CPU-seconds per env step

Each part is measured alone, on random data of the same shapes: stepping a vector env; inference on its rows; gradient
steps on shuffled minibatches, with the conversion from uint8, clipping and a fused Adam over one flat buffer. As many
processes as the engine keeps busy run at the same time, because they share caches and memory; cores are processes times
threads. Only torch and the envs are measured, no code of Tiltyard. Unless given, the shapes are those of the task's
training in bench/systems.py, including presets.

python bench/floor.py pong --copies 2 --epochs 1 --measured 900
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import gymnasium
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from net import Net, loss
from systems import TASKS

from tiltyard.config.load import load

TRAININGS = {  # the training whose floor is measured
    "cartpole": TASKS["cartpole"].systems["tiltyard fast"],
    "lunarlander": TASKS["lunarlander_240"].systems["tiltyard fast"],
    "pong": TASKS["pong"].systems["tiltyard"],
    "doom_basic": TASKS["doom_basic"].systems["tiltyard"],
}


def shapes(task: str) -> dict[str, int]:
    source, *settings = TRAININGS[task].arguments
    experiment = load(source, settings).experiment
    algo = experiment.algo
    return {
        "envs": experiment.engine.envs,
        "rollout": algo.rollout,
        "minibatch": algo.minibatch,
        "epochs": algo.epochs,
    }


def make_envs(task: str, count: int, threads: int) -> gymnasium.vector.VectorEnv:
    if task == "cartpole":
        return gymnasium.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point")
    if task == "pong":
        from ale_py.vector_env import AtariVectorEnv

        return AtariVectorEnv("pong", count, num_threads=threads)
    if task == "lunarlander":
        return gymnasium.make_vec("LunarLander-v3", count, vectorization_mode="sync")
    from doom import DoomBasic

    return gymnasium.vector.SyncVectorEnv([DoomBasic] * count)


def seconds_per_call(work: Callable[[], object], seconds: float) -> float:
    """CPU-seconds per call in the second half of the time; the first half is warm-up."""
    repeat(work, seconds / 2)
    before = cpu_seconds()
    calls = repeat(work, seconds / 2)
    return (cpu_seconds() - before) / calls


def repeat(work: Callable[[], object], seconds: float) -> int:
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or not calls:
        work()
        calls += 1
    return calls


def cpu_seconds() -> float:
    """CPU-seconds of all threads of this process and its descendants: VizDoom's engine is a separate process."""
    below = []
    waiting = list(Path("/proc/self/task").glob("*/children"))
    while waiting:
        for pid in waiting.pop().read_text().split():
            below.append(Path("/proc", pid))
            waiting += below[-1].glob("task/*/children")
    threads = [path for process in below for path in process.glob("task/*/schedstat")]
    return time.process_time() + sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def measure(options: argparse.Namespace, barrier: Any, answers: Any) -> None:
    """Measure CPU-seconds per env step of each part in one copy; all copies run the same part at the same time."""
    torch.set_num_threads(options.threads)
    envs = make_envs(options.task, options.envs, options.threads)
    obs, actions = envs.reset(seed=0)[0], envs.action_space.sample()
    net = Net(obs.shape[1:], int(envs.single_action_space.n), channels_last=True)
    learn = partial(gradient_step, net, *flat(net), stored(obs, options), options.minibatch)
    batch = torch.from_numpy(obs)
    parts = {
        "env": (lambda: envs.step(actions), options.envs),
        "inference": (lambda: act(net, batch), options.envs),
        "training": (learn, options.minibatch),
    }
    costs = {}
    for name, (work, rows) in parts.items():
        barrier.wait()
        costs[name] = seconds_per_call(work, options.seconds) / rows
    answers.put(costs)


@torch.no_grad()
def act(net: Net, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample an action for each row; return it with its log-probability."""
    logs = net(obs)[0].log_softmax(-1)
    action = (logs - torch.empty_like(logs).exponential_().log_()).argmax(-1, keepdim=True)
    return action, logs.gather(-1, action)


def stored(obs: np.ndarray, options: argparse.Namespace) -> list[torch.Tensor]:
    """A batch of rollout x envs samples."""
    rows = max(options.rollout * options.envs, options.minibatch)
    frames = torch.from_numpy(np.resize(obs, (rows, *obs.shape[1:])))
    return [frames, torch.zeros(rows, dtype=torch.int64), *torch.randn(3, rows)]


def flat(net: Net) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """All gradients as one tensor, and Adam over all parameters as one tensor."""
    parameters = list(net.parameters())
    values = torch.cat([x.detach().flatten() for x in parameters]).requires_grad_()
    values.grad = torch.zeros_like(values)
    offset = 0
    for x in parameters:
        where = (x.shape, x.stride(), offset)  # channels_last is kept
        x.grad = values.grad.as_strided(*where)
        x.data = values.data.as_strided(*where).copy_(x.data)
        offset += x.numel()
    return values.grad, torch.optim.Adam([values], lr=1e-4, fused=True)


def gradient_step(net: Net, grad: torch.Tensor, adam: Any, batch: list[torch.Tensor], minibatch: int) -> None:
    rows = torch.randint(len(batch[0]), (minibatch,))
    grad.zero_()
    loss(net, tuple(x[rows] for x in batch), 0.2, 0.01).backward()
    grad.mul_(torch.clamp(0.5 / (grad.norm() + 1e-6), max=1.0))
    adam.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="unit costs and the floor of a task on this machine")
    parser.add_argument("task", choices=list(TRAININGS))
    defaults = {task: shapes(task) for task in TRAININGS}
    for name in ("envs", "rollout", "minibatch", "epochs"):
        shown = ", ".join(f"{task} {numbers[name]}" for task, numbers in defaults.items())
        parser.add_argument(f"--{name}", type=int, help=f"default: {shown}")
    parser.add_argument("--copies", type=int, default=1, help="processes that the engine keeps busy")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each of them")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds for each part")
    parser.add_argument("--measured", type=float, help="measured env steps per second, to print their efficiency")
    options = parser.parse_args()
    for name, value in defaults[options.task].items():
        setattr(options, name, getattr(options, name) or value)

    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(options.copies), context.Queue()
    copies = [context.Process(target=measure, args=(options, barrier, answers)) for _ in range(options.copies)]
    for copy in copies:
        copy.start()
    found = [answers.get(timeout=120 + 10 * options.seconds) for _ in copies]
    for copy in copies:
        copy.join()
    cost = {name: mean(one[name] for one in found) for name in found[0]}
    cores = options.copies * options.threads
    floor = cores / (cost["env"] + cost["inference"] + options.epochs * cost["training"])
    print(f"{options.task}: {options.copies} processes x {options.threads} threads, {options.envs} envs x "
          f"{options.rollout} steps, minibatch {options.minibatch}, {options.epochs} epochs")  # fmt: skip
    for name, seconds in cost.items():
        print(f"  {name:10} {seconds * 1e6:9.2f} us per env step{' and epoch' if name == 'training' else ''}")
    print(f"  floor      {floor:9,.0f} env steps/s")
    if options.measured:
        print(f"  measured   {options.measured:9,.0f} env steps/s, efficiency {options.measured / floor:.2f}")


if __name__ == "__main__":
    main()
