"""The compared systems: for each task, how each system is started. Edit this table to change the comparison.

A peer is (virtual environment, runner, arguments); its settings are explained in its runner in bench/peers. Tiltyard is
an experiment with key=value settings, started as a user would start it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("BENCH_PEERS", BENCH.parent / ".bench"))
DOOM = BENCH / "peers" / "doom.py"

CARTPOLE_FAST = {"use": "[classic-fast]"}
CARTPOLE_EFFICIENT = {"use": "[classic-efficient]"}
SAME_AS_SB3 = {
    "engine.envs": 8, "algo.rollout": 128, "algo.epochs": 4, "algo.minibatch": 256, "algo.lr": 3e-4,
    "model.hidden": "[64, 64]",
}  # fmt: skip
ON_RLLIB = {"engine.kind": "rllib", "engine.runners": 2, "engine.cpus": 4}
LUNAR_FAST = {"use": "[box2d-fast]"}
DOOM_FAST = {"use": "[doom-fast]"}
CAR = {"engine.envs": 8, "algo.rollout": 32, "algo.epochs": 1, "algo.minibatch": 64}
NATURE = {
    "model.encoder": "nature", "model.hidden": "[]", "model.activation": "relu", "model.critic": "shared",
    "engine.envs": 64, "algo.rollout": 32, "algo.epochs": 1, "algo.minibatch": 256, "algo.lr": 2.5e-4,
    "algo.clip": 0.1, "algo.entropy": 0.01,
}  # fmt: skip


@dataclass(frozen=True)
class System:
    """One way to train: the command before the options of the measurement, and the arguments after them."""

    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """Without `steps`, throughput is measured; else an evaluation every `every` env steps, until `goal` or the end."""

    title: str
    systems: dict[str, System]
    frames: int = 1  # simulator frames per env step
    steps: int | None = None
    every: int = 2048
    goal: float | None = None
    blocks: int = 5


def ours(experiment: str, settings: dict[str, object]) -> System:
    runner = (sys.executable, str(BENCH / "peers" / "ours.py"))
    return System(runner, (experiment, *(f"{name}={value}" for name, value in settings.items())))


def alone(system: System) -> System:
    """The same system on one core."""
    return System(("taskset", "-c", "0", *system.command), system.arguments)


def peer(environment: str, runner: str, *arguments: str) -> System:
    return System((str(PEERS / environment / "bin" / "python"), str(BENCH / "peers" / f"{runner}.py"), *arguments))


TASKS = {
    "cartpole": Task(
        "CartPole-v1, throughput, each system at its own settings (Stable-Baselines3: 4 epochs)",
        {
            "tiltyard fast": ours("CartPole-v1", CARTPOLE_FAST),
            "stable-baselines3": peer("sb3", "sb3", "cartpole", "identical"),
            "cleanrl-style loop": peer("sb3", "loop", "cartpole", "plain"),
            "sample-factory": peer("sf", "sf", "cartpole", "docs"),
            "sample-factory serial": peer("sf", "sf", "cartpole", "serial"),
            "rllib ppo": peer("rllib", "rllib", "cartpole", "ppo"),
            "rllib appo": peer("rllib", "rllib", "cartpole", "appo"),
            "pufferlib": peer("puffer", "puffer", "cartpole", "docs"),
        },
    ),
    "cartpole_identical": Task(
        "CartPole-v1, throughput, all at 8 envs x 128 steps, minibatch 256, 4 epochs, two tanh networks of 64 x 64",
        {
            "tiltyard sync": ours("CartPole-v1", SAME_AS_SB3 | {"engine.mode": "sync"}),
            "tiltyard async": ours("CartPole-v1", SAME_AS_SB3 | {"engine.mode": "async"}),
            "stable-baselines3": peer("sb3", "sb3", "cartpole", "identical"),
            "cleanrl-style loop": peer("sb3", "loop", "cartpole", "plain"),
            "sample-factory": peer("sf", "sf", "cartpole", "identical"),
            "rllib ppo": peer("rllib", "rllib", "cartpole", "identical"),
            "pufferlib": peer("puffer", "puffer", "cartpole", "identical"),
        },
    ),
    "on_rllib": Task(
        "CartPole-v1, throughput of RLlib PPO by Tiltyard and by a script: 2 runners, 8 envs x 128, 4 epochs",
        {
            "tiltyard on rllib": ours("CartPole-v1", SAME_AS_SB3 | ON_RLLIB),
            "rllib ppo": peer("rllib", "rllib", "cartpole", "identical"),
        },
    ),
    "cartpole_475": Task(
        "CartPole-v1, seconds of training to a greedy 475 over 20 fixed seeds",
        {
            "tiltyard fast": ours("CartPole-v1", CARTPOLE_FAST),
            "stable-baselines3 zoo": peer("sb3", "sb3", "cartpole", "zoo"),
        },
        steps=100_000,
        goal=475,
        blocks=10,
    ),
    "cartpole_curve": Task(
        "CartPole-v1, mean greedy return over the first 50,000 env steps",
        {
            "tiltyard efficient": ours("CartPole-v1", CARTPOLE_EFFICIENT),
            "stable-baselines3 zoo": peer("sb3", "sb3", "cartpole", "zoo"),
        },
        steps=50_000,
        blocks=10,
    ),
    "lunarlander_240": Task(
        "LunarLander-v3, seconds of training to a greedy 240 over 20 fixed seeds",
        {
            "tiltyard fast": ours("LunarLander-v3", LUNAR_FAST),
            "stable-baselines3 zoo": peer("sb3", "sb3", "lunarlander", "zoo"),
        },
        steps=1_000_000,
        every=16_384,
        goal=240,
        blocks=5,
    ),
    "pong": Task(
        "Pong, throughput, 84 x 84 x 4 and Nature's network, one epoch (Stable-Baselines3 and RLlib PPO: four)",
        {
            "tiltyard": ours("atari:pong", NATURE),
            "tiltyard async": ours("atari:pong", NATURE | {"engine.mode": "async"}),
            "tiltyard fast (smaller network)": ours("atari:pong", {"use": "[atari-fast]"}),
            "tuned loop": peer("sb3", "loop", "pong", "tuned"),
            "sample-factory": peer("sf", "sf", "pong", "async"),
            "sample-factory serial": peer("sf", "sf", "pong", "serial"),
            "rllib appo": peer("rllib", "rllib", "pong", "appo"),
            "rllib ppo": peer("rllib", "rllib", "pong", "ppo"),
            "stable-baselines3 zoo": peer("sb3", "sb3", "pong", "zoo"),
            "pufferlib": peer("puffer", "puffer", "pong", "one-epoch"),
        },
        frames=4,
    ),
    "doom_basic": Task(
        "VizDoom basic, throughput, the same env file (bench/peers/doom.py) and Nature's network, one epoch",
        {
            "tiltyard": ours(f"{DOOM}:DoomBasic", NATURE | {"engine.envs": 32}),
            "tuned loop": peer("sb3", "loop", "doom_basic", "tuned"),
            "sample-factory": peer("sf", "sf", "doom_basic", "async"),
            "sample-factory serial": peer("sf", "sf", "doom_basic", "serial"),
            "stable-baselines3 zoo": peer("sb3", "sb3", "doom_basic", "zoo"),
        },
        frames=4,
    ),
    "doom_basic_70": Task(
        "VizDoom basic, seconds of training to a greedy 70 over 20 fixed seeds",
        {"tiltyard fast": ours(f"{DOOM}:DoomBasic", DOOM_FAST)},
        frames=4,
        steps=500_000,
        every=25_000,
        goal=70,
        blocks=3,
    ),
    "cores": Task(
        "VizDoom basic, throughput of `doom-fast` on one core and on two",
        {
            "one core": alone(ours(f"{DOOM}:DoomBasic", DOOM_FAST)),
            "two cores": ours(f"{DOOM}:DoomBasic", DOOM_FAST),
        },
        frames=4,
    ),
    "cores_car": Task(
        "CarRacing-v3, throughput on one core and on two: nine tenths of the time are the env's",
        {"one core": alone(ours("CarRacing-v3", CAR)), "two cores": ours("CarRacing-v3", CAR)},
    ),
}
