"""Find out what an env is in a child process: a simulator that crashes or hangs cannot take the parent down.

The rules are in checks.py and their test in env_check.py. Job and answer are JSON files in a temporary folder; output
of the env goes to other files. The child does not import torch.

    parent: probe() ── job.json ──> child: make, reset, act at random, reset and act again ── answer.json ──> EnvSpec
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tiltyard.config.experiment import Env
from tiltyard.errors import ConfigError, Problem, UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes import reaper
from tiltyard.processes.exit_reason import killed_by
from tiltyard.processes.resources import rss_bytes
from tiltyard.types import EnvSpec

STEPS = 16
_SEED = 20_011
_TAIL = 2_000  # characters of the env's output in an error
_START = "import sys; sys.path.append({root!r}); from tiltyard.envs.probe import main; main({folder!r})"


def probe(env: Env, *, base: Sequence[Path], previous: bool = False) -> EnvSpec:
    """The spec of an env; UseError if something is wrong with it."""
    from tiltyard.envs.spaces import spec_from_json

    with tempfile.TemporaryDirectory(prefix="tiltyard-probe-") as name:
        folder = Path(name)
        job = {
            "env": env.model_dump(mode="json"),
            "base": [str(Path(p).absolute()) for p in base],
            "previous": previous,
        }
        (folder / "job.json").write_text(json.dumps(job))
        code = _run_child(env, folder)
        stdout, stderr = _tail(folder / "stdout"), _tail(folder / "stderr")
        try:
            answer = json.loads((folder / "answer.json").read_text())
        except (OSError, ValueError):
            raise _crashed(env, code, "\n".join(text for text in (stdout, stderr) if text)) from None
    if "obs" not in answer:
        raise _error_from(answer)
    if stdout:
        first = stdout.splitlines()[0]
        answer["notes"].append(f"env {env.id} prints to stdout, which is for data: {first[:80]!r} goes to stderr")
    return spec_from_json(answer)


def _run_child(env: Env, folder: Path) -> int:
    """Run the child until it ends or times out, then end every process that it has left behind."""
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-P", "-c", _START.format(root=root, folder=str(folder))]
    mark = f"{reaper.own_mark()}.{folder.name}"
    with (folder / "stdout").open("w+b") as out, (folder / "stderr").open("wb") as err:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, reaper.MARK: mark},
            start_new_session=True,
        )
        try:
            return child.wait(env.start_timeout)
        except subprocess.TimeoutExpired:
            raise UseError(
                f"env {env.id} did not start and step within {env.start_timeout:g} s (env.start_timeout)",
                "raise env.start_timeout if the env is that slow; otherwise it hangs in its constructor, reset or step",
                _tail(folder / "stderr"),
            ) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            reaper.end_marked(mark)


def _crashed(env: Env, code: int, output: str) -> UseError:
    cause = killed_by(-code) if code < 0 else f"exited with code {code}"
    hint = "the simulator crashed, not Tiltyard; its last output is below" if output else "run it by itself to see why"
    return UseError(f"env {env.id} {cause} while it was probed", hint, output)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------- in the child


def main(folder: str) -> None:
    """Run the child: read job.json, examine the env, write answer.json."""
    job = json.loads((Path(folder) / "job.json").read_text())
    env = Env.model_validate(job["env"])
    try:
        answer = examine(env, [Path(p) for p in job["base"]], job["previous"])
    except (UseError, KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        answer = _error_answer(env, error)
    temporary = Path(folder) / "answer.tmp"
    temporary.write_text(json.dumps(answer))
    temporary.replace(Path(folder) / "answer.json")
    sys.stdout.flush()
    os._exit(0)  # skip threads and exit handlers of the simulator


def _error_answer(env: Env, error: BaseException) -> dict[str, Any]:
    """What answer.json holds instead of a spec."""
    if isinstance(error, ConfigError):
        problems = [problem.__dict__ for problem in error.problems]
        return {"problems": problems, "source": error.message.partition(" in ")[2]}
    if isinstance(error, UseError):
        return {"message": error.message, "hint": error.hint, "details": error.details}
    # KeyboardInterrupt and the like come from the env: this process gets no signals.
    message = f"env {env.id} {raised(error)} while it was probed"
    return {"message": message, "hint": "the traceback is the env's own", "details": user_traceback(error)}


def _error_from(answer: dict[str, Any]) -> UseError:
    """The inverse of _error_answer, in the parent."""
    if "problems" in answer:
        return ConfigError([Problem(**problem) for problem in answer["problems"]], answer["source"])
    return UseError(answer["message"], answer["hint"], answer["details"])


def examine(env: Env, base: Sequence[Path], previous: bool) -> dict[str, Any]:
    """Make the env in this process, test it and return its spec as JSON."""
    from tiltyard.envs.actions import action_spec
    from tiltyard.envs.env_check import EnvCheck
    from tiltyard.envs.episode_state import state_keeper
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
        raise UseError(
            f"env.restore_mode = state and env {env.id} has no get_state() and set_state()",
            "set env.restore_mode=rerun",
        )
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
