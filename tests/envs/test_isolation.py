"""Envs in their own threads and processes: where they run, what they return, how they end."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tests.counts import count
from tiltyard.config.sections import Env
from tiltyard.envs.isolation.space_parts import space_from_parts, space_parts
from tiltyard.envs.make import make_copies
from tiltyard.envs.probe import examine, probe
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.single_agent_vector import has_native
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.errors import EnvError, UseError
from tiltyard.processes.channel import Channel, DropUnsendable, Unsendable
from tiltyard.types import EnvSpec

pytestmark = pytest.mark.slow  # starts and ends processes

BASE = [Path(__file__).parent]
WHERE = "isolated_envs.py:Where"
APART = ("thread", "process")
ROOT = Path(__file__).parents[2]

_specs: dict[str, EnvSpec] = {}


def spec_of(env: Env) -> EnvSpec:
    """Return the spec of the env without isolation and fault, which is equal and faster to get."""
    options = {name: value for name, value in env.options.items() if name not in ("fault", "at", "flag")}
    plain = env.model_copy(update={"isolate": "none", "options": options})
    key = plain.model_dump_json()
    if key not in _specs:
        _specs[key] = spec_from_json(examine(plain, BASE, False))
    return _specs[key]


def group_of(env: Env, copies: int = 3, **more: Any) -> EnvGroup:
    spec = spec_of(env)
    return make_group(GroupConfig(env, spec, copies * len(spec.agents), 5, BASE, **more), native="never")


def actions(group: EnvGroup, index: int) -> np.ndarray:
    return group.codec.random_rows(np.random.default_rng(index), group.rows, group.mask)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------- threads and processes


@pytest.mark.parametrize("isolate", APART)
def test_every_copy_is_made_stepped_and_rendered_in_its_own_thread_or_process(isolate: str) -> None:
    group = group_of(Env(id=WHERE, isolate=isolate, options={"length": 2}), render=True)
    group.reset()
    group.step(np.zeros((3, 1), np.float32))
    picture = group.render_row(0)
    assert picture is not None and (picture == 200).all(), "drawn where it was made"
    ends = group.step(np.zeros((3, 1), np.float32)).episodes
    assert [end.metrics["same"] for end in ends] == [1.0] * 3
    processes, threads = {end.metrics["process"] for end in ends}, {end.metrics["thread"] for end in ends}
    if isolate == "process":
        assert len(processes) == 3 and os.getpid() not in processes
        assert "odd" not in group.infos[0] and group.infos[0]["name"] == "x", "entries that cannot be sent are dropped"
    else:
        assert processes == {os.getpid()} and len(threads) == 3 and threading.get_ident() not in threads
    assert group.fps == 8
    group.close()
    assert isolate == "thread" or not any(alive(int(pid)) for pid in processes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("env-")]


def test_isolated_rows_are_not_stepped_in_one_call() -> None:
    assert has_native(Env(id="CartPole-v1")) and not has_native(Env(id="CartPole-v1", isolate="thread"))


@pytest.mark.parametrize("isolate", APART)
def test_probe_of_an_isolated_env_returns_the_same_spec(isolate: str) -> None:
    name = "visitors" if isolate == "thread" else "CarPass-v0"
    plain, apart = spec_of(Env(id=name)), probe(Env(id=name, isolate=isolate), base=BASE)
    assert replace(apart, env_bytes=0, step_seconds=0.0) == replace(plain, env_bytes=0, step_seconds=0.0)
    assert isolate == "thread" or apart.env_bytes > 1 << 20, "its own process takes memory"


# ---------------------------------------------------------------------------------------------- same results

ALIKE = [
    Env(id="CartPole-v1"),
    Env(id="CartPole-v1", frame_stack=2, frameskip=3, time_limit=9),
    Env(id="CarPass-v0"),
    Env(id="kitchen_sink"),
    Env(id="visitors", frameskip=2),
    Env(id="masked"),
    Env(
        id="identity",
        options={"shows": "image"},
        wrappers=[{"id": "resize_image", "options": {"height": 9, "width": 9}}],
    ),
]


@pytest.mark.parametrize(
    ("env", "isolate"),
    [*((env, "thread") for env in ALIKE), *((env, "process") for env in ALIKE[1:5])],
    ids=lambda value: value if isinstance(value, str) else f"{value.id}-{value.frameskip}",
)
def test_isolation_does_not_change_results_also_after_a_restore(env: Env, isolate: str) -> None:
    plain, apart = group_of(env), group_of(env.model_copy(update={"isolate": isolate}))
    plain.reset()
    apart.reset()
    for index in range(40):
        if index == 25:
            tree = apart.save()
            apart.close()
            apart = group_of(env.model_copy(update={"isolate": isolate}))
            assert apart.load(tree) == []
        action = actions(plain, index)
        one, two = plain.step(action), apart.step(action.copy())
        for name, array in one.obs.items():
            assert np.array_equal(array, two.obs[name]), name
        assert np.array_equal(one.reward, two.reward) and np.array_equal(one.first, two.first)
        assert np.array_equal(one.truncated, two.truncated) and one.episodes == two.episodes
    assert plain.stats.frames_taken > 0
    apart.close()


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("isolate", "fault", "output"),
    [
        ("thread", "raise", "step() raised RuntimeError: the wheel came off"),
        ("process", "raise", "step() raised RuntimeError: the wheel came off"),
        ("thread", "sys.exit", "step() called sys.exit('no licence')"),
        ("process", "sys.exit", "step() called sys.exit('no licence')"),
        ("thread", "interrupt", "step() raised KeyboardInterrupt"),
        ("process", "interrupt", "step() raised KeyboardInterrupt"),
        ("process", "exit", "step() did not return: its process exited with code 3"),
        ("process", "kill", "step() did not return: its process was killed by SIGKILL"),
    ],
)
def test_error_of_an_isolated_env_names_row_episode_and_env_step(isolate: str, fault: str, output: str) -> None:
    env = Env(id=WHERE, isolate=isolate, options={"fault": fault, "at": 4, "length": 9})
    group = group_of(env, first_row=6)
    group.reset()
    for _ in range(3):
        group.step(np.zeros((3, 1), np.float32))
    with pytest.raises(EnvError) as caught:
        group.step(np.zeros((3, 1), np.float32))
    assert f"row 6, episode 0, env step 3: {output}" in caught.value.message
    if fault == "raise":
        assert "isolated_envs.py" in caught.value.details and "server.py" not in caught.value.details
    group.close()


def test_killed_process_is_reported_for_its_row() -> None:
    group = group_of(Env(id=WHERE, isolate="process", options={"length": 1}))
    group.reset()
    ends = group.step(np.zeros((3, 1), np.float32)).episodes
    os.kill(int(ends[1].metrics["process"]), signal.SIGKILL)
    with pytest.raises(EnvError, match=r"row 1, episode 1.*killed by SIGKILL"):
        group.step(np.zeros((3, 1), np.float32))
    group.close()
    assert not any(alive(int(end.metrics["process"])) for end in ends)


def test_env_that_cannot_be_made_or_sent_is_refused_with_the_reason() -> None:
    with pytest.raises(UseError, match="could not be made: it did not return: its process exited with code 4"):
        make_copies(Env(id=WHERE, isolate="process", options={"fault": "make"}), BASE, 2)
    with pytest.raises(UseError, match="problem") as caught:
        make_copies(Env(id=WHERE, isolate="process", options={"lenght": 3}), BASE, 1)
    assert "env.options.lenght" in caught.value.details
    with pytest.raises(UseError, match="a object cannot be sent"):
        probe(Env(id="isolated_envs.py:Strange", isolate="process"), base=BASE)


def test_env_processes_end_if_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from tests.envs.test_isolation import *\n"
        "group = group_of(Env(id=WHERE, isolate='process', options={'length': 1, 'fault': 'hang', 'at': 2}))\n"
        "group.reset()\n"
        "print(*(int(e.metrics['process']) for e in group.step(np.zeros((3, 1), np.float32)).episodes), flush=True)\n"
        "group.step(np.zeros((3, 1), np.float32))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    watched = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    for fd in watched:
        assert select.select([fd], [], [], 30)[0], "the process ends"
        os.close(fd)


# ---------------------------------------------------------------------------------------------- messages on the wire


def through(value: Any) -> Any:
    one, two = socket.socketpair()
    sender, receiver = Channel(one), Channel(two)
    try:
        sending = threading.Thread(target=sender.send, args=(value,))
        sending.start()
        got = receiver.recv()
        sending.join()
        return got
    finally:
        sender.close()
        receiver.close()


def same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            type(two) is np.ndarray and one.dtype == two.dtype and one.shape == two.shape and bool((one == two).all())
        )
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


def some_value(rng: np.random.Generator, depth: int) -> Any:
    kinds = ["<f4", "<f8", "|u1", "|b1", "<i8", "<U3", "<c8"]
    match int(rng.integers(0, 12 if depth else 7)):
        case 0:
            shape = tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist())
            return (rng.random(shape) * 9).astype(kinds[rng.integers(0, 7)])
        case 1:
            return np.float32(rng.random())
        case 2:
            return float(rng.normal()) * 10.0 ** float(rng.integers(-300, 300))
        case 3:
            return int(rng.integers(-(2**62), 2**62)) * 2**9
        case 4:
            return [None, True, "é\n\x00", b"\x00\xff", np.bool_(True), np.int16(-3)][rng.integers(0, 6)]
        case 5:
            return "".join(map(chr, rng.integers(32, 0x2FF, 5)))
        case 6:
            return np.zeros((300, 400, 3), np.uint8)[:: rng.integers(1, 3)]
        case 7 | 8:
            return {(f"k{i}", i)[rng.integers(0, 2)]: some_value(rng, depth - 1) for i in range(rng.integers(0, 4))}
        case 9 | 10:
            return tuple(some_value(rng, depth - 1) for _ in range(rng.integers(0, 4)))
        case _:
            return [some_value(rng, depth - 1) for _ in range(rng.integers(0, 4))]


def test_values_keep_their_types_when_sent() -> None:
    rng = np.random.default_rng(0)
    for _ in range(count(2000)):
        value = some_value(rng, 3)
        assert same(value, through(value))


def test_unsendable_values_are_refused_or_dropped() -> None:
    one, _two = socket.socketpair()
    for value in (object(), {"a": object()}, np.array([object()]), np.zeros(2, [("x", "f4")])):
        with pytest.raises(Unsendable):
            Channel(one).send(value)
    info = {"a": np.arange(3), "b": {"c": [np.arange(4), object()], "d": 2}, "e": object(), "f": np.arange(2)}
    got = through((1, DropUnsendable(info)))[1]
    assert list(got) == ["a", "b", "f"] and got["b"] == {"d": 2} and got["f"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, np.array([2, np.inf, 4], np.float32), dtype=np.float32),
        spaces.Box(0, 255, (4, 5, 3), np.uint8),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([3, 4], start=[1, 0]),
        spaces.MultiBinary(4),
        spaces.MultiBinary([2, 3]),
        spaces.Text(12, min_length=3, charset="abc"),
        spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, ())]))),
    ],
    ids=str,
)
def test_spaces_survive_sending(space: gymnasium.Space[Any]) -> None:
    got = space_from_parts(through(space_parts(space)))
    assert got == space and str(got) == str(space)
