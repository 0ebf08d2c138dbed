"""Child processes that share an evaluation: each performs one task with `evaluate.perform`."""

from __future__ import annotations

from typing import Any

from tiltyard.processes.child import Parent, children


def run_workers(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One child per task, answers in order. The error of a child that fails is raised, and the others are ended."""
    hint = "the env or the system ended it; its output is above"
    with children("tiltyard.evaluation.workers:answer", tasks, "evaluation worker", hint) as started:
        return [child.recv() for child in started]


def answer(task: dict[str, Any], parent: Parent) -> dict[str, Any]:
    from tiltyard.evaluation.evaluate import perform

    return perform(task)
