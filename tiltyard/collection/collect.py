"""Collect a dataset: find env and policies, create the folder, and keep workers busy until all episodes are there.

    prepare(Request)  what is wrong is found here, before anything is written
    collect(...)      dataset.json ──> workers, each with its own claims and manifest ──> what the folder holds

Any number of these commands may work on one folder at the same time. Each returns when the folder is complete, so that
after a kill the same command makes only what is missing.
"""

from __future__ import annotations

import secrets
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.collection import policies
from tiltyard.collection.committed import Committed
from tiltyard.collection.policies import PolicyChoice
from tiltyard.collection.pool import PRELOAD, TRAINED, Pool, disk_failure, stopped
from tiltyard.collection.progress import ProgressView
from tiltyard.collection.request import Prepared, Request, create
from tiltyard.config.load import load
from tiltyard.config.sections import Env
from tiltyard.data import dataset_file, manifest
from tiltyard.data.claims import Claims
from tiltyard.data.dataset_file import About, about_env
from tiltyard.data.folder import read_manifest, unlisted
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError, UseError
from tiltyard.processes.fork_server import ForkServer
from tiltyard.processes.resources import usable_cores
from tiltyard.run import atomic, trust
from tiltyard.run.folder import Run, find
from tiltyard.training.signals import StopSignals
from tiltyard.types import EnvSpec

MOST = 100_000_000  # episodes


@dataclass(frozen=True)
class Collected:
    """What the folder holds now, and how much of it this command has added."""

    folder: Path
    env: str
    episodes: int
    env_steps: int
    mean_return: float
    bytes: int
    added: int
    seed: int


# ---------------------------------------------------------------------------------------------- before


def prepare(request: Request) -> Prepared:
    """Find out what is collected; UseError for everything that is wrong with it."""
    if not 1 <= request.episodes <= MOST:
        raise UseError(f"--episodes {request.episodes} must be from 1 to {MOST:,}", "write --episodes 1000")
    there = _existing(request)
    run, at = _target_run(request.target)
    own = None if run is None else f"{run.folder}{f'@{at}' if at else ''}"
    choices = policies.parse(request.policies, own)
    if run is not None and not request.policies:
        choices = [replace(choices[0], text=request.target)]
    if run is None:
        loaded = load(request.target, request.overrides)
        experiment, base = loaded.experiment, loaded.base
    else:
        from tiltyard.evaluation.evaluate import changed  # imports torch, as the policy of the run needs anyway

        experiment = changed(run, request.overrides, request.trust_code)
        trust.enter_profile(run, request.trust_code)
        base = (*run.base, Path.cwd()) if request.overrides else run.base
    found = [policies.locate(choice, base, request.trust_code) for choice in choices]
    previous = any(needs for _, needs in found)
    spec = probe(experiment.env, base=base, previous=previous)
    env, spec = _limited(experiment.env, spec, request.max_steps)
    for note in spec.notes:
        sys.stderr.write(f"note: {note}\n")
    # Without what the probe has measured: the same episodes are the same bytes on every machine.
    described = replace(spec, env_bytes=0, step_seconds=0.0, notes=())
    about = about_env(env, described, seed=secrets.randbits(31) if request.seed is None else request.seed)
    if there is not None:
        dataset_file.require_same_env(request.out, there, about)
        about = replace(about, seed=there.seed)
    if env.time_limit is None and spec.episode_limit is None:  # as in an evaluation, no episode may last for ever
        env = env.model_copy(update={"time_limit": experiment.eval.time_limit})
    limit, beyond = _missing(request.out, request.episodes)
    return Prepared(request, env, list(base), spec, previous, [choice for choice, _ in found], about, limit, beyond)


def _missing(folder: Path, wanted: int) -> tuple[int, int]:
    """The number below which all episodes must be there, so that the folder has as many as wanted, and how many it has
    above. Commands that want the same find the same, however far they are."""
    if not manifest.files(folder):
        return wanted, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # episodes that a killed writer has not listed are listed by a worker
        numbers = read_manifest(folder).numbers()
    if len(numbers) >= wanted:
        return 0, len(numbers)
    free = np.setdiff1d(np.arange(wanted), numbers)
    limit = int(free[wanted - len(numbers) - 1]) + 1
    return limit, int((numbers >= limit).sum())


def _existing(request: Request) -> About | None:
    """The dataset in the folder, if there is one that episodes can be collected for."""
    folder = request.out
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise UseError(f"cannot write a dataset to {folder}: {place} is not a folder", "choose another folder")
    there = dataset_file.read(folder)
    if there is None:
        if (folder / manifest.OLD).exists():
            raise UseError(f"{folder} has episodes of an earlier format, to which none are added", "give a new folder")
        return None
    if there.seed is None:
        message = f"{folder} was not made by `tiltyard data collect`: its episodes have seeds of their own"
        raise UseError(message, "give a new folder, and join both with: tiltyard data merge")
    if request.seed not in (None, there.seed):
        message = f"{folder} has the seed {there.seed}, not {request.seed}"
        raise UseError(message, "leave --seed out, or give a new folder")
    return there


