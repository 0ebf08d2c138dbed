"""Summarise a result: numbers per system, a Markdown table, a plot. Medians are over the runs that did not fail."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

BUSY = 0.15  # cores used by other programs, above which a row is marked


def area(curve: list[list[float]], limit: float) -> float:
    """Mean return over the first `limit` env steps: linear between evaluations, constant before the first."""
    points = [(0.0, curve[0][1]), *((min(steps, limit), value) for steps, value in curve)]
    points.append((limit, points[-1][1]))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)) / limit


def numbers(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Per system, the median of every number in its runs."""
    found: dict[str, dict[str, Any]] = {}
    for run in result["runs"]:
        row = found.setdefault(run["system"], {"values": {}, "runs": 0, "failed": 0, "solved": 0, "versions": {}})
        row["runs"] += 1
        row["failed"] += "failed" in run
        row["solved"] += bool(run.get("solved"))
        row["versions"] |= run.get("versions", {})
        for name, value in _of_run(run, result).items():
            row["values"].setdefault(name, []).append(value)
    for row in found.values():
        row["median"] = {name: median(values) for name, values in row["values"].items()}
    return found


def _of_run(run: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    if "failed" in run:
        return {}
    names = ("steps_per_second", "steps_per_cpu_second", "startup_seconds", "peak_pss", "evaluation_seconds")
    values = {name: run[name] for name in names if run.get(name)}
    values["others"] = max(run["busy_before"], run.get("others_cores", 0.0))
    if run.get("solved"):
        values |= {"goal_" + name: run["solved"][name] for name in ("seconds", "steps", "seconds_from_launch")}
    if run.get("curve"):
        values["area"] = area(run["curve"], result["limit"])
    return values


def main_number(result: dict[str, Any]) -> tuple[str, str, bool]:
    """The task's main number: its key, its label, and whether higher is better."""
    if result["limit"] is None:
        return "steps_per_second", "env steps/s", True
    if result["goal"] is None:
        return "area", f"mean return to {result['limit']:,} steps", True
    return "goal_seconds", f"s of training to {result['goal']:g}", False


def table(result: dict[str, Any]) -> str:
    rows, (name, words, more) = numbers(result), main_number(result)
    ours = next((system for system in rows if system.startswith("tiltyard")), "tiltyard")
    base = rows[ours]["median"].get(name) if ours in rows else None
    extra = _columns(result)
    head = ["system", words, "lowest to highest", f"{ours} is better by", *(heading for _, heading, _ in extra)]
    head += ["runs", "remarks"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for system, row in rows.items():
        value, values = row["median"].get(name), row["values"].get(name, [])
        ratio = (base / value if more else value / base) if base and value else None
        cells = [system, _number(value), f"{_number(min(values))} to {_number(max(values))}" if values else "-"]
        cells.append("-" if ratio is None else f"{ratio:.2f} x")
        cells += [_number(row["median"].get(key), scale) for key, _, scale in extra]
        lines.append(" | ".join([*cells, str(row["runs"]), _remarks(row, result)]))
    machine = result["machine"]
    versions = {name: version for row in rows.values() for name, version in row["versions"].items()}
    return "\n".join([
        f"## {result['title']}",
        "",
        f"{result['date']}; {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{'a GPU' if machine['gpu'] else 'no GPU'}, {machine['system']}, Python {machine['python']}.",
        f"Medians over interleaved runs. {', '.join(f'{a} {b}' for a, b in sorted(versions.items()))}.",
        *([f"Left out, not installed: {', '.join(result['left_out'])}."] if result["left_out"] else []),
        "",
        *(f"| {line} |" for line in lines),
        "",
    ])  # fmt: skip


def _columns(result: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Key, heading and scale of the other numbers."""
    speed = [("steps_per_cpu_second", "env steps per CPU-second", 1.0)]
    frames = [("steps_per_second", "frames/s", float(result["frames"]))]
    goal = [("goal_steps", "env steps to it", 1.0), ("goal_seconds_from_launch", "s from launch", 1.0)]
    goal += [("evaluation_seconds", "s of evaluations", 1.0)]
    rest = [("startup_seconds", "s to first update", 1.0), ("peak_pss", "peak memory MB", 1e-6)]
    return (frames + speed if result["limit"] is None else goal) + rest


def _remarks(row: dict[str, Any], result: dict[str, Any]) -> str:
    remarks = [f"{row['failed']} failed"] if row["failed"] else []
    if main_number(result)[0] == "goal_seconds" and row["solved"] < row["runs"]:
        remarks.append(f"goal reached by {row['solved']} of {row['runs']}; the median is of those")
    if row["median"].get("others", 0.0) > BUSY:
        remarks.append(f"machine busy: others used {row['median']['others']:.1f} cores")
    return "; ".join(remarks)


def _number(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def picture(result: dict[str, Any], file: Path) -> None:
    """One bar per system, its runs as dots."""
    from matplotlib.figure import Figure

    rows, (name, words, _) = numbers(result), main_number(result)
    shown = {system: row["values"][name] for system, row in rows.items() if name in row["values"]}
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    for place, (system, values) in enumerate(shown.items()):
        axes.barh(place, median(values), color="#1b6ca8" if system.startswith("tiltyard") else "#b9c4cc")
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        axes.annotate(f" {_number(median(values))}", (max(values), place), va="center")
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel(words)
    axes.set_title(result["title"], fontsize="small", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
