"""The engine of `algo.id: clone`: learns from a dataset in one process, and steps no env. Evaluations do that.

    step():   rows of recorded episodes -> one update -> the loss on held-out episodes

It is an engine like the others, so that metrics, checkpoints, evaluations, stop conditions and resume are the training
loop's. Env steps count recorded steps. Its checkpoints have policies like any other, and no envs: a fork to another
algorithm takes the weights and begins new episodes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from tiltyard.algos.behaviour_cloning import Cloning
from tiltyard.algos.flat_adam import Backup
from tiltyard.algos.rng import Generators
from tiltyard.config.clone_algo import Clone
from tiltyard.config.experiment import Experiment, episode_digest
from tiltyard.config.sections import Env
from tiltyard.config.validation import validate
from tiltyard.data import folder as layout
from tiltyard.data.dataset_file import About
from tiltyard.data.manifest import Manifest
from tiltyard.data.split import is_validation
from tiltyard.engines.collector import FOREIGN, LEARN, stream_seed
from tiltyard.engines.engine_state import read_state
from tiltyard.engines.learner import LEARNER, build_net, device_named
from tiltyard.engines.recorded_rows import MOST_ROWS, RecordedRows, Source, step_bytes
from tiltyard.engines.topology import Topology, learner_threads
from tiltyard.errors import UseError, did_you_mean
from tiltyard.models.policy_files import policy_tree
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.resources import free_memory
from tiltyard.run.state_file import read_tree
from tiltyard.types import Array, Arrays, EnvSpec, PolicyState, Progress, Report, Tree

STATISTICS = 1 << 16  # env steps that fill the normaliser of observations
UNKNOWN = "unknown"  # the env of data that were imported without one; observations and actions must fit all the same
COPIES = 3  # of a batch: as read, as tensors, a minibatch with its activations
READ, HELD_OUT = 1, 2  # orders of episodes, derived from the learner's random stream


@dataclass(frozen=True)
class Chosen:
    """The episodes of a dataset that are learned from, and those held out for validation."""

    learn: Manifest
    held_out: Manifest

    @property
    def steps(self) -> int:
        return int(self.learn.column("length").sum())


def choose_episodes(algo: Clone) -> Chosen:
    """UseError if the folder is not a dataset, or nothing is left to learn from."""
    folder = Path(algo.dataset)
    found = layout.read_manifest(folder)
    setting = f"algo.dataset = {folder}"
    if algo.agents:
        names = np.asarray(found.table.column("agent").to_pylist(), object)
        missing = [name for name in algo.agents if name not in set(names)]
        if missing:
            raise UseError(
                f"algo.agents names {missing[0]!r}, but {folder} has no episode of it", did_you_mean(missing[0], names)
            )
        found = found.take(np.flatnonzero(np.isin(names, algo.agents)))
    found = found.take(np.flatnonzero(found.column("length") > 0))
    if not len(found):
        raise UseError(f"{setting} has no episodes", "add some with: tiltyard data collect ENV --out FOLDER")
    held_out = is_validation(found.column("seed"), algo.validation)
    if held_out.all():
        message = f"algo.validation = {algo.validation:g} holds out all {len(found)} episodes of {folder}"
        raise UseError(message, "set algo.validation=0, or collect more episodes")
    return Chosen(found.take(np.flatnonzero(~held_out)), found.take(np.flatnonzero(held_out)))


# ------------------------------------------------------------------------------------------------ checks


def check_cloning(experiment: Experiment, spec: EnvSpec) -> tuple[Chosen, list[str]]:
    """The episodes to learn from, and notes. UseError if the dataset does not fit the env, or a batch the memory."""
    algo = experiment.algo
    assert isinstance(algo, Clone)
    folder, chosen = Path(algo.dataset), choose_episodes(algo)
    about = layout.read_about(folder)
    if about.env_id != UNKNOWN and _bare(about.env_id) != _bare(experiment.env.id):
        message = f"algo.dataset = {folder} is a dataset of {about.env_id}, but env.id = {experiment.env.id}"
        raise UseError(message, f"set env.id={about.env_id}, or give another dataset")
    for what, there, here in (
        ("observations", _observations(about.spec), _observations(spec)),
        ("actions", _actions(about.spec), _actions(spec)),
    ):
        if there != here:
            message = f"algo.dataset = {folder} has the {what} {there}, but env {experiment.env.id} has {here}"
            hint = f"use the settings that it was recorded with: {about.env}"
            if about.env_id == UNKNOWN:
                hint = f"import it again with --env {experiment.env.id}"
            previous = {name for name in about.spec.obs if name not in spec.obs}
            raise UseError(message, f"{hint}; {sorted(previous)} may need model.previous=true" if previous else hint)
    wanted = COPIES * algo.batch * (step_bytes(spec) + 4 * (spec.action.columns + 2))
    if wanted > free_memory():
        message = f"algo.batch = {algo.batch:,} env steps need about {wanted / 2**30:.1f} GiB"
        raise UseError(f"{message}, but only {free_memory() / 2**30:.1f} GiB are free", "set a smaller algo.batch")
    return chosen, _notes(experiment, about, spec, chosen)


def _notes(experiment: Experiment, about: About, spec: EnvSpec, chosen: Chosen) -> list[str]:
    notes = []
    env, _ = validate(Env, {**about.env, "id": experiment.env.id})
    if about.digest and env is not None and episode_digest(env) != episode_digest(experiment.env):
        notes.append(f"the dataset was recorded with other settings of the env: {about.env}")
    if spec.masked:
        notes.append("action masks are not recorded: the policy learns without them, evaluations apply them")
    validation = getattr(experiment.algo, "validation", 0.0)
    if validation and not len(chosen.held_out):
        few = f"none of its {len(chosen.learn)} episodes is held out (algo.validation = {validation:g})"
        notes.append(f"the dataset is small: {few}, so there is no loss/validation")
    return notes


def _bare(env_id: str) -> str:
    """An id without the folder of a plug-in, which a run copies elsewhere."""
    return env_id.rpartition("/")[2]


def _observations(spec: EnvSpec) -> str:
    return ", ".join(f"{name} {item.shape} {item.dtype} ({item.kind})" for name, item in sorted(spec.obs.items()))


def _actions(spec: EnvSpec) -> str:
    return ", ".join(
        f"{part.options or part.columns} {part.kind}"
        + (f" from {list(part.low)} to {list(part.high)}" if part.kind == "continuous" else "")
        for part in spec.action.parts
    )


# ------------------------------------------------------------------------------------------------ the engine


class CloneEngine:
    """Learns the recorded actions of a dataset."""

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        base: Sequence[Path],
        net: PolicyNet | None = None,
        threads: int | None = None,
    ) -> None:
        settings = experiment.algo
        assert isinstance(settings, Clone)
        self.experiment, self.spec, self.settings = experiment, spec, settings
        self.name = experiment.learning[0]
        self.device = device_named(experiment.engine.device)
        self.net = (net or build_net(experiment, spec, base, self.name)).to(self.device)
        self.threads, self.why = learner_threads(experiment, spec, self.net, Topology(0, "", threads=threads))
        torch.set_num_threads(self.threads)
        seed = stream_seed(experiment.seed, LEARN)
        bptt = experiment.model.memory.bptt
        self.algo = Cloning(settings, self.net, bptt, experiment.stop.env_steps, seed)
        self.generators = Generators(stream_seed(experiment.seed, FOREIGN, LEARNER))
        self._backup = Backup(self.net, self.algo.adam)
        chosen, self.notes = check_cloning(experiment, spec)
        source = partial(Source, Path(settings.dataset), spec=spec, reward=self._reward, value=self._value)
        self.source, self.held_out_source = source(chosen.learn), source(chosen.held_out)
        self.digests = [self.source.digest, self.held_out_source.digest]
        wanted = max(1, settings.minibatch // bptt) if self.net.recurrent else MOST_ROWS
        self.rows = RecordedRows(self.source, self.source.rows(wanted), stream_seed(seed, READ))
        self.steps = self._multiple(settings.batch / len(self.rows))
        self.state = self.net.initial_state(len(self.rows))
        self.held_out: RecordedRows | None = None
        if len(chosen.held_out):
            rows = self.held_out_source.rows(wanted)
            self.held_out = RecordedRows(self.held_out_source, rows, stream_seed(seed, HELD_OUT))
            self.held_out_steps = self._multiple(settings.batch * settings.validation / rows)
            self.held_out_state = self.net.initial_state(rows)
        self.progress = Progress()

    def _multiple(self, steps: float) -> int:
        """Steps per row and update, in whole chunks."""
        return max(1, math.ceil(steps / self.algo.bptt)) * self.algo.bptt

    def _reward(self, reward: Array) -> Array:
        """Recorded rewards as the env would give them to the learner."""
        env = self.experiment.env
        scaled = reward * env.reward_scale
        return scaled if env.reward_clip is None else np.clip(scaled, -env.reward_clip, env.reward_clip)

    def _value(self, obs: Arrays) -> float:
        """Value of what follows a truncated episode. With memory this is an estimate: its memory is empty here."""
        return float(self.net.value(obs, self.net.initial_state(1), np.ones(1, np.bool_))[0])

    def describe(self) -> list[str]:
        batch, each = self.steps * len(self.rows), self.algo.bptt * len(self.rows)
        minibatch = each if self.net.recurrent else min(self.settings.minibatch, batch)
        held_out = len(self.held_out_source.episodes)
        split = f"{held_out:,} more for validation" if held_out else "none for validation"
        return [
            f"model   {self.net.describe()}",
            f"algo    clone: a batch of {batch:,} env steps ({len(self.rows)} rows x {self.steps}) per update, "
            f"{-(-batch // minibatch)} gradient steps on {minibatch:,}",
            f"data    {self.settings.dataset}: {len(self.source.episodes):,} episodes with {self.source.steps:,} env "
            f"steps, {split}",
            *(f"note    {note}" for note in self.notes),
            f"engine  {self.experiment.engine.kind}: one process without envs, "
            f"{self.threads} thread{'s' if self.threads > 1 else ''} ({self.why}), {self.device}",
        ]

    # ------------------------------------------------------------------------------------------ learning

    def step(self) -> Report:
        started = perf_counter()
        self._backup.save()
        before = self._positions(), self.algo.shuffling.bit_generator.state
        try:
            metrics, spent = self._learn()
        except BaseException:
            self._backup.restore()
            self.net.normaliser.refresh()
            self._set_positions(before[0])
            self.algo.shuffling.bit_generator.state = before[1]
            raise
        batch, total = self.steps * len(self.rows), perf_counter() - started
        episodes = self.rows.finished - self.progress.episodes
        self.progress = self.progress.plus(batch, batch * self.spec.frameskip, 1, episodes, total)
        spent["other"] = max(0.0, total - sum(spent.values()))
        return Report(self.progress, metrics, [], spent)

    def _learn(self) -> tuple[dict[str, float], dict[str, float]]:
        """One update and the loss on held-out episodes: metrics, and seconds spent."""
        begun = perf_counter()
        gamma = self.algo.current_settings()["gamma"]
        self._fill_normaliser(gamma)
        samples = self.rows.read(self.steps, gamma)
        held_out = None if self.held_out is None else self.held_out.read(self.held_out_steps, gamma)
        read = perf_counter()
        with self.generators.active():
            metrics, self.state = self.algo.update(samples, self.state, self.progress.env_steps)
            if held_out is not None:
                found, self.held_out_state = self.algo.measure(held_out, self.held_out_state)
                metrics |= found
        metrics["learn/passes"] = self.rows.passes
        return metrics, {"read": read - begun, "learn": perf_counter() - read}

    def _fill_normaliser(self, gamma: float) -> None:
        """Before the first update, measure the recorded observations. The statistics stay as they are from then on."""
        normaliser = self.net.normaliser
        if not normaliser.names or all(float(stats.count) for stats in normaliser.obs_stats):
            return
        rows = RecordedRows(self.source, len(self.rows), self.rows.seed)
        left = min(STATISTICS, self.source.steps)
        while left > 0:
            samples = rows.read(min(self.steps, math.ceil(left / len(rows))), gamma)
            normaliser.observe(samples.obs, np.ones_like(samples.first))
            left -= samples.first.size

    # ------------------------------------------------------------------------------------------ disk

    def _positions(self) -> Tree:
        """Where reading continues, and the recurrent state there."""
        held_out = self.held_out is not None
        return {
            "digests": self.digests,
            "rows": self.rows.save(),
            "state": {name: item.cpu().numpy() for name, item in self.state.items()},
            "held_out_rows": self.held_out.save() if self.held_out is not None else None,
            "held_out_state": {name: x.cpu().numpy() for name, x in self.held_out_state.items()} if held_out else {},
        }

    def _set_positions(self, tree: Tree) -> None:
        def tensors(saved: Arrays) -> dict[str, torch.Tensor]:
            return {name: torch.as_tensor(item, device=self.device) for name, item in saved.items()}

        self.rows.load(tree["rows"])
        self.state = tensors(tree["state"])
        if self.held_out is not None:
            self.held_out.load(tree["held_out_rows"])
            self.held_out_state = tensors(tree["held_out_state"])

    def save(self, folder: Path, *, cut: bool = False) -> dict[str, Tree]:
        parts = {"engine": "clone", "groups": 0, "cut": cut, "threads": self.threads, "seed": self.experiment.seed}
        learner = {"algo": self.algo.save(), "generators": self.generators.save(), "data": self._positions()}
        state = {**parts, "progress": asdict(self.progress), **learner}
        return {**policy_tree(self.name, self.net, self.spec, self.experiment), "engine/state": state}

    def load(self, folder: Path) -> list[str]:
        tree = read_state(folder)
        self.progress = Progress(**tree["progress"])
        self.net.load_arrays(read_tree(folder / "policies", self.name)["weights"])
        self.rows.finished = self.progress.episodes
        if tree.get("engine") != "clone":
            return ["the checkpoint is of another algorithm: weights are loaded, the optimiser starts from scratch"]
        self.algo.load(tree["algo"])
        for value in self.algo.values.values():
            value.fixed = None  # changes made while training are in the experiment by now
        if tree["seed"] != self.experiment.seed:  # a fork with another seed uses its own streams
            fresh = np.random.default_rng(stream_seed(self.experiment.seed, LEARN))
            self.algo.shuffling.bit_generator.state = fresh.bit_generator.state
            return ["the seed has changed: a new pass over the dataset begins"]
        self.generators.load(tree["generators"])
        data, rows = tree["data"], [len(self.rows), 0 if self.held_out is None else len(self.held_out)]
        there = [len(data["rows"]["rows"]), 0 if data["held_out_rows"] is None else len(data["held_out_rows"]["rows"])]
        if data["digests"] != self.digests or there != rows:
            return ["the dataset or how it is read has changed since the checkpoint: a new pass over it begins"]
        self._set_positions(data)
        return []

    # ------------------------------------------------------------------------------------------ between steps

    def _require(self, policy: str | None) -> None:
        if policy not in (None, self.name):
            raise UseError(f"unknown learning policy {policy!r}", did_you_mean(str(policy), [self.name]))

    def snapshot(self, policy: str | None = None) -> PolicyState:
        self._require(policy)
        optimiser = copy.deepcopy(self.algo.save())
        return PolicyState(self.net.arrays(), optimiser, self.algo.current_settings(), self.algo.used)

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        self._require(policy)
        if state is not None:
            own = self.algo.shuffling.bit_generator.state
            self.net.load_arrays(state.weights)
            self.algo.load(state.optimiser)
            self.algo.shuffling.bit_generator.state = own
        self.algo.change(settings)
        return self.algo.current_settings()

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """No env to give them to: evaluations read the experiment."""

    def past(self) -> dict[str, dict[int, Arrays]]:
        return {}

    def close(self) -> None:
        """Nothing is open."""
