"""A run on one screen: what `tiltyard show` says, first as data (`facts_of`), then as lines (`summary`).

Reads status, metrics, manifests and the resolved settings; imports no plug-in and verifies no checkpoint's files.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tiltyard.cli import text
from tiltyard.run import checkpoint, disk, metrics

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.run.folder import Run

# Shares are of the time since the record before: an average over the last ones is steadier than one of them.
RECENT = 100


def facts_of(run: Run) -> dict[str, Any]:
    """status.json, and beside it the newest metrics, checkpoints, the time split, damage and what to type next."""
    records = metrics.read(run)
    steps, _ = metrics.series(records, "eval/return")
    recent = [record["metrics"] for record in records[-RECENT:]]
    parts = sorted({name for found in recent for name in found if name.startswith("time/")})
    state = run.state
    return {
        **run.status(),
        "state": state,
        "folder": str(run.folder),
        "metrics": {name: value for record in records for name, value in record["metrics"].items()},
        "evaluated_at": steps[-1] if steps else None,
        "time": {name.removeprefix("time/"): sum(one.get(name, 0.0) for one in recent) / len(recent) for name in parts},
        "checkpoints": [
            {"env_steps": kept.env_steps, "score": kept.score, "folder": str(kept.folder)}
            for kept in checkpoint.list_checkpoints(run)
        ],
        "damaged": [
            *checkpoint.unreadable(run),
            *(f"line {line} of metrics.jsonl" for line in metrics.broken_lines(run)),
        ],
        "next": _next_commands(run.id, state),
    }


def _next_commands(run_id: str, state: str) -> list[str]:
    if state == "running":
        return [f"tiltyard logs -f {run_id}", f"tiltyard stop {run_id}"]
    if state == "finished":
        return [f"tiltyard eval {run_id}", f"tiltyard show {run_id} --plot curve.png"]
    return [f"tiltyard resume {run_id}"]


def summary(run: Run, facts: dict[str, Any]) -> str:
    """One line per thing worth knowing; what is not there has no line."""
    experiment = run.experiment()
    lineage = facts.get("lineage") or {}
    rows = [
        ("run", run.id),
        ("state", facts["state"] + (f": {facts['reason']}" if facts["reason"] else "")),
        ("env", f"{experiment.env.id}, {experiment.algo.id}, {experiment.engine.kind} engine, seed {experiment.seed}"),
        ("progress", _progress(facts)),
        ("return", _returns(facts["metrics"])),
        ("evaluation", _evaluation(facts)),
        ("speed", _speed(facts["progress"])),
        ("time", "  ".join(f"{part} {share:.0%}" for part, share in facts["time"].items() if share >= 0.005)),
        ("tags", ", ".join(facts["tags"])),
        ("notes", facts["notes"]),
        ("forked from", f"{lineage.get('run')} at env step {text.count(lineage.get('env_steps'))}" if lineage else ""),
        *(("damaged", complaint) for complaint in facts["damaged"]),
        *_checkpoints(facts["checkpoints"], experiment),
        ("folder", facts["folder"]),
        *(("" if number else "next", command) for number, command in enumerate(facts["next"])),
    ]
    return "".join(f"{name:<12} {text.clean(value).rstrip()}\n" for name, value in rows if value)


def _progress(facts: dict[str, Any]) -> str:
    progress, target = facts["progress"], facts.get("target_env_steps")
    of_target = f" of {target:,}" if target else ""
    share = f" ({text.percent(progress['env_steps'], target)})" if target else ""
    counts = f"{text.count(progress['updates'])} updates, {text.count(progress['episodes'])} episodes"
    spent = f"{text.duration(progress['seconds'])}, attempt {facts['attempt']}"
    return f"{text.count(progress['env_steps'])}{of_target} env steps{share}, {counts}, {spent}"


def _returns(found: dict[str, float]) -> str:
    if "train/return" not in found:
        return ""
    low, high = text.number(found.get("train/return_min")), text.number(found.get("train/return_max"))
    return f"{text.number(found['train/return'])} in training (last 100 episodes, {low} to {high})"


def _evaluation(facts: dict[str, Any]) -> str:
    found = facts["metrics"]
    if "eval/return" not in found:
        return ""
    words = text.number(found["eval/return"])
    if "eval/return_low" in found and "eval/return_high" in found:
        words += f" ({text.number(found['eval/return_low'])} to {text.number(found['eval/return_high'])})"
    best = disk.number(facts["best"])
    return f"{words} at env step {text.count(facts['evaluated_at'])}" + (
        f", best {text.number(best)}" if best is not None else ""
    )


def _speed(progress: dict[str, Any]) -> str:
    """Over the whole training, as its seconds are counted: evaluations and saves apart."""
    return f"{progress['env_steps'] / progress['seconds']:,.0f} env steps per second" if progress["seconds"] else ""


def _checkpoints(kept: list[dict[str, Any]], experiment: Experiment) -> list[tuple[str, str]]:
    scored = [one["score"] for one in kept if one["score"] is not None and math.isfinite(one["score"])]
    best = (max if experiment.save.mode == "max" else min)(scored) if scored else None
    rows = []
    for number, one in enumerate(kept):
        words = [f"{experiment.save.metric} {text.number(one['score'])}"] if one["score"] is not None else []
        words += ["best"] if best is not None and one["score"] == best else []
        words += ["newest"] if number == len(kept) - 1 else []
        rows.append(("" if number else "checkpoints", f"{one['env_steps']:>13,}  {', '.join(words)}"))
    return rows
