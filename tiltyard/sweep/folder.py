"""A sweep on disk: one folder below its name, its trials in it.

    runs/cartpole/sweep-0001/
      plan.yaml        the plan, with the experiment as it was; never changed     sweep.json   its origin: see make
      manifest.jsonl   trial -> settings; lines are only ever added               decisions.jsonl  retry, extend, ...
      plugins/         copies of the user's code from the start                   events.jsonl, lock.json  as in a run
      0001-brisk-otter/, 0002-...       the trials: ordinary runs, made when they are started

A trial is the folder that begins with its number, so it cannot be made twice, and a sweep may be moved; the rest of the
name follows from sweep.json. Which (point, seed) a number stands for follows from the plan and the decisions; the
settings of a point are in the manifest as soon as they are known, and in the trial's own folder.

Damage: sweep.json is also in the first event, it has a checksum of plan.yaml, and a trial that the manifest lacks is
read from its folder. damage.py reports and repairs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.config.ownership import TRUST_CODE, find_foreign
from tiltyard.config.search_space import Point, fingerprint
from tiltyard.config.site import Profile
from tiltyard.config.site_file import runs_root
from tiltyard.config.sweep_plan import Plan, load_plan
from tiltyard.config.yaml import dump_yaml
from tiltyard.errors import TiltyardError, UseError, did_you_mean
from tiltyard.failures import retry
from tiltyard.plugins.snapshot import copy_file
from tiltyard.run import atomic
from tiltyard.run.events import log_event, read_events
from tiltyard.run.folder import PROGRAM, Run
from tiltyard.run.lock import guard, seems_alive
from tiltyard.run.names import ADJECTIVES, ANIMALS
from tiltyard.run.provenance import FILE as PROVENANCE
from tiltyard.run.redact import mask_command, mode_for
from tiltyard.run.status import RUN_FOLDER, SWEEP_FOLDER

SCHEMA = 1
PLAN, FACTS, MANIFEST, DECISIONS = "plan.yaml", "sweep.json", "manifest.jsonl", "decisions.jsonl"
STOP, PROFILE = "stop", "profile.json"


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `number` counts from 1, as does `point`, the combination of settings that it runs."""

    number: int
    point: int
    seed: int
    settings: Point
    refused: str = ""
    """why settings that a search chose are invalid"""


