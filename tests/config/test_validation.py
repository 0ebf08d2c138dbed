"""Invalid settings: all are reported at once, each with its dotted name, its value and a hint."""

import re

import pytest

from tiltyard.config.load import load
from tiltyard.errors import ConfigError, UseError

# (override, part of the report)
WRONG = [
    ("lr=3e-4", "lr = 0.0003: unknown setting\n   hint: did you mean 'algo.lr'?"),
    ("algo.lrr=3e-4", "algo.lrr = 0.0003: unknown setting\n   hint: did you mean 'algo.lr'?"),
    ("learning_rate=1", "learning_rate = 1: unknown setting\n   hint: Tiltyard calls it algo.lr"),
    ("stop.timesteps=1", "stop.timesteps = 1: unknown setting\n   hint: Tiltyard calls it stop.env_steps"),
    ("engine.num_envs=1", "engine.num_envs = 1: unknown setting\n   hint: Tiltyard calls it engine.envs"),
    ("stop.return_=1", "stop.return_ = 1: unknown setting\n   hint: did you mean 'stop.return'?"),
    ("model.memory.sise=1", "model.memory.sise = 1: unknown setting\n   hint: did you mean 'model.memory.size'?"),
    ("algo={id: a2c, clip: 0.1}", "algo.clip = 0.1: unknown setting\n   hint: it is a setting of algo.id: ppo"),
    (
        "algo.lr=fast",
        "algo.lr = 'fast': must be a number or a schedule\n   hint: write a number, or a mapping with kind:",
    ),
    ("algo.lr='3e-4'", "algo.lr = '3e-4': must be a number or a schedule\n   hint: write it without quotes: 3e-4"),
    ("algo.lr=true", "algo.lr = true: must be a number"),
    ("algo.lr=null", "algo.lr = null: must be a number or a schedule"),
    ("algo.lr=-1", "algo.lr = -1: must be at least 0"),
    ("algo.lr=.inf", "algo.lr = inf: must be a finite number"),
    ("algo.lr=.nan", "algo.lr = nan: must be"),
    (
        "algo.lr={kind: lin, start: 1}",
        "algo.lr.kind = 'lin': must be one of linear, piecewise, kl_adaptive\n   hint: did you mean 'linear'?",
    ),
    ("algo.lr={start: 1}", "algo.lr.kind: is missing: one of linear, piecewise, kl_adaptive"),
    ("algo.lr={kind: linear}", "algo.lr.start: is missing\n   hint: set algo.lr.start"),
    ("algo.lr={kind: linear, start: 1, stop: 3}", "algo.lr.stop = 3: unknown setting"),
    ("algo.lr={kind: linear, start: -1}", "algo.lr.start = -1: must be at least 0"),
    ("algo.lr={kind: piecewise, points: [1]}", "algo.lr.points.0 = 1: must be a list\n   hint: write [[0, 3e-4]"),
    ("algo.lr={kind: piecewise, points: [[0, .nan]]}", "algo.lr.points.0.1 = nan: must be"),
    ("algo.lr={kind: piecewise, points: [[5, 1], [0, 1]]}", "env steps must increase"),
    ("algo.lr={kind: kl_adaptive, start: 1, max: 0.01}", "algo.lr.start = 1.0: is outside [0.01, 0.01]"),
    ("algo.rollout=0", "algo.rollout = 0: must be at least 1"),
    ("algo.rollout=1.5", "algo.rollout = 1.5: must be a whole number"),
    ("algo.rollout='12'", "algo.rollout = '12': must be a whole number\n   hint: write it without quotes: 12"),
    ("algo.rollout=1,000", "algo.rollout = '1,000': must be a whole number\n   hint: write 1_000"),
    ("notes=a: b", "notes = {'a': 'b'}: must be text\n   hint: put text that contains ': ' in quotes"),
    ("environment=X", "environment = 'X': unknown setting\n   hint: Tiltyard calls it env"),
    ("algo.rollout=true", "algo.rollout = true: must be a whole number"),
    ("algo.rollout=99999999", "algo.rollout = 99999999: must be at most 1,000,000"),
    ("stop.env_steps=1e300", "must be at most 1e15"),
    ("stop.env_steps=" + "9" * 60, "stop.env_steps = about 1e60: must be at most 1e15"),
    ("seed=-1", "seed = -1: must be at least 0"),
    ("algo.gamma=1.01", "algo.gamma = 1.01: must be at most 1"),
    ("stop.seconds=0", "stop.seconds = 0: must be more than 0"),
    ("env.strict=off", "env.strict = 'off': must be true or false\n   hint: write true or false; in YAML 1.2"),
    ("eval.greedy=1", "eval.greedy = 1: must be true or false"),
    ("notes=3", 'notes = 3: must be text\n   hint: put it in quotes: "3"'),
    ("notes=", 'notes = null: must be text\n   hint: write "" for empty text'),
    ("tags=fast", "tags = 'fast': must be a list\n   hint: write it in brackets: [fast]"),
    ("tags.0=fast", "tags = {'0': 'fast'}: must be a list\n   hint: set the whole list"),
    ("tags=['']", "tags.0 = '': must not be empty"),
    ("model.hidden=[64, x]", "model.hidden.1 = 'x': must be a whole number"),
    ("model.activation=tan", "model.activation = 'tan': must be one of tanh, relu"),
    ("model.memory=lsmt", "model.memory.kind = 'lsmt': must be one of none, lstm, gru\n   hint: did you mean 'lstm'?"),
    ("model.memory=3", "model.memory = 3: must be a mapping\n   hint: its settings are kind, size, bptt"),
    ("model=3", "model = 3: must be a name or a mapping"),
    ("model.encoders=[a]", "model.encoders = ['a']: must be a mapping"),
    ("model.encoders.camera=3", "model.encoders.camera = 3: must be a name or a mapping"),
    ("env.options=3", "env.options = 3: must be a mapping"),
    ("env.id=", "env.id = null: must be text"),
    ("env.id=''", "env.id = '': must not be empty"),
    ("engine=lokal", "engine.kind = 'lokal': must be one of local, serial"),
    ("engine.workers=3", "engine.envs = 8: must be a multiple of engine.workers = 3"),
    ("engine.learners=0", "engine.learners = 0: must be at least 1"),
    ("engine.learners=65", "engine.learners = 65: must be at most 64"),
    ("engine.threads=5000", "engine.threads = 5000: is more than 1,024"),
    ("engine={mode: async, workers: 0}", "engine.mode = 'async': needs workers"),
    ("engine.workers=many", "engine.workers = 'many': must be"),
    ("eval=true", "eval = true: must be a mapping"),
    ("save.mode=maximum", "save.mode = 'maximum': must be one of max, min"),
    (
        "track.wandb=onlin",
        "track.wandb.mode = 'onlin': must be one of off, offline, online\n   hint: did you mean 'online'?",
    ),
    ("version=2", "version = 2: was written by a newer Tiltyard"),
    ("version=0", "version = 0: must be 1"),
    ("name=a/b", "name = 'a/b': must be 1 to 80 letters"),
    ("name=..", "name = '..': must be 1 to 80"),
    ('name="a\\nb"', "name = 'a\\nb': must be 1 to 80"),
    ("name=" + "x" * 81, "must be 1 to 80"),
    ("name=3", "name = 3: must be text"),
    ("algo=a3c", "algo.id = 'a3c': not available; use a2c"),
    ("algo={id: A3C, workers: 3}", "algo.id = 'A3C': not available; use a2c"),
    (
        "algo=td3",
        "algo.id = 'td3': not in this version\n   hint: known: ppo, a2c, impala, appo, dqn, sac, rllib:PPO",
    ),
    ("algo=tqc", "algo.id = 'tqc': unknown algorithm\n   hint: did you mean rllib:TQC?"),
    ("algo=rllib:MARWIL", "algo.id = 'rllib:MARWIL': not supported: RLlib's MARWIL learns from recorded data"),
    ("algo=rainbow", "algo.id = 'rainbow': not in this version"),
    ("algo=ppoo", "algo.id = 'ppoo': unknown algorithm\n   hint: did you mean 'ppo'?"),
    ("algo=PPO", "algo.id = 'PPO': unknown algorithm"),
    ("algo.id=3", "algo.id = 3: must be one of ppo, a2c"),
    (
        "framework=tf",
        "framework = 'tf': unknown setting; Tiltyard's models are PyTorch modules\n   hint: leave framework out",
    ),
    ("model.framework=torch", "model.framework = 'torch': unknown setting; Tiltyard's models are PyTorch modules"),
    ("algo.minibatch=5000", "algo.minibatch = 5000: is more than the batch of 1024 (algo.rollout 128 x engine.envs 8)"),
    ("stop.env_steps=null", "stop: needs at least one condition, or the run never ends"),
    ("save.seconds=null", "save: needs an interval"),
    ("model.memory={kind: lstm, bptt: 7}", "algo.rollout = 128: must be a multiple of model.memory.bptt = 7"),
    ("seed.x=1", "seed = {'x': 1}: must be a whole number"),
]


