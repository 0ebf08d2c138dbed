"""Measure a policy: that of a run or checkpoint by `evaluate`, in this process or several, or while training.

evaluate(run)  ->  load policy, probe env  ->  play_episodes() here, or in K child processes  ->  summarise()
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.config.load import load, override_list, parse_override
from tiltyard.config.sections import Env
from tiltyard.config.site_file import runs_root
from tiltyard.engines.policies.frozen import frozen_nets
from tiltyard.engines.policies.matchmaking import VersionPool, fill_version_pools, read_versions
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.engines.policies.policy_set import make_actor
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError, TiltyardWarning, UseError
from tiltyard.evaluation.recording import VideoTarget
from tiltyard.evaluation.rollouts import (
    EpisodeResult,
    ScriptedPolicy,
    episode_set,
    play_episodes,
    scripted_actor,
    trained_actor,
)
from tiltyard.evaluation.statistics import Evaluation, summarise
from tiltyard.evaluation.workers import run_workers
from tiltyard.models.policy import load_policy
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins.capture import name_of
from tiltyard.run import atomic, trust
from tiltyard.run.checkpoint import select
from tiltyard.run.folder import Run, find, run_of
from tiltyard.types import Arrays, Checkpoint, EnvSpec

if TYPE_CHECKING:
    from tiltyard.evaluation.saved_rollouts import SavedRollouts

MAX_COUNT = 1_000_000  # also the number of episodes when only steps are limited
CHANGEABLE = ("env", "eval", "match")  # sections that an evaluation may change
RUN_SUBFOLDERS = ("plugins", "frozen", "checkpoints", "logs", "eval", "videos", "tb", "wandb", "bad_batch")


class VideoError(TiltyardError):
    """The video could not be made. `result` is the evaluation, which is complete."""

    def __init__(self, error: dict[str, str], result: Evaluation) -> None:
        super().__init__(**error)
        self.result = result


@dataclass(frozen=True)
class Task:
    """A share of an evaluation, for one process."""

    checkpoint: str
    overrides: list[str]
    first: int
    count: int
    every: int  # play the episodes first, first + every, first + 2 every, ..., below count
    slots: int
    steps: int | None
    seed: int
    greedy: bool
    policy: str | None
    video: str | None
    rollouts: str | None
    save_info: bool
    trust_code: bool


def evaluate(
    source: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    episodes: int | None = None,
    steps: int | None = None,
    at: int | str | None = None,
    greedy: bool | None = None,
    policy: str | Callable[[EnvSpec], ScriptedPolicy] | None = None,
    workers: int = 1,
    video: Path | None = None,
    rollouts: Path | None = None,
    save_info: bool = False,
    trust_code: bool = False,
) -> Evaluation:
    """Evaluate the policy of a run (newest checkpoint, `at="best"` or `at=STEP`) or of one checkpoint folder.

    `policy` is another policy for the same episodes: "random", a class or its import string (see rollouts.py). A
    video that cannot be made raises VideoError, which has the result.
    """
    started = time.monotonic()
    for name, count in (("episodes", episodes), ("steps", steps), ("workers", workers)):
        _require_count(name, count)
    if rollouts is not None:
        _require_apart_from_runs(rollouts)
    chosen = choose_checkpoint(source, at)
    run = run_of(chosen.folder)
    experiment = changed(run, overrides, trust_code)
    trust.enter_profile(run, trust_code)
    settings = experiment.eval
    wanted = range(episodes or (settings.episodes if steps is None else MAX_COUNT))
    workers = min(workers, len(wanted))
    tasks = [
        Task(
            checkpoint=str(chosen.folder),
            overrides=list(overrides),
            first=k,
            count=len(wanted),
            every=workers,
            slots=max(1, settings.envs // workers),
            steps=None if steps is None else -(-steps // workers),
            seed=settings.seed,
            greedy=settings.greedy if greedy is None else greedy,
            policy=name_of(policy) if callable(policy) else policy,
            video=str(video) if video is not None and k == 0 else None,
            rollouts=str(rollouts) if rollouts is not None else None,
            save_info=save_info,
            trust_code=trust_code,
        )
        for k in range(workers)
    ]
    shares = [asdict(task) for task in tasks]
    answers = run_workers(shares) if workers > 1 else [perform(shares[0])]
    results = [EpisodeResult(**each) for answer in answers for each in answer["results"]]
    results.sort(key=lambda result: result.index)
    if repeated := sum(answer["repeated"] for answer in answers):
        warn(
            f"{repeated} of these episodes were in {rollouts} already: not written again", TiltyardWarning, stacklevel=2
        )
    evaluation = summarise(results, tasks[0].greedy, time.monotonic() - started)
    if answers[0]["video_errors"]:
        raise VideoError(answers[0]["video_errors"][0], evaluation)
    return evaluation


def _require_count(name: str, count: object) -> None:
    if count is None and name != "workers":
        return
    if type(count) is not int or not 1 <= count <= MAX_COUNT:
        hint = "leave it out for the default" if name != "workers" else "use workers=1 for a single process"
        raise UseError(f"{name} = {count!r} must be a whole number from 1 to {MAX_COUNT:,}", hint)


def _require_apart_from_runs(folder: Path) -> None:
    """Refuse to write episodes into the runs folder or among a run's files, before any is played."""
    place, root = atomic.absolute(Path(folder)), atomic.absolute(runs_root())
    owner = root if root in (place, place.parent, place.parent.parent) else None
    for each in (place, *place.parents):
        if (each / "experiment.yaml").is_file() and (each / "status.json").is_file():
            parts = place.relative_to(each).parts
            owner = each if not parts or parts[0].split(".")[0] in RUN_SUBFOLDERS else None
    if owner is not None:
        message = f"cannot write episodes to {folder}: it belongs to the run{'s' if owner == root else ''} in {owner}"
        hint = "choose another folder, like data"
        raise UseError(message, hint)


