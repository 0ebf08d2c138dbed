"""What `tiltyard env check` finds out about an env, in a child process as the probe does.

interface      what reset() and step() return fits the spaces: structure, dtype, shape, range
seed           equal seeds and actions give equal episodes, other seeds give other ones
observations   step() returns a new array, not the one that it returned before
resets         a thousand of them take equally long and leave no memory, files, threads or processes behind
speed, memory, threads   of one env
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import psutil

from tiltyard.config.sections import Env
from tiltyard.envs.probe import ask_child
from tiltyard.errors import UseError, raised
from tiltyard.processes.child import Parent

STEPS = 300
RESETS = 1_000
SECONDS = 900.0  # for everything
_RESET_SECONDS = 120.0
_SEED = 20_011
_PARTS = 10  # of the resets
_LEAK = 1024  # bytes per reset: less is an allocator's
_SLOWER = 1.5
_COPIES = 3


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    check: str
    result: Literal["ok", "note", "wrong"]
    text: str


def inspect_env(env: Env, base: Sequence[Path], resets: int = RESETS) -> list[Row]:
    """Check an env in a child process; UseError if it cannot even be made."""
    task = {"env": env.model_dump(mode="json"), "base": [str(place.absolute()) for place in base], "resets": resets}
    answer, stdout = ask_child("tiltyard.envs.inspection:answer", env, task, SECONDS)
    rows = [Row(**row) for row in answer["rows"]]
    if stdout:
        rows.append(Row("output", "note", f"prints to stdout, which is for data: {stdout.splitlines()[0][:80]!r}"))
    return rows


# ---------------------------------------------------------------------------------------------- in the child


def answer(task: dict[str, Any], parent: Parent) -> dict[str, Any]:
    env = Env.model_validate(task["env"])
    return {"rows": [asdict(row) for row in rows(env, [Path(place) for place in task["base"]], task["resets"])]}


def rows(env: Env, base: Sequence[Path], resets: int) -> Iterator[Row]:
    """Check the env in this process."""
    from tiltyard.envs.actions import action_spec
    from tiltyard.envs.env_check import EnvCheck
    from tiltyard.envs.make import make_copies

    (made,) = make_copies(env, base, 1)
    check = EnvCheck(env, made, action_spec(made.action_space))
    actions: list[Any] = []
    try:
        first = check.rollout(STEPS, _SEED, actions, record=True)
        again = check.rollout(STEPS, _SEED, actions, record=False)
    except UseError as error:
        yield Row("interface", "wrong", error.message.removeprefix(f"env {env.id}").lstrip(",: "))
        first = again = ""
    else:
        yield Row("interface", "ok", f"{2 * STEPS} env steps fit the spaces")
        yield _seed_row(first == again, lambda: check.rollout(STEPS, _SEED + 1, actions, record=False) == first)
        shared = _shared_observation(made, check.random_actions)
        text = f"step() returns the same array for {shared!r} every time: return a copy" if shared else "new arrays"
        yield Row("observations", "wrong" if shared else "ok", text)
    yield from _reset_rows(made, resets)
    if first:
        speed = 1 / max(median(check.step_times), 1e-9)
        yield Row("speed", "ok", f"{speed:,.0f} env steps per second, one env, random actions")
    yield from _copy_rows(lambda: make_copies(env, base, _COPIES))
    made.close()


def _seed_row(repeats: bool, same_for_other_seed: Callable[[], bool]) -> Row:
    if not repeats:
        text = "the seed has no effect: equal seeds and actions give different episodes; draw from self.np_random"
        return Row("seed", "wrong", text)
    try:
        same = same_for_other_seed()
    except UseError:  # an action that a mask forbids in another episode
        same = False
    if same:
        return Row("seed", "note", "every seed gives the same episode: nothing is random, or the seed is ignored")
    return Row("seed", "ok", "equal seeds and actions give equal episodes")


def _shared_observation(made: Any, random_actions: Callable[[], dict[int, Any]]) -> str | None:
    """The name of an observation that lies in the same memory before and after a step."""
    from tiltyard.envs.pettingzoo import Parallel
    from tiltyard.envs.spaces import observation_leaves, pick

    several = isinstance(made, Parallel)

    def arrays(obs: Any) -> dict[str, Any]:
        views = (
            {name: obs.get(agent) for name, agent in zip(made.names, made.agents, strict=True)}
            if several
            else {"": obs}
        )
        leaves = observation_leaves(made.observation_space)
        return {
            f"{name} {leaf.name}".strip(): pick(view, leaf.path)
            for name, view in views.items()
            for leaf in leaves
            if view is not None
        }

    before = arrays(made.reset(seed=_SEED)[0])
    chosen = random_actions()
    after = arrays(made.step(chosen if several else chosen[0])[0])
    for name in set(before) & set(after):
        one, two = before[name], after[name]
        if isinstance(one, np.ndarray) and isinstance(two, np.ndarray) and one.size and np.shares_memory(one, two):
            return name
    return None


def _reset_rows(made: Any, count: int) -> Iterator[Row]:
    """Reset many times, in ten parts: what each part took and left behind."""
    each = max(1, count // _PARTS)
    fastest, left = [], []
    began, done = time.monotonic(), 0
    for _ in range(_PARTS):
        seconds = []
        for _ in range(each):
            start = time.perf_counter()
            try:
                made.reset(seed=_SEED + done)
            except Exception as error:  # noqa: BLE001 - an env may raise anything
                yield Row("resets", "wrong", f"reset() number {done + 1} {raised(error)}")
                return
            seconds.append(time.perf_counter() - start)
            done += 1
        fastest.append(min(seconds))  # not disturbed by other processes
        gc.collect()
        left.append(_usage())
        if time.monotonic() - began > _RESET_SECONDS:
            break
    slower = len(fastest) >= 5 and fastest[-1] > _SLOWER * fastest[0] and _rises(fastest)
    text = f"{done:,} resets, {1e3 * median(fastest):.3g} ms each"
    if slower:
        first, last = 1e3 * fastest[0], 1e3 * fastest[-1]
        text = f"reset() is slower every time: {first:.3g} ms at first, {last:.3g} ms after {done:,}"
    yield Row("resets", "wrong" if slower else "ok", text)
    yield _leak_row(left, each)


def _leak_row(left: list[dict[str, int]], each: int) -> Row:
    """Compare what is in use after each part; the first two parts fill caches."""
    steady = left[2:]
    if len(steady) < 4:
        return Row("leaks", "note", "too few resets within the time to see a leak")
    resets = each * (len(steady) - 1)
    for name, unit in (("files", "open files"), ("threads", "threads"), ("processes", "child processes")):
        grown = steady[-1][name] - steady[0][name]
        if grown * 4 >= resets:
            return Row("leaks", "wrong", f"{resets:,} resets left {grown:,} {unit} behind")
    per_reset = (steady[-1]["bytes"] - steady[0]["bytes"]) / resets
    if per_reset >= _LEAK and _rises([usage["bytes"] for usage in steady]):
        return Row("leaks", "wrong", f"memory grows by {per_reset / 1024:,.1f} KiB with every reset")
    return Row("leaks", "ok", f"nothing grows over {resets:,} resets")


def _rises(values: Sequence[float]) -> bool:
    """Whether nearly every value is above the one before."""
    return sum(b > a for a, b in pairwise(values)) >= 0.7 * (len(values) - 1)


def _copy_rows(make: Callable[[], list[Any]]) -> Iterator[Row]:
    before = _usage()
    try:
        copies = make()
        for copy in copies:
            copy.reset(seed=_SEED)
    except Exception as error:  # noqa: BLE001 - a simulator may allow one copy only
        yield Row("memory", "note", f"only one copy can be made here: {raised(error)}")
        return
    after = _usage()
    for copy in copies:
        copy.close()
    grown = {name: (after[name] - before[name]) / _COPIES for name in after}
    yield Row("memory", "ok", f"{max(0.0, grown['bytes']) / 2**20:.2f} MiB per env")
    yield Row(
        "threads", "ok", f"{max(0.0, grown['threads']):.3g} threads and {grown['processes']:.3g} processes per env"
    )


def _usage() -> dict[str, int]:
    """Memory, open files, threads and processes of this process and its children."""
    here = psutil.Process()
    family = [here, *here.children(recursive=True)]
    found = {"bytes": 0, "threads": 0, "files": here.num_fds(), "processes": len(family) - 1}
    for process in family:
        try:
            found["bytes"] += process.memory_info().rss
            found["threads"] += process.num_threads()
        except psutil.NoSuchProcess:
            continue
    return found
