"""Files of a second user on a shared machine: they decide nothing, hang nothing, and write nothing to a terminal."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.second_user import STRANGER, as_stranger, give, needs_root, open_folder
from tests.sweep.talker import write_plan
from tiltyard.config.load import load
from tiltyard.config.site import Profile, Slurm, Template
from tiltyard.config.site_file import find_site
from tiltyard.config.sweep_plan import Plan
from tiltyard.doctor.bad_nodes import excluded_nodes
from tiltyard.engines.rllib.ray_cluster import FOLDER_PREFIX, _locks, short_folder
from tiltyard.errors import UseError
from tiltyard.plugins.snapshot import copy_plugins
from tiltyard.run.create import Source, create
from tiltyard.run.folder import Run, find
from tiltyard.slurm.script import Job, script, setup_lines
from tiltyard.sweep import preflight
from tiltyard.sweep.backends.custom_queue import CustomQueue
from tiltyard.sweep.backends.jobs import Start
from tiltyard.sweep.folder import Sweep

pytestmark = needs_root
OLD = Path(__file__).parents[1] / "old" / "run-v1"


@pytest.fixture
def old_run(tmp_path: Path) -> Run:
    """A finished run in the runs folder."""
    return Run(shutil.copytree(OLD, tmp_path / "runs" / "cart" / "0001-brisk-otter"))


# ------------------------------------------------------------------------------------------------ the site file


@pytest.fixture
def shared(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder above the current one, with another user's tiltyard.yaml in it; none of the variables is set."""
    for name in ("TILTYARD_SITE", "TILTYARD_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "shared"
    (folder / "project").mkdir(parents=True)
    monkeypatch.chdir(folder / "project")
    (folder / "tiltyard.yaml").write_text(
        f"runs: {tmp_path}/theirs\nprofiles: {{wide: {{environment: {{PATH: {tmp_path}}}}}}}\n"
    )
    give(folder / "tiltyard.yaml")
    return folder


def test_site_file_of_another_user_is_refused(tiltyard: Command, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["ls"], ["sweep", "status"], ["config", "show", "CartPole-v1", "--on", "wide"]):
        output = tiltyard(*words, expect=2).stderr
        assert f"{shared}/tiltyard.yaml belongs to another user, {STRANGER}, and decides where runs are" in output
        assert "trusted-sites" in output and "TILTYARD_SITE" in output
    assert (
        f"site file: none ({shared}/tiltyard.yaml belongs"
        in tiltyard("config", "show", "CartPole-v1", "--origin").stdout
    )
    tiltyard("--help")
    tiltyard("ls", "--root", ".")
    Path("tiltyard.yaml").write_text("runs: mine\n")
    tiltyard("ls")
    assert (
        f"site file: {shared}/project/tiltyard.yaml\n" in tiltyard("config", "show", "CartPole-v1", "--origin").stdout
    )


def test_site_file_is_allowed_by_the_users_list_only(shared: Path, tmp_path: Path) -> None:
    """The hint's command, as it is printed, allows the file; a list of another user does not."""
    with pytest.raises(UseError) as refused:
        find_site()
    command = refused.value.hint.partition("with: ")[2].partition("; or")[0]
    assert os.system(command) == 0
    assert find_site() == shared / "tiltyard.yaml"
    give(tmp_path / "config" / "tiltyard" / "trusted-sites")
    with pytest.raises(UseError, match=r"trusted-sites belongs to another user"):
        find_site()


def test_folder_of_the_site_file_counts_and_links_do_not_help(shared: Path) -> None:
    give(shared / "tiltyard.yaml", 0)
    assert find_site() == shared / "tiltyard.yaml"
    os.chown(shared, STRANGER, STRANGER)
    with pytest.raises(UseError, match=f"^{shared} belongs to another user"):
        find_site()
    os.chown(shared, 0, 0)
    (shared / "theirs.yaml").write_text("runs: x\n")
    give(shared / "theirs.yaml")
    Path("tiltyard.yaml").symlink_to("../theirs.yaml")
    with pytest.raises(UseError, match=r"theirs.yaml belongs to another user"):
        find_site()


def test_named_site_file_is_the_users_choice(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILTYARD_SITE", str(shared / "tiltyard.yaml"))
    assert find_site() == shared / "tiltyard.yaml"


def test_run_is_found_by_its_path_although_another_user_plants_a_site_file(shared: Path, old_run: Run) -> None:
    """A requeued job or a trial resumes by path, which needs no site file."""
    assert find(str(old_run.folder)).folder == old_run.folder
    with pytest.raises(UseError, match="belongs to another user"):
        find("last")


# ------------------------------------------------------------------------------------------------ scripts


BAD = Profile(launcher="slurm", name="c", slurm=Slurm(exclude_failed=True))


def test_bad_nodes_of_another_user_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".doctor").mkdir()
    (tmp_path / ".doctor" / "nodes.json").write_text('{"node1": "full"}')
    assert excluded_nodes(BAD, tmp_path) == {"node1": "full"}
    for place in (tmp_path / ".doctor" / "nodes.json", tmp_path / ".doctor"):
        os.chown(place, STRANGER, STRANGER)
        assert excluded_nodes(BAD, tmp_path) == {}
        assert f"{place} belongs to another user, {STRANGER}" in capsys.readouterr().err
        os.chown(place, 0, 0)


def test_only_names_of_nodes_are_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a\n#SBATCH --wrap=id", "a b", "-x", "", "$(id)", "a,b", "n[1-2]", "x" * 300]
    (tmp_path / ".doctor").mkdir()
    (tmp_path / ".doctor" / "nodes.json").write_text(
        json.dumps({**dict.fromkeys(names, "w"), "gpu-1.site_2": "w", "n": 3})
    )
    assert list(excluded_nodes(BAD, tmp_path)) == ["gpu-1.site_2"]
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1 and "warning" in warned and "nodes.json" in warned


def test_line_of_a_script_never_contains_another_line(tmp_path: Path) -> None:
    with pytest.raises(UseError, match="a line of the job script contains a control character"):
        script(Job("x", tmp_path, BAD, excluded=("node1\n#SBATCH --wrap=id",)))
    for value in ("a\nb", "\x1b]0;x\x07", "\u2028", "it's \\ é\r"):
        profile = BAD.model_copy(update={"environment": {"NOTE": value}})
        line = next(line for line in setup_lines(profile) if "NOTE" in line)
        assert len(line.splitlines()) == 1
        done = subprocess.run(["bash", "-c", f'{line}\nprintf %s "$NOTE"'], capture_output=True, check=True)
        assert done.stdout == value.encode()


def test_setup_of_several_lines_is_kept(tmp_path: Path) -> None:
    profile = BAD.model_copy(update={"slurm": Slurm(setup=["module load a\nmodule load b"])})
    assert "\nmodule load a\nmodule load b\n" in script(Job("x", tmp_path / "n" / "0001-a-b", profile))


def test_folder_name_does_not_become_a_line_of_a_custom_queue(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "n\n#PBS -W x\ntouch never" / "sweep-0001"
    template = Template(submit="q {command} {name}", poll="p {id}", cancel="c {id}")
    profile = Profile(launcher="template", name="q", template=template)
    plan = Plan.model_validate({"experiment": "CartPole-v1", "seeds": [1]})
    queue = CustomQueue(Sweep(folder), plan, profile)
    start = Start(1, folder / "0001-a-b")
    text = queue._script(start, folder / "template" / "job-0001")
    assert not [line for line in text.splitlines() if line.startswith(("#PBS", "touch"))]
    with pytest.raises(UseError, match="contains a control character"):
        queue.preview(1)


# ------------------------------------------------------------------------------------------------ the terminal


ESCAPES = "\x1b[2J\x1b]0;owned\x07red \x1b[31mtext\x1b[0m \x1b c1 \x9b31m \x07\x08bar 10 %\rbar 20 %"
SHOWN = "red text \\u001b c1 \\u009b31m \\u0007\\u0008bar 10 %\nbar 20 %"


def test_logs_and_messages_do_not_control_the_terminal(tiltyard: Command, runs: Path, old_run: Run) -> None:
    (old_run.folder / "logs").mkdir(exist_ok=True)
    (old_run.folder / "logs" / "attempt-1.log").write_text(f"{ESCAPES}\n", newline="")
    assert tiltyard("logs", "last").stdout == f"{SHOWN}\n"
    status = json.loads((old_run.folder / "status.json").read_text())
    (old_run.folder / "status.json").write_text(json.dumps({**status, "reason": ESCAPES, "state": "failed"}))
    old_run.folder.parent.rename(runs / "n\x1b[31m\x9b")
    give(runs)
    for words in (["ls"], ["ls", "--json"], ["show", "last"], ["show", "last", "--json"], ["logs", "nothing"]):
        output = tiltyard(*words, expect=2 if "nothing" in words else 0)
        text = output.stdout + output.stderr
        assert not [char for char in text if not char.isprintable() and char != "\n"]
        if "--json" in words:
            json.loads(output.stdout)
    assert "\\u009b" in tiltyard("ls", "--root", str(runs / "n\x9b"), expect=2).stderr


def test_second_user_cannot_write_to_the_terminal_of_the_first(old_run: Run) -> None:
    """The same with a real terminal, and a log that the second user has written."""
    with open_folder() as folder:
        shutil.copytree(old_run.folder, folder / "cart" / "0001-a-b")
        give(folder / "cart")
        log = folder / "cart" / "0001-a-b" / "logs" / "attempt-1.log"

        def write() -> None:
            log.parent.mkdir(exist_ok=True)
            log.write_text(f"{ESCAPES}\n", newline="")

        as_stranger(write)
        child, terminal = pty.fork()
        if child == 0:
            os.execv(sys.executable, [sys.executable, "-m", "tiltyard", "logs", "last", "--root", str(folder)])
        read = b""
        try:
            while chunk := os.read(terminal, 4096):
                read += chunk
        except OSError:  # the other end is closed
            pass
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert b"\x1b" not in read and b"\x9b" not in read and b"red text" in read


# ------------------------------------------------------------------------------------------------ Ray's folders


def test_fifo_of_another_user_does_not_block_the_search_for_abandoned_folders() -> None:
    with open_folder() as place:

        def plant() -> None:
            for name in ("fifo", "link"):
                (place / f"{FOLDER_PREFIX}{name}").mkdir(mode=0o755)
            os.mkfifo(place / f"{FOLDER_PREFIX}fifo" / "lock", 0o666)
            (place / f"{FOLDER_PREFIX}fifo" / "lock").chmod(0o666)
            (place / f"{FOLDER_PREFIX}link" / "lock").symlink_to(place / "fifo")

        def search() -> None:
            signal.alarm(60)  # ends the process if it is blocked
            abandoned = short_folder(str(place)).parent
            os.close(_locks.pop())
            assert short_folder(str(place)).parent.is_dir() and not abandoned.exists()
            signal.alarm(0)

        os.mkfifo(place / "fifo")
        as_stranger(plant)
        as_stranger(search, uid=STRANGER + 1)
        assert len(list(place.glob(f"{FOLDER_PREFIX}*"))) == 3


# ------------------------------------------------------------------------------------------------ secrets

SECRET = "ordinary-words-that-open-a-door"
READS = """
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    def __init__(self, *, api_key=""):
        super().__init__()
        self.door = Path(__file__).with_name("door.txt").read_text()
"""


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def assert_secret_is_private(folder: Path, names: set[str]) -> None:
    """These files below the folder have the secret; the second user can read none of them, but all others."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    private = [path for path in files if SECRET in path.read_text()]
    assert {path.name for path in private} == names

    def read() -> None:
        assert [path for path in files if os.access(path, os.R_OK)] == [path for path in files if path not in private]

    as_stranger(read)


def test_secrets_of_a_run_are_private(usual_umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_folder() as place:
        monkeypatch.chdir(place)
        (place / "own.py").write_text(READS)
        (place / "door.txt").write_text(SECRET)
        (place / "door.txt").chmod(0o600)
        text = f"name: own\nenv: {{id: own.py, options: {{api_key: {SECRET}}}}}\n"
        (place / "own.yaml").write_text(text)
        loaded = load("own.yaml")
        run = create(place / "runs", loaded.experiment, Source(base=loaded.base, text=text, name="own.yaml"))
        assert_secret_is_private(run.folder, {"experiment.yaml", "experiment.json", "source.yaml", "door.txt"})

        def open_run() -> None:
            with pytest.raises(UseError, match=r"experiment\.yaml"):
                find(run.folder).experiment()

        as_stranger(open_run)
        with tempfile.TemporaryDirectory() as checked:  # as `train` does it: copied, checked, copied again
            copies = copy_plugins(loaded.experiment, loaded.base, Path(checked))
            again = create(place / "runs", loaded.experiment, Source(copies=copies))
        assert_secret_is_private(again.folder, {"experiment.yaml", "experiment.json", "door.txt"})
        plain = create(place / "runs", load("CartPole-v1").experiment, Source(text="env: CartPole-v1\n"))
        assert_secret_is_private(plain.folder, set())


def test_secrets_of_a_sweep_are_private(usual_umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_folder() as place:
        monkeypatch.chdir(place)
        monkeypatch.setenv("TILTYARD_RUNS", str(place / "runs"))
        write_plan(space={"x": [1, 2]}, environment={"DOOR_TOKEN": SECRET})
        sweep = preflight.begin(preflight.prepare("plan.yaml"), ["tiltyard", "--token", SECRET])
        assert_secret_is_private(sweep.folder, {"plan.yaml"})
