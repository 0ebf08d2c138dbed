"""The learner of one policy: its net, PPO and random streams. Rollouts come from the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiltyard.algos.flat_adam import Backup
from tiltyard.algos.own_algorithm import OwnAlgorithm, OwnBackup
from tiltyard.algos.ppo import Ppo
from tiltyard.algos.rng import Generators
from tiltyard.config.algos import Own, OwnAlgo
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import FOREIGN, INIT, LEARN, stream_seed
from tiltyard.errors import UseError
from tiltyard.models.policy_files import policy_tree
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run.state_file import read_tree
from tiltyard.types import EnvSpec, PolicyState, Rollout, Tree

if TYPE_CHECKING:
    from tiltyard.engines.local.learner_group import LearnerProcesses

LEARNER = 2**31  # its index among the groups in the seed tree


class Learner:
    """The learner of the policy `name`, by default the experiment's first."""

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        base: Sequence[Path],
        name: str | None = None,
        net: PolicyNet | None = None,
    ) -> None:
        self.experiment, self.spec, self.base = experiment, spec, base
        self.name = name or experiment.learning[0]
        self.place = list(experiment.policy_settings).index(self.name)  # its index among all policies
        self.device = device_named(experiment.engine.device)
        seed = experiment.seed
        self.net = (net or build_net(experiment, spec, base, self.name)).to(self.device)
        self.algo = build_algo(experiment, self.name, self.net, base, seed=stream_seed(seed, LEARN, self.place))
        self.generators = Generators(stream_seed(seed, FOREIGN, LEARNER + self.place))
        self._backup: Backup | OwnBackup = (
            Backup(self.net, self.algo.adam) if isinstance(self.algo, Ppo) else OwnBackup(self.net, self.algo)
        )
        self._env_steps_before = 0
        self.env_steps = 0
        """env steps that it has learned from"""
        self.since = 0
        """first version of the weights that is this policy's own: a replaced policy made those before"""
        self.processes: LearnerProcesses | None = None

    def describe(self) -> list[str]:
        algo, agents, learners = self.experiment.algo, len(self.spec.agents), self.experiment.engine.learners
        batch, rows = self.experiment.batch * agents, self.experiment.engine.envs * agents
        minibatch, epochs = getattr(algo, "minibatch", batch), getattr(algo, "epochs", 1)
        most = "at most " if agents > 1 else ""  # absent agents do not act
        shared = f", shared by {learners} learners" if learners > 1 else ""
        return [
            f"model   {self.net.describe()}",
            f"algo    {algo.id}: a batch of {most}{batch:,} env steps ({rows} rows x {algo.rollout}) per update, "
            f"{epochs} x {-(-batch // minibatch)} gradient steps on {minibatch:,}{shared}",
        ]

    def update(
        self, rollout: Rollout, env_steps: int, after_step: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Learn from this policy's own rows of a rollout, if any. `env_steps` are those before it."""
        own = rollout.played_by(self.place, self.since)
        if own is None:
            return {}
        self.env_steps += int(own.valid.sum())
        with self.generators.active(), self._beside(own, env_steps):
            return self.algo.update(own, env_steps, after_step)

    def remember(self) -> None:
        """Keep the policy as it is now for `restore`."""
        self._backup.save()
        self._env_steps_before = self.env_steps

    def restore(self) -> None:
        self._backup.restore()
        self.net.normaliser.refresh()
        self.env_steps = self._env_steps_before

    def _beside(self, rollout: Rollout, env_steps: int) -> AbstractContextManager[None]:
        """Run the same update in the other learner processes, if any; the first call starts them."""
        if self.experiment.engine.learners == 1:
            return nullcontext()
        if self.processes is None:
            from tiltyard.engines.local.learner_group import LearnerProcesses

            self.processes = LearnerProcesses(self.experiment, self.spec, self.base, self.name, self.net, self.algo)
            self.algo.group = self.processes.group
        return self.processes.updating(rollout, self.net.arrays(), self.algo.save(), env_steps)

    def close(self) -> None:
        """End the other learner processes."""
        if self.processes is not None:
            self.processes.close()

    # ------------------------------------------------------------------------------------------ disk

    def save(self) -> tuple[dict[str, Tree], Tree]:
        """The policy's tree by its name in a checkpoint, and the rest for the engine to keep. They share memory."""
        streams = {"seed": self.experiment.seed, "generators": self.generators.save()}
        rest = {**streams, "algo": self.algo.save(), "env_steps": self.env_steps, "since": self.since}
        return policy_tree(self.name, self.net, self.spec, self.experiment), rest

    def load(self, folder: Path, tree: Tree) -> None:
        self.net.load_arrays(read_tree(folder / "policies", self.name)["weights"])
        self.algo.load(tree["algo"])
        for value in self.algo.values.values() if self.experiment.population is None else ():
            value.fixed = None  # changes made while training are in the experiment by now
        self.env_steps, self.since = tree.get("env_steps", 0), tree.get("since", 0)
        if tree["seed"] in (None, self.experiment.seed):
            self.generators.load(tree["generators"])
        else:  # a fork with another seed uses its own streams
            fresh = np.random.default_rng(stream_seed(self.experiment.seed, LEARN, self.place))
            self.algo.shuffling.bit_generator.state = fresh.bit_generator.state

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self) -> PolicyState:
        optimiser = copy.deepcopy(self.algo.save())
        return PolicyState(self.net.arrays(), optimiser, self.algo.current_settings(), self.algo.used)

    def forget_loss(self) -> None:
        """Before the first update, have the term of algo.loss built again: the net has got other weights."""
        if self.algo.untrained:
            vars(self.algo).pop("own_loss", None)

    def adopt(self, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        if state is not None:
            own = self.algo.shuffling.bit_generator.state
            self.net.load_arrays(state.weights)
            self.algo.load(state.optimiser)
            self.forget_loss()
            self.algo.shuffling.bit_generator.state = own  # each policy keeps its own shuffling
        self.algo.change(settings)
        return self.algo.current_settings()


def build_net(experiment: Experiment, spec: EnvSpec, base: Sequence[Path], name: str) -> PolicyNet:
    """The net of a policy with its initial weights, on the CPU."""
    torch.set_num_threads(1)  # the weights must not depend on the number of threads
    place = list(experiment.policy_settings).index(name)
    seed = stream_seed(experiment.seed, INIT, place)
    return PolicyNet(spec, experiment.model, base, seed, squashed=experiment.squashed)


def build_algo(
    experiment: Experiment, policy: str, net: PolicyNet, base: Sequence[Path], seed: int
) -> Ppo | OwnAlgorithm:
    """The algorithm of a policy: PPO, or the user's own."""
    settings = experiment.algo_of(policy)
    if isinstance(settings, OwnAlgo):
        return OwnAlgorithm(settings, net, seed, base)
    assert isinstance(settings, Own)  # other algorithms need engine.kind=rllib
    return Ppo(settings, net, experiment.model.memory.bptt, experiment.stop.env_steps, seed, base)


def device_named(wanted: str) -> torch.device:
    """The device that engine.device selects here."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UseError("engine.device = cuda: torch finds no GPU", "set engine.device=cpu or auto")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def check_learners(learners: int, device: torch.device) -> None:
    """Refuse a number of learners, more than one, that cannot run here."""
    if device.type == "cuda" and learners > torch.cuda.device_count():
        message = f"engine.learners = {learners} needs one GPU per learner, but torch finds {torch.cuda.device_count()}"
        hint = f"set engine.learners={torch.cuda.device_count()}, or engine.device=cpu"
        raise UseError(message, hint)
    if not torch.distributed.is_available():
        hint = "set engine.learners=1, or install another build of torch"
        raise UseError(f"engine.learners = {learners} needs torch.distributed, which this build of torch lacks", hint)
