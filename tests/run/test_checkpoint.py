"""Checkpoints under real faults: killed processes, full disks, flipped bits, truncated files."""

import json
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest

from tests.counts import count
from tiltyard.config.sections import Save
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, checkpoint, state_file
from tiltyard.run.checkpoint_files import link_files
from tiltyard.run.folder import Run
from tiltyard.types import Progress


def save(run, steps, score=None, *, milestone=False, size=8):
    def write(folder):
        state_file.write_tree(folder / "policies", "main", {"weights": np.full(size, steps, np.float32)})
        state_file.write_tree(folder, "loop", {"steps": steps})

    return checkpoint.commit(run, steps, Progress(env_steps=steps, updates=3), score, write, milestone=milestone)


def content(found):
    return int(state_file.read_tree(found.folder / "policies", "main")["weights"][0])


def names(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def steps_of(checkpoints):
    return [one.env_steps for one in checkpoints]


# ---------------------------------------------------------------------------------------------- normal use


def test_committed_checkpoint_is_listed_verified_and_read(bare_run):
    made = save(bare_run, 1000, 12.5)
    assert made.folder == bare_run.checkpoints / "000000001000"
    assert checkpoint.list_checkpoints(bare_run) == [made]
    assert checkpoint.newest_valid(bare_run) == (made, [])
    assert made.progress == Progress(env_steps=1000, updates=3) and made.score == 12.5 and content(made) == 1000
    manifest = json.loads((made.folder / "manifest.json").read_text())
    assert manifest["schema"] == 1 and manifest["tiltyard"] and set(manifest["files"]) == {
        "policies/main.safetensors", "policies/main.json", "loop.json", "loop.safetensors"}  # fmt: skip


def test_run_without_checkpoints_gives_none_and_select_fails(bare_run):
    assert checkpoint.newest_valid(bare_run) == (None, [])
    assert checkpoint.list_checkpoints(bare_run) == []
    with pytest.raises(UseError, match="no checkpoint yet"):
        checkpoint.select(bare_run)


def test_second_save_of_a_step_replaces_the_first(bare_run):
    save(bare_run, 500, 1.0)
    for score in (2.0, 3.0):
        made = save(bare_run, 500, score)
        assert names(bare_run) == ["000000000500"] and made.folder.name == "000000000500"
        assert [one.score for one in checkpoint.list_checkpoints(bare_run)] == [score]


def test_crash_between_the_renames_of_a_second_save_loses_nothing(bare_run):
    save(bare_run, 500, 1.0)
    first = bare_run.checkpoints / "000000000500"
    shutil.copytree(first, bare_run.checkpoints / "kept")
    save(bare_run, 500, 2.0)
    first.rename(bare_run.checkpoints / "000000000500.1")  # the new one is listed, but the old one is not removed yet
    assert checkpoint.newest_valid(bare_run)[0].score == 2.0
    (bare_run.checkpoints / "kept").rename(first)
    found, warnings = checkpoint.newest_valid(bare_run)
    assert warnings == [] and found.score == 2.0
    made = save(bare_run, 500, 9.0)
    assert names(bare_run) == ["000000000500"] and made.score == 9.0


def test_newest_is_the_last_committed_not_the_one_with_the_most_steps(bare_run):
    save(bare_run, 3000)
    save(bare_run, 1000)  # the run continued from an older checkpoint
    assert checkpoint.newest_valid(bare_run)[0].env_steps == 1000
    assert steps_of(checkpoint.list_checkpoints(bare_run)) == [3000, 1000]
    checkpoint.prune(bare_run, Save(last=1, best=0))
    assert names(bare_run) == ["000000001000"]


def test_failed_writer_leaves_no_files(bare_run):
    save(bare_run, 1)

    def write(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("the engine broke")

    with pytest.raises(RuntimeError, match="the engine broke"):
        checkpoint.commit(bare_run, 2, Progress(env_steps=2), None, write)
    assert names(bare_run) == ["000000000001"]


def test_symlinks_in_a_checkpoint_are_refused(bare_run, tmp_path):
    (tmp_path / "elsewhere").write_text("x")
    with pytest.raises(TiltyardError, match="not a regular file"):
        checkpoint.commit(
            bare_run,
            2,
            Progress(env_steps=2),
            None,
            lambda folder: (folder / "link").symlink_to(tmp_path / "elsewhere"),
        )
    assert names(bare_run) == []


# ---------------------------------------------------------------------------------------------- select


def test_select_by_step_best_and_path(bare_run):
    for steps, score in ((100, 5.0), (200, 9.0), (300, float("nan")), (400, 7.0), (500, None)):
        save(bare_run, steps, score)
    assert checkpoint.select(bare_run).env_steps == 500
    assert checkpoint.select(bare_run, "best", "max").env_steps == 200
    assert checkpoint.select(bare_run, "best", "min").env_steps == 100
    assert checkpoint.select(bare_run, 300).env_steps == checkpoint.select(bare_run, "300").env_steps == 300
    assert checkpoint.select(bare_run.folder, 100).env_steps == 100
    assert checkpoint.select(bare_run.checkpoints / "000000000400").score == 7.0
    with pytest.raises(UseError) as caught:
        checkpoint.select(bare_run, 250)
    assert "env step 250" in caught.value.message and "100, 200, 300, 400, 500" in caught.value.hint
    with pytest.raises(UseError, match="worst"):
        checkpoint.select(bare_run, "worst")
    with pytest.raises(UseError, match="no such folder"):
        checkpoint.select(bare_run.checkpoints / "000000000999")


def test_best_without_scores_is_an_error(bare_run):
    save(bare_run, 1)
    with pytest.raises(UseError, match="has a score"):
        checkpoint.select(bare_run, "best", "max")


# ---------------------------------------------------------------------------------------------- prune


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"last": 1, "best": 0}, [100, 600]),
        ({"last": 3, "best": 0}, [100, 400, 500, 600]),
        ({"last": 1, "best": 2}, [100, 200, 300, 600]),
        ({"last": 1, "best": 2, "mode": "min"}, [100, 400, 500, 600]),
        ({"last": 100, "best": 0}, [100, 200, 300, 400, 500, 600]),
    ],
)
def test_prune_keeps_last_best_and_milestones(bare_run, settings, kept):
    for steps, score in ((100, None), (200, 9.0), (300, 9.0), (400, 2.0), (500, 1.0), (600, float("nan"))):
        save(bare_run, steps, score, milestone=steps == 100)
    left = checkpoint.prune(bare_run, Save(**settings))
    assert steps_of(left) == kept == steps_of(checkpoint.list_checkpoints(bare_run))
    assert names(bare_run) == [f"{steps:012d}" for steps in kept]


