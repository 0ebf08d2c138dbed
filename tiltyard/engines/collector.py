"""The collector: steps a group of envs with an actor and fills rollouts. Every engine samples with it.

    fill(rollout):   T times { store obs -> act -> step the envs -> store rewards }  ->  bootstrap values

Equal seeds give equal rollouts in any process: each collector has its own envs and random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.engines.engine_state import read_group, read_state
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.vector import make_group
from tiltyard.models.policy_net import ObsIn, PolicyNet, PolicyOutput
from tiltyard.models.recurrent import State
from tiltyard.run.state_file import write_tree
from tiltyard.types import Array, Arrays, EnvSpec, EpisodeEnd, Rollout, Step, Tree

ACT, INIT, LEARN, FOREIGN = 1, 2, 3, 4  # roles in the run's seed tree; envs have theirs (role, row, episode)


def stream_seed(root: int, role: int, group: int = 0) -> int:
    """The seed of a random stream of the run, or of one of its groups of envs or policies."""
    key = (role, group) if group else (role,)
    return int(np.random.SeedSequence(entropy=root, spawn_key=key).generate_state(1, np.uint64)[0] >> 1)


class Actor(Protocol):
    """Acts in a group of envs: a policy, several policies, or a client of the inference server."""

    @property
    def device(self) -> torch.device:
        """Where its inputs must be."""

    @property
    def batched_values(self) -> bool:
        """Whether values are cheaper for a whole rollout at once than with each action."""

    def initial_state(self, rows: int) -> State:
        """Recurrent state at an episode's start."""

    def act(
        self,
        obs: ObsIn,
        state: State,
        first: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        greedy: bool,
        generator: torch.Generator | None = None,
        with_value: bool = True,
    ) -> PolicyOutput:
        """One action for each row."""

    def value(self, obs: ObsIn, state: State, first: torch.Tensor) -> Array:
        """[B] in units of reward."""


