"""How many processes and threads: what `engine.workers: auto` and `engine.threads: auto` mean on this machine.

Native vector envs and very cheap envs are stepped in the learner's process; others get one worker per free core. Torch
gets more threads only if that is measured to be faster: on shared cores it can be ten times slower. With an inference
server there are two workers per core: one steps its envs while the other waits for actions.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace

import torch

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.engines.candidates import even_workers
from tiltyard.engines.learner import device_named
from tiltyard.envs.single_agent_vector import has_native
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.platforms import is_linux
from tiltyard.processes.resources import free_cores, require_files, usable_cores
from tiltyard.types import EnvSpec

CHEAP_STEP = 100e-6  # seconds of an env step that is not worth a process
SHORT_UPDATE = 3e-3  # seconds of a gradient step that gains nothing from a second thread
MIN_SPEEDUP = 1.15  # that more threads must reach
FILES_PER_WORKER = 2  # open in the driver: a channel, and the file for a stack
FREE_SHARE = 0.3  # of a core that must be free for a worker; 1 - FREE_SHARE for a thread


def require_worker_files(workers: int) -> None:
    """Let this process open the files of so many workers; UseError if it may not."""
    require_files(FILES_PER_WORKER * workers, f"engine.workers = {workers}", "use fewer workers")


@dataclass(frozen=True)
class Topology:
    """The number of workers (0: the learner steps the envs) and the reason; `batched`: with an inference server."""

    workers: int
    why: str
    batched: bool = False
    threads: int | None = None  # of the learner, from the checkpoint: only the same number continues bit for bit


def topology(experiment: Experiment, spec: EnvSpec, groups: int | None = None, threads: int | None = None) -> Topology:
    """Resolve engine.workers and engine.inference. A checkpoint's `groups` and `threads` are kept if possible, so that
    its episodes continue and results are rounded alike."""
    batched = is_batched(experiment, device_named(experiment.engine.device))
    found = _workers(experiment, spec, groups, 2 if batched else 1)
    return replace(found, batched=batched and found.workers > 0, threads=threads)


def slots_per_worker(mode: str) -> int:
    """Rollouts in shared memory per worker. Asynchronous: one to fill while another waits for slower workers."""
    return 2 if mode == "async" else 1


def is_batched(experiment: Experiment, device: torch.device) -> bool:
    """Whether workers, if any, get their actions from an inference server on that device."""
    engine = experiment.engine
    if engine.inference != "auto":
        return engine.inference == "batched"
    return engine.kind == "local" and device.type != "cpu" and not experiment.several_policies


def _workers(experiment: Experiment, spec: EnvSpec, groups: int | None, per_core: int) -> Topology:
    engine = experiment.engine
    asked = engine.inference == "batched"  # requires workers
    if engine.workers != "auto":
        return Topology(engine.workers, "as set")
    if engine.kind == "serial":
        return Topology(1, "as always")
    if not is_linux():
        return Topology(0, "workers need Linux")
    if groups is not None and engine.envs % groups == 0:
        alone = groups == 1 and engine.mode == "sync" and not asked
        return Topology(0 if alone else groups, "as before")
    if has_native(experiment.env) and not asked:
        return Topology(int(engine.mode == "async"), "the env steps all rows in one call")
    if spec.step_seconds < CHEAP_STEP and engine.mode == "sync" and not asked:
        return Topology(0, f"an env step takes {spec.step_seconds * 1e6:.0f} us")
    usable = usable_cores()
    cores = max(1, min(usable, int(free_cores() + 1 - FREE_SHARE)))
    most = per_core * max(1, cores - 1 if engine.mode == "async" else cores)
    workers = even_workers(engine.envs, most)
    if workers == 1 and engine.mode == "sync" and not asked:
        return Topology(0, _cores_text(usable, cores))
    more = f", {per_core} workers for each" if per_core > 1 else ""
    return Topology(workers, f"an env step takes {spec.step_seconds * 1e6:.0f} us, {_cores_text(usable, cores)}{more}")


def _cores_text(usable: int, free: int) -> str:
    busy = f", {usable - free} of them busy" if free < usable else ""
    return f"{usable} core{'s' if usable > 1 else ''} available{busy}"


def learner_threads(experiment: Experiment, spec: EnvSpec, net: PolicyNet, chosen: Topology) -> tuple[int, str]:
    """Torch threads of each learner, and the reason."""
    asked = experiment.engine.threads
    if asked != "auto":
        return asked, "as set"
    if experiment.engine.kind == "serial" or net.log_std.device.type != "cpu":
        return 1, "as always"
    busy = chosen.workers if experiment.engine.mode == "async" else 0
    learners = experiment.engine.learners  # all busy at the same time
    most = (usable_cores() - busy) // learners
    if chosen.threads is not None and chosen.threads <= max(1, most):
        return chosen.threads, "as before"
    if most < 2:
        return 1, "no other core available"
    torch.set_num_threads(1)
    net = copy.deepcopy(net)  # a layer may count calls or keep statistics
    one = _gradient_step(experiment, spec, net)
    if one < SHORT_UPDATE:
        return 1, f"a gradient step takes {one * 1e3:.1f} ms"
    threads = min(most, (int(free_cores() + FREE_SHARE) - busy) // learners)
    if threads < 2:
        return 1, "the other cores are busy"
    torch.set_num_threads(threads)
    many = _gradient_step(experiment, spec, net)
    torch.set_num_threads(1)
    if one / many < MIN_SPEEDUP:
        return 1, f"{threads} threads measured only {one / many:.2f} times as fast"
    return threads, f"measured {one / many:.2f} times as fast as one"


def _gradient_step(experiment: Experiment, spec: EnvSpec, net: PolicyNet) -> float:
    """Seconds of a forward and backward pass over a small minibatch; the best of three."""
    bptt = experiment.model.memory.bptt if net.recurrent else 1
    chunks = max(1, min(getattr(experiment.algo, "minibatch", experiment.batch), 128) // bptt)
    obs = {
        name: torch.zeros(bptt, chunks, *item.shape, dtype=getattr(torch, item.dtype))
        for name, item in spec.obs.items()
    }
    first = torch.zeros(bptt, chunks, dtype=torch.bool)
    best = float("inf")
    with Generators(0).active():
        for _ in range(3):
            start = time.perf_counter()
            params, value = net.unroll(obs, net.initial_state(chunks), first)
            loss = params.sum() + value.sum()
            torch.autograd.grad(loss, [each for each in net.parameters() if each.requires_grad], allow_unused=True)
            best = min(best, time.perf_counter() - start)
    return best
