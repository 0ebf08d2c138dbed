"""Frozen policies: found through `policies.NAME.from`, copied into the run folder, loaded from there.

    from: tag/0007-brisk-otter@20480    ──>  frozen/NAME/policies/main.*    weights, model settings, env spec
                                             frozen/NAME/plugins/...        code of its model, if it is a plug-in
                                             frozen/NAME/origin.json        its run, checkpoint and env step
                                             and the setting becomes  from: frozen/NAME

So a run keeps its opponents, even if the other run changes or is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.errors import TiltyardError, UseError
from tiltyard.models.policy import load_policy
from tiltyard.models.policy_files import saved_policies
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins.resolve import model_plugins, own_ref, short
from tiltyard.plugins.snapshot import Copies
from tiltyard.run import atomic
from tiltyard.run.checkpoint import select
from tiltyard.run.checkpoint_files import MANIFEST
from tiltyard.run.folder import find
from tiltyard.run.regular_files import copy_files
from tiltyard.types import EnvSpec

FOLDER, ORIGIN = "frozen", "origin.json"


@dataclass(frozen=True)
class Source:
    """Where a frozen policy is: a folder with `policies`, and the folder that its model's code is relative to."""

    folder: Path
    home: Path
    origin: dict[str, Any]


def frozen_nets(experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> dict[str, PolicyNet]:
    """All frozen policies by name; UseError for one that is missing or does not fit the env."""
    found = {}
    for name, text in _named(experiment):
        with _as_setting(name, text):
            source = source_of(text, base)
            policy = load_policy(source.folder, base=(source.home,))
            policy.require_same(spec)
            found[name] = policy.net
    return found


def origin(experiment: Experiment, name: str, base: Sequence[Path]) -> str:
    """Describe the origin of a frozen policy."""
    found = source_of(dict(_named(experiment))[name], base).origin
    return f"{found['run']} at env step {found['env_steps']:,}"


def freeze(experiment: Experiment, base: Sequence[Path], copies: Copies) -> Copies:
    """Copy frozen policies beside the plug-ins; returns the copies of both, named by their place in the run folder."""
    ids, files = dict(copies.ids), list(copies.files)
    for name, text in _named(experiment):
        with _as_setting(name, text):
            target = copies.folder / FOLDER / name
            _copy(source_of(text, base), target)
            ids[f"policies.{name}.from"] = f"{FOLDER}/{name}"
            files += [path.relative_to(copies.folder) for path in sorted(target.rglob("*")) if path.is_file()]
    return replace(copies, ids=ids, files=tuple(files))


def _copy(source: Source, target: Path) -> None:
    model = load_policy(source.folder, base=(source.home,)).net.settings  # also checks that its code is trusted
    name = saved_policies(source.folder)[0]
    copy_files(source.folder / "policies", target / "policies", wanted=lambda file: file.startswith(f"{name}."))
    if any(own_ref(kind, plugin, (source.home,)) for _, kind, plugin in model_plugins(model)):
        copy_files(source.home / "plugins", target / "plugins")
    atomic.write_json(target / ORIGIN, source.origin)


def _named(experiment: Experiment) -> list[tuple[str, str]]:
    return [(name, policy.from_) for name, policy in experiment.policy_settings.items() if policy.from_ is not None]


def source_of(text: str, base: Sequence[Path]) -> Source:
    """Find a copy made by `freeze`, a checkpoint's folder, or a run with or without @STEP."""
    given = Path(text).expanduser()
    for folder in [Path(place).absolute() / given for place in (*base, Path.cwd())]:
        if (folder / ORIGIN).is_file():
            return Source(folder, folder, atomic.read_json(folder / ORIGIN))
        if (folder / MANIFEST).is_file():
            return _checkpoint(folder)
    run, _, step = text.rpartition("@")
    if run and (step == "best" or step.replace("_", "").isdecimal()):
        return _checkpoint(select(find(run), step).folder)
    return _checkpoint(select(find(text)).folder)


def _checkpoint(folder: Path) -> Source:
    found, home = select(folder), atomic.absolute(folder).parent.parent
    run = f"{home.parent.name}/{home.name}"
    return Source(found.folder, home, {"run": run, "checkpoint": str(found.folder), "env_steps": found.env_steps})


@contextmanager
def _as_setting(name: str, text: str) -> Iterator[None]:
    """Report any error as one of the setting."""
    try:
        yield
    except TiltyardError as error:
        message, hint = f"policies.{name}.from = {short(text)}: {error.message}", error.hint
        if "--trust-code" in hint:  # that flag is for runs, not for runs named by a setting
            hint = "read that code, then copy its run to one of your folders and name the copy"
        raise UseError(message, hint, error.details) from error
    except OSError as error:
        message = f"policies.{name}.from = {short(text)} could not be copied: {error.strerror or error}"
        raise TiltyardError(message, "free some space, or check the folder's permissions") from error
