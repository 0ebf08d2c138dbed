"""The rllib engine: Ray RLlib's algorithms and processes, on one machine or many, with our nets in its modules.

    runners (env_runner.py)  ── episodes ──>  RLlib  ──>  learners (learners.py) with our modules (rl_modules.py)
                             <── weights ──

One step is one RLlib iteration. The trained policy is an ordinary one and needs no Ray. settings_map.py and
algorithm_config.py map settings to RLlib's, ray_cluster.py starts Ray, checkpoint.py saves what RLlib's state omits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.config.rllib_algos import Named
from tiltyard.engines.collector import FOREIGN, stream_seed
from tiltyard.engines.rllib import results
from tiltyard.engines.rllib.ray_cluster import Cluster, require_ray
from tiltyard.engines.rllib.settings_map import envs_per_runner, needs, problems, runner_count
from tiltyard.engines.rllib.worker_spec import SECONDS, UPDATES, WorkerSpec
from tiltyard.errors import ConfigError, TiltyardError, UseError, did_you_mean
from tiltyard.models.policy_files import policy_tree
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run.state_file import read_tree
from tiltyard.types import Arrays, EnvSpec, EpisodeEnd, PolicyState, Progress, Report, Tree

Result = TypeVar("Result")

DRIVER = 2**30  # the driver's index among the random streams


def check_rllib(experiment: Experiment, spec: EnvSpec) -> None:
    """Raise everything that can be found wrong before a run exists."""
    require_ray()
    found = list(problems(experiment, spec))
    if isinstance(experiment.algo, Named):
        from tiltyard.engines.rllib.algorithm_config import option_problems

        found += option_problems(WorkerSpec(experiment, spec, ()))
    if found:
        raise ConfigError(found)


class RllibEngine:
    """Trains policies with one of RLlib's algorithms."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], attempt: int = 0) -> None:
        check_rllib(experiment, spec)
        self.experiment, self.spec, self.base = experiment, spec, tuple(base)
        worker_spec = WorkerSpec(experiment, spec, self.base, attempt)
        self.progress = Progress()
        self.generators = Generators(stream_seed(experiment.seed, FOREIGN, DRIVER + attempt))
        self.weights = PolicyWeights(worker_spec)
        self.lost_runners = results.LostRunners()
        logs = self.base[0] / "logs" / "ray" if self.base and (self.base[0] / "experiment.yaml").exists() else None
        self.cluster = Cluster(experiment.engine, needs(experiment), logs)
        self.algo: Any = None
        try:
            with self.cluster.redirect_stderr(), self.generators.active():
                from tiltyard.engines.rllib.algorithm_config import make_algorithm

                self.algo = _translate_errors(lambda: make_algorithm(worker_spec), "start its processes")
                self.weights.push(self.algo)
        except BaseException:
            self.close()
            raise
        self.nodes = self.cluster.nodes()
        self.failed_groups: set[str] = set()

    def describe(self) -> list[str]:
        count, engine, algo = runner_count(self.experiment), self.experiment.engine, self.experiment.algo
        each = f"{envs_per_runner(self.experiment)} envs"
        acting = f"{count} runner{'s' if count > 1 else ''} with {each} each" if count else f"{each} in this process"
        acting += self._runner_nodes()
        learning = f"{engine.learners} learners" if engine.learners > 1 else "a learner in this process"
        net = self.weights.nets[self.experiment.learning[0]]
        size = self.algo.config.total_train_batch_size
        return [
            f"model   {net.describe()}",
            f"algo    {algo.id} of RLlib: a batch of {size:,} env steps per update",
            f"engine  rllib: {acting}, {learning}; {self.cluster.describe()}",
            "policy  acts without Ray",
        ]

    def _runner_nodes(self) -> str:
        """The nodes of the runners, if there are several nodes."""
        names = self.cluster.nodes()
        if len(names) < 2 or runner_count(self.experiment) == 0:
            return ""
        import ray

        found = self.algo.env_runner_group.foreach_env_runner(
            lambda runner: ray.get_runtime_context().get_node_id(), local_env_runner=False
        )
        counts = Counter(names[node] for node in found)
        return " on " + ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))

    # ------------------------------------------------------------------------------------------ one iteration

    def step(self) -> Report:
        started = perf_counter()
        with self.generators.active():
            result = _translate_errors(self.algo.train, "train")
        total = perf_counter() - started
        notes = results.read_notes(result) or self._failure_notes()
        events = self._failures(notes) + self._losses()
        learned = results.lookup(result, "learners") or {}
        count = max(1, self.experiment.engine.learners)
        updates = round(results.number(results.lookup(learned, "__all_modules__", UPDATES)) / count)
        seconds = results.number(results.lookup(learned, "__all_modules__", SECONDS)) / count
        ends = [EpisodeEnd(**end) for note in notes for end in note["ends"]]
        steps, frames = (sum(note.get(name, 0) for note in notes) for name in ("steps", "frames"))
        self.progress = self.progress.plus(steps, frames, updates, len(ends), total)
        several = self.experiment.several_policies
        metrics = {**results.learner_metrics(learned, several=several), **results.runner_shares(notes)}
        split = results.time_split(notes, total, seconds, remote=runner_count(self.experiment) > 0)
        return Report(self.progress, metrics, ends, split, tuple(events))

    def _failure_notes(self) -> list[results.Note]:
        """Ask the runners why their envs failed: RLlib drops their notes if nothing was sampled."""
        found = self.algo.env_runner_group.foreach_env_runner(lambda runner: (runner.worker_index or 0, runner.failed))
        return [{"runner": index, "failed": failed, "ends": []} for index, failed in found if failed is not None]

    def _failures(self, notes: list[results.Note]) -> list[str]:
        """Events for envs that failed and were restarted; an error after `engine.restarts` of them."""
        events = []
        for note in notes:
            failed = note.get("failed")
            if failed is None or failed["life"] in self.failed_groups:
                continue
            self.failed_groups.add(failed["life"])
            count, most = len(self.failed_groups), self.experiment.engine.restarts
            if count > most:
                message = f"envs failed {count} times (engine.restarts = {most}): {failed['message']}"
                raise TiltyardError(message, failed["hint"], failed["details"])
            events.append(f"runner {note['runner']} restarts its envs: {failed['message']}")
        return events

    def _losses(self) -> list[str]:
        """Events for lost runners and nodes."""
        before, self.nodes = self.nodes, self.cluster.nodes()
        lost = [name for node, name in before.items() if node not in self.nodes]
        restart = f"its runners restart on the {len(self.nodes)} remaining nodes"
        return [*self.lost_runners.poll_events(), *(f"node {name} was lost; {restart}" for name in lost)]

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path, *, cut: bool = False) -> dict[str, Tree]:
        from tiltyard.engines.rllib.checkpoint import engine_state

        if cut:  # a lost part of RLlib would be waited for forever
            hint = "`tiltyard resume` continues from the last checkpoint"
            raise UseError("rllib cannot save after a failed step", hint)
        trees: dict[str, Tree] = {}
        for name, net in self.weights.pull(self.algo).items():
            trees |= policy_tree(name, net, self.spec, self.experiment)
        groups, tree = engine_state(self.algo)
        tree |= {
            "engine": "rllib",
            "algo": self.experiment.algo.id,
            "groups": len(groups),
            "progress": asdict(self.progress),
            "generators": self.generators.save(),
        }
        return {
            **trees,
            "engine/state": tree,
            **{f"engine/group-{number}": group for number, group in enumerate(groups)},
        }

    def load(self, folder: Path) -> list[str]:
        from tiltyard.engines.rllib.checkpoint import set_engine_state

        tree = read_tree(folder / "engine", "state", on_disk="replay/")
        self.progress = Progress(**tree["progress"])
        if tree.get("engine") != "rllib" or tree["algo"] != self.experiment.algo.id:
            for name, net in self.weights.nets.items():
                net.load_arrays(read_tree(folder / "policies", name)["weights"])
            self.weights.push(self.algo)
            return ["the checkpoint is from another engine or algorithm: weights are loaded, the optimiser starts anew"]
        self.generators.load(tree["generators"])
        groups = [read_tree(folder / "engine", f"group-{number}") for number in range(tree["groups"])]
        return _translate_errors(lambda: set_engine_state(self.algo, tree, groups), "restore a checkpoint")

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str | None = None) -> PolicyState:
        name = self.weights.name_of(policy)
        return PolicyState(self.weights.pull(self.algo)[name].arrays(), {}, {})

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        """Weights only: RLlib's settings are fixed when it starts."""
        if settings:
            message = f"engine.kind = rllib cannot change {', '.join(sorted(settings))} while training"
            raise UseError(message, "use engine.kind=local")
        if state is not None:
            self.weights.nets[self.weights.name_of(policy)].load_arrays(state.weights)
            self.weights.push(self.algo)
        return {}

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        raise UseError("engine.kind = rllib cannot change options of running envs", "use engine.kind=local")

    def past(self) -> dict[str, dict[int, Arrays]]:
        return {}  # cross_checks.py refuses pools of past versions for this engine

    def close(self) -> None:
        if self.algo is not None:
            self.algo.stop()
            self.algo = None
        self.cluster.close()
        self.lost_runners.close()


def _translate_errors(do: Callable[[], Result], what: str) -> Result:
    """Call `do` and turn Ray's exceptions into TiltyardError, naming process and exception."""
    import ray.exceptions

    try:
        return do()
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, TiltyardError):
            raise cause from error
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1].strip()
        message = f"RLlib could not {what}: {type(error).__name__}: {reason}"
        raise TiltyardError(message, "the logs of Ray's processes are in the run's logs/ray", str(error)) from error


# ---------------------------------------------------------------------------------------------- weights


DEFAULT_MODULE = "default_policy"  # RLlib's name for the only module


class PolicyWeights:
    """One net per learning policy, with its first weights until `pull` is called."""

    def __init__(self, worker_spec: WorkerSpec) -> None:
        experiment = worker_spec.experiment
        self.nets: dict[str, PolicyNet] = {name: worker_spec.net(name) for name in experiment.learning}
        several = experiment.several_policies
        self._modules = {name: name if several else DEFAULT_MODULE for name in self.nets}

    def name_of(self, policy: str | None) -> str:
        """The given policy, by default the first; UseError unless it learns."""
        name = policy or next(iter(self.nets))
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
