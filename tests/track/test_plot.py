"""The learning curve: a plot of the valid records of metrics.jsonl, or an error."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from tiltyard.config.experiment import Experiment
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import metrics
from tiltyard.run.create import create
from tiltyard.run.folder import Run
from tiltyard.track.plot import plot

BLUE, ORANGE = (37, 99, 235), (217, 119, 6)


@pytest.fixture
def run(tmp_path) -> Run:
    described = Experiment.model_validate(
        {"name": "cartpole", "env": "CartPole-v1", "stop": {"env_steps": 100_000, "return": 475.0}}
    )
    return create(tmp_path / "runs", described)


def fill(run: Run, *, training=True, evaluations=(), until=60_000) -> None:
    rng = np.random.default_rng(0)
    for steps in range(1024, until, 1024):
        found = {}
        level = 500 / (1 + math.exp(-(steps - 30_000) / 7000))
        if training:
            found["train/return"] = level + rng.normal(0, 8)
        if steps in evaluations:
            found |= {"eval/return": level, "eval/return_low": level - 40, "eval/return_high": level + 30}
        metrics.append(run.folder, {"env_steps": steps, "metrics": found})


def pixels(path, colour) -> int:
    """Return the number of pixels with nearly this colour."""
    picture = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return int((np.abs(picture - np.array(colour)).max(axis=2) < 12).sum())


def test_both_curves_are_drawn(run, tmp_path):
    fill(run, evaluations=range(10_240, 60_000, 10_240))
    out = plot(run, tmp_path / "deep" / "curve.png")
    assert out == tmp_path / "deep" / "curve.png"
    assert Image.open(out).size == (1280, 720)
    assert pixels(out, BLUE) > 1000
    assert pixels(out, ORANGE) > 500
    assert [path.name for path in out.parent.iterdir()] == ["curve.png"]


def test_superseded_records_are_not_drawn(run, tmp_path):
    fill(run)
    once = plot(run, tmp_path / "once.png").read_bytes()
    metrics.append(run.folder, {"env_steps": 70_000, "metrics": {"train/return": -10_000.0}})
    metrics.rewind(run.folder, 60_000, 2)
    assert plot(run, tmp_path / "again.png").read_bytes() == once


@pytest.mark.parametrize(("training", "evaluations"), [(True, ()), (False, (10_240,)), (False, (10_240, 20_480))])
def test_one_curve_is_enough(run, tmp_path, training, evaluations):
    fill(run, training=training, evaluations=evaluations)
    out = plot(run, tmp_path / "curve.png")
    assert (pixels(out, BLUE) > 500) == training
    assert (pixels(out, ORANGE) > 30) == bool(evaluations)


def test_non_finite_numbers_are_left_out(run, tmp_path):
    fill(run)
    for value in (math.nan, math.inf):
        metrics.append(run.folder, {"env_steps": 70_000, "metrics": {"train/return": value, "eval/return": value}})
    assert pixels(plot(run, tmp_path / "curve.png"), BLUE) > 1000


@pytest.mark.parametrize(
    ("name", "start"), [("curve.svg", b"<?xml"), ("curve.pdf", b"%PDF"), ("CURVE.PNG", b"\x89PNG")]
)
def test_suffix_selects_the_format(run, tmp_path, name, start):
    fill(run)
    assert plot(run, tmp_path / name).read_bytes().startswith(start)


def test_run_without_returns_and_unknown_format_are_refused(run, tmp_path):
    with pytest.raises(UseError, match="has no return to plot yet"):
        plot(run, tmp_path / "curve.png")
    fill(run)
    with pytest.raises(UseError, match=r"curve.docx is not an image file"):
        plot(run, tmp_path / "curve.docx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_unwritable_path_is_an_error(run, tmp_path):
    fill(run)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TiltyardError, match="could not be written"):
        plot(run, tmp_path / "file" / "curve.png")
