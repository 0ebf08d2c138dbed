"""What a training's speed is bound by, in one sentence, from where the time went. Pure; only shares of time come in.

time      shares of the learner's wall time: env, inference, learn, wait, transfer, eval, save, other
workers   shares of the workers' time: env, inference, wait, other; empty when there are none
"""

from __future__ import annotations

from collections.abc import Mapping

MUCH = 0.5
SOME = 0.2  # of the training: less sampling than this is not worth doing meanwhile
ASIDE = 0.3  # of the whole: evaluations or saves that take more than this are what to look at first


def bottleneck(time: Mapping[str, float], workers: Mapping[str, float]) -> str:
    """One line: what bounds the speed, how much, and what to try; empty only where no time was measured."""
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
    if learn >= MUCH:
        sampling = wait + shares.get("env", 0.0) + shares.get("inference", 0.0)
        more = "more workers will not help"
        if sampling >= SOME:
            more = f"{_percent(sampling)} is sampling, for workers with engine.mode=async to do where cores are free"
        return (
            f"learner-bound: {_percent(learn)} of the time is gradient steps; {more}; "
            "try fewer algo.epochs, a larger algo.minibatch or a smaller model"
        )
    if wait >= MUCH:
        return _starved(workers, wait, learn)
    for part in ("env", "inference"):
        if shares.get(part, 0.0) >= MUCH:
            kind, what, hint = _SAMPLING[part]
            return f"{kind}: {_percent(shares[part])} of the time is {what}; {hint}"
    largest = sorted(shares, key=shares.__getitem__, reverse=True)[:3]
    return f"nothing stands out: {', '.join(f'{part} {_percent(shares[part])}' for part in largest)} of the time"


_SAMPLING = {
    "env": (
        "env-bound",
        "in envs",
        "more engine.workers (rllib: engine.runners) help where cores are free, or a faster env",
    ),
    "inference": (
        "inference-bound",
        "choosing actions",
        "more engine.envs per worker make larger batches; or a smaller model",
    ),
}


def _starved(workers: Mapping[str, float], wait: float, learn: float) -> str:
    """Why samples come slowly, by what the workers do."""
    said = f"the learner waits {_percent(wait)} of its time for samples"
    env, inference = workers.get("env", 0.0), workers.get("inference", 0.0)
    if env + inference < MUCH and learn >= SOME:
        return (
            f"in turns: {said}, and learns {_percent(learn)} while the workers wait for it; "
            "engine.mode=async lets both go on at once where cores are free"
        )
    if env + inference < MUCH:
        return f"starved learner: {said}, and the workers mostly wait themselves"
    part = "env" if env >= inference else "inference"
    kind, what, hint = _SAMPLING[part]
    return f"starved learner, {kind}: {said}; {_percent(workers[part])} of the workers' time is {what}; {hint}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
