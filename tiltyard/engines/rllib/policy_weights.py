"""The policies' nets in the driver: our own copies of the weights that RLlib's learners train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiltyard.engines.rllib.worker_spec import WorkerSpec
from tiltyard.errors import UseError, did_you_mean
from tiltyard.models.policy_net import PolicyNet

DEFAULT_MODULE = "default_policy"  # RLlib's name for the only module


class PolicyWeights:
    """One net per learning policy, with its first weights until `pull` is called."""

    def __init__(self, worker_spec: WorkerSpec) -> None:
        experiment = worker_spec.experiment
        self.learning: Sequence[str] = experiment.learning
        self.nets: dict[str, PolicyNet] = {name: worker_spec.net(name) for name in experiment.learning}
        several = experiment.several_policies
        self._modules = {name: name if several else DEFAULT_MODULE for name in experiment.learning}

    def name_of(self, policy: str | None) -> str:
        """The given policy, by default the first; UseError unless it learns."""
        name = policy or self.learning[0]
        if name not in self.nets:
            raise UseError(f"unknown learning policy {name!r}", did_you_mean(name, self.nets))
        return name

    def pull(self, algo: Any) -> dict[str, PolicyNet]:
        """Copy the learners' current weights into the nets."""
        weights = algo.learner_group.get_weights()
        for name, module in self._modules.items():
            own = {key.removeprefix("net."): value for key, value in weights[module].items() if key.startswith("net.")}
            self.nets[name].load_arrays(own)
        return self.nets

    def push(self, algo: Any) -> None:
        """Make RLlib's learners and runners use the weights of the nets."""
        from tiltyard.engines.rllib.checkpoint import set_weights

        set_weights(algo, {module: self.nets[name].arrays() for name, module in self._modules.items()})
