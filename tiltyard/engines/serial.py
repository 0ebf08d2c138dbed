"""The plain reference engine: envs, inference and update in one process, one after another.

    step():   T times { act -> step the envs -> store }  ->  bootstrap values  ->  one update

What it does is what every engine must do; what it does not care about is speed. Its numbers are the oracle for
other engines: same seed, same weights, also when stopped and resumed anywhere in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from tiltyard.algos.ppo import Ppo
from tiltyard.algos.randomness import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.envs.vector import EnvGroup
from tiltyard.errors import UseError
from tiltyard.models.net import PolicyNet
from tiltyard.models.policy import save_policy
from tiltyard.run.checkpoint import read_tree, write_tree
from tiltyard.types import Arrays, EnvSpec, EpisodeEnd, PolicyState, Progress, Report, Rollout, Step

ACT, INIT, LEARN, FOREIGN = 1, 2, 3, 4  # roles in the run's seed tree; envs have their own (role, row, episode)


class SerialEngine:
    """One policy, `main`, learned in this process."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> None:
        torch.set_num_threads(experiment.engine.threads)
        self.experiment, self.spec = experiment, spec
        self.device = device_named(experiment.engine.device)
        self.rows, self.length = experiment.engine.envs, experiment.algo.rollout
        self.bptt = experiment.model.memory.bptt
        self.net = PolicyNet(spec, experiment.model, base, seed=_seed(experiment.seed, INIT)).to(self.device)
        self.algo = Ppo(
            experiment.algo, self.net, self.bptt, experiment.stop.env_steps, seed=_seed(experiment.seed, LEARN)
        )
        self.draws = torch.Generator(self.device).manual_seed(_seed(experiment.seed, ACT))
        self.generators = Generators(_seed(experiment.seed, FOREIGN))
        with self.generators.in_place():
            self.envs = EnvGroup(
                experiment.env, spec, self.rows, experiment.seed, base=base, previous=experiment.model.previous
            )
        self.progress = Progress()
        self.now: Step | None = None  # what the envs last answered; None before the first reset
        self.state = self.net.initial_state(self.rows)
        self.rollout = self._empty_rollout()

    def describe(self) -> list[str]:
        algo, batch = self.experiment.algo, self.experiment.batch
        minibatch, epochs = getattr(algo, "minibatch", batch), getattr(algo, "epochs", 1)
        return [
            f"model   {self.net.describe()}",
            f"algo    {algo.id}: a batch of {batch:,} env steps ({self.rows} rows x {self.length}) per update, "
            f"{epochs} x {-(-batch // minibatch)} gradient steps on {minibatch:,}",
            f"engine  serial: {self.rows} envs, {self.experiment.engine.threads} thread(s), {self.device}",
        ]

    # ------------------------------------------------------------------------------------------ one batch

    def step(self) -> Report:
        with self.generators.in_place():
            return self._step()

    def _step(self) -> Report:
        started = perf_counter()
        spent = {"env": 0.0, "inference": 0.0, "learn": 0.0}
        frames = -self.envs.frames_taken
        episodes = self._collect(spent)
        batch = int(self.rollout.valid.sum())
        frames += self.envs.frames_taken

        mark = perf_counter()
        metrics = self.algo.update(self.rollout, self.progress.env_steps)
        spent["learn"] = perf_counter() - mark

        total = perf_counter() - started
        self.progress = replace(
            self.progress,
            env_steps=self.progress.env_steps + batch,
            frames=self.progress.frames + frames,
            updates=self.progress.updates + 1,
            episodes=self.progress.episodes + len(episodes),
            seconds=self.progress.seconds + total,
        )
        spent["other"] = max(0.0, total - sum(spent.values()))
        return Report(self.progress, metrics, episodes, spent)

    def _collect(self, spent: dict[str, float]) -> list[EpisodeEnd]:
        """Fill the rollout with T steps of every row; returns the episodes that ended meanwhile."""
        rollout, episodes = self.rollout, []
        if self.now is None:
            self.now = self.envs.reset()
        now = self.now
        for t in range(self.length):
            mark = perf_counter()
            for key, stored in rollout.obs.items():
                stored[t] = now.obs[key]
            rollout.first[t] = now.first
            if rollout.mask is not None and now.mask is not None:
                rollout.mask[t] = now.mask
            if t % self.bptt == 0:
                for key, chunk in rollout.state0.items():
                    chunk[t // self.bptt] = self.state[key].cpu().numpy()
            acted = self.net.act(
                {key: self._tensor(stored[t]) for key, stored in rollout.obs.items()},
                self.state,
                self._tensor(rollout.first[t]),
                None if rollout.mask is None else self._tensor(rollout.mask[t]),
                greedy=False,
                generator=self.draws,
            )
            self.state = acted.state
            rollout.action[t] = acted.action.cpu().numpy()
            rollout.log_prob[t] = acted.log_prob.cpu().numpy()
            rollout.value[t] = acted.value.cpu().numpy()
            spent["inference"] += perf_counter() - mark

            mark = perf_counter()
            now = self.envs.step(rollout.action[t])
            rollout.reward[t], rollout.valid[t] = now.reward, now.valid
            rollout.terminated[t], rollout.truncated[t] = now.terminated, now.truncated
            episodes += now.episodes
            spent["env"] += perf_counter() - mark

            # A truncated episode would have gone on: its last observation is worth what the critic says of it.
            if now.truncated.any():
                mark = perf_counter()
                worth = self._value(now.final_obs, np.zeros(self.rows, bool))
                rollout.bootstrap[t] = np.where(now.truncated, worth, 0.0)
                spent["inference"] += perf_counter() - mark
            else:
                rollout.bootstrap[t] = 0.0
        mark = perf_counter()
        running = ~(now.terminated | now.truncated)
        rollout.bootstrap[-1] = np.where(running, self._value(now.obs, now.first), rollout.bootstrap[-1])
        spent["inference"] += perf_counter() - mark
        rollout.policy_version[:] = self.progress.updates
        self.now = now
        return episodes

    def _value(self, obs: Arrays, first: np.ndarray) -> np.ndarray:
        tensors = {key: self._tensor(array) for key, array in obs.items()}
        return self.net.value(tensors, self.state, self._tensor(first)).cpu().numpy()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _empty_rollout(self) -> Rollout:
        """Preallocated and filled over and over; NaN shows what was never written."""
        t, b, spec = self.length, self.rows, self.spec

        def numbers() -> np.ndarray:
            return np.full((t, b), np.nan, np.float32)

        def flags() -> np.ndarray:
            return np.zeros((t, b), bool)

        return Rollout(
            obs={key: np.zeros((t, b, *item.shape), item.dtype) for key, item in spec.obs.items()},
            first=flags(),
            action=np.full((t, b, spec.action.columns), np.nan, np.float32),
            mask=np.ones((t, b, spec.action.mask_size), bool) if spec.masked else None,
            log_prob=numbers(),
            value=numbers(),
            reward=numbers(),
            terminated=flags(),
            truncated=flags(),
            bootstrap=numbers(),
            valid=flags(),
            state0={
                key: np.zeros((-(-t // self.bptt), *item.shape), np.float32)
                for key, item in self.net.initial_state(b).items()
            },
            policy_version=np.zeros((t, b), np.int64),
        )

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path) -> None:
        save_policy(folder / "policies", "main", self.net, self.spec, self.experiment)
        write_tree(
            folder / "engine",
            "serial",
            {
                "seed": self.experiment.seed,
                "progress": asdict(self.progress),
                "algo": self.algo.save(),
                "envs": self.envs.save() if self.now is not None else None,
                "memory": {key: item.cpu().numpy() for key, item in self.state.items()},
                "random": {"draws": self.draws.get_state().numpy(), "global": self.generators.save()},
            },
        )

    def load(self, folder: Path) -> list[str]:
        self.net.load_arrays(read_tree(folder / "policies", "main")["weights"])
        tree = read_tree(folder / "engine", "serial")
        self.progress = Progress(**tree["progress"])
        self.algo.load(tree["algo"])
        if tree.get("seed", self.experiment.seed) == self.experiment.seed:
            self.draws.set_state(torch.from_numpy(tree["random"]["draws"]))
            self.generators.load(tree["random"]["global"])
        else:  # a fork with another seed: what is drawn from here on is its own
            self.algo.shuffling = np.random.default_rng(_seed(self.experiment.seed, LEARN))
        said: list[str] = []
        if tree["envs"] is not None:
            said = self.envs.load(tree["envs"])
            self.now = self.envs.current()
        for key, item in self.state.items():  # with another number of envs, those that both have
            kept = tree["memory"][key][: len(item)]
            item[: len(kept)] = self._tensor(kept)
        return said

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str = "main") -> PolicyState:
        _only_main(policy)
        return PolicyState(self.net.arrays(), self.algo.save(), self.algo.settings_in_force())

    def adopt(self, policy: str, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        _only_main(policy)
        if state is not None:
            self.net.load_arrays(state.weights)
            self.algo.load(state.optimiser)
        self.algo.change(settings)
        return self.algo.settings_in_force()

    def close(self) -> None:
        self.envs.close()


def _only_main(policy: str) -> None:
    if policy != "main":
        raise UseError(f"the serial engine has no policy {policy!r}", "it trains one policy: main")


def _seed(root: int, role: int) -> int:
    return int(np.random.SeedSequence(entropy=root, spawn_key=(role,)).generate_state(1, np.uint64)[0] >> 1)


def device_named(wanted: str) -> torch.device:
    """The device that engine.device means here."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UseError("engine.device = cuda: torch sees no GPU here", "set engine.device=cpu or auto")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
