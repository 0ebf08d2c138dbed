"""The engine contract on a real Ray cluster: step, save, load, close; a lost process costs only its samples."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.rllib", reason="Ray RLlib is not installed: pip install 'tiltyard[ray]'")

from tests.counts import only_when_long
from tests.engines.rllib.conftest import SMALL, Make, children, other_cluster
from tiltyard.errors import ConfigError, UseError
from tiltyard.run.state_file import write_trees

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("rllib")]


def test_progress_grows_and_no_process_is_left(engine: Make) -> None:
    before = children()
    made = engine("CartPole-v1", *SMALL, "engine.envs=4", "engine.runners=2", "engine.cpus=3")
    description = "\n".join(made.describe())
    assert "2 runners with 2 envs each" in description and "acts without Ray" in description
    first = made.step()
    second = made.step()
    assert first.progress.env_steps == 128 and second.progress.env_steps == 256
    assert second.progress.updates == 2 and second.progress.frames == 256
    assert second.progress.episodes == len(first.episodes) + len(second.episodes) > 0
    assert {"loss/policy", "loss/value", "loss/entropy", "setting/lr", "workers/env"} <= set(second.metrics)
    assert second.time_split["learn"] > 0 and second.time_split["wait"] > 0
    rows = {end.row for report in (first, second) for end in report.episodes}
    seeds = [end.seed for report in (first, second) for end in report.episodes]
    assert len(seeds) == len(set(seeds)) and max(rows) >= 2  # from both runners, and no seed occurs twice
    weights = made.snapshot().weights
    made.step()
    assert any((made.snapshot().weights[name] != array).any() for name, array in weights.items())
    made.close()
    deadline = time.monotonic() + 60
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert children() - before == set()


def test_one_runner_samples_the_episodes_of_the_serial_engine(shared_engine: Make) -> None:
    """With the same seed, initial weights and envs, the first rollout has the same episodes."""
    theirs = shared_engine("CartPole-v1", *SMALL, "engine.envs=4", "engine.runners=0", "seed=3")
    ours = shared_engine("CartPole-v1", *SMALL, "engine.envs=4", "seed=3", "engine.kind=serial")
    for name, array in ours.snapshot().weights.items():
        np.testing.assert_array_equal(theirs.snapshot().weights[name], array)
    there, here = theirs.step(), ours.step()
    assert [(end.row, end.seed, end.total) for end in there.episodes] == [
        (end.row, end.seed, end.total) for end in here.episodes
    ]
    # the minibatches differ, so the weights are only nearly the same
    for name, array in ours.snapshot().weights.items():
        np.testing.assert_allclose(theirs.snapshot().weights[name], array, atol=0.05)


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_saved_engine_continues(shared_engine: Make, tmp_path: Path, memory: str) -> None:
    words = [*SMALL, "engine.envs=4", "engine.runners=0", f"model.memory.kind={memory}", "model.normalise.obs=true"]
    words += ["algo.lr={kind: linear, start: 1e-3, end: 0, over: 1000}", "algo.kl={kind: kl_adaptive, start: 0.2}"]
    first = shared_engine("CartPole-v1", *words)
    for _ in range(3):
        report = first.step()
    write_trees(tmp_path, first.save(tmp_path))
    kept = first.snapshot().weights
    after = first.step()
    first.close()

    if memory == "none":  # weights can be loaded by any engine
        other = shared_engine("CartPole-v1", *SMALL, "engine.envs=4", "model.normalise.obs=true", "engine.kind=serial")
        assert any("weights are loaded, the optimiser starts anew" in output for output in other.load(tmp_path))
        assert all(array.tobytes() == kept[name].tobytes() for name, array in other.snapshot().weights.items())
        assert other.step().progress.env_steps > report.progress.env_steps

    second = shared_engine("CartPole-v1", *words, continues=tmp_path)
    assert second.load(tmp_path) == []
    for name, array in second.snapshot().weights.items():
        np.testing.assert_array_equal(array, kept[name])
    again = second.step()
    assert again.progress.env_steps == after.progress.env_steps == report.progress.env_steps + 128
    assert [end.seed for end in again.episodes] == [end.seed for end in after.episodes]  # running episodes continued
    assert again.metrics["setting/lr"] == pytest.approx(after.metrics["setting/lr"])
    assert again.metrics["setting/kl"] == pytest.approx(after.metrics["setting/kl"])


def test_replay_buffer_counters_and_exploration_are_restored(shared_engine: Make, tmp_path: Path) -> None:
    words = ["algo.id=dqn", "engine.runners=0", "engine.envs=4", "algo.warmup=64", "algo.epsilon=0.25"]
    first = shared_engine("CartPole-v1", *words)
    report = first.step()
    write_trees(tmp_path, first.save(tmp_path))
    filled = first.algo.local_replay_buffer.filled  # type: ignore[attr-defined]
    drawn = first.algo.local_replay_buffer.random.random(4)  # type: ignore[attr-defined]
    first.close()
    assert filled == report.progress.env_steps > 64 and report.progress.updates > 0

    second = shared_engine("CartPole-v1", *words, continues=tmp_path)
    assert second.load(tmp_path) == []
    buffer, runner = second.algo.local_replay_buffer, second.algo.env_runner  # type: ignore[attr-defined]
    assert buffer.filled == filled and runner.num_env_steps_sampled_lifetime == filled
    np.testing.assert_array_equal(buffer.random.random(4), drawn)
    assert second.step().progress.env_steps > filled


def test_sac_restores_its_temperature(shared_engine: Make, tmp_path: Path) -> None:
    words = ["algo.id=sac", "engine.runners=0", "engine.envs=2", "algo.warmup=32", "algo.batch=32", "algo.replays=32"]
    words += ["algo.alpha_lr=0.05"]
    first = shared_engine("Pendulum-v1", *words)
    first.step()
    write_trees(tmp_path, first.save(tmp_path))
    log_alpha = float(first.algo.learner_group._learner.curr_log_alpha["default_policy"])  # type: ignore[attr-defined]
    first.close()
    assert abs(log_alpha) > 0.01
    second = shared_engine("Pendulum-v1", *words, continues=tmp_path)
    second.load(tmp_path)
    again = float(second.algo.learner_group._learner.curr_log_alpha["default_policy"])  # type: ignore[attr-defined]
    assert again == pytest.approx(log_alpha)


NAMED = {
    "rllib:PPO": ("CartPole-v1", "{lr: 0.002, train_batch_size_per_learner: 64, minibatch_size: 32, num_epochs: 2}"),
    "rllib:DQN": (
        "CartPole-v1",
        "{lr: 0.002, num_steps_sampled_before_learning_starts: 32, epsilon: [[0, 1.0], [9, 0.0]]}",
    ),
    "rllib:TQC": ("Pendulum-v1", "{actor_lr: 0.002, num_steps_sampled_before_learning_starts: 32, n_critics: 3}"),
}


@pytest.mark.parametrize("algo", NAMED)
def test_algorithm_with_its_rllib_name_trains(shared_engine: Make, tmp_path: Path, algo: str) -> None:
    """Its options take effect, and it is saved and restored like the other algorithms."""
    env, options = NAMED[algo]
    words = [f"algo.id={algo}", f"algo.options={options}", "algo.rollout=8", "engine.envs=4", "engine.runners=0"]
    first = shared_engine(env, *words)
    assert f"algo    {algo} of RLlib" in "\n".join(first.describe())
    while (report := first.step()).progress.updates == 0:
        pass
    report = first.step()
    assert report.metrics["setting/lr"] == pytest.approx(0.002)
    if algo == "rllib:TQC":
        learner = first.algo.learner_group._learner  # type: ignore[attr-defined]
        assert len(learner.module["default_policy"].unwrapped().qf_encoders) == 3
    write_trees(tmp_path, first.save(tmp_path))
    kept = first.snapshot().weights
    first.close()
    second = shared_engine(env, *words, continues=tmp_path)
    assert second.load(tmp_path) == []
    for name, array in second.snapshot().weights.items():
        np.testing.assert_array_equal(array, kept[name])
    assert second.step().progress.env_steps > report.progress.env_steps


def test_several_learners_have_equal_weights(engine: Make, tmp_path: Path) -> None:
    only_when_long("a minute")
    words = [*SMALL, "engine.envs=4", "engine.runners=1", "engine.learners=2", "engine.cpus=3"]
    first = engine("CartPole-v1", *words)
    assert "2 learners" in "\n".join(first.describe())
    before = first.snapshot().weights
    report = first.step()
    assert report.progress.env_steps == 128 and report.progress.updates == 1
    weights = [
        result.get()
        for result in first.algo.learner_group.foreach_learner(  # type: ignore[attr-defined]
            lambda learner: learner.module["default_policy"].get_state()
        )
    ]
    assert len(weights) == 2
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], atol=1e-6)
    assert any((before[name] != array).any() for name, array in first.snapshot().weights.items())
    write_trees(tmp_path, first.save(tmp_path))
    first.close()
    second = engine("CartPole-v1", *words, continues=tmp_path)
    assert second.load(tmp_path) == []
    assert second.step().progress.env_steps == 256


def test_several_policies_learn_from_their_own_rows(shared_engine: Make) -> None:
    """Matching pennies; `odd` has a learning rate of 0."""
    words = [*SMALL, "engine.envs=4", "engine.runners=1", "policies={even: {}, odd: {algo: {lr: 0.0}}}"]
    made = shared_engine("pennies", *words, "match={even: even, odd: odd}")
    before = {name: made.snapshot(name).weights for name in ("even", "odd")}
    report = made.step()
    after = {name: made.snapshot(name).weights for name in ("even", "odd")}
    moved = {
        name: any((after[name][key] != array).any() for key, array in arrays.items()) for name, arrays in before.items()
    }
    assert moved == {"even": True, "odd": False}
    assert {"policy/even/loss/policy", "policy/odd/loss/policy"} <= set(report.metrics)


def test_lost_runner_is_replaced_and_reported(engine: Make) -> None:
    made = engine("CartPole-v1", *SMALL, "engine.envs=4", "engine.runners=2", "engine.cpus=3")
    made.step()
    group = made.algo.env_runner_group  # type: ignore[attr-defined]
    pids = group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    assert len(set(pids)) == 2
    os.kill(pids[0], signal.SIGKILL)
    output: list[str] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        report = made.step()
        output += report.events
        if group.num_healthy_remote_env_runners() == 2 and output:
            break
    assert any("runner" in sentence and "lost" in sentence for sentence in output), output
    now = group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    assert len(set(now)) == 2 and pids[0] not in now
    assert made.step().progress.env_steps > report.progress.env_steps


def test_lost_node_is_reported_and_training_continues(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the file in which Ray notes the newest address is another user's: here one that cannot be opened."""
    (tmp_path / "ray" / "ray_current_cluster").mkdir(parents=True)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    words = [*SMALL, "engine.envs=2", "engine.runners=2", "engine.nodes=2", "engine.cpus=2"]
    made = engine("CartPole-v1", *words)
    assert "2 emulated nodes" in "\n".join(made.describe())
    before = made.step().progress.env_steps
    node = made.cluster._emulated.list_all_nodes()[-1]  # type: ignore[attr-defined]
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    output: list[str] = []
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and not any("node" in sentence for sentence in output):
        report = made.step()
        output += report.events
    assert any(sentence.startswith("node ") and "was lost" in sentence for sentence in output), output
    assert report.progress.env_steps > before