def test_newer_checkpoint_is_best_if_scores_are_equal(bare_run):
    for steps in (1, 2, 3):
        save(bare_run, steps, 5.0)
    assert checkpoint.select(bare_run, "best", "max").env_steps == 3


def test_prune_deletes_leftovers_of_killed_saves(bare_run):
    save(bare_run, 1)
    for name in (".tmp-000000000002-dead", ".tmp-gone-000000000001-beef"):
        (bare_run.checkpoints / name / "policies").mkdir(parents=True)
        (bare_run.checkpoints / name / "policies" / "half").write_text("x")
    assert steps_of(checkpoint.list_checkpoints(bare_run)) == [1]
    checkpoint.prune(bare_run, Save())
    assert names(bare_run) == ["000000000001"]


def test_checkpoints_can_be_copied_and_set_aside(bare_run, tmp_path):
    made = save(bare_run, 700, 3.0)
    other = Run(tmp_path / "runs" / "toy" / "0002-calm-heron")
    other.folder.mkdir()
    copied = checkpoint.copy_into(other, made, score=made.score)
    assert content(copied) == 700 and copied.score == 3.0 and copied.progress == made.progress
    assert checkpoint.newest_valid(other) == (copied, [])
    (sentence,) = checkpoint.set_aside(other, 2)
    assert "checkpoints.before-attempt-2" in sentence and checkpoint.newest_valid(other) == (None, [])
    assert checkpoint.set_aside(other, 3) == []
    (made.folder / "loop.json").write_text("{}")
    with pytest.raises(TiltyardError, match=r"loop\.json"):
        checkpoint.copy_into(other, made, score=None)


# ---------------------------------------------------------------------------------------------- damage


def damage(folder, rng):
    """Flip a bit of one file, truncate it, fill it with zeros or delete it; return what was done."""
    victim = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = bytearray(victim.read_bytes())
    kind = rng.choice(["flip", "cut", "delete", "zeros"])
    if kind == "delete":
        victim.unlink()
    elif kind == "cut":
        victim.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "zeros":
        victim.write_bytes(bytes(len(data)))
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        victim.write_bytes(data)
    return f"{kind} {victim.name}"


