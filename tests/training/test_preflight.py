"""Checks before a run exists use what is then trained with."""

from pathlib import Path

import pytest

import tiltyard as product
from tests.training.test_loop import TINY

COUNTED = """
import os
from torch import nn

class CustomModel(nn.Module):
    def __init__(self, spec, outputs, *, log: str):
        super().__init__()
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\\n")
        self.actor, self.critic = nn.Linear(4, outputs), nn.Linear(4, 1)

    def forward(self, obs):
        return self.actor(obs["obs"]), self.critic(obs["obs"]).squeeze(-1)
"""


@pytest.mark.parametrize("engine", [{"kind": "serial"}, {"kind": "local", "workers": 1}])
def test_model_is_built_once_in_the_process_that_trains_it(runs: Path, tmp_path: Path, engine: dict[str, str]) -> None:
    """A worker has its own copy, and so has the evaluator from the first evaluation on."""
    (tmp_path / "counted.py").write_text(COUNTED)
    log = tmp_path / "built"
    model = {"id": "counted.py", "options": {"log": str(log)}}
    settings = {**TINY, "engine": {"envs": 2, **engine}, "model": model, "stop": {"updates": 2}}
    run = product.train(settings, live=False)
    built = log.read_text().split()
    assert len(built) == len(set(built)) == (1 if engine["kind"] == "serial" else 2)
    product.resume(run, ["stop.updates=3"], live=False)
    assert len(log.read_text().split()) == 2 * len(built)
