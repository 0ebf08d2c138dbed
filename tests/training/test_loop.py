"""Decisions of the training loop, as seen in the run folder: when it stops, what it saves, keeps and records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiltyard as product
from tests.conftest import Command
from tiltyard.run import checkpoint, metric_names, metrics, metrics_index, state_file
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

TINY: dict[str, Any] = {
    "env": "CartPole-v1",
    "engine": {"envs": 2},
    "algo": {"rollout": 16, "minibatch": 32, "epochs": 1},
    "eval": {"every": 0, "at_end": False, "episodes": 2},
    "track": {"tensorboard": False},
}


def train(*overrides: str, **sections: Any) -> Run:
    return product.train({**TINY, **sections}, overrides, live=False)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("env_steps=100", "stop.env_steps=100 reached (128)"),
        ("frames=100", "stop.frames=100 reached (128)"),
        ("updates=3", "stop.updates=3 reached (3)"),
        ("seconds=0.001", "stop.seconds=0.001 reached"),
        ("train_return=5", "stop.train_return=5.0 reached"),
        ("return=1", "stop.return=1.0 reached"),
    ],
)
def test_reason_names_the_first_stop_condition_that_is_met(runs: Path, setting: str, reason: str) -> None:
    run = train(f"stop.{setting}", "eval.every=32")
    status = run.status()
    assert status["state"] == "finished" and status["reason"].startswith(reason)


def test_frames_are_env_steps_times_frameskip(runs: Path) -> None:
    run = train("stop.env_steps=64", "env.frameskip=4", "env.time_limit=5")
    progress = run.status()["progress"]
    assert progress["env_steps"] == 64
    assert 64 * 3 < progress["frames"] <= 64 * 4, "an episode that ends within the skip takes fewer frames"
    assert train("stop.frames=100", "env.frameskip=4").status()["reason"].startswith("stop.frames=100 reached")


def test_seconds_are_counted_across_resumes(runs: Path) -> None:
    run = train("stop.updates=4")
    before = run.status()["progress"]["seconds"]
    product.resume(run, ["stop.updates=null", f"stop.seconds={before / 2}"], live=False)
    assert run.status()["progress"]["updates"] == 4, "the seconds of the first attempt count"


def steps(run: Run) -> list[int]:
    return [one.env_steps for one in checkpoint.list_checkpoints(run)]


def test_checkpoints_are_saved_at_intervals_of_env_steps_updates_or_seconds(runs: Path) -> None:
    keep = "save.last=100"
    assert steps(train("stop.env_steps=160", keep, "save.env_steps=64")) == [64, 128, 160]
    assert steps(train("stop.env_steps=160", keep, "save.updates=2")) == [64, 128, 160]
    assert steps(train("stop.env_steps=160", keep, "save.seconds=1e-9")) == [32, 64, 96, 128, 160]
    assert steps(train("stop.env_steps=160", keep, "save.seconds=1000")) == [160]


def test_last_checkpoints_and_milestones_are_kept(runs: Path) -> None:
    run = train("stop.env_steps=320", "save.updates=1", "save.last=2", "save.milestones=[64, 100]")
    assert steps(run) == [64, 128, 288, 320]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_best_checkpoint_is_kept_by_the_set_metric_and_mode(tiltyard: Command, runs: Path, mode: str) -> None:
    run = train(
        "stop.env_steps=320", "eval.every=32", "save.last=1", "save.best=1", f"save.mode={mode}", "save.metric=eval/length",
        "algo.lr=0.05", "eval.episodes=1",
    )  # fmt: skip
    measured = dict(zip(*metrics.series(metrics.read(run.metrics_file), "eval/length"), strict=True))
    wanted = max(measured.values()) if mode == "max" else min(measured.values())
    assert measured[steps(run)[0]] == wanted and len(steps(run)) <= 2
    shown = json.loads(tiltyard("eval", run.id, "--best", "--episodes", "1", "--json").stdout)
    assert shown["lengths"] == [wanted] and shown["env_steps"] == steps(run)[0]


def test_every_recorded_metric_is_described_and_time_fractions_add_up(runs: Path) -> None:
    run = train("stop.env_steps=320", "eval.every=64", "save.updates=3")
    records = metrics.read(run.metrics_file)
    names = {name for record in records for name in record["metrics"]}
    assert len(names) > 20
    assert [name for name in names if metric_names.describe(name) is None] == []
    for record in records[:-1]:
        shares = [value for name, value in record["metrics"].items() if name.startswith("time/")]
        assert sum(shares) == pytest.approx(1.0, abs=0.02)


def test_track_every_reduces_the_number_of_records(runs: Path) -> None:
    run = train("stop.env_steps=320", "track.every=4")
    assert [record["updates"] for record in metrics.read(run.metrics_file)] == [4, 8, 10]


def test_a_long_run_leaves_an_index_of_its_metrics(runs: Path) -> None:
    run = train("stop.env_steps=12800", "save.seconds=1000")
    assert run.metrics_file.stat().st_size > metrics_index.WORTHWHILE + metrics_index.BLOCK_SIZE
    assert run.metrics_file.with_name(metrics_index.NAME).exists()


def test_env_with_other_results_in_a_rerun_is_reported_and_the_run_continues(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Moody(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        obs, *rest = super().step(action)\n"
        "        return obs + float(os.environ.get('MOOD', '0')) * 1e-3, *rest\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        run = train("stop.env_steps=96", "env.id=moody.py:Moody", "env.strict=false", "seed=1")
        patch.setenv("MOOD", "1")
        product.resume(run, ["stop.env_steps=128"], live=False)
    warnings = [event["sentence"] for event in read_events(run) if event["kind"] == "warning"]
    assert any("re-run" in sentence for sentence in warnings), warnings
    assert run.status()["progress"]["env_steps"] == 128


def test_profile_sets_settings_and_environment_variables(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "tiltyard.yaml").write_text(
        "profiles:\n  small: {set: {engine.envs: 2, track.tensorboard: false}, environment: {FROM_PROFILE: seen}}\n"
    )
    (tmp_path / "asks.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Asks(CartPoleEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        assert os.environ['FROM_PROFILE'] == 'seen'\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROM_PROFILE", "unseen")
        words = [
            "train",
            "asks.py:Asks",
            "algo.rollout=16",
            "algo.minibatch=32",
            "stop.env_steps=32",
            "eval.at_end=false",
        ]
        tiltyard(*words, "--on", "small")
    assert find("last", runs).experiment().engine.envs == 2
    assert "did you mean 'small'" in tiltyard(*words, "--on", "smal", expect=2).stderr


def test_a2c_has_one_epoch_and_no_clipping(runs: Path) -> None:
    run = product.train({**TINY, "algo": {"id": "a2c", "rollout": 16}, "stop": {"env_steps": 96}}, live=False)
    record = metrics.read(run.metrics_file)[-1]["metrics"]
    assert record["learn/epochs"] == 1 and record["learn/clip_fraction"] == 0


def test_version_is_printed(tiltyard: Command) -> None:
    assert tiltyard("version").stdout == f"{product.__version__}\n" == tiltyard("--version").stdout
    assert json.loads(tiltyard("version", "--json").stdout)["tiltyard"] == product.__version__


def test_train_return_counts_only_a_full_window(runs: Path) -> None:
    run = train("stop.train_return=5", "stop.env_steps=4096")
    assert run.status()["progress"]["episodes"] >= 100


def test_fork_with_another_env_ignores_the_returns_of_its_parent(tiltyard: Command, runs: Path) -> None:
    train("stop.env_steps=64", "eval.every=32", "name=parent", "resume=never")
    tiltyard("fork", "parent", "env.time_limit=3", "stop.return=5", "stop.env_steps=128", "name=child")
    child = find("child", runs)
    assert child.status()["progress"]["env_steps"] == 128, "the parent's evaluation of more than 5 does not count here"
    assert child.status()["eval_return"] is None or child.status()["eval_return"] <= 3
    assert metrics.read(child.metrics_file)[0]["env_steps"] == 96, (
        "it goes on from the checkpoint despite resume: never"
    )
    one = train("stop.env_steps=64", "name=seeded")
    weights = []
    for seed in (5, 6):
        tiltyard("fork", one.id, f"seed={seed}", "stop.env_steps=128", f"name=seed-{seed}", "env.time_limit=1")
        newest = checkpoint.select(find(f"seed-{seed}", runs))
        weights.append(state_file.read_tree(newest.folder / "policies", "main")["weights"])
    assert any(weights[0][name].tobytes() != weights[1][name].tobytes() for name in weights[0])


def test_milestone_at_the_last_env_step_is_kept_after_a_resume(runs: Path) -> None:
    run = train(
        "stop.env_steps=64", "save.milestones=[64]", "save.last=1", "save.best=0", eval={"every": 0, "episodes": 1}
    )
    product.resume(run, ["stop.env_steps=192"], live=False)
    assert steps(run) == [64, 192]


def test_changes_that_a_run_does_not_allow_are_refused(tiltyard: Command, runs: Path) -> None:
    train("stop.env_steps=32", "name=kept")
    assert "continues from its own checkpoints" in tiltyard("resume", "kept", "resume=/nowhere", expect=2).stderr
    assert "ranked by eval/return" in tiltyard("resume", "kept", "save.metric=train/return", expect=2).stderr
    assert "not from model.init" in tiltyard("fork", "kept", "model.init=kept", expect=2).stderr
    done = tiltyard("train", "CartPole-v1", "save.metric=eval/retrun", expect=2)
    assert "did you mean 'eval/return'" in done.stderr


def test_failed_seed_does_not_prevent_the_other_seeds(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Picky(CartPoleEnv):\n"
        "    left = 60\n"
        "    def step(self, action):\n"
        "        self.left -= 1\n"
        "        assert self.left > 0\n"
        "        return super().step(action)\n"
    )
    words = ["engine.envs=2", "algo.rollout=16", "algo.minibatch=32", "stop.env_steps=960", "--seeds", "0-1"]
    tiltyard("train", "picky.py:Picky", *words, expect=1)
    assert [Run(folder).state for folder in sorted(runs.glob("*/0*"))] == ["failed", "failed"]


def test_status_of_a_failed_run_has_its_last_progress(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if updates are faster than writes of status.json, and if a resume fails earlier than the first attempt."""
    (tmp_path / "tires.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Tires(CartPoleEnv):\n"
        "    taken = 0\n"
        "    def step(self, action):\n"
        "        self.taken += 1\n"
        "        assert self.taken <= int(os.environ['STAMINA'])\n"
        "        return super().step(action)\n"
    )
    words = ["engine.envs=2", "engine.workers=0", "algo.rollout=8", "algo.minibatch=16", "eval.at_end=false"]
    for verb, stamina, reached in (("train tires.py:Tires", 100, 192), ("resume last", 60, 192 + 112)):
        monkeypatch.setenv("STAMINA", str(stamina))
        tiltyard(*verb.split(), *(words if stamina == 100 else []), expect=1)
        run = find("last", runs)
        last = list(metrics.read(run))[-1]
        status = run.status()
        assert status["state"] == "failed" and status["progress"]["env_steps"] == last["env_steps"] == reached
        assert status["return"] == last["metrics"]["train/return"]


