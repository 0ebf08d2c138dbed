"""Presets for time and for samples: every family has both, their settings are in effect, and they learn."""

import runpy
from pathlib import Path

import pytest

import tiltyard
from tests.counts import only_when_long
from tiltyard.config.load import load, presets
from tiltyard.config.yaml import parse_yaml

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "tiltyard" / "presets"
FAMILIES = {"classic": "CartPole-v1", "box2d": "LunarLander-v3", "atari": "atari:pong", "doom": "doom:basic"}
OF_FAMILIES = [name for name in presets() if name.endswith(("-fast", "-efficient"))]
ENVS = {**{name: FAMILIES[name.split("-")[0]] for name in OF_FAMILIES}, "car-racing": "car-racing:fast"}


def trained(name: str, goal: float) -> tiltyard.Run:
    words = [f"use=[{name}]", "seed=0", f"stop.return={goal}", "track.tensorboard=false"]
    return tiltyard.train(ENVS[name], words, live=False)


def test_every_family_has_a_fast_and_an_efficient_preset() -> None:
    assert set(OF_FAMILIES) == {f"{family}-{kind}" for family in FAMILIES for kind in ("fast", "efficient")}


@pytest.mark.parametrize("name", ENVS)
def test_preset_applies_all_settings_of_its_file(name: str) -> None:
    """The experiment is the same as with these settings in the user's file."""
    env = ENVS[name]
    file = parse_yaml((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), name)
    written = load({**file, "env": {"id": env, **file.get("env", {})}}).experiment
    used = load(env, [f"use=[{name}]"]).experiment
    assert used.model_dump(exclude={"use"}) == written.model_dump(exclude={"use"})
    assert used.model_dump(exclude={"use"}) != load(env).experiment.model_dump(exclude={"use"})


def test_first_example_equals_classic_efficient_with_a_target_return() -> None:
    """The example lists the settings of the preset, so that measured results hold for both."""
    example = load(ROOT / "examples" / "cartpole.yaml").experiment
    preset = load("CartPole-v1", ["use=[classic-efficient]", "stop.return=475"]).experiment
    for section in ("env", "model", "algo", "engine", "stop", "eval"):
        assert getattr(example, section) == getattr(preset, section)


def test_guide_lists_every_preset() -> None:
    guide = (ROOT / "docs" / "guides" / "train.md").read_text(encoding="utf-8")
    assert [name for name in presets() if f"| `{name}` |" not in guide] == []


def test_floor_benchmark_uses_the_shapes_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor with other shapes cannot be compared with the preset."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    shapes = runpy.run_path(str(ROOT / "bench" / "floor.py"))["shapes"]
    for task, name in (("cartpole", "classic-fast"), ("lunarlander", "box2d-fast")):
        file = parse_yaml((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), name)
        algo = {setting: file["algo"][setting] for setting in ("rollout", "minibatch", "epochs")}
        assert shapes(task) == {"envs": file["engine"]["envs"], **algo}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classic-fast", "classic-efficient"])
def test_cartpole_is_solved_within_100_000_env_steps(runs: Path, name: str) -> None:
    status = trained(name, goal=475).status()
    assert status["reason"].startswith("stop.return")
    assert status["progress"]["env_steps"] <= 100_000


@pytest.mark.slow
def test_lunarlander_is_solved(runs: Path) -> None:
    only_when_long("a minute")
    assert trained("box2d-fast", goal=200).status()["reason"].startswith("stop.return")
