"""Evaluation from the command line: fixed seeds, statistics, files, videos and rollouts."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

import tiltyard as product
from tests.conftest import Command
from tests.faults.test_kill import wait_until
from tiltyard.errors import UseError
from tiltyard.evaluation.evaluate import VideoError
from tiltyard.evaluation.rollouts import EpisodeResult
from tiltyard.evaluation.statistics import student_t, summarise
from tiltyard.processes.child import Child
from tiltyard.run import metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

TRAIN = {
    "env": "CartPole-v1",
    "engine": {"envs": 2},
    "algo": {"rollout": 16, "minibatch": 32, "epochs": 1},
    "stop": {"env_steps": 96},
    "eval": {"at_end": False, "every": 0, "envs": 4},
    "save": {"env_steps": 32, "last": 5},
    "track": {"tensorboard": False},
}


@pytest.fixture
def trained(runs: Path) -> Run:
    return product.train(TRAIN, live=False)


def result(text: str) -> dict[str, object]:
    return dict(json.loads(text))


def test_episodes_do_not_depend_on_workers_and_envs(tiltyard: Command, trained: Run) -> None:
    alone = result(tiltyard("eval", "last", "--episodes", "7", "--json").stdout)
    shared = result(tiltyard("eval", "last", "--episodes", "7", "--workers", "2", "--json").stdout)
    fewer_slots = result(tiltyard("eval", "last", "--episodes", "7", "eval.envs=1", "--json").stdout)
    assert len(alone["returns"]) == len(set(alone["seeds"])) == 7  # type: ignore[arg-type]
    assert alone["seeds"] == shared["seeds"] == fewer_slots["seeds"]
    assert alone["returns"] == shared["returns"] == fewer_slots["returns"]


def test_files_match_the_printed_result(tiltyard: Command, trained: Run, tmp_path: Path) -> None:
    done = tiltyard("eval", "last", "--episodes", "3", "--out", "here")
    rows = list(csv.DictReader((tmp_path / "here" / "000000000096-eval.csv").open()))
    whole = json.loads((tmp_path / "here" / "000000000096-eval.json").read_text())
    assert [float(row["return"]) for row in rows] == whole["returns"] and len(rows) == 3
    assert f"{whole['mean']:.6g}" in done.stdout and "95 % interval of 3 episodes, greedy" in done.stdout
    assert whole["low"] <= whole["mean"] <= whole["high"]


def test_options_select_the_checkpoint_and_the_actions(tiltyard: Command, trained: Run) -> None:
    by_step = result(tiltyard("eval", "last", "--at", "32", "--episodes", "4", "--json").stdout)
    newest = result(tiltyard("eval", "last", "--episodes", "4", "--json").stdout)
    by_path = result(tiltyard("eval", str(by_step["checkpoint"]), "--episodes", "4", "--json").stdout)
    assert by_step["env_steps"] == 32 and newest["env_steps"] == 96
    assert by_path["returns"] == by_step["returns"]
    sampled = result(tiltyard("eval", "last", "--sample", "--episodes", "8", "--json").stdout)
    random = result(tiltyard("eval", "last", "--random", "--episodes", "8", "--json").stdout)
    greedy = result(tiltyard("eval", "last", "--greedy", "--episodes", "8", "--json").stdout)
    assert len({json.dumps(each["returns"]) for each in (sampled, random, greedy)}) == 3
    assert (sampled["greedy"], greedy["greedy"]) == (False, True)


def test_overrides_apply_to_the_env(tiltyard: Command, trained: Run) -> None:
    short = result(tiltyard("eval", "last", "--episodes", "3", "env.time_limit=5", "--json").stdout)
    assert short["lengths"] == [5, 5, 5]
    done = tiltyard("eval", "last", "env.frame_stack=2", expect=2)
    assert "(4,)" in done.stderr and "(8,)" in done.stderr


def test_steps_limit_starts_no_new_episodes_but_finishes_running_ones(tiltyard: Command, trained: Run) -> None:
    found = result(
        tiltyard("eval", "last", "--steps", "60", "env.time_limit=10", "eval.envs=2", "--random", "--json").stdout
    )
    assert sum(found["lengths"]) >= 60 and sum(found["lengths"][:-2]) < 60  # type: ignore[arg-type,index]
    shared = [
        "eval",
        "last",
        "--steps",
        "60",
        "env.time_limit=10",
        "eval.envs=2",
        "--random",
        "--workers",
        "2",
        "--json",
    ]
    assert 60 <= sum(result(tiltyard(*shared).stdout)["lengths"]) <= 60 + 2 * 10  # type: ignore[arg-type]


def test_run_without_checkpoints_is_refused(tiltyard: Command, trained: Run) -> None:
    for folder in trained.checkpoints.iterdir():
        folder.rename(folder.with_name(f".tmp-{folder.name}"))
    assert "has no checkpoint yet" in tiltyard("eval", "last", expect=2).stderr


def test_saved_rollouts_are_the_evaluated_episodes(tiltyard: Command, trained: Run, tmp_path: Path) -> None:
    found = result(
        tiltyard(
            "eval", "last", "--episodes", "3", "--workers", "2", "--save-rollouts", "data", "--save-info", "--json"
        ).stdout
    )
    episodes = sorted(product.read_episodes(tmp_path / "data"), key=lambda one: one.meta["episode"])
    assert [float(one.reward.sum()) for one in episodes] == found["returns"]
    assert [one.seed for one in episodes] == found["seeds"]
    assert all(one.obs["obs"].shape == (len(one.reward) + 1, 4) for one in episodes)
    # In a new env, the recorded actions must give the recorded observations.
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=episodes[0].seed)
    for t, action in enumerate(episodes[0].action):
        assert np.array_equal(obs, episodes[0].obs["obs"][t])
        obs = env.step(int(action[0]))[0]
    assert np.array_equal(obs, episodes[0].obs["obs"][-1])
    assert "--save-rollouts DIR" in tiltyard("eval", "last", "--save-info", expect=2).stderr
    again = tiltyard("eval", "last", "--episodes", "5", "--save-rollouts", "data")
    assert "warning: 3 of these episodes were in data already: not written again" in again.stderr
    seeds = [one.seed for one in product.read_episodes(tmp_path / "data")]
    assert len(seeds) == len(set(seeds)) == 5
    tiltyard("eval", "last", "--episodes", "1", "--sample", "--save-rollouts", "data")
    assert len(product.Dataset(tmp_path / "data")) == 6, "the same seed, but other actions"
    tiltyard("data", "collect", "CartPole-v1", "--out", "collected", "--episodes", "2", "--workers", "0")
    refused = tiltyard("eval", "last", "--episodes", "1", "--save-rollouts", "collected", expect=2)
    assert "was made by `tiltyard data collect`" in refused.stderr


def frames_of(video: Path) -> list[np.ndarray]:
    reader = imageio_ffmpeg.read_frames(str(video))
    size = next(reader)["size"]
    return [np.frombuffer(frame, np.uint8).reshape(size[1], size[0], 3) for frame in reader]


def test_video_needs_no_display_and_has_the_whole_first_episode(
    tiltyard: Command, trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    found = result(tiltyard("eval", "last", "--episodes", "3", "--video", "--json").stdout)
    frames = frames_of(Path(found["files"]["video"]))  # type: ignore[index]
    assert len(frames) == found["lengths"][0] + 1  # type: ignore[index]
    assert frames[0].std() > 1 and np.abs(frames[0].astype(int) - frames[-1]).max() > 50, "something moves"


def test_env_without_render_is_recorded_from_image_observations_or_refused(tiltyard: Command, runs: Path) -> None:
    product.train({**TRAIN, "env": {"id": "identity", "options": {"shows": "image"}}}, live=False)
    found = result(tiltyard("eval", "last", "--episodes", "1", "--video", "--json").stdout)
    assert len(frames_of(Path(found["files"]["video"]))) == 11  # type: ignore[index]
    assert (found["low"], found["high"]) == (None, None)
    product.train({**TRAIN, "env": "identity"}, live=False)
    assert "cannot be recorded" in tiltyard("eval", "last", "--video", expect=2).stderr
    assert not list(find("last", runs).folder.glob("videos/*"))


def test_python_api_evaluates_and_loads_a_policy(trained: Run, runs: Path) -> None:
    measured = product.evaluate(trained, episodes=4)
    assert len(measured.returns) == 4 and measured.mean == pytest.approx(np.mean(measured.returns))
    policy = product.load_policy(trained.folder)
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=measured.seeds[0])
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        total, over = total + float(reward), terminated or truncated
    assert total == measured.returns[0], "the loaded policy acts as the evaluated one did"


def test_custom_policy_plays_the_same_episodes(tiltyard: Command, trained: Run, tmp_path: Path) -> None:
    (tmp_path / "balance.py").write_text(
        "class CustomPolicy:\n"
        "    def __init__(self, spec):\n"
        "        assert spec.action.columns == 1\n"
        "    def reset(self, seed):\n"
        "        self.seed = seed\n"
        "    def act(self, obs, mask):\n"
        "        return int(obs[2] + 0.3 * obs[3] + 0.05 * obs[1] > 0)\n"
    )
    mine = result(tiltyard("eval", "last", "--policy", "balance.py", "--episodes", "4", "--json").stdout)
    random = result(tiltyard("eval", "last", "--random", "--episodes", "4", "--json").stdout)
    shared = result(tiltyard("eval", "last", "--random", "--episodes", "4", "--workers", "2", "--json").stdout)
    assert mine["returns"] == [500.0] * 4, "leaning into the fall balances the pole: the hand-written code acted"
    assert mine["seeds"] == random["seeds"] and random["mean"] < 100  # type: ignore[operator]
    assert random["returns"] == shared["returns"]
    (tmp_path / "balance.py").write_text("class CustomPolicy:\n    def __init__(self, spec):\n        self.nothing\n")
    done = tiltyard("eval", "last", "--policy", "balance.py", expect=1)
    assert "policy balance.py raised AttributeError" in done.stderr and "self.nothing" in done.stderr


def test_confidence_interval_uses_students_t() -> None:
    for freedom, known in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)):
        assert student_t(freedom) == pytest.approx(known, rel=5e-3)
    measured = summarise([EpisodeResult(i, i, value, 1) for i, value in enumerate((1.0, 2.0, 3.0))], True, 0.0)
    assert (measured.low, measured.high) == pytest.approx((2 - 2.484, 2 + 2.484), rel=1e-2)


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_worker_exit_is_reported(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Dies(CartPoleEnv):\n"
        "    def __init__(self, *, after: int = 10**9):\n"
        "        super().__init__()\n"
        "        self.after = after\n"
        "    def step(self, action):\n"
        "        self.after -= 1\n"
        "        if self.after == 0:\n"
        "            os._exit(0)\n"
        "        return super().step(action)\n"
    )
    product.train({**TRAIN, "env": "dies.py:Dies"}, live=False)
    before = children()
    done = tiltyard("eval", "last", "--random", "--episodes", "40", "--workers", "2", "env.options.after=100", expect=1)
    assert "evaluation worker 0 exited with code 0\n" in done.stderr
    assert children() == before, "no worker is left behind"


def started(*words: str) -> "subprocess.Popen[str]":
    """Start a long evaluation and wait for its two workers."""
    words = ("eval", "last", "--workers", "2", "--episodes", "1000000", *words)
    child = subprocess.Popen(
        [sys.executable, "-m", "tiltyard", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: len(workers_of(child.pid)) == 2)
    return child


def workers_of(pid: int) -> list[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(word) for word in listed if b"evaluation.workers" in Path(f"/proc/{word}/cmdline").read_bytes()]
    except FileNotFoundError:
        return []


def is_there(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def importing_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("busy", [False, True], ids=["starting", "playing"])
def test_workers_exit_with_their_parent(trained: Run, busy: bool) -> None:
    child = started()
    workers = workers_of(child.pid)
    if busy:
        wait_until(lambda: all(importing_torch(worker) for worker in workers))
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    wait_until(lambda: not any(is_there(worker) for worker in workers))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_an_evaluation_and_its_workers(trained: Run, number: signal.Signals, code: int) -> None:
    child = started()
    workers = workers_of(child.pid)
    wait_until(lambda: all(importing_torch(worker) for worker in workers))
    assert [os.getsid(worker) for worker in workers] == workers, "none has the parent's terminal"
    # Ctrl-C signals all processes of a terminal.
    (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
    _, errors = child.communicate(timeout=100)
    assert child.returncode == code and "Traceback" not in errors
    assert not any(is_there(worker) for worker in workers)


def test_worker_exits_when_its_channel_is_closed(trained: Run) -> None:
    """For systems without PR_SET_PDEATHSIG. Here the parent stays alive but closes its end of the channel."""
    worker = Child("tiltyard.evaluation.workers:answer", {"checkpoint": "none"}, "worker", "")
    worker._channel.close()
    assert worker.process.wait(100) == 1


DRAWS = """
import os
import signal

