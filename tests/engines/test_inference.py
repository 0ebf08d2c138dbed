"""Batched inference in one actor: the same policy as with a copy per worker, and an error with a cause if it exits."""

import contextlib
import copy
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Command
from tests.counts import count
from tests.engines.test_learner_group import name_of, wait_until_gone
from tests.engines.test_serial import build
from tiltyard.config.load import load
from tiltyard.engines import topology as topologies
from tiltyard.engines.local.shared_memory import ACTING
from tiltyard.engines.topology import is_batched, topology
from tiltyard.envs.probe import probe
from tiltyard.envs.watchdog import IDLE
from tiltyard.errors import ConfigError, TiltyardError
from tiltyard.processes.resources import usable_cores
from tiltyard.run import checkpoint
from tiltyard.run.folder import find
from tiltyard.run.state_file import write_trees

BATCHED = "engine.inference=batched"
TWO = ("engine.workers=2", "engine.envs=4", "env.native=false", BATCHED)
ONE = ("engine.workers=1", "engine.envs=4", "env.native=false")
NORMAL = ("model.normalise.obs=true", "model.normalise.returns=true")
LSTM = ("model.memory.kind=lstm", "model.memory.size=8")
starts_processes = pytest.mark.slow


@contextlib.contextmanager
def built(target: str, *settings: str) -> Iterator[Any]:
    engine: Any = build(target, *settings)
    try:
        yield engine
    finally:
        engine.close()


def actor_of(engine: Any) -> int:
    """Wait until the actor has started; return its pid."""
    while engine.pool._inference_server.pid is None:
        engine.pool._handle_events()
    pid: int = engine.pool._inference_server.pid
    return pid


def wait_for_questions(engine: Any, workers: list[int]) -> None:
    """Wait until these workers have sent requests to an actor that does not answer."""
    for worker in workers:
        while engine.shared.states[worker] != ACTING or engine.shared.beats[worker, 1] != IDLE:
            time.sleep(0.01)


@contextlib.contextmanager
def asked_in_vain(engine: Any, workers: list[int]) -> Iterator[None]:
    """Suspend the actor, so that these workers wait for it inside the block."""
    pid = actor_of(engine)
    os.kill(pid, signal.SIGSTOP)
    engine._request_slots()
    wait_for_questions(engine, workers)
    yield
    os.kill(pid, signal.SIGCONT)


