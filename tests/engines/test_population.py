"""Policies of one engine as a population: which is copied, with which settings, and that a resume decides the same."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard as product
from tests.conftest import Command
from tests.engines.test_policies import same
from tests.engines.test_serial import build
from tests.faults.test_kill import tiltyard as started
from tests.faults.test_kill import wait_until
from tiltyard.config.load import load
from tiltyard.config.yaml import dump_yaml
from tiltyard.engines.engine_state import read_state
from tiltyard.engines.local.engine import LocalEngine
from tiltyard.errors import ConfigError
from tiltyard.run import metrics
from tiltyard.run.checkpoint import list_checkpoints
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find
from tiltyard.run.state_file import read_tree, write_trees
from tiltyard.training.pbt import policy_lineage, read_pbt_state

SMALL: dict[str, Any] = {
    "env": "identity",
    "model": {"hidden": [8]},
    "algo": {"rollout": 16, "minibatch": 32, "epochs": 1},
    "engine": {"kind": "serial", "envs": 4},
    "policies": {"a": {}, "b": {}, "c": {}},
    "population": {
        "period": 100,
        "start": 0,
        "replace": 0.5,
        "gap": 0.0,
        "relative_gap": 0.0,
        "rate": 1.0,
        "space": {"algo.lr": {"log": [1e-4, 1e-1]}, "algo.gamma": {"range": [0.9, 0.999]}},
    },
    "stop": {"env_steps": 1_920},
    "eval": {"every": 0, "at_end": False},
    "save": {"updates": 1, "last": 1000},
    "track": {"tensorboard": False},
}
LOCAL = {"kind": "local", "workers": 2, "envs": 4}
KINDS = {"serial": SMALL["engine"], "sync": LOCAL, "async": {**LOCAL, "mode": "async"}}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**SMALL, **{name: {**SMALL.get(name, {}), **values} for name, values in sections.items()}}


def exploits(run: Run) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == "exploited"]


def told(run: Run) -> list[dict[str, Any]]:
    """Return the decisions without their time."""
    return [{name: value for name, value in each.items() if name != "time"} for each in exploits(run)]


# ------------------------------------------------------------------------------------------------ refused settings


@pytest.mark.parametrize(
    ("settings", "output"),
    [
        ({"policies": {"a": {}}}, "population: needs at least two policies that learn, but policies has 1"),
        ({"population": {}}, "population.space: is empty"),
        ({"population": {"space": {"algo.epochs": [1, 2]}}}, "algo.epochs cannot change during training"),
        ({"population": {"space": {"algo.lr": {"log": [0, 1]}}}}, "population.space.algo.lr = .* has a log scale"),
        ({"population": {"space": {"algo.gamma": [0.9, 2]}}}, "reaches 2: gamma must be at most 1"),
        (
            {"population": {"space": {"algo.lr": [1, 2]}, "metric": "eval/return"}},
            "must be a metric that each policy has",
        ),
        ({"population": {"space": {"algo.lr": [1, 2]}, "replace": 0.7}}, "population.replace = 0.7"),
        ({"engine": {"kind": "rllib"}}, "population: is not supported by engine.kind = rllib"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], output: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load({**SMALL, **settings})
    assert re.search(output, refused.value.details)


def test_range_that_includes_gamma_1_is_refused_before_a_run_is_created(tiltyard: Command, runs: Path) -> None:
    words = ("policies={a: {}, b: {}}", "population={space: {algo.gamma: {range: [0.9, 1]}}}")
    assert (
        "changed by its distance from 1 and must stay below 1" in tiltyard("train", "identity", *words, expect=2).stderr
    )
    assert not list(runs.rglob("status.json"))


# ------------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("kind", KINDS)
def test_copy_has_identical_weights_and_the_decided_settings(runs: Path, kind: str) -> None:
    run = product.train({**changed(stop={"env_steps": 2_560}), "engine": KINDS[kind]}, live=False)
    found = [each for each in exploits(run) if each["at"] <= 1_920]  # so that each copy has a later update
    assert len(found) >= 2
    saved = {each.env_steps: each.folder for each in list_checkpoints(run)}
    records = {each["env_steps"]: each["metrics"] for each in metrics.read(run.metrics_file)}
    for event in found:
        member, source, folder = event["member"], event["source"], saved[event["at"]]
        weights = {name: read_tree(folder / "policies", name)["weights"] for name in (member, source)}
        assert same(weights[member], weights[source])
        learner = read_state(folder)["learner"]
        trees = {learner["name"]: learner, **learner["others"]}
        optimisers = [trees[name]["algo"]["adam"] for name in (member, source)]
        assert optimisers[0]["steps"] == optimisers[1]["steps"]
        assert same(optimisers[0]["first"], optimisers[1]["first"])
        in_force = trees[member]["algo"]["settings"]
        assert {name: in_force[name]["fixed"] for name in ("lr", "gamma")} == {
            name: event["after"][f"algo.{name}"] for name in ("lr", "gamma")
        }
        assert event["after"] != event["before"]
        used = [each.get(f"policy/{member}/setting/lr") for at, each in sorted(records.items()) if at > event["at"]]
        assert next(filter(None, used)) == event["after"]["algo.lr"], "its next update learned with it"
    first = found[0]
    later = [folder for at, folder in saved.items() if at > first["at"]][2]
    both = (first["member"], first["source"])
    assert not same(*(read_tree(later / "policies", name)["weights"] for name in both)), "they go on apart"


def test_initial_settings_are_spread_over_the_space_except_a_policys_own(runs: Path) -> None:
    policies = {"a": {"algo": {"lr": 0.5}}, "b": {}, "c": {}, "d": {}}
    run = product.train({**changed(stop={"env_steps": 64}), "policies": policies}, live=False)
    found = metrics.read(run.metrics_file)[0]["metrics"]
    rates = [found[f"policy/{name}/setting/lr"] for name in policies]
    assert rates[0] == 0.5
    assert len({int((np.log10(rate) + 4) / 3 * 4) for rate in rates[1:]}) == 3, "each in a quarter of its own"
    assert sum(found[f"policy/{name}/env_steps"] for name in policies) == 64


NEGATIVE = """
import gymnasium, numpy as np