def _target_run(text: str) -> tuple[Run | None, str]:
    """The run that a target names, and @best or @STEP; None for an experiment file or an env id.

    A run's name may equal an env's id, which is what it means then.
    """
    name, _, at = text.rpartition("@")
    if not name or not (at == "best" or at.replace("_", "").isdecimal()):
        name, at = text, ""
    if Path(name).suffix in (".yaml", ".yml") or (not at and _is_env(name)):
        return None, ""
    try:
        return find(name), at
    except UseError as error:
        if at or text == "last" or Path(text).is_dir():
            raise
        from tiltyard.plugins import resolve

        if resolve.kind_of(text) is None and "/" in text:
            raise UseError(f"{text} is neither an env nor a run: {error.message}", error.hint) from error
        return None, ""


def _is_env(name: str) -> bool:
    import gymnasium

    from tiltyard.envs.builtin import BUILTIN_ENVS
    from tiltyard.plugins import resolve

    known = name in BUILTIN_ENVS or name in gymnasium.registry or name.startswith(tuple(resolve.REGISTERING))
    return known or resolve.family_of(name) is not None or resolve.kind_of(name) is not None


def _limited(env: Env, spec: EnvSpec, max_steps: int | None) -> tuple[Env, EnvSpec]:
    """Episodes of at most so many env steps; a lower limit of the env itself stays."""
    own = env.time_limit or spec.episode_limit
    if max_steps is None or (own is not None and own <= max_steps):
        return env, spec
    return env.model_copy(update={"time_limit": max_steps}), replace(spec, episode_limit=max_steps)


# ---------------------------------------------------------------------------------------------- collecting


def collect(request: Request) -> Collected:
    """Collect until the folder has all episodes. ResumableError if a signal ends it before."""
    request = replace(request, out=atomic.absolute(request.out))
    needs_torch = any(choice.kind == "run" for choice in _quick_parse(request))
    with StopSignals() as stop, ForkServer((*PRELOAD, *(TRAINED if needs_torch else ())), "--workers 0") as server:
        if request.workers != 0:
            server.start()  # imports while the env is probed
        prepared = prepare(request)
        list_leftovers(prepared)
        if not prepared.limit:
            return summary(prepared, 0)
        committed = Committed(request.out, prepared.limit)
        committed.refresh()
        before = committed.count
        wanted = usable_cores() if request.workers is None else request.workers
        if wanted == 0:
            _here(prepared, committed, stop)
        else:
            Pool(server, prepared, max(1, min(wanted, prepared.limit - before)), committed, stop).run()
    committed.refresh()
    return summary(prepared, committed.count - before)


def list_leftovers(prepared: Prepared) -> None:
    """List the files that killed writers have not: also those with higher numbers than are wanted now."""
    folder = prepared.folder
    if not manifest.abandoned(folder):
        return
    numbers = {entry.episode for entry in unlisted(folder, manifest.read(folder))}
    if numbers:
        writer = DatasetWriter(folder, prepared.about, {})
        with Claims(folder) as claims:
            for number in filter(claims.take, numbers):  # another process that has claimed one lists it itself
                writer.list_existing(number)
                claims.release(number)
        writer.close()


def _quick_parse(request: Request) -> list[PolicyChoice]:
    """The policies before the target is known, to decide what to import."""
    own = None if _is_env(request.target) else request.target
    return policies.parse(request.policies, own)


def summary(prepared: Prepared, added: int) -> Collected:
    """What the folder holds."""
    found = manifest.read(prepared.folder)
    there = dataset_file.read(prepared.folder)
    returns, numbers = found.column("return"), found.numbers()
    return Collected(
        folder=prepared.folder,
        env=prepared.about.env_id,
        episodes=len(numbers),
        env_steps=int(found.column("length").sum()),
        mean_return=float(returns.mean()) if len(returns) else 0.0,
        bytes=int(found.column("bytes").sum()),
        added=added,
        seed=(there.seed if there else prepared.about.seed) or 0,
    )


def _here(prepared: Prepared, committed: Committed, stop: StopSignals) -> None:
    """Collect in this process."""
    from tiltyard.collection import worker
    from tiltyard.collection.actors import Mixture

    task = worker.Task.from_json(prepared.task())
    policy = Mixture(task.policies, task.spec, task.trust_code)
    about = create(prepared)
    steps = 0

    def notify(message: dict[str, Any]) -> None:
        nonlocal steps
        steps += message["steps"]
        committed.add(message["committed"])
        view.update(committed.count + prepared.beyond, steps)
        if stop.received:
            raise stopped(prepared, committed, stop)

    with ProgressView(prepared.request.episodes, committed.count + prepared.beyond) as view:
        try:
            worker.collect(task, policy, prepared.folder, about, notify)
        except TiltyardError as error:
            raise disk_failure(error) if worker.may_pass(error) else error from error


def size_text(count: int) -> str:
    """1.5 MiB, 3.2 GiB."""
    number, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
