"""The check that an engine uses the changed settings, run on an engine with other values."""

from collections.abc import Iterator
from typing import Any

import pytest

from tiltyard.config.load import load
from tiltyard.engines import make_engine
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError
from tiltyard.training.settings_check import check_learned, check_restored
from tiltyard.types import Engine, Report

ALGO = {"value_clip": 3.0, "kl_stop": 0.9, "rollout": 16, "minibatch": 32}
OTHERS = {
    **{"lr": 0.5, "clip": 0.1, "entropy": 0.5, "kl": 0.5, "gamma": 0.5, "gae_lambda": 0.5, "value_coef": 0.25},
    **{"epochs": 7, "minibatch": 16, "rollout": 32, "max_grad_norm": 0.1, "adam_eps": 0.1, "rho_clip": 2.0},
    **{"value_clip": 2.0, "kl_stop": 0.5},
}


def experiment(**algo: Any) -> Any:
    return load({"env": "CartPole-v1", "engine": {"kind": "serial", "envs": 2}, "algo": {**ALGO, **algo}}).experiment


@pytest.fixture(scope="module")
def learned() -> Iterator[tuple[Engine, Report]]:
    output = experiment()
    engine = make_engine(output, probe(output.env, base=()), ())
    yield engine, engine.step()
    engine.close()


@pytest.mark.parametrize("name", OTHERS)
def test_wrong_value_is_detected_after_the_restore_and_after_the_update(
    name: str, learned: tuple[Engine, Report]
) -> None:
    engine, report = learned
    other, told = experiment(**{name: OTHERS[name]}), [f"algo.{name}", "env.max_steps"]
    with pytest.raises(TiltyardError, match=rf"algo.{name} is {OTHERS[name]} .* the restored engine has "):
        check_restored(other, told, engine)
    with pytest.raises(TiltyardError, match=rf"algo.{name} is {OTHERS[name]} .* the first update used "):
        check_learned(other, told, engine, report.metrics)


def test_correct_values_pass(learned: tuple[Engine, Report]) -> None:
    engine, report = learned
    told = [f"algo.{name}" for name in OTHERS]
    check_restored(experiment(), told, engine)
    check_learned(experiment(), told, engine, report.metrics)
