"""Layers, short forms, origins, and reading back a run folder's experiment file."""

from pathlib import Path

import pytest

from tiltyard.config.algos import A2c, Ppo
from tiltyard.config.experiment import Experiment
from tiltyard.config.load import from_resolved, load, parse_override, presets, resolved_yaml
from tiltyard.config.schedules import Linear
from tiltyard.config.site import Profile
from tiltyard.errors import ConfigError, UseError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Function that writes a file into the current folder, which is empty at first."""
    monkeypatch.chdir(tmp_path)

    def writer(text: str, name: str = "x.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return writer


def test_layer_settings_of_presets_are_ignored_for_a_users_own_model(write):
    """Presets configure the layers of the built-in model only. The layer settings of the user are kept."""
    write("", "net.py")
    write("model: {critic: shared}\n", "own.yaml")
    plain = Experiment(env={"id": "x"}).model
    for words, expected in (
        ([], []),
        (["use=memory"], ["preset memory: model.critic, model.memory.kind ignored"]),
        (["use=atari-fast"], ["preset atari-fast: model.encoder, model.critic ignored"]),
    ):
        loaded = load("CartPole-v1", ["model=net.py", *words], debug=True)
        model = loaded.experiment.model
        assert (model.hidden, model.memory.kind, model.memory.size) == (plain.hidden, "none", 128)
        assert (model.encoder, model.critic, model.memory.bptt) == (plain.encoder, "separate", 4)
        assert [warning.partition(": only")[0] for warning in loaded.warnings] == expected
    assert load("CartPole-v1", debug=True).experiment.model.hidden == [16]
    loaded = load("CartPole-v1", ["model=net.py", "use=own.yaml", "model.hidden=[3]"], debug=True)
    assert (loaded.experiment.model.critic, loaded.experiment.model.hidden) == ("shared", [3])


def test_line_breaks_in_an_override_are_kept():
    assert parse_override("notes=one\ntwo  three") == ("notes", "one\ntwo  three")
    assert parse_override('notes="one\\ntwo"') == ("notes", "one\ntwo")
    assert parse_override("notes=|\n one\n two") == ("notes", "one\ntwo")
    assert parse_override("tags=[a,\n b]") == ("tags", ["a", "b"])
    assert parse_override("name=\n") == ("name", None)


def test_env_id_alone_is_an_experiment():
    loaded = load("CartPole-v1")
    assert loaded.experiment == Experiment(env={"id": "CartPole-v1"})
    assert loaded.source is None
    assert loaded.source_text is None
    assert loaded.base == (Path.cwd(),)
    assert loaded.origins["env.id"] == "command line"
    assert loaded.origins["algo.lr"] == "default"


def test_command_line_overrides_only_the_settings_it_names(write):
    text = "env: CartPole-v1  # mine\nalgo: {gamma: 0.9, lr: 1e-4}\nstop: {env_steps: 1e6, return: 475}\n"
    loaded = load(write(text), ["algo.lr=3e-4"])
    assert loaded.experiment.algo.gamma == 0.9
    assert loaded.experiment.algo.lr == 3e-4
    assert loaded.experiment.stop.env_steps == 1_000_000
    assert loaded.experiment.stop.return_ == 475
    assert loaded.source_text == text
    assert loaded.origins["algo.gamma"] == "file x.yaml"
    assert loaded.origins["algo.lr"] == "command line"
    assert loaded.origins["stop.return"] == "file x.yaml"
    assert loaded.origins["algo.clip"] == "default"


def test_higher_layers_override_lower_layers(write):
    write("engine: {envs: 2, threads: 2, device: cuda}\nsave: {last: 3}\nseed: 5\n", "mine.yaml")
    write("use: [mine.yaml]\nenv: CartPole-v1\nengine: {envs: 3, threads: 3}\nsave: {last: 4}\n")
    profile = Profile(name="cluster", set={"engine.envs": 4, "save": {"best": 7}})
    loaded = load("x.yaml", ["save.last=9"], profile=profile)
    engine, save = loaded.experiment.engine, loaded.experiment.save
    assert (engine.device, engine.threads, engine.envs, save.best, save.last) == ("cuda", 3, 4, 7, 9)
    names = ("engine.device", "engine.threads", "engine.envs", "save.best", "save.last", "seed", "save.mode")
    assert [loaded.origins[name] for name in names] == [
        "preset mine.yaml", "file x.yaml", "profile cluster", "profile cluster", "command line", "preset mine.yaml", "default",
    ]  # fmt: skip


def test_every_leaf_has_an_origin():
    loaded = load("CartPole-v1", ["env.options={a: {b: 1}}", "model.encoders={camera.left: nature}"])
    assert loaded.origins["env.options.a.b"] == "command line"
    assert loaded.origins["model.encoders.camera.left.id"] == "command line"
    assert loaded.origins["model.encoders.camera.left.options"] == "default"
    assert set(loaded.origins.values()) == {"default", "command line"}


def test_changing_the_algorithm_discards_the_old_settings(write):
    write("env: CartPole-v1\nalgo: {id: ppo, lr: 1e-4, clip: 0.1, epochs: 3}\n")
    loaded = load("x.yaml", ["algo.gamma=0.5", "algo.id=a2c"])
    assert loaded.experiment.algo == A2c(id="a2c", gamma=0.5)
    assert loaded.origins["algo.lr"] == "default"
    assert load("x.yaml", ["algo=a2c"]).experiment.algo == A2c(id="a2c")


def test_naming_the_same_algorithm_keeps_its_settings(write):
    write("env: CartPole-v1\nalgo: {lr: 1e-4}\n")
    assert load("x.yaml", ["algo.id=ppo"]).experiment.algo == Ppo(lr=1e-4)


def test_env_options_of_a_preset_apply_to_any_env():
    """Options of presets and of the file are merged."""
    assert load("atari:pong", ["use=[atari-fast]"]).experiment.env.options == {"size": 42}
    more = load({"use": ["atari-fast"], "env": {"id": "atari:breakout", "options": {"noops": 5}}}, [])
    assert more.experiment.env.options == {"size": 42, "noops": 5}


def test_changing_env_or_model_discards_only_its_options(write):
    write("env: {id: CartPole-v1, options: {a: 1}, frameskip: 2}\nmodel: {id: 'm:A', options: {b: 1}, hidden: [3]}\n")
    experiment = load("x.yaml", ["env=Acrobot-v1", "model.id=m:B"]).experiment
    assert experiment.env.options == {}
    assert experiment.env.frameskip == 2
    assert experiment.model.options == {}
    assert experiment.model.hidden == [3]
    assert load("x.yaml", ["env.options.c=2"]).experiment.env.options == {"a": 1, "c": 2}


def test_envs_of_one_family_share_their_options(write):
    write("env: {id: 'car-racing:fast', options: {size: 48}}\n")
    assert load("x.yaml", ["env.id=car-racing:official"]).experiment.env.options == {"size": 48}
    assert load("x.yaml", ["env.id=atari:pong"]).experiment.env.options == {}
    assert load("x.yaml", ["env.id=CarRacing-v3"]).experiment.env.options == {}


def test_numbers_and_schedules_replace_each_other(write):
    write("env: CartPole-v1\nalgo: {lr: {kind: linear, start: 1e-3, over: 100}, clip: 0.1}\n")
    assert load("x.yaml", ["algo.lr=3e-4"]).experiment.algo.lr == 3e-4
    assert load("x.yaml", ["algo.lr.start=2"]).experiment.algo.lr == Linear(kind="linear", start=2, over=100)
    changed = load("x.yaml", ["algo.clip.kind=linear", "algo.clip.start=0.3"])
    assert changed.experiment.algo.clip == Linear(kind="linear", start=0.3)
    assert changed.origins["algo.clip.start"] == "command line"
    adaptive = load("x.yaml", ["algo.lr={kind: kl_adaptive, start: 1e-3}"]).experiment.algo.lr
    assert adaptive.kind == "kl_adaptive"


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("model=nets:Net", "model.id=nets:Net"),
        ("algo=a2c", "algo.id=a2c"),
        ("model.memory=lstm", "model.memory.kind=lstm"),
        ("model.encoder=mlp", "model.encoder.id=mlp"),
        ("engine=serial", "engine.kind=serial"),
        ("track.wandb=offline", "track.wandb.mode=offline"),
        ("model.encoders.a.b=mlp", "model.encoders={a.b: {id: mlp}}"),
        ("model.encoders.a.b.options.n=3", "model.encoders={a.b: {options: {n: 3}}}"),
        ("env.wrappers=[w:A]", "env.wrappers=[{id: 'w:A', options: {}}]"),
        ("stop=", "seed=0"),
    ],
)
def test_short_forms_equal_long_forms(short, long):
    also = ["model.encoders.a.b.id=mlp"] if "encoders" in short else []
    assert load("CartPole-v1", [short, *also]).experiment == load("CartPole-v1", [long, *also]).experiment


def test_order_of_overrides_matters_only_for_the_same_name():
    assert load("CartPole-v1", ["algo.gamma=0.5", "algo=a2c"]).experiment.algo == A2c(id="a2c", gamma=0.5)
    assert load("CartPole-v1", ["algo=a2c", "algo.gamma=0.5"]).experiment.algo == A2c(id="a2c", gamma=0.5)
    assert load("CartPole-v1", ["seed=1", "seed=2"]).experiment.seed == 2


def test_dotted_names_work_in_a_file(write):
    loaded = load(write("env: CartPole-v1\nalgo.lr: 3e-4\nalgo: {gamma: 0.5}\nengine.envs: 4\n"))
    assert (loaded.experiment.algo.lr, loaded.experiment.algo.gamma, loaded.experiment.engine.envs) == (3e-4, 0.5, 4)
    for text in ("algo.lr: 1\nalgo: {lr: 2}\n", "algo: {lr: 2}\nalgo.lr: 1\n"):
        with pytest.raises(ConfigError, match="1 problem") as caught:
            load(write("env: CartPole-v1\n" + text))
        assert "algo.lr" in caught.value.details
        assert "is set twice" in caught.value.details


def test_python_values_are_accepted():
    loaded = load({"env": {"id": "CartPole-v1", "options": {"x": (1, 2), "path": Path("a/b")}}, "algo.lr": 3e-4})
    assert loaded.experiment.env.options == {"x": [1, 2], "path": "a/b"}
    assert loaded.origins["algo.lr"] == "python"
    again = load(loaded.experiment.model_dump(by_alias=True))
    assert again.experiment == loaded.experiment


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", "\udcff", {3: 4}, 1j])
def test_python_values_that_yaml_cannot_express_are_refused(value):
    with pytest.raises(UseError, match=r"env\.options\.x|a key must be text"):
        load({"env": {"id": "CartPole-v1", "options": {"x": value}}})


def test_recursive_python_values_are_refused():
    loop: dict = {}
    loop["a"] = loop
    with pytest.raises(UseError, match="nested more than"):
        load({"env": {"id": "CartPole-v1", "options": loop}})


def test_given_mapping_is_not_modified():
    values = {"env": "CartPole-v1", "framework": "torch", "algo": {"id": "dqn"}}
    with pytest.raises(ConfigError):
        load(values)
    assert values == {"env": "CartPole-v1", "framework": "torch", "algo": {"id": "dqn"}}


def test_plugin_files_are_found_next_to_the_file_or_in_the_current_folder(write):
    write("class CustomModel: pass", "nets/net.py")
    loaded = load(write("env: CartPole-v1\nmodel: nets/net.py\n", "sub/x.yaml"))
    assert loaded.base == (Path.cwd() / "sub", Path.cwd())
    assert loaded.experiment.model.id == "nets/net.py"
    with pytest.raises(ConfigError) as caught:
        load("sub/x.yaml", ["model=nets/ned.py", "env=envs/none.py:Env"])
    assert [problem.setting for problem in caught.value.problems] == ["env.id", "model.id"]
    assert "did you mean 'net.py'?" in caught.value.details


def test_python_file_is_an_env_but_a_path_of_a_folder_is_refused(write):
    write("class CustomEnv: pass", "my.py")
    assert load("my.py").experiment.env.id == "my.py"
    assert load("my.py:Other").experiment.env.id == "my.py:Other"
    (Path.cwd() / "memory").mkdir()
    loaded = load("memory")
    assert loaded.experiment.env.id == "memory"
    assert "folder" in loaded.warnings[0]
    with pytest.raises(UseError, match="is a folder"):
        load("./memory")
    with pytest.raises(UseError, match="is a folder"):
        load(Path.cwd() / "memory")


@pytest.mark.parametrize("word", ["", " ", "algo.lr=3"])
def test_invalid_targets_are_refused(word):
    with pytest.raises(UseError) as caught:
        load(word)
    assert "CartPole-v1" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("algo.lr=3e-4", ("algo.lr", 3e-4)),
        ("notes=a=b", ("notes", "a=b")),
        ("tags=[a, b]", ("tags", ["a", "b"])),
        ("x={a: 1}", ("x", {"a": 1})),
        ("track.wandb=off", ("track.wandb", "off")),
        ("x=", ("x", None)),
        ("name='3'", ("name", "3")),
    ],
)
def test_overrides_are_yaml(text, pair):
    assert parse_override(text) == pair


@pytest.mark.parametrize(
    "text",
    ["algo.lr", "", "=3", ".=3", "algo..lr=3", "a=[1", "a=*x", "a=!!python/name:os 3", "a=\udcff", "x" * 600 + "=1"],
)
def test_invalid_overrides_are_refused(text):
    with pytest.raises(UseError) as caught:
        parse_override(text)
    assert caught.value.hint
    assert "line 1" not in caught.value.message


# ------------------------------------------------------------------------------------------------ presets


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_every_preset_is_valid_and_has_an_effect(name, algo):
    loaded = load({"env": "CartPole-v1", "use": name, "algo": algo})
    assert f"preset {name}" in loaded.origins.values()
    assert loaded.warnings == ()
    assert loaded.experiment != load({"env": "CartPole-v1", "algo": algo}).experiment


def test_several_presets_apply_in_order():
    experiment = load("CartPole-v1", ["use=[memory, continuous]"]).experiment
    assert experiment.model.memory.kind == "lstm"
    assert experiment.model.normalise.obs
    assert experiment.algo.rollout == 256
    assert experiment.engine.envs == 8


def test_debug_overrides_the_file_but_not_the_command_line(write):
    write("env: CartPole-v1\nalgo: {id: a2c, rollout: 512}\nengine: {envs: 64}\nmodel: {memory: gru}\n")
    experiment = load("x.yaml", ["engine.envs=3"], debug=True).experiment
    assert (experiment.algo.rollout, experiment.engine.envs, experiment.stop.updates) == (8, 3, 4)
    assert load("CartPole-v1", ["algo=a2c"], debug=True).experiment.algo == A2c(id="a2c", rollout=8)
    tiny = load("CartPole-v1", debug=True).experiment
    assert (tiny.algo.rollout, tiny.algo.minibatch, tiny.algo.epochs, tiny.engine.envs) == (8, 16, 1, 2)


def test_invalid_presets_are_refused(write):
    write("use: [classic]\nseed: 1\n", "nested.yaml")
    write("algo: {lr: x}\n", "bad.yaml")
    for use, words in [
        ("clasic", "did you mean 'classic'?"),
        ("none.yaml", "does not exist"),
        ("nested.yaml", "must not have a `use:` itself"),
        ("bad.yaml", "must be a number or a schedule (preset bad.yaml)"),
        ("3", "must be a list"),
        ("[[a]]", "must be a list"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load("CartPole-v1", [f"use={use}"])
        assert words in caught.value.details


def test_preset_without_effect_gives_a_warning(write):
    write(resolved_yaml(load("CartPole-v1").experiment))
    loaded = load("x.yaml", ["use=memory"])
    assert loaded.warnings == ("preset memory has no effect: the file or the command line sets all of its settings",)


# ------------------------------------------------------------------------------------------------ resolved files


def test_resolved_files_round_trip(tmp_path):
    overrides = [
        "algo.lr={kind: piecewise, points: [[0, 1e-3], [1e5, 0]]}",
        "notes='two\n\nlines: #no'",
        "stop.return=3",
        "use=memory",
    ]
    experiment = load("CartPole-v1", [*overrides, "env.options={a: [1, {b: off}], c: 1e-9}"]).experiment
    text = resolved_yaml(experiment)
    assert text.startswith("version: 1\n")
    path = tmp_path / "experiment.yaml"
    path.write_text(text, encoding="utf-8")
    assert from_resolved(path) == experiment
    assert load(path).experiment == experiment
    assert experiment.use == []


def test_invalid_resolved_files_are_refused(tmp_path):
    path = tmp_path / "experiment.yaml"
    text = resolved_yaml(load("CartPole-v1").experiment)
    path.write_text(text.replace("version: 1", "version: 99"))
    with pytest.raises(UseError, match="newer Tiltyard"):
        from_resolved(path)
    path.write_text(text.replace("version: 1\n", ""))
    with pytest.raises(UseError, match="has no version"):
        from_resolved(path)
    path.write_text(text.replace("rollout: 128", "rollout: -1"))
    with pytest.raises(ConfigError) as caught:
        from_resolved(path)
    assert "algo.rollout = -1: must be at least 1" in caught.value.details


def test_old_name_of_the_restore_mode_is_still_accepted(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("env: {id: CartPole-v1, comes_back: replay}\n")
    assert load(str(file)).experiment.env.restore_mode == "rerun"
    assert load(str(file), ["env.comes_back=fresh"]).experiment.env.restore_mode == "fresh"
    assert load("CartPole-v1", ["env.restore_mode=replay"]).experiment.env.restore_mode == "rerun"
