"""events.jsonl: what happened to a run, one sentence per line, append only. Measurements are in metrics.jsonl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.run.folder import Run

# fmt: off
KINDS = (
    "created", "submitted", "started", "saved", "evaluated", "stopped", "requeued", "finished", "failed", "resumed",
    "recovered", "forked", "exploited", "changed", "warning",
)
# fmt: on


def event_line(kind: str, sentence: str, **facts: Any) -> str:
    """A line {time, kind, sentence, ...facts}. The sentence is for people, `facts` are for programs."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of event {kind!r}; known: {', '.join(KINDS)}")
    return atomic.to_line({"time": atomic.now(), "kind": kind, "sentence": sentence, **facts})


def log_event(run: Run, kind: str, sentence: str, **facts: Any) -> None:
    """Append an event. Training uses a RunWriter instead, which outlasts a full disk."""
    atomic.append_line(run.events_file, event_line(kind, sentence, **facts))


def read_events(run: Run) -> list[dict[str, Any]]:
    """All complete events, oldest first."""
    return atomic.read_lines(run.events_file)[0]
