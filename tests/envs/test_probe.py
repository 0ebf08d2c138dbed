"""Probing: the spec of valid envs, and errors for invalid ones, also if the child crashes or hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiltyard.config.sections import Env
from tiltyard.envs.probe import examine, probe
from tiltyard.errors import ConfigError, UseError
from tiltyard.testing import check_env

BASE = [Path(__file__).parent]
BAD = "bad_envs.py:BadEnv"


def test_spec_of_cartpole() -> None:
    spec = probe(Env(id="CartPole-v1"), base=BASE, previous=True)
    assert {name: array.shape for name, array in spec.obs.items()} == {
        "obs": (4,),
        "previous.action": (1,),
        "previous.reward": (1,),
    }
    assert spec.action.parts[0].options == 2 and spec.episode_limit == 500
    assert spec.restore_mode == "rerun" and spec.renders and not spec.masked and not spec.notes


def test_spec_of_car_pass() -> None:
    spec = probe(Env(id="CarPass-v0", time_limit=11, frameskip=2), base=BASE)
    assert spec.restore_mode == "state" and spec.renders and spec.episode_limit == 11 and spec.frameskip == 2


@pytest.mark.parametrize(
    ("fault", "output"),
    [
        ("float64", "step 3: observation 'obs' has dtype float64 but its space declares float32"),
        ("list", "is a list instead of a numpy array"),
        ("nan", "observation 'obs' holds NaN"),
        ("inf", "observation 'obs' holds infinity"),
        ("shape", "has shape [3] but its space declares [2]"),
        ("reward_nan", "the reward is nan"),
        ("reward_array", "instead of a number"),
        ("old_reset", "reset() returned one ndarray instead of (obs, info)"),
        ("old_step", "step() returned a tuple of 4 instead of"),
        ("flag", "terminated = 'no' of type str instead of a bool"),
        ("sequence_space", "Sequence"),
        ("raise", "step() number 3 raised RuntimeError: the wheel came off"),
    ],
)
def test_contract_violation_is_named(fault: str, output: str) -> None:
    with pytest.raises(UseError) as caught:
        examine(Env(id=BAD, options={"fault": fault}), BASE, False)
    assert output in caught.value.message and caught.value.hint and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fault", "output"),
    [
        ("segv", "was killed by SIGSEGV"),
        ("exit", "exited with code 3"),
        ("raise", "step() number 3 raised RuntimeError: the wheel came off"),
        ("sys.exit", "step() number 3 called sys.exit('no licence')"),
        ("interrupt", "step() number 3 raised KeyboardInterrupt"),
        ("generator", "step() number 3 raised GeneratorExit"),
        ("constructor interrupt", "raised KeyboardInterrupt while it was probed"),
    ],
)
def test_crashed_child_is_reported(fault: str, output: str) -> None:
    with pytest.raises(UseError) as caught:
        probe(Env(id=BAD, options={"fault": fault}), base=BASE)
    assert output in caught.value.message
    if fault not in ("segv", "exit"):
        assert "bad_envs.py" in caught.value.details and "tiltyard/envs" not in caught.value.details


def test_hung_child_is_ended_at_the_start_timeout() -> None:
    with pytest.raises(UseError, match=r"within 2 s \(env.start_timeout\)"):
        probe(Env(id=BAD, options={"fault": "hang"}, start_timeout=2.0), base=BASE)


def test_wrong_options_are_reported_as_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        probe(Env(id=BAD, options={"falt": "x"}), base=BASE)
    assert caught.value.problems[0].setting == "env.options.falt" and "fault" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("fault", "output"), [("prints", "reset() prints to stdout"), ("prints from C", "step() prints to stdout")]
)
def test_printing_to_stdout_is_refused(fault: str, output: str) -> None:
    with pytest.raises(UseError) as caught:
        probe(Env(id=BAD, options={"fault": fault}), base=BASE)
    assert output in caught.value.message and "'hello from" in caught.value.message
    assert "env.strict=false" in caught.value.hint


@pytest.mark.parametrize(
    "env",
    [Env(id=BAD, options={"fault": "prints"}, strict=False), Env(id=BAD, options={"fault": "greets"})],
    ids=["without strict", "when made"],
)
def test_allowed_printing_is_noted_and_kept_out_of_stdout(env: Env, capfd: pytest.CaptureFixture[str]) -> None:
    (note,) = probe(env, base=BASE).notes
    assert "prints to stdout, which is for data: 'hello from" in note
    assert capfd.readouterr().out == ""


def test_without_strict_a_conversion_is_noted() -> None:
    spec = probe(Env(id=BAD, options={"fault": "list", "at": 0}, strict=False), base=BASE)
    assert spec.obs["obs"].dtype == "float32"
    (note,) = spec.notes
    assert "is a list" in note and "converted because env.strict is off" in note


def test_error_while_importing_a_plugin_has_only_the_plugins_traceback(tmp_path: Path) -> None:
    (tmp_path / "maze.py").write_text("def deep():\n    raise ImportError('no maze engine')\n\ndeep()\n")
    with pytest.raises(UseError) as caught:
        probe(Env(id="maze.py"), base=[tmp_path])
    assert "no maze engine" in caught.value.message
    assert "in deep" in caught.value.details and "importlib" not in caught.value.details


def test_child_does_not_import_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from tiltyard.config.sections import Env; "
        "from tiltyard.envs.probe import examine; examine(Env(id='kitchen_sink'), [Path('.')], True); "
        "import tiltyard.envs.vector; print([m for m in ('torch', 'ray', 'pyarrow', 'pygame') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["CartPole-v1", "CarPass-v0", "kitchen_sink", "Taxi-v3", "Blackjack-v1"])
def test_valid_envs_pass_the_contract_check(name: str) -> None:
    spec = check_env(name, base=BASE, steps=60)
    assert spec.restore_mode in ("state", "rerun")


def test_contract_check_finds_what_the_probe_cannot() -> None:
    with pytest.raises(Exception, match=r"differs between copies|did not come back"):
        check_env("bad_envs.py:Unrepeatable", base=BASE, steps=60)