def test_damaged_checkpoint_is_reported_and_the_previous_one_is_used(bare_run):
    save(bare_run, 100)
    newest = save(bare_run, 200).folder
    pristine = bare_run.folder / "pristine"
    shutil.copytree(newest, pristine)
    for seed in range(count(1000)):
        shutil.rmtree(newest)
        shutil.copytree(pristine, newest)
        done = damage(newest, random.Random(seed))
        found, warnings = checkpoint.newest_valid(bare_run)
        assert found.env_steps == 100 and len(warnings) == 1 and "000000000200" in warnings[0], (seed, done)


def test_run_with_only_damaged_checkpoints_does_not_start_over(bare_run):
    for steps in (100, 200):
        save(bare_run, steps)
        damage(bare_run.checkpoints / f"{steps:012d}", random.Random(steps))
    with pytest.raises(TiltyardError) as caught:
        checkpoint.newest_valid(bare_run)
    assert "000000000100" in caught.value.details and "000000000200" in caught.value.details and caught.value.hint


def test_empty_or_renamed_folder_is_invalid(bare_run):
    save(bare_run, 100)
    (bare_run.checkpoints / "000000000300").mkdir()
    save(bare_run, 200).folder.rename(bare_run.checkpoints / "000000000400")
    found, warnings = checkpoint.newest_valid(bare_run)
    assert found.env_steps == 100
    assert "manifest.json is missing" in warnings[0] and "belongs to env step 200" in warnings[1]


def test_select_skips_a_damaged_checkpoint_only_with_a_warn_function(bare_run):
    save(bare_run, 100, 1.0)
    (save(bare_run, 200, 2.0).folder / "loop.json").write_text("{}")
    with pytest.raises(TiltyardError, match=r"000000000200.*loop\.json has 2 bytes"):
        checkpoint.select(bare_run)
    warned = []
    assert checkpoint.select(bare_run, warn=warned.append).env_steps == 100 and len(warned) == 1
    for at in ("best", 200):
        with pytest.raises(UseError, match=r"000000000200 cannot be used"):
            checkpoint.select(bare_run, at, "max")


def test_checkpoint_with_a_newer_schema_is_reported_and_not_deleted(bare_run):
    save(bare_run, 100)
    made = save(bare_run, 200)
    manifest = json.loads((made.folder / "manifest.json").read_text())
    atomic.write_json(made.folder / "manifest.json", {**manifest, "schema": 99})
    found, warnings = checkpoint.newest_valid(bare_run)
    assert found.env_steps == 100 and "newer Tiltyard (schema 99" in warnings[0]
    checkpoint.prune(bare_run, Save(last=1, best=0))
    assert made.folder.exists()


# ---------------------------------------------------------------------------------------------- full disks


def test_full_disk_leaves_the_previous_checkpoint_intact(small_disk):
    run = Run(small_disk / "toy" / "0001-brisk-otter")
    run.folder.mkdir(parents=True)
    save(run, 100, size=20_000)
    for size in (120_000, 1_000_000):  # too large for the free space, and larger than the disk
        with pytest.raises(TiltyardError) as caught:
            save(run, 200, size=size)
        assert "No space left on device" in caught.value.message
        assert (
            "000000000100 is intact" in caught.value.message
            and f"tiltyard resume {run.folder}" in caught.value.hint  # a path, because it is outside the runs folder
        )
    assert names(run) == ["000000000100"]
    assert checkpoint.newest_valid(run)[0].env_steps == 100
    save(run, 300)  # there is space, because no files were left behind
    assert checkpoint.newest_valid(run)[0].env_steps == 300


def test_save_is_complete_or_undone_for_any_amount_of_free_space(small_disk):
    """Vary the free space from 0 to 44 KiB: each save is complete or changes nothing."""
    run = Run(small_disk / "toy" / "0001-brisk-otter")
    run.folder.mkdir(parents=True)
    save(run, 1)
    outcomes = set()
    free_bytes = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    ballast = small_disk / "ballast"
    for spare in range(0, 48, 4):
        ballast.write_bytes(b"")
        ballast.write_bytes(bytes(max(0, free_bytes - spare * 1024)))
        try:
            save(run, 2 + spare)
            outcomes.add("saved")
            checkpoint.prune(run, Save(last=1, best=0))
        except TiltyardError as error:
            outcomes.add("full" if "intact" in error.message else error.message)
        found, warnings = checkpoint.newest_valid(run)
        assert found is not None and warnings == []
        assert not [name for name in names(run) if name.startswith(".")]
    assert outcomes == {"saved", "full"}


