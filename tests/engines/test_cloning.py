"""Behaviour cloning: what is read, that it learns, and that stops, kills and forks lose nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard
from tests.counts import count
from tests.data.episodes import episode
from tests.engines.recordings import cartpole, pendulum, remembered, spec_of
from tiltyard.config.clone_algo import Clone
from tiltyard.config.load import load
from tiltyard.config.sections import Env
from tiltyard.data import dataset_file
from tiltyard.data import folder as layout
from tiltyard.data.writer import DatasetWriter
from tiltyard.engines import make_engine, recorded_rows
from tiltyard.engines.cloning import CloneEngine, check_cloning, choose_episodes
from tiltyard.engines.recorded_rows import RecordedRows, Source, discounted
from tiltyard.errors import ConfigError, TiltyardError, UseError
from tiltyard.run import checkpoint, metrics, state_file
from tiltyard.run.folder import find
from tiltyard.run.state_file import write_trees
from tiltyard.types import EnvSpec, Episode

BASE: dict[str, Any] = {
    "engine": {"threads": 1},
    "eval": {"every": 0, "at_end": False},
    "track": {"tensorboard": False},
}


def settings(env: Any, dataset: Path, **more: Any) -> dict[str, Any]:
    algo = {"id": "clone", "dataset": str(dataset), **more.pop("algo", {})}
    return {**BASE, "env": env, "algo": algo, **more}


def build(env: Any, dataset: Path, *overrides: str) -> CloneEngine:
    loaded = load(settings(env, dataset), overrides)
    experiment = loaded.experiment
    spec = spec_of(experiment.env, previous=experiment.model.previous)
    engine = make_engine(experiment, spec, loaded.base)
    assert isinstance(engine, CloneEngine)
    return engine


def weights_of(run: tiltyard.Run) -> dict[str, np.ndarray]:
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    found: dict[str, np.ndarray] = state_file.read_tree(newest.folder / "policies", "main")["weights"]
    return found


def records_of(run: tiltyard.Run) -> list[dict[str, Any]]:
    timing = ("time/", "speed/", "eval/seconds")
    return [
        {name: value for name, value in record["metrics"].items() if not name.startswith(timing)}
        for record in metrics.read(run.metrics_file)
    ]


def assert_same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    for name, array in one.items():
        assert array.tobytes() == two[name].tobytes(), name


# ------------------------------------------------------------------------------------------------ reading


def random_dataset(folder: Path, lengths: list[int]) -> Source:
    """Episodes of random contents, whose observation `arm` has its seed and step in front."""
    from tests.data.episodes import SPEC

    about = dataset_file.about_env(Env(id="anything"), SPEC, seed=0)
    about = dataset_file.create_or_check(folder, about, dataset_file.provenance(["test"]))
    writer = DatasetWriter(folder, about, {})
    for number, steps in enumerate(lengths):
        made = episode(steps, number)
        made.obs["arm"][:, 0], made.obs["arm"][:, 1] = number, np.arange(steps + 1)
        writer.commit(number, [made])
    writer.close()
    return Source(folder, layout.read_manifest(folder), SPEC, lambda reward: reward, lambda obs: 7.0)


@pytest.mark.parametrize("buffer", [recorded_rows.BUFFER, 1], ids=["decoded once", "block by block"])
@pytest.mark.parametrize("seed", range(count(20)))
def test_every_pass_reads_every_step_once_and_in_order(
    tmp_path: Path, seed: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_rows, "BUFFER", buffer)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 200, rng.integers(1, 12)).tolist()
    source = random_dataset(tmp_path / "data", lengths)
    rows = RecordedRows(source, min(len(lengths), int(rng.integers(1, 6))), seed)
    seen: list[tuple[int, int, int]] = []
    taken = {name: [] for name in ("action", "returns")}
    while rows.position < 4 * len(lengths):
        before = rows.position
        steps = rows.read(int(rng.integers(1, 70)), 0.9)
        assert rows.position >= before
        for row in range(len(rows)):
            numbers = steps.obs["arm"][:, row, :2].astype(int)
            seen += [(row, *map(int, pair)) for pair in numbers]
            assert (steps.first[:, row] == (numbers[:, 1] == 0)).all(), "first marks the first steps"
            taken["action"] += list(steps.action[:, row])
            taken["returns"] += steps.returns[:, row].tolist()
    order = [number for _, number, step in seen if step == 0]
    assert all(order.count(number) >= 4 for number in range(len(lengths))), "all episodes were begun in each pass"
    assert len(order) == rows.position
    for (_, number, step), action, total in zip(seen, taken["action"], taken["returns"], strict=True):
        made = episode(lengths[number], number)
        last = 0.0 if made.terminated else 7.0
        wanted = sum(0.9**i * r for i, r in enumerate(made.reward[step:])) + 0.9 ** (lengths[number] - step) * last
        assert (action == made.action[step]).all()
        assert total == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_reading_continues_where_it_was(tmp_path: Path) -> None:
    source = random_dataset(tmp_path / "data", [50, 130, 7, 90, 1])
    whole, part = RecordedRows(source, 3, 5), RecordedRows(source, 3, 5)
    for _ in range(4):
        whole.read(37, 0.9)
        part.read(37, 0.9)
    again = RecordedRows(source, 3, 99)
    again.load(state_json(part.save()))
    assert state_json(again.save()) == state_json(part.save()), "also before anything was read"
    for _ in range(4):
        one, two = whole.read(37, 0.9), again.read(37, 0.9)
        for name in ("action", "returns", "first"):
            assert (getattr(one, name) == getattr(two, name)).all()
        assert all((one.obs[name] == two.obs[name]).all() for name in one.obs)


def state_json(tree: Any) -> Any:
    import json

    return json.loads(json.dumps(tree))


def test_discounted_returns() -> None:
    assert discounted(np.array([1.0, 0.0, 2.0]), 0.5, 4.0).tolist() == [2.0, 2.0, 4.0]


def test_damaged_episode_fails_the_step_and_changes_nothing(tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 4, limit=60)
    small = ("algo.batch=32", "algo.minibatch=32", "model.memory.kind=gru", "algo.validation=0")
    engine = build({"id": "CartPole-v1", "time_limit": 60}, data, *small)
    assert len(engine.rows) == 2, "so two episodes are open, and two are not"
    for _ in range(3):
        engine.step()
    before, position = engine.snapshot().weights, state_json(engine.rows.save())
    for file in sorted((data / "episodes").rglob("*.parquet")):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
    with pytest.raises(TiltyardError, match=r"episodes/.*parquet is damaged"):
        engine.step()
    assert_same(before, engine.snapshot().weights)
    assert state_json(engine.rows.save()) == position


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made.action.__setitem__(0, 2.0), "has actions that the env does not have"),
        (lambda made: made.action.__setitem__(0, 0.5), "has actions that the env does not have"),
        (lambda made: made.obs["obs"].__setitem__(1, np.nan), "observation obs has a number that is not finite"),
        (lambda made: made.reward.__setitem__(0, np.inf), "a reward is not finite"),
    ],
)
def test_impossible_numbers_name_the_episode(tmp_path: Path, change: Any, message: str) -> None:
    env = Env(id="CartPole-v1")
    spec = spec_of(env)
    about = dataset_file.about_env(env, spec, seed=0)
    about = dataset_file.create_or_check(tmp_path / "data", about, dataset_file.provenance(["test"]))
    obs = {"obs": np.zeros((5, 4), np.float32)}
    made = Episode(obs, np.zeros((4, 1), np.float32), np.ones(4, np.float32), True, False, 1)
    change(made)
    writer = DatasetWriter(tmp_path / "data", about, {})
    writer.commit(0, [made])
    writer.close()
    engine = build("CartPole-v1", tmp_path / "data", "algo.validation=0")
    with pytest.raises(TiltyardError, match=f"episode 0.*{message}"):
        engine.step()


# ------------------------------------------------------------------------------------------------ learning


def test_clone_of_a_good_policy_balances(runs: Path, tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data")
    wanted = settings(
        "CartPole-v1",
        data,
        algo={"lr": 5e-3, "batch": 2048, "minibatch": 128, "validation": 0.3},
        stop={"env_steps": 60_000},
        eval={"every": 0, "episodes": 5, "at_end": True},
    )
    one, two = tiltyard.train(wanted, live=False), tiltyard.train(wanted, live=False)
    assert_same(weights_of(one), weights_of(two))
    records = records_of(one)
    assert records == records_of(two)
    last = records[-1]
    assert last["eval/return"] >= 195
    assert last["loss/clone"] < records[0]["loss/clone"] / 4
    assert last["loss/validation"] < records[0]["loss/validation"] / 4
    assert last["learn/accuracy"] > 0.95 and last["learn/validation_accuracy"] > 0.95
    assert last["learn/passes"] > 12 and last["loss/value"] < records[1]["loss/value"]


def test_initial_loss_is_that_of_a_uniform_policy(tmp_path: Path) -> None:
    engine = build("CartPole-v1", cartpole(tmp_path / "data", 2, limit=500), "algo.lr=0.0", "algo.validation=0")
    assert engine.step().metrics["loss/clone"] == pytest.approx(np.log(2), rel=0.01)


@pytest.mark.slow  # trains until it is solved
def test_memory_reaches_back_to_the_start_of_an_episode(runs: Path, tmp_path: Path) -> None:
    data = remembered(tmp_path / "data", 6, 60)
    run = tiltyard.train(
        settings(
            {"id": "memory", "options": {"length": 6}},
            data,
            algo={"lr": 5e-3, "minibatch": 64, "batch": 1024, "validation": 0.2},
            model={"memory": {"kind": "gru", "size": 16, "bptt": 4}, "hidden": [16]},  # shorter than an episode
            stop={"env_steps": 20_000},
            eval={"every": 0, "episodes": 20, "at_end": True},
        ),
        live=False,
    )
    assert records_of(run)[-1]["eval/return"] == 1.0, "without memory the mean return is 0"


def test_continuous_actions_are_learned_down_to_the_least_noise(tmp_path: Path) -> None:
    engine = build(
        {"id": "Pendulum-v1", "time_limit": 100},
        pendulum(tmp_path / "data"),
        "algo.lr=3e-3",
        "algo.batch=512",
        "algo.minibatch=64",
        "algo.validation=0",
        "algo.min_log_std=-0.5",
        "model.normalise.obs=true",
    )
    losses = [engine.step().metrics["loss/clone"] for _ in range(40)]
    assert losses[-1] < losses[0] - 0.5
    assert "learn/accuracy" not in engine.step().metrics
    assert engine.snapshot().weights["log_std"] == pytest.approx(-0.5), "without a bound it would go on"


def test_normaliser_has_the_statistics_of_the_data_from_the_first_update_on(tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 3, limit=100)
    engine = build({"id": "CartPole-v1", "time_limit": 100}, data, "model.normalise.obs=true", "algo.validation=0")
    engine.step()
    first = engine.snapshot().weights
    whole = np.concatenate([each.obs["obs"][:-1] for each in layout.read_episodes(data)])
    (stats,) = engine.net.normaliser.obs_stats
    assert stats.on_cpu[0] == pytest.approx(whole.mean(0), rel=1e-5, abs=1e-6)
    assert stats.on_cpu[1] == pytest.approx(whole.std(0), rel=1e-3)
    engine.step()
    names = [name for name in first if "obs_stats" in name]
    assert names and all((first[name] == engine.snapshot().weights[name]).all() for name in names)


def test_rewards_are_scaled_and_clipped_as_in_the_env(tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 2, limit=50)
    env = {"id": "CartPole-v1", "time_limit": 50, "reward_scale": 0.5, "reward_clip": 0.25}
    engine = build(env, data, "algo.gamma=0.0", "algo.validation=0")
    assert (engine.rows.read(20, 0.0).returns == 0.25).all()


# ------------------------------------------------------------------------------------------------ stop, kill, resume

CASES: dict[str, dict[str, Any]] = {
    "feed-forward": {"algo": {"lr": {"kind": "linear", "start": 1e-3}}},
    "memory": {"model": {"memory": {"kind": "lstm", "size": 8, "bptt": 16}, "normalise": {"obs": True}}},
    "returns": {"model": {"normalise": {"obs": True, "returns": True}, "critic": "shared"}},
}


@pytest.mark.slow  # trains each case twice
@pytest.mark.parametrize("name", CASES)
def test_resumes_do_not_change_weights_or_metrics(runs: Path, tmp_path: Path, name: str) -> None:
    data = cartpole(tmp_path / "data", 6, limit=100)
    case = {key: dict(value) for key, value in CASES[name].items()}
    algo = {"batch": 256, "minibatch": 64, "validation": 0.3, **case.pop("algo", {})}
    case = settings({"id": "CartPole-v1", "time_limit": 100}, data, algo=algo, **case)
    # truncated episodes: the critic's value of their ends is part of the state
    whole = tiltyard.train({**case, "stop": {"env_steps": 2560}}, live=False)
    parts = tiltyard.train({**case, "stop": {"env_steps": 2560, "updates": 3}}, live=False)
    for updates in (4, 1000):
        parts = tiltyard.resume(parts, [f"stop.updates={updates}"], live=False)
    assert_same(weights_of(whole), weights_of(parts))
    assert records_of(whole) == records_of(parts)


@pytest.mark.slow  # starts, kills and resumes a training
def test_kill_9_and_resume_give_the_same_weights(runs: Path, tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 6, limit=100)
    words = ["env.time_limit=100", "algo.batch=128", "algo.minibatch=32", "engine.threads=1", "save.updates=5"]
    words += ["eval.every=0", "eval.at_end=false", "stop.env_steps=16000", "track.tensorboard=false", "--plain"]
    command = [sys.executable, "-m", "tiltyard", "clone", str(data), *words]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 100
    while len(list(runs.glob("*/0*/checkpoints/0*"))) < 2:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    killed = find("last", runs)
    newest, _ = checkpoint.newest_valid(killed)
    assert newest is not None and newest.env_steps < 16_000
    resumed = tiltyard.resume(killed, live=False)
    whole = tiltyard.train(killed.experiment(), live=False)
    assert_same(weights_of(whole), weights_of(resumed))
    assert records_of(whole) == records_of(resumed)


def test_engine_saves_and_loads(tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 5, limit=80)
    env = {"id": "CartPole-v1", "time_limit": 80}
    one, two = (build(env, data, "algo.batch=256", "model.memory.kind=gru", "algo.validation=0.3") for _ in range(2))
    two.step()
    one.step()
    one.step()
    write_trees(tmp_path / "saved", one.save(tmp_path / "saved"))
    assert two.load(tmp_path / "saved") == []
    assert one.step().metrics == two.step().metrics
    assert_same(one.snapshot().weights, two.snapshot().weights)
    assert two.progress.updates == 3 and two.progress.env_steps == one.progress.env_steps

    cartpole(data, 1, first=50, limit=80)
    grown = build(env, data, "algo.batch=256", "model.memory.kind=gru", "algo.validation=0.3")
    assert grown.load(tmp_path / "saved") == [
        "the dataset or how it is read has changed since the checkpoint: a new pass over it begins"
    ]
    assert grown.step().progress.env_steps > one.progress.env_steps - one.steps * len(one.rows)


def test_settings_change_while_it_learns(runs: Path, tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 3, limit=100)
    wanted = settings({"id": "CartPole-v1", "time_limit": 100}, data, algo={"batch": 256}, stop={"updates": 4})
    with tiltyard.iterate(wanted, live=False) as training:
        for report in training:
            if report.progress.updates == 2:
                training.set({"algo.lr": 0.25, "algo.entropy": 0.5, "algo.gamma": 0.5})
    seen = [(record["setting/lr"], record["setting/entropy"]) for record in records_of(training.run)]
    assert seen == [(1e-3, 0.0), (1e-3, 0.0), (0.25, 0.5), (0.25, 0.5)]
    assert training.run.experiment().algo.model_dump()["gamma"] == 0.5
    with pytest.raises(UseError, match="unknown learning policy 'rival'"):
        build({"id": "CartPole-v1", "time_limit": 100}, data).snapshot("rival")


# ------------------------------------------------------------------------------------------------ forks


@pytest.mark.slow  # trains and evaluates four runs
def test_fork_to_ppo_starts_from_the_clone(runs: Path, tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 6)
    clone = tiltyard.train(
        settings("CartPole-v1", data, algo={"lr": 5e-3, "minibatch": 128}, stop={"env_steps": 60_000}), live=False
    )
    reached = checkpoint.select(clone, None).env_steps
    small = [f"stop.env_steps={reached + 512}", "engine.envs=4", "eval.at_end=true", "eval.episodes=3", "algo.lr=0.0"]
    for kind in ("local", "serial"):
        fork = tiltyard.fork(clone, ["algo=ppo", f"engine.kind={kind}", *small], live=False)
        assert_same(weights_of(clone), weights_of(fork))  # with algo.lr = 0 they stay
        last = records_of(fork)[-1]
        assert last["eval/return"] >= 195
        assert last["learn/explained_variance"] > -1, "the critic knows the returns of the data"
    again = tiltyard.fork(fork, ["algo.lr=1e-3", f"stop.env_steps={reached + 2048}"], live=False)
    assert any((weights_of(again)[name] != array).any() for name, array in weights_of(fork).items())


def test_fork_from_ppo_and_model_init_start_from_its_weights(runs: Path, tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 3)
    ppo = tiltyard.train({**BASE, "env": "CartPole-v1", "stop": {"env_steps": 1024}}, live=False)
    frozen = ["algo.id=clone", f"algo.dataset={data}", "algo.lr=0.0", "stop.env_steps=6000"]
    assert_same(weights_of(ppo), weights_of(tiltyard.fork(ppo, frozen, live=False)))
    started = settings("CartPole-v1", data, algo={"lr": 0.0}, model={"init": ppo.id}, stop={"updates": 1})
    assert_same(weights_of(ppo), weights_of(tiltyard.train(started, live=False)))


# ------------------------------------------------------------------------------------------------ agents, masks


def two_agents(folder: Path) -> Path:
    """`even` always shows heads (0), `odd` tails (1)."""
    env = Env(id="pennies")
    about = dataset_file.about_env(env, spec_of(env), seed=0)
    about = dataset_file.create_or_check(folder, about, dataset_file.provenance(["test"]))
    writer = DatasetWriter(folder, about, {})
    for number in range(40):
        episodes = []
        for place, agent in enumerate(("even", "odd")):
            obs = np.zeros((2, 2), np.float32)
            obs[:, place] = 1
            action = np.full((1, 1), place, np.float32)
            meta = {"agent": agent}
            episodes.append(Episode({"obs": obs}, action, np.ones(1, np.float32), True, False, number, meta=meta))
        writer.commit(number, episodes)
    writer.close()
    return folder


def test_episodes_of_all_agents_or_of_some_are_learned(tmp_path: Path) -> None:
    data = two_agents(tmp_path / "data")
    both = build("pennies", data, "algo.batch=256", "algo.lr=0.02")
    for _ in range(20):
        seen = both.step().metrics
    assert seen["learn/validation_accuracy"] == 1.0
    one = build("pennies", data, "algo.batch=256", "algo.agents=[odd]", "algo.validation=0")
    assert (one.rows.read(8, 0.9).action == 1).all() and one.source.steps == 40
    with pytest.raises(UseError, match=r"algo.agents names 'od'.*has no episode of it") as raised:
        build("pennies", data, "algo.agents=[od]")
    assert "odd" in raised.value.hint


def test_masks_and_small_datasets_are_noted(tmp_path: Path) -> None:
    env = Env(id="masked")
    spec = spec_of(env)
    about = dataset_file.about_env(env, spec, seed=0)
    about = dataset_file.create_or_check(tmp_path / "data", about, dataset_file.provenance(["test"]))
    obs = {name: np.zeros((3, *item.shape), item.dtype) for name, item in spec.obs.items()}
    writer = DatasetWriter(tmp_path / "data", about, {})
    writer.commit(0, [Episode(obs, np.zeros((2, 1), np.float32), np.ones(2, np.float32), True, False, 1)])
    writer.close()
    engine = build("masked", tmp_path / "data")
    lines = "\n".join(engine.describe())
    assert "action masks are not recorded" in lines and "so there is no loss/validation" in lines
    assert "loss/validation" not in engine.step().metrics


# ------------------------------------------------------------------------------------------------ wrong use


def test_dataset_that_does_not_fit_is_refused_with_both_sides(tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 2, limit=50)

    def refused(env: Any, *overrides: str) -> str:
        with pytest.raises(UseError) as raised:
            build(env, data, *overrides)
        return raised.value.message

    assert "is a dataset of CartPole-v1, but env.id = Pendulum-v1" in refused("Pendulum-v1")
    stacked = refused({"id": "CartPole-v1", "frame_stack": 3})
    assert "obs (4,) float32" in stacked and "obs (12,) float32" in stacked
    assert "has the observations" in refused("CartPole-v1", "model.previous=true")
    assert "is not a dataset" in refused("CartPole-v1", f"algo.dataset={tmp_path}")
    assert "there is no dataset" in refused("CartPole-v1", f"algo.dataset={tmp_path / 'none'}")
    held_out = refused({"id": "CartPole-v1", "time_limit": 50}, "algo.validation=0.999999999")
    assert "holds out all 2 episodes" in held_out
    assert "algo.batch = 1,000,000,000,000 env steps need about" in refused("CartPole-v1", "algo.batch=1000000000000")
    experiment = load(settings({"id": "CartPole-v1", "time_limit": 40}, data)).experiment
    notes = check_cloning(experiment, spec_of(experiment.env))[1]
    assert any("recorded with other settings" in note for note in notes)


def test_actions_that_do_not_fit_name_both_sides(tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 1, limit=20)
    experiment = load(settings({"id": "CartPole-v1", "time_limit": 20}, data)).experiment
    here, pendulum_spec = spec_of(experiment.env), spec_of(Env(id="Pendulum-v1"))
    other = EnvSpec(obs=here.obs, action=pendulum_spec.action)
    with pytest.raises(UseError, match=r"actions 2 categorical, but env CartPole-v1 has 1 continuous from \[-2.0\]"):
        check_cloning(experiment, other)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.kind=rllib", "engine.kind"),
        ("engine.workers=2", "engine.workers"),
        ("engine.mode=async", "engine.mode"),
        ("engine.inference=batched", "engine.inference"),
        ("engine.affinity=true", "engine.affinity"),
        ("engine.learners=2", "engine.learners"),
        ("engine.tune=true", "engine.tune"),
        ("policies={a: {}, b: {}}", "policies"),
        ("stop.train_return=5", "stop.train_return"),
        ("algo.lr={kind: kl_adaptive, start: 0.1}", "algo.lr.kind"),
    ],
)
def test_what_cloning_does_not_support_is_refused_by_name(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(settings("CartPole-v1", tmp_path), [override])
    assert f"{message} = " in raised.value.details
    assert "is not supported by algo.id = clone" in raised.value.details


def test_population_is_refused_and_sizes_are_checked(tmp_path: Path) -> None:
    wanted = settings("CartPole-v1", tmp_path, population={"space": {"algo.lr": [1e-3, 1e-2]}})
    with pytest.raises(ConfigError) as raised:
        load(wanted, ["policies={a: {}, b: {}}"])
    assert "population: is not supported by algo.id = clone" in raised.value.details
    for override, message in (
        ("algo.minibatch=8192", "is more than the batch of 4096 (algo.batch)"),
        ("algo.minibatch=8 model.memory.kind=gru", "is less than model.memory.bptt = 16"),
    ):
        with pytest.raises(ConfigError) as raised:
            load(settings("CartPole-v1", tmp_path), override.split())
        assert message in raised.value.details
    with pytest.raises(ConfigError) as raised:
        load({"env": "CartPole-v1", "algo": "clone"})
    assert "algo.dataset" in raised.value.details


def test_split_is_by_seed(tmp_path: Path) -> None:
    data = cartpole(tmp_path / "data", 20, limit=20)
    chosen = choose_episodes(Clone(id="clone", dataset=str(data), validation=0.3))
    learn, held_out = (set(part.column("seed").tolist()) for part in (chosen.learn, chosen.held_out))
    assert learn | held_out == set(range(20)) and not learn & held_out and held_out
    cartpole(data, 20, first=20, limit=20)
    more = choose_episodes(Clone(id="clone", dataset=str(data), validation=0.3))
    assert learn <= set(more.learn.column("seed").tolist())
    assert held_out <= set(more.held_out.column("seed").tolist())
