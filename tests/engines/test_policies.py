"""Several policies in one engine: matches, samples of each policy, and that resume and workers change nothing."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard as product
from tests.conftest import Command
from tests.engines.test_serial import build
from tests.learning.test_games import equilibrium
from tiltyard.config.load import load
from tiltyard.config.policies import Changes
from tiltyard.data.folder import read_episodes
from tiltyard.engines import make_engine
from tiltyard.engines.local.engine import LocalEngine
from tiltyard.engines.policies.matchmaking import Match
from tiltyard.engines.serial import SerialEngine
from tiltyard.envs.probe import probe
from tiltyard.errors import UseError
from tiltyard.run import metric_names, metrics
from tiltyard.run.checkpoint import list_checkpoints
from tiltyard.run.events import read_events
from tiltyard.run.state_file import read_tree, write_trees
from tiltyard.types import Arrays

pytestmark = pytest.mark.slow  # starts and ends processes

TWO = "policies={main: {}, rival: {}}"
POOL = ("env.options.pauses=true", TWO, 'match={host: main, "*": {main: 0.3, rival: 0.7}}')
MEMORY = ("model.memory.kind=gru", "model.memory.size=8", "model.normalise.obs=true", "model.normalise.returns=true")
TRAIN: dict[str, Any] = {
    "env": "pennies",
    "model": {"hidden": [8]},
    "algo": {"rollout": 16, "minibatch": 32, "epochs": 1},
    "engine": {"envs": 2},
    "stop": {"env_steps": 128},
    "eval": {"every": 0, "episodes": 3},
    "track": {"tensorboard": False},
}


def same(one: Arrays, two: Arrays) -> bool:
    return one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_failed_update_leaves_all_policies_unchanged() -> None:
    """Including those whose own update was complete."""
    engine: Any = build("pennies", TWO, "match={even: main, odd: rival}", "engine.kind=serial")
    engine.step()
    learners = engine.policies.learners

    def now(name: str) -> tuple[Any, ...]:
        adam = learners[name].algo.adam
        moments = [each.numpy().tobytes() for each in (adam.first, adam.second)]
        return engine.snapshot(name).weights, moments, adam.steps, learners[name].env_steps

    before = {name: now(name) for name in learners}

    gradient_steps = learners["main"].algo.adam.steps  # per update
    done = 0

    def fail_in_the_second_update() -> None:
        nonlocal done
        done += 1
        if done > gradient_steps:
            raise RuntimeError("after the rival's first gradient step")

    with pytest.raises(RuntimeError):
        engine.policies.update(engine.rollout, engine.progress.env_steps, fail_in_the_second_update)
    assert done == gradient_steps + 1
    for name, (weights, *rest) in before.items():
        after, *others = now(name)
        assert same(weights, after) and rest == others, name
    engine.step()
    assert not any(same(before[name][0], now(name)[0]) for name in learners)
    engine.close()


# ------------------------------------------------------------------------------------------------ matches


def draws(match: str, agents: tuple[str, ...], count: int) -> np.ndarray:
    made = Match(load("pennies", ["policies={a: {}, b: {}, c: {}}", f"match={match}"]).experiment, agents)
    return np.array([made.draw(seed) for seed in range(count)])


def test_policy_is_drawn_by_pool_weights_independently_per_agent() -> None:
    seats = draws("{x: a, '*': {a: 1, b: 2, c: 5}}", ("x", "y", "z"), 8000)
    assert not seats[:, 0].any(), "a name before a pattern decides"
    for agent in (1, 2):
        assert np.allclose(np.bincount(seats[:, agent]) / 8000, [1 / 8, 2 / 8, 5 / 8], atol=0.02)
    assert abs(np.corrcoef(seats[:, 1], seats[:, 2])[0, 1]) < 0.05
    assert np.array_equal(seats[:50], draws("{x: a, '*': {a: 1, b: 2, c: 5}}", ("x", "y", "z"), 50))


def test_measured_policy_plays_in_every_episode() -> None:
    experiment = load("pennies", ["policies={a: {}, b: {}}", "match={x: b, y: {a: 0.01, b: 0.99}}"]).experiment
    seats = np.array([Match(experiment, ("x", "y"), measured=True).draw(seed) for seed in range(50)])
    assert seats.tolist() == [[1, 0]] * 50


@pytest.mark.parametrize(
    ("settings", "output"),
    [
        (["match={evn: main, odd: main, even: main}"], "match.evn: matches no agent of the env\n   hint: did you mean 'even'"),
        (["match={even: main}"], "no pattern matches agent 'odd'"),
        (["match={'*': main, odd: main}"], "match.odd: never matches; earlier patterns cover all its agents"),
        ([TWO], "policies.rival: plays no agent"),
        ([TWO, "match={even: main, odd: rivla}"], "match.odd = 'rivla': unknown policy\n   hint: did you mean"),
        ([TWO, "match={even: main, odd: {}}"], "match.odd = {}: the pool is empty"),
        ([TWO, "match={even: main, odd: {rival: 0}}"], "match.odd.rival = 0: must be more than 0"),
        (["policies={old: {from: x}, main: {}}"], "policies.old.from = 'x': the first policy must learn"),
        (["policies={main: {}, b: {from: x, algo: {lr: 1}}}"], "policies.b.algo.lr = 1.0: b does not learn"),
        (["policies={main: {algo: {epochs: 3}}}"], "policies.main.algo.epochs = 3: unknown setting"),
        (["policies={main: {algo: {gamma: 3}}}"], "policies.main.algo.gamma = 3: must be at most 1"),
        (["algo=a2c", "policies={main: {algo: {clip: 0.1}}}"], "policies.main.algo.clip = 0.1: algo.id = a2c has no clip"),
        (["policies={../up: {}}"], "policies.../up: a policy's name must be"),
        (["policies={main: {}, b: {from: nowhere}}"], "policies.b.from = 'nowhere': there is no run 'nowhere'"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_before_a_run_is_created(
    tiltyard: Command, runs: Path, settings: list[str], output: str
) -> None:
    assert output in tiltyard("train", "pennies", *settings, expect=2).stderr
    assert not list(runs.rglob("status.json"))


def test_single_agent_of_an_env_is_named_agent(tiltyard: Command) -> None:
    words = ("train", "identity", "--debug", TWO)
    assert "no pattern matches agent 'agent'" in tiltyard(*words, "match={player: main}", expect=2).stderr
    tiltyard(*words, "match={agent: {main: 0.5, rival: 0.5}}", "stop.env_steps=64", "eval.at_end=false")


def test_override_replaces_a_whole_pool_but_single_settings_of_a_policy() -> None:
    file = {
        "env": "pennies",
        "policies": {"main": {}, "b.c": {"algo": {"lr": 0.1}}},
        "match": {"odd": {"main": 0.5, "b.c": 1}},
    }
    made = load(file, ["policies.b.c.algo.clip=0.3", "match.odd={b.c: 2}"]).experiment  # fmt: skip
    assert made.policies["b.c"].algo.model_dump(exclude_none=True) == {"lr": 0.1, "clip": 0.3}
    assert made.match == {"odd": {"b.c": 2.0}}
    from tiltyard.algos.ppo import CHANGEABLE

    assert tuple(Changes.model_fields) == CHANGEABLE


# ------------------------------------------------------------------------------------------------ learning


def test_each_policy_learns_only_from_its_own_rows() -> None:
    """A policy's weights do not depend on the content of the other policy's rows."""
    engines = [build("visitors", *POOL, *MEMORY, "engine.kind=serial") for _ in range(2)]
    for engine in engines:
        assert isinstance(engine, SerialEngine)
        engine.step()
    one, two = engines
    assert isinstance(one, SerialEngine) and isinstance(two, SerialEngine)
    policy = two.rollout.policy
    assert policy is not None and {0, 1} == set(np.unique(policy).tolist())
    assert not policy[:, 0::4].any(), "the host is always main"
    changes = policy[1:] != policy[:-1]
    assert changes.any() and not (changes & ~two.rollout.first[1:]).any(), "only where an episode begins"
    rng, theirs = np.random.default_rng(0), policy == 1
    for array in (two.rollout.reward, two.rollout.value, two.rollout.bootstrap, *two.rollout.obs.values()):
        array[theirs] = rng.normal(0, 1, array[theirs].shape)
    told = [engine.policies.update(engine.rollout, 48) for engine in (one, two)]
    assert same(one.snapshot("main").weights, two.snapshot("main").weights)
    assert not same(one.snapshot("rival").weights, two.snapshot("rival").weights)
    assert {name.split("/")[1] for name in told[0]} == {"main", "rival"}
    assert all(metric_names.describe(name) is not None for name in told[0])
    for engine in engines:
        engine.close()


def test_policy_uses_its_own_settings() -> None:
    engine = build(
        "pennies", "policies={main: {}, rival: {algo: {lr: 0, entropy: 0.5}}}", "match={even: main, odd: rival}"
    )
    before = {name: engine.snapshot(name).weights for name in ("main", "rival")}
    assert not same(before["main"], before["rival"]), "they start apart"
    told = engine.step().metrics
    assert same(before["rival"], engine.snapshot("rival").weights)
    assert not same(before["main"], engine.snapshot("main").weights)
    assert (told["policy/rival/setting/lr"], told["policy/rival/setting/entropy"]) == (0, 0.5)
    assert told["policy/main/setting/lr"] == 1e-3
    engine.adopt("rival", engine.snapshot("main"), {})
    assert same(engine.snapshot("main").weights, engine.snapshot("rival").weights)
    with pytest.raises(UseError, match="unknown learning policy 'rivla'"):
        engine.snapshot("rivla")
    engine.close()


def test_policy_without_samples_skips_the_update() -> None:
    engine = build("pennies", TWO, "match={even: main, odd: {main: 1e9, rival: 1e-9}}", "engine.kind=serial")
    before = engine.snapshot("rival").weights
    assert not [name for name in engine.step().metrics if name.startswith("policy/rival/")]
    assert same(before, engine.snapshot("rival").weights)
    engine.close()


def test_name_of_a_single_policy_does_not_change_its_weights() -> None:
    plain, named = (
        build("visitors", "engine.kind=serial"),
        build("visitors", "engine.kind=serial", "policies={solo: {}}"),
    )
    for _ in range(2):
        assert plain.step().metrics.keys() == named.step().metrics.keys()
    assert same(plain.snapshot().weights, named.snapshot("solo").weights)


# ------------------------------------------------------------------------------------------------ bit for bit


def test_save_and_load_continue_bit_for_bit(tmp_path: Path) -> None:
    one, two = (build("visitors", *POOL, *MEMORY, "engine.kind=serial") for _ in range(2))
    assert isinstance(one, SerialEngine) and isinstance(two, SerialEngine)
    one.step()
    write_trees(tmp_path, one.save(tmp_path))
    two.step()
    two.step()
    assert two.load(tmp_path) == []
    for _ in range(2):
        one.step()
        two.step()
        assert one.rollout.policy is not None and np.array_equal(one.rollout.policy, two.rollout.policy)  # type: ignore[arg-type]
    for name in ("main", "rival"):
        assert same(one.snapshot(name).weights, two.snapshot(name).weights)


@pytest.mark.slow
def test_workers_and_groups_in_one_process_give_identical_weights(tmp_path: Path) -> None:
    settings = (
        *POOL,
        *MEMORY,
        "engine.workers=2",
        "engine.envs=4",
        "engine.threads=1",
    )  # two threads round differently
    one, two = build("visitors", *settings, "engine.kind=serial"), build("visitors", *settings)
    assert isinstance(two, LocalEngine)
    for _ in range(3):
        a, b = one.step(), two.step()
        assert [end.returns for end in a.episodes] == [end.returns for end in b.episodes]
    for name in ("main", "rival"):
        assert same(one.snapshot(name).weights, two.snapshot(name).weights)
    write_trees(tmp_path, two.save(tmp_path))
    assert one.load(tmp_path) == []
    one.step()
    two.step()
    assert same(one.snapshot("rival").weights, two.snapshot("rival").weights)
    one.close()
    two.close()


# ------------------------------------------------------------------------------------------------ frozen


def test_frozen_policy_is_copied_and_works_without_its_run(runs: Path) -> None:
    """It may have another model, with its own memory."""
    model = {"hidden": [8], "memory": {"kind": "gru", "size": 4, "bptt": 8}}
    first = product.train({**TRAIN, "name": "first", "model": model, "save": {"env_steps": 64, "last": 9}}, live=False)
    early = list_checkpoints(first)[0]
    source = read_tree(early.folder / "policies", "main")["weights"]
    policies = {"main": {}, "old": {"from": f"first@{early.env_steps}"}}
    again = {**TRAIN, "name": "again", "policies": policies, "match": {"even": "main", "odd": {"main": 1, "old": 1}}}
    run = product.train(again, live=False)
    shutil.rmtree(first.folder)
    assert run.experiment().policies["old"].from_ == "frozen/old"
    assert same(read_tree(run.folder / "frozen" / "old" / "policies", "main")["weights"], source)
    run = product.resume(run, ["stop.env_steps=256"], live=False)
    assert not [event for event in read_events(run) if event["kind"] == "warning"]
    assert sorted(path.stem for path in (list_checkpoints(run)[-1].folder / "policies").glob("*.json")) == ["main"]
    records = metrics.read(run.metrics_file)
    assert {"policy/main/return", "policy/old/return", "policy/main/loss/policy"} <= records[-1]["metrics"].keys()
    assert not [name for name in records[-1]["metrics"] if name.startswith("policy/old/loss")]
    product.evaluate(run, episodes=4, rollouts=Path("kept"))
    kept = [episode.meta for episode in read_episodes("kept")]
    assert {meta["policy"] for meta in kept if meta["agent"] == "even"} == {"main"}
    assert {meta["policy"] for meta in kept} == {"main", "old"}
    forked = product.fork(
        run, ["stop.env_steps=320", "policies.new={}", "match={even: main, odd: {old: 1, new: 1}}"], live=False
    )
    assert "the checkpoint has no policy new" in " ".join(event["sentence"] for event in read_events(forked))
    assert same(read_tree(forked.folder / "frozen" / "old" / "policies", "main")["weights"], source)
    assert product.load_policy(forked, name="new").spec == product.load_policy(forked).spec
    with pytest.raises(UseError, match="cannot change match"):
        product.resume(forked, ["match.odd=main"], live=False)


def test_frozen_policy_must_fit_the_env(tiltyard: Command, runs: Path) -> None:
    other = product.train({**TRAIN, "env": "identity", "name": "other"}, live=False)
    words = ("policies={main: {}, old: {from: other}}", "match={even: main, odd: old}")
    assert (
        "policies.old.from = 'other': the policy was trained with observations"
        in tiltyard("train", "pennies", *words, expect=2).stderr
    )
    words = (f"policies={{main: {{}}, old: {{from: '{other.id}@7'}}}}", words[1])
    assert "has no checkpoint at env step 7" in tiltyard("train", "pennies", *words, expect=2).stderr


MODEL = """
import torch

