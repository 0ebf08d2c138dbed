"""Finds the place of a damage in the file of an episode whose checksum is wrong.

row group 3                 a page of it does not match the page's own checksum
footer                      it cannot be read, or does not fit to the rest of the file
footer or page headers      neither: what else there is has no checksum of its own
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from tiltyard.data.episode_file import EpisodeFile
from tiltyard.errors import TiltyardError


def locate(content: bytes) -> str:
    """The place of a damage in an episode's file: `row group 3`, if a page checksum tells."""
    try:
        opened = EpisodeFile(content, "")
        if not _adds_up(content):
            return "footer"
        groups = opened.damaged_row_groups()
    except TiltyardError:
        return "footer"
    if not groups:
        return "footer or page headers"
    return f"row group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"


def _adds_up(content: bytes) -> bool:
    """Whether the pieces that the footer names follow each other, from the beginning of the file to the footer."""
    try:
        known = pq.read_metadata(pa.BufferReader(content))
        groups = [known.row_group(index) for index in range(known.num_row_groups)]
        pieces = [group.column(index) for group in groups for index in range(known.num_columns)]
        place = 4
        for piece in pieces:
            if piece.data_page_offset != place:
                return False
            place += piece.total_compressed_size
        return bool(place == len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
    except (OSError, pa.ArrowException, ValueError, OverflowError):
        return False
