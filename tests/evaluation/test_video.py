"""Videos: every kind of frame is converted to RGB, and a video is complete or absent."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from tiltyard.errors import TiltyardError
from tiltyard.evaluation.video import VideoWriter, to_rgb

RNG = np.random.default_rng(0)


def read_frames(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Decode a video with ffmpeg: its metadata, and uint8 [H, W, 3] frames."""
    reader = imageio_ffmpeg.read_frames(str(path), pix_fmt="rgb24")
    meta = next(reader)
    width, height = meta["size"]
    return meta, [np.frombuffer(raw, np.uint8).reshape(height, width, 3) for raw in reader]


def test_uint8_rgb_is_unchanged():
    frame = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(to_rgb(frame), frame)


@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 1), (1, 6, 8)])
def test_one_channel_becomes_grey(shape):
    frame = RNG.integers(0, 256, shape, dtype=np.uint8)
    rgb = to_rgb(frame)
    assert rgb.shape == (6, 8, 3)
    assert all(np.array_equal(rgb[:, :, c], frame.reshape(6, 8)) for c in range(3))


def test_channels_first_are_moved_last():
    frame = RNG.integers(0, 256, (3, 20, 30), dtype=np.uint8)
    assert np.array_equal(to_rgb(frame), frame.transpose(1, 2, 0))


def test_constant_alpha_is_dropped_and_a_stack_of_four_shows_the_newest():
    rgba = RNG.integers(0, 255, (9, 9, 4), dtype=np.uint8)
    stack = to_rgb(rgba)
    assert np.array_equal(stack[:, :, 0], rgba[:, :, 3])
    rgba[:, :, 3] = 255
    assert np.array_equal(to_rgb(rgba), rgba[:, :, :3])


@pytest.mark.parametrize(
    ("shape", "pick"),
    [((20, 20, 12), np.s_[:, :, 9:12]), ((20, 20, 5), np.s_[:, :, 4:5]), ((12, 20, 20), np.s_[9:12])],
)
def test_stacked_frames_show_the_newest(shape, pick):
    frame = RNG.integers(0, 256, shape, dtype=np.uint8)
    newest = frame[pick]
    if shape[0] == 12:
        newest = newest.transpose(1, 2, 0)
    assert np.array_equal(to_rgb(frame), np.broadcast_to(newest, (20, 20, 3)))


def test_leading_stack_axis_shows_the_newest():
    frame = RNG.integers(0, 256, (4, 10, 11, 3), dtype=np.uint8)
    assert np.array_equal(to_rgb(frame), frame[-1])


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 100.0, 255.0]], np.float64), [0, 100, 255]),
        (np.array([[-1.0, 0.0, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0, 1000, 2000]], np.uint16), [0, 128, 255]),
        (np.array([[0, 7, 255]], np.int64), [0, 7, 255]),
        (np.array([[False, True, True]]), [0, 255, 255]),
        (np.array([[2.0, 500.0, np.inf]]), [0, 255, 255]),
        (np.array([[np.nan, 0.0, 1.0]]), [0, 0, 255]),
        (np.array([[np.nan, np.inf, -np.inf]]), [0, 255, 0]),
        (np.array([[-5.0, -5.0, -5.0]]), [0, 0, 0]),
    ],
)
def test_numbers_of_any_range_become_bytes(numbers, expected):
    assert to_rgb(numbers)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("bad", [np.zeros(4), np.zeros((0, 4)), np.zeros((2, 2), object), np.zeros((2,) * 5)])
def test_arrays_that_are_not_images_are_refused(bad):
    with pytest.raises(TiltyardError, match="is not an image"):
        to_rgb(bad)


