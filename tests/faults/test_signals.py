"""SIGTERM, SIGUSR2, SIGINT and SIGHUP end a training at the end of its update: a committed checkpoint and exit code 75.

An evaluation stops at once and is repeated by the next attempt, so that the metrics do not show the interruption.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiltyard as product
from tests.conftest import Command
from tests.engines.test_resume_equals import final
from tests.faults.test_kill import SETTINGS, wait_until
from tests.faults.test_kill import tiltyard as started
from tiltyard.run import checkpoint, checkpoint_files, metrics, state_file
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_a_checkpoint_and_exits_with_75(runs: Path, number: signal.Signals) -> None:
    child = started("train", "CartPole-v1", *SETTINGS[1:], "save.env_steps=1e9", "--plain")
    wait_until(lambda: any(path.read_text().count("\n") > 3 for path in runs.glob("*/0*/metrics.jsonl")))
    os.kill(child.pid, number)
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 75, errors
    run = find("last", runs)
    status = run.status()
    assert (status["state"], status["reason"]) == ("stopped", f"received {number.name}")
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None and newest.env_steps == status["progress"]["env_steps"] > 0
    assert f"tiltyard resume {run.id}" in errors


# An env that recognises an evaluation by its seeds. At the sixth step of one it sends this process, once, the signal in
# the file `order`. Steps after that are counted in the file `late`.
CUT = """
import os
import signal
from pathlib import Path

from gymnasium.envs.classic_control import CartPoleEnv
from tiltyard.envs.episodes import episode_seed

SEEDS = {episode_seed(7, "eval", i, 0) for i in range(20)}
HERE = Path(FOLDER)


class Cut(CartPoleEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)

    measured, steps = False, 0

    def reset(self, *, seed=None, options=None):
        self.measured = seed in SEEDS
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.measured:
            self.steps += 1
            if (HERE / "cut").exists():
                with (HERE / "late").open("a") as file:
                    file.write("x")
            if self.steps == 6 and (HERE / "order").exists():
                order = (HERE / "order").read_text()
                (HERE / "order").rename(HERE / "cut")
                if order == "raise":
                    raise ValueError("the env broke")
                if order.startswith("group "):
                    os.killpg(0, getattr(signal, order[6:]))
                else:
                    os.kill(os.getpid(), getattr(signal, order))
        return super().step(action)
