"""Child processes that share an evaluation: each performs one task with `evaluate.answer`."""

from __future__ import annotations

import sys
from typing import Any

from tiltyard.processes.child import Parent, children, serve


def run_workers(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One child per task, answers in order. The error of a child that fails is raised, and the others are ended."""
    hint = "the env or the system ended it; its output is above"
    with children("tiltyard.evaluation.workers", tasks, "evaluation worker", hint) as started:
        return [child.recv() for child in started]


def _perform(task: dict[str, Any], parent: Parent) -> dict[str, Any]:
    from tiltyard.evaluation.evaluate import answer  # slow: the parent is already watched

    return answer(task)


if __name__ == "__main__":
    serve(int(sys.argv[1]), _perform)