DROPOUT = """
import torch
from torch import nn

class CustomModel(nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(spec.obs["obs"].shape[0], 16), nn.Tanh(), nn.Dropout(0.5))
        self.policy, self.value = nn.Linear(16, outputs), nn.Linear(16, 1)

    def forward(self, obs):
        x = self.body(obs["obs"])
        return self.policy(x), self.value(x).squeeze(-1)
"""


def weights_of(run: product.Run) -> dict[str, bytes]:
    tree = state_file.read_tree(checkpoint.select(run).folder / "policies", "main")["weights"]
    return {name: array.tobytes() for name, array in tree.items()}


def test_dropout_depends_on_the_seed_of_the_run_and_not_on_torchs_global_seed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "drops.py").write_text(DROPOUT)
    torch.manual_seed(3)
    whole = train("stop.env_steps=256", "model.id=drops.py")
    assert torch.initial_seed() == 3
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3)), "the program's own stream was drawn from"
    torch.manual_seed(4)
    parts = train("stop.env_steps=128", "model.id=drops.py")
    torch.manual_seed(5)
    parts = product.resume(parts, ["stop.env_steps=256"], live=False)
    other = train("stop.env_steps=256", "model.id=drops.py", "seed=1")
    assert weights_of(whole) == weights_of(parts) != weights_of(other)


