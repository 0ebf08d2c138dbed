"""Plots of a sweep:

curves.png       interquartile mean of the metric over the seeds of each of the best points, and its bootstrapped 95 %
                 interval as a band
importance.png   share of the variance between points that each setting explains by itself
parallel.png     one line per point through its settings to its value; better ones are darker
lineage.png      for a population: each member's scores, copies and settings over env steps
"""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiltyard.config.fields import is_number
from tiltyard.config.search_space import Span
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import metrics
from tiltyard.sweep.pbt.lineage import Lineage, read
from tiltyard.sweep.report import SweepSummary, brief, importance, shown
from tiltyard.sweep.results import Curve, Group, Row, curve
from tiltyard.sweep.space import dimensions

_INK, _SOFT, _GRID = "#22262b", "#6b7280", "#e5e7eb"
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
_RESAMPLES = 500
_STEPS = 200  # most points of a drawn curve
_LABELS = 12  # most choices that an axis labels
_PANELS = 4  # most settings of a population that are drawn


def draw(report: SweepSummary, out: Path) -> list[Path]:
    """Draw the plots that the sweep has data for into a folder; returns their files."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UseError("a plot needs the package matplotlib, which is not installed", "pip install 'tiltyard[plot]'")
    groups = [group for group in report.groups if group.value is not None]
    if not groups:
        raise UseError(
            f"no trial of {report.sweep.id} has recorded {report.plan.metric.name} yet",
            f"wait for one: tiltyard sweep watch {report.sweep.typed}",
        )
    made = [_saved(_curves(report, groups), out / "curves.png")]
    shares = importance(report)
    if shares:
        made.append(_saved(_importance(report, shares), out / "importance.png"))
    if report.plan.search == "population":
        made.append(_saved(_lineage(report), out / "lineage.png"))
    elif report.keys and len(groups) > 1:
        made.append(_saved(_parallel(report, groups), out / "parallel.png"))
    return made


def _saved(figure: Any, out: Path) -> Path:
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, format="png")
        part.replace(out)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise TiltyardError(f"{out} could not be written: {error.strerror}", "choose a folder with --out") from error
    return out


def _plain(text: str) -> str:
    """Escape $, which matplotlib reads as the start of a formula."""
    return text.replace("$", r"\$")


def _figure(title: str, width: float = 8.0, height: float = 4.5) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(_plain(title), loc="left", color=_INK, fontsize=12)
    axes.tick_params(colors=_SOFT, length=0)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    return figure, axes


# ---------------------------------------------------------------------------------------------- curves


def _curves(report: SweepSummary, groups: list[Group]) -> Any:
    from matplotlib.ticker import EngFormatter

    metric = report.plan.metric.name
    figure, axes = _figure(f"{metric}   {report.sweep.id}")
    best = groups[: len(_COLOURS)]
    for colour, group in zip(_COLOURS, best, strict=False):
        found = [curve(row.folder, metric) for row in group.rows if row.folder is not None and row.value is not None]
        steps, middle, low, high = bands(found)
        words = ", ".join(f"{key.rpartition('.')[2]} {brief(value)}" for key, value in group.settings.items())
        if report.plan.search == "population":  # its settings change: see lineage.png
            words = f"member {group.rows[0].trial.number}"
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, middle, color=colour, linewidth=1.8, marker=marker, label=_plain(words) or "the experiment")
        if len(found) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    seeds = max(len(group.values) for group in best)
    caption = f"interquartile mean of {seeds} seeds and its 95 % interval" if seeds > 1 else "one seed each"
    if len(groups) > len(best):
        caption += f"; the best {len(best)} of {len(groups)} combinations"
    axes.set_xlabel(f"env steps   ({caption})", color=_SOFT)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.margins(x=0.01, y=0.08)
    axes.legend(loc="best", frameon=False, labelcolor=_INK, fontsize=9)
    return figure


def bands(found: list[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Env steps, interquartile mean over the curves, and the ends of its bootstrapped 95 % interval, over the env steps
    that all curves cover. A curve keeps its value until its next one."""
    import numpy as np

    first, last = max(each[0][0] for each in found), min(each[-1][0] for each in found)
    steps = sorted({step for each in found for step, _ in each if first <= step <= last}) or [last]
    steps = [steps[round(i * (len(steps) - 1) / (_STEPS - 1))] for i in range(_STEPS)] if len(steps) > _STEPS else steps
    rows = []
    for each in found:
        known = np.array([step for step, _ in each])
        places = np.maximum(0, np.searchsorted(known, steps, side="right") - 1)
        rows.append(np.array([value for _, value in each])[places])
    values = np.stack(rows)  # [curves, steps]
    count = len(found)
    edges = np.clip(np.arange(count + 1), count / 4, 3 * count / 4)
    weights = np.diff(edges)[:, None]

    def middle(part: Any) -> Any:
        return (np.sort(part, axis=-2) * weights).sum(axis=-2) / weights.sum()

    rng = np.random.default_rng(0)
    drawn = middle(values[rng.integers(0, count, (_RESAMPLES, count))])  # [resamples, steps]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return steps, middle(values).tolist(), low.tolist(), high.tolist()