import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


class Draws(CartPoleEnv):
    def __init__(self, render_mode=None, fails: str = "never"):
        super().__init__()
        self.render_mode, self.fails, self.over, self.info = render_mode, fails, False, {}

    def reset(self, *, seed=None, options=None):
        self.over = False
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, self.over, truncated, _ = super().step(action)
        self.info["count"] = self.info.get("count", 0) + 1  # the same dict every time
        if self.fails == "terminated" and self.render_mode and self.info["count"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return obs, reward, self.over, truncated, self.info

    def render(self):
        if self.fails == "always" or (self.fails == "at the end" and self.over):
            raise RuntimeError("no colours left")
        return np.full((8 if self.fails != "another size" or not self.over else 9, 8, 3), 7, np.uint8)
"""


def drawing(fails: str, **eval_: object) -> dict[str, object]:
    env = {"id": "draws.py:Draws", "options": {"fails": fails}}
    return {**TRAIN, "env": env, "eval": {"every": 32, "episodes": 2, "envs": 2, **eval_}}


@pytest.mark.parametrize(
    ("fails", "ffmpeg", "why"),
    [
        ("always", None, "render() raised RuntimeError: no colours left"),
        ("at the end", None, "render() raised RuntimeError: no colours left"),
        ("another size", None, "the first was"),
        ("never", "/nowhere/ffmpeg", "/nowhere/ffmpeg: No such file or directory"),
        ("never", "/bin/false", "ffmpeg exited with code 1"),
    ],
)
def test_video_failure_is_a_warning_in_training_and_an_error_in_eval(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, ffmpeg: str, why: str
) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    if ffmpeg is not None:
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", ffmpeg)
    without_video = product.train(drawing(fails), live=False)
    run = product.train(drawing(fails, video=True), live=False)
    assert run.state == "finished"
    warnings = [event["sentence"] for event in read_events(run) if event["kind"] == "warning"]
    assert len(warnings) == 3 and all(
        "no video of the evaluation" in sentence and why in sentence for sentence in warnings
    )
    assert warnings[0] in next((run.folder / "logs").iterdir()).read_text()
    returns = [metrics.series(metrics.read(each.metrics_file), "eval/return") for each in (run, without_video)]
    assert returns[0] == returns[1] and len(returns[0][0]) == 3, "the numbers count"
    done = tiltyard("eval", run.id, "--video", "--episodes", "3", "--json", "--out", "out", expect=1)
    assert why in done.stderr and "video" not in result(done.stdout)["files"]  # type: ignore[operator]
    assert len(result(done.stdout)["returns"]) == 3  # type: ignore[arg-type]
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".csv", ".json"]
    assert not list(run.folder.glob("videos/*"))


def test_video_failure_in_a_worker_is_reported(trained: Run, tmp_path: Path) -> None:
    (tmp_path / "video.mp4").mkdir()
    (tmp_path / "video.mp4" / "in the way").touch()
    with pytest.raises(VideoError, match="could not be written: Is a directory") as failed:
        product.evaluate(trained, episodes=4, workers=2, video=tmp_path / "video.mp4")
    assert failed.value.result.returns == product.evaluate(trained, episodes=4).returns


def test_training_with_video_is_refused_if_the_env_cannot_render(tiltyard: Command, runs: Path) -> None:
    assert "cannot be recorded" in tiltyard("train", "identity", "eval.video=true", expect=2).stderr
    assert not runs.exists()


def test_sigterm_during_an_env_step_leaves_no_partial_files(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    product.train(drawing("never", every=0, at_end=False), live=False)
    words = ["env.options.fails=terminated", "--video", "--save-rollouts", "data", "--out", "out"]
    done = tiltyard("eval", "last", *words, expect=143)
    assert (done.stdout, done.stderr.strip()) == ("", "")
    assert list((tmp_path / "out").iterdir()) == []
    assert list(product.read_episodes(tmp_path / "data")) == [] and not (tmp_path / "data" / "episodes").exists()
    assert list((tmp_path / "data" / ".tmp").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_infos_are_copied_if_the_env_reuses_its_dict(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    run = product.train(drawing("never", every=0, at_end=False), live=False)
    product.evaluate(run, episodes=1, rollouts=tmp_path / "data", save_info=True)
    (episode,) = product.read_episodes(tmp_path / "data")
    assert [info["count"] for info in episode.info] == [*range(1, len(episode.action) + 1)]


def test_episodes_are_not_written_into_runs(tiltyard: Command, trained: Run, runs: Path, tmp_path: Path) -> None:
    own = [trained.folder, trained.checkpoints, trained.folder / "eval" / "deeper", trained.folder / "plugins"]
    for place in (runs, runs / "data", runs / "CartPole-v1", runs / "CartPole-v1" / "data", *own):
        before = sorted(runs.rglob("*"))
        done = tiltyard("eval", "last", "--episodes", "1", "--save-rollouts", str(place), expect=2)
        assert "cannot write episodes to" in done.stderr and "belongs to the run" in done.stderr
        assert sorted(runs.rglob("*")) == before, "nothing was played or made"
    product.evaluate(trained, episodes=1, rollouts=trained.folder / "rollouts")
    (tmp_path / "experiment.yaml").touch()
    product.evaluate(trained, episodes=1, rollouts=tmp_path / "data")
    assert len(list(product.read_episodes(tmp_path / "data"))) == 1


def test_settings_that_eval_cannot_change_are_refused_with_a_hint(tiltyard: Command, trained: Run) -> None:
    done = tiltyard("eval", "last", "engine.envs=1", expect=2)
    assert "eval cannot change engine" in done.stderr and "eval.envs" in done.stderr and "--workers" in done.stderr
    assert "minibatch" not in done.stderr
    assert "eval cannot change algo" in tiltyard("eval", "last", "algo.rollout=7", expect=2).stderr


@pytest.mark.parametrize("name", ["episodes", "steps", "workers"])
@pytest.mark.parametrize("count", [0, -1, 2.5, True, 10**7, "3"])
def test_python_api_refuses_invalid_counts(name: str, count: object) -> None:
    with pytest.raises(UseError, match=f"{name} = .* must be a whole number from 1"):
        product.evaluate("no run is looked for", **{name: count})  # type: ignore[arg-type]


def test_python_api_refuses_overrides_that_are_not_a_list(trained: Run) -> None:
    with pytest.raises(UseError, match="overrides"):
        product.evaluate(trained, "env.time_limit=5")
