"""Run folders: they are created completely, found by every name, and removed only if that is safe."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import count
from tiltyard.config.experiment import Experiment
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, folder
from tiltyard.run.create import Source, create
from tiltyard.run.events import log_event, read_events
from tiltyard.run.folder import Run, find, remove
from tiltyard.run.lock import Lock
from tiltyard.run.status import RUN_FOLDER, list_runs, run_folders, write_status
from tiltyard.types import Progress


def experiment(name="toy", **settings):
    return Experiment.model_validate({"name": name, "env": {"id": "CartPole-v1"}, **settings})


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


def make(root, name="toy", **settings):
    return create(root, experiment(name, **settings), Source(command=["tiltyard", "train"]))


# ---------------------------------------------------------------------------------------------- create


def test_new_run_has_all_files_and_can_be_read(root):
    text = "# mine\nname: toy\nenv: CartPole-v1\n"
    wanted = experiment(tags=["a", "b"], notes="first try", seed=7)
    run = create(root, wanted, Source(text=text, name="toy.yaml", command=["tiltyard", "train", "toy.yaml"]))
    assert RUN_FOLDER.fullmatch(run.folder.name) and run.folder.name.startswith("0001-")
    assert run.id == f"toy/{run.folder.name}" and run.name == "toy" and run.base == (run.folder,)
    assert run.experiment() == wanted
    assert (run.folder / "source.yaml").read_text() == text
    status = run.status()
    assert status["schema"] == 1 and status["state"] == run.state == "created" and status["id"] == run.id
    assert status["tags"] == ["a", "b"] and status["notes"] == "first try" and status["env"] == "CartPole-v1"
    facts = json.loads((run.folder / "provenance.json").read_text())
    assert (
        facts["command"] == ["tiltyard", "train", "toy.yaml"] and facts["seed"] == 7 and facts["source"] == "toy.yaml"
    )
    assert [event["kind"] for event in read_events(run)] == ["created"]
    assert not [path.name for path in run.folder.parent.iterdir() if path.name.startswith(".")]


def test_run_numbers_increase_despite_other_files(root):
    first = make(root)
    (root / "toy" / "notes.txt").write_text("mine")
    (root / "toy" / ".new-0004").mkdir()  # left by a killed process; its number is not used again
    second = make(root)
    assert first.folder.name.startswith("0001-") and second.folder.name.startswith("0005-")
    (root / "toy" / "9999-calm-heron").mkdir()
    assert make(root).folder.name.startswith("10000-")
    assert [Path(path).name[:5] for path in run_folders(root)][-1] == "10000"


def test_plug_in_files_are_copied_and_recorded(root, tmp_path):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "mine.py").write_text("raise SystemExit('never imported by create')\n")
    wanted = experiment(model={"id": "nets/mine.py:Net"})
    run = create(root, wanted, Source(base=(tmp_path,)))
    assert run.experiment().model.id.startswith("plugins/")
    copies = list((run.folder / "plugins").rglob("mine.py"))
    assert len(copies) == 1 and "never imported" in copies[0].read_text()
    facts = json.loads((run.folder / "provenance.json").read_text())
    assert list(facts["plugins"]) == [str(copies[0].relative_to(run.folder))]


def test_concurrent_processes_never_get_the_same_number(root):
    code = """
import sys
from pathlib import Path
from tiltyard.config.experiment import Experiment
from tiltyard.run.create import Source, create
wanted = Experiment.model_validate({"name": "race", "env": {"id": "CartPole-v1"}})
for _ in range(int(sys.argv[2])):
    create(Path(sys.argv[1]), wanted)