def choose_checkpoint(source: Run | str | Path, at: int | str | None = None) -> Checkpoint:
    """The checkpoint of a run, or at the path of a checkpoint."""
    run = source if isinstance(source, Run) else find(str(source))
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is not None and (folder / "manifest.json").is_file():
        return select(folder)
    return select(run, at)


def changed(run: Run, overrides: Sequence[str], trust_code: bool) -> Experiment:
    """The run's experiment with settings changed for this evaluation."""
    before = run.experiment()
    trust.require_own_code(run, trust_code, before)
    if not overrides:
        return before
    # Check the names first: validating the values could raise an error about the engine instead.
    _require_changeable(run, [parse_override(each)[0].partition(".")[0] for each in override_list(overrides)])
    after = load(before.model_dump(mode="json", by_alias=True), overrides, base=run.base).experiment
    _require_changeable(
        run, [name for name in Experiment.model_fields if getattr(before, name) != getattr(after, name)]
    )
    return after


def _require_changeable(run: Run, sections: list[str]) -> None:
    for name in sections:
        if name in Experiment.model_fields and name not in CHANGEABLE:
            hint = "change env.*, eval.* or match.* (eval.seed for other episodes), or train again with `tiltyard fork`"
            if name == "engine":
                hint = "eval.envs sets the number of env copies, --workers the number of processes"
            raise UseError(f"eval cannot change {name}: it evaluates the policy of run {run.id} as trained", hint)


# ---------------------------------------------------------------------------------------------- one share


def perform(fields: dict[str, Any]) -> dict[str, Any]:
    """Perform a task, here or in a child: its episodes and why there is no video, as plain values like the task."""
    torch.set_num_threads(1)
    task = Task(**fields)
    folder = Path(task.checkpoint)
    run = run_of(folder)
    experiment = changed(run, task.overrides, task.trust_code)
    policies = {name: load_policy(folder, name=name, trust_code=task.trust_code) for name in experiment.learning}
    base = (*run.base, Path.cwd()) if task.overrides else run.base  # an env named in an override may be here
    spec = probe(experiment.env, base=base, previous=experiment.model.previous)
    for policy in policies.values():
        policy.require_same(spec)
    if task.video is not None:
        require_recordable(spec, experiment.env)
    seed = task.seed + task.first  # every worker has its own random stream
    several: MultiPolicyActor | None = None
    if task.policy is not None:
        chooser = scripted_actor(task.policy, spec, (Path.cwd(), *run.base))
    else:
        nets = {name: policy.net for name, policy in policies.items()}
        pools = {name: VersionPool(past, experiment, spec, run.base) for name, past in experiment.past.items()}
        fill_version_pools(pools, {name: read_versions(folder, name) for name in pools})
        actor = make_actor(experiment, spec, nets, frozen_nets(experiment, spec, run.base), pools, measured=True)
        several = actor if isinstance(actor, MultiPolicyActor) else None
        chooser = trained_actor(actor, task.greedy, seed)
    errors: list[TiltyardError] = []
    saved = _saved_rollouts(task, run, experiment.env, spec) if task.rollouts is not None else None
    episodes = range(task.first, task.count, task.every)
    wanted = episode_set(experiment, spec, base, episodes, task.seed, task.slots)
    with Generators(seed).active():
        results = play_episodes(
            chooser,
            replace(wanted, steps=task.steps),
            video=VideoTarget(Path(task.video), errors.append) if task.video else None,
            keep=saved.keep if saved is not None else None,
            policies=several,
            save_info=task.save_info,
        )
    video_errors = [{"message": each.message, "hint": each.hint, "details": each.details} for each in errors]
    if saved is not None:
        saved.close()
    return {
        "results": [asdict(result) for result in results],
        "video_errors": video_errors,
        "repeated": 0 if saved is None else saved.repeated,
    }


def _saved_rollouts(task: Task, run: Run, env: Env, spec: EnvSpec) -> SavedRollouts:
    from tiltyard.evaluation.saved_rollouts import SavedRollouts  # pyarrow is slow to import and rarely needed

    how = task.policy or ("greedy" if task.greedy else "sampled")
    policy = {"run": run.id, "checkpoint": Path(task.checkpoint).name, "acting": how}
    made = [Path(sys.argv[0]).name, *sys.argv[1:]] if task.first == 0 else None
    return SavedRollouts(Path(task.rollouts or ""), env, spec, policy, made, task.save_info)


# ---------------------------------------------------------------------------------------------- while training


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
        hint = "leave out the video, or give the env render_mode='rgb_array'"
        raise UseError(f"env {env.id} cannot be recorded: it has no rgb_array rendering and no image observation", hint)
