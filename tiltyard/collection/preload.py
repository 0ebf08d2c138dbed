"""Imported by the fork server: what every worker would else import on its own, also what pyarrow imports late."""

from __future__ import annotations

import numpy as np

from tiltyard.collection import worker
from tiltyard.data.episode_file import encode
from tiltyard.types import Episode

# pyarrow imports pandas, where that is installed, when it converts the first array: half a second per process.
encode(Episode({}, np.zeros((0, 1), np.float32), np.zeros(0, np.float32), False, True, 0), {}, {})

__all__ = ["worker"]
