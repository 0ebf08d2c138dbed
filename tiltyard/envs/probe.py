"""Find out what an env is in a child process: a simulator that crashes or hangs cannot take the parent down.

The rules are in checks.py and their test in env_check.py. Output of the env goes to files in a temporary folder. The
child does not import torch.

    parent: probe() ── task ──> child: make, reset, act at random, reset and act again ── spec or error ──> parent
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tiltyard.config.sections import Env
from tiltyard.errors import UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes import reaper
from tiltyard.processes.child import Child, ChildGone, Parent
from tiltyard.processes.exit_reason import exit_text
from tiltyard.processes.resources import rss_bytes
from tiltyard.types import EnvSpec

STEPS = 16
_SEED = 20_011
_TAIL = 2_000  # characters of the env's output in an error


def probe(env: Env, *, base: Sequence[Path], previous: bool = False) -> EnvSpec:
    """The spec of an env; UseError if something is wrong with it."""
    from tiltyard.envs.spaces import spec_from_json

    places = [str(Path(place).absolute()) for place in base]
    task = {"env": env.model_dump(mode="json"), "base": places, "previous": previous}
    answer, stdout = ask_child("tiltyard.envs.probe:answer", env, task, env.start_timeout)
    if stdout:
        first = stdout.splitlines()[0]
        answer["notes"].append(f"env {env.id} prints to stdout, which is for data: {first[:80]!r} goes to stderr")
    return spec_from_json(answer)


def ask_child(function: str, env: Env, task: dict[str, Any], timeout: float) -> tuple[dict[str, Any], str]:
    """What a function answers in a child process, and what it printed, after the child and all it started are gone."""
    with tempfile.TemporaryDirectory(prefix="tiltyard-probe-") as name:
        folder = Path(name)
        return _ask_child(function, env, task, timeout, folder), _tail(folder / "stdout")


def _ask_child(function: str, env: Env, task: dict[str, Any], timeout: float, folder: Path) -> dict[str, Any]:
    mark = f"{reaper.own_mark()}.{folder.name}"
    environment = {**os.environ, reaper.MARK: mark}
    with (folder / "stdout").open("w+b") as out, (folder / "stderr").open("wb") as err:
        child = Child(function, task, "", "", environment=environment, output=(out, err))
        try:
            return child.recv(timeout)
        except TimeoutError:
            message = f"env {env.id} did not start and step within {timeout:g} s (env.start_timeout)"
            hint = (
                "raise env.start_timeout if the env is that slow; otherwise it hangs in its constructor, reset or step"
            )
            raise UseError(message, hint, _tail(folder / "stderr")) from None
        except ChildGone as error:
            output = "\n".join(filter(None, (_tail(folder / name) for name in ("stdout", "stderr"))))
            hint = "the simulator crashed, not Tiltyard; its last output is below"
            hint = hint if output else "run it by itself to see why"
            raise UseError(f"env {env.id} {exit_text(error.status)} while it was probed", hint, output) from None
        finally:
            child.close()
            reaper.end_marked(mark)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------- in the child


def answer(task: dict[str, Any], parent: Parent) -> dict[str, Any]:
    """Examine the env; what it raises is reported as its error."""
    env = Env.model_validate(task["env"])
    try:
        return examine(env, [Path(place) for place in task["base"]], task["previous"])
    except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:  # from the env: this process gets no signals
        message = f"env {env.id} {raised(error)} while it was probed"
        raise UseError(message, "the traceback is the env's own", user_traceback(error)) from None


def examine(env: Env, base: Sequence[Path], previous: bool) -> dict[str, Any]:
    """Make the env in this process, test it and return its spec as JSON."""
    from tiltyard.envs.actions import action_spec
    from tiltyard.envs.env_check import EnvCheck
    from tiltyard.envs.env_options import options_layer
    from tiltyard.envs.episodes import state_keeper
    from tiltyard.envs.make import can_render, frames_per_step, make_copies, registered_limit
    from tiltyard.envs.pettingzoo import Parallel
    from tiltyard.envs.spaces import observation_specs, previous_specs, spec_to_json

    (made,) = make_copies(env, base, 1)
    for name in ("observation_space", "action_space"):
        if getattr(made, name, None) is None:
            raise UseError(f"env {env.id} has no {name}", f"set self.{name} in its constructor")
    obs = observation_specs(made.observation_space, env.frame_stack)
    action = action_spec(made.action_space)
    if previous:
        obs |= previous_specs(action)
    found = EnvCheck(env, made, action)
    repeats = found.run(STEPS, _SEED)
    notes = list(found.conversions.values())
    restore_mode = env.restore_mode
    keeper = state_keeper(made, anywhere=restore_mode == "state")
    if restore_mode == "state" and keeper is None:
        hint = "set env.restore_mode=rerun"
        raise UseError(f"env.restore_mode = state and env {env.id} has no get_state() and set_state()", hint)
    if restore_mode == "auto":
        restore_mode = "state" if keeper is not None else "rerun" if repeats else "fresh"
    if not repeats and restore_mode != "state":
        notes.append(
            f"env {env.id} behaves differently when reset with the same seed and given the same actions: "
            "runs are not reproducible, and a resumed run begins new episodes"
        )
    if env.id.startswith("ALE/") and any(item.image for item in obs.values()):
        notes.append(
            f"env {env.id} shows the raw screen; atari:pong, ... are the same games with the usual preprocessing"
        )
    limit = env.time_limit
    if limit is None:
        registered = registered_limit(env, base)
        limit = None if registered is None else -(-registered // env.frameskip)
    spec = EnvSpec(
        obs=obs,
        action=action,
        agents=made.names if isinstance(made, Parallel) else ("agent",),
        parallel=isinstance(made, Parallel),
        masked=found.masked,
        frameskip=env.frameskip * frames_per_step(made),
        episode_limit=limit,
        restore_mode=restore_mode,
        renders=can_render(env, made, base),
        takes_options=options_layer(made) is not None,
        env_bytes=_measure_memory(env, base),
        step_seconds=median(found.step_times) * env.frameskip,
        notes=tuple(notes),
    )
    found.call("close()", made.close)
    return spec_to_json(spec)


def _measure_memory(env: Env, base: Sequence[Path]) -> int:
    """Bytes by which a second copy of the env grows this process, or of its own process if it has one; 0 if unknown."""
    from tiltyard.envs.make import make_copies
    from tiltyard.envs.pettingzoo import Parallel

    before = rss_bytes()
    try:
        (second,) = make_copies(env, base, 1)
        second.reset(seed=0)
        grown = rss_bytes() - before
        if env.isolate == "process":
            grown = (second.inner if isinstance(second, Parallel) else second).memory()
        second.close()
    except Exception:  # noqa: BLE001 - a simulator may allow one copy only
        return 0
    return max(0, grown)
