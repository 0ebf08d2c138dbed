"""Every setting as a table and as a JSON schema for editors; both read off the settings classes, never written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiltyard.config.experiment import Experiment, Linear, Settings
from tiltyard.config.shape import Section, fields
from tiltyard.refs import short

Row = tuple[str, str, str, str]


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of an experiment file: everything optional, short forms allowed."""
    return {}


def describe() -> list[Row]:
    """(dotted name, type, default, meaning) of every setting, in the order of the file."""
    return []
