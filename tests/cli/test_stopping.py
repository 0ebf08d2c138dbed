"""SIGINT and SIGTERM end a command that copies or converts data with exit code 75, and the same command completes it."""

import multiprocessing
import os
import signal
import sys
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command
from tests.data.episodes import episode, writer
from tests.data.kills import CHANGES
from tiltyard.cli import main
from tiltyard.cli.stopping import stoppable
from tiltyard.data.folder import read_manifest
from tiltyard.data.verify import examine
from tiltyard.errors import ResumableError

COMMANDS = {
    "merge": (["merge", "set", "other", "--out", "new"], "new"),
    "split": (["split", "set", "--validation", "0.5", "--out", "new", "validation"], "new"),
    "filter": (["filter", "set", "--where", "length>0", "--out", "new"], "new"),
    "import": (["import", "files", "--out", "new"], "new"),
    "pack": (["pack", "set", "--shard-mb", "0.01"], "set"),
    "repair": (["repair", "set"], "set"),
}


def make(folder: str, seeds: range) -> None:
    made = writer(Path(folder))
    for seed in seeds:
        made.append([episode(3, seed)])
    made.close()


def prepare(command: str) -> None:
    make("set", range(6))
    if command == "merge":
        make("other", range(10, 14))
    if command == "import":
        Path("files").mkdir()
        for seed in range(6):
            one = episode(3, seed)
            np.savez(f"files/{seed}.npz", obs=one.obs["arm"], action=one.action, reward=one.reward)
    if command == "repair":
        for number in (1, 3):
            path = Path(f"set/episodes/00000/{number:09d}.parquet")
            path.write_bytes(path.read_bytes()[:-1])


def _run(words: list[str], number: signal.Signals, operation: int, messages: str) -> None:
    left = operation

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            left -= 1
            if left == -1:
                os.kill(os.getpid(), number)

    sys.dont_write_bytecode = True
    sys.addaudithook(watch)
    with redirect_stderr(Path(messages).open("w")):
        main(words)


def stopped_at(words: list[str], number: signal.Signals, operation: int) -> tuple[int, str]:
    """Exit code and messages of a command that gets a signal when it changes a file for the n-th time."""
    child = multiprocessing.get_context("fork").Process(target=_run, args=(words, number, operation, "messages"))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode, Path("messages").read_text()


def contents(folder: str) -> list[tuple[int, str]]:
    return [(entry.episode, entry.sha256) for entry in read_manifest(Path(folder))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", COMMANDS)
def test_same_command_completes_what_a_signal_stopped(
    tiltyard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals
) -> None:
    words, result = COMMANDS[name]
    for place in ("undisturbed", "stopped"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "undisturbed")
    prepare(name)
    tiltyard("data", *words)
    expected = contents(result)
    monkeypatch.chdir(tmp_path / "stopped")
    prepare(name)
    code, messages = stopped_at(["data", *words], number, 5)
    assert (code, messages.splitlines()[-1]) == (75, "error: stopped; type the same command again to complete it")
    tiltyard("data", *words)
    assert contents(result) == expected and len(expected) > 1
    assert not examine(Path(result)).damages


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_export_leaves_nothing(tiltyard: Command, number: signal.Signals) -> None:
    make("set", range(6))
    words = ["data", "export", "set", "--to", "npz", "--out", "new"]
    code, messages = stopped_at(words, number, 4)
    assert (code, messages) == (75, "error: stopped; nothing was written\n")
    assert sorted(path.name for path in Path().iterdir()) == ["messages", "set"]
    assert "6 episodes" in tiltyard(*words).stdout


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    with pytest.raises(ResumableError, match="nothing"), stoppable("nothing"):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ValueError, match="of the command"), stoppable():
        raise ValueError("of the command")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_work_goes_on_until_the_check() -> None:
    done: list[str] = []

    def work() -> None:
        with stoppable(at_once=False) as check:
            for item in ("one", "two", "three"):
                check()
                if item == "two":
                    os.kill(os.getpid(), signal.SIGINT)
                done.append(item)

    with pytest.raises(ResumableError):
        work()
    assert done == ["one", "two"]
    with stoppable(at_once=False):
        os.kill(os.getpid(), signal.SIGINT)
        done.append("last")
    assert done == ["one", "two", "last"], "nothing was left to stop"