@pytest.mark.parametrize(("override", "shown"), WRONG, ids=[override[:40] for override, _ in WRONG])
def test_invalid_setting_is_reported_as_one_problem(override, shown):
    with pytest.raises(ConfigError) as caught:
        load("CartPole-v1", [override])
    assert len(caught.value.problems) == 1, caught.value.details
    assert shown in caught.value.details
    assert caught.value.message == "1 problem in the settings"
    assert_own_words(caught.value)


def assert_own_words(error: UseError) -> None:
    assert error.message
    text = f"{error.message}\n{error.details}\n{error.hint}"
    assert not re.search(
        r"Input should|pydantic|http|Traceback|valid (string|integer|dict)|type=|constrained|tagged-union|Extra inputs",
        text,
    ), text


def test_all_problems_are_reported_at_once(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "framework: tf\nenv: {id: CartPole-v1, frameskip: 0, option: {}}\nlr: 1\nmodel: {id: nets/none.py, hidden: 3}\n"
        "algo: {lr: x, minibatch: 5000}\nstop: {env_steps: null}\nsave: {seconds: null}\nuse: [atari, memory]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path, ["seed=-1", "tags=x"])
    assert caught.value.message == f"13 problems in {path}"
    assert sorted(problem.setting for problem in caught.value.problems) == [
        "algo.lr", "algo.minibatch", "env.frameskip", "env.option", "framework", "lr", "model.hidden", "model.id", "save", "seed", "stop", "tags", "use",
    ]  # fmt: skip
    assert "seed = -1: must be at least 0 (command line)" in caught.value.details
    assert_own_words(caught.value)


def test_invalid_settings_are_not_cross_checked():
    with pytest.raises(ConfigError) as caught:
        load("CartPole-v1", ["algo.rollout=x", "algo.minibatch=5000", "save.seconds=null"])
    assert [problem.setting for problem in caught.value.problems] == ["algo.rollout", "save"]


def test_experiment_requires_an_env():
    for target in (None, {}, {"seed": 3}, {"env": None}):
        with pytest.raises(ConfigError) as caught:
            load(target)
        assert caught.value.problems[0].setting in ("env", "env.id")
        assert "env: CartPole-v1" in caught.value.details


def test_exit_code_of_a_config_error_is_2():
    with pytest.raises(ConfigError) as caught:
        load("CartPole-v1", ["seed=x"])
    assert caught.value.exit_code == 2
