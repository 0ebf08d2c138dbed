"""Learning of problems with known solutions. Equal seeds give equal results on machines of the same kind."""

from pathlib import Path

import pytest

import tiltyard
from tests.counts import count
from tiltyard.run import metrics

ROOT = Path(__file__).parents[2]
LITTLE = {"track": {"tensorboard": False}, "save": {"seconds": 1000}}


def evaluation_returns(run: tiltyard.Run) -> list[float]:
    return metrics.series(metrics.read(run.metrics_file), "eval/return")[1]


@pytest.mark.slow
def test_cartpole_is_solved_within_100_000_env_steps(runs: Path) -> None:
    seeds = range(count(10))
    solved = []
    for seed in seeds:
        run = tiltyard.train(
            ROOT / "examples" / "cartpole.yaml", [f"seed={seed}", "track.tensorboard=false"], live=False
        )
        solved.append(max(evaluation_returns(run)) >= 475 and run.status()["progress"]["env_steps"] <= 101_000)
    assert sum(solved) >= 0.9 * len(seeds), f"solved: {dict(zip(seeds, solved, strict=True))}"


def test_basic_env_reaches_its_optimum(runs: Path) -> None:
    run = tiltyard.train(
        {**LITTLE, "env": "basic", "algo": {"rollout": 16, "minibatch": 64}, "stop": {"env_steps": 4096}}, live=False
    )
    assert evaluation_returns(run)[-1] == 1.0


def memory_experiment(kind: str) -> dict[str, object]:
    return {
        **LITTLE,
        "env": {"id": "memory", "options": {"length": 6}},
        "model": {"memory": {"kind": kind, "size": 32, "bptt": 16}, "hidden": [32]},
        "algo": {"rollout": 64, "minibatch": 256, "lr": 3e-3, "epochs": 4},
        "stop": {"env_steps": 16_384},
        "eval": {"episodes": 64, "every": 0},
    }


@pytest.mark.slow
def test_memory_env_requires_a_recurrent_model(runs: Path) -> None:
    with_memory = evaluation_returns(tiltyard.train(memory_experiment("lstm"), live=False))[-1]
    without = evaluation_returns(tiltyard.train(memory_experiment("none"), live=False))[-1]
    assert with_memory == 1.0
    assert without < 0.75, (
        "64 episodes with two equally likely cues: a policy without memory is right about half the time"
    )


@pytest.mark.slow
def test_car_pass_reaches_190_and_never_exceeds_its_supremum(runs: Path) -> None:
    run = tiltyard.train(ROOT / "examples" / "car_pass.yaml", ["track.tensorboard=false"], live=False)
    returns = evaluation_returns(run)
    assert max(returns) >= 190
    assert max(returns) <= 216
    best_episode = max(record["metrics"].get("train/return_max", 0) for record in metrics.read(run.metrics_file))
    assert best_episode <= 216


def timeout_experiment(wrappers: list[str]) -> dict[str, object]:
    return {
        **LITTLE,
        "env": {"id": "timeout", "wrappers": wrappers},
        "algo": {"rollout": 64, "minibatch": 256, "gamma": 0.95},
        "stop": {"env_steps": 16_384},
        "eval": {"at_end": False, "every": 0},
    }


@pytest.mark.slow
def test_timeout_env_fails_if_truncation_is_treated_as_termination(runs: Path, tmp_path: Path) -> None:
    """Staying is worth 1 / (1 - 0.95) = 20, the prize 5. If truncation were termination, staying would be worth 4."""
    (tmp_path / "wrong.py").write_text(
        "import gymnasium\n"
        "class Ends(gymnasium.Wrapper):\n"
        "    def step(self, action):\n"
        "        obs, reward, terminated, truncated, info = self.env.step(action)\n"
        "        return obs, reward, terminated or truncated, False, info\n"
    )
    right = tiltyard.train(timeout_experiment([]), live=False)
    wrong = tiltyard.train(timeout_experiment(["wrong.py:Ends"]), live=False)

    def stayed(run: tiltyard.Run) -> float:
        return metrics.series(metrics.read(run.metrics_file), "episode/stayed")[1][-1]

    assert stayed(right) > 0.95
    assert stayed(wrong) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("shows", ["category", "vector", "image", "words", "number"])
def test_identity_is_learned_for_all_observation_kinds(runs: Path, shows: str) -> None:
    run = tiltyard.train(
        {
            **LITTLE,
            "env": {"id": "identity", "options": {"shows": shows}},
            "model": {"hidden": [32], "log_std": -0.5},
            "algo": {"rollout": 64, "minibatch": 128, "epochs": 4, "lr": 3e-3},
            "stop": {"env_steps": 20_000, "return": 9.0},
            "eval": {"every": 2_048, "episodes": 20},
        },
        live=False,
    )
    assert max(evaluation_returns(run)) >= 9.0


@pytest.mark.slow
def test_a2c_learns_from_delayed_rewards(runs: Path) -> None:
    run = tiltyard.train(
        {
            **LITTLE,
            "env": "delay",
            "algo": {"id": "a2c", "lr": 5e-3, "entropy": 0.01},
            "stop": {"env_steps": 60_000, "return": 9.9},
            "eval": {"every": 5_000},
        },
        live=False,
    )
    assert max(evaluation_returns(run)) >= 9.9
