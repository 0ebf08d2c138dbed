"""`tiltyard tune` and `engine.tune`: real engines with tiny budgets; the candidates are tested without engines."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tiltyard.config.load import load
from tiltyard.engines.candidates import Candidates, Point, own_point
from tiltyard.processes.resources import usable_cores

SIZES = ("engine.envs=4", "algo.rollout=16", "algo.minibatch=32")


@pytest.fixture
def file(runs: Path) -> str:
    """Experiment file with an env that sleeps 2 ms in every step, in one process by default."""
    shutil.copy(Path(__file__).parent / "pauses.py", runs.parent)
    (runs.parent / "slow.yaml").write_text(
        "env: {id: 'pauses.py:Pauses', options: {step: 0.002, length: 50}}\n"
        "engine: {workers: 0, threads: 1, mode: sync}\nalgo: {epochs: 1}\nmodel: {hidden: [8]}\n"
        "stop: {updates: 2}\neval: {every: 0, at_end: false}\ntrack: {tensorboard: false}\n"
    )
    return "slow.yaml"


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_sleeping_env_gets_workers(tiltyard: Command, file: str) -> None:
    output = tiltyard("tune", file, *SIZES, "--seconds", "3", "--json")
    found = json.loads(output.stdout)
    assert found["own"]["workers"] == 0
    assert found["chosen"]["workers"] > 1
    assert found["chosen"]["env_steps_per_second"] > found["own"]["env_steps_per_second"]
    assert found["own"]["bound"].startswith("env-bound")
    assert all((trial["envs"], trial["rollout"], trial["minibatch"]) == (4, 16, 32) for trial in found["tried"])
    assert f"engine.workers={found['chosen']['workers']}" in found["words"]
    assert f"tiltyard train {file} engine.workers=" in output.stderr
    assert output.stderr.count("algo.rollout=16 algo.minibatch=32\n") >= 1 + len(found["tried"])


def test_slow_start_does_not_shorten_the_measurement_up_to_a_limit(tiltyard: Command, runs: Path, file: str) -> None:
    path = runs.parent / file
    path.write_text(path.read_text().replace("epochs: 1", "epochs: 1, minibatch: 32"))
    words = (*SIZES[:2], "engine.workers=0", "env.options.step=0", "env.options.make=0.3")  # 1.2 s for an engine
    found = json.loads(tiltyard("tune", file, *words, "--seconds", "2", "--json").stdout)
    assert [trial["minibatch"] for trial in found["tried"]] == [32, 64, 16]
    found = json.loads(tiltyard("tune", file, *words, "--seconds", "0.4", "--json").stdout)
    assert [trial["minibatch"] for trial in found["tried"]] == [32]


def test_choice_is_explained_and_printed_as_usable_arguments(tiltyard: Command, file: str) -> None:
    fast = ("env.options.step=0", "engine.workers=0", "engine.envs=4", "algo.rollout=16", "algo.epochs=20")
    output = tiltyard("tune", file, *fast, "algo.minibatch=2", "--seconds", "1").stdout.splitlines()
    assert output[0].split() == ["workers", "mode", "envs", "rollout", "minibatch", "env", "steps/s", "rounds"]
    assert [line for line in output if line.endswith("chosen, current")]  # everything was set on the command line
    assert any(line.startswith("kept    as set: engine.workers") for line in output)
    assert any(line.startswith("bound   learner-bound") for line in output)
    tiltyard("train", file, "env.options.step=0", *output[-1].split())


def test_tuned_settings_are_stored_in_the_run(tiltyard: Command, runs: Path, file: str) -> None:
    """Gradient steps on 2 env steps each are slow; a minibatch of 4 needs half as many."""
    path = runs.parent / file
    path.write_text(path.read_text().replace("epochs: 1", "epochs: 20, minibatch: 2") + "name: tuned\n")
    words = ("env.options.step=0", "engine.workers=0", "engine.envs=4", "algo.rollout=16", "engine.tune=true")
    output = tiltyard("train", file, *words).stderr
    assert "tuned: engine.workers=0 engine.mode=sync engine.envs=4 algo.rollout=16 algo.minibatch=4" in output
    (run,) = (runs / "tuned").iterdir()
    settings = load(run / "experiment.yaml").experiment
    assert settings.algo.minibatch == 4  # type: ignore[union-attr]
    assert not settings.engine.tune
    assert "tuned: " not in tiltyard("resume", "last", "stop.updates=3").stderr
    assert load(run / "experiment.yaml").experiment.algo == settings.algo


def test_tuning_is_refused_for_a_job_on_another_machine(file: str, tiltyard: Command, runs: Path) -> None:
    Path("tiltyard.yaml").write_text("profiles:\n  cluster: {launcher: slurm, set: {engine.tune: true}}\n")
    output = tiltyard("train", file, "--on", "cluster", "--dry-run", expect=2).stderr
    assert (
        "engine.tune measures this machine, but a job is trained on another" in output
        and "tiltyard shell --on" in output
    )
    assert "tuning for" not in output and not runs.exists()


# ------------------------------------------------------------------------------------------------ candidates


def around(*words: str, kept: tuple[str, ...] = (), workers: int = 0) -> Candidates:
    experiment = load("CartPole-v1", words).experiment
    return Candidates(experiment, own_point(experiment, workers), kept, cores=4)


def everything(candidates: Candidates) -> list[Point]:
    """All points that a search could reach."""
    found = {candidates.own}
    for _ in range(2):
        for make in (candidates.processes, candidates.sizes, candidates.minibatches, candidates.more_workers):
            found |= {point for each in [*found] for point in make(each)}
    return [*found]


@pytest.mark.parametrize(
    "words", [(), ("model.memory.kind=lstm",), ("algo=a2c",), ("engine.envs=6", "algo.rollout=8", "algo.minibatch=48")]
)
def test_candidates_stay_close_to_the_batch_and_minibatch_of_the_experiment(words: tuple[str, ...]) -> None:
    candidates = around(*words)
    own, found = candidates.own, everything(candidates)
    assert len(found) > 10
    batch = own.envs * own.rollout
    for point in found:
        assert batch / 2 <= point.envs * point.rollout <= 2 * batch
        assert point.rollout >= min(16, own.rollout)
        assert (point.minibatch is None) == (own.minibatch is None)
        assert (own.minibatch or 1) / 2 <= (point.minibatch or 1) <= 2 * (own.minibatch or 1)
        assert not point.workers or point.envs % point.workers == 0
        again = load(point.applied(candidates.experiment).model_dump(mode="json", by_alias=True)).experiment
        assert own_point(again, point.workers) == point  # the experiment is valid and has the same values
        typed = load("CartPole-v1", [*words, *point.words()]).experiment
        assert own_point(typed, point.workers) == point


@pytest.mark.parametrize("cores", [1, 3, 6, 7, 12, 24, 64])
def test_workers_are_tried_for_any_number_of_cores(cores: int) -> None:
    """The number of envs does not have to be a multiple of the cores."""
    experiment = load("CartPole-v1", ["engine.envs=8"]).experiment
    for workers in (0, 4):
        found = Candidates(experiment, own_point(experiment, workers), (), cores=cores)
        tried = {(point.workers, point.mode) for point in found.processes(found.own)}
        assert any(mode == "async" for _, mode in tried) and len(tried) >= 2
        assert all(count == 0 or 8 % count == 0 for count, _ in tried)


def test_kept_settings_are_not_varied() -> None:
    names: dict[str, Any] = {"engine.workers": "workers", "engine.mode": "mode", "engine.envs": "envs"}
    for name, field in (names | {"algo.rollout": "rollout", "algo.minibatch": "minibatch"}).items():
        candidates = around(kept=(name,))
        found = everything(candidates)
        assert {getattr(point, field) for point in found} == {getattr(candidates.own, field)}
        assert len(found) > 1
    assert not around().allows(replace(around().own, workers=3))  # 8 is not a multiple of 3
    assert not around().allows(replace(around().own, mode="async"))  # needs workers


def test_more_workers_than_envs_also_increase_the_envs() -> None:
    """Otherwise the search stops at one env per worker, although more workers could wait in parallel."""
    candidates = around("engine.envs=8", "algo.rollout=32", "algo.minibatch=64", workers=8)
    same, other = candidates.more_workers(candidates.own)
    assert (same.workers, same.envs, same.rollout, same.mode) == (16, 16, 16, "sync")
    assert other == replace(same, mode="async")
    widest = candidates.more_workers(same)[0]
    assert (widest.workers, widest.envs, widest.rollout) == (32, 32, 16)  # a shorter rollout is not allowed
    assert not around("engine.envs=8", kept=("engine.envs",), workers=8).more_workers(candidates.own)
