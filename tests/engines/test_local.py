"""The local engine: same weights as the serial engine, measured and bounded lag, and workers that crash or hang."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiltyard as product
from tests.counts import LONG, count
from tests.engines.test_serial import build
from tiltyard.engines.local import shared_memory as shared_memory
from tiltyard.engines.local.engine import LocalEngine, _filled
from tiltyard.errors import DivergedError, EnvError
from tiltyard.run.events import read_events
from tiltyard.run.settings_file import write_settings
from tiltyard.run.state_file import write_trees

TWO = ("engine.workers=2", "engine.envs=4", "env.native=false", "engine.threads=1")  # two threads round differently
SHORT = ["algo.rollout=16", "algo.minibatch=32", "eval.at_end=false", "track.tensorboard=false", *TWO]


def weights(engine: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in engine.snapshot().weights.items()}


# ------------------------------------------------------------------------------------------------ synchronous


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_workers_and_groups_in_one_process_give_identical_weights(memory: str) -> None:
    settings = (*TWO, f"model.memory.kind={memory}", "model.memory.size=16", "model.normalise.obs=true")
    one, two = build("CartPole-v1", *settings, "engine.kind=serial"), build("CartPole-v1", *settings)
    assert isinstance(two, LocalEngine)
    for _ in range(6):
        a, b = one.step(), two.step()
        assert (a.progress.env_steps, a.progress.episodes) == (b.progress.env_steps, b.progress.episodes)
        assert sorted(end.seed for end in a.episodes) == sorted(end.seed for end in b.episodes)
    assert weights(one) == weights(two)
    one.close()
    two.close()


def test_other_number_of_groups_gives_other_weights_and_is_described() -> None:
    """Without this, the test above would prove nothing."""
    one, two = build("CartPole-v1", *TWO, "engine.kind=serial"), build("CartPole-v1", *TWO, "engine.workers=0")
    for _ in range(3):
        one.step()
        two.step()
    assert weights(one) != weights(two)
    assert "in this process" in two.describe()[-1]
    one.close()
    two.close()


def test_resumed_run_continues_bit_for_bit(runs: Path) -> None:
    whole = product.train("CartPole-v1", [*SHORT, "stop.env_steps=512"], live=False)
    parts = product.train("CartPole-v1", [*SHORT, "stop.env_steps=192"], live=False)
    product.resume(parts, ["stop.env_steps=512"], live=False)
    found = [product.load_policy(run.folder).net.arrays() for run in (whole, parts)]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert not [event for event in read_events(parts) if event["kind"] == "warning"]


def test_fork_with_more_workers_reports_cut_episodes(runs: Path) -> None:
    run = product.train("CartPole-v1", [*SHORT, "stop.env_steps=64", "engine.workers=1"], live=False)
    fork = product.fork(run, ["stop.env_steps=128", "engine.workers=2"], live=False)
    output = " ".join(event["sentence"] for event in read_events(fork))
    assert "the checkpoint has no env group 1" in output and "2 of the checkpoint's 4 rows are left" in output


# ------------------------------------------------------------------------------------------------ asynchronous


def grow_old(engine: Any, updates: int) -> None:
    """Wait until a batch is full, then publish weights that are this many updates newer than those of the batch."""
    while len(engine.full) < engine.workers:
        for worker, answer in engine.pool.answers():
            engine.full.append(_filled(worker, answer))
    engine.versions.current += updates
    engine.shared.publish(engine.learner.net.arrays(), engine.versions.current)


def test_asynchronous_samples_have_a_version_and_old_ones_are_discarded() -> None:
    engine = build("CartPole-v1", *TWO, "engine.mode=async", "engine.max_lag=5")
    assert engine.step().metrics["lag/mean"] == 0
    engine.step()
    grow_old(engine, 3)
    found = engine.step().metrics
    assert found["lag/max"] >= 3 and found["lag/mean"] > 0 and found["lag/discarded"] == 0
    shares = [value for name, value in found.items() if name[4:].isdecimal() and name.startswith("lag/")]
    assert sum(shares) == pytest.approx(1)
    grow_old(engine, 9)
    found = engine.step().metrics
    assert found["lag/discarded"] >= 2 * 2 * 16 and found["lag/max"] <= 5, "env steps of two slots"
    engine.close()


def test_asynchronous_training_learns(runs: Path) -> None:
    run = product.train(
        Path(__file__).parents[2] / "examples" / "cartpole.yaml",
        ["engine.mode=async", "engine.workers=1", "stop.env_steps=60000", "eval.every=10000", "stop.return=400"],
        live=False,
    )
    assert (run.status()["eval_return"] or 0) >= 400


# ------------------------------------------------------------------------------------------------ faults

FAULTY = """
import os, time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

