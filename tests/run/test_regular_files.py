"""Checkpoints of other users: planted files, links, FIFOs and devices are found, and never copied."""

import os
import shutil
import stat

import pytest

from tests.run.test_checkpoint import save
from tests.second_user import STRANGER, needs_root
from tiltyard.errors import TiltyardError
from tiltyard.run import atomic, checkpoint
from tiltyard.run.folder import Run
from tiltyard.run.regular_files import copy_files


def swap(place, private):
    place.unlink()
    place.symlink_to(private)


PLANTED = {
    "notes.txt": lambda folder, private: (folder / "notes.txt").write_text("mine"),
    "policies/rival.json": lambda folder, private: (folder / "policies" / "rival.json").write_text("{}"),
    "linked": lambda folder, private: (folder / "linked").symlink_to(private),
    "folder": lambda folder, private: (folder / "folder").symlink_to(private.parent),
    "gone": lambda folder, private: (folder / "gone").symlink_to(folder / "missing"),
    "pipe": lambda folder, private: os.mkfifo(folder / "pipe"),
    "device": lambda folder, private: os.mknod(folder / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5)),
    "loop.json": lambda folder, private: swap(folder / "loop.json", private),
    "manifest.json": lambda folder, private: swap(
        folder / "manifest.json", shutil.copy(folder / "manifest.json", private)
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_file_that_is_not_in_the_manifest_is_found_and_not_copied(bare_run, tmp_path, name):
    if name == "device" and os.getuid() != 0:
        pytest.skip("only root can make a device")
    private = tmp_path / "private" / "key"
    private.parent.mkdir()
    private.write_text("secret")
    save(bare_run, 100)
    found = save(bare_run, 200)
    PLANTED[name](found.folder, private)
    reason = checkpoint.verify(found.folder)
    assert reason is not None and reason.startswith(f"{name} ")
    newest, warnings = checkpoint.newest_valid(bare_run)
    assert newest.env_steps == 100 and len(warnings) == 1 and name in warnings[0]
    fork = Run(tmp_path / "runs" / "fork" / "0001-calm-crow")
    fork.folder.mkdir(parents=True)
    with pytest.raises(TiltyardError, match=name):  # although the checkpoint was chosen before the file was planted
        checkpoint.copy_into(fork, found, score=None)
    assert not any(fork.checkpoints.iterdir())


@needs_root
def test_checkpoints_behind_a_link_of_another_user_are_not_used(bare_run, tmp_path):
    found, elsewhere = save(bare_run, 100), tmp_path / "elsewhere"
    bare_run.checkpoints.rename(elsewhere)
    bare_run.checkpoints.symlink_to(elsewhere)
    assert checkpoint.verify(found.folder) is None
    os.chown(bare_run.checkpoints, STRANGER, STRANGER, follow_symlinks=False)
    assert checkpoint.verify(found.folder).endswith(f"checkpoints is a link of another user, {STRANGER}")


def test_copies_are_not_more_readable_than_their_sources(bare_run, tmp_path):
    found = save(bare_run, 100)
    (found.folder / "loop.json").chmod(0o600)
    for link in (False, True):
        place = tmp_path / f"copy-{link}"
        copy_files(found.folder, place, link=link)
        assert checkpoint.verify(place) is None
        assert stat.S_IMODE((place / "loop.json").stat().st_mode) == 0o600
        assert (place / "loop.json").samefile(found.folder / "loop.json") is link


def test_fifo_in_place_of_a_json_file_is_an_error_at_once(tmp_path):
    os.mkfifo(tmp_path / "status.json")
    with pytest.raises(OSError, match="not a regular file"):
        atomic.read_json(tmp_path / "status.json")
