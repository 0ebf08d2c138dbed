"""`clone`: behaviour cloning on the command line. It builds the experiment of a dataset, which `train` then trains."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tiltyard.cli import train
from tiltyard.cli.arguments import positive
from tiltyard.errors import UseError

PASSES = 10  # over the data, or more:
GRADIENT_STEPS = 2_000  # fewer teach little
EVALUATIONS = 10


def configure_clone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="folder of a dataset; its env is used to evaluate")
    about = f"passes over the data (default: {PASSES}, or as many as {GRADIENT_STEPS:,} gradient steps need)"
    parser.add_argument("--epochs", type=positive, metavar="N", help=about)
    train.add_new_run(parser)


def run_clone(args: argparse.Namespace) -> int:
    args.target = clone_experiment(args.dataset, args.overrides, args.epochs)
    return train.run_train(args)


def clone_experiment(dataset: str, overrides: list[str], epochs: int | None) -> dict[str, Any]:
    """The settings of `tiltyard clone`: the dataset's env, and as many env steps as the passes have.

    The number of steps depends on settings that the overrides may change, so these are read first.
    """
    from tiltyard.config.clone_algo import Clone
    from tiltyard.config.load import load
    from tiltyard.data.folder import read_about
    from tiltyard.engines.cloning import UNKNOWN, choose_episodes
    from tiltyard.run import atomic

    folder = atomic.absolute(Path(dataset).expanduser())
    about = read_about(folder)
    _refuse_masked(folder, about.env, overrides)
    settings: dict[str, Any] = {"env": about.env, "algo": {"id": "clone", "dataset": str(folder)}}
    experiment = load(settings, overrides).experiment
    if experiment.env.id == UNKNOWN:
        hint = "import it again with --env ENV, or set env.id=ENV"
        raise UseError(f"{folder} does not say of which env it is, and evaluations need one", hint)
    algo = experiment.algo
    if not isinstance(algo, Clone):
        hint = f"clone it first, then: tiltyard fork RUN algo={algo.id}"
        raise UseError(f"algo.id = {algo.id}: `tiltyard clone` learns with algo.id = clone", hint)
    steps = choose_episodes(algo).steps
    passes = epochs or max(PASSES, math.ceil(GRADIENT_STEPS * algo.minibatch / steps))
    total = passes * steps
    if epochs:  # the passes are to be whole, so a pass is cut into equal batches; one that is typed stays
        settings["algo"]["batch"] = math.ceil(steps / math.ceil(steps / algo.batch))
    return {**settings, "stop": {"env_steps": total}, "eval": {"every": max(1, math.ceil(total / EVALUATIONS))}}


def _refuse_masked(folder: Path, env: dict[str, Any], overrides: list[str]) -> None:
    """UseError for options of the env that look secret: the dataset does not have their values."""
    from tiltyard.config.fields import flat
    from tiltyard.run.redact import MASK

    for path, value in flat({"env": env}):
        name = ".".join(path)
        if isinstance(value, str) and MASK in value and not any(each.startswith(f"{name}=") for each in overrides):
            raise UseError(f"{folder} does not contain {name}, which looks like a secret", f"give it: {name}=...")