def test_evaluations_use_no_dropout_and_do_not_change_training(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "drops.py").write_text(DROPOUT)
    one = train("stop.env_steps=256", "model.id=drops.py")
    two = train("stop.env_steps=256", "model.id=drops.py", "eval.every=32")
    assert weights_of(one) == weights_of(two)
    assert product.evaluate(two, episodes=4).returns == product.evaluate(two, episodes=4).returns
    policy = product.load_policy(one.folder)
    assert len({policy.act([0.01, 0.02, 0.03, 0.04]) for _ in range(20)}) == 1


def test_previous_reward_is_the_same_in_training_and_evaluation(runs: Path) -> None:
    run = train("stop.env_steps=64", "model.previous=true", "env.reward_scale=0.01")
    measured = product.evaluate(run, episodes=3, rollouts=runs.parent / "data", save_info=False)
    episodes = list(product.read_episodes(runs.parent / "data"))
    assert {float(value) for one in episodes for value in one.obs["previous.reward"][1:, 0]} == {
        float(np.float32(0.01))
    }
    assert sorted(float(one.reward.sum()) for one in episodes) == sorted(measured.returns), "rollouts hold raw rewards"
    import gymnasium

    policy, env = product.load_policy(run.folder), gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=measured.seeds[0])
    total, reward, over = 0.0, 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs, reward=float(reward)))
        total, over = total + float(reward), terminated or truncated
    assert total == measured.returns[0]


def test_settings_of_the_built_in_model_are_refused_with_a_custom_model(
    tiltyard: Command, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "drops.py").write_text(DROPOUT)
    done = tiltyard(
        "train", "CartPole-v1", "model.id=drops.py", "model.hidden=[512]", "model.memory.kind=lstm", expect=2
    )
    assert "model.hidden" in done.stderr and "model.memory.kind" in done.stderr and "2 problems" in done.stderr
    tiltyard("train", "CartPole-v1", "model.id=drops.py", "--debug")  # its preset sets small layers, which is allowed


def test_evaluation_workers_sample_with_different_random_streams(runs: Path) -> None:
    run = train("stop.env_steps=64")
    returns = product.evaluate(run, episodes=8, greedy=False, workers=2).returns
    assert [a for a, b in zip(returns[::2], returns[1::2], strict=True) if a != b], "two workers, two streams"
