"""Damaged files of a sweep: it is reported, what can be rebuilt is, and no finished trial is trained again."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.sweep.fake import fake_sweep
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.sweep.controller import run_controller
from tiltyard.sweep.damage import find_damage
from tiltyard.sweep.folder import DECISIONS, FACTS, MANIFEST, PLAN, Sweep, sweeps
from tiltyard.sweep.report import summarize
from tiltyard.sweep.results import RESULTS


class Idle:
    """A backend of a sweep in which nothing may be started."""

    queues = False

    def __init__(self, *_: object) -> None:
        self.jobs: dict[int, str] = {}
        self.gone: dict[int, str] = {}

    def adopt(self, numbers: Iterable[int]) -> set[int]:
        return set()

    def has_capacity(self, number: int | None) -> bool:
        return True

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        raise AssertionError(f"trial {number} was started again")

    def poll(self) -> dict[int, str]:
        return {}

    def cancel(self, numbers: Iterable[int]) -> None: ...


def flip_name(sweep: Path) -> None:
    """One bit of `names`, from which the names of folders follow."""
    text = (sweep / FACTS).read_text()
    assert '"names": "f' in text
    (sweep / FACTS).write_text(text.replace('"names": "f', '"names": "g'))


def flip_name_of_an_earlier_version(sweep: Path) -> None:
    flip_name(sweep)
    facts = json.loads((sweep / FACTS).read_text())
    atomic.write_json(sweep / FACTS, {key: each for key, each in facts.items() if key not in ("sha256", "plan")})
    (sweep / "events.jsonl").unlink()


def cut_facts(sweep: Path) -> None:
    (sweep / FACTS).write_text("{")


def cut_manifest(sweep: Path) -> None:
    lines = (sweep / MANIFEST).read_text().splitlines()
    (sweep / MANIFEST).write_text("\n".join([*lines[:2], lines[2].replace('"point": 3', '"point": 4'), lines[3][:20]]))


def cut_results(sweep: Path) -> None:
    (sweep / RESULTS).write_text('{"trial": 1, "updated": "1", "value": "x"}\n{')


def spoil_decisions(sweep: Path) -> None:
    (sweep / DECISIONS).write_text(
        '{"kind": 5}\n{"time": "x", "kind": "retry", "trial": 1, "crc": "00000000"}\n5\n{"ti'
    )


DAMAGES = [flip_name, flip_name_of_an_earlier_version, cut_facts, cut_manifest, cut_results, spoil_decisions]


@pytest.mark.parametrize("damage", DAMAGES)
def test_finished_trials_are_not_trained_again(runs: Path, damage: Callable[[Path], None]) -> None:
    whole = fake_sweep(runs, 4, 1)
    before = summarize(whole)
    sweep = Sweep(Path(shutil.copytree(whole.folder, whole.folder.with_name("sweep-0002"))))
    damage(sweep.folder)
    for _ in range(2):  # before and after the repair
        found = summarize(sweep)
        assert found.state == "finished" and found.counts == {"finished": 4}
        rows = {row.trial.number: row for row in found.rows}
        same = [row for row in before.rows if row.trial.number in rows]
        assert len(same) == 4
        for row in same:
            assert rows[row.trial.number].trial == row.trial and rows[row.trial.number].value == row.value
        assert run_controller(sweep, Idle, print) == 0


def test_damage_is_reported_and_sweep_json_restored(runs: Path, tiltyard: Command) -> None:
    sweep = fake_sweep(runs, 4, 1)
    whole = (sweep.folder / FACTS).read_text()
    assert find_damage(sweep, sweep.plan()) == []
    for damage in (flip_name, cut_manifest, spoil_decisions):
        damage(sweep.folder)
    shown = tiltyard("sweep", "status", sweep.id).stdout
    for part in ("damaged  sweep.json (", "line 3 of manifest.jsonl", "line 2 of decisions.jsonl"):
        assert part in shown
    assert len(json.loads(tiltyard("sweep", "status", sweep.id, "--json").stdout)["damaged"]) == 3
    assert run_controller(sweep, Idle, print) == 0
    assert (sweep.folder / FACTS).read_text() == whole
    assert "recovered" in [event["kind"] for event in read_events(Run(sweep.folder))]


def test_changed_plan_is_refused(runs: Path) -> None:
    sweep = fake_sweep(runs, 2, 1)
    (sweep.folder / PLAN).write_text((sweep.folder / PLAN).read_text().replace("retries: ", "retries: 1"))
    with pytest.raises(UseError, match=r"plan\.yaml was changed after the sweep was started"):
        sweep.plan()


def test_without_any_copy_the_damaged_file_is_named_and_other_sweeps_stand(runs: Path) -> None:
    sweep, other = fake_sweep(runs, 1, 1), fake_sweep(runs, 1, 1)
    (sweep.folder / "events.jsonl").unlink()
    cut_facts(sweep.folder)
    assert {each.id for each in sweeps(runs)} == {sweep.id, other.id}
    with pytest.raises(TiltyardError, match=r"sweep\.json is damaged"):
        sweep.facts()
