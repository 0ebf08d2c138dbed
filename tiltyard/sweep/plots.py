"""Plots of a sweep:

curves.png       interquartile mean of the metric over the seeds of each of the best points, and its bootstrapped 95 %
                 interval as a band
importance.png   share of the variance between points that each setting explains by itself
parallel.png     one line per point through its settings to its value; better ones are darker
lineage.png      for a population: each member's scores, copies and settings over env steps
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from tiltyard.config.fields import is_number
from tiltyard.config.search_space import Span
from tiltyard.errors import UseError
from tiltyard.run.curve import Points
from tiltyard.run.history import History
from tiltyard.run.metrics import curve
from tiltyard.sweep.pbt.lineage import Lineage, read
from tiltyard.sweep.report import SweepSummary, brief, importance, shown
from tiltyard.sweep.results import Group, Row, quartile_weights
from tiltyard.sweep.space import dimensions
from tiltyard.track.plot import GRID, INK, SOFT, new_figure, plain, require_matplotlib, save

_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
_RESAMPLES = 500
_STEPS = 200  # most points of a drawn curve
_POINTS = 4000  # most points of a trial's curve that it is drawn from
_LABELS = 12  # most choices that an axis labels
_PANELS = 4  # most settings of a population that are drawn


def draw(report: SweepSummary, out: Path) -> list[Path]:
    """Draw the plots that the sweep has data for into a folder; returns their files."""
    require_matplotlib()
    groups = [group for group in report.groups if group.value is not None]
    if not groups:
        hint = f"wait for one: tiltyard sweep watch {report.sweep.typed}"
        raise UseError(f"no trial of {report.sweep.id} has recorded {report.plan.metric.name} yet", hint)
    made = {"curves": _curves(report, groups)}
    shares = importance(report)
    if shares:
        made["importance"] = _importance(report, shares)
    if report.plan.search == "population":
        made["lineage"] = _lineage(report)
    elif report.keys and len(groups) > 1:
        made["parallel"] = _parallel(report, groups)
    return [save(figure, out / f"{name}.png", "choose a folder with --out") for name, figure in made.items()]


# ---------------------------------------------------------------------------------------------- curves


def _curves(report: SweepSummary, groups: list[Group]) -> Any:
    metric = report.plan.metric.name
    figure, (axes,) = new_figure(f"{metric}   {report.sweep.id}")
    best = groups[: len(_COLOURS)]
    for colour, group in zip(_COLOURS, best, strict=False):
        known = [row.folder for row in group.rows if row.folder is not None and row.value is not None]
        found = [curve(folder, metric).points(_POINTS) for folder in known]
        steps, middle, low, high = bands(found)
        words = ", ".join(f"{key.rpartition('.')[2]} {brief(value)}" for key, value in group.settings.items())
        if report.plan.search == "population":  # its settings change: see lineage.png
            words = f"member {group.rows[0].trial.number}"
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, middle, color=colour, linewidth=1.8, marker=marker, label=plain(words) or "the experiment")
        if len(found) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    seeds = max(len(group.values) for group in best)
    caption = f"interquartile mean of {seeds} seeds and its 95 % interval" if seeds > 1 else "one seed each"
    if len(groups) > len(best):
        caption += f"; the best {len(best)} of {len(groups)} combinations"
    axes.margins(x=0.01, y=0.08)
    return _over_env_steps(figure, [axes], caption, 9)


def _over_env_steps(figure: Any, panels: list[Any], caption: str, font: int) -> Any:
    """The figure with its axis of env steps, grids, and a legend in the first panel."""
    from matplotlib.ticker import EngFormatter

    for panel in panels:
        panel.grid(axis="y", color=GRID, linewidth=0.8)
    panels[-1].set_xlabel(f"env steps   ({caption})", color=SOFT)
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].legend(loc="best", frameon=False, labelcolor=INK, fontsize=font)
    return figure


def bands(found: list[Points]) -> tuple[list[int], list[float], list[float], list[float]]:
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
    weights = np.array(quartile_weights(count))[:, None]

    def middle(part: Any) -> Any:
        return (np.sort(part, axis=-2) * weights).sum(axis=-2) / weights.sum()

    rng = np.random.default_rng(0)
    drawn = middle(values[rng.integers(0, count, (_RESAMPLES, count))])  # [resamples, steps]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return steps, middle(values).tolist(), low.tolist(), high.tolist()


# ---------------------------------------------------------------------------------------------- settings


def _importance(report: SweepSummary, found: list[tuple[str, float]]) -> Any:
    figure, (axes,) = new_figure(
        f"importance for {report.plan.metric.name}   {report.sweep.id}", height=1.3 + 0.4 * len(found)
    )
    names = [plain(name) for name, _ in found][::-1]
    values = [100 * share for _, share in found][::-1]
    bars = axes.barh(names, values, color=_COLOURS[0], height=0.55)
    axes.bar_label(bars, labels=[f"{value:.0f} %" for value in values], padding=4, color=INK, fontsize=9)
    axes.set_xlim(0, max(10.0, *values) * 1.12)
    axes.set_xlabel("share of the variance between combinations that the setting alone explains, %", color=SOFT)
    axes.tick_params(axis="y", colors=INK)
    return figure


def _parallel(report: SweepSummary, groups: list[Group]) -> Any:
    from matplotlib import colormaps

    keys = report.keys
    spans = {} if report.plan.points else {each.key: each for each in dimensions(report.plan) if isinstance(each, Span)}
    figure, (axes,) = new_figure(
        f"every combination   {report.sweep.id}", width=max(8.0, 2.0 + 1.6 * len(keys)), height=4.8
    )
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
        axes.axvline(x, color=GRID, linewidth=1.2, zorder=0)
        marks = places[key][1] if key in places else [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")]
        for y, word in marks:
            label = axes.annotate(plain(word), (x, y), (5 if x < len(keys) else 6, 0), textcoords="offset points")
            label.set(ha="left", va="center", color=INK, fontsize=8)
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8})
    axes.set_xticks(range(len(names)), [plain(name) for name in names], color=INK, fontsize=9)
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
    numbers = all(map(is_number, found.values()))
    words = sorted(found, key=lambda word: (float(found[word]), word)) if numbers else sorted(found)
    heights = {word: i / (len(words) - 1) if len(words) > 1 else 0.5 for i, word in enumerate(words)}
    named = [(height, brief(found[word])[:24]) for word, height in heights.items()]
    return (lambda value: heights[shown(value)]), named if len(named) <= _LABELS else [named[0], named[-1]]


# ---------------------------------------------------------------------------------------------- populations


def _lineage(report: SweepSummary) -> Any:
    """Scores over env steps with an arrow for each copy, and below them the settings that vary."""
    history, metric = read(report.sweep), report.plan.metric.name
    moved = [key for key in report.keys if all(is_number(row.trial.settings[key]) for row in report.rows)][:_PANELS]
    ratios = [2.4, *(1.0 for _ in moved)]
    figure, panels = new_figure(f"{metric}   {report.sweep.id}", 8.0, 3.6 + 1.5 * len(moved), ratios)
    for row in report.rows:
        colour = _COLOURS[(row.trial.number - 1) % len(_COLOURS)]
        for settings, found in _lives(history, row, metric):
            label = f"member {row.trial.number}" if settings is history.first[row.trial.number] else None
            panels[0].plot([x for x, _ in found], [y for _, y in found], color=colour, linewidth=1.6, label=label)
            for panel, key in zip(panels[1:], moved, strict=True):
                panel.plot([found[0][0], found[-1][0]], [settings[key]] * 2, color=colour, linewidth=2.2)
    for copy in history.copies:
        colour = _COLOURS[(copy.member - 1) % len(_COLOURS)]
        if copy.score is not None and copy.source_score is not None:
            ends = (copy.counts_from, copy.source_score), (copy.env_steps, copy.score)
            panels[0].annotate("", *ends, arrowprops={"arrowstyle": "->", "color": colour, "linestyle": ":"})
    logged = {each.key for each in dimensions(report.plan) if isinstance(each, Span) and each.log}
    for panel, key in zip(panels[1:], moved, strict=True):
        panel.set_title(plain(key), loc="left", color=SOFT, fontsize=9)
        panel.set_yscale("log" if key in logged else "linear")
    return _over_env_steps(figure, panels, "arrow: the member became a copy", 8)


def _lives(lineage: Lineage, row: Row, metric: str) -> list[tuple[dict[str, Any], Points]]:
    """The settings of a member from copy to copy, and its curve with each."""
    if row.folder is None:
        return []
    history, copies = History(row.folder), [copy for copy in lineage.copies if copy.member == row.trial.number]
    settings = [lineage.first[row.trial.number], *(copy.after for copy in copies)]
    ends = [-math.inf, *(copy.attempt for copy in copies), math.inf]
    curves = [history.curve(metric, *attempts).points(_POINTS) for attempts in pairwise(ends)]
    return [(each, points) for each, points in zip(settings, curves, strict=True) if points]
