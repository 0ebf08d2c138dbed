"""Split n items into k parts: every item is in exactly one part, and sizes differ by at most one.

The only place that splits work: for packing, encoding, converting, loaders with several processes and array tasks.
"""

from __future__ import annotations


def part(items: int, parts: int, index: int) -> range:
    """The items of one part. With fewer items than parts, some parts are empty."""
    if items < 0 or parts < 1 or not 0 <= index < parts:
        raise ValueError(f"no part {index} of {items} items in {parts} parts")
    return range(items * index // parts, items * (index + 1) // parts)


def parts(items: int, count: int) -> list[range]:
    """All parts, in order."""
    return [part(items, count, index) for index in range(count)]