class Collector:
    """Group number `group` of the run's envs, with a row for each agent of each env.

    A worker process has its own `heartbeat`, and a share of the threads that a vector env may use.
    """

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        base: Sequence[Path],
        actor: Actor,
        envs: int,
        group: int = 0,
        heartbeat: Array | None = None,
        threads: int | None = None,
    ) -> None:
        self.experiment, self.spec, self.actor, self.group = experiment, spec, actor, group
        self.players = actor if isinstance(actor, MultiPolicyActor) else None
        rows = self.rows = envs * len(spec.agents)
        self.bptt = experiment.model.memory.bptt
        self.device = actor.device
        seed = experiment.seed
        self.draws = torch.Generator().manual_seed(stream_seed(seed, ACT, group))
        self.generators = Generators(stream_seed(seed, FOREIGN, group))
        with self.generators.active():
            config = GroupConfig(experiment.env, spec, rows, seed, base, first_row=group * rows, heartbeat=heartbeat)
            self.envs = make_group(replace(config, previous=experiment.model.previous), threads=threads)
        self.now: Step | None = None  # the envs' latest step; None before the first reset
        self.state = actor.initial_state(rows)
        self.begun = np.zeros(rows, np.int64)  # version of the weights when each running episode began

    def begin(self) -> None:
        """Reset the envs, unless they are running."""
        if self.now is None:
            with self.generators.active():
                self.now = self.envs.reset()

    def fill(self, rollout: Rollout, version: int, spent: dict[str, float]) -> list[EpisodeEnd]:
        """Fill the rollout with T steps of every row; returns the episodes that ended in it."""
        with self.generators.active():
            return self._fill(rollout, version, spent)

    def _fill(self, rollout: Rollout, version: int, spent: dict[str, float]) -> list[EpisodeEnd]:
        episodes: list[EpisodeEnd] = []
        cuts: list[tuple[int, Array, Arrays]] = []  # step, rows and their last observations
        deferred = self.actor.batched_values
        now = self.envs.reset() if self.now is None else self.now
        for t in range(len(rollout.reward)):
            mark = perf_counter()
            if self.players is not None and rollout.policy is not None:
                rollout.policy[t] = self.players.take_seats(self.envs.stats.seeds)
                self.begun[now.first] = version
            for key, stored in rollout.obs.items():
                stored[t] = now.obs[key]
            rollout.first[t] = now.first
            if rollout.mask is not None and now.mask is not None:
                rollout.mask[t] = now.mask
            if t % self.bptt == 0:
                for key, chunk in rollout.state0.items():
                    chunk[t // self.bptt] = self.state[key].cpu().numpy()
            acted = self.actor.act(
                {key: self._tensor(stored[t]) for key, stored in rollout.obs.items()},
                self.state,
                self._tensor(rollout.first[t]),
                None if rollout.mask is None else self._tensor(rollout.mask[t]),
                greedy=False,
                generator=self.draws,
                with_value=not deferred,
            )
            self.state = acted.state
            rollout.action[t] = acted.action
            rollout.log_prob[t] = acted.log_prob
            if not deferred:
                rollout.value[t] = acted.value
            between = perf_counter()
            spent["inference"] += between - mark

            now = self.envs.step(rollout.action[t])
            rollout.reward[t], rollout.valid[t] = now.reward, now.valid
            rollout.terminated[t], rollout.truncated[t] = now.terminated, now.truncated
            episodes += now.episodes if self.players is None else self.with_returns(now.episodes, self.players)
            mark = perf_counter()
            spent["env"] += mark - between

            # A truncated episode has a future: its last observation is worth what the critic estimates.
            rollout.bootstrap[t] = 0.0
            if now.truncated.any():
                rows = np.flatnonzero(now.truncated)
                if deferred:
                    cuts.append((t, rows, {key: array[rows] for key, array in now.final_obs.items()}))
                else:
                    rollout.bootstrap[t, rows] = self._value(now.final_obs, np.zeros(self.rows, bool))[rows]
                spent["inference"] += perf_counter() - mark
        mark = perf_counter()
        if deferred:
            self._fill_values(rollout, cuts)
        running = ~(now.terminated | now.truncated)
        rollout.bootstrap[-1] = np.where(running, self._value(now.obs, now.first), rollout.bootstrap[-1])
        spent["inference"] += perf_counter() - mark
        rollout.policy_version[:] = version
        self.now = now
        return episodes

    def with_returns(self, ends: list[EpisodeEnd], players: MultiPolicyActor) -> list[EpisodeEnd]:
        first_row, completed = self.group * self.rows, []
        for end in ends:
            begun = self.begun[end.row - first_row :][: len(self.spec.agents)].min()  # agents may join later
            completed.append(replace(end, returns=players.returns(end, first_row), begun=int(begun)))
        return completed

    def _fill_values(self, rollout: Rollout, cuts: list[tuple[int, Array, Arrays]]) -> None:
        """Compute the values of a whole rollout, and of the last observations of truncated episodes."""
        flat = {key: array.reshape(-1, *array.shape[2:]) for key, array in rollout.obs.items()}
        policy = rollout.policy
        values = self._values(flat, None if policy is None else policy.reshape(-1))
        rollout.value[...] = values.reshape(rollout.value.shape)
        if cuts:
            seen = {key: np.concatenate([obs[key] for _, _, obs in cuts]) for key in rollout.obs}
            steps = np.concatenate([np.full(len(rows), t) for t, rows, _ in cuts])
            rows = np.concatenate([rows for _, rows, _ in cuts])
            rollout.bootstrap[steps, rows] = self._values(seen, None if policy is None else policy[steps, rows])

    def _values(self, obs: Arrays, policy: Array | None) -> Array:
        """Values of any observations, each by the policy that acted on it. For nets without memory only."""
        if self.players is not None and policy is not None:
            return self.players.values_of(obs, policy)
        return self._value(obs, np.zeros(len(next(iter(obs.values()))), bool))

    def _value(self, obs: Arrays, first: Array) -> Array:
        tensors = {key: self._tensor(array) for key, array in obs.items()}
        return self.actor.value(tensors, self.state, self._tensor(first))

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def close(self) -> None:
        self.envs.close()

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path) -> None:
        """Write `group-N` into a checkpoint's engine folder."""
        write_tree(folder, f"group-{self.group}", self.tree())

    def tree(self) -> Tree:
        """The state of envs, recurrent memory and random streams."""
        return {
            "seed": self.experiment.seed,
            "envs": self.envs.save() if self.now is not None else None,
            "memory": {key: item.cpu().numpy() for key, item in self.state.items()},
            "seats": None if self.players is None else self.players.save(),
            "begun": self.begun.copy(),
            "draws": self.draws.get_state().numpy(),
            "generators": self.generators.save(),
        }

    def load(self, folder: Path) -> list[str]:
        """Continue from a checkpoint; returns notes about episodes that were cut."""
        tree = read_group(folder, self.group)
        if tree is None:
            progress = read_state(folder, arrays=False)["progress"]
            self.envs.skip_episodes(progress["episodes"] + 1)  # not of other groups
            return [f"the checkpoint has no env group {self.group}; its {self.rows} rows begin new episodes"]
        return self.take(tree)

    def take(self, tree: Tree) -> list[str]:
        """Continue from a `tree()`; returns notes about episodes that were cut."""
        if tree["seed"] in (None, self.experiment.seed):  # a fork with another seed uses its own streams
            self.draws.set_state(torch.from_numpy(tree["draws"]))
            self.generators.load(tree["generators"])
        notes: list[str] = []
        if tree["envs"] is not None:
            notes = self.envs.load(tree["envs"])
            self.now = self.envs.current()
            if self.players is not None and tree.get("seats") is not None:
                self.players.load(self.envs.stats.seeds, tree["seats"])
            begun = tree.get("begun", self.begun)[: self.rows]
            self.begun[: len(begun)] = begun
        for key, item in self.state.items():  # with another number of envs, the rows that both have
            if key in tree["memory"]:  # a fork may have other policies
                kept = tree["memory"][key][: len(item)]
                item[: len(kept)] = self._tensor(kept)
        return notes


