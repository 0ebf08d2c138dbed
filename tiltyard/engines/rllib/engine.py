"""Ray RLlib behind the same methods: its algorithms, its processes on one machine or many, our nets in its modules.

    runners (runner.py)  ── episodes ──>  RLlib  ──>  learner (learners.py) with our module (modules.py)
                         <── weights ──

One step is one of RLlib's iterations. A policy that comes out of it is one of ours and needs no Ray. How settings
become RLlib's is translate.py and build.py, Ray itself is cluster.py, what RLlib's state leaves out is state.py.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.config.rllib_algos import Named
from tiltyard.engines.collector import FOREIGN, stream_seed
from tiltyard.engines.rllib.ray_cluster import Cluster, require_ray
from tiltyard.engines.rllib.settings_map import envs_each, needs, problems, runners
from tiltyard.engines.rllib.worker_spec import KEY, SECONDS, UPDATES, WorkerSpec
from tiltyard.errors import ConfigError, TiltyardError, UseError, did_you_mean
from tiltyard.models.policy import save_policy
from tiltyard.run.checkpoint import read_tree, write_tree
from tiltyard.types import Arrays, EnvSpec, EpisodeEnd, PolicyState, Progress, Report

Result = TypeVar("Result")

DRIVER = 2**30  # its place among the random streams
MODULE = "default_policy"  # RLlib's name for the only one


def check_rllib(experiment: Experiment, spec: EnvSpec) -> None:
    """Everything that can be known before a run exists."""
    require_ray()
    found = list(problems(experiment, spec))
    if isinstance(experiment.algo, Named):
        from tiltyard.engines.rllib.algorithm_options import option_problems

        found += option_problems(WorkerSpec(experiment, spec, ()))
    if found:
        raise ConfigError(found)


class RllibEngine:
    """Policies learned by one of RLlib's algorithms."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], attempt: int = 0) -> None:
        check_rllib(experiment, spec)
        self.experiment, self.spec, self.base = experiment, spec, tuple(base)
        self.task = WorkerSpec(experiment, spec, self.base, attempt)
        self.progress = Progress()
        self.generators = Generators(stream_seed(experiment.seed, FOREIGN, DRIVER + attempt))
        self.nets = {name: self.task.net(name) for name in experiment.learning}
        self.watch = _Watch()
        logs = self.base[0] / "logs" / "ray" if self.base and (self.base[0] / "experiment.yaml").exists() else None
        self.cluster: Cluster | None = Cluster(experiment.engine, needs(experiment), logs)
        self.algo: Any = None
        try:
            with self.cluster.hushed(), self.generators.active():
                from tiltyard.engines.rllib.algorithm_config import algorithm

                self.algo = _in_words(lambda: algorithm(self.task), "start its processes")
                self._give_first_weights()
        except BaseException:
            self.close()
            raise
        self.nodes = self.cluster.nodes()
        self.failures = 0
        self.lost: set[str] = set()  # groups of envs that failed

    def describe(self) -> list[str]:
        count, engine, algo = runners(self.experiment), self.experiment.engine, self.experiment.algo
        each = f"{envs_each(self.experiment)} envs"
        acting = f"{count} runner{'s' if count > 1 else ''} with {each} each" if count else f"{each} in this process"
        acting += self._where()
        learning = f"{engine.learners} learners" if engine.learners > 1 else "a learner in this process"
        assert self.cluster is not None
        net = self.nets[self.experiment.learning[0]]
        size = self.algo.config.total_train_batch_size
        return [
            f"model   {net.describe()}",
            f"algo    {algo.id} of RLlib: a batch of {size:,} env steps per update",
            f"engine  rllib: {acting}, {learning}; {self.cluster.describe()}",
            "policy  acts without Ray",
        ]

    def _where(self) -> str:
        """The nodes that runners are on, where there are several."""
        assert self.cluster is not None
        names = self.cluster.names()
        if len(names) < 2 or runners(self.experiment) == 0:
            return ""
        found = self.algo.env_runner_group.foreach_env_runner(lambda runner: runner.node(), local_env_runner=False)
        counts = Counter(names[node] for node in found)
        return " on " + ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))

    # ------------------------------------------------------------------------------------------ one iteration

    def step(self) -> Report:
        started = perf_counter()
        with self.generators.active():
            result = _in_words(self.algo.train, "train")
        total = perf_counter() - started
        notes = _notes(result) or self._asked()
        events = self._failures(notes) + self._losses()
        learned = _found(result, "learners") or {}
        count = max(1, self.experiment.engine.learners)
        updates = round(_number(_found(learned, "__all_modules__", UPDATES)) / count)
        seconds = _number(_found(learned, "__all_modules__", SECONDS)) / count
        ends = [EpisodeEnd(**end) for note in notes for end in note["ends"]]
        self.progress = replace(
            self.progress,
            env_steps=self.progress.env_steps + sum(note.get("steps", 0) for note in notes),
            frames=self.progress.frames + sum(note.get("frames", 0) for note in notes),
            updates=self.progress.updates + updates,
            episodes=self.progress.episodes + len(ends),
            seconds=self.progress.seconds + total,
        )
        metrics = {**self._metrics(learned), **_shares(notes)}
        return Report(self.progress, metrics, ends, self._split(notes, total, seconds), tuple(events))

    def _asked(self) -> list[dict[str, Any]]:
        """Where nothing was sampled RLlib drops what runners noted: why envs failed is asked for."""
        found = self.algo.env_runner_group.foreach_env_runner(lambda runner: (runner.worker_index or 0, runner.failed))
        return [{"runner": who, "failed": failed, "ends": []} for who, failed in found if failed is not None]

    def _split(self, notes: list[dict[str, Any]], total: float, learned: float) -> dict[str, float]:
        """Where the driver's time went."""
        learned = min(learned, total)
        if runners(self.experiment) == 0:
            spent = {
                part: sum(note["spent"][part] for note in notes if "spent" in note) for part in ("env", "inference")
            }
            spent["learn"] = learned
            return {**spent, "other": max(0.0, total - sum(spent.values()))}
        return {"learn": learned, "wait": max(0.0, total - learned)}

    def _metrics(self, learned: dict[str, Any]) -> dict[str, float]:
        """The learner's numbers under our names; of each policy where there are several."""
        found: dict[str, float] = {}
        several = len(self.experiment.policy_settings) > 1
        for module, numbers in learned.items():
            if module != "__all_modules__" and isinstance(numbers, dict):
                front = f"policy/{module}/" if several else ""
                found |= {f"{front}{name}": value for name, value in _renamed(numbers).items()}
        return found

    def _failures(self, notes: list[dict[str, Any]]) -> list[str]:
        """Envs that failed and were started anew: told, and counted against engine.restarts."""
        said = []
        for note in notes:
            if "failed" in note and note["failed"]["life"] not in self.lost:
                self.lost.add(note["failed"]["life"])
                self.failures += 1
                failed = note["failed"]
                if self.failures > self.experiment.engine.restarts:
                    raise TiltyardError(
                        f"envs failed {self.failures} times, and engine.restarts = {self.experiment.engine.restarts}: "
                        f"{failed['message']}",
                        failed["hint"],
                        failed["details"],
                    )
                said.append(f"runner {note['runner']} starts its envs anew: {failed['message']}")
        return said

    def _losses(self) -> list[str]:
        """Runners and nodes that were lost, and what became of them."""
        assert self.cluster is not None
        said = self.watch.said()
        nodes = self.cluster.nodes()
        for node, alive in self.nodes.items():
            if alive and not nodes.get(node, False):
                left = sum(nodes.values())
                name = self.cluster.names().get(node, node[:8])
                said.append(f"node {name} was lost; its runners are started on the {left} that are left")
        self.nodes = nodes
        return said

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path, *, cut: bool = False) -> None:
        from tiltyard.engines.rllib.checkpoint import engine_state

        if cut:  # a part of RLlib that is gone may be waited for without end
            raise UseError("RLlib is asked for nothing after a step that failed", "`tiltyard resume` goes on before it")

        for name, net in self._fresh_nets().items():
            save_policy(folder / "policies", name, net, self.spec, self.experiment)
        groups, tree = engine_state(self.algo)
        tree |= {
            "engine": "rllib",
            "algo": self.experiment.algo.id,
            "groups": len(groups),
            "progress": asdict(self.progress),
            "generators": self.generators.save(),
        }
        write_tree(folder / "engine", "state", tree)
        for number, group in enumerate(groups):
            write_tree(folder / "engine", f"group-{number}", group)

    def load(self, folder: Path) -> list[str]:
        from tiltyard.engines.rllib.checkpoint import set_engine_state

        tree = read_tree(folder / "engine", "state")
        if tree.get("engine") != "rllib" or tree["algo"] != self.experiment.algo.id:
            return self._only_weights(folder, tree)
        self.progress = Progress(**tree["progress"])
        self.generators.load(tree["generators"])
        groups = [read_tree(folder / "engine", f"group-{number}") for number in range(tree["groups"])]
        return _in_words(lambda: set_engine_state(self.algo, tree, groups), "take over a checkpoint")

    def _only_weights(self, folder: Path, tree: Any) -> list[str]:
        """From another engine or algorithm: what a policy is."""
        self.progress = Progress(**tree["progress"])
        for name, net in self.nets.items():
            net.load_arrays(read_tree(folder / "policies", name)["weights"])
        self._give_first_weights()
        return ["the checkpoint is of another engine or algorithm: weights are taken over, the optimiser starts anew"]

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str | None = None) -> PolicyState:
        name = self._named(policy)
        return PolicyState(self._fresh_nets()[name].arrays(), {}, {})

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        """Weights only: RLlib's settings are fixed when it starts."""
        if settings:
            raise UseError(
                f"engine.kind = rllib cannot change {', '.join(sorted(settings))} while training",
                "use the local engine",
            )
        if state is not None:
            self.nets[self._named(policy)].load_arrays(state.weights)
            self._give_first_weights()
        return {}

    def past(self) -> dict[str, dict[int, Arrays]]:
        return {}  # combinations.py refuses pools of past versions here

    def _named(self, policy: str | None) -> str:
        name = policy or self.experiment.learning[0]
        if name not in self.nets:
            raise UseError(f"unknown learning policy {name!r}", did_you_mean(name, self.nets))
        return name

    def _modules(self) -> dict[str, str]:
        """RLlib's name of each policy's module."""
        several = len(self.experiment.policy_settings) > 1
        return {name: name if several else MODULE for name in self.experiment.learning}

    def _fresh_nets(self) -> dict[str, Any]:
        """Our own copies of what is learned, as it is now."""
        weights = self.algo.learner_group.get_weights()
        for name, module in self._modules().items():
            own = {key.removeprefix("net."): value for key, value in weights[module].items() if key.startswith("net.")}
            self.nets[name].load_arrays(own)
        return self.nets

    def _give_first_weights(self) -> None:
        """Have RLlib learn and act with the weights of our copies."""
        from tiltyard.engines.rllib.checkpoint import give_weights

        arrays = {module: self.nets[name].arrays() for name, module in self._modules().items()}
        give_weights(self.algo, arrays)

    def close(self) -> None:
        if self.algo is not None:
            self.algo.stop()
            self.algo = None
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None
        self.watch.close()


