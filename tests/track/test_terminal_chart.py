"""Terminal charts: positions of dots, and charts of every size and with all kinds of numbers."""

from __future__ import annotations

import math
import random

import pytest

from tests.counts import count
from tiltyard.track.terminal_chart import curve, nice_number, progress_bar, share_bar


def dots(rows, gutter):
    """Return the (x, y) dots of a chart without marks, with y counted from the top."""
    bits = {1: (0, 0), 2: (0, 1), 4: (0, 2), 64: (0, 3), 8: (1, 0), 16: (1, 1), 32: (1, 2), 128: (1, 3)}
    found = set()
    for r, row in enumerate(rows):
        for c, character in enumerate(row.plain[gutter:]):
            value = ord(character) - 0x2800
            if 0 < value < 256:
                found |= {(2 * c + dx, 4 * r + dy) for bit, (dx, dy) in bits.items() if value & bit}
    return found


def test_straight_line_goes_from_the_lower_left_to_the_upper_right_corner():
    rows = curve([(x, x) for x in range(1000)], [], width=26, height=4)
    gutter = rows[0].plain.index("┤") + 1
    found = dots(rows, gutter)
    columns = 2 * (26 - gutter)
    assert (0, 15) in found and (columns - 1, 0) in found
    heights = [sorted(y for x, y in found if x == column) for column in range(columns)]
    assert all(heights), "every column has a dot"
    assert [h[0] for h in heights] == sorted((h[0] for h in heights), reverse=True)


def test_scale_shows_the_highest_and_the_lowest_value():
    rows = curve([(0, -12.5), (10, 475.0)], [], width=40, height=5)
    assert rows[0].plain.strip().startswith("475 ┤")
    assert rows[-1].plain.strip().startswith("-12.5 ┤")


def test_marks_are_drawn_over_the_line():
    rows = curve([(0, 0.0), (100, 1.0)], [(100, 1.0)], width=40, height=5)
    assert rows[0].plain.endswith("◆")
    assert sum(row.plain.count("◆") for row in rows) == 1


def test_empty_chart_has_a_message():
    assert any("no finished episode yet" in row.plain for row in curve([], [(5, math.nan)], 40, 5))


def test_charts_of_any_numbers_have_the_given_size():
    random.seed(0)
    values = [0.0, -1e300, 1e300, 1e-300, math.nan, math.inf, -math.inf, 3.0, 475.0]
    for _ in range(count(2000)):
        width, height = random.randint(20, 120), random.randint(2, 12)
        line = [(random.randint(0, 10**9), random.choice(values)) for _ in range(random.randint(0, 300))]
        marks = [(random.randint(0, 10**9), random.choice(values)) for _ in range(random.randint(0, 5))]
        rows = curve(sorted(line), sorted(marks), width, height)
        assert len(rows) == height
        assert max(row.cell_len for row in rows) <= max(width, 23)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (475.0, "475"), (12.345, "12.3"), (0.12345, "0.123"), (-122.04, "-122"), (100.0, "100"), (12345.6, "12,346"),
     (1.5e9, "1.5e+09"), (1e-7, "1e-07"), (math.nan, "nan"), (-math.inf, "-inf"), (1000.0, "1,000")],
)  # fmt: skip
def test_numbers_are_formatted_briefly(value, text):
    assert nice_number(value) == text


@pytest.mark.parametrize("fraction", [-1, 0, 0.001, 0.5, 0.999, 1, 7])
def test_progress_bar_has_the_given_width(fraction):
    bar = progress_bar(fraction, 20)
    assert bar.cell_len == 20
    assert bar.plain.count("█") == (20 if fraction >= 1 else int(max(0, fraction) * 20))


def test_shares_fill_the_bar_exactly():
    bar = share_bar([(0.333, "a", "red"), (0.333, "b", "blue"), (0.334, "c", "green"), (0.0, "d", "red")], 31).plain
    assert len(bar) == 31
    assert [bar.count(glyph) for glyph in "abcd"] == [10, 11, 10, 0]
    assert share_bar([(0.0, "a", "red")], 10).plain == ""
