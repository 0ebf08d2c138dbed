"""Spaces as values that a channel can send."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces

from tiltyard.envs.spaces import is_text


def space_parts(space: spaces.Space[Any] | None) -> Any:
    """A space as a value that can be sent; None for a kind that spaces.py and actions.py do not know."""
    match space:
        case spaces.Box():
            return "box", space.low, space.high, np.dtype(space.dtype).str
        case spaces.Discrete():
            return "discrete", int(space.n), int(space.start)
        case spaces.MultiDiscrete():
            return "multi_discrete", space.nvec, space.start
        case spaces.MultiBinary():
            return "multi_binary", space.n if isinstance(space.n, int) else list(space.shape)
        case spaces.Text():
            return "text", space.max_length, space.min_length, "".join(sorted(space.character_set))
        case spaces.Dict():
            return "dict", [(key, space_parts(inner)) for key, inner in space.spaces.items()]
        case spaces.Tuple():
            return "tuple", [space_parts(inner) for inner in space.spaces]
        case spaces.Space() if is_text(space):  # another class of strings: only that it is text matters here
            return "text", 1, 0, ""
    return None


def space_from_parts(parts: Any) -> Any:
    """The inverse of space_parts; None for None."""
    match parts:
        case "box", low, high, dtype:
            return spaces.Box(low, high, low.shape, np.dtype(dtype).type)
        case "discrete", options, start:
            return spaces.Discrete(options, start=start)
        case "multi_discrete", options, start:
            return spaces.MultiDiscrete(options, start=start)
        case "multi_binary", size:
            return spaces.MultiBinary(size)
        case "text", longest, shortest, letters:
            return spaces.Text(longest, min_length=shortest, charset=letters)
        case "dict", inner:
            return spaces.Dict(OrderedDict((key, space_from_parts(each)) for key, each in inner))
        case "tuple", inner:
            return spaces.Tuple([space_from_parts(each) for each in inner])
    return None
