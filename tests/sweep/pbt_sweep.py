"""Populations with scores known in advance, trained in the test process so that torch is imported only once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tiltyard import api
from tiltyard.config.sections import Env
from tiltyard.config.sweep_plan import Plan
from tiltyard.config.yaml import dump_yaml
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError
from tiltyard.run import checkpoint, state_file
from tiltyard.run.folder import Run
from tiltyard.sweep import controller
from tiltyard.sweep import preflight as sweep_preflight
from tiltyard.sweep.folder import Sweep
from tiltyard.training import preflight, resume
from tiltyard.types import Arrays, EnvSpec

# Every step returns reward `level`, whatever the action; the true objective is -level.
ENV = """
import gymnasium, numpy

class Steady(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, level=0.0, rewards=None):
        self.level, self.rewards = level, rewards or {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._see(), {}

    def step(self, action):
        self.steps += 1
        info = {"true_objective": -self.level, "shaped": sum(self.rewards.values())}
        return self._see(), self.level + 0.0 * action, self.steps == 4, False, info

    def _see(self):
        return self.np_random.uniform(-1, 1, 2).astype(numpy.float32)
"""

EXPERIMENT: dict[str, Any] = {
    "name": "steady",
    "env": {"id": "steady.py:Steady"},
    "engine": {"kind": "serial", "envs": 2},
    "algo": {"rollout": 8, "minibatch": 8, "epochs": 2},
    "model": {"hidden": [8]},
    "stop": {"env_steps": 256},
    "eval": {"every": 0, "at_end": False},
    "save": {"last": 100, "best": 0, "metric": "train/return"},
    "track": {"tensorboard": False},
}
SPACE = {"env.options.level": {"range": [-10.0, 10.0]}, "algo.lr": {"log": [1e-5, 1e-1]}}
RULES = {"period": 64, "start": 64, "replace": 0.34, "rate": 1.0}


def plan(levels: list[float], **more: Any) -> dict[str, Any]:
    """Write the plan of a population whose members start at these levels, each with a different learning rate."""
    Path("steady.py").write_text(ENV)
    points = [{"env.options.level": level, "algo.lr": 0.001 * (i + 1)} for i, level in enumerate(levels)]
    made: dict[str, Any] = {"experiment": EXPERIMENT, "search": "population", "trials": len(levels), "points": points}
    made |= {"space": SPACE, "population": RULES, "metric": "train/return", **more}
    Path("plan.yaml").write_text(dump_yaml(made))
    return made


class InProcess:
    """A backend that trains each trial immediately, in this process."""

    queues = False

    def __init__(self, sweep: Sweep, plan: Plan) -> None:
        self.ended: dict[int, str] = {}
        self.jobs: dict[int, str] = {}
        self.gone: dict[int, str] = {}

    def adopt(self, numbers: Iterable[int]) -> set[int]:
        return set(self.ended)

    def has_capacity(self, number: int | None) -> bool:
        return True

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        train(folder)
        self.ended[number] = "its training ended"
        return True

    def poll(self) -> dict[int, str]:
        ended, self.ended = self.ended, {}
        return ended

    def cancel(self, numbers: Iterable[int]) -> None:
        assert not list(numbers)


_probed: dict[str, EnvSpec] = {}


def probe_once(env: Env, **more: Any) -> EnvSpec:
    """Probe an env once, in its own process, and cache its spec: all members have the same spaces."""
    if env.id not in _probed:
        _probed[env.id] = probe(env, **more)
    return _probed[env.id]


def train(folder: Path) -> None:
    try:
        with patch.object(preflight, "probe", probe_once):
            run, made = resume.prepare_resume(Run(folder))
            api.run_training(run, made, live=False)
    except TiltyardError as error:
        print(f"{error.message}\n{error.details}")


def run_sweep(sweep: Sweep) -> int:
    return controller.run_controller(sweep, InProcess, print)


def begun() -> Sweep:
    """Create the sweep of plan.yaml without training anything."""
    with patch.object(preflight, "probe", probe_once):
        return sweep_preflight.begin(sweep_preflight.prepare("plan.yaml"))


def started() -> Sweep:
    """Create the sweep of plan.yaml and run it to its end."""
    sweep = begun()
    assert run_sweep(sweep) == 0
    return sweep


def weights(run: Run | Path, env_steps: int | None = None) -> Arrays:
    """Weights of the newest checkpoint, or of the one at `env_steps`."""
    found = checkpoint.select(run if isinstance(run, Run) else Run(run), env_steps)
    return dict(state_file.read_tree(found.folder / "policies", "main")["weights"])
