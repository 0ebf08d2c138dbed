"""A sweep on disk: lookup by name, and concurrent decisions of users and controllers."""

import threading
from pathlib import Path

import pytest

from tests.sweep.fake import fake_sweep
from tiltyard.errors import UseError
from tiltyard.run.folder import Run
from tiltyard.run.lock import guard
from tiltyard.sweep.folder import find_sweep


def test_sweep_name_matches_the_same_sweep_inside_the_folder_of_another(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sweep stop OTHER` in the folder of a sweep must not stop that sweep."""
    root = runs.absolute()
    first, second = fake_sweep(root, 1, 1), fake_sweep(root, 1, 1)
    for place in (first.folder, first.place(1)):
        monkeypatch.chdir(place)
        (place / "fake").mkdir()  # same name as the sweep
        for name in ("last", "fake", "2", "fake/sweep-0002"):
            assert find_sweep(name, root) == second
        for name in ("nonsense", "../sweep-0003", "sweep-0001/nonsense", "../../.."):
            with pytest.raises(UseError, match=r"^no sweep '"):
                find_sweep(name, root)
        for path in (".", "./", "fake/", str(first.place(1)), first.place(1) / "metrics.jsonl"):
            assert find_sweep(path, root) == first


def test_decisions_are_written_one_at_a_time(runs: Path) -> None:
    """On NFS, appends from two machines can overwrite each other, and the retry of a user would be lost."""
    sweep = fake_sweep(runs, 1, 1)
    person = threading.Thread(target=sweep.decide, args=("retry",), kwargs={"trial": 1})
    with guard(Run(sweep.folder)):  # as another process would hold it
        person.start()
        person.join(0.3)
        assert sweep.decisions() == []
    person.join()
    assert [each["kind"] for each in sweep.decisions()] == ["retry"]
