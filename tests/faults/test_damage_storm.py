"""Any file of a run, a sweep, a population or a folder of episodes may be damaged: no command crashes, hangs, starts over or
believes it."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import count
from tests.faults.damage import KINDS
from tests.faults.storm import NAMES, REPORT
from tiltyard.run.folder import Run, find
from tiltyard.run.status import STATUS

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xdist_group("damage storm"), pytest.mark.timeout(4 * 3600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The places after the storm, with its report."""
    folder = tmp_path_factory.mktemp("storm") / "home"
    command = [sys.executable, "-m", "tests.faults.storm", str(folder), "0", str(count(1000))]
    with (folder.parent / "output").open("w+") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False)
    assert done.returncode == 0, (folder.parent / "output").read_text()[-3000:]
    return folder


def test_damaged_files_cause_no_crash_no_hang_no_wrong_result_and_no_fresh_start(home: Path) -> None:
    found = [json.loads(line) for line in (home / REPORT).read_text().splitlines()]
    assert [each for each in found if each["wrong"]] == []
    assert len(found) == count(1000)
    struck = collections.Counter((NAMES[each["number"] % len(NAMES)], each["kind"]) for each in found)
    assert len(struck) == len(NAMES) * len(KINDS)


def test_rebuilt_status_is_the_one_that_was_there(home: Path) -> None:
    run: Run = find("struck", home / "run" / "runs")
    whole, before = (run.folder / STATUS).read_bytes(), run.status()
    try:
        (run.folder / STATUS).write_bytes(whole[:100])
        found = run.status()
    finally:
        (run.folder / STATUS).write_bytes(whole)
    assert found.pop("damaged").startswith("status.json is damaged (")
    by_chance = {"updated", "created", "heartbeat", "host", "pid", "save_seconds"}
    assert {key: found[key] for key in found.keys() - by_chance} == {
        key: before[key] for key in before.keys() - by_chance
    }
