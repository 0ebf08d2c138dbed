"""Videos: frames of any kind become RGB, and RGB becomes an mp4 that plays everywhere. No display is needed.

ffmpeg comes with imageio-ffmpeg and reads frames from a pipe. The file gets its name when it is complete. How an array
is read:

    [H, W]  grey or depth          [H, W, 3], [3, H, W]  RGB           uint8, bool       as they are
    [H, W, 1], [1, H, W]  grey     [H, W, 4] with constant alpha RGBA  0..1 or 0..255    floats and integers, scaled
    [n, H, W, C]  the last         other channels: the last of a stack anything else     scaled from low to high
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.errors import TiltyardError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHORT_SIDE = 240  # pixels: smaller frames are enlarged by a whole factor
_LONG_SIDE = 4096  # pixels: the limit of hardware decoders


def value_range(frame: NDArray[Any]) -> tuple[float, float]:
    """The smallest and largest finite number of a frame; (0, 0) if there is none."""
    if frame.dtype == np.bool_ or frame.size == 0:
        return 0.0, float(frame.dtype == np.bool_)
    finite = frame[np.isfinite(frame)] if frame.dtype.kind == "f" else frame
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def to_rgb(frame: NDArray[Any], seen: tuple[float, float] | None = None) -> NDArray[np.uint8]:
    """Convert to uint8 [H, W, 3]. `seen` is the value range of the video so far, for a steady brightness."""
    pixels = np.asarray(frame)
    if pixels.dtype.kind not in "buif" or pixels.size == 0 or not 2 <= pixels.ndim <= 4:
        hint = "images are numbers of shape [H, W], [H, W, channels] or [channels, H, W]"
        raise TiltyardError(f"an array of shape {list(pixels.shape)} and dtype {pixels.dtype} is not an image", hint)
    if pixels.ndim == 4:
        pixels = pixels[-1]
    if pixels.dtype != np.uint8:
        pixels = _to_bytes(pixels, value_range(pixels) if seen is None else seen)
    if pixels.ndim == 3:
        pixels = _last_image(pixels)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    return np.ascontiguousarray(pixels)


def _to_bytes(pixels: NDArray[Any], seen: tuple[float, float]) -> NDArray[np.uint8]:
    low, high = seen
    numbers = pixels.astype(np.float64)
    if low >= 0 and high <= 1 and pixels.dtype.kind in "bf":
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    # Infinite depth is the far end; NaN is black.
    numbers = np.nan_to_num(numbers, nan=low, posinf=high, neginf=low)
    scaled = (numbers - low) * (255.0 / ((high - low) or 1.0))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def _last_image(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[H, W] or [H, W, 3] of an image whose channels are the shorter of first and last axis."""
    if pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] < pixels.shape[2]:
        pixels = np.moveaxis(pixels, 0, 2)
    channels = pixels.shape[2]
    if channels == 1:
        return pixels[:, :, 0]
    if channels == 3:
        return pixels
    if channels == 4 and pixels[:, :, 3].min() == 255:
        return pixels[:, :, :3]
    return pixels[:, :, -3:] if channels % 3 == 0 else pixels[:, :, -1]