class CustomModel(torch.nn.Module):
    def __init__(self, spec, outputs, scale=1.0):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(2, outputs + 1), scale

    def forward(self, obs):
        out = self.layer(obs["obs"]) * self.scale
        return out[:, :-1], out[:, -1]
"""


def test_code_of_a_frozen_model_is_copied(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    first = product.train({**TRAIN, "name": "first", "model": {"id": "own.py", "options": {"scale": 2.0}}}, live=False)
    (tmp_path / "own.py").write_text("raise RuntimeError('later edits change nothing')")
    policies = {"main": {}, "old": {"from": str(list_checkpoints(first)[-1].folder)}}
    run = product.train({**TRAIN, "policies": policies, "match": {"even": "main", "odd": "old"}}, live=False)
    shutil.rmtree(first.folder)
    assert (run.folder / "frozen" / "old" / "plugins" / "own.py").is_file()
    assert product.evaluate(run, episodes=2).metrics.keys() >= {"policy/main/return", "policy/old/return"}


# ------------------------------------------------------------------------------------------------ games


def test_learning_policy_beats_a_frozen_one(runs: Path) -> None:
    """Odd gets 1 per round by always showing tails against a random even, but 0.4 against an optimal one."""
    coin = {**TRAIN, "name": "coin", "algo": {**TRAIN["algo"], "lr": 0.0}, "stop": {"updates": 1}}
    product.train(coin, live=False)
    algo = {"rollout": 32, "minibatch": 128, "epochs": 4, "lr": 0.02}
    policies = {"main": {}, "coin": {"from": "coin"}}
    against = {
        **TRAIN,
        "algo": algo,
        "engine": {"envs": 8},
        "policies": policies,
        "match": {"even": "coin", "odd": "main"},
    }
    run = product.train(
        {**against, "eval": {"episodes": 200, "greedy": False}, "stop": {"env_steps": 12_800}}, live=False
    )
    found = metrics.read(run.metrics_file)[-1]["metrics"]
    assert found["episode/odd_heads"] < 0.1
    assert found["eval/return"] > 0.7, "the score is the first policy's, not the mean of both, which is 0"
    assert found["policy/main/return"] == pytest.approx(-found["policy/coin/return"])
    assert product.evaluate(run, ["match.even=main"], episodes=3).mean == 0, "against itself"


def test_two_policies_circle_the_equilibrium() -> None:
    """Like one policy for both agents, which knows its agent from the observation."""
    algo = {"id": "a2c", "rollout": 2, "lr": 0.01, "entropy": 0.5, "normalise_advantage": False, "max_grad_norm": None}
    played = {"policies": {"main": {}, "rival": {}}, "match": {"even": "main", "odd": "rival"}}
    file = {
        "env": "pennies",
        "algo": algo,
        "model": {"hidden": [8]},
        "engine": {"kind": "serial", "envs": 32},
        **played,
    }
    experiment = load(file).experiment
    engine = make_engine(experiment, probe(experiment.env, base=[]), [])
    assert isinstance(engine, SerialEngine)
    heads = []
    for _ in range(150):
        engine.step()
        shown = engine.rollout.action[:, :, 0] == 0
        heads.append((shown[:, 0::2].mean(), shown[:, 1::2].mean()))
    engine.close()
    assert np.allclose(np.mean(heads, 0), equilibrium(0.5), atol=0.05), np.mean(heads, 0)