"""
    each = count(50)
    makers = [subprocess.Popen([sys.executable, "-c", code, str(root), str(each)]) for _ in range(3)]
    while any(maker.poll() is None for maker in makers):
        for row in list_runs(root):  # a listing never contains an incomplete run
            assert row["state"] == "created" and find(row["folder"], root).experiment_file.exists()
    assert [maker.returncode for maker in makers] == [0, 0, 0]
    numbers = [int(path.name[:4]) for path in run_folders(root)]
    assert numbers == list(range(1, 3 * each + 1))


def test_unwritable_root_is_an_error_and_leaves_no_files(tmp_path, small_disk):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UseError, match="cannot be written: Not a directory"):
        make(tmp_path / "file" / "runs")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UseError) as caught:
        make(small_disk)
    assert "Read-only file system" in caught.value.message and "TILTYARD_RUNS" in caught.value.hint
    assert list(small_disk.iterdir()) == []


def test_full_disk_leaves_no_partial_run(small_disk):
    (small_disk / "ballast").write_bytes(bytes(500 * 1024))
    with pytest.raises(TiltyardError, match="No space left on device"):
        create(small_disk, experiment(), Source(text="# long\n" * 10_000, name="x.yaml"))
    assert list((small_disk / "toy").iterdir()) == [] and list_runs(small_disk) == []


def test_unknown_plug_in_leaves_no_files(root):
    with pytest.raises(UseError):
        make(root, model={"id": "nowhere/missing.py:Net"})
    assert run_folders(root) == [] and list((root / "toy").iterdir()) == []


# ---------------------------------------------------------------------------------------------- status and events


def test_status_change_keeps_other_fields_and_increments_the_heartbeat(root):
    run = make(root)
    write_status(run, state="finished", progress=Progress(env_steps=42, seconds=1.5), **{"return": float("inf")})
    status = run.status()
    assert status["progress"]["env_steps"] == 42 and status["env"] == "CartPole-v1" and status["heartbeat"] == 1
    assert json.loads((run.folder / "status.json").read_text())["return"] == "inf"
    assert list_runs(root)[0]["return"] == float("inf") and list_runs(root)[0]["env_steps"] == 42
    with pytest.raises(ValueError, match="colour"):
        write_status(run, colour="red")
    with pytest.raises(ValueError, match="asleep"):
        write_status(run, state="asleep")


def test_readers_never_see_a_partial_status(root, child):
    run = make(root)
    code = """
