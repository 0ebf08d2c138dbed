"""metrics.jsonl: every measurement of a run, one JSON line per record, append only.

    {"env_steps": 4096, "frames": 4096, "updates": 2, "episodes": 31, "seconds": 1.7, "time": ..., "attempt": 1,
     "metrics": {"train/return": 22.5, ...}}
    {"rewind_to": 2048, "attempt": 2}     the run resumed from a checkpoint: earlier records above 2048 are void

Numbers that are not finite are the strings nan, inf and -inf. Trackers copy this file. metric_names.py explains names,
history.py reads the file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.run import atomic
from tiltyard.run.curve import Curve
from tiltyard.run.history import History, path_of

if TYPE_CHECKING:
    from tiltyard.run.folder import Run


def line(record: Mapping[str, Any]) -> str:
    """A record as a line; `time` (seconds since 1970) is added if it is missing."""
    return atomic.to_line({"time": round(time.time(), 3), **record})


def rewind_line(env_steps: int, attempt: int) -> str:
    """The line that marks all records beyond `env_steps` as void: the run continues from there."""
    return atomic.to_line({"rewind_to": env_steps, "attempt": attempt})


def append(where: Run | Path, record: Mapping[str, Any]) -> None:
    atomic.append_line(path_of(where), line(record))


def rewind(where: Run | Path, env_steps: int, attempt: int) -> None:
    atomic.append_line(path_of(where), rewind_line(env_steps, attempt))


def read(where: Run | Path) -> list[dict[str, Any]]:
    """The valid records, oldest first, all in memory: for small files. `History` answers questions about large ones."""
    return list(History(where).records())


def series(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Env steps and values of one metric, from the records that have it."""
    pairs = [
        (int(record["env_steps"]), float(record["metrics"][name])) for record in records if name in record["metrics"]
    ]
    return [steps for steps, _ in pairs], [value for _, value in pairs]


def curve(where: Run | Path, name: str) -> Curve:
    """One metric over env steps."""
    return History(where).curve(name)


# ---------------------------------------------------------------------------------------------- where the time goes


def seconds_covered(since: float, env_steps: int, found: Mapping[str, float]) -> float:
    """The wall time that a record's shares are of: the env steps it covers over its env steps per second."""
    speed = found.get("speed/env_steps_per_second", 0.0)
    return (env_steps - since) / speed if speed > 0 else 0.0


def time_shares(records: Iterable[Mapping[str, Any]], whose: str = "time") -> dict[str, float]:
    """Where the wall time of all these records went: each counts by the seconds it covers, so the sum is 1.

    `whose` is "time" for the learner's process, "workers" for theirs.
    """
    spent: dict[str, float] = {}
    for record in records:
        seconds = seconds_covered(record["since"], record["env_steps"], record["metrics"])
        for name, share in record["metrics"].items():
            if name.startswith(f"{whose}/") and name != "workers/restarts":
                part = name.removeprefix(f"{whose}/")
                spent[part] = spent.get(part, 0.0) + share * seconds
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items()} if 0 < total < math.inf else {}


def percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares of one whole as whole percents that add up to 100: what is left goes to the largest remainders."""
    found = {part: math.floor(100 * share) for part, share in shares.items()}
    by_remainder = sorted(shares, key=lambda part: found[part] - 100 * shares[part])
    for part in by_remainder[: 100 - sum(found.values())]:
        found[part] += 1
    return found
