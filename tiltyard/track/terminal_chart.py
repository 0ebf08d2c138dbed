"""Charts made of characters for the live panel: a curve, a bar of shares. Pure: numbers in, text out.

A braille cell is 2 dots wide and 4 high, so a chart of w x h characters has 2w x 4h dots; bits by dot:

    1  8      bit values of the eight dots; the character is U+2800 plus their sum
    2 16
    4 32
    64 128
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.text import Text

Point = tuple[float, float]

_BITS = ((1, 8), (2, 16), (4, 32), (64, 128))
_BLOCKS = " ▏▎▍▌▋▊▉█"


def nice_number(value: float) -> str:
    """A number in at most seven characters or so: 475, 0.123, -1.25e+09."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 0.001 <= abs(value) < 1e6:
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3g}"


def _bounds(points: Iterable[Point]) -> tuple[float, float]:
    heights = [y for _, y in points]
    low, high = min(heights), max(heights)
    if low == high:  # a flat curve is drawn through the middle
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def _thin(points: Sequence[Point], columns: int, left: float, right: float) -> list[Point]:
    """Mean height per column of dots, so that the cost does not grow with the number of records."""
    span = (right - left) or 1.0
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        column = min(columns - 1, int((x - left) / span * columns))
        total, number = sums.get(column, (0.0, 0))
        sums[column] = (total + y, number + 1)
    return [(column, total / number) for column, (total, number) in sorted(sums.items())]


def curve(
    line: Sequence[Point],
    marks: Sequence[Point],
    width: int,
    height: int,
    *,
    colours: tuple[str, str] = ("cyan", "yellow"),
) -> list[Text]:
    """`line` as connected dots and `marks` as diamonds over it, with the scale on the left; `height` rows of text."""
    line = [p for p in line if math.isfinite(p[1])]
    marks = [p for p in marks if math.isfinite(p[1])]
    everything = [*line, *marks]
    if not everything:
        blank = [Text() for _ in range(height)]
        blank[height // 2] = Text("no finished episode yet", style="dim")
        return blank
    low, high = _bounds(everything)
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    labels = [nice_number(high), nice_number(low)]
    gutter = max(len(label) for label in labels)
    columns = max(4, width - gutter - 2)

    cells = [[0] * columns for _ in range(height)]  # [height, columns] of dot bits

    def dot(x: int, y: int) -> None:
        cells[y // 4][x // 2] |= _BITS[y % 4][x % 2]

    def row(y: float) -> int:
        return round((high - y) / (high - low) * (height * 4 - 1))

    thinned = _thin(line, columns * 2, left, right)
    for index, (x, y) in enumerate(thinned):
        dot(int(x), row(y))
        if index:
            x0, y0 = thinned[index - 1]
            steps = max(int(x - x0), abs(row(y) - row(y0)))
            for step in range(1, steps):
                dot(round(x0 + (x - x0) * step / steps), round(row(y0) + (row(y) - row(y0)) * step / steps))

    spots = {(row(y) // 4, int(x) // 2) for x, y in _thin(marks, columns * 2, left, right)}
    drawn: list[Text] = []
    for r in range(height):
        label = labels[0] if r == 0 else labels[1] if r == height - 1 else ""
        text = Text().append(f"{label:>{gutter}} " + ("┤" if label else "│"), style="dim")
        for c in range(columns):
            if (r, c) in spots:
                text.append("◆", style=colours[1])
            else:
                text.append(chr(0x2800 + cells[r][c]) if cells[r][c] else " ", style=colours[0])
        drawn.append(text)
    return drawn


def progress_bar(fraction: float, width: int) -> Text:
    """A bar filled to an eighth of a character."""
    eighths = int(min(1.0, max(0.0, fraction)) * width * 8)  # full only when done
    full, part = divmod(eighths, 8)
    filled = "█" * full + (_BLOCKS[part] if part else "")
    return Text().append(filled, style="green").append("░" * (width - len(filled)), style="dim")


def share_bar(shares: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Segments of (share, glyph, colour) side by side; the widths add up to `width` exactly."""
    total = sum(share for share, _, _ in shares)
    text = Text()
    reached, drawn = 0.0, 0
    for share, glyph, colour in shares:
        reached += share / total if total else 0.0
        end = round(reached * width)
        text.append(glyph * (end - drawn), style=colour)
        drawn = end
    return text