@dataclass(frozen=True)
class Sweep:
    """A sweep by its folder; everything else is read from disk."""

    folder: Path

    @property
    def id(self) -> str:
        """cartpole/sweep-0001"""
        return "/".join(self.folder.parts[-2:])

    @property
    def typed(self) -> str:
        """The sweep as an argument of a command typed here: its id if that finds it, else its path."""
        with contextlib.suppress(TiltyardError, OSError):
            if find_sweep(self.id).folder.samefile(self.folder):
                return shlex.quote(self.id)
        return shlex.quote(str(self.folder))

    @property
    def stop_file(self) -> Path:
        return self.folder / STOP

    def plan(self) -> Plan:
        path, expected = self.folder / PLAN, self.facts().get("plan")
        if expected is not None and _sha256(path) != expected:
            hint = (
                f"restore it; for other settings start a new sweep: tiltyard sweep start {shlex.quote(str(path))} --new"
            )
            raise UseError(f"{path} was changed after the sweep was started", hint)
        return load_plan(path)

    def facts(self) -> dict[str, Any]:
        """The content of sweep.json, or of its copy if that is damaged."""
        try:
            return read_facts(self.folder)
        except (OSError, ValueError) as error:
            copies = [event.get("facts") for event in read_events(Run(self.folder)) if event.get("kind") == "created"]
            if copies and isinstance(copies[0], dict):
                return copies[0]
            message = f"{self.folder / FACTS} is damaged: {error}"
            raise TiltyardError(
                message, "restore it from a copy; the trials are runs that can be used alone"
            ) from error

    def trials(self) -> list[Trial]:
        """The trials whose settings are known, by number: those in the manifest, and those that only have a folder."""
        found = listed_trials(self.folder)
        for number, name in _existing(self.folder).items():
            if number not in found and (trial := _recorded(self.folder / name)) is not None:
                found[number] = trial
        return [found[number] for number in sorted(found)]

    def place(self, number: int) -> Path:
        """The folder of a trial, which need not exist yet."""
        if (known := _existing(self.folder).get(number)) is not None:
            return self.folder / known
        names = _name_seed(self.folder) if self.folder.exists() else ""
        rng = random.Random(f"{names or self.id}/{number}")
        return self.folder / f"{number:04d}-{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}"

    def trial_folders(self) -> list[Path]:
        """The folders of trials that exist."""
        return sorted(path for path in self.folder.iterdir() if RUN_FOLDER.fullmatch(path.name))

    @property
    def base(self) -> tuple[Path, ...]:
        """Folders that names of plug-ins are relative to: first the copies from the start."""
        return (self.folder / "plugins", *map(Path, self.facts()["base"]))

    def decisions(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Everything that was decided, or the decisions of one kind, oldest first."""
        lines = [line for line in atomic.read_lines(self.folder / DECISIONS)[0] if _is_decision(line)]
        return [line for line in lines if kind in (None, line["kind"])]

    def decide(self, kind: str, **facts: Any) -> None:
        """Record a decision, before anything acts on it. Kinds: start, retry, extend, failed, ended early, and those of
        a population (lineage.py): period, exploit, stays.

        Users and controllers may decide on several machines at once, and appending on NFS is not atomic."""
        record = {"time": atomic.now(), "kind": kind, **facts}

        def append() -> None:
            with guard(Run(self.folder)):
                atomic.append_record(self.folder / DECISIONS, record)

        retry(append)

    def add_to_manifest(self, trial: Trial) -> None:
        retry(lambda: atomic.append_record(self.folder / MANIFEST, trial_line(trial)))

    @property
    def launcher(self) -> str:
        """What starts its trials: local, slurm or template, as in the profile when the sweep began."""
        return str(self.facts().get("launcher") or "local")

    def require_own(self, trust_code: bool = False) -> None:
        """UseError if another user controls what the sweep runs. `trust_code` allows it on this machine; jobs of two
        users cannot be one sweep, because neither user may stop the other's."""
        found = next(filter(None, (find_foreign(path, self.folder) for path in _deciding_files(self.folder))), None)
        if found is None or (trust_code and self.launcher == "local"):
            return
        hint = f"start your own from its plan: tiltyard sweep start {shlex.quote(str(self.folder / PLAN))} --new"
        hint += f"; or {TRUST_CODE}" if self.launcher == "local" else ""
        message = f"{found.path} belongs to another user, {found.owner}, and decides what sweep {self.id} runs"
        raise UseError(message, hint)

    @property
    def controlled(self) -> bool:
        """Whether a controller seems to be running, on any machine."""
        return seems_alive(self.folder)


def _deciding_files(folder: Path) -> Iterator[Path]:
    """The files that name or contain what a sweep runs."""
    yield from (folder / name for name in (PLAN, FACTS, Run(folder).events_file.name, MANIFEST, DECISIONS, PROFILE))
    for place, folders, names in os.walk(folder / "plugins"):
        yield from (Path(place, name) for name in (*folders, *names))


@functools.cache
def _name_seed(folder: Path) -> str:
    """The seed of the trial folders' names, written when the sweep was made, so that it can be moved. Empty in older
    sweeps, where it is the id."""
    return str(Sweep(folder).facts().get("names") or "")


@functools.lru_cache(maxsize=64)
def _trial_names(folder: Path, changed: int) -> Mapping[int, str]:
    """The folders of trials by number, as long as the sweep's folder was not `changed` again."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if RUN_FOLDER.fullmatch(entry.name))
    return {int(name.partition("-")[0]): name for name in names}


def _existing(sweep: Path) -> Mapping[int, str]:
    try:
        return _trial_names(sweep, sweep.stat().st_mtime_ns)
    except FileNotFoundError:  # a dry run: the sweep does not exist
        return {}


def listed_trials(sweep: Path) -> dict[int, Trial]:
    """The trials in the manifest, by number."""
    found: dict[int, Trial] = {}
    for line in atomic.read_lines(sweep / MANIFEST)[0]:
        if (trial := _trial(line)) is not None:
            found.setdefault(trial.number, trial)
    return found


def read_facts(folder: Path) -> dict[str, Any]:
    """OSError if sweep.json cannot be read, ValueError if it is damaged."""
    facts = atomic.read_sealed(folder / FACTS)
    base, strings = (
        facts.get("base"),
        [facts.get(name) or "" for name in ("created", "names", "cwd", "profile", "launcher")],
    )
    if not isinstance(base, list) or not all(isinstance(each, str) for each in (*base, *strings)):
        raise ValueError("a value has the wrong type")
    return facts


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _trial(line: Mapping[str, Any]) -> Trial | None:
    """The trial of a line in the manifest; None if the line is damaged."""
    number, point, seed, settings = (line.get(name) for name in ("trial", "point", "seed", "settings"))
    refused = line.get("refused", "")
    if not (isinstance(number, int) and isinstance(point, int) and isinstance(seed, int)):
        return None
    if not isinstance(settings, dict) or not isinstance(refused, str):
        return None
    return Trial(number, point, seed, settings, refused)


def _recorded(folder: Path) -> Trial | None:
    """The trial that a folder was made for; None in older sweeps, or if the file that says so is damaged."""
    for name in (PROGRAM, PROVENANCE):
        with contextlib.suppress(OSError, ValueError):
            line = atomic.read_sealed(folder / name).get("trial")
            return _trial(line) if isinstance(line, dict) else None
    return None


def _is_decision(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("kind"), str) and isinstance(line.get("time"), str) and type(line.get("trial", 0)) is int


def trial_line(trial: Trial) -> dict[str, Any]:
    line = {"trial": trial.number, "point": trial.point, "seed": trial.seed, "settings": trial.settings}
    return {**line, "refused": trial.refused} if trial.refused else line


def planned_pairs(plan: Plan, points: int, decisions: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(point, seed) of every trial by number: those of the plan, then those of each extension.

    Each member of a population has its own seed: else a copy with its source's settings would repeat the source.
    """
    seeds = list(plan.seeds)
    if plan.search == "population":
        return [(point, seeds[0] + point - 1) for point in range(1, points + 1)]
    pairs = [(point, seed) for point in range(1, points + 1) for seed in seeds]
    for decision in decisions:
        if decision.get("kind") != "extend":
            continue
        more = int(decision.get("points", 0))
        pairs += [(point, seed) for point in range(points + 1, points + more + 1) for seed in seeds]
        points += more
        new = [max(seeds) + 1 + i for i in range(int(decision.get("seeds", 0)))]
        pairs += [(point, seed) for point in range(1, points + 1) for seed in new]
        seeds += new
    return pairs


# ---------------------------------------------------------------------------------------------- making


def digest(plan: Plan, profile: Profile | None) -> str:
    """A hash that is equal for equal plans."""
    facts = [plan.model_dump(mode="json"), profile.name if profile else None]
    return hashlib.sha256(fingerprint(facts).encode()).hexdigest()


def make(
    root: Path,
    name: str,
    plan: Plan,
    trials: Sequence[Trial],
    *,
    base: Sequence[Path] = (),
    profile: Profile | None = None,
    command: Sequence[str] = (),
    plugins: Iterable[tuple[Path, Path]] = (),
) -> Sweep:
    """Make a sweep's folder; it appears complete. Names of plug-ins are relative to the folders in `base`; `plugins`
    are pairs of a file and its place in the folder."""
    group = atomic.absolute(root) / name
    draft = group / f".new-sweep-{atomic.unique()}"
    facts = {
        "schema": SCHEMA,
        "created": atomic.now(),
        "names": f"{name}/{atomic.unique()}",
        "digest": digest(plan, profile),
        "cwd": str(Path.cwd()),
        "base": [str(folder) for folder in base],
        "profile": profile.name if profile else None,
        "launcher": profile.launcher if profile else "local",
        "command": mask_command(list(command)),
    }
    try:
        draft.mkdir(parents=True)
        for source, place in plugins:
            (draft / place).parent.mkdir(parents=True, exist_ok=True)
            copy_file(source, draft / place)
        values = plan.model_dump(mode="json")
        atomic.write_text(draft / PLAN, dump_yaml(values), mode_for(values))
        load_plan(draft / PLAN)  # as every later command will
        facts["plan"] = _sha256(draft / PLAN)
        atomic.write_sealed(draft / FACTS, facts)
        log_event(Run(draft), "created", "The sweep was created.", facts=facts)
        atomic.write_text(draft / MANIFEST, "".join(f"{atomic.to_line(trial_line(trial))}\n" for trial in trials))
        atomic.sync_folder(draft)
        return Sweep(_renamed(draft, group))
    except OSError as error:
        hint = "set TILTYARD_RUNS (or `runs:` in tiltyard.yaml) to a writable folder with free space"
        raise TiltyardError(f"the sweep could not be written in {group}: {error.strerror or error}", hint) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _renamed(draft: Path, group: Path) -> Path:
    """Rename the draft to the first free number: rename fails if the folder exists."""
    numbers = [int(path.name.partition("-")[2]) for path in group.iterdir() if SWEEP_FOLDER.fullmatch(path.name)]
    number = max(numbers, default=0) + 1
    while True:
        place = group / f"sweep-{number:04d}"
        try:
            draft.rename(place)
        except OSError:
            if not place.exists():
                raise
            number += 1
            continue
        atomic.sync_folder(group)
        return place


# ---------------------------------------------------------------------------------------------- finding


def sweeps(root: Path) -> list[Sweep]:
    """All sweeps, oldest first."""
    found = [(_created(folder), folder) for folder in root.glob("*/sweep-*") if _is_sweep(folder)]
    return [Sweep(atomic.absolute(folder)) for _, folder in sorted(found)]


def is_own(sweep: Sweep) -> bool:
    """Whether the sweep's folder belongs to this user or root; require_own also looks at its files."""
    return find_foreign(sweep.folder) is None


def _is_sweep(folder: Path) -> bool:
    return SWEEP_FOLDER.fullmatch(folder.name) is not None and (folder / PLAN).is_file()


def _created(folder: Path) -> str:
    try:
        return str(Sweep(folder).facts().get("created"))
    except TiltyardError:
        return ""


def sweep_at(text: str, root: Path) -> Sweep | None:
    """The sweep with that id or folder; None if there is none."""
    found = filter(_is_sweep, (Path(text), root / text))
    return next((Sweep(atomic.absolute(folder)) for folder in found), None)


def own_sweep(text: str | Path, trust_code: bool = False) -> Sweep:
    """The sweep that `text` names, for a command that runs or stops its trials; UseError if another user's."""
    sweep = find_sweep(text)
    sweep.require_own(trust_code)
    return sweep


def _name_one(some: Sequence[Sweep]) -> str:
    return f"name one of them: {', '.join(each.id for each in some[:5])}"


def find_sweep(text: str | Path, root: Path | None = None) -> Sweep:
    """The sweep that `text` names: a path to or into its folder, cartpole/sweep-0001, sweep-0001 or 1 if only one
    matches, cartpole (its newest) or last (the newest of this user's)."""
    root = runs_root() if root is None else root
    given, path = os.fspath(text).rstrip("/"), atomic.absolute(Path(text))
    # A plain name is searched for below the root, even when typed inside another sweep's folder.
    into = path.exists() and ("/" in os.fspath(text) or given.startswith("."))
    for folder in filter(_is_sweep, (path, *(path.parents if into else ()))):
        return Sweep(folder)
    every = sweeps(root)
    if not every:
        raise UseError(f"no sweep in {root}", "start one with: tiltyard sweep start PLAN.yaml")
    if given == "last":
        own = list(filter(is_own, every))
        if not own:
            raise UseError(f"no sweep of yours in {root}", _name_one(every))
        return own[-1]
    for named in (
        [each for each in every if each.id == given],
        [each for each in every if each.folder.parent.name == given][-1:],
        [each for each in every if given in (each.folder.name, each.folder.name.removeprefix("sweep-").lstrip("0"))],
    ):
        if len(named) > 1:
            raise UseError(f"{given!r} matches {len(named)} sweeps", _name_one(named))
        if named:
            return named[0]
    raise UseError(f"no sweep {given!r} in {root}", did_you_mean(given, [each.id for each in every]))