def test_existing_cluster_is_joined_and_left_unchanged(
    engine: Make, ray_token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(ray_token))
    with other_cluster(ray_token, cpus=2) as (address, owner):
        assert owner.stdin is not None and owner.stdout is not None
        with pytest.raises(UseError) as refused:
            engine("CartPole-v1", *SMALL, "engine.envs=3", "engine.runners=3", f"engine.address={address}")
        assert "need 3 CPUs" in refused.value.message and "has 2" in refused.value.message
        made = engine("CartPole-v1", *SMALL, "engine.envs=4", "engine.runners=1", f"engine.address={address}")
        assert address in "\n".join(made.describe())
        assert made.step().progress.env_steps == 128
        made.close()
        owner.stdin.write("still there?\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "42\n"


FAILS = """
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    steps = 0
    def step(self, action):
        CustomEnv.steps += 1
        if CustomEnv.steps > 500:
            raise ValueError("the wheel came off")
        return super().step(action)
"""


def test_failing_env_is_reported_and_counted(engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cart.py").write_text(FAILS)
    monkeypatch.chdir(tmp_path)
    from tiltyard.errors import TiltyardError

    made = engine("cart.py", *SMALL, "engine.envs=4", "engine.runners=1", "engine.restarts=2")
    output: list[str] = []

    def run() -> None:
        for _ in range(50):
            output.extend(made.step().events)

    with pytest.raises(TiltyardError) as failed:
        run()
    assert "the wheel came off" in failed.value.message and "engine.restarts = 2" in failed.value.message
    assert any("restarts its envs" in sentence for sentence in output)


def test_missing_cpus_are_refused_before_ray_starts(engine: Make) -> None:
    before = children()
    with pytest.raises(UseError) as refused:
        engine("CartPole-v1", "engine.runners=7", "engine.envs=7", "engine.cpus=2")
    assert "need 7 CPUs" in refused.value.message and "has 2" in refused.value.message
    assert children() == before


@pytest.mark.parametrize(("env", "algo"), [("Pendulum-v1", "dqn"), ("CartPole-v1", "sac")])
def test_unsupported_actions_are_refused(engine: Make, env: str, algo: str) -> None:
    with pytest.raises(ConfigError) as refused:
        engine(env, f"algo.id={algo}")
    assert "algo.id" in refused.value.details and env in refused.value.details