class Negative(gymnasium.Env):
    '''Show what you see: -1 each time, -3 where it is wrong. `true_objective` counts what was wrong.'''
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.wrong = 0, 0
        return self.look(), {}

    def look(self):
        self.shown = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.shown]

    def step(self, action):
        self.t += 1
        self.wrong += int(action != self.shown)
        reward = -1.0 if action == self.shown else -3.0
        done = self.t == 8
        return self.look(), reward, done, False, {"true_objective": float(self.wrong)} if done else {}
"""


def against_one_that_stands_still(tmp_path: Path, **population: Any) -> Run:
    """Train two policies, one of them with a learning rate of 0 until the first decision."""
    (tmp_path / "negative.py").write_text(NEGATIVE)
    rules = {"period": 3000, "start": 3000, "relative_gap": 0.05, "space": {"algo.lr": {"log": [0.01, 0.02]}}}
    file = {
        **changed(
            algo={"rollout": 32, "minibatch": 128, "epochs": 2}, save={"updates": 1000}, stop={"env_steps": 7_000}
        ),
        "env": "negative.py:Negative",
        "engine": {"kind": "serial", "envs": 8},
        "policies": {"still": {"algo": {"lr": 0.0}}, "able": {}},
        "population": {**SMALL["population"], **rules, **population},
    }
    return product.train(file, live=False)


def test_worse_policy_is_replaced_if_all_scores_are_negative(runs: Path, tmp_path: Path) -> None:
    run = against_one_that_stands_still(tmp_path)
    first = exploits(run)[0]
    assert (first["member"], first["source"]) == ("still", "able")
    assert first["scores"][0] < first["scores"][1] < 0
    assert first["after"]["algo.lr"] >= 0.01, "inside the span"


def test_objective_may_be_a_metric_of_the_env(runs: Path, tmp_path: Path) -> None:
    """A policy with more wrong actions has a higher value, whatever its return is."""
    run = against_one_that_stands_still(tmp_path, metric="episode/true_objective")
    assert next((each["member"], each["source"]) for each in exploits(run)) == ("able", "still")
    run = against_one_that_stands_still(tmp_path, metric="episode/true_objective", goal="minimise")
    assert next((each["member"], each["source"]) for each in exploits(run)) == ("still", "able")


def test_replaced_policy_is_ranked_by_its_new_episodes_only(runs: Path, tmp_path: Path) -> None:
    run = against_one_that_stands_still(tmp_path)
    at = exploits(run)[0]["at"]
    records = metrics.read(run.metrics_file)
    before = next(each["metrics"] for each in records if each["env_steps"] == at)["policy/still/return"]
    after = [each["metrics"] for each in records if each["env_steps"] > at]
    assert after[0]["policy/still/return"] > before + 1, "nothing of what it was before is in the mean"


def test_pb2_learns_from_gains_and_stays_inside_the_space(runs: Path) -> None:
    run = product.train(changed(population={"explore": "pb2"}, stop={"env_steps": 6_400}), live=False)
    tree = read_tree(list_checkpoints(run)[-1].folder, "loop")["selection"]
    assert len(tree["gains"]) > 12, "more than it takes to stop drawing at random"
    made = [each["after"] for each in exploits(run)]
    assert len(made) >= 5
    assert all(1e-4 <= each["algo.lr"] <= 1e-1 and 0.9 <= each["algo.gamma"] <= 0.999 for each in made)


# ------------------------------------------------------------------------------------------------ old samples


def test_samples_from_before_the_replacement_are_not_learned_from() -> None:
    """In async mode, samples of the old weights still arrive after a policy is replaced."""
    words = ("policies={a: {}, b: {}}", 'match={"*": {a: 0.5, b: 0.5}}', "engine.workers=2", "engine.envs=4")
    engine = build("identity", *words, "engine.mode=async")
    assert isinstance(engine, LocalEngine)
    dropped = 0
    for _ in range(30):
        engine.step()
        engine.adopt("b", engine.snapshot("a"), {})
        learner, before = engine.policies.learners["b"], engine.policies.learners["b"].env_steps
        report = engine.step()
        rollout = engine.rollout
        assert rollout.policy is not None
        own = rollout.valid & (rollout.policy == 1)
        fresh = own & (rollout.policy_version >= learner.since)
        assert learner.env_steps - before == fresh.sum()
        dropped += int(own.sum() - fresh.sum())
        if not fresh.any():
            assert not any(name.startswith("policy/b/loss") for name in report.metrics)
    engine.close()
    assert dropped > 0, "there were such samples"


@pytest.mark.parametrize("words", [("engine.kind=serial",), ("engine.workers=2",)])
def test_episode_begun_before_the_replacement_is_not_counted_for_the_new_policy(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    cast = ("policies={a: {}, b: {}}", 'match={"*": {a: 0.5, b: 0.5}}', "engine.envs=4", "env.options.length=24")
    engine, again = (build("identity", *cast, *words) for _ in range(2))  # rollouts of 16
    engine.step()
    engine.adopt("b", engine.snapshot("a"), {})
    write_trees(tmp_path, engine.save(tmp_path))
    again.load(tmp_path)
    for each in (engine, again):
        ends = [end for _ in range(6) for end in each.step().episodes]
        running = [end for end in ends if end.number == min(first.number for first in ends)]
        later = [end for end in ends if end not in running]
        assert len(running) == 4 and not any("b" in end.returns for end in running)
        assert any("a" in end.returns for end in running)
        assert any("b" in end.returns for end in later) and all(end.returns for end in later)
        each.close()


# ------------------------------------------------------------------------------------------------ resume and lineage


def final_weights(run: Run) -> dict[str, Any]:
    folder = list_checkpoints(run)[-1].folder
    return {name: read_tree(folder / "policies", name)["weights"] for name in ("a", "b", "c")}


def test_resumed_run_makes_the_same_decisions(runs: Path) -> None:
    whole = product.train({**SMALL, "name": "whole"}, live=False)
    parts = product.train({**changed(stop={"env_steps": 768}), "name": "parts"}, live=False)
    decided = len(exploits(parts))
    product.resume(parts, ["stop.env_steps=1920"], live=False)
    assert 0 < decided < len(exploits(parts))
    assert told(parts) == told(whole)
    ours, theirs = final_weights(parts), final_weights(whole)
    assert all(same(ours[name], theirs[name]) for name in ours)
    assert policy_lineage(parts) == policy_lineage(whole)


def test_decided_settings_stay_in_effect_if_a_resume_changes_the_experiment(runs: Path) -> None:
    run = product.train(changed(stop={"env_steps": 768}), live=False)
    decided = read_pbt_state(run).settings
    product.resume(run, ["algo.lr=1e-3", "stop.env_steps=832"], live=False)  # stops before the next decision
    assert read_pbt_state(run).settings == decided
    last = list(metrics.read(run.metrics_file))[-1]["metrics"]
    for name, settings in decided.items():
        assert last[f"policy/{name}/setting/lr"] == settings["algo.lr"]


def test_run_resumed_after_kill_9_makes_the_same_decisions(runs: Path, tmp_path: Path) -> None:
    kept = {"updates": 7, "last": 1000}
    whole = product.train({**SMALL, "save": kept, "name": "whole"}, live=False)
    file = {**SMALL, "save": kept, "name": "killed", "stop": {"env_steps": 10_000_000}}
    (tmp_path / "killed.yaml").write_text(dump_yaml(file))
    child = started("train", "killed.yaml", "--plain")
    wait_until(lambda: list(runs.glob("killed/0*/checkpoints/0*")) and exploits(find("killed", runs)))
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    run = find("killed", runs)
    reached = list_checkpoints(run)[-1].env_steps
    first = told(whole)
    product.resume(run, [f"stop.env_steps={max(1_920, reached + 640)}"], live=False)
    decided = {each["at"]: each for each in told(run)}  # decisions after the checkpoint were made again
    assert all(decided[each["at"]]["after"] == each["after"] for each in first if each["at"] in decided)
    assert {each["at"] for each in first} <= set(decided)


def test_lineage_can_be_shown_and_repeated(tiltyard: Command, runs: Path) -> None:
    run = product.train(changed(save={"updates": 1000}), live=False)
    found = json.loads(tiltyard("show", run.id, "--lineage", "--json").stdout)
    assert len(found["exploits"]) == len(exploits(run))
    last = found["exploits"][-1]
    schedule = found["policies"][last["member"]]["schedule"]
    assert schedule[-1]["settings"] == found["policies"][last["member"]]["settings"] == last["after"]
    assert schedule[0]["from"] == 0 and [each["from"] for each in schedule] == sorted(each["from"] for each in schedule)
    tiltyard("fork", run.id, "--replay", last["member"], "--plain")
    records = metrics.read(find("last", runs).metrics_file)
    assert records[-1]["env_steps"] >= found["policies"][last["member"]]["env_steps"] > records[-1]["since"]
    for record in records:
        now = [each["settings"] for each in schedule if each["from"] <= record["since"]][-1]
        assert record["metrics"]["setting/lr"] == now["algo.lr"]
    assert "no policy 'x'" in tiltyard("fork", run.id, "--replay", "x", expect=2).stderr
    output = tiltyard("show", run.id, "--lineage").stdout
    at, source_at = f"{last['env_steps']:,}", f"{last['source_env_steps']:,}"
    copied = f"{last['member']} at env step {at} became a copy of {last['source']} at env step {source_at}"
    assert copied in output
    alone = product.train({"env": "identity", "stop": {"updates": 1}, "eval": {"at_end": False}}, live=False)
    assert "has no population" in tiltyard("show", alone.id, "--lineage", expect=2).stderr
