"""Draws the console's live panel: progress, learning curve, returns, speed, where the time goes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from tiltyard.run import metrics as metrics_file
from tiltyard.track.console import amount_text, clock, nearest_budget, seconds_left
from tiltyard.track.terminal_chart import curve, nice_number, progress_bar, share_bar

if TYPE_CHECKING:
    from tiltyard.track.console import Console

_PART_COLOURS = {"env": "blue", "inference": "magenta", "learn": "green", "save": "yellow", "eval": "cyan"}
_SHADES = "█▓▒░▚▞"


def draw(console: Console) -> Panel:
    """The panel as it is now. The refreshing thread calls this, so it only reads."""
    # Four columns stay free for the ^C that terminals echo: one that wraps would shift every later redraw.
    width = max(30, min(110, console.rich.width - 4) - 4)
    height = max(3, min(8, console.rich.height - 9))
    rows: list[Text] = [*_progress_rows(console, width), Text()]
    rows += curve(list(console.returns), list(console.evaluations), width, height)
    rows += [Text(), _return_row(console, width), *_time_rows(console, width)]
    for row in rows:
        row.no_wrap = True
        row.overflow = "ellipsis"
    about = f"{console.experiment.env.id} · {console.experiment.algo.id} · seed {console.experiment.seed}"
    return Panel(
        Group(*rows),
        title=Text(console.run_id, style="bold"),
        title_align="left",
        subtitle=Text(about, style="dim"),
        subtitle_align="right",
        width=width + 4,
        border_style="dim",
    )


def _progress_rows(console: Console, width: int) -> list[Text]:
    stop, now = console.experiment.stop, console.progress
    name, amount, fraction = nearest_budget(stop, now)
    elapsed = clock(now.seconds + (time.monotonic() - console.updated if console.is_open else 0.0))
    left = seconds_left(stop, console.recent.earlier, now)
    times = f"{elapsed}" + (f" · {clock(left)} left" if left is not None and fraction < 1 else "")
    if not name:
        return [Text(f"{now.env_steps:,} env steps · {times}")]
    bar = progress_bar(fraction, max(10, width - 5)).append(f" {fraction:4.0%}", style="bold")
    reached = clock(now.seconds) if name == "seconds" else f"{int(getattr(now, name)):,}"
    row = Text(f"{reached} of {amount_text(name, amount)}")
    space = max(1, width - row.cell_len - len(times))
    return [bar, row.append(" " * space).append(times)]


def _return_row(console: Console, width: int) -> Text:
    row = Text().append("return ", style="bold")
    if "train/return" in console.metrics:
        row.append("━ ", style="cyan").append(f"training {nice_number(console.metrics['train/return'])}")
        row.append(" (last 100 episodes)" if width > 90 else "", style="dim")
    else:
        row.append("no finished episode yet", style="dim")
    if console.evaluations:
        row.append("   ◆ ", style="yellow").append(f"evaluation {console.evaluation_text()}")
    goal = console.experiment.stop.return_
    return row if goal is None else row.append(f"   goal {nice_number(goal)}", style="dim")


def _time_rows(console: Console, width: int) -> list[Text]:
    speed = console.recent.per_second()
    rows = [Text().append("speed  ", style="bold").append(f"{speed:,.0f} env steps/s")]
    if console.progress.frames > console.progress.env_steps:
        rows[0].append(f" · {speed * console.progress.frames / console.progress.env_steps:,.0f} frames/s")
    rows[0].append(f" · {console.progress.updates:,} updates · {console.progress.episodes:,} episodes", style="dim")
    shares = console.shares()
    if shares:
        # Without colours the segments differ by their shade alone.
        glyphs = _SHADES if console.rich.no_color else "█" * len(_SHADES)
        segments = [
            (share, glyphs[i % len(glyphs)], _PART_COLOURS.get(part, "bright_black"))
            for i, (part, share) in enumerate(shares)
        ]
        rows.append(Text().append("time   ", style="bold").append_text(share_bar(segments, width - 7)))
        legend = Text("       ")
        percents = metrics_file.percents(dict(shares))
        for (part, percent), (_, glyph, colour) in zip(percents.items(), segments, strict=True):
            if percent:
                legend.append(glyph, style=colour).append(f" {part} {percent}%   ")
        rows.append(legend)
    if console.bound():
        rows.append(Text("       " + console.bound(), style="dim"))
    return rows