# ------------------------------------------------------------------------------------------------ RLlib's words


class _Watch(logging.Handler):
    """Hears what RLlib says of runners that die, and says it in one sentence each."""

    NAMES = ("ray.rllib.utils.actor_manager", "ray.rllib.env.env_runner_group")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []
        for name in self.NAMES:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())

    def said(self) -> list[str]:
        heard, self.heard = self.heard, []
        return list(dict.fromkeys(sentence for text in heard if (sentence := _decoded(text))))

    def close(self) -> None:
        for name in self.NAMES:
            logging.getLogger(name).removeHandler(self)
        super().close()


def _decoded(text: str) -> str:
    """What happened to which runner, out of a log line of RLlib's."""
    actor = re.search(r"actor (\d+)", text)
    who = f"runner {actor.group(1)}" if actor else "a runner"
    if "out of service" in text:
        cause = re.search(r"(\w+Error)", text)
        return f"{who} was lost ({cause.group(1) if cause else 'no reason given'}); another takes its place"
    return ""


def _in_words(do: Callable[[], Result], what: str) -> Result:
    """What `do` gives; what Ray raises in it is told as ours: which process, which exception."""
    import ray.exceptions

    try:
        return do()
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, TiltyardError):
            raise cause from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise TiltyardError(
            f"RLlib could not {what}: {type(error).__name__}: {lines[-1] if lines else 'no reason given'}",
            "the logs of Ray's processes are in the run's logs/ray",
            str(error),
        ) from error