def fit(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Enlarge small images and pad odd sides: H.264 with 4:2:0 colour needs even ones."""
    height, width = image.shape[:2]
    factor = max(1, min(-(-_SHORT_SIDE // min(height, width)), _LONG_SIDE // max(height, width)))
    if factor > 1:
        image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = image.shape[:2]
    return np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


class VideoWriter:
    """Writes an mp4: add frames, then `close` or `discard` it."""

    def __init__(self, path: Path | str, fps: float = 30.0) -> None:
        self.path = Path(path)
        self.fps = fps
        self.frames = 0
        self._part = self.path.with_name(f".{self.path.stem}.{os.getpid()}.part.mp4")
        self._size: tuple[int, int] = (0, 0)  # height, width as encoded
        self._seen: tuple[float, float] | None = None
        self._ffmpeg: subprocess.Popen[bytes] | None = None
        try:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as ffmpeg
        except OSError as error:
            raise self._error(error.strerror, "free some space") from None

    def add(self, frame: NDArray[Any]) -> None:
        """Add a frame that `to_rgb` can convert; all frames must have one size."""
        frame = np.asarray(frame)
        if frame.dtype.kind in "buif" and frame.dtype != np.uint8:
            low, high = value_range(frame)
            self._seen = (low, high) if self._seen is None else (min(low, self._seen[0]), max(high, self._seen[1]))
        image = fit(to_rgb(frame, self._seen))
        if self._ffmpeg is None:
            self._size = image.shape[:2]
            self._ffmpeg = self._start(self._size)
        if image.shape[:2] != self._size:
            now, first = (f"{width} x {height}" for height, width in (image.shape[:2], self._size))
            message = f"{self.path.name}: frame {self.frames} is {now} pixels, the first was {first}"
            raise TiltyardError(message, "render every frame of an episode in one size")
        assert self._ffmpeg.stdin is not None
        try:
            self._ffmpeg.stdin.write(image.tobytes())
        except OSError:
            raise self._failure() from None
        self.frames += 1

    def close(self) -> Path:
        """Complete the video and rename it to its path."""
        if self._ffmpeg is None:
            self._stderr.close()
            raise TiltyardError(f"{self.path} was not written: there are no frames", "the env rendered nothing")
        with suppress(OSError):  # ffmpeg has failed, as its exit code shows
            self._ffmpeg.communicate()
        if self._ffmpeg.wait() != 0:
            raise self._failure()
        self._stderr.close()
        try:
            self._part.replace(self.path)
        except OSError as error:
            raise self._error(error.strerror, "is a folder of that name in the way?") from None
        return self.path

    def discard(self) -> None:
        """Stop ffmpeg and remove the incomplete file."""
        if self._ffmpeg is not None:
            self._ffmpeg.kill()
            with suppress(OSError):  # the pipe's reader is gone
                self._ffmpeg.communicate()
        self._stderr.close()
        with suppress(OSError):  # it may never have been created
            self._part.unlink()

    def _start(self, size: tuple[int, int]) -> subprocess.Popen[bytes]:
        import imageio_ffmpeg

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"no video can be written to {self.path}: {error.strerror}"
            raise TiltyardError(message, "choose another folder") from None
        try:
            program = imageio_ffmpeg.get_ffmpeg_exe()
        except RuntimeError:
            hint = "pip install --force-reinstall imageio-ffmpeg, or set IMAGEIO_FFMPEG_EXE"
            raise self._error("ffmpeg was not found", hint) from None
        source = f"-f rawvideo -pix_fmt rgb24 -s {size[1]}x{size[0]} -r {self.fps:g} -i pipe:0"
        output = "-an -c:v libx264 -preset fast -crf 20 -pix_fmt yuv420p -threads 2 -movflags +faststart"
        command = [program, "-y", "-loglevel", "error", *source.split(), *output.split(), str(self._part)]
        # Stop signals may reach the whole process group, but only the training process handles them: blocked here,
        # they stay blocked in the child.
        stops = {signal.SIGINT, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._stderr)
        except OSError as error:
            raise self._error(f"{program}: {error.strerror}", "is IMAGEIO_FFMPEG_EXE an ffmpeg?") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _failure(self) -> TiltyardError:
        """The error with ffmpeg's last message, after cleaning up."""
        assert self._ffmpeg is not None
        self._ffmpeg.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        self.discard()
        reason = lines[-1] if lines else f"ffmpeg exited with code {self._ffmpeg.returncode}"
        return self._error(reason, "check free space and permissions of the folder")

    def _error(self, reason: str | None, hint: str) -> TiltyardError:
        return TiltyardError(f"{self.path} could not be written: {reason}", hint)
