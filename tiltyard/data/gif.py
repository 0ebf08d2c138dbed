"""Animated GIFs of an image observation, one for each episode: to look at data. Colours are reduced to 256 per frame.

Of stacked frames, the newest is shown. Equal frames in a row become one frame that is shown longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tiltyard.data.dataset_file import About
from tiltyard.data.exchange import Recording, file_stem
from tiltyard.envs.spaces import stack_axis
from tiltyard.errors import UseError
from tiltyard.types import Array, ArraySpec


def writer(about: About, name: str | None, fps: float) -> Callable[[Path, Iterator[list[Recording]], int], list[str]]:
    """A function that writes the GIFs of all episodes. UseError if there is no such image."""
    images = [key for key, item in about.spec.obs.items() if item.image and item.dtype == "uint8"]
    if not images:
        known = ", ".join(f"{key} {item.dtype} {list(item.shape)}" for key, item in about.spec.obs.items())
        message = f"env {about.env_id} has no image observation of bytes for a GIF; it has {known}"
        raise UseError(message, "record a video instead: tiltyard env play ENV --video FILE")
    if name is not None and name not in images:
        raise UseError(f"--obs {name!r} is not an image observation of {about.env_id}", f"known: {', '.join(images)}")
    chosen = name or images[0]
    shape = about.spec.obs[chosen]

    def write(draft: Path, groups: Iterator[list[Recording]], count: int) -> list[str]:
        for group in groups:
            for place, each in enumerate(group):
                stem = file_stem(each, place, several=len(group) > 1)
                save(draft / f"{stem}.gif", frames(each.episode.obs[chosen], shape), fps)
        others = [f"other images, not exported: {', '.join(images[1:])}"] if name is None and images[1:] else []
        return [f"a GIF shows {chosen!r} at 256 colours per frame", *others]

    return write


def frames(array: Array, spec: ArraySpec) -> Array:
    """uint8 [T, H, W, 3] or [T, H, W] of image observations [T, H, W, C] or [T, C, H, W]."""
    last = array if stack_axis(spec) == 2 else np.moveaxis(array, 1, -1)
    channels = last.shape[-1]
    return last[..., -3:] if channels % 3 == 0 else last[..., -1]


def save(path: Path, images: Array, fps: float) -> None:
    from PIL import Image

    pictures = [Image.fromarray(np.ascontiguousarray(image)) for image in images]
    duration = max(20, round(1000 / fps))  # ms; viewers show shorter ones slowly
    with path.open("xb") as file:
        pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=duration, loop=0)
        file.flush()
        os.fsync(file.fileno())
