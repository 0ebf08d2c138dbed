"""What others call to measure a policy: `evaluate` for a run or checkpoint, `Evaluator` for a policy in training.

    evaluate(run)  ->  load policy, probe env  ->  play() here, or in K child processes (workers.py)  ->  summarise()

How episodes are played is in play.py, who acts in them in choices.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Env, Eval, Experiment
from tiltyard.config.load import load, override_list, parse_override
from tiltyard.config.site_file import runs_root
from tiltyard.engines.policies.frozen import frozen_nets
from tiltyard.engines.policies.multi_policy import MultiPolicyActor, make_actor
from tiltyard.engines.policies.opponent_pool import fill_version_pools, read_versions, version_pools
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError, UseError
from tiltyard.evaluation.actors import scripted_actor, trained_actor
from tiltyard.evaluation.rollouts import EpisodeResult, Keep, Unfilmed, play, require_recordable
from tiltyard.evaluation.statistics import summarise
from tiltyard.evaluation.workers import share_out
from tiltyard.models.policy import load_policy
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run import atomic
from tiltyard.run.checkpoint import select
from tiltyard.run.folder import Run, find, run_of
from tiltyard.run.redact import mask_all
from tiltyard.types import Arrays, Checkpoint, EnvSpec, Episode, Evaluation

MANY = 1_000_000  # episodes on offer when only steps are limited
MEASURED = ("env", "eval", "match")  # sections that an evaluation may change
# a run folder's own folders
OWN = ("plugins", "frozen", "checkpoints", "logs", "eval", "videos", "tb", "wandb", "bad_batch")


class VideoError(TiltyardError):
    """The episodes were played, but the film of the first was not made. `result` is what was measured."""

    def __init__(self, error: TiltyardError, result: Evaluation) -> None:
        super().__init__(error.message, error.hint, error.details)
        self.result = result


def evaluation_env(env: Env, spec: EnvSpec, time_limit: int | None) -> Env:
    """The env as measured: as in training (returns are of raw rewards), with an end for envs that have none."""
    limit = env.time_limit if env.time_limit is not None or spec.episode_limit is not None else time_limit
    return env.model_copy(update={"time_limit": limit})


class Evaluator:
    """Evaluations during training: on weights handed over, with a net and random streams of its own."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> None:
        self.experiment, self.spec, self.base = experiment, spec, base
        self.nets = {
            name: PolicyNet(spec, experiment.model, base, seed=0, squashed=experiment.squashed).eval()
            for name in experiment.learning
        }
        self.version_pools = version_pools(experiment, spec, base)
        frozen = frozen_nets(experiment, spec, base)
        self.actor = make_actor(experiment, spec, self.nets, frozen, self.version_pools, measured=True)

    def evaluate(
        self,
        weights: Mapping[str, Arrays],
        past: Mapping[str, Mapping[int, Arrays]],
        video: Path | None,
        unfilmed: Unfilmed,
        cancelled: Callable[[], bool],
    ) -> Evaluation:
        """Numbers, whatever becomes of the film. Raises Cancelled soon after `cancelled` says so."""
        started, settings = time.monotonic(), self.experiment.eval
        for name, net in self.nets.items():
            net.load_arrays(weights[name])
        fill_version_pools(self.version_pools, past)
        with Generators(settings.seed).active():
            played = self._play(settings, (video, unfilmed) if video is not None else None, cancelled)
        return summarise(played, settings.greedy, time.monotonic() - started)

    def _play(
        self, settings: Eval, video: tuple[Path, Unfilmed] | None, cancelled: Callable[[], bool]
    ) -> list[EpisodeResult]:
        return play(
            trained_actor(self.actor, settings.greedy, settings.seed),
            evaluation_env(self.experiment.env, self.spec, settings.time_limit),
            self.spec,
            base=self.base,
            previous=self.experiment.model.previous,
            episodes=range(settings.episodes),
            slots=settings.envs,
            seed=settings.seed,
            video=video,
            players=self.actor if isinstance(self.actor, MultiPolicyActor) else None,
            cancelled=cancelled,
        )


@dataclass(frozen=True)
class Task:
    """A share of an evaluation, as a child process is told it."""

    checkpoint: str
    overrides: list[str]
    first: int
    count: int
    every: int
    """the episodes first, first + every, first + 2 every, ..., below count"""
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
    policy: str | None = None,
    workers: int = 1,
    video: Path | None = None,
    rollouts: Path | None = None,
    save_info: bool = False,
    trust_code: bool = False,
) -> Evaluation:
    """Measure the policy of a run (newest checkpoint, `at="best"` or `at=STEP`) or of one checkpoint folder.

    `policy` names another one to measure in the same episodes: "random", or an import string (see choices.py).
    A film that cannot be made raises FilmError, which has the numbers.
    """
    started = time.monotonic()
    for name, count in (("episodes", episodes), ("steps", steps), ("workers", workers)):
        _require_count(name, count)
    if rollouts is not None:
        _require_apart_from_runs(rollouts)
    chosen = choose_checkpoint(source, at)
    run = run_of(chosen.folder)
    run.require_own_code(trust_code)
    run.enter_profile()
    experiment = changed(run, overrides)
    settings = experiment.eval
    wanted = range(episodes or (settings.episodes if steps is None else MANY))
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
            policy=policy,
            video=str(video) if video is not None and k == 0 else None,
            rollouts=str(rollouts) if rollouts is not None else None,
            save_info=save_info,
            trust_code=trust_code,
        )
        for k in range(workers)
    ]
    answers = [_perform(tasks[0])] if workers == 1 else [_heard(each) for each in share_out([*map(asdict, tasks)])]
    played = sorted((one for answer in answers for one in answer.played), key=lambda one: one.index)
    result = summarise(played, tasks[0].greedy, time.monotonic() - started)
    if answers[0].unfilmed is not None:
        raise VideoError(answers[0].unfilmed, result)
    return result