class CustomEnv(CartPoleEnv):
    def __init__(self, does, once):
        super().__init__()
        self.does, self.once, self.left = does, Path(once), 10

    def step(self, action):
        self.left -= 1
        if self.left == 0 and self.is_first():
            if self.does == "raise":
                raise ValueError("the physics blew up")
            if self.does == "exit":
                os._exit(3)
            if self.does == "kill":
                os.kill(os.getpid(), 9)
            time.sleep(1000)
        return super().step(action)

    def is_first(self):  # atomic: both workers come here at the same step
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
"""


@pytest.mark.parametrize(
    ("does", "output"),
    [
        ("raise", "step() raised ValueError: the physics blew up"),
        ("exit", "exited with code 3"),
        ("kill", "was killed by SIGKILL"),
        ("hang", "did not return from step() within 1 s (env.step_timeout) (it was in"),
    ],
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_failed_worker_is_reported_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, output: str, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "once").touch()  # so that the probe finds no fault
    options = (f"env.options.does={does}", f"env.options.once={tmp_path / 'once'}", "env.step_timeout=1")
    engine = build("faulty.py", *TWO, *options, f"engine.mode={mode}")
    (tmp_path / "once").unlink()
    events: list[str] = []
    while not events:
        events += engine.step().events
    assert (
        len(events) == 1
        and output in events[0]
        and "a new one replaces it, and 2 running episodes were cut" in events[0]
    )
    if does == "hang":
        assert "faulty.py" in events[0] and "in step" in events[0]
    before = engine.progress
    for _ in range(4):
        found = engine.step()
    assert found.progress.env_steps == before.env_steps + 4 * 64 and found.metrics["workers/restarts"] == 1
    engine.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_slot_filled_by_a_worker_that_died_later_is_learned_from(mode: str) -> None:
    engine = build("CartPole-v1", *TWO, f"engine.mode={mode}")
    engine.step()
    for worker, slot in engine.idle:
        engine.pool.send(worker, {"do": "fill", "slot": slot})
    engine.idle = []
    mine = [slot for slot in range(len(engine.shared.states)) if slot % 2 == 0]
    while not all(
        engine.shared.states[slot] == shared_memory.FULL for slot in mine
    ):  # its answers are unread in the pipe
        time.sleep(0.01)
    pid = engine.pool.workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    before = engine.progress.env_steps
    for _ in range(3):
        engine.step()
    assert engine.progress.env_steps == before + 3 * 64 and engine.pool.restarts == 1
    engine.close()


BROKEN = """
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    left = 40
    def step(self, action):
        self.left -= 1
        if self.left < 0: raise RuntimeError('no more')
        return super().step(action)
"""


def test_env_that_always_fails_ends_training_with_its_own_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    engine = build("broken.py", *TWO, "algo.rollout=64", "algo.minibatch=64")
    with pytest.raises(EnvError, match="step\\(\\) raised RuntimeError: no more") as raised:
        engine.step()
    assert "broken.py" in raised.value.details
    engine.close()


def test_number_of_restarts_is_limited() -> None:
    engine = build("CartPole-v1", *TWO, "engine.restarts=1")

    def kill_and_go_on() -> None:
        pid, before = engine.pool.workers[0].pid, engine.pool.restarts
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while engine.pool.restarts == before:
            engine.step()

    engine.step()
    kill_and_go_on()
    engine.step()
    with pytest.raises(EnvError, match=r"engine\.restarts is exhausted"):
        kill_and_go_on()
    engine.close()


def test_error_after_too_many_restarts_has_the_traceback_and_unreported_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    engine = build("broken.py", *TWO, "algo.rollout=64", "algo.minibatch=64", "engine.restarts=1")
    with pytest.raises(EnvError, match=r"no more, and engine\.restarts is exhausted") as raised:
        engine.step()
    assert raised.value.details.startswith("before: worker ")
    assert "broken.py" in raised.value.details and "if self.left < 0" in raised.value.details
    engine.close()


def test_fork_with_fewer_groups_is_reported_and_begins_episodes_with_new_seeds(tmp_path: Path) -> None:
    two = build("CartPole-v1", "env.native=false", "engine.kind=serial", "engine.workers=2", "engine.envs=4")
    had = {end.seed for _ in range(8) for end in two.step().episodes}
    had |= {seed for group in two.groups for seed in group.envs.stats.seeds}
    write_trees(tmp_path, two.save(tmp_path))
    one = build("CartPole-v1", "env.native=false", "engine.workers=0", "engine.envs=4")
    assert one.load(tmp_path) == [
        "only 1 of the checkpoint's 2 env groups continue; the episodes of the others were cut"
    ]
    running = one.groups[0].envs.stats.seeds
    assert running[:2] == two.groups[0].envs.stats.seeds and not had & {*running[2:]}
    write_trees(tmp_path, one.save(tmp_path))
    three = build("CartPole-v1", "env.native=false", "engine.kind=serial", "engine.workers=2", "engine.envs=4")
    assert "the checkpoint has no env group 1; its 2 rows begin new episodes" in three.load(tmp_path)
    three.step()
    assert not (had | {*running}) & {*three.groups[1].envs.stats.seeds}


def test_many_kills_do_not_stop_asynchronous_training(runs: Path) -> None:
    engine = build("CartPole-v1", *TWO, "engine.mode=async")
    rng, kills = np.random.default_rng(0), count(long=200)
    engine.step()
    while engine.pool.restarts < kills:
        member = engine.pool.workers[int(rng.integers(2))]
        if member.pid is not None and member.ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        for _ in range(int(rng.integers(1, 4))):
            engine.step()
    before = engine.progress.env_steps
    for _ in range(5):
        engine.step()
    assert engine.progress.env_steps == before + 5 * 64
    engine.close()


CHAOTIC = """
import os, random, time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