import sys
from pathlib import Path
from tiltyard.run.folder import Run
from tiltyard.run.status import write_status
run = Run(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    write_status(run, notes="x" * 20000)
    write_status(run, notes="")
"""
    writer = child(code, run.folder)
    writer.stdout.readline()
    seen = set()
    for _ in range(count(5000)):
        seen.add(len(run.status()["notes"]))
    assert seen <= {0, 20000}
    writer.kill()
    writer.wait()
    assert len(run.status()["notes"]) in (0, 20000)


def test_events_have_fields_and_a_partial_line_is_skipped(root):
    run = make(root)
    log_event(run, "saved", "saved a checkpoint", env_steps=5, score=float("nan"))
    with run.events_file.open("a") as file:
        file.write('{"time": "2026-01-01T00:0')  # the writer was killed here
    log_event(run, "resumed", "went on")
    events = read_events(run)
    assert [event["kind"] for event in events] == ["created", "saved", "resumed"]
    assert events[1]["env_steps"] == 5 and events[1]["score"] == "nan" and events[2]["sentence"] == "went on"
    with pytest.raises(ValueError, match="exploded"):
        log_event(run, "exploded", "no such kind")


def test_full_disk_is_an_error_and_the_old_status_is_kept(small_disk):
    run = make(small_disk)
    fill = small_disk / "ballast"
    with fill.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    for attempt in (
        lambda: write_status(run, notes="x" * 9000),
        lambda: log_event(run, "warning", "x" * 9000),
        lambda: Lock.acquire(run),
    ):
        with pytest.raises(TiltyardError, match="No space left on device") as caught:
            attempt()
        assert isinstance(caught.value, OSError) and str(caught.value) == caught.value.message and caught.value.hint
    assert run.status()["notes"] == "" and not [path for path in run.folder.iterdir() if path.suffix == ".tmp"]
    fill.unlink()
    log_event(run, "warning", "there is room again")
    assert [event["kind"] for event in read_events(run)] == ["created", "warning"]


def test_running_run_without_a_live_owner_is_lost(root, child):
    run = make(root)
    code = """
import sys, time
from pathlib import Path
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.status import write_status
run = Run(Path(sys.argv[1]))
with Lock(run):
    write_status(run, state="running")
    print("held", flush=True)
    time.sleep(60)
"""
    owner = child(code, run.folder)
    assert owner.stdout.readline() == "held\n"
    assert run.state == "running" and list_runs(root)[0]["state"] == "running"
    with pytest.raises(UseError, match=f"pid {owner.pid} on host"):
        remove(run, root)
    owner.kill()
    owner.wait()
    assert run.state == "lost" and list_runs(root)[0]["state"] == "lost"


# ---------------------------------------------------------------------------------------------- find


def test_run_is_found_by_every_kind_of_name(root, monkeypatch):
    one, two, other = make(root), make(root), make(root, "other")
    words = two.folder.name.partition("-")[2]
    assert words != one.folder.name.partition("-")[2] or pytest.skip("both runs drew the same words")
    for text in (two.id, two.folder.name, str(two.folder), "toy", "toy/2", "toy/0002", "0002"):
        assert find(text, root) == two, text
    assert find("last", root) == other and find("other", root) == other
    assert find(str(two.folder / "checkpoints"), root) == two
    assert find(two.folder / "status.json", root) == two
    assert folder.run_of(two.folder / "checkpoints") == two
    monkeypatch.chdir(two.folder)
    assert find(".", root) == two and find("../" + one.folder.name, root) == one
    monkeypatch.setenv("TILTYARD_RUNS", str(root))
    assert find("other") == other


def test_unknown_or_ambiguous_name_is_an_error(root, tmp_path):
    with pytest.raises(UseError, match="no run in"):
        find("last", root)
    one, _ = make(root), make(root, "other")
    with pytest.raises(UseError) as caught:
        find("0001", root)
    assert "matches 2 runs" in caught.value.message and one.id in caught.value.hint
    with pytest.raises(UseError) as caught:
        find(one.id[:-1], root)
    assert one.id in caught.value.hint
    for text in ("", " ", "a\0b", "x" * 5000, "..", str(tmp_path), "/", "toy/../../etc", "nope"):
        with pytest.raises(UseError):
            find(text, root)


def test_incomplete_and_newer_runs_are_refused(root):
    run = make(root)
    whole = (run.folder / "status.json").read_text()
    atomic.write_sealed(run.folder / "status.json", {**run.status(), "schema": 2, "tags": "of another type"})
    with pytest.raises(UseError, match="newer Tiltyard"):
        find(run.id, root)
    (run.folder / "status.json").unlink()
    with pytest.raises(UseError, match=r"status\.json is missing"):
        find(run.id, root)
    (run.folder / "status.json").write_text(whole)
    run.experiment_file.unlink()
    assert find(run.id, root).experiment() == experiment()  # there is a copy
    (run.folder / "experiment.json").unlink()
    with pytest.raises(UseError, match=r"experiment\.yaml is missing"):
        find(run.id, root)
    assert find(run.id, root, whole=False) == run


# ---------------------------------------------------------------------------------------------- remove


def test_remove_deletes_the_run_and_nothing_else(root, tmp_path):
    one, two = make(root), make(root)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep me")
    (one.folder / "checkpoints").rmdir()
    (one.folder / "checkpoints").symlink_to(precious)
    (one.folder / "videos").mkdir()
    (one.folder / "videos" / "link").symlink_to(precious / "data")
    remove(one, root)
    assert (precious / "data").read_text() == "keep me"
    assert [run_folder.name for run_folder in (root / "toy").iterdir()] == [two.folder.name]
    remove(two, root)
    assert list(root.iterdir()) == []


def test_remove_never_follows_links_or_leaves_the_root(root, tmp_path):
    run = make(root)
    elsewhere = create(tmp_path / "others", experiment())
    (root / "linked").symlink_to(tmp_path / "others" / "toy")
    (root / "toy" / "0009-sly-fox").symlink_to(elsewhere.folder)
    alias = root / "toy" / "0008-sly-owl"
    alias.symlink_to(run.folder)
    stranger = root / "toy" / "0007-no-run"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("years of work")
    deep = root / "toy" / "deep"
    deep.mkdir()
    nested = create(deep, experiment())
    for victim in (
        elsewhere,
        Run(root / "linked" / elsewhere.folder.name),
        Run(root / "toy" / "0009-sly-fox"),
        Run(alias),
        Run(stranger),
        Run(root / "toy"),
        Run(root),
        Run(Path("/")),
        Run(run.folder / "checkpoints"),
        nested,
    ):
        with pytest.raises(UseError):
            remove(victim, root)
    assert elsewhere.status() and run.status() and nested.status() and (stranger / "thesis.tex").exists()


def test_remove_works_if_the_root_is_a_link(root, tmp_path):
    make(root)
    (tmp_path / "link").symlink_to(root)
    remove(find("toy", tmp_path / "link"), tmp_path / "link")
    assert list(root.iterdir()) == []


def test_remove_refuses_a_run_locked_by_this_process(root):
    run = make(root)
    with Lock(run), pytest.raises(UseError, match=f"pid {os.getpid()} on host"):
        remove(run, root)
    remove(run, root)
    assert run_folders(root) == []


def test_incomplete_runs_can_be_removed(root):
    run = make(root)
    run.experiment_file.unlink()
    remove(find(run.id, root, whole=False), root)
    assert list(root.iterdir()) == []


# ---------------------------------------------------------------------------------------------- imports


def test_run_modules_do_not_import_large_packages():
    code = (
        "import sys, tiltyard.run.folder, tiltyard.run.metrics, tiltyard.run.provenance, tiltyard.run.checkpoint;"
        "print(*{'numpy', 'torch', 'gymnasium', 'pyarrow', 'pydantic', 'safetensors'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
