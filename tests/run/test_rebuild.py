"""A damaged status.json is one row in a listing, and is rebuilt from what the run's other files say."""

import json

import pytest

from tests.cli.test_runs import make, root, tiltyard, trained  # noqa: F401 - fixtures
from tiltyard.run import atomic
from tiltyard.run.folder import Run, find
from tiltyard.run.status import STATUS, list_runs, read_status, write_status

DAMAGES = {
    "empty": "",
    "cut": '{"schema": 1, "id": "to',
    "nested": "[" * 100_000,
    "another time": json.dumps({"schema": 1, "created": 5}),
    "a huge return": json.dumps({"schema": 1, "return": 10**400}),
    "huge progress": json.dumps({"schema": 1, "progress": {"env_steps": 10**400}}),
    "tags": json.dumps({"schema": 1, "tags": [5]}),
    "progress": json.dumps({"schema": 1, "progress": 5}),
    "notes": json.dumps({"schema": 1, "notes": None}),
    "state": json.dumps({"schema": 1, "state": "asleep"}),
    "schema": json.dumps({"schema": "one"}),
    "zeros": "\0" * 50,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_one_bad_status_is_one_row_and_the_others_stand(root, tiltyard, damage):  # noqa: F811
    sound, struck = trained(root), trained(root)
    before = json.loads(tiltyard("ls", "--json").stdout)
    (struck.folder / STATUS).write_text(damage)
    rows = json.loads(tiltyard("ls", "--json").stdout)
    assert rows[0] == before[0] and [row["id"] for row in rows] == [sound.id, struck.id]  # in the same order
    assert rows[1]["state"] == "damaged" and STATUS in rows[1]["reason"]
    assert "damaged" in tiltyard("ls").stdout and find("last", root) == struck
    shown = json.loads(tiltyard("show", "last", "--json").stdout)
    assert shown["id"] == struck.id and STATUS in shown["damaged"][0]
    assert "rebuilt from events, checkpoints and metrics" in tiltyard("show", "last").stdout


def test_flipped_bits_in_a_status_are_noticed(root):  # noqa: F811
    path = make(root).folder / STATUS
    whole, sound = path.read_bytes(), read_status(path.parent)
    for place in range(0, len(whole), 3):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        try:
            found = read_status(path.parent)
        except ValueError:
            assert list_runs(root)[0]["state"] == "damaged"
        else:  # the bit is in the name of the checksum, or makes no difference to JSON
            assert {name: found[name] for name in sound} == sound


def test_readers_rebuild_in_memory_and_the_owner_writes(root):  # noqa: F811
    run = trained(root, tags=["a"], notes="careful")
    (run.folder / STATUS).write_text("{")
    found = run.status()
    assert found["damaged"].startswith("status.json is damaged (") and found["progress"]["env_steps"] == 200
    assert (found["tags"], found["notes"], found["return"], found["best"]) == (["a"], "careful", 22.5, 45.0)
    assert (run.folder / STATUS).read_text() == "{"
    write_status(run, notes="written")
    assert run.status()["notes"] == "written" and "damaged" not in run.status()


def test_status_of_an_earlier_version_has_no_checksum(root):  # noqa: F811
    run = make(root)
    status = atomic.read_sealed(run.folder / STATUS)
    atomic.write_json(run.folder / STATUS, {key: each for key, each in status.items() if key not in ("profile", "job")})
    assert Run(run.folder).status() == status