# ---------------------------------------------------------------------------------------------- settings


def _importance(report: SweepSummary, found: list[tuple[str, float]]) -> Any:
    figure, axes = _figure(
        f"importance for {report.plan.metric.name}   {report.sweep.id}", height=1.3 + 0.4 * len(found)
    )
    names = [_plain(name) for name, _ in found][::-1]
    values = [100 * share for _, share in found][::-1]
    bars = axes.barh(names, values, color=_COLOURS[0], height=0.55)
    axes.bar_label(bars, labels=[f"{value:.0f} %" for value in values], padding=4, color=_INK, fontsize=9)
    axes.set_xlim(0, max(10.0, *values) * 1.12)
    axes.set_xlabel("share of the variance between combinations that the setting alone explains, %", color=_SOFT)
    axes.tick_params(axis="y", colors=_INK)
    return figure


def _parallel(report: SweepSummary, groups: list[Group]) -> Any:
    from matplotlib import colormaps

    keys = report.keys
    spans = {} if report.plan.points else {each.key: each for each in dimensions(report.plan) if isinstance(each, Span)}
    figure, axes = _figure(f"every combination   {report.sweep.id}", width=max(8.0, 2.0 + 1.6 * len(keys)), height=4.8)
    places = {key: _places(key, groups, spans.get(key)) for key in keys}
    values = [group.value or 0.0 for group in groups]
    low, high = min(values), max(values)
    colours = colormaps["viridis_r"]
    for group in sorted(groups, key=lambda each: report.plan.better * (each.value or 0.0)):
        height = ((group.value or 0.0) - low) / (high - low) if high > low else 0.5
        good = height if report.plan.better > 0 else 1 - height
        line = [places[key][0](group.settings.get(key)) for key in keys] + [height]
        axes.plot(range(len(line)), line, color=colours(0.05 + 0.95 * good), linewidth=1.0 + 1.2 * good, alpha=0.8)
    names = [*keys, report.plan.metric.name]
    for x, key in enumerate(names):
        axes.axvline(x, color=_GRID, linewidth=1.2, zorder=0)
        marks = places[key][1] if key in places else [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")]
        for y, word in marks:
            side = {"ha": "left", "xytext": (5, 0)} if x < len(keys) else {"ha": "left", "xytext": (6, 0)}
            axes.annotate(
                _plain(word),
                (x, y),
                textcoords="offset points",
                va="center",
                color=_INK,
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
                **side,
            )
    axes.set_xticks(range(len(names)), [_plain(name) for name in names], color=_INK, fontsize=9)
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(keys) + 0.35)
    axes.set_ylim(-0.06, 1.06)
    return figure


