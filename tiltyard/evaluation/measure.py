"""What others call to measure a policy: `evaluate` for a run or checkpoint, `Evaluator` for a policy in training.

    evaluate(run)  ->  load policy, probe env  ->  play() here, or in K child processes that speak JSON  ->  summarise()

A child gets its task as JSON on stdin and answers with JSON lines on stdout; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tiltyard.algos.randomness import Generators
from tiltyard.config.experiment import Env, Eval, Experiment
from tiltyard.config.load import load
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError, UseError
from tiltyard.evaluation.choices import hand_written, trained
from tiltyard.evaluation.numbers import summarise
from tiltyard.evaluation.play import Keep, Played, play
from tiltyard.models.net import PolicyNet
from tiltyard.models.policy import load_policy
from tiltyard.run.checkpoint import select
from tiltyard.run.folder import Run, find, run_of
from tiltyard.run.masking import mask_all
from tiltyard.types import Arrays, Checkpoint, EnvSpec, Episode, Evaluation

MANY = 1_000_000  # episodes on offer when only steps are limited
MEASURED = ("env", "eval")  # sections that an evaluation may change


def measured_env(env: Env, spec: EnvSpec, time_limit: int | None) -> Env:
    """The env as measured: as in training (returns are of raw rewards), with an end for envs that have none."""
    limit = env.time_limit if env.time_limit is not None or spec.episode_limit is not None else time_limit
    return env.model_copy(update={"time_limit": limit})


class Evaluator:
    """Evaluations during training: on weights handed over, with a net and random streams of its own."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> None:
        self.experiment, self.spec, self.base = experiment, spec, base
        self.net = PolicyNet(spec, experiment.model, base, seed=0).eval()

    def measure(self, weights: Arrays, video: Path | None = None) -> Evaluation:
        started, settings = time.monotonic(), self.experiment.eval
        self.net.load_arrays(weights)
        with Generators(settings.seed).in_place():
            played = self._play(settings, video)
        return summarise(played, settings.greedy, time.monotonic() - started)

    def _play(self, settings: Eval, video: Path | None) -> list[Played]:
        return play(
            trained(self.net, settings.greedy, settings.seed),
            measured_env(self.experiment.env, self.spec, settings.time_limit),
            self.spec,
            base=self.base,
            previous=self.experiment.model.previous,
            episodes=range(settings.episodes),
            slots=settings.envs,
            seed=settings.seed,
            video=video,
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
    """
    started = time.monotonic()
    chosen = choose_checkpoint(source, at)
    run_of(chosen.folder).require_own_code(trust_code)
    experiment = changed(run_of(chosen.folder), overrides)
    settings = experiment.eval
    wanted = range(episodes or (settings.episodes if steps is None else MANY))
    workers = max(1, min(workers, len(wanted)))
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
    played = _perform(tasks[0]) if workers == 1 else _perform_in_children(tasks)
    return summarise(sorted(played, key=lambda one: one.index), tasks[0].greedy, time.monotonic() - started)


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
    after = load(before.model_dump(mode="json", by_alias=True), overrides, base=run.base).experiment
    for name in Experiment.model_fields:
        if name not in MEASURED and getattr(before, name) != getattr(after, name):
            raise UseError(
                f"eval cannot change {name}: it measures the policy of run {run.id} as it was trained",
                "change env.* or eval.* settings (eval.seed for other episodes); other training needs `tiltyard fork`",
            )
    return after


def _perform(task: Task) -> list[Played]:
    torch.set_num_threads(1)
    folder = Path(task.checkpoint)
    run = run_of(folder)
    run.require_own_code(task.trust_code)
    experiment = changed(run, task.overrides)
    policy = load_policy(folder, trust_code=task.trust_code)
    spec = probe(experiment.env, base=run.base, previous=experiment.model.previous)
    policy.require_same(spec)
    seed = task.seed
    begin = trained(policy.net, task.greedy, seed + task.first)  # workers draw apart
    if task.policy is not None:
        begin = hand_written(task.policy, spec, (Path.cwd(), *run.base))
    keep: Keep | None = None
    if task.rollouts is not None:
        from tiltyard.data.episodes import EpisodeWriter  # pyarrow is slow to import and seldom needed

        options = mask_all(experiment.env.options)  # a dataset is handed on
        meta = {"run": run.id, "env": experiment.env.id, "options": options, "checkpoint": folder.name}
        writer = EpisodeWriter(Path(task.rollouts), spec, meta, save_info=task.save_info)

        def keep(index: int, episode: Episode) -> None:
            writer.write(replace(episode, meta={"episode": index}))

    return play(
        begin,
        measured_env(experiment.env, spec, experiment.eval.time_limit),
        spec,
        base=run.base,
        previous=experiment.model.previous,
        episodes=range(task.first, task.count, task.every),
        slots=task.slots,
        seed=seed,
        steps=task.steps,
        video=Path(task.video) if task.video else None,
        keep=keep,
    )


def _perform_in_children(tasks: list[Task]) -> list[Played]:
    """One child per task. A child that fails speaks for all: its sentence is raised and the others are ended."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tiltyard.evaluation.measure"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        for _ in tasks
    ]
    try:
        for child, task in zip(children, tasks, strict=True):
            assert child.stdin is not None
            child.stdin.write(json.dumps(asdict(task)))
            child.stdin.close()
        played: list[Played] = []
        for number, child in enumerate(children):
            assert child.stdout is not None
            text = child.stdout.read()
            code = child.wait()
            answer: dict[str, Any] = json.loads(text) if text.strip() else {}
            if "error" in answer:
                kind = UseError if answer["wrong_use"] else TiltyardError
                raise kind(answer["error"], answer["hint"], answer["details"])
            if code != 0:
                raise TiltyardError(f"evaluation worker {number} died with exit code {code}", "try --workers 1")
            played += [Played(**one) for one in answer["played"]]
        return played
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def _child() -> None:
    """A child process: the task from stdin, the answer to the real stdout; what an env prints goes to stderr."""
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = Task(**json.loads(sys.stdin.read()))
    try:
        answer: dict[str, Any] = {"played": [asdict(one) for one in _perform(task)]}
    except TiltyardError as error:
        wrong_use = isinstance(error, UseError)
        answer = {"error": error.message, "hint": error.hint, "details": error.details, "wrong_use": wrong_use}
    answer_to.write(json.dumps(answer))
    answer_to.close()


if __name__ == "__main__":
    _child()
