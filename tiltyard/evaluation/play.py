"""One episode to look at: `tiltyard env play`. Measuring a policy is evaluate.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiltyard.config.load import load
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError, UseError
from tiltyard.evaluation.evaluate import changed, require_recordable
from tiltyard.evaluation.recording import VideoTarget
from tiltyard.evaluation.rollouts import (
    BUILTIN_POLICIES,
    EpisodeResult,
    episode_set,
    play_episodes,
    scripted_actor,
    trained_actor,
)
from tiltyard.models.policy import load_policy
from tiltyard.run.folder import find


def play(
    target: str, overrides: Sequence[str], policy: str, seed: int, *, video: Path | None, window: bool
) -> EpisodeResult:
    """Play one episode of an env with random actions or the policy of a run, and film or show it."""
    if window and not os.environ.get("DISPLAY"):
        raise UseError("--window needs a display and DISPLAY is not set", "record it instead: --video FILE")
    if policy in BUILTIN_POLICIES:
        loaded = load(target, overrides)
        experiment, base = loaded.experiment, loaded.base
    else:
        run = find(policy)
        experiment, base = changed(run, [f"env.id={target}", *overrides], False), (*run.base, Path.cwd())
    spec = probe(experiment.env, base=base, previous=experiment.model.previous)
    if video or window:
        require_recordable(spec, experiment.env)
    if policy in BUILTIN_POLICIES:
        actor = scripted_actor(policy, spec, base)
    else:
        trained = load_policy(run.folder)
        trained.require_same(spec)
        actor = trained_actor(trained.net, True, seed)
    errors: list[TiltyardError] = []
    shown = VideoTarget(video, errors.append) if video or window else None
    (result,) = play_episodes(actor, episode_set(experiment, spec, base, range(1), seed), video=shown)
    if errors:
        raise errors[0]
    return result
