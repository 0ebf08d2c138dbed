"""experiment.yaml decides what is trained: edits are refused, damage is repaired from the copy, rot is not believed."""

import random

import pytest

from tests.counts import count
from tiltyard.config.experiment import Experiment
from tiltyard.errors import UseError
from tiltyard.run import atomic
from tiltyard.run.create import Source, create
from tiltyard.run.folder import Run, find
from tiltyard.run.settings_file import COPY, read_settings, restore_settings, write_settings


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TILTYARD_RUNS", str(tmp_path))
    return create(
        tmp_path,
        Experiment.model_validate({"name": "toy", "env": {"id": "CartPole-v1"}, "algo": {"id": "ppo", "lr": 0.003}}),
    )


def test_no_flipped_bit_becomes_another_setting(run: Run):
    """Without a checksum, 45 of 600 flipped bits were believed as other settings."""
    sound, whole, rng = run.experiment(), run.experiment_file.read_bytes(), random.Random(0)
    refused = []
    for _ in range(count(600)):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        run.experiment_file.write_bytes(data)
        try:
            assert run.experiment() == sound
        except UseError as error:
            refused.append(error.message)
    assert refused and all(str(run.experiment_file) in message for message in refused)


def test_edited_settings_are_refused_with_the_command_to_type_instead(run: Run):
    text = run.experiment_file.read_text()
    run.experiment_file.write_text(text.replace("lr: 0.003", "lr: 0.004").replace("seed: 0", "seed: 7", 1))
    with pytest.raises(UseError) as caught:
        run.experiment()
    for part in (str(run.experiment_file), "algo.lr = 0.004 (was 0.003)", "seed = 7 (was 0)"):
        assert part in caught.value.message
    assert f"rm {run.experiment_file} && tiltyard resume {run.id} " in caught.value.hint
    assert "algo.lr=0.004" in caught.value.hint and "fork" in caught.value.hint
    assert read_settings(run.folder).experiment.seed == 0  # to be shown
    run.experiment_file.unlink()
    assert find(run.id).experiment().algo.lr == 0.003


def test_comments_and_order_are_not_edits(run: Run):
    run.experiment_file.write_text("# mine\n" + run.experiment_file.read_text())
    assert run.experiment().seed == 0 and not run.damage()


@pytest.mark.parametrize("damage", ["", "{", "\0", "version: 1\n", "env: [", None])
def test_damaged_settings_are_those_of_the_copy_until_a_resume_writes_them(run: Run, damage):
    sound, text = run.experiment(), run.experiment_file.read_text()
    run.experiment_file.unlink() if damage is None else run.experiment_file.write_text(damage)
    assert run.experiment() == sound
    assert len(run.damage()) == 1 and str(run.experiment_file) in run.damage()[0] and COPY in run.damage()[0]
    restore_settings(run)
    assert run.experiment_file.read_text() == text and not run.damage()


def test_a_crash_between_the_two_files_is_not_an_edit(run: Run):
    before = run.experiment_file.read_text()
    now = run.experiment().model_copy(update={"seed": 5})
    write_settings(run.folder, now)
    assert run.experiment() == now
    run.experiment_file.write_text(before)
    assert run.experiment().seed == 0 and not run.damage()


def test_runs_of_earlier_versions_and_a_damaged_copy_use_the_file(run: Run):
    sound = run.experiment()
    (run.folder / COPY).write_text("{")
    assert run.experiment() == sound
    (run.folder / COPY).unlink()
    assert run.experiment() == sound
    atomic.write_text(run.experiment_file, run.experiment_file.read_text().replace("seed: 0", "seed: 3", 1))
    assert run.experiment().seed == 3


def test_changed_copies_of_plug_ins_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TILTYARD_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("import torch\n\nclass Net(torch.nn.Module): ...\n")
    settings = {"name": "toy", "env": {"id": "CartPole-v1"}, "model": {"id": "net.py:Net"}}
    made = create(tmp_path / "runs", Experiment.model_validate(settings), Source(base=[tmp_path]))
    assert not made.damage()
    copy = made.folder / "plugins" / "net.py"
    copy.write_text(copy.read_text().replace("Module", "Modula"))
    assert made.damage() == [f"{copy} was changed after the run was created"]
    copy.unlink()
    assert made.damage() == [f"{copy} cannot be read: No such file or directory"]
