"""Evaluations during training: the current weights in separate nets, envs and random streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Env, Experiment
from tiltyard.engines.policies.frozen import frozen_nets
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.engines.policies.opponent_pool import VersionPool, fill_version_pools
from tiltyard.engines.policies.policy_set import make_actor
from tiltyard.errors import UseError
from tiltyard.evaluation.actors import trained_actor
from tiltyard.evaluation.recording import VideoTarget
from tiltyard.evaluation.rollouts import episode_set, play_episodes
from tiltyard.evaluation.statistics import summarise
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Arrays, EnvSpec, Evaluation


class Evaluator:
    """Evaluates the policies of one experiment, on weights passed to it."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> None:
        self.experiment, self.spec, self.base = experiment, spec, base
        self.nets = {
            name: PolicyNet(spec, experiment.model, base, seed=0, squashed=experiment.squashed).eval()
            for name in experiment.learning
        }
        self.version_pools = {name: VersionPool(past, experiment, spec, base) for name, past in experiment.past.items()}
        frozen = frozen_nets(experiment, spec, base)
        self.actor = make_actor(experiment, spec, self.nets, frozen, self.version_pools, measured=True)

    def evaluate(
        self,
        weights: Mapping[str, Arrays],
        past: Mapping[str, Mapping[int, Arrays]],
        video: VideoTarget | None,
        cancelled: Callable[[], bool],
    ) -> Evaluation:
        """Evaluate these weights against past versions. Raises Cancelled soon after `cancelled` returns true."""
        started, settings = time.monotonic(), self.experiment.eval
        for name, net in self.nets.items():
            net.load_arrays(weights[name])
        fill_version_pools(self.version_pools, past)
        wanted = episode_set(self.experiment, self.spec, self.base, range(settings.episodes), settings.seed)
        with Generators(settings.seed).active():
            results = play_episodes(
                trained_actor(self.actor, settings.greedy, settings.seed),
                wanted,
                video=video,
                policies=self.actor if isinstance(self.actor, MultiPolicyActor) else None,
                cancelled=cancelled,
            )
        return summarise(results, settings.greedy, time.monotonic() - started)


def require_recordable(spec: EnvSpec, env: Env) -> None:
    """Raise UseError if a video of the env is impossible."""
    if not spec.filmable:
        raise UseError(
            f"env {env.id} cannot be recorded: it has no rgb_array rendering and no image observation",
            "leave out the video, or give the env render_mode='rgb_array'",
        )
