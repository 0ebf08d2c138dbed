from pathlib import Path

import pytest

import tiltyard
from tests.counts import LONG
from tiltyard.config.load import load
from tiltyard.errors import ConfigError, UseError
from tiltyard.models.policy import load_policy

REINFORCE = str(Path(__file__).parents[2] / "examples" / "reinforce.py")
SETTINGS = ["engine.kind=serial", "engine.envs=16", "algo.rollout=32", "save.env_steps=512", "eval.envs=10"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3] if LONG else [1])
def test_reinforce_learns_cartpole(seed):
    stops = ["stop.env_steps=300_000", "stop.return=475", "eval.every=20_000", "eval.episodes=10"]
    run = tiltyard.train("CartPole-v1", [f"algo={REINFORCE}:Reinforce", *SETTINGS, *stops, f"seed={seed}"], live=False)
    assert tiltyard.evaluate(run, episodes=20).mean >= 450
    assert len(Path(REINFORCE).read_text().splitlines()) <= 100
    assert list(run.folder.rglob("plugins/**/reinforce.py"))


def weights(run):
    return load_policy(run).net.arrays()


def test_resumed_run_equals_an_uninterrupted_one():
    short = [f"algo={REINFORCE}:Reinforce", *SETTINGS, "eval.every=0", "seed=4"]
    whole = tiltyard.train("CartPole-v1", [*short, "stop.env_steps=2048"], live=False)
    half = tiltyard.train("CartPole-v1", [*short, "stop.env_steps=1024"], live=False)
    before = weights(half)
    tiltyard.resume(half, ["stop.env_steps=2048"], live=False)
    assert all((x == y).all() for x, y in zip(weights(whole).values(), weights(half).values(), strict=True))
    assert any((x != y).any() for x, y in zip(before.values(), weights(half).values(), strict=True))


@pytest.mark.parametrize(
    ("more", "setting"),
    [
        ("engine.learners=2", "engine.learners"),
        ("engine.kind=rllib", "engine.kind"),
        ("policies={a: {}, b: {}}", "policies"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(more, setting):
    with pytest.raises(ConfigError) as error:
        load("CartPole-v1", [f"algo={REINFORCE}:Reinforce", more])
    assert setting in [problem.setting for problem in error.value.problems]


def test_unknown_settings_and_options_are_refused():
    with pytest.raises(ConfigError) as error:
        load("CartPole-v1", [f"algo={REINFORCE}:Reinforce", "algo.lr=1e-3"])
    assert error.value.problems[0].setting == "algo.lr"
    with pytest.raises(ConfigError) as error:
        tiltyard.train("CartPole-v1", [f"algo={REINFORCE}:Reinforce", "algo.options.learn_rate=1"], live=False)
    assert error.value.problems[0].setting == "algo.options.learn_rate"


def test_class_without_the_methods_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("class CustomAlgo:\n    def __init__(self, net, rng): pass\n")
    with pytest.raises(UseError, match=r"mine\.py has no update"):
        tiltyard.train("CartPole-v1", ["algo=mine.py", *SETTINGS, "stop.env_steps=600"], live=False)