def test_file_size_limit_is_reported_like_a_full_disk(bare_run, child):
    save(bare_run, 100)
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from tiltyard.errors import TiltyardError
from tiltyard.run import checkpoint, state_file
from tiltyard.run.folder import Run
from tiltyard.types import Progress
run = Run(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    checkpoint.commit(run, 200, Progress(), None, lambda f: state_file.write_tree(f, "x", {"a": np.zeros(10_000)}))
except TiltyardError as error:
    print(error.message)
"""
    out, _ = child(code, bare_run.folder).communicate(timeout=60)
    assert "File too large" in out and "000000000100 is intact" in out
    assert names(bare_run) == ["000000000100"]


def test_damage_of_a_file_does_not_become_valid_when_its_checkpoint_gets_a_score(bare_run):
    save(bare_run, 100)
    folder = checkpoint.list_checkpoints(bare_run)[-1].folder
    weights = folder / "policies" / "main.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    draft = checkpoint.Draft(bare_run, 100)
    with draft.filling() as new:
        files = link_files(folder, new, but="loop") | state_file.write_tree(new, "loop", {"steps": 100})
    scored = draft.commit(Progress(env_steps=100), 3.0, files)
    assert names(bare_run) == ["000000000100"]
    assert checkpoint.verify(scored.folder) == "policies/main.safetensors does not match its checksum"


# ---------------------------------------------------------------------------------------------- kill -9

# Imports once and forks a saver per line of input, so that 200 kills take seconds.
FORK_SERVER = """
import os, sys
from pathlib import Path
import numpy as np
from tiltyard.config.sections import Save
from tiltyard.run import checkpoint, state_file
from tiltyard.run.folder import Run
from tiltyard.types import Progress

def save_forever(run, step, confirmed):
    log = os.open(confirmed, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        step += 1
        for again in range(1 + (step % 3 == 0)):
            def write(folder):
                state_file.write_tree(folder / "policies", "main", {"weights": np.full(3000, step, np.float32)})
                state_file.write_tree(folder, "loop", {"steps": step})
            checkpoint.commit(run, step, Progress(env_steps=step), float(step), write)
            os.write(log, b"%d\\n" % step)
            checkpoint.prune(run, Save(last=2, best=1))

run = Run(Path(sys.argv[1]))
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        save_forever(run, int(line), sys.argv[2])
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


def confirmations(folder):
    """Env steps of the saves that returned before their process was killed."""
    path = folder / "confirmed"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_sigkill_at_random_times_leaves_a_valid_checkpoint(bare_run, child, tmp_path):
    """Every third step is saved twice, so that kills also interrupt replacements."""
    rng = random.Random(5)
    fork_server = child(FORK_SERVER, bare_run.folder, tmp_path / "confirmed")
    last = leftovers = 0
    for kill in range(count(200)):
        fork_server.stdin.write(f"{last}\n")
        fork_server.stdin.flush()
        pid = int(fork_server.stdout.readline())
        # Wait for a few saves, then kill it at a random point of the next one.
        enough = len(confirmations(tmp_path)) + rng.randrange(4)
        while len(confirmations(tmp_path)) < enough:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert fork_server.stdout.readline() == "gone\n"
        leftovers += any(name.startswith(".tmp-") for name in names(bare_run)) if bare_run.checkpoints.exists() else 0
        confirmed = max([0, *confirmations(tmp_path)])
        found, warnings = checkpoint.newest_valid(bare_run)
        assert warnings == [], kill
        # The newest is the last confirmed one, or the next one, complete but not yet confirmed.
        reached = found.env_steps if found else 0
        assert confirmed <= reached <= max(confirmed, last) + 1
        assert found is None or content(found) == reached
        last = reached
    assert last > 0 and leftovers > 0  # some savers were killed inside a save
    save(bare_run, last + 1)
    checkpoint.prune(bare_run, Save(last=1, best=0))
    assert names(bare_run) == [f"{last + 1:012d}"]
