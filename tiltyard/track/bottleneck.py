"""Explain in one sentence what limits the speed of training, from shares of time. Pure.

time      shares of the learner's wall time: env, inference, learn, wait, transfer, read, eval, save, other
workers   shares of the workers' time: env, inference, wait, other; empty when there are none
"""

from __future__ import annotations

from collections.abc import Mapping

MAJORITY = 0.5
WORTHWHILE = 0.2  # of training time: less sampling than this is not worth moving to workers
ASIDE = 0.3  # of all time: evaluations or saves above this are reported first


def bottleneck(time: Mapping[str, float], workers: Mapping[str, float]) -> str:
    """One line: what limits the speed, by how much, and what to try; empty if no time was measured."""
    for part, words, hint in (
        ("eval", "evaluations", "raise eval.every, or lower eval.episodes"),
        ("save", "writing checkpoints", "save less often: save.seconds, save.env_steps"),
    ):
        if time.get(part, 0.0) >= ASIDE:
            return f"{part}-bound: {_percent(time[part])} of the time is {words}; {hint}"
    training = {part: share for part, share in time.items() if part not in ("eval", "save")}
    whole = sum(training.values())
    if not whole:
        return ""
    shares = {part: share / whole for part, share in training.items()}
    learn, wait = shares.get("learn", 0.0), shares.get("wait", 0.0)
    if "read" in shares:
        return _cloning(shares["read"], learn)
    if learn >= MAJORITY:
        sampling = wait + shares.get("env", 0.0) + shares.get("inference", 0.0)
        more = "more workers will not help"
        if sampling >= WORTHWHILE:
            more = f"{_percent(sampling)} is sampling; with free cores, engine.mode=async samples while learning"
        return (
            f"learner-bound: {_percent(learn)} of the time is gradient steps; {more}; "
            "try fewer algo.epochs, a larger algo.minibatch or a smaller model"
        )
    if wait >= MAJORITY:
        return _starved(workers, wait, learn)
    for part in ("env", "inference"):
        if shares.get(part, 0.0) >= MAJORITY:
            kind, what, hint = _SAMPLING[part]
            return f"{kind}: {_percent(shares[part])} of the time is {what}; {hint}"
    largest = sorted(shares, key=shares.__getitem__, reverse=True)[:3]
    return f"nothing stands out: {', '.join(f'{part} {_percent(shares[part])}' for part in largest)} of the time"


_SAMPLING = {
    "env": (
        "env-bound",
        "in envs",
        "use a faster env or, with free cores, more engine.workers (rllib: engine.runners)",
    ),
    "inference": (
        "inference-bound",
        "choosing actions",
        "use more engine.envs per worker for larger batches, or a smaller model",
    ),
}


def _cloning(read: float, learn: float) -> str:
    """What limits learning from a dataset, which has neither envs nor workers."""
    if learn >= read:
        hint = "try a larger algo.minibatch or a smaller model"
        return f"learner-bound: {_percent(learn)} of the time is gradient steps; {hint}"
    return f"reading-bound: {_percent(read)} of the time is reading the dataset; keep it on a faster disk, or pack it"


def _starved(workers: Mapping[str, float], wait: float, learn: float) -> str:
    """Why samples arrive slowly, from the workers' shares of time."""
    waiting = f"the learner waits {_percent(wait)} of its time for samples"
    env, inference = workers.get("env", 0.0), workers.get("inference", 0.0)
    if env + inference < MAJORITY and learn >= WORTHWHILE:
        return (
            f"alternating: {waiting}, and learns {_percent(learn)} while the workers wait; "
            "with free cores, engine.mode=async does both at once"
        )
    if env + inference < MAJORITY:
        return f"starved learner: {waiting}, and the workers mostly wait too"
    part = "env" if env >= inference else "inference"
    kind, what, hint = _SAMPLING[part]
    return f"starved learner, {kind}: {waiting}; {_percent(workers[part])} of the workers' time is {what}; {hint}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
