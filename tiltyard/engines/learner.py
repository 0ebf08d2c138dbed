"""What every engine of ours learns with: a net, PPO, and their random streams. Not where the rollouts come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tiltyard.algos.ppo import Ppo
from tiltyard.algos.randomness import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collect import FOREIGN, INIT, LEARN, stream_seed
from tiltyard.errors import UseError
from tiltyard.models.net import PolicyNet
from tiltyard.models.policy import save_policy
from tiltyard.run.checkpoint import read_tree
from tiltyard.types import EnvSpec, PolicyState, Rollout, Tree

LEARNER = 2**31  # its place among the groups in the seed tree


class Learner:
    """One policy, `main`, as it is learned."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> None:
        torch.set_num_threads(1)  # two threads round an orthogonal start differently: the weights would be others
        self.experiment, self.spec = experiment, spec
        self.device = device_named(experiment.engine.device)
        seed = experiment.seed
        self.net = PolicyNet(spec, experiment.model, base, seed=stream_seed(seed, INIT)).to(self.device)
        self.algo = Ppo(
            experiment.algo,
            self.net,
            experiment.model.memory.bptt,
            experiment.stop.env_steps,
            seed=stream_seed(seed, LEARN),
        )
        self.generators = Generators(stream_seed(seed, FOREIGN, LEARNER))

    def describe(self) -> list[str]:
        algo, agents = self.experiment.algo, len(self.spec.agents)
        batch, rows = self.experiment.batch * agents, self.experiment.engine.envs * agents
        minibatch, epochs = getattr(algo, "minibatch", batch), getattr(algo, "epochs", 1)
        most = "at most " if agents > 1 else ""  # who is not there decides nothing
        return [
            f"model   {self.net.describe()}",
            f"algo    {algo.id}: a batch of {most}{batch:,} env steps ({rows} rows x {algo.rollout}) per update, "
            f"{epochs} x {-(-batch // minibatch)} gradient steps on {minibatch:,}",
        ]

    def update(self, rollout: Rollout, env_steps: int) -> dict[str, float]:
        """Learn from a rollout. `env_steps` are those before it."""
        with self.generators.in_place():
            return self.algo.update(rollout, env_steps)

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path) -> Tree:
        """Write the policy below a checkpoint's folder; the rest as a tree for the engine to keep."""
        save_policy(folder / "policies", "main", self.net, self.spec, self.experiment)
        return {"seed": self.experiment.seed, "algo": self.algo.save(), "generators": self.generators.save()}

    def load(self, folder: Path, tree: Tree) -> None:
        self.net.load_arrays(read_tree(folder / "policies", "main")["weights"])
        self.algo.load(tree["algo"])
        if tree["seed"] in (None, self.experiment.seed):
            self.generators.load(tree["generators"])
        else:  # a fork with another seed: what is drawn from here on is its own
            self.algo.shuffling = np.random.default_rng(stream_seed(self.experiment.seed, LEARN))

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str) -> PolicyState:
        _only_main(policy)
        return PolicyState(self.net.arrays(), self.algo.save(), self.algo.settings_in_force())

    def adopt(self, policy: str, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        _only_main(policy)
        if state is not None:
            self.net.load_arrays(state.weights)
            self.algo.load(state.optimiser)
        self.algo.change(settings)
        return self.algo.settings_in_force()


def _only_main(policy: str) -> None:
    if policy != "main":
        raise UseError(f"there is no policy {policy!r}", "the engine trains one policy: main")


def device_named(wanted: str) -> torch.device:
    """The device that engine.device means here."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UseError("engine.device = cuda: torch sees no GPU here", "set engine.device=cpu or auto")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