def _require_count(name: str, count: object) -> None:
    if count is None and name != "workers":
        return
    if type(count) is not int or not 1 <= count <= MANY:
        raise UseError(
            f"{name} = {count!r} is not a whole number from 1 to {MANY:,}",
            "leave it out for the usual number" if name != "workers" else "one process is workers=1",
        )


def _require_apart_from_runs(folder: Path) -> None:
    """Episodes are no runs, and no run's own files: refused before any is played."""
    place, root = atomic.absolute(Path(folder)), atomic.absolute(runs_root())
    owner = root if root in (place, place.parent, place.parent.parent) else None
    for each in (place, *place.parents):
        if (each / "experiment.yaml").is_file() and (each / "status.json").is_file():
            parts = place.relative_to(each).parts
            owner = each if not parts or parts[0].split(".")[0] in OWN else None
    if owner is not None:
        raise UseError(
            f"episodes cannot be written to {folder}: it belongs to the run{'s' if owner == root else ''} in {owner}",
            "name a folder of their own: data",
        )


def choose_checkpoint(source: Run | str | Path, at: int | str | None = None) -> Checkpoint:
    """The checkpoint meant by a run or by the path of a checkpoint."""
    run = source if isinstance(source, Run) else find(str(source))
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is not None and (folder / "manifest.json").is_file():
        return select(folder)
    return select(run, at)


def changed(run: Run, overrides: Sequence[str]) -> Experiment:
    """The run's experiment with settings changed for this evaluation."""
    before = run.experiment()
    if not overrides:
        return before
    # Those named are looked at before any is checked: whether another engine would do is not the question here.
    _refuse_training(run, [parse_override(each)[0].partition(".")[0] for each in override_list(overrides)])
    after = load(before.model_dump(mode="json", by_alias=True), overrides, base=run.base).experiment
    _refuse_training(run, [name for name in Experiment.model_fields if getattr(before, name) != getattr(after, name)])
    return after


def _refuse_training(run: Run, sections: list[str]) -> None:
    for name in sections:
        if name in Experiment.model_fields and name not in MEASURED:
            hint = (
                "change env.*, eval.* or match settings (eval.seed for other episodes); other training needs "
                "`tiltyard fork`"
            )
            if name == "engine":
                hint = "eval.envs is how many copies of the env are stepped together, --workers how many processes play"
            raise UseError(f"eval cannot change {name}: it measures the policy of run {run.id} as it was trained", hint)


@dataclass(frozen=True)
class Answer:
    """What became of a task: the episodes, and why there is no film if there should be one."""

    played: list[EpisodeResult]
    unfilmed: TiltyardError | None = None


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Perform a task that came as JSON, and answer so that `_heard` understands it."""
    done = _perform(Task(**task))
    error = done.unfilmed
    told = None if error is None else {"message": error.message, "hint": error.hint, "details": error.details}
    return {"played": [asdict(one) for one in done.played], "unfilmed": told}


def _heard(told: dict[str, Any]) -> Answer:
    error = told["unfilmed"]
    return Answer([EpisodeResult(**one) for one in told["played"]], TiltyardError(**error) if error else None)


def _perform(task: Task) -> Answer:
    torch.set_num_threads(1)
    folder = Path(task.checkpoint)
    run = run_of(folder)
    run.require_own_code(task.trust_code)
    experiment = changed(run, task.overrides)
    policies = {name: load_policy(folder, name=name, trust_code=task.trust_code) for name in experiment.learning}
    base = (*run.base, Path.cwd()) if task.overrides else run.base  # an env named here and now may lie here
    spec = probe(experiment.env, base=base, previous=experiment.model.previous)
    for policy in policies.values():
        policy.require_same(spec)
    nets = {name: policy.net for name, policy in policies.items()}
    past = version_pools(experiment, spec, run.base)
    fill_version_pools(past, {name: read_versions(folder, name) for name in past})
    actor = make_actor(experiment, spec, nets, frozen_nets(experiment, spec, run.base), past, measured=True)
    if task.video is not None:
        require_recordable(spec, experiment.env)
    unfilmed: list[TiltyardError] = []
    seed = task.seed
    begin = trained_actor(actor, task.greedy, seed + task.first)  # workers draw apart
    players = actor if isinstance(actor, MultiPolicyActor) else None
    if task.policy is not None:
        begin, players = scripted_actor(task.policy, spec, (Path.cwd(), *run.base)), None
    keep: Keep | None = None
    if task.rollouts is not None:
        from tiltyard.data.episodes import EpisodeWriter  # pyarrow is slow to import and seldom needed

        options = mask_all(experiment.env.options)  # a dataset is handed on
        meta = {"run": run.id, "env": experiment.env.id, "options": options, "checkpoint": folder.name}
        writer = EpisodeWriter(Path(task.rollouts), spec, meta, save_info=task.save_info)

        def keep(index: int, episode: Episode) -> None:
            writer.write(replace(episode, meta={**episode.meta, "episode": index}))

    with Generators(seed + task.first).active():
        played = play(
            begin,
            evaluation_env(experiment.env, spec, experiment.eval.time_limit),
            spec,
            base=base,
            previous=experiment.model.previous,
            episodes=range(task.first, task.count, task.every),
            slots=task.slots,
            seed=seed,
            steps=task.steps,
            video=(Path(task.video), unfilmed.append) if task.video else None,
            keep=keep,
            players=players,
        )
    return Answer(played, unfilmed[0] if unfilmed else None)
