"""Two users on one machine: nothing in a run or sweep of one decides for the other, and neither stops, removes or
continues the other's runs or copies what the other keeps private.

Commands are typed by root, for whom files of the stranger are another user's, or by a forked process of the stranger.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiltyard
from tests.conftest import Command
from tests.second_user import STRANGER, as_stranger, give, needs_root, open_folder
from tests.sweep.talker import output, write_plan
from tiltyard import api
from tiltyard.cli import main
from tiltyard.config.load import from_resolved
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, checkpoint, trust
from tiltyard.run.folder import Run, find
from tiltyard.run.lock import Lock, liveness, read_owner
from tiltyard.run.settings_file import write_settings
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.run.status import write_status
from tiltyard.sweep import preflight
from tiltyard.sweep.folder import Sweep, find_sweep

pytestmark = [needs_root, pytest.mark.xdist_group("two users")]

RESIDENT = 4322  # a user who is neither root nor the stranger
FOREIGN = "belongs to another user"
TINY = ["engine.envs=2", "algo.rollout=16", "algo.minibatch=32", "algo.epochs=1", "stop.env_steps=64"]
TINY += ["engine.kind=serial", "eval.at_end=false", "track.tensorboard=false"]


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILTYARD_RUNS", str(root / "runs"))
        patch.chdir(root)
        api.train("CartPole-v1", ["name=cart", *TINY])
    return root / "runs"


@pytest.fixture
def place() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture
def run(trained_once: Path, runs: Path) -> Run:
    """A trained run of this user, in the runs folder of the test."""
    shutil.copytree(trained_once, runs)
    return find("cart", runs)


def leaves_a_mark(file: Path, mark: Path, name: str) -> str:
    """Write a module that makes a mark when it is imported; returns the import string of a wrapper in it."""
    file.write_text(f"import gymnasium\nopen({str(mark)!r}, 'w').close()\nclass {name}(gymnasium.Wrapper): pass\n")
    return f"{file}:{name}"


def in_the_name_of(uid: int, *words: str, root: Path) -> tuple[object, str]:
    """Run the command line in a process of another user; returns its exit code and what it printed.

    That user may be unable to read this Python: all modules are imported before, and no other Python can be started.
    """
    for module in pkgutil.walk_packages(tiltyard.__path__, "tiltyard."):
        if not any(part in module.name for part in ("rllib", "suites", "wandb", "tensorboard", "__main__")):
            importlib.import_module(module.name)
    answer = root / "answer"
    answer.mkdir()
    give(answer, uid)

    def act() -> None:
        os.environ.update(HOME=str(answer), TILTYARD_RUNS=str(root / "runs"))
        os.chdir(answer)
        handle = os.open("text", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = sys.stderr = os.fdopen(handle, "w", buffering=1)  # pytest has replaced both
        try:
            main(list(words))
        except SystemExit as ended:
            Path("code").write_text(str(ended.code))
        sys.stdout.flush()

    as_stranger(act, uid)
    found = (answer / "code").read_text(), (answer / "text").read_text()
    shutil.rmtree(answer)
    return found


# ---------------------------------------------------------------------------------------------- runs


def test_schedule_changes_neither_the_env_nor_code_of_another_user(
    tiltyard: Command, run: Run, place: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    wrapper = leaves_a_mark(place / "evil.py", mark, "Evil")
    SettingsSchedule([(0, {"env.id": wrapper})]).write(run.folder)
    assert "changes env.id, which cannot change" in tiltyard("resume", "cart", "stop.env_steps=96", expect=2).stderr
    SettingsSchedule([(0, {"env.wrappers": [{"id": wrapper}]})]).write(run.folder)
    give(run.folder / "stretches.json")
    assert FOREIGN in tiltyard("resume", "cart", "stop.env_steps=96", expect=2).stderr
    # Only a later part names the code, and the file is this user's: it is checked when that part begins.
    SettingsSchedule([(0, {}), (96, {"env.wrappers": [{"id": wrapper}]})]).write(run.folder)
    give(place / "evil.py")
    stderr = tiltyard("resume", "cart", "stop.env_steps=160", expect=2).stderr
    assert "env step 96" in stderr and f"{place}/evil.py {FOREIGN}, {STRANGER}" in stderr
    assert not mark.exists()


def test_fork_takes_no_address_or_path_from_another_users_run(tiltyard: Command, run: Run) -> None:
    text = run.experiment_file.read_text()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for old, new in (
            ("kind: serial", "kind: rllib"),
            ("address: null", f"address: {address}"),
            ("temp_dir: null", "temp_dir: /tmp/evil"),
            ("mode: off", "mode: offline"),
            ("entity: null", "entity: evil"),
        ):
            assert old in text
            text = text.replace(old, new, 1)
        write_settings(run.folder, from_resolved(run.experiment_file, text))
        give(run.folder)
        own: list[str] = []
        for setting, value in (
            ("engine.address", address),
            ("engine.temp_dir", "/tmp/evil"),
            ("track.wandb.entity", "evil"),
        ):
            stderr = tiltyard("fork", "cart", *own, expect=2).stderr
            assert f"{FOREIGN}, {STRANGER}, and decides {setting} = {value}" in stderr, stderr
            assert f"{setting}=null" in stderr and "--trust-code" in stderr
            own.append(f"{setting}=null")
        with pytest.raises(BlockingIOError):  # no one has connected
            server.accept()
    more = ["name=mine", "engine.kind=serial", "track.wandb.mode=off", "stop.env_steps=96"]
    tiltyard("fork", "cart", *own, *more)
    assert find("mine").experiment().engine.address is None


def test_profile_of_another_users_run_is_not_entered(
    tiltyard: Command, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = {"lab": {"environment": {"LAB_MARK": "1"}}, "queue": {"launcher": "slurm"}}
    Path("tiltyard.yaml").write_text(json.dumps({"profiles": profiles}))
    monkeypatch.setenv("LAB_MARK", "0")
    write_status(run, profile="lab")
    give(run.folder)
    stderr = tiltyard("eval", "cart", "--episodes", "1").stderr
    assert f"profile lab of run {run.id} is not used" in stderr and f"{FOREIGN}, {STRANGER}" in stderr
    assert os.environ["LAB_MARK"] == "0"
    trust.enter_profile(run, trust_code=True)
    assert os.environ["LAB_MARK"] == "1"
    write_status(run, profile="queue")
    stderr = tiltyard("fork", "cart", expect=2).stderr
    assert "a job of profile queue is submitted" in stderr and "--here" in stderr


def test_link_in_another_users_checkpoint_does_not_copy_a_private_file(
    tiltyard: Command, run: Run, place: Path, runs: Path
) -> None:
    private = place / "key"
    private.write_text("secret-of-this-user")
    private.chmod(0o600)
    newest = checkpoint.list_checkpoints(run)[-1].folder
    shutil.copytree(run.folder, place / "shared" / "cart" / run.folder.name)
    theirs = give(place / "shared") / "cart" / run.folder.name
    as_stranger(lambda: (theirs / "checkpoints" / newest.name / "notes").symlink_to(private))
    stderr = tiltyard("fork", str(theirs), "name=mine", expect=1).stderr
    assert "notes is not a regular file" in stderr
    assert not (runs / "mine").exists()
    held = [path for path in runs.rglob("*") if path.is_file() and b"secret-of-this-user" in path.read_bytes()]
    assert held == []


# ---------------------------------------------------------------------------------------------- stop, rm, resume

HOLD = """
import sys, time
from pathlib import Path
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
with Lock.acquire(Run(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def writer_of(run: Run) -> "Iterator[subprocess.Popen[str]]":
    """A process of this user that holds the run's lock."""
    command = [sys.executable, "-c", HOLD, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.kill()


def test_stop_signals_no_process_that_another_user_chose(tiltyard: Command, run: Run) -> None:
    """The lock file in the stranger's run names a process of this user, as if that trained the run."""
    with writer_of(run) as victim:
        give(run.folder)
        owner = read_owner(run.folder)
        assert owner is not None and owner["pid"] == victim.pid and liveness(owner) == "alive"
        stderr = tiltyard("stop", "cart", expect=2).stderr
        assert f"{FOREIGN}, {STRANGER}, and decides which process or job is stopped" in stderr
        assert victim.poll() is None


def facts_of(folder: Path) -> dict[Path, object]:
    return {
        path: (found.st_uid, found.st_mode, found.st_mtime_ns, found.st_size)
        for path in (folder, *folder.rglob("*"))
        for found in [path.stat()]
    }


def refuses_the_lock(folder: Path) -> None:
    with pytest.raises(TiltyardError, match="Permission denied"):
        Lock.acquire(Run(folder))


def test_stranger_cannot_stop_remove_continue_or_read_another_users_run(run: Run, place: Path) -> None:
    root, private = place / "runs", place / "private"
    shutil.copytree(run.folder.parents[1], root)
    shutil.copytree(run.folder.parents[1], private)
    theirs = give(root / "cart" / run.folder.name, RESIDENT)
    (root / "cart").chmod(0o777)  # a shared folder without the sticky bit: anyone may rename what is in it
    give(private, RESIDENT).chmod(0o700)
    before = facts_of(theirs)
    for words in (["stop", "cart"], ["rm", "cart", "--yes"], ["resume", "cart", "stop.env_steps=96"]):
        code, text = in_the_name_of(STRANGER, *words, root=place)
        assert code == "2" and f"{FOREIGN}, {RESIDENT}" in text and "hint: " in text, text
    as_stranger(lambda: refuses_the_lock(theirs))  # where --trust-code would lead
    for verb in ("show", "eval", "fork", "resume", "stop"):
        code, text = in_the_name_of(STRANGER, verb, str(private / "cart" / run.folder.name), root=place)
        assert code == "2" and text.startswith("error: ") and "Traceback" not in text, text
    assert facts_of(theirs) == before


# ---------------------------------------------------------------------------------------------- sweeps


def test_another_users_sweep_is_never_chosen_and_runs_only_with_trust_code(tiltyard: Command, runs: Path) -> None:
    """The stranger's sweep is newer than this user's, and has the same plan and a failed trial, too."""
    write_plan(space={"x": [1, 2]}, bad="2")
    tiltyard("sweep", "start", "plan.yaml", expect=1)
    own, theirs = find_sweep("sweep-0001"), Sweep(runs / "toy" / "sweep-0002")
    shutil.copytree(own.folder, theirs.folder)
    atomic.write_sealed(theirs.folder / "sweep.json", {**own.facts(), "created": atomic.now()})
    give(theirs.folder)
    Path("said.jsonl").unlink()
    assert f"sweep    {own.id}\n" in tiltyard("sweep", "status", expect=1).stdout
    assert preflight.same_sweep(preflight.prepare("plan.yaml")) == own
    for words in (
        ["start", theirs.id],
        ["start", theirs.id, "--detach"],
        ["retry", "--failed", theirs.id],
        ["extend", theirs.id, "--seeds", "1"],
    ):
        stderr = tiltyard("sweep", *words, expect=2).stderr
        assert f"{FOREIGN}, {STRANGER}, and decides what sweep {theirs.id} runs" in stderr and "--trust-code" in stderr
    assert FOREIGN in tiltyard("sweep", "stop", theirs.id, expect=2).stderr
    for module, folder in (("tick", theirs.folder), ("external_program", theirs.place(1))):
        command = [sys.executable, "-m", f"tiltyard.sweep.{module}", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and FOREIGN in done.stderr, done.stderr
    assert output("began") == [] and theirs.decisions() == own.decisions()
    Path("bad").write_text("")
    tiltyard("sweep", "retry", "--failed")
    assert len(own.decisions("retry")) == 1 and theirs.decisions("retry") == []
    tiltyard("sweep", "retry", "--failed", theirs.id, "--trust-code")
    assert len(theirs.decisions("retry")) == 1 and len(output("done")) == 2
    give(own.folder)
    stderr = tiltyard("sweep", "retry", "--failed", expect=2).stderr
    assert "no sweep of yours" in stderr and theirs.id in stderr


@pytest.mark.parametrize(
    "name", ["plan.yaml", "sweep.json", "events.jsonl", "profile.json", "plugins/lab/env.py", "plugins/lab"]
)
def test_each_file_that_decides_what_a_sweep_runs_is_checked(runs: Path, name: str) -> None:
    folder = runs / "toy" / "sweep-0001"
    (folder / "plugins" / "lab").mkdir(parents=True)
    for file in ("plan.yaml", "sweep.json", "events.jsonl", "profile.json", "plugins/lab/env.py"):
        (folder / file).write_text('{"base": []}')
    Sweep(folder).require_own()
    os.chown(folder / name, STRANGER, STRANGER)
    with pytest.raises(UseError, match=f"{name} {FOREIGN}"):
        Sweep(folder).require_own()
    (folder / "sweep.json").write_text('{"base": [], "launcher": "slurm"}')  # with jobs, trust does not help
    with pytest.raises(UseError, match=FOREIGN) as error:
        Sweep(folder).require_own(trust_code=True)
    assert "--trust-code" not in error.value.hint