def _places(key: str, groups: list[Group], span: Span | None) -> tuple[Any, list[tuple[float, str]]]:
    """A function from a setting's value to its height on the axis, and the labelled heights."""
    if span is not None:

        def scaled(value: Any) -> float:
            return math.log(value) if span.log else float(value)

        low, high = scaled(span.low), scaled(span.high)
        named_shares = (0.0, 1.0) if span.whole else (0.0, 0.5, 1.0)
        names = [(share, brief(span.at(share))) for share in named_shares]
        return (lambda value: (scaled(value) - low) / (high - low)), names
    found: dict[str, Any] = {shown(group.settings.get(key)): group.settings.get(key) for group in groups}
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in found.values())
    words = sorted(found, key=lambda word: (float(found[word]), word)) if numbers else sorted(found)
    heights = {word: i / (len(words) - 1) if len(words) > 1 else 0.5 for i, word in enumerate(words)}
    named = [(height, brief(found[word])[:24]) for word, height in heights.items()]
    return (lambda value: heights[shown(value)]), named if len(named) <= _LABELS else [named[0], named[-1]]


# ---------------------------------------------------------------------------------------------- populations


def _lineage(report: SweepSummary) -> Any:
    """Scores over env steps with an arrow for each copy, and below them the settings that vary."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    history, metric = read(report.sweep), report.plan.metric.name
    moved = [key for key in report.keys if all(is_number(row.trial.settings[key]) for row in report.rows)][:_PANELS]
    figure = Figure(figsize=(8.0, 3.6 + 1.5 * len(moved)), dpi=160, facecolor="white", layout="constrained")
    ratios = [2.4, *(1.0 for _ in moved)]
    panels = figure.subplots(1 + len(moved), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    panels[0].set_title(_plain(f"{metric}   {report.sweep.id}"), loc="left", color=_INK, fontsize=12)
    for row in report.rows:
        colour = _COLOURS[(row.trial.number - 1) % len(_COLOURS)]
        for settings, found in _lives(history, row, metric):
            label = f"member {row.trial.number}" if settings is history.first[row.trial.number] else None
            panels[0].plot([x for x, _ in found], [y for _, y in found], color=colour, linewidth=1.6, label=label)
            for panel, key in zip(panels[1:], moved, strict=True):
                panel.plot([found[0][0], found[-1][0]], [settings[key]] * 2, color=colour, linewidth=2.2)
    for copy in history.copies:
        one, colour = copy.exploit, _COLOURS[(copy.exploit.member - 1) % len(_COLOURS)]
        if copy.score is not None and copy.source_score is not None:
            ends = (one.counts_from, copy.source_score), (one.env_steps, copy.score)
            panels[0].annotate("", *ends, arrowprops={"arrowstyle": "->", "color": colour, "linestyle": ":"})
    logged = {each.key for each in dimensions(report.plan) if isinstance(each, Span) and each.log}
    for panel, key in zip(panels[1:], moved, strict=True):
        panel.set_title(_plain(key), loc="left", color=_SOFT, fontsize=9)
        panel.set_yscale("log" if key in logged else "linear")
    for panel in panels:
        panel.tick_params(colors=_SOFT, length=0)
        panel.grid(axis="y", color=_GRID, linewidth=0.8)
        for side, spine in panel.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
    panels[-1].set_xlabel("env steps   (arrow: the member became a copy)", color=_SOFT)
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].legend(loc="best", frameon=False, labelcolor=_INK, fontsize=8)
    return figure


def _lives(history: Lineage, row: Row, metric: str) -> list[tuple[dict[str, Any], Curve]]:
    """The settings of a member from copy to copy, and its curve with each."""
    copies = [copy for copy in history.copies if copy.exploit.member == row.trial.number]
    found: dict[int, Curve] = {}
    for record in metrics.read(row.folder) if row.folder is not None else ():
        if metric in record["metrics"] and math.isfinite(record["metrics"][metric]):
            life = sum(int(record.get("attempt", 0)) > copy.attempt for copy in copies)
            found.setdefault(life, []).append((record["env_steps"], record["metrics"][metric]))
    settings = [history.first[row.trial.number], *(copy.exploit.after for copy in copies)]
    return [(settings[life], curve) for life, curve in sorted(found.items())]
