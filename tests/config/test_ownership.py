"""config/ownership.py: files, folders and links of another user are found, root's and one's own are not."""

import os
from pathlib import Path

import pytest

from tests.second_user import STRANGER, as_stranger, give, needs_root, open_folder
from tiltyard.config.ownership import Foreign, find_foreign, refuse_foreign
from tiltyard.errors import UseError

pytestmark = needs_root


def file_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def test_own_and_missing_files_are_not_foreign(tmp_path):
    assert find_foreign(file_at(tmp_path / "a")) is None
    assert find_foreign(tmp_path / "missing" / "b", tmp_path) is None


def test_folders_above_count_up_to_the_top_only(tmp_path):
    file = file_at(tmp_path / "shared" / "run" / "plugins" / "net.py")
    os.chown(tmp_path / "shared", STRANGER, STRANGER)
    assert find_foreign(file, tmp_path / "shared" / "run") is None
    os.chown(file.parent, STRANGER, STRANGER)
    assert find_foreign(file) is None
    assert find_foreign(file, tmp_path / "shared" / "run") == Foreign(file.parent, str(STRANGER))


def test_link_counts_with_each_target(tmp_path):
    own, foreign = file_at(tmp_path / "own"), give(file_at(tmp_path / "foreign"))
    (tmp_path / "to-foreign").symlink_to("foreign")
    (tmp_path / "middle").symlink_to(own)
    (tmp_path / "first").symlink_to("middle")
    assert find_foreign(tmp_path / "to-foreign") == Foreign(foreign, str(STRANGER))
    assert find_foreign(tmp_path / "first") is None
    give(tmp_path / "middle")
    assert find_foreign(tmp_path / "first") == Foreign(tmp_path / "middle", str(STRANGER))
    (tmp_path / "loop").symlink_to("loop")
    assert find_foreign(tmp_path / "loop") is None


def test_fifo_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert find_foreign(give(tmp_path / "fifo")) is not None


def test_root_is_trusted_by_every_user():
    with open_folder() as folder:
        roots, third = file_at(folder / "root"), give(file_at(folder / "third"), STRANGER + 1)

        def check() -> None:
            assert find_foreign(roots) is None
            assert find_foreign(third) == Foreign(third, str(STRANGER + 1))

        as_stranger(check)


def test_refusal_names_file_owner_decision_and_way_out(tmp_path):
    file = give(file_at(tmp_path / "plan.yaml"), 1)
    with pytest.raises(UseError) as error:
        refuse_foreign([tmp_path, file], "which program runs")
    assert error.value.message == f"{file} belongs to another user, daemon, and decides which program runs"
    assert "--trust-code" in error.value.hint and "trust_code=True" in error.value.hint