def test_video_has_the_right_codec_speed_size_and_frames(tmp_path):
    path = tmp_path / "deep" / "video.mp4"
    with closing(VideoWriter(path, fps=25)) as video:
        for grey in (0, 128, 255):
            for _ in range(10):
                video.add(np.full((300, 400, 3), grey, np.uint8))
    meta, frames = read_frames(path)
    assert (meta["codec"], meta["pix_fmt"].split("(")[0], meta["fps"], meta["size"]) == (
        "h264",
        "yuv420p",
        25.0,
        (400, 300),
    )
    assert len(frames) == 30
    assert [abs(int(frames[i].mean()) - grey) <= 3 for i, grey in ((5, 0), (15, 128), (25, 255))] == [True] * 3
    assert [p.name for p in path.parent.iterdir()] == ["video.mp4"]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (84, 84, 4), (211, 161, 3), (601, 401, 3), (1, 64, 64)])
def test_small_and_odd_sizes_become_playable(tmp_path, shape):
    with closing(VideoWriter(tmp_path / "video.mp4")) as video:
        for _ in range(3):
            video.add(RNG.random(shape, dtype=np.float32))
    meta, frames = read_frames(tmp_path / "video.mp4")
    assert len(frames) == 3
    assert min(meta["size"]) >= 240
    assert all(side % 2 == 0 for side in meta["size"])


def test_all_frames_use_the_value_range_of_the_video(tmp_path):
    near_and_far = np.linspace(0, 1000, 250 * 250).reshape(250, 250)
    with closing(VideoWriter(tmp_path / "depth.mp4")) as video:
        video.add(near_and_far)
        video.add(np.full((250, 250), 1.0))  # white if it were scaled alone
    _, frames = read_frames(tmp_path / "depth.mp4")
    assert frames[1].mean() < 10


def test_discarded_video_or_missing_frames_leave_no_file(tmp_path):
    video = VideoWriter(tmp_path / "video.mp4")
    video.add(np.zeros((300, 300, 3), np.uint8))
    video.discard()
    with pytest.raises(TiltyardError, match="no frame"):
        VideoWriter(tmp_path / "video.mp4").close()
    assert list(tmp_path.iterdir()) == []


def test_frame_of_another_size_is_an_error_with_both_sizes(tmp_path):
    video = VideoWriter(tmp_path / "video.mp4")
    video.add(np.zeros((300, 400, 3), np.uint8))
    with pytest.raises(TiltyardError, match="frame 1 is 500 x 300 pixels, the first was 400 x 300"):
        video.add(np.zeros((300, 500, 3), np.uint8))
    video.discard()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_path_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    video = VideoWriter(tmp_path / "file" / "video.mp4")
    with pytest.raises(TiltyardError, match="no video can be written"):
        video.add(np.zeros((300, 400, 3), np.uint8))
    video.discard()


def test_error_of_ffmpeg_is_reported(tmp_path):
    (tmp_path / f".video.{os.getpid()}.part.mp4").mkdir()  # ffmpeg cannot open its output

    def film_it() -> None:
        video = VideoWriter(tmp_path / "video.mp4")
        for _ in range(200):
            video.add(np.zeros((300, 400, 3), np.uint8))
        video.close()

    with pytest.raises(TiltyardError, match=r"video.mp4 could not be written: .*directory"):
        film_it()
    assert not (tmp_path / "video.mp4").exists()


def test_signals_for_training_do_not_interrupt_a_video(tmp_path):
    video = VideoWriter(tmp_path / "video.mp4")
    video.add(np.zeros((300, 400, 3), np.uint8))
    child = video._ffmpeg.pid
    for number in (signal.SIGINT, signal.SIGUSR2):
        os.kill(child, number)
        video.add(np.zeros((300, 400, 3), np.uint8))
    video.close()
    assert len(read_frames(tmp_path / "video.mp4")[1]) == 3


def test_video_can_be_written_in_another_thread(tmp_path):
    def work() -> None:
        with closing(VideoWriter(tmp_path / "video.mp4")) as video:
            video.add(np.zeros((300, 400, 3), np.uint8))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(read_frames(tmp_path / "video.mp4")[1]) == 1
