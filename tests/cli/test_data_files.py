"""`tiltyard data verify`, `repair` and `pack`: output, exit codes, and wrong use."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.data.episodes import episode, writer
from tiltyard.data import manifest, tfrecord
from tiltyard.data.folder import read_episodes
from tiltyard.run import atomic


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    place = tmp_path / "set"
    made = writer(place)
    for number in range(6):
        made.commit(number, [episode(70, number)])
    made.close()
    return place


def flip(path: Path, place: int = 300) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_verify_repair_and_pack(tiltyard: Command, dataset: Path) -> None:
    size = sum(entry.bytes for entry in manifest.read(dataset))
    assert tiltyard("data", "verify", "set").stdout == f"set: 6 episodes, {size:,} bytes, all sound\n"
    packed = json.loads(tiltyard("data", "pack", "set", "--shard-mb", "0.05", "--json").stdout)
    assert packed["episodes"] == packed["removed"] == 6 and packed["shards"] > 1 and packed["skipped"] == []
    assert "0 episodes packed" in tiltyard("data", "pack", "set").stdout
    shard = dataset / manifest.read(dataset).entry(2).file
    flip(shard, manifest.read(dataset).entry(2).offset + 300)
    wrong = tiltyard("data", "verify", "set", expect=1)
    head, line = wrong.stdout.splitlines()
    assert head.split() == ["file", "place", "episode", "damage"]
    assert line.startswith(f"set/shards/{shard.name}  row group 0  episode 2  its checksum differs")
    assert "tiltyard data repair set" in wrong.stderr
    (damage,) = json.loads(tiltyard("data", "verify", "set", "--json", expect=1).stdout)["places"][0]["damages"]
    assert damage["file"].endswith(shard.name) and damage["episode"] == "episode 2"
    dry = tiltyard("data", "repair", "set", "--dry-run")
    planned = dry.stdout
    assert "lost: episode 2; its file is to be moved to set/quarantine" in dry.stderr
    assert f"move shards/{shard.name} to quarantine" in planned and shard.exists()
    done = tiltyard("data", "repair", "set")
    assert done.stdout.startswith(planned) and "5 episodes are sound, 1 is lost" in done.stdout
    assert "lost: episode 2; its file is in set/quarantine" in done.stderr
    tiltyard("data", "verify", "set")
    assert tiltyard("data", "repair", "set").stdout == "set: nothing to repair\n"
    assert json.loads(tiltyard("data", "repair", "set", "--json").stdout)["steps"] == []
    assert [each.seed for each in read_episodes(dataset)] == [0, 1, 3, 4, 5]


def test_repair_says_that_a_file_is_missing(tiltyard: Command, dataset: Path) -> None:
    files = [dataset / entry.file for entry in manifest.read(dataset)]
    for place in (1, 2):
        files[place].unlink()
    flip(files[4])
    for words, where in ((["--dry-run"], "to be moved to"), ([], "in")):
        lines = tiltyard("data", "repair", "set", *words).stderr.splitlines()
        assert lines == [
            f"lost: episode 4; its file is {where} set/quarantine",
            "lost: episode 1, episode 2; their files are missing",
        ]
    assert "3 episodes" in tiltyard("data", "verify", "set").stdout


def test_one_thing_is_not_a_plural(tiltyard: Command, tmp_path: Path) -> None:
    made = writer(tmp_path / "one")
    made.commit(0, [episode(4, 0)])
    made.commit(1, [episode(4, 1)])
    made.close()
    flip(tmp_path / "one" / manifest.read(tmp_path / "one").entry(0).file)
    repaired = tiltyard("data", "repair", "one").stdout
    assert " without 1 line\n" in repaired and "1 episode is sound, 1 is lost" in repaired
    assert "one: 1 episode, " in tiltyard("data", "verify", "one").stdout
    packed = tiltyard("data", "pack", "one")
    assert "1 episode packed into 1 shard, " in packed.stdout and packed.stderr.endswith(": 1 episode\n")
    exported = tiltyard("data", "export", "one", "--to", "npz", "--out", "files").stdout
    assert exported.startswith("files: 1 episode, 4 steps, 1 file, ")
    assert tiltyard("data", "import", "files", "--out", "new").stdout == "new: 1 episode, 4 steps\n"


def test_verify_reads_tfrecord_files_by_a_pattern(tiltyard: Command, dataset: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for index in range(2):
        with (old / f"rollouts.tfrecord-0000{index}-of-00002").open("wb") as file:
            for number in range(3):
                tfrecord.write_record(file, bytes([number]) * 50)
    sound = tiltyard("data", "verify", "old/*.tfrecord*", str(dataset)).stdout
    assert sound.count("all sound") == 3
    flip(old / "rollouts.tfrecord-00001-of-00002", 66 + 20)
    wrong = tiltyard("data", "verify", str(old / "*.tfrecord*"), expect=1).stdout.splitlines()
    assert len(wrong) == 2 and wrong[1].split()[:3] == [str(old / "rollouts.tfrecord-00001-of-00002"), "record", "1"]


@pytest.mark.parametrize("command", ["verify", "repair", "pack"])
def test_wrong_folders_are_refused(tiltyard: Command, dataset: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for name, expected in (("absent", "there is no dataset"), ("other", "is not a dataset")):
        output = tiltyard("data", command, name, expect=2)
        assert expected in output.stderr and "hint: " in output.stderr and output.stdout == ""
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]
    if command == "verify":
        assert "neither a dataset nor a TFRecord" in tiltyard("data", "verify", "other/*.txt", expect=2).stderr
    atomic.write_sealed(dataset / "dataset.json", {"schema": 3})
    before = sorted(dataset.rglob("*.*"))
    output = tiltyard("data", command, "set", expect=2)
    assert "was written by a newer Tiltyard (schema 3" in output.stderr and "update Tiltyard" in output.stderr
    assert set(before) <= set(dataset.rglob("*.*"))


def test_size_of_a_shard_is_checked(tiltyard: Command, dataset: Path) -> None:
    for wrong in ("0", "-1", "nan", "many"):
        assert "must be a number of MiB" in tiltyard("data", "pack", "set", "--shard-mb", wrong, expect=2).stderr


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_full_disk_loses_nothing(tiltyard: Command, dataset: Path, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    with mounted(place, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        shutil.copytree(dataset, place / "set")
        expected = [entry.sha256 for entry in manifest.read(place / "set")]
        ballast = place / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(place).free - 8192))
        output = tiltyard("data", "pack", "small/set", expect=2)
        assert "bytes for new files, but the disk has" in output.stderr and "--shard-mb" in output.stderr
        flip(place / "set" / "dataset.json", 30)
        flip(place / "set" / manifest.read(place / "set").entry(1).file)
        output = tiltyard("data", "repair", "small/set", expect=2)
        assert "but the disk has" in output.stderr and "nothing was changed" in output.stderr
        ballast.unlink()
        assert [entry.sha256 for entry in manifest.read(place / "set")] == expected
        tiltyard("data", "repair", "small/set")
        tiltyard("data", "verify", "small/set")
        assert [entry.sha256 for entry in manifest.read(place / "set")] == [expected[0], *expected[2:]]


def test_folder_that_cannot_be_written(tiltyard: Command, dataset: Path) -> None:
    with mounted(dataset, "--bind", str(dataset)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(dataset)], check=True)
        tiltyard("data", "verify", "set")
        for command in ("pack", "repair"):
            output = tiltyard("data", command, "set", expect=2)
            assert "cannot write to set: Read-only file system" in output.stderr and "hint: " in output.stderr
    assert len(list(read_episodes(dataset))) == 6
