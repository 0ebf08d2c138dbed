"""TensorBoard events, read by TensorBoard."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tiltyard.track.tensorboard import TensorBoardTracker


def record(env_steps, **metrics):
    return {"env_steps": env_steps, "metrics": {name.replace("__", "/"): value for name, value in metrics.items()}}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_metric_is_recorded_at_its_env_step(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tb", None)
    for step in range(0, 1000, 100):
        tracker.record(record(step, train__return=step / 2, loss__kl=0.25))
    tracker.close()
    found = scalars(tmp_path / "tb")
    assert found == {
        "train/return": [(step, step / 2) for step in range(0, 1000, 100)],
        "loss/kl": [(step, 0.25) for step in range(0, 1000, 100)],
    }


def test_non_finite_numbers_and_large_steps_are_recorded(tmp_path):
    tracker = TensorBoardTracker(tmp_path, None)
    tracker.record(record(10**15, a=math.nan, b=math.inf, c="-inf", d=7))
    tracker.close()
    found = scalars(tmp_path)
    assert math.isnan(found["a"][0][1])
    assert (found["b"], found["c"], found["d"]) == ([(10**15, math.inf)], [(10**15, -math.inf)], [(10**15, 7.0)])


def test_resume_supersedes_events_after_its_checkpoint(tmp_path):
    for purge, steps, value in (
        (1, range(100, 1000, 100), 1.0),
        (601, range(700, 1200, 100), 2.0),
        (1001, range(1100, 1300, 100), 3.0),
    ):
        tracker = TensorBoardTracker(tmp_path, purge)
        for step in steps:
            tracker.record(record(step, x=value))
        tracker.close()
    expected = (
        [(s, 1.0) for s in range(100, 700, 100)]
        + [(s, 2.0) for s in range(700, 1100, 100)]
        + [(1100, 3.0), (1200, 3.0)]
    )
    assert scalars(tmp_path) == {"x": expected}


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom tiltyard.track.tensorboard import TensorBoardTracker\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code), *arguments], capture_output=True, text=True
    )


def test_every_record_is_kept_after_sigkill(tmp_path):
    ended = child(
        """
        tracker = TensorBoardTracker(Path(sys.argv[1]), None)
        for step in range(50):
            tracker.record({"env_steps": step, "metrics": {"x": 1.0}})
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path),
    )
    assert ended.returncode == -signal.SIGKILL
    assert [step for step, _ in scalars(tmp_path)["x"]] == list(range(50))


def test_full_disk_raises_an_error_and_older_events_stay_readable(tmp_path):
    ended = child(
        """
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # bytes per file, as on a disk that fills up
        tracker = TensorBoardTracker(Path(sys.argv[1]), None)
        for step in range(100):
            try:
                tracker.record({"env_steps": step, "metrics": {"x": 1.0}})
            except OSError as error:
                sys.exit(f"{step} {error}")
        """,
        str(tmp_path),
    )
    assert ended.returncode == 1
    written = int(ended.stderr.split()[0])
    assert 5 < written < 50
    assert [step for step, _ in scalars(tmp_path)["x"]] == list(range(written))


def test_close_leaves_no_threads_or_file_handles(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))
    for _ in range(5):
        tracker = TensorBoardTracker(tmp_path, 0)
        tracker.record(record(1, x=1.0))
        tracker.close()
    assert (len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))) == before
    assert len(list(tmp_path.iterdir())) == 5
