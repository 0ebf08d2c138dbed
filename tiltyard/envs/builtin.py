"""Short names of the envs and wrappers that come with Tiltyard -> where they are."""

from __future__ import annotations

from collections.abc import Mapping

BUILTIN_ENVS: Mapping[str, str] = {
    "identity": "tiltyard.envs.toys.single:Identity",
    "basic": "tiltyard.envs.toys.single:Basic",
    "memory": "tiltyard.envs.toys.single:Memory",
    "delay": "tiltyard.envs.toys.single:Delay",
    "timeout": "tiltyard.envs.toys.single:Timeout",
    "masked": "tiltyard.envs.toys.single:Masked",
    "kitchen_sink": "tiltyard.envs.toys.single:KitchenSink",
    "pennies": "tiltyard.envs.toys.games:Pennies",
    "visitors": "tiltyard.envs.toys.games:Visitors",
    "CarPass-v0": "tiltyard.envs.toys.car_pass:CarPass",
}

BUILTIN_WRAPPERS: Mapping[str, str] = {
    "flatten_multi_discrete": "tiltyard.envs.wrappers:FlattenMultiDiscrete",
    "discrete_steps": "tiltyard.envs.wrappers:DiscreteSteps",
    "grey_image": "tiltyard.envs.wrappers:GreyImage",
    "resize_image": "tiltyard.envs.wrappers:ResizeImage",
}
