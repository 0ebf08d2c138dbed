"""Child processes that share an evaluation, one task each (`measure.answer`). How they talk is children.py."""

from __future__ import annotations

import sys
from typing import Any

from tiltyard.processes.child import Parent, children, serve


def share_out(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One child per task, answers in order. A child that fails speaks for all: its sentence is raised, the rest end."""
    hint = "the env or the system ended it; what it said is above"
    with children("tiltyard.evaluation.workers", tasks, "evaluation worker", hint) as started:
        return [child.recv() for child in started]


def _perform(task: dict[str, Any], parent: Parent) -> dict[str, Any]:
    from tiltyard.evaluation.evaluate import answer  # torch takes seconds to import: the parent is watched by now

    return answer(task)


if __name__ == "__main__":
    serve(int(sys.argv[1]), _perform)
