"""Plot the learning curve of a run from metrics.jsonl. Also the style of all plots, with matplotlib.

line       train/return, the mean of the last 100 training episodes
diamonds   eval/return, with a band from eval/return_low to eval/return_high (95 %)
dashes     stop.return, if it is set
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiltyard.errors import TiltyardError, UseError
from tiltyard.run.curve import Curve, Points
from tiltyard.run.folder import Run, find
from tiltyard.run.history import History

INK, SOFT, GRID = "#22262b", "#6b7280", "#e5e7eb"
_TRAINING, _EVALUATION = "#2563eb", "#d97706"
_KINDS = ("png", "svg", "pdf")
_POINTS = 4000  # most points of a curve; of more, the lowest and highest of each group are drawn


def plot(source: Run | str | Path, out: Path | str) -> Path:
    """Plot the learning curve of a run to `out` (png, svg or pdf by its suffix) and return its path."""
    out, run = Path(out), source if isinstance(source, Run) else find(source)
    require_matplotlib()
    kind = out.suffix.lstrip(".").lower()
    if kind not in _KINDS:
        raise UseError(f"{out} is not an image file", "use a name that ends with " + ", ".join("." + k for k in _KINDS))
    history = History(run)
    if not history.curve("train/return") and not history.curve("eval/return"):
        hint = "train longer, or watch it with: tiltyard logs -f"
        raise UseError(f"{run.folder} has no return to plot yet: no finished episode and no evaluation", hint)
    return save(_draw(run, history), out, "choose another place")


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UseError("a plot needs the package matplotlib, which is not installed", "pip install 'tiltyard[plot]'")


def new_figure(
    title: str, width: float = 8.0, height: float = 4.5, ratios: Sequence[float] = (1,)
) -> tuple[Any, list[Any]]:
    """A figure and its panels, one below the other. Not through pyplot: no display, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")
    axes = list(figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0])
    axes[0].set_title(plain(title), loc="left", color=INK, fontsize=12)
    for each in axes:
        each.tick_params(colors=SOFT, length=0)
        each.set_axisbelow(True)
        for side, spine in each.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(GRID)
    return figure, axes


def plain(text: str) -> str:
    """Escape $, which matplotlib reads as the start of a formula."""
    return text.replace("$", r"\$")


def save(figure: Any, out: Path, hint: str) -> Path:
    """Write a figure atomically, in the format of its suffix."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, format=out.suffix.lstrip(".").lower())
        part.replace(out)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise TiltyardError(f"{out} could not be written: {error.strerror}", hint) from error
    return out


def _ends(curve: Curve, means: Points) -> list[float]:
    """One end of the intervals of evaluations; a mean without an interval is its own end. Between the points of a
    thinned curve are straight lines."""
    import numpy as np

    known = dict(curve.points(_POINTS))
    if len(known) == curve.size:
        return [known.get(step, mean) for step, mean in means]
    return list(np.interp([step for step, _ in means], list(known), list(known.values())))


def _draw(run: Run, history: History) -> Any:
    from matplotlib.ticker import EngFormatter

    experiment = run.experiment()
    training = history.curve("train/return").points(_POINTS)
    evaluated = history.curve("eval/return").points(_POINTS)
    figure, (axes,) = new_figure(f"{experiment.env.id}   {run.id}")
    if training:
        axes.plot(
            *zip(*training, strict=True),
            color=_TRAINING,
            linewidth=1.8,
            label="training, mean of the last 100 episodes",
        )
    if evaluated:
        steps, means = zip(*evaluated, strict=True)
        low, high = (_ends(history.curve(f"eval/return_{end}"), evaluated) for end in ("low", "high"))
        banded = any(a != b for a, b in zip(low, high, strict=True))
        if banded and len(steps) > 1:
            axes.fill_between(steps, low, high, color=_EVALUATION, alpha=0.18, linewidth=0)
        elif banded:
            axes.errorbar(steps, means, yerr=[[means[0] - low[0]], [high[0] - means[0]]], color=_EVALUATION, capsize=4)
        label = "evaluation, with 95 % interval" if banded else "evaluation"
        axes.plot(steps, means, color=_EVALUATION, linewidth=1.4, marker="D", markersize=4.5, label=label)
    if experiment.stop.return_ is not None:
        axes.axhline(experiment.stop.return_, color=SOFT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"goal {experiment.stop.return_:g}",
            (0, experiment.stop.return_),  # on the left, where the curve is still low
            xycoords=("axes fraction", "data"),
            xytext=(4, 4),
            textcoords="offset points",
            color=SOFT,
            fontsize=9,
        )
    axes.set_xlabel("env steps", color=SOFT)
    axes.set_ylabel("return", color=SOFT)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.margins(x=0.01, y=0.08)
    axes.legend(loc="best", frameon=False, labelcolor=INK, fontsize=9)
    return figure
