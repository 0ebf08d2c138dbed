"""`show`: a run on one screen, as data (`facts_of`) and as lines (`summary`); its events, its lineage, its plot.

Reads status, metrics, manifests and the resolved settings; imports no plug-in and verifies no checkpoint's files.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, root_named
from tiltyard.cli.output import write_result
from tiltyard.errors import UseError
from tiltyard.run import atomic, checkpoint, measured, metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find
from tiltyard.run.history import History
from tiltyard.run.settings_file import read_settings
from tiltyard.run.status import root_of
from tiltyard.run.writer import missing_records
from tiltyard.slurm.job_state import poll_job
from tiltyard.track.bottleneck import bottleneck

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.config.sections import Stop
    from tiltyard.run.folder import Run

RECENT = 100  # newest records that the time split covers


def configure_show(parser: argparse.ArgumentParser) -> None:
    add(parser, "run", "--root", "--json")
    parser.add_argument("--events", action="store_true", help="print its events, one per line")
    parser.add_argument("--lineage", action="store_true", help="for a population: its copies and their settings")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the learning curve into this file (PNG)")


def run_show(args: argparse.Namespace) -> None:
    """Print the run on one screen, or its events or lineage, or plot it."""
    run = find(args.run, root_named(args), programs=True)
    if run.is_program and (args.plot is not None or args.lineage):
        raise UseError(f"{run.id} is a trial of another program", "plot the sweep instead: tiltyard sweep plot")
    if args.plot is not None:
        from tiltyard.track.plot import plot

        sys.stdout.write(f"{plot(run, args.plot)}\n")
        return
    found: Any
    if args.events:
        found = read_events(run)
        lines = [f"{each.get('time')}  {each.get('kind', ''):<9}  {each.get('sentence', '')}" for each in found]
        text = "".join(f"{formatting.clean(line)}\n" for line in lines)
    elif args.lineage:
        from tiltyard.training.pbt import policy_lineage

        found = policy_lineage(run)
        text = lineage_text(found)
    elif run.is_program:
        found, text = _program(run)
    else:
        found = facts_of(run)
        text = "" if args.json else summary(run, found)
    write_result(found, text, as_json=args.json)


def _program(run: Run) -> tuple[dict[str, Any], str]:
    """A trial that runs another program: its command, state and newest metrics."""
    status, last = run.status(), History(run).newest()
    facts = {**status, "state": run.state, "command": run.program()["command"], "metrics": last}
    progress, reason = status["progress"], f": {status['reason']}" if status["reason"] else ""
    lines = [
        ("run", run.id),
        ("program", shlex.join(facts["command"])),
        ("state", f"{run.state}{reason}, attempt {status['attempt']}"),
        ("progress", f"{progress['env_steps']:,} env steps, {formatting.duration(progress['seconds'])}"),
        *((name, formatting.number(value)) for name, value in sorted(last.items())),
        ("folder", os.path.relpath(run.folder)),
        ("next", f"tiltyard logs {run.typed}"),
    ]
    width = max(len(name) for name, _ in lines)
    return facts, "".join(f"{name:<{width}}  {formatting.clean(value)}\n" for name, value in lines)


def facts_of(run: Run) -> dict[str, Any]:
    """status.json, with the newest metrics, checkpoints, the time split, damage and the next commands."""
    history, kept = History(run), checkpoint.list_checkpoints(run)
    evaluated, recent = history.curve("eval/return").newest, history.recent(RECENT)
    more = history.broken_count - len(history.broken)
    state, job = poll_job(run)
    status = run.status()
    lost = state == "finished" and (history.env_steps or 0) < status["progress"]["env_steps"]
    return {
        **status,
        "state": state,
        "job_says": job,
        "folder": str(run.folder),
        "metrics": history.newest(),
        "evaluated_at": evaluated[0] if evaluated else None,
        "time": metrics.time_shares(recent),
        "bound": bottleneck(metrics.time_shares(recent), metrics.time_shares(recent, "workers")),
        "checkpoints": [
            {"env_steps": each.env_steps, "score": each.score, "folder": str(each.folder)} for each in kept
        ],
        "damaged": [
            *run.damage(),
            *checkpoint.unreadable(run),
            *(f"line {line} of metrics.jsonl" for line in history.broken),
            *([f"{more:,} more lines of metrics.jsonl"] if more else []),
            *(
                [sentence for newest in kept[-1:] for sentence in missing_records(run, newest)]
                or (["metrics.jsonl: its last records are missing"] if lost else [])
            ),
        ],
        "next": _next_commands(run.typed, state),
    }


def _next_commands(run: str, state: str) -> list[str]:
    if state in ("running", "queued"):
        return [f"tiltyard logs -f {run}", f"tiltyard stop {run}"]
    if state == "finished":
        return [f"tiltyard eval {run}", f"tiltyard show {run} --plot curve.png"]
    return [f"tiltyard resume {run}"]


def summary(run: Run, facts: dict[str, Any]) -> str:
    """One line per fact; facts that are missing have no line."""
    experiment = read_settings(run.folder).experiment  # edited ones are reported as damage
    lineage = facts.get("lineage") or {}
    rows = [
        ("run", run.id),
        ("state", facts["state"] + (f": {facts['reason']}" if facts["reason"] else "")),
        ("job", facts["job_says"]),
        ("excluded", ", ".join((facts.get("job") or {}).get("avoided") or ())),
        ("env", f"{experiment.env.id}, {experiment.algo.id}, {experiment.engine.kind} engine, seed {experiment.seed}"),
        ("progress", _progress(facts, experiment.stop)),
        ("return", _returns(facts["metrics"], experiment.stop.train_return)),
        ("evaluation", _evaluation(facts, experiment.stop.return_)),
        ("speed", _speed(run, experiment, facts)),
        ("time", "  ".join(f"{part} {share}%" for part, share in metrics.percents(facts["time"]).items() if share)),
        ("bound", facts["bound"]),
        ("tags", ", ".join(facts["tags"])),
        ("notes", facts["notes"]),
        (
            "forked from",
            f"{lineage.get('run')} at env step {formatting.count(lineage.get('env_steps'))}" if lineage else "",
        ),
        *(("damaged", complaint) for complaint in facts["damaged"]),
        *_checkpoints(facts["checkpoints"], experiment),
        ("folder", facts["folder"]),
        *(("" if number else "next", command) for number, command in enumerate(facts["next"])),
    ]
    return "".join(f"{name:<12} {formatting.clean(value).rstrip()}\n" for name, value in rows if value)


def _progress(facts: dict[str, Any], stop: Stop) -> str:
    """Each count with its budget and the share of that which is used."""
    progress = facts["progress"]

    def used(name: str, budget: float | None, unit: str, words: Callable[[Any], str]) -> str:
        of, share = (f" of {words(budget)}", f" ({formatting.percent(progress[name], budget)})") if budget else ("", "")
        return f"{words(progress[name])}{of}{unit}{share}"

    parts = [
        used("env_steps", stop.env_steps, " env steps", formatting.count),
        *([used("frames", stop.frames, " frames", formatting.count)] if stop.frames else []),
        used("updates", stop.updates, " updates", formatting.count),
        used("episodes", None, " episodes", formatting.count),
        used("seconds", stop.seconds, "", formatting.duration),
        f"attempt {facts['attempt']}",
    ]
    return ", ".join(parts)


def _returns(found: dict[str, float], goal: float | None) -> str:
    if "train/return" not in found:
        return ""
    low, high = formatting.number(found.get("train/return_min")), formatting.number(found.get("train/return_max"))
    return f"{formatting.number(found['train/return'])} in training (last 100 episodes, {low} to {high})" + _goal(goal)


def _evaluation(facts: dict[str, Any], goal: float | None) -> str:
    found = facts["metrics"]
    if "eval/return" not in found:
        return ""
    words = formatting.number(found["eval/return"])
    if "eval/return_low" in found and "eval/return_high" in found:
        words += f" ({formatting.number(found['eval/return_low'])} to {formatting.number(found['eval/return_high'])})"
    best = atomic.number(facts["best"])
    words += f" at env step {formatting.count(facts['evaluated_at'])}"
    return words + (f", best {formatting.number(best)}" if best is not None else "") + _goal(goal)


def _goal(goal: float | None) -> str:
    return "" if goal is None else f", goal {formatting.number(goal)}"


def _speed(run: Run, experiment: Experiment, facts: dict[str, Any]) -> str:
    """Speed over the whole training, without evaluations and saves, compared with the env's own speed."""
    progress, host = facts["progress"], str(facts["host"])
    alone = measured.recall(root_of(run.folder), experiment, host)
    return measured.speed_text(progress["env_steps"], progress["seconds"], alone, host)