"""
EVALUATED: dict[str, Any] = {
    "env": {"id": "cut.py:Cut", "time_limit": 60},
    "engine": {"envs": 2},
    "algo": {"rollout": 16, "minibatch": 32, "epochs": 1},
    "stop": {"env_steps": 160},
    "eval": {"every": 64, "episodes": 8, "envs": 2, "seed": 7},
    "track": {"tensorboard": False},
}


@pytest.fixture
def cut(runs: Path, tmp_path: Path) -> Path:
    """Write the env to cut.py, and return the path of the file `order`."""
    (tmp_path / "cut.py").write_text(CUT.replace("FOLDER", repr(str(tmp_path))))
    return tmp_path / "order"


def evaluations(run: Run) -> list[tuple[int, float]]:
    return list(zip(*metrics.series(metrics.read(run.metrics_file), "eval/return"), strict=True))


def assert_same_in_the_end(run: Run, whole: Run) -> None:
    """Resume `run` to its end, and check that it equals the uninterrupted run `whole`."""
    product.resume(run, live=False)
    assert (run.state, run.status()["reason"]) == (whole.state, whole.status()["reason"]) and whole.state == "finished"
    assert evaluations(run) == evaluations(whole)
    one, two = final(run), final(whole)
    assert all(array.tobytes() == two[0][name].tobytes() for name, array in one[0].items())
    assert repr(one[1]) == repr(two[1])
    scores = [[(each.env_steps, each.score) for each in checkpoint.list_checkpoints(each)] for each in (run, whole)]
    assert scores[0][-1] == scores[1][-1] and run.status()["best"] == whole.status()["best"]


@pytest.mark.parametrize(
    ("sections", "at", "number"),
    [
        ({}, 64, "SIGTERM"),
        ({"save": {"env_steps": 32}}, 64, "SIGUSR2"),
        ({"eval": {"every": 0, "episodes": 8, "envs": 2, "seed": 7}}, 160, "SIGINT"),
    ],
    ids=["periodic", "periodic and saved", "final"],
)
def test_interrupted_evaluation_stops_at_once_and_is_repeated_on_resume(
    cut: Path, tmp_path: Path, sections: dict[str, Any], at: int, number: str
) -> None:
    whole = product.train({**EVALUATED, **sections}, live=False)
    cut.write_text(number)
    run = product.train({**EVALUATED, **sections}, live=False)
    assert (run.state, run.status()["reason"]) == ("stopped", f"received {number}")
    late = tmp_path / "late"
    assert not late.exists() or len(late.read_text()) == 1, "the other env of the same step, and nothing after it"
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None and (newest.env_steps, newest.score) == (at, None)
    assert evaluations(run) == [] and not [each for each in read_events(run) if each["kind"] == "evaluated"]
    assert not [record for record in metrics.read(run.metrics_file) if record["env_steps"] == at]
    (tmp_path / "cut").unlink()
    assert_same_in_the_end(run, whole)


def test_stop_in_the_last_evaluation_exits_with_75_and_resume_finishes(
    cut: Path, tiltyard: Command, runs: Path
) -> None:
    cut.write_text("SIGHUP")
    words = [f"{key}.{name}={value}" for key in ("engine", "algo", "eval") for name, value in EVALUATED[key].items()]
    output = tiltyard("train", "cut.py:Cut", *words, "stop.env_steps=128", "track.tensorboard=false", expect=75)
    assert "tiltyard resume" in output.stderr and find("last", runs).state == "stopped"
    tiltyard("resume", "last")
    assert [steps for steps, _ in evaluations(find("last", runs))] == [64, 128]


@pytest.mark.parametrize("background", [False, True])
def test_kill_9_in_an_evaluation_does_not_change_the_result(
    cut: Path, tmp_path: Path, runs: Path, background: bool
) -> None:
    sections = {"save": {"env_steps": 64, "async": background}, "stop": {"env_steps": 96}}
    whole = product.train({**EVALUATED, **sections}, live=False)
    cut.write_text("SIGKILL")
    code = f"import tiltyard; tiltyard.train({ {**EVALUATED, **sections}!r}, live=False)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = find("last", runs)
    saved = [each.env_steps for each in checkpoint.list_checkpoints(run)]
    assert saved == [64] or (background and saved == []), "saved before it was measured, or at the same time"
    (tmp_path / "cut").unlink()
    assert_same_in_the_end(run, whole)


def test_last_weights_are_saved_before_their_evaluation(cut: Path, runs: Path) -> None:
    cut.write_text("raise")
    with pytest.raises(product.TiltyardError, match="the env broke"):
        product.train({**EVALUATED, "eval": {**EVALUATED["eval"], "every": 0}}, live=False)
    run = find("last", runs)
    assert (run.state, [each.env_steps for each in checkpoint.list_checkpoints(run)]) == ("failed", [160])


def test_interrupt_of_the_process_group_leaves_no_partial_video(cut: Path, tmp_path: Path, runs: Path) -> None:
    cut.write_text("group SIGINT")
    filmed = {**EVALUATED, "eval": {**EVALUATED["eval"], "every": 0, "video": True}, "stop": {"env_steps": 32}}
    code = f"import tiltyard; tiltyard.train({filmed!r}, live=False)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    run = find("last", runs)
    assert run.state == "stopped" and list((run.folder / "videos").iterdir()) == []
    (tmp_path / "cut").unlink()
    product.resume(run, live=False)
    assert [film.name for film in (run.folder / "videos").iterdir()] == ["000000000032.mp4"]
    assert not [event for event in read_events(run) if event["kind"] == "warning"]


def test_kill_between_a_record_and_its_checkpoint_leaves_one_record(cut: Path, runs: Path) -> None:
    run = product.train({**EVALUATED, "stop": {"env_steps": 64}}, live=False)
    kept = checkpoint.list_checkpoints(run)[-1]
    tree = state_file.read_tree(kept.folder, "loop")
    record = metrics.read(run.metrics_file)[-1]

    def as_before_the_evaluation(folder: Path) -> None:
        checkpoint_files.link_files(kept.folder, folder, but="loop")
        unrecorded = {name: value for name, value in record["metrics"].items() if not name.startswith("eval/")}
        state_file.write_tree(folder, "loop", {**tree, "evaluated_at": -1, "best": None, "unrecorded": unrecorded})

    checkpoint.commit(run, 64, kept.progress, None, as_before_the_evaluation)
    product.resume(run, live=False)
    after = metrics.read(run.metrics_file)
    assert [each["env_steps"] for each in after] == [32, 64]
    assert {name for name in after[-1]["metrics"] if not name.startswith(("time/", "speed/"))} == {
        name for name in record["metrics"] if not name.startswith(("time/", "speed/"))
    }
    assert checkpoint.list_checkpoints(run)[-1].score == kept.score is not None