def _found(tree: Any, *path: str) -> Any:
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _number(value: Any) -> float:
    """RLlib says NaN where nothing has happened."""
    return 0.0 if value is None or math.isnan(float(value)) else float(value)


def _notes(result: Any) -> list[dict[str, Any]]:
    """What runners have noted; RLlib gives a single one without its list."""
    lines = _found(result, "env_runners", KEY)
    return [json.loads(line) for line in ([lines] if isinstance(lines, str) else lines or []) if isinstance(line, str)]


NAMES = {
    "policy_loss": "loss/policy",
    "mean_pi_loss": "loss/policy",
    "vf_loss": "loss/value",
    "mean_vf_loss": "loss/value",
    "entropy": "loss/entropy",
    "mean_kl_loss": "loss/kl",
    "curr_kl_coeff": "setting/kl",
    "curr_entropy_coeff": "setting/entropy",
    "default_optimizer_learning_rate": "setting/lr",
    "policy_learning_rate": "setting/lr",
    "qf_loss": "loss/q",
    "qf_mean": "learn/q",
    "td_error_mean": "learn/td_error",
    "alpha_value": "learn/temperature",
    "diff_num_grad_updates_vs_sampler_policy": "lag/mean",
    "gradients_default_optimizer_global_norm": "learn/gradient_norm",
}


def _renamed(numbers: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in sorted(numbers.items(), key=lambda pair: "/" not in pair[0]):  # where both say it, ours
        ours = name if "/" in name else NAMES.get(name)
        if ours is not None:
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            if not math.isnan(number):
                found.setdefault(ours, number)
    return found


def _shares(notes: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the runners' time."""
    spent = [note["spent"] for note in notes if "spent" in note and note["runner"] > 0]
    total = sum(each["all"] for each in spent)
    if not total:
        return {}
    return {f"workers/{part}": sum(each[part] for each in spent) / total for part in ("env", "inference")}