def _checkpoints(kept: list[dict[str, Any]], experiment: Experiment) -> list[tuple[str, str]]:
    scored = [one["score"] for one in kept if one["score"] is not None and math.isfinite(one["score"])]
    best = (max if experiment.save.mode == "max" else min)(scored) if scored else None
    rows = []
    for number, one in enumerate(kept):
        words = [f"{experiment.save.metric} {formatting.number(one['score'])}"] if one["score"] is not None else []
        words += ["best"] if best is not None and one["score"] == best else []
        words += ["newest"] if number == len(kept) - 1 else []
        rows.append(("" if number else "checkpoints", f"{one['env_steps']:>13,}  {', '.join(words)}"))
    return rows


def lineage_text(found: dict[str, Any]) -> str:
    """The policies of a population, the settings of each over time, and every copy."""
    rows = [
        [name, formatting.count(each["env_steps"]), formatting.number(each["score"]), _schedule(each["schedule"])]
        for name, each in found["policies"].items()
    ]
    copies = [
        f"{each['member']} at env step {each['env_steps']:,} became a copy of {each['source']} "
        f"at env step {each['source_env_steps']:,}, with {_settings(each['after'])}"
        for each in found["exploits"]
    ]
    head = ("policy", "env steps", "score", "settings, each from an env step of the policy that it was copied from")
    return formatting.table(head, rows, right=(1, 2)) + "".join(f"{formatting.clean(line)}\n" for line in copies)


def _schedule(schedule: list[dict[str, Any]]) -> str:
    return "; ".join(f"{each['from']:,}: {_settings(each['settings'])}" for each in schedule)


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {formatting.number(value)}" for key, value in settings.items())
