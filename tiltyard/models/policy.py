"""Load a trained policy and act on single observations, without an engine.

policy = load_policy(run_folder);  policy.reset();  action = policy.act(obs)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from tiltyard.config.sections import Model
from tiltyard.envs import spaces
from tiltyard.envs.actions import ActionCodec, flat_mask
from tiltyard.errors import UseError, did_you_mean
from tiltyard.models.policy_files import POLICY_SCHEMA, saved_policies
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins import resolve
from tiltyard.run.checkpoint import select
from tiltyard.run.folder import Run, find
from tiltyard.run.state_file import read_tree
from tiltyard.types import Array, Arrays, ArraySpec, EnvSpec

if TYPE_CHECKING:
    import gymnasium


def load_policy(
    source: Run | str | Path,
    *,
    at: int | Literal["best"] | None = None,
    name: str | None = None,
    base: Sequence[Path] | None = None,
    trust_code: bool = False,
    space: gymnasium.Space[Any] | None = None,
    seed: int = 0,
) -> Policy:
    """Load a policy from a checkpoint folder or a run: its newest checkpoint, or `at="best"` or `at=STEP`.

    `name` selects one of several policies; the default is the first. The code of a user's model is run from the copy
    in the run folder, and only if the folder belongs to this user or with `trust_code`. `space` is the env's
    observation space, needed where its categories do not start at 0.
    """
    folder = source.folder if isinstance(source, Run) else Path(source)
    if not folder.exists():
        folder = find(source if isinstance(source, str) else folder).folder
    if not (folder / "policies").is_dir():
        folder = select(source if isinstance(source, Run) else folder, at).folder
    known = saved_policies(folder)
    if name is not None and name not in known:
        raise UseError(f"{folder} has no policy {name!r}", did_you_mean(name, known))
    name = name or known[0]
    tree = read_tree(folder / "policies", name)
    if tree.get("schema") != POLICY_SCHEMA:
        message = f"{folder}: the policy has schema {tree.get('schema')}, this Tiltyard reads schema {POLICY_SCHEMA}"
        hint = "load it with the Tiltyard version that wrote it, or a newer one"
        raise UseError(message, hint)
    spec = spaces.spec_from_json(tree["spec"])
    model = Model.model_validate(tree["model"])
    places = tuple(base) if base is not None else (folder.absolute().parent.parent,)
    if not trust_code:
        named = resolve.model_plugins(model)
        resolve.refuse_foreign_code(named, places, (folder, folder / "policies", folder / "policies" / f"{name}.json"))
    net = PolicyNet(spec, model, places, seed=0, squashed=tree.get("squashed", False))
    net.load_arrays(tree["weights"])
    env = tree["env"]
    reward_settings = (env.get("reward_scale", 1.0), env.get("reward_clip"))  # older policies have neither
    return Policy(
        net.eval(), spec, frame_stack=env["frame_stack"], reward_settings=reward_settings, space=space, seed=seed
    )


class Policy:
    """Acts on single observations of a Gymnasium env and keeps the model's state within an episode."""

    def __init__(
        self,
        net: PolicyNet,
        spec: EnvSpec,
        *,
        frame_stack: int = 1,
        reward_settings: tuple[float, float | None] = (1.0, None),
        space: gymnasium.Space[Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.net = net
        self.spec = spec
        self._stack = frame_stack
        self._scale, self._clip = reward_settings  # as in training, for model.previous
        self._leaves = None if space is None else spaces.observation_leaves(space)
        self._codec = ActionCodec(spec.action)
        self._generator = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self) -> None:
        """Start a new episode."""
        self._state = self.net.initial_state(1)
        self._first = True
        self._frames: Arrays = {}
        self._previous = np.zeros(self.spec.action.columns, np.float32)

    def act(self, obs: Any, greedy: bool = True, *, reward: float = 0.0, mask: Any = None) -> Any:
        """Choose an action for the env's `step`. `reward` is that of the last step, used only with model.previous.

        The mask is taken from `mask`, or from "action_mask" in a Dict observation.
        """
        if mask is None and isinstance(obs, Mapping):
            mask = obs.get(spaces.MASK)
        rows = {name: array[None] for name, array in self._arrays(obs, reward).items()}
        acted = self.net.act(
            rows,
            self._state,
            np.array([self._first]),
            None if mask is None else flat_mask(self.spec.action, mask)[None],
            greedy=greedy,
            generator=self._generator,
        )
        self._state, self._first = acted.state, False
        self._previous = acted.action[0]
        return self._codec.decode(self._previous)

    def require_same(self, spec: EnvSpec) -> None:
        """Raise UseError unless the env has the observations and actions that this policy was trained with."""
        for what, here, there in (
            ("observations", _shapes(self.spec.obs), _shapes(spec.obs)),
            ("actions", self.spec.action.parts, spec.action.parts),
        ):
            if here != there:
                own, other = _describe(here), _describe(there)
                if own == other:  # the difference is in bounds or categories
                    own, other = str(here), str(there)
                hint = "use the env settings of the policy's run"
                raise UseError(f"the policy was trained with {what} {own}, but the env has {other}", hint)

    def _arrays(self, obs: Any, reward: float) -> Arrays:
        """The observation as in training: named, converted, stacked, with the previous action."""
        frames = self._frames_of(obs) if self._leaves is None else spaces.encode(self._leaves, obs)
        for name in self.spec.obs:
            if name == spaces.PREVIOUS_ACTION and name not in frames:
                self._frames[name] = self._previous
            elif name == spaces.PREVIOUS_REWARD and name not in frames:
                self._frames[name] = np.array([0.0 if self._first else self._scaled_reward(reward)], np.float32)
            elif name not in frames:
                raise UseError(f"the observation has no {name!r}", f"the policy needs {', '.join(self.spec.obs)}")
            else:
                self._push(name, frames[name])
        return self._frames

    def _scaled_reward(self, reward: float) -> float:
        scaled = reward * self._scale
        return scaled if self._clip is None else max(-self._clip, min(self._clip, scaled))

    def _frames_of(self, obs: Any) -> Arrays:
        found: dict[str, Any] = {}
        _flatten(obs, "", found)
        return {
            name: _frame(name, value, self.spec.obs[name]) for name, value in found.items() if name in self.spec.obs
        }

    def _push(self, name: str, frame: Array) -> None:
        """Append the newest frame on the stacking axis; at an episode's start repeat the first."""
        shape = self.spec.obs[name].shape
        if self._stack > 1 and not self._first:
            old = self._frames[name]
            newest = frame if frame.shape else frame[None]
            axis = next(at for at, (wide, narrow) in enumerate(zip(shape, newest.shape, strict=True)) if wide != narrow)
            rest = np.take(old, range(newest.shape[axis], shape[axis]), axis)
            stacked = np.concatenate([rest, newest], axis)
        else:
            stacked = spaces.fill_stack(frame, shape) if frame.ndim in (0, len(shape)) else frame
        if stacked.shape != shape:
            message = f"observation {name!r} has shape {frame.shape}, but the policy was trained with {shape}"
            hint = "use the env settings of the policy's run"
            raise UseError(message, hint)
        self._frames[name] = np.ascontiguousarray(stacked)


def _flatten(obs: Any, path: str, found: dict[str, Any]) -> None:
    """Collect leaves by name, as envs.spaces names them."""
    if isinstance(obs, Mapping):
        for key, inner in obs.items():
            _flatten(inner, f"{path}.{key}" if path else str(key), found)
    elif isinstance(obs, tuple):
        for index, inner in enumerate(obs):
            _flatten(inner, f"{path}.{index}" if path else str(index), found)
    else:
        found[path or spaces.BARE] = obs


def _frame(name: str, value: Any, spec: ArraySpec) -> Array:
    """Convert one frame without its space; categories are assumed to start at 0."""
    if spec.kind == "text":
        return spaces.hash_words(value)
    array = np.asarray(value)
    if spec.kind in ("discrete", "multi_discrete"):
        array = array.reshape(-1) if array.ndim else array
        if (array < 0).any() or (array >= np.resize(spec.options, array.shape or (1,))).any():
            hint = "if its categories do not start at 0, pass space=env.observation_space to load_policy"
            raise UseError(f"observation {name!r} is {value}, outside 0..{max(spec.options) - 1}", hint)
    elif spec.kind == "multi_binary":
        array = array.reshape(-1)
    elif array.ndim == 2 and len(spec.shape) == 3:  # a grey image
        array = array[None]
    return array.astype(spec.dtype)


def _describe(shapes: Any) -> str:
    """obs (4,) float32 / categorical of 2 / continuous of 3 columns."""
    if isinstance(shapes, Mapping):
        return ", ".join(f"{name} {shape} {dtype}" for name, (_, shape, dtype, _) in shapes.items())
    return ", ".join(
        f"{part.kind} of {part.options} options" if part.kind == "categorical" else f"{part.kind} of {part.columns}"
        for part in shapes
    )


def _shapes(obs: Mapping[str, ArraySpec]) -> dict[str, tuple[Any, ...]]:
    return {name: (item.kind, item.shape, item.dtype, item.options) for name, item in obs.items()}
