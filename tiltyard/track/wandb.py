"""Weights & Biases tracker; the only module that imports wandb.

The id is kept in track.json of the run folder, so every attempt continues the same W&B run. W&B drops records whose
step does not increase, so steps are record numbers, not env steps (which go back on a resume); `env_steps` is a metric
and the x-axis of all others.

    offline   a resume rewrites the whole history from metrics.jsonl and removes older segments, because `wandb sync`
              lets one segment of a run overwrite another; segments that were synced are continued instead
    online    the server has the history: numbers continue after those of the last attempt
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Wandb
from tiltyard.errors import UseError
from tiltyard.run.history import History
from tiltyard.run.redact import mask_all, mask_secrets

TIMEOUT = 30  # seconds for W&B to start, and to finish


def check(settings: Wandb) -> None:
    """UseError for settings that cannot work, before a run folder exists."""
    if importlib.util.find_spec("wandb") is None:
        hint = "pip install 'tiltyard[wandb]', or leave track.wandb out"
        raise UseError(f"track.wandb.mode = {settings.mode} needs the package wandb, which is not installed", hint)
    if settings.mode == "online" and not _logged_in():
        hint = "run `wandb login`, set WANDB_API_KEY, or use track.wandb=offline"
        raise UseError("track.wandb.mode = online needs a W&B login, but this machine has none", hint)


def _logged_in() -> bool:
    import wandb

    with _environment({"WANDB_SILENT": "true"}):
        return bool(wandb.login(prompt=False, verify=False))


class WandbTracker:
    """One W&B run in `run_folder`/wandb. Call `record` after appending the record to metrics.jsonl."""

    def __init__(self, run_folder: Path, experiment: Experiment, settings: Wandb) -> None:
        import wandb

        self._wandb = wandb
        self.id = _stored_id(run_folder)
        older = sorted(
            (run_folder / "wandb").glob(f"offline-run-*-{self.id}*")
        )  # a second one in the same second ends in -1
        history = run_folder / "metrics.jsonl"
        anew = settings.mode == "offline" and not any(list(segment.glob("*.synced")) for segment in older)
        with _environment(_private_folders(run_folder)):
            try:
                self._run = _open(wandb, self.id, run_folder, experiment, settings)
            except Exception:
                wandb.teardown()  # ends the helper process, which would delay the end of training
                raise
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")
        # All lines, superseded ones too: at least as many as the records that any attempt has sent.
        self._number = _lines(history)
        if anew:
            for number, record in enumerate(History(history).records()):
                self._log(record, number)
            for segment in older:
                shutil.rmtree(segment)

    def record(self, record: Mapping[str, Any]) -> None:
        """Queue all metrics of one record; does not wait until they are sent."""
        self._number += 1
        self._log(record, self._number)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()

    def _log(self, record: Mapping[str, Any], number: int) -> None:
        counters = {
            name: record[name] for name in ("env_steps", "frames", "updates", "episodes", "seconds") if name in record
        }
        numbers = {name: float(value) for name, value in record["metrics"].items()}
        self._run.log({**counters, **numbers}, step=number, commit=True)


def _open(wandb: Any, run_id: str, run_folder: Path, experiment: Experiment, settings: Wandb) -> Any:
    return wandb.init(
        id=run_id,
        resume="allow" if settings.mode == "online" else None,
        mode=settings.mode,
        dir=str(run_folder),
        entity=settings.entity,
        project=settings.project,
        group=settings.group or experiment.env.id,
        job_type=settings.job_type,
        tags=list(dict.fromkeys([*experiment.tags, *settings.tags])),
        notes=mask_secrets(experiment.notes) or None,
        name="/".join(run_folder.absolute().parts[-2:]),
        config=mask_all(experiment.model_dump(mode="json")),  # it leaves this machine
        settings=_settings(wandb),
    )


def _stored_id(run_folder: Path) -> str:
    """The id of the W&B run, created once and kept in track.json."""
    file = run_folder / "track.json"
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"schema": 1}
    if "wandb_id" not in kept:
        kept["wandb_id"] = secrets.token_hex(8)
        fresh = file.with_name(".track.json.new")
        fresh.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        fresh.replace(file)
    return str(kept["wandb_id"])


def _lines(file: Path) -> int:
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def _settings(wandb: Any) -> Any:
    """Quiet, with timeouts, and without facts about this machine; variables set by the user have priority."""
    wanted = {
        "console": "off",
        "disable_code": True,
        "disable_git": True,
        "finish_timeout": TIMEOUT,
        "init_timeout": TIMEOUT,
        "save_code": False,
        "silent": True,
        "x_disable_machine_info": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
    }
    known = [name for name in wanted if name in wandb.Settings.model_fields]  # older versions have fewer
    return wandb.Settings(**{name: wanted[name] for name in known if f"WANDB_{name.upper()}" not in os.environ})


def _private_folders(run_folder: Path) -> dict[str, str]:
    """Environment variables that keep all of W&B's files inside the run folder."""
    inside = run_folder / "wandb"
    inside.mkdir(exist_ok=True)
    names = {"WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data", "WANDB_ARTIFACT_DIR": "artifacts"}
    folders = {name: str(inside / folder) for name, folder in names.items()}
    return {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", **folders}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Temporarily set environment variables that the user has not set."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