def assert_close(one: Any, two: Any) -> None:
    ours, theirs = one.snapshot().weights, two.snapshot().weights
    for name, array in ours.items():
        np.testing.assert_allclose(theirs[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def weights(engine: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in engine.snapshot().weights.items()}


# ------------------------------------------------------------------------------------------------ same policy


@starts_processes
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("Pendulum-v1", ("env.time_limit=5", "algo.epochs=1")),  # with action noise, and episodes that are cut
        ("visitors", (*LSTM, "env.options.pauses=true")),  # agents join and leave, each with its own memory
    ],
)
def test_batched_inference_gives_the_weights_of_inference_in_the_worker(
    env: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    with built(env, *ONE, *NORMAL, *settings) as own, built(env, *ONE, *NORMAL, *settings, BATCHED) as asked:
        assert "batched inference on cpu" in asked.describe()[-1]
        assert "actor" not in own.describe()[-1] and own.shared.inference is None
        for _ in range(3):
            a, b = own.step(), asked.step()
            assert (a.progress.env_steps, a.progress.episodes) == (b.progress.env_steps, b.progress.episodes)
            np.testing.assert_allclose(asked.rollout.value, own.rollout.value, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(asked.rollout.action, own.rollout.action, rtol=1e-4, atol=1e-5)
        assert_close(own, asked)
        assert name_of(actor_of(asked)) == "tiltyard-a0"
        assert b.metrics["actor/rows"] == asked.rollout.reward.shape[1] and "actor/rows" not in a.metrics

        write_trees(tmp_path / "saved", asked.save(tmp_path / "saved"))
        asked.step()
        after = weights(asked)
        for engine in (own, asked):  # the actor has no saved state, so both engines continue from this checkpoint
            assert engine.load(tmp_path / "saved") == []
            engine.step()
        assert weights(asked) == after
        assert_close(own, asked)


@starts_processes
def test_waiting_workers_are_answered_in_one_batch_and_no_env_times_out() -> None:
    with built("CartPole-v1", *TWO, "env.step_timeout=1") as engine:
        engine.step()
        with asked_in_vain(engine, [0, 1]):
            assert list(engine.pool.answers(timeout=2.2)) == []  # checks heartbeats meanwhile
        found = engine.step()
        assert 2 < found.metrics["actor/rows"] <= 4
        assert found.events == () and found.metrics["workers/restarts"] == 0
        assert found.metrics["workers/inference"] > found.metrics["workers/env"]


# ------------------------------------------------------------------------------------------------ asynchronous

GATED = """
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

class CustomEnv(CartPoleEnv):
    def __init__(self, folder):
        super().__init__()
        self.folder, self.steps = Path(folder), 0

    def step(self, action):
        self.steps += 1
        if self.steps == 6 and (self.folder / "there").exists():
            with (self.folder / "there").open("w"), (self.folder / "on").open():
                pass
        return super().step(action)
"""


@starts_processes
def test_asynchronous_samples_carry_the_version_that_decided_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gated.py").write_text(GATED)
    settings = (BATCHED, "engine.workers=1", "engine.envs=1", "algo.minibatch=16", "engine.mode=async")
    with built("gated.py", *settings, "engine.max_lag=5", f"env.options.folder={tmp_path}") as engine:
        os.mkfifo(tmp_path / "on")
        os.mkfifo(tmp_path / "there")
        while not engine.pool.workers[0].ready:
            assert list(engine.pool.answers(timeout=0.1)) == []
        engine._request_slots()
        with (tmp_path / "there").open():  # the env is in its sixth step
            engine.versions.current += 3
            engine.shared.publish(engine.learner.net.arrays(), engine.versions.current)
            (tmp_path / "there").unlink()
            with (tmp_path / "on").open("w"):
                pass
        found = engine.step().metrics
        assert engine.rollout.policy_version[:, 0].tolist() == [0] * 6 + [3] * 10
        assert (found["lag/3"], found["lag/0"], found["lag/max"]) == (6 / 16, 10 / 16, 3)
        assert found["lag/mean"] == pytest.approx(3 * 6 / 16)
        for _ in range(3):
            found = engine.step().metrics
        assert found["lag/max"] <= 5


# ------------------------------------------------------------------------------------------------ faults


def assert_decided_by(net: Any, rollout: Any) -> None:
    """Assert that the stored log probabilities and values are those of this policy."""
    flat = {key: array.reshape(-1, *array.shape[2:]) for key, array in rollout.obs.items()}
    params, value, _ = net.infer(flat, {}, rollout.first.reshape(-1))
    output = net.distribution(params, None).log_prob(rollout.action.reshape(-1, rollout.action.shape[-1]))
    np.testing.assert_allclose(rollout.log_prob.reshape(-1), output, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rollout.value.reshape(-1), net.normaliser.denormalise_value(value), rtol=1e-4, atol=1e-5)


@starts_processes
def test_killed_worker_is_replaced_and_no_worker_gets_the_answer_of_another() -> None:
    with built("CartPole-v1", *TWO) as engine:
        rng = np.random.default_rng(0)
        engine.step()
        for kills in range(1, 1 + count(long=40)):
            worker = int(rng.integers(2))
            while (pid := engine.pool.workers[worker].pid) is None:  # the previous one is still being replaced
                engine.step()
            before, net = engine.progress.env_steps, copy.deepcopy(engine.learner.net)
            with asked_in_vain(engine, [0, 1]):
                os.kill(pid, signal.SIGKILL)
                if kills % 2:  # the new worker also sends a request before any is answered
                    while engine.pool.workers[worker].pid in (pid, None) or not engine.pool.workers[worker].ready:
                        assert list(engine.pool.answers(timeout=0.1)) == []
                    wait_for_questions(engine, [worker])
            found = engine.step()
            while not found.events:  # it may have died after filling its slot
                assert_decided_by(net, engine.rollout)
                net = copy.deepcopy(engine.learner.net)
                found = engine.step()
            assert "was killed by SIGKILL" in found.events[0] and found.metrics["workers/restarts"] == kills
            assert found.progress.env_steps >= before + 64
            assert_decided_by(net, engine.rollout)


def step_until_it_fails(engine: Any) -> None:
    for _ in range(100):  # slots that were filled before are still learned from
        engine.step()


@starts_processes
def test_killed_actor_ends_the_step_with_the_cause() -> None:
    with built("CartPole-v1", *TWO, "engine.mode=async") as engine:
        engine.step()
        actor, found = actor_of(engine), [member.pid for member in engine.pool.workers]
        os.kill(actor, signal.SIGKILL)
        with pytest.raises(
            TiltyardError, match=rf"the inference server \(process {actor}\) was killed by SIGKILL \(.*memory"
        ):
            step_until_it_fails(engine)
        assert engine.pool.restarts == 0, "no worker is to blame"
    wait_until_gone([actor, *found])


FAILS = """
import torch
from torch import nn
class CustomModel(nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, outputs + 1), 0
    def forward(self, obs):
        self.calls += 1
        with open("/proc/self/comm") as file:
            if self.calls > 60 and file.read().startswith("tiltyard-a"):
                raise ValueError('no more' + ' and no more' * 9999)  # longer than a pipe is
        out = self.layer(obs["obs"])
        return out[:, :-1], out[:, -1]
"""


@starts_processes
def test_failed_actor_is_reported_and_the_checkpoint_is_kept_and_no_process_left(
    tiltyard: Command, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(FAILS)
    short = ["algo.rollout=16", "algo.minibatch=32", "eval.every=0", "eval.at_end=false", "track.tensorboard=false"]
    settings = [*short, "model.id=net.py", "save.updates=1", "engine.workers=1", "engine.envs=4", BATCHED]
    done = tiltyard("train", "CartPole-v1", *settings, expect=1)
    run, output = find("last", runs), "raised ValueError: no more"
    assert output in done.stderr and run.state == "failed" and output in run.status()["reason"]
    newest, complaints = checkpoint.newest_valid(run)
    assert newest is not None and newest.env_steps >= 64 and complaints == []
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if name_of(int(pid)).startswith("tiltyard")]


# ------------------------------------------------------------------------------------------------ settings


def test_auto_is_batched_for_one_policy_on_a_gpu() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def chosen(device: torch.device, *settings: str) -> bool:
        return is_batched(load("CartPole-v1", settings).experiment, device)

    assert chosen(cuda) and not chosen(cpu)
    assert chosen(cpu, BATCHED) and not chosen(cuda, "engine.inference=worker")
    assert not chosen(cuda, "engine.kind=serial")
    assert not chosen(cuda, "policies={a: {}, b: {}}")


def test_batched_inference_needs_workers_and_auto_takes_two_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("CartPole-v1", [BATCHED, "engine.envs=4096"])
    spec = replace(probe(loaded.experiment.env, base=loaded.base), step_seconds=1.0)
    cores = usable_cores()
    monkeypatch.setattr(topologies, "free_cores", lambda: float(cores))
    found = topology(loaded.experiment, spec)
    assert found.batched and (found.workers == 2 * cores or 4096 % (2 * cores))
    assert topology(loaded.experiment, spec, 1).workers == 1, "as before, but with somebody who asks"
    plain = load("CartPole-v1", ["env.native=false", "engine.envs=4096"]).experiment
    assert topology(plain, spec).workers <= cores and not topology(plain, spec).batched
    assert not topology(load("CartPole-v1", []).experiment, spec).workers


@pytest.mark.parametrize(
    ("settings", "output"),
    [
        ("engine.kind=serial", "engine.inference = 'batched': needs workers, but engine.kind = serial has none"),
        ("engine.workers=0", "engine.inference = 'batched': needs workers, but engine.workers = 0 has none"),
        ("policies={a: {}, b: {}}", "engine.inference = 'batched': works with one policy, but policies has 2"),
        ("engine.inference=gpu", "must be one of auto, worker, batched"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: str, output: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load("CartPole-v1", [BATCHED, settings])
    assert len(raised.value.problems) == 1 and output in raised.value.details
