"""Policies that collect: random noise, a run's checkpoint, your own code, and mixtures of them.

    random               uniform actions                     RUN, RUN@best, RUN@STEP   as eval.greedy of the run says
    sticky[:P]           repeat the action with chance P     greedy[:RUN]              its most likely actions
    ou[:theta=T,sigma=S] Ornstein-Uhlenbeck noise            sampled[:RUN]             actions sampled as in training
    brownian[:S]         a random walk, steps of size S      epsilon:E[:RUN]           greedy, with chance E at random
    FILE.py:NAME         a function of the observation, or a class with act(obs)

WEIGHT=POLICY is one of several: each episode is played by one of them. That, and every random number of a policy,
follows from the episode's seed, so that a dataset does not depend on which process plays what.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tiltyard.errors import UseError, did_you_mean
from tiltyard.plugins import resolve
from tiltyard.run import trust
from tiltyard.run.checkpoint import select
from tiltyard.run.folder import find, run_of

_WEIGHTED = re.compile(r"(?P<weight>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)=(?P<policy>.*)", re.DOTALL)
_AT = re.compile(r"(?P<run>.+)@(?P<at>best|[\d_]+)", re.DOTALL)
NOISE = {"random": {}, "sticky": {"p": 0.9}, "ou": {"theta": 0.15, "sigma": 0.3}, "brownian": {"sigma": 0.1}}
"""kinds of noise: their numbers and defaults"""
OF_RUNS = ("greedy", "sampled", "epsilon")
_LIMITS = {"p": (0.0, 1.0), "theta": (0.0, 1.0), "sigma": (0.0, 100.0), "epsilon": (0.0, 1.0)}


@dataclass(frozen=True)
class PolicyChoice:
    """One policy of a mixture, as plain values: it is sent to the workers."""

    text: str
    """as typed, without the weight"""
    weight: float = 1.0
    kind: str = "random"
    """a kind of noise, `run` or `own`"""
    numbers: dict[str, float] = field(default_factory=dict)
    source: str = ""
    """the run, then its checkpoint's folder; or the name of the user's code"""
    at: str = ""
    greedy: bool | None = None
    base: list[str] = field(default_factory=list)
    """folders of the user's code"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def meta(self) -> dict[str, Any]:
        """What is stored with each of its episodes."""
        found: dict[str, Any] = {"policy": self.text}
        if self.kind == "run":
            folder = Path(self.source)
            found |= {"run": run_of(folder).id, "checkpoint": folder.name, "greedy": self.greedy}
        return found


def parse(texts: Sequence[str], run: str | None) -> list[PolicyChoice]:
    """The policies of `--policy` options. `run` is the run that episodes are collected of, if it is one."""
    if not texts:
        return [_parse(run, run) if run else PolicyChoice("random")]
    found, example = [], "write --policy 0.7=random --policy 0.3=RUN"
    matches = [_WEIGHTED.fullmatch(text) for text in texts]
    for text, match in zip(texts, matches, strict=True):
        weight = float(match["weight"]) if match else 1.0
        if not 0 < weight < math.inf:
            raise UseError(f"--policy {text}: the weight must be a finite number above 0", example)
        if match is None and any(matches):
            raise UseError(f"--policy {text} has no weight, but another has one", example)
        found.append(replace(_parse(match["policy"] if match else text, run), weight=weight))
    return found


def _parse(text: str, run: str | None) -> PolicyChoice:
    if not text.strip():
        raise UseError("--policy is empty", "write --policy random; see: tiltyard data collect --help")
    kind, _, rest = text.partition(":")
    if kind in NOISE:
        return PolicyChoice(text, kind=kind, numbers=_numbers(text, rest, NOISE[kind]))
    if kind in OF_RUNS:
        numbers = {}
        if kind == "epsilon":
            number, _, rest = rest.partition(":")
            numbers = _numbers(text, number, {"epsilon": math.nan})
            if math.isnan(numbers["epsilon"]):
                raise UseError(f"--policy {text} has no number", "write --policy epsilon:0.1:RUN")
        source = rest or run
        if source is None:
            raise UseError(f"--policy {text} names no run", f"write --policy {text}:RUN, or collect of a run")
        return replace(_of_run(source), text=text, numbers=numbers, greedy=kind != "sampled")
    if resolve.kind_of(text) is not None:
        return PolicyChoice(text, kind="own", source=text)
    return _of_run(text)


def _of_run(text: str) -> PolicyChoice:
    at = _AT.fullmatch(text)
    return PolicyChoice(text, kind="run", source=at["run"] if at else text, at=at["at"] if at else "")


def _numbers(text: str, given: str, known: dict[str, float]) -> dict[str, float]:
    """`0.9` for the only number, or `theta=0.1,sigma=0.2`; missing ones have their defaults."""
    kind, found = text.partition(":")[0], dict(known)
    for part in given.split(",") if given else ():
        name, equals, value = part.rpartition("=")
        if not equals and len(known) == 1:
            name = next(iter(known))
        example = f"{kind}:" + ",".join(f"{each}={number:g}" for each, number in known.items() if number == number)
        hint = f"write --policy {example if len(known) > 1 else example.replace(next(iter(known), '') + '=', '')}"
        hint = "write --policy epsilon:0.1:RUN" if kind == "epsilon" else hint
        if name not in known:
            hint = did_you_mean(name, known) if name and known else hint if known else f"write --policy {kind}"
            raise UseError(f"--policy {text}: {kind} has no setting {name or value!r}", hint)
        low, high = _LIMITS[name]
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not low <= number <= high or (name in ("theta", "sigma") and not number):
            raise UseError(f"--policy {text}: {name} = {value} must be a number from {low:g} to {high:g}", hint)
        found[name] = number
    return found


def locate(choice: PolicyChoice, base: Sequence[Path], trust_code: bool) -> tuple[PolicyChoice, bool]:
    """Find the checkpoint or the code of a policy; UseError if there is none, or if it is another user's.

    Also returns whether the policy observes its previous action and reward.
    """
    if choice.kind == "own":
        places = [*base, Path.cwd()]
        code = resolve.load(resolve.parse(choice.source, {}, resolve.CONVENTIONAL["policy"], places))
        if not callable(getattr(code, "act", None if isinstance(code, type) else code)):
            message = f"--policy {choice.text} is neither a function of the observation nor has it act(obs)"
            raise UseError(message, "write a function, or a class with a method act(obs)")
        return replace(choice, base=[str(place.absolute()) for place in places]), False
    if choice.kind != "run":
        return choice, False
    folder = Path(choice.source)
    try:
        checkpoint = select(folder if (folder / "manifest.json").is_file() else find(choice.source), choice.at or None)
    except UseError as error:
        hint = f"{error.hint}; other policies: {', '.join((*NOISE, *OF_RUNS))}, FILE.py:NAME"
        raise UseError(f"--policy {choice.text}: {error.message}", hint) from error
    run = run_of(checkpoint.folder)
    experiment = run.experiment()
    trust.require_own_code(run, trust_code, experiment)
    greedy = experiment.eval.greedy if choice.greedy is None else choice.greedy
    return replace(choice, source=str(checkpoint.folder), greedy=greedy), experiment.model.previous
