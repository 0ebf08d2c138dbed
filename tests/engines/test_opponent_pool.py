"""Self-play against past versions: which are kept, when they play, and that resume and workers change nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard as product
from tests.engines.test_policies import MEMORY, TRAIN, same
from tests.engines.test_serial import build
from tiltyard.config.load import load
from tiltyard.config.policies import Past
from tiltyard.engines.local.engine import LocalEngine
from tiltyard.engines.policies.matchmaking import draw_version, read_versions
from tiltyard.engines.serial import SerialEngine
from tiltyard.errors import ConfigError
from tiltyard.run.checkpoint import list_checkpoints
from tiltyard.run.events import read_events
from tiltyard.run.state_file import read_tree, write_trees

POOL = (
    "env.options.pauses=true",
    "policies={main: {}, past: {past: {of: main, every: 100, keep: 3}}}",
    'match={host: main, "*": {main: 0.3, past: 0.7}}',
)
PAST = {"main": {}, "past": {"past": {"of": "main", "every": 64, "keep": 3}}}


@pytest.mark.parametrize(
    ("policies", "output"),
    [
        ("{past: {past: {of: main}}, main: {}}", "policies.past.past: the first policy must learn"),
        ("{main: {}, past: {past: {of: mian}}}", "policies.past.past.of = 'mian': must be a policy that learns"),
        ("{main: {}, past: {past: {of: past}}}", "policies.past.past.of = 'past': must be a policy that learns"),
        (
            "{main: {}, past: {past: {of: main}, from: x}}",
            "policies.past.from: cannot be combined with policies.past.past",
        ),
        (
            "{main: {}, past: {past: {of: main}, algo: {lr: 1}}}",
            "past does not learn, because policies.past.past is set",
        ),
        ("{main: {}, past: {past: {of: main, keep: 0}}}", "policies.past.past.keep = 0"),
    ],
)
def test_invalid_settings_are_refused(policies: str, output: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("pennies", [f"policies={policies}"])
    assert output in refused.value.details
    with pytest.raises(ConfigError) as refused:
        load("pennies", ["policies={main: {}, past: {past: {of: main}}}", "engine.kind=rllib"])
    assert "is not supported by engine.kind = rllib, whose runners cannot load" in refused.value.details


def test_version_is_drawn_from_the_seed_and_fade_prefers_newer_ones() -> None:
    known = [300, 0, 100, 200]
    drawn = [draw_version(Past(of="main"), known, seed, 1) for seed in range(4000)]
    assert np.allclose(np.unique(drawn, return_counts=True)[1] / 4000, 1 / 4, atol=0.03)
    assert drawn[:50] == [draw_version(Past(of="main"), sorted(known), seed, 1) for seed in range(50)]
    faded = [draw_version(Past(of="main", fade=0.5), known, seed, 0) for seed in range(4000)]
    assert np.allclose(np.unique(faded, return_counts=True)[1] / 4000, np.array([1, 2, 4, 8]) / 15, atol=0.03)


def test_versions_are_copies_of_the_policy_and_the_oldest_are_dropped() -> None:
    engine = build("visitors", *POOL, "engine.kind=serial")
    assert isinstance(engine, SerialEngine)
    was = {0: engine.snapshot("main").weights}
    for _ in range(6):
        now = engine.step().progress.env_steps
        was[now] = engine.snapshot("main").weights
    marks = [at for before, at in zip(was, [*was][1:], strict=False) if at // 100 > before // 100]
    there = engine.past()["past"]
    assert sorted(there) == [0, *marks][-3:]
    assert all(same(there[at], was[at]) for at in there)
    assert not same(*[there[at] for at in sorted(there)][:2])
    engine.close()


def test_one_version_plays_an_episode_to_its_end() -> None:
    """Except if that version was dropped meanwhile."""
    short = ("algo.rollout=2", "algo.minibatch=6", "policies.past.past.every=20", "policies.past.past.keep=6")
    engine = build("visitors", *POOL, *short, "engine.kind=serial")
    assert isinstance(engine, SerialEngine)
    players = engine.groups[0].players
    assert players is not None
    seen: dict[int, tuple[int, ...]] = {}
    kept, played = 0, set()
    for _ in range(40):
        engine.step()
        seeds = engine.groups[0].envs.stats.seeds
        players.take_seats(seeds)
        for at in range(0, len(seeds), 4):
            versions = tuple(players.versions[at : at + 4].tolist())
            before = seen.get(seeds[at])
            if before is not None and all(
                each < 0 or each in engine.policies.version_pools["past"].versions for each in before
            ):
                assert versions == before
                kept += 1
            seen[seeds[at]] = versions
            played |= set(versions)
    assert kept > 0 and len(played - {-1}) > 2
    assert (players.versions[0::4] == -1).all(), "the host is always main"
    engine.close()


def test_decisions_of_past_versions_are_not_learned_from() -> None:
    engines = [build("visitors", *POOL, *MEMORY, "engine.kind=serial") for _ in range(2)]
    for engine in engines:
        engine.step()
    one, two = engines
    assert isinstance(one, SerialEngine) and isinstance(two, SerialEngine)
    assert two.rollout.policy is not None
    theirs, rng = two.rollout.policy == 1, np.random.default_rng(0)
    assert theirs.any()
    for array in (two.rollout.reward, two.rollout.value, *two.rollout.obs.values()):
        array[theirs] = rng.normal(0, 1, array[theirs].shape)
    for engine in (one, two):
        engine.policies.update(engine.rollout, 48)
    assert same(one.snapshot("main").weights, two.snapshot("main").weights)


def test_save_and_load_continue_bit_for_bit(tmp_path: Path) -> None:
    one, two = (build("visitors", *POOL, *MEMORY, "engine.kind=serial") for _ in range(2))
    assert isinstance(one, SerialEngine) and isinstance(two, SerialEngine)
    for _ in range(4):
        one.step()
    write_trees(tmp_path, one.save(tmp_path))
    two.step()
    assert two.load(tmp_path) == []
    assert sorted(read_versions(tmp_path, "past")) == sorted(two.past()["past"])
    for _ in range(5):
        one.step()
        two.step()
        ours, theirs = one.groups[0].players, two.groups[0].players
        assert ours is not None and theirs is not None and np.array_equal(ours.versions, theirs.versions)
    assert same(one.snapshot("main").weights, two.snapshot("main").weights)


@pytest.mark.slow
def test_workers_and_groups_in_one_process_give_identical_weights(tmp_path: Path) -> None:
    settings = (*POOL, *MEMORY, "engine.workers=2", "engine.envs=4")
    one, two = build("visitors", *settings, "engine.kind=serial"), build("visitors", *settings)
    assert isinstance(two, LocalEngine)
    for _ in range(5):
        a, b = one.step(), two.step()
        assert [end.returns for end in a.episodes] == [end.returns for end in b.episodes]
    assert same(one.snapshot("main").weights, two.snapshot("main").weights)
    write_trees(tmp_path, two.save(tmp_path))
    assert one.load(tmp_path) == []
    for _ in range(2):
        one.step()
        two.step()
    assert same(one.snapshot("main").weights, two.snapshot("main").weights)
    three = build("visitors", *settings)
    assert three.load(tmp_path) == []
    for _ in range(2):
        three.step()
    assert same(one.snapshot("main").weights, three.snapshot("main").weights)
    for engine in (one, two, three):
        engine.close()


@pytest.mark.slow
def test_asynchronous_workers_have_the_versions() -> None:
    engine = build("visitors", *POOL, "engine.workers=2", "engine.envs=4", "engine.mode=async")
    assert isinstance(engine, LocalEngine)
    returns = [name for _ in range(20) for end in engine.step().episodes for name in end.returns]
    assert {"main", "past"} == set(returns)
    labels, places = engine.shared.version_pools["past"]
    there = {int(at): place for place, (at, mark) in enumerate(labels.tolist()) if mark}
    versions = engine.past()["past"]
    assert sorted(there) == sorted(versions) and len(versions) == 3
    assert all(same(dict(places[there[at]]), versions[at]) for at in versions)
    engine.close()


def test_run_keeps_its_versions_and_evaluates_against_them(runs: Path) -> None:
    file: dict[str, Any] = {**TRAIN, "policies": PAST, "match": {"even": "main", "odd": {"main": 1, "past": 1}}}
    run = product.train({**file, "stop": {"env_steps": 256}}, live=False)
    folder = list_checkpoints(run)[-1].folder
    versions = read_versions(folder, "past")
    assert sorted(versions) == [128, 192, 256]
    assert same(versions[256], read_tree(folder / "policies", "main")["weights"])
    product.resume(run, ["stop.env_steps=320"], live=False)
    assert not [event for event in read_events(run) if event["kind"] == "warning"]
    later = read_versions(list_checkpoints(run)[-1].folder, "past")
    assert sorted(later) == [192, 256, 320] and same(later[192], versions[192])
    assert product.evaluate(run, episodes=8).metrics.keys() >= {"policy/main/return", "policy/past/return"}
    plain = product.train({**TRAIN, "name": "plain"}, live=False)
    forked = product.fork(
        plain, ["stop.env_steps=192", f"policies={PAST}", "match={even: main, odd: past}"], live=False
    )
    begun = read_versions(list_checkpoints(forked)[-1].folder, "past")
    assert list(begun) == [128, 192] and same(begun[128], product.load_policy(plain).net.arrays())