class CustomEnv(CartPoleEnv):
    def __init__(self, faults, every, log):
        super().__init__()
        self.faults, self.every, self.log = faults, every, Path(log)

    def step(self, action):
        # The episode's own stream, which CartPole has no use for between resets. Probes and evaluations are no workers.
        if self.np_random.random() < 1 / self.every and "TILTYARD_WORKER" in os.environ:
            self.go_wrong(len(self.log.read_text()))
        return super().step(action)

    def go_wrong(self, before):
        if before >= self.faults:
            return
        does = random.Random(before).choice("rhek")
        with self.log.open("a") as log:
            log.write(does)
        if does == "r":
            raise ValueError("the physics blew up")
        if does == "h":
            time.sleep(1000)
        if does == "e":
            os._exit(3)
        os.kill(os.getpid(), 9)
"""
EVERY = 1000  # env steps between two faults, on average


@pytest.mark.timeout(1200)
def test_training_learns_while_workers_raise_hang_exit_and_are_killed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "chaotic.py").write_text(CHAOTIC)
    (log := tmp_path / "faults").touch()
    faults = count(long=200)
    run = product.train(
        "chaotic.py",
        [
            f"env.options={{faults: {faults}, every: {EVERY}, log: {log}}}",
            "env.time_limit=500",  # as in CartPole-v1
            "env.step_timeout=1",
            *("engine.workers=2", "engine.envs=8", "engine.threads=1"),
            # Short rollouts, because training fails if a worker is replaced five times before it has filled one.
            *("algo.rollout=32", "algo.minibatch=64", "algo.epochs=4", "algo.lr={kind: linear, start: 1e-3}"),
            f"stop.env_steps={faults * EVERY * 3 // 2}",  # enough for all faults, and for learning if there are 200
            *("eval.every=0", "eval.episodes=20", f"eval.at_end={LONG}", "track.tensorboard=false"),
        ],
        live=False,
    )
    done = log.read_text()
    assert len(done) >= faults and {*done} == {*"rhek"}
    output = " ".join(event["sentence"] for event in read_events(run) if event["kind"] == "warning")
    assert output.count("a new one replaces it, and 4 running episodes were cut") >= faults
    for does, words in (
        ("r", "raised ValueError: the physics blew up"),
        ("h", "did not return from step() within 1 s"),
        ("e", "exited with code 3"),
        ("k", "was killed by SIGKILL"),
    ):
        assert output.count(words) >= done.count(does), words
    assert run.state == "finished"
    if LONG:
        assert (run.status()["eval_return"] or 0) >= 450


DRIVER = """
import sys
from tests.engines.test_serial import build
if __name__ == "__main__":
    engine = build("CartPole-v1", "engine.workers=2", "engine.envs=4", "engine.mode=async")
    engine.step()
    print(engine.pool._fork_server._process.pid, *(worker.pid for worker in engine.pool.workers), flush=True)
    while True:
        engine.step()
"""


def test_no_process_is_left_if_the_driver_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 3
    for pid in (driver.pid, *pids):  # named shared memory would be left behind
        assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()
    driver.kill()
    driver.wait()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)


def test_deleted_file_is_used_if_memfd_is_not_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*words: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "memfd_create", refuse)
    monkeypatch.setattr(shared_memory.tempfile, "tempdir", str(tmp_path))
    engine = build("CartPole-v1", *TWO)
    assert engine.step().progress.env_steps == 64
    assert Path(f"/proc/self/fd/{engine.shared.fd}").readlink().is_relative_to(tmp_path)
    assert not list(tmp_path.glob("tiltyard-*")), "the file must have no name"
    engine.close()


def test_nan_reward_stops_training_and_the_error_has_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nan.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class CustomEnv(CartPoleEnv):\n"
        "    left = 40\n"
        "    def step(self, action):\n"
        "        self.left -= 1\n"
        "        obs, reward, *rest = super().step(action)\n"
        "        return obs, float('nan') if self.left < 0 else reward, *rest\n"
    )
    engine = build("nan.py", *TWO, "algo.rollout=64", "algo.minibatch=64")
    with pytest.raises(DivergedError, match="the reward is nan") as raised:
        engine.step()
    assert np.isnan(np.asarray(raised.value.batch["reward"])).any()
    engine.close()


def test_resume_keeps_the_chosen_number_of_workers(runs: Path) -> None:
    """A new measurement might choose another number and cut running episodes."""
    run = product.train("CartPole-v1", [*SHORT, "stop.env_steps=64"], live=False)
    stored = run.experiment()
    assert stored.engine.workers == 2
    auto = stored.engine.model_copy(update={"workers": "auto"})
    write_settings(run.folder, stored.model_copy(update={"engine": auto}))
    product.resume(run, ["stop.env_steps=128"], live=False)
    assert not [event for event in read_events(run) if event["kind"] == "warning"]
