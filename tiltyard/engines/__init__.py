"""Engines: everything inside the process tree that learns. `engine.kind` picks one; none knows about launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tiltyard.config.clone_algo import Clone
from tiltyard.config.experiment import Experiment
from tiltyard.processes.fork_server import ForkServer
from tiltyard.types import Engine, EnvSpec

if TYPE_CHECKING:
    from tiltyard.models.policy_net import PolicyNet


def make_engine(
    experiment: Experiment,
    spec: EnvSpec,
    base: Sequence[Path],
    continues: Path | None = None,
    *,
    same_run: bool = False,
    server: ForkServer | None = None,
    net: PolicyNet | None = None,
) -> Engine:
    """Build the engine of an experiment; "auto" settings keep the values of the checkpoint that it continues.

    The number of threads, which changes only how results are rounded, is kept by the `same_run` but not by a fork.
    Workers are forked by a copy of `server`, if there is one.
    `net` is the first policy's, if it was built before; RLlib's processes build their own.
    """
    if experiment.engine.kind == "rllib":
        from tiltyard.engines.engine_state import read_env_steps
        from tiltyard.engines.rllib.engine import RllibEngine

        return RllibEngine(experiment, spec, base, 0 if continues is None else read_env_steps(continues))
    from tiltyard.engines.engine_state import read_state
    from tiltyard.engines.topology import topology

    before = {} if continues is None else read_state(continues, arrays=False)
    threads = before.get("threads") if same_run else None
    if isinstance(experiment.algo, Clone):
        from tiltyard.engines.cloning import CloneEngine

        return CloneEngine(experiment, spec, base, net, threads)
    chosen = topology(experiment, spec, before.get("groups") or None, threads)
    if experiment.engine.kind == "serial" or chosen.workers == 0:
        from tiltyard.engines.serial import SerialEngine

        return SerialEngine(experiment, spec, base, chosen, net)
    from tiltyard.engines.local.engine import LocalEngine

    return LocalEngine(experiment, spec, base, chosen, server, net)
