"""Sweep folders with made-up statuses and metrics, for tests of reports. Nothing is trained."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

from tiltyard.config.sweep_plan import load_plan
from tiltyard.run import atomic
from tiltyard.sweep.folder import Sweep, Trial, make, planned_pairs, trial_line
from tiltyard.sweep.space import dimensions, draws

SPACE = {
    "algo.lr": {"log": [1e-5, 1e-2]},
    "algo.gamma": [0.9, 0.98, 0.99],
    "algo.epochs": {"int": [1, 10]},
    "model.activation": ["tanh", "relu"],
}


def fake_sweep(root: Path, points: int, seeds: int, *, records: int = 20, **more: Any) -> Sweep:
    """A finished random search whose return depends strongly on algo.lr, slightly on algo.gamma, not on the rest."""
    values = {"name": "fake", "space": SPACE, "search": "random", "trials": points, "seeds": seeds, **more}
    plan = load_plan({"experiment": {"env": {"id": "CartPole-v1"}}, **values})
    found = list(itertools.islice(draws(dimensions(plan), 0), points))
    pairs = planned_pairs(plan, points, ())
    trials = [Trial(number, point, seed, found[point - 1]) for number, (point, seed) in enumerate(pairs, start=1)]
    sweep = make(root, "fake", plan, trials)
    for trial in trials:
        folder = sweep.place(trial.number)
        folder.mkdir()
        atomic.write_json(folder / "status.json", status(trial.number))
        atomic.write_sealed(folder / "provenance.json", {"trial": trial_line(trial)})
        lines = [atomic.to_json(record) for record in history(trial, records)]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return sweep


def status(number: int, **more: Any) -> dict[str, Any]:
    facts = {"state": "finished", "reason": "stop.env_steps reached", "updated": f"{number}", "attempt": 1}
    return {"schema": 1, "id": f"fake/{number}", **facts, "progress": {"env_steps": 1000, "seconds": 2.0}, **more}


def history(trial: Trial, records: int) -> list[dict[str, Any]]:
    rng = random.Random(trial.number)
    top = 500 * math.exp(-((math.log10(trial.settings["algo.lr"]) + 3) ** 2))
    top *= 1.0 if trial.settings["algo.gamma"] == 0.99 else 0.7
    return [
        {"env_steps": 50 * k, "metrics": {"eval/return": top * (1 - math.exp(-k / 5)) + rng.gauss(0, 5)}}
        for k in range(1, records + 1)
    ]