Allocate = Callable[[str, tuple[int, ...], Any], Array]


def empty_rollout(
    experiment: Experiment, spec: EnvSpec, net: PolicyNet, envs: int, allocate: Allocate | None = None
) -> Rollout:
    """A rollout to be filled repeatedly, in memory from `allocate(name, shape, dtype)`."""
    length, bptt, rows = experiment.algo.rollout, experiment.model.memory.bptt, envs * len(spec.agents)
    make = allocate or _unwritten

    def columns(dtype: Any, *names: str) -> Arrays:
        return {name: make(name, (length, rows), dtype) for name in names}

    return Rollout(
        obs={key: make(f"obs.{key}", (length, rows, *item.shape), item.dtype) for key, item in spec.obs.items()},
        action=make("action", (length, rows, spec.action.columns), np.float32),
        mask=make("mask", (length, rows, spec.action.mask_size), np.bool_) if spec.masked else None,
        state0={
            key: make(f"state0.{key}", (-(-length // bptt), *item.shape), np.float32)
            for key, item in net.initial_state(rows).items()
        },
        **columns(np.float32, "log_prob", "value", "reward", "bootstrap"),
        **columns(np.bool_, "first", "terminated", "truncated", "valid"),
        **columns(np.int64, "policy_version"),
        **(columns(np.int16, "policy") if experiment.several_policies else {}),
    )


def _unwritten(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """New memory; NaN marks floats that were never written."""
    return np.full(shape, np.nan, dtype) if np.dtype(dtype).kind == "f" else np.zeros(shape, dtype)
