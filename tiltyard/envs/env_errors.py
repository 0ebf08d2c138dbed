"""What went wrong inside a group of envs, as a sentence that says where: the env's fault, or the policy's."""

from __future__ import annotations

import numpy as np

from tiltyard.envs.obs_buffer import FaultyObs
from tiltyard.errors import DivergedError, EnvError, TiltyardError, raised
from tiltyard.plugins import resolve

# modules that call an env and take its answers apart
_UNPACKING = (
    "tiltyard.envs.vector",
    "tiltyard.tuning.sampler",
    "tiltyard.envs.isolation.server",
    "tiltyard.envs.actions",
)


def attributed(error: BaseException, where: str, doing: str) -> TiltyardError:
    """What an exception inside the loop over rows means to the user; `doing` is the env's method."""
    if isinstance(error, TiltyardError):
        return error
    if isinstance(error, FaultyObs):
        if "NaN" in str(error) or "infinity" in str(error):
            return diverged(str(error), where, {f"obs.{error.key}": np.asarray(error.value)})
        hint = "the env must keep to the spaces it declares; env.strict=false casts dtypes"
        return EnvError(f"{where}: {error}", hint)
    if _raised_here(error):  # unpacking or storing its answer, not the env's own code
        hint = "reset() returns (obs, info) and step() (obs, reward, terminated, truncated, info)"
        return EnvError(f"{where}: {doing}() answered in a wrong form: {error}", hint)
    return EnvError(
        f"{where}: {doing}() {raised(error)}", "the traceback is the env's own", resolve.user_traceback(error)
    )


def diverged(what: str, where: str, batch: dict[str, object]) -> DivergedError:
    """Numbers that are none, with the arrays they are in."""
    hint = "find where the env divides by zero or overflows; the offending arrays are saved"
    if what.startswith("the action"):
        hint = "the policy put it out: lower algo.lr, or normalise observations; the offending arrays are saved"
    return DivergedError(f"{where}: {what}", hint, batch)


def _raised_here(error: BaseException) -> bool:
    """Whether no code but this package's was running when the error came up."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") in _UNPACKING
