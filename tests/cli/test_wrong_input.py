"""Wrong input: one sentence, a hint, exit code 2, no traceback of Tiltyard, and nothing is created."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Command
from tiltyard import api
from tiltyard.config.cross_checks import RLLIB_SETTINGS
from tiltyard.config.load import load
from tiltyard.config.reference import describe
from tiltyard.errors import UseError
from tiltyard.run import atomic
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

TINY = [
    "engine.envs=2",
    "algo.rollout=16",
    "algo.minibatch=32",
    "algo.epochs=1",
    "stop.env_steps=64",
    "eval.at_end=false",
    "track.tensorboard=false",
]
STRANGER = 12345
TESTS = Path(__file__).parents[1]
BAD_ENV = f"{TESTS / 'envs' / 'bad_envs.py'}:BadEnv"

Refused = Callable[..., str]


def everything_below(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock-guard"  # names its last holder
    }


@pytest.fixture
def refused(tiltyard: Command, runs: Path) -> Refused:
    """Run a command that must be refused, and return its stderr. It must not change a byte of the runs folder."""

    def call(*words: str, own_traceback: bool = False) -> str:
        before = everything_below(runs)
        output = tiltyard(*words, expect=2)
        assert output.stdout == ""
        assert output.stderr.startswith("error: ") and "hint: " in output.stderr, output.stderr
        assert own_traceback or "Traceback" not in output.stderr
        shown = output.stderr.replace(str(runs), "").replace(str(TESTS), "")  # folders may have any name
        assert "tiltyard/" not in shown, output.stderr
        assert "internal error" not in output.stderr
        assert everything_below(runs) == before
        return output.stderr

    return call


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs folder, trained once for all tests: run `cart` of CartPole, and run `own` with plug-ins."""
    root = tmp_path_factory.mktemp("trained")
    (root / "parts.py").write_text(PARTS)
    (root / "nets.py").write_text(NETS)  # a separate file, so that the probe of the env does not import torch
    parts = ["env.wrappers=[parts.py:Tripled]", "model.encoder=nets.py:Sum"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILTYARD_RUNS", str(root / "runs"))
        patch.chdir(root)
        api.train("CartPole-v1", ["name=cart", *TINY])
        api.train("parts.py:Corridor", ["name=own", *parts, *TINY])
    return root / "runs"


@pytest.fixture
def trained(trained_once: Path, runs: Path) -> Path:
    """A fresh copy of the trained runs as the runs folder of one test."""
    shutil.copytree(trained_once, runs)
    return runs


PARTS = """
import gymnasium, numpy as np
class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.full(3, self.t, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.full(3, self.t, np.float32), 1.0, self.t == 4, False, {}
class Tripled(gymnasium.Wrapper):
    pass
"""
NETS = """
import torch
class Sum(torch.nn.Module):
    size = 1
    def __init__(self, spec):
        super().__init__()
    def forward(self, x):
        return x.sum(-1, keepdim=True)
"""


# ---------------------------------------------------------------------------------------------- arguments and settings


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("trian CartPole-v1", "unknown command 'trian'"),
        ("train", "tiltyard train needs FILE|ENV"),
        ("train CartPole-v1 --sed 3", "did you mean '--seeds'?"),
        ("train CartPole-v1 lr", "'lr' is not an override"),
        ("train algo.lr=3", "expected a YAML file or an env id, got the setting"),
        ("train CartPole-v1 algo.lrr=1", "did you mean 'algo.lr'?"),
        ("train CartPole-v1 algo.lr=fast", "must be a number or a schedule"),
        ("train CartPole-v1 engine.envs=2.5", "must be a whole number"),
        ("train CartPole-v1 algo.minibatch=999999", "is more than the batch of 1024"),
        ("train CartPole-v1 model.memory.kind=lstm algo.rollout=100", "must be a multiple of model.memory.bptt = 16"),
        ("train CartPole-v1 stop.env_steps=null", "or the run never ends"),
        ("train CartPole-v1 algo.id=a3c", "a2c"),
        ("train CartPole-v1 framework=tf", "PyTorch"),
        ("train CartPole-v1 --seeds 4-0", "ascending order"),
        ("train CartPole-v1 --expect good", "METRIC>=NUMBER"),
        ("train CartPole-v1 --on cluster", "there is no profile 'cluster'"),
        ("train CartPole-v1 resume=nowhere", "there is no run 'nowhere'"),
        ("train CartPole-v1 model.id=nets/none.py", "there is no file nets/none.py"),
        ("train CartPole-v1 seed=-1", "seed = -1: must be at least 0"),
        ("train CartPole-v1 engine.envs=0", "engine.envs = 0: must be at least 1"),
        ("train CartPole-v1 algo.lr=1e30", "algo.lr = 1e+30: must be at most"),
        ("eval last", "there is no run in"),
        ("eval nothing --episodes 0", "'0' must be a whole number"),
        ("eval nothing --episodes 1e12", "'1e12' must be a whole number from 1 to 1,000,000"),
        ("eval nothing --workers -2", "'-2' must be a whole number"),
        ("eval nothing --greedy --sample", "not allowed with argument --greedy"),
        ("fork nothing --at then", "must be a number of env steps or `best`"),
        ("resume nothing", "there is no run 'nothing'"),
        ("show nothing", "there is no run 'nothing'"),
        ("show one two", "unexpected argument 'two'"),
        ("stop nothing", "there is no run 'nothing'"),
        ("rm", "tiltyard rm needs RUN"),
        ("ls --state good", "unknown state of a run"),
        ("config shwo", "did you mean 'show'?"),
    ],
)
def test_wrong_arguments_and_settings_are_refused(refused: Refused, runs: Path, words: str, output: str) -> None:
    assert output in refused(*words.split())
    assert not runs.exists()


def test_unknown_envs_and_options_suggest_similar_names(refused: Refused) -> None:
    assert "did you mean 'CartPole-v1'?" in refused("train", "CartPol-v1")
    output = refused("train", "CartPole-v1", "env.options.sutton_barto=true")
    assert "env.options.sutton_barto = true: CartPoleEnv has no option" in output and "sutton_barto_reward" in output


@pytest.mark.parametrize("name", ["a/b", "../up", "..", "a\nb", "x" * 81, "-dash", ".hidden", "a b", "''", "a\0b"])
def test_run_names_that_are_not_folder_names_are_refused(refused: Refused, tmp_path: Path, name: str) -> None:
    output = refused("train", "CartPole-v1", f"name={name}")
    assert "1 problem" in output or "override" in output
    assert "\n" not in name or f"name = {name!r}: must be 1 to 80" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == []


BOMB = "".join(
    f"{letter}: &{letter} [{', '.join([f'*{before}' if before else 'x'] * 10)}]\n"
    for before, letter in zip(["", *"abcdefgh"], "abcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("raw", "output"),
    [
        (b"", "is empty"),
        (b"# nothing but words\n", "is empty"),
        (b"\x7fELF\x00\x01\x02" * 40, "is a binary file"),
        ("env: Café\n".encode("latin-1"), "byte 0xe9 is not UTF-8"),
        (BOMB.encode(), "more than 100,000 values after expanding aliases"),
        (b"env: CartPole-v1\nseed: 1\nseed: 2\n", "line 3: duplicate key 'seed', first in line 2"),
        (b"env: CartPole-v1\nalgo: {lr: [\n", "line"),
        (b"- env\n- algo\n", "but has a list"),
        (b"env: !!python/object/apply:os.system [id]\n", "!!python"),
    ],
)
def test_files_without_a_valid_experiment_are_refused(
    refused: Refused, tmp_path: Path, raw: bytes, output: str
) -> None:
    (tmp_path / "x.yaml").write_bytes(raw)
    assert output in refused("train", "x.yaml")


def test_folders_missing_files_and_pipes_are_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml is a folder" in refused("train", "folder.yaml")
    assert "is a folder" in refused("train", str(tmp_path))
    (tmp_path / "maze").mkdir()
    assert "maze is a folder, and there is no env of that name" in refused("train", "maze")
    assert "none.yaml does not exist" in refused("train", "none.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "pipe.yaml" in refused("train", "pipe.yaml")  # must not wait for a writer


# ---------------------------------------------------------------------------------------------- numbers


def numeric_settings() -> list[tuple[str, str, list[str]]]:
    """(name, type in the reference, other settings it needs) of every setting that is or contains a number."""
    found = []
    for name, kind, _, _ in describe():
        if "number" not in kind:
            continue
        plain, _, variant = name.partition(" (")
        variant = variant.rstrip(")").partition(" or ")[0]
        around = [f"algo.id={variant.removeprefix('id: ')}"] if variant.startswith("id:") else []
        if around == ["algo.id=your own"]:
            around = [f"algo.id={Path(__file__).parents[2] / 'examples' / 'reinforce.py'}:Reinforce"]
        if around == ["algo.id=clone"]:
            around.append("algo.dataset=poles")
        if plain.startswith("<schedule>"):
            shape = variant.removeprefix("kind: ")
            whole = {
                "linear": "{kind: linear, start: 0.001}",
                "piecewise": "{kind: piecewise, points: [[0, 0.001]]}",
                "kl_adaptive": "{kind: kl_adaptive, start: 0.001}",
            }[shape]
            around = [f"algo.lr={whole}"]
            plain = plain.replace("<schedule>", "algo.lr")
        if plain.removeprefix("engine.") in RLLIB_SETTINGS:
            around = ["engine.kind=rllib"]
        if plain.startswith("population."):
            around = ["policies={a: {}, b: {}}", "population.space={algo.lr: {log: [1e-5, 1e-2]}}"]
        found.append((plain, kind, around))
    return found


def within(value: float, kind: str) -> bool:
    """Whether the type in the reference allows the number."""
    low = re.search(r"from (-?[\d.,]+)", kind)
    above = re.search(r"above (-?[\d.,]+)", kind)
    high = re.search(r" to ([\d.,]+)", kind)
    number = lambda match: float(match[1].replace(",", ""))  # noqa: E731
    return (
        (low is None or value >= number(low))
        and (above is None or value > number(above))
        and value <= (number(high) if high else 1e15)
    )


@pytest.mark.parametrize(("name", "kind", "around"), numeric_settings())
def test_numbers_outside_of_their_range_are_refused(name: str, kind: str, around: list[str]) -> None:
    """Try negative, zero, huge, non-finite and non-numeric values of every numeric setting."""
    for text in ("-1", "0", "1e30", "-1e30", "9" * 400, ".nan", ".inf", "-.inf", "many", "true", "[]", "{}"):
        shape = {"list of list": f"[[0, {text}]]", "list of": f"[{text}]"}
        given = next((shape[front] for front in shape if kind.startswith(front)), text)
        allowed = text in ("-1", "0") and within(float(text), kind)
        words = [*around, f"{name}={given}"]
        if allowed:
            load("CartPole-v1", words)
            continue
        with pytest.raises(UseError) as caught:
            load("CartPole-v1", words)
        assert name in caught.value.details, f"{words}: {caught.value.details}"


def test_numeric_settings_are_complete() -> None:
    names = {name for name, _, _ in numeric_settings()}
    assert {"seed", "algo.lr", "algo.lr.over", "engine.envs", "eval.every", "save.milestones", "model.hidden"} <= names
    assert len(numeric_settings()) > 55


def test_settings_that_need_too_much_memory_are_refused_with_the_numbers(refused: Refused, runs: Path) -> None:
    output = refused("train", "CartPole-v1", "engine.envs=100000", "algo.rollout=1e6")
    assert re.search(r"engine.envs = 100,000 x algo.rollout = 1,000,000 needs about [\d.]+ GiB", output)
    assert re.search(r"but only [\d.]+ GiB are free", output)
    alone = float(re.search(r"needs about ([\d.]+) GiB", output)[1])
    output = refused("train", "CartPole-v1", "engine.envs=100000", "algo.rollout=1e6", "engine.mode=async")
    shared = float(re.search(r"needs about ([\d.]+) GiB", output)[1])
    assert shared / alone == pytest.approx(5 / 3, rel=0.01)  # two slots in addition to the memory of the learner
    output = refused("train", "CartPole-v1", f"model.hidden={[16384] * 64}")
    assert re.search(r"a model of 3\d(,\d{3}){3} parameters needs about [\d.]+ GiB for training, but", output)
    assert not runs.exists()


# ---------------------------------------------------------------------------------------------- envs and plug-ins


@pytest.mark.parametrize(
    ("fault", "output"),
    [
        ("float64", "dtype float64 but its space declares float32"),
        ("list", "is a list instead of a numpy array of float32"),
        ("nan", "holds NaN"),
        ("shape", "has shape [3] but its space declares [2]"),
    ],
)
def test_envs_that_violate_their_spaces_are_refused(refused: Refused, runs: Path, fault: str, output: str) -> None:
    words = refused("train", BAD_ENV, f"env.options.fault={fault}")
    assert output in words and "step 3" in words
    assert not runs.exists()


def test_env_that_prints_is_refused_or_redirected_to_stderr(tiltyard: Command, refused: Refused, runs: Path) -> None:
    settings = [*TINY, "env.options.fault=prints", "env.time_limit=8"]
    assert "reset() prints to stdout, which is for data: 'hello from the" in refused("train", BAD_ENV, *settings)
    assert not runs.exists()
    done = tiltyard("train", BAD_ENV, *settings, "env.strict=false", "--json")
    assert json.loads(done.stdout)["state"] == "finished"
    assert "prints to stdout, which is for data: 'hello from the simulator' goes to stderr" in done.stderr
    assert done.stderr.count("hello from the simulator") > 2


@pytest.mark.parametrize("place", ["model.id={}", "model.encoder={}", "env.wrappers=[{}]", "env.id={}"])
def test_traceback_of_a_plug_in_has_only_its_own_frames(
    refused: Refused, runs: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "broken.py").write_text("import os\n\ndef early():\n    return 1 / 0\n\nearly()\n")
    output = refused("train", "CartPole-v1", place.format("broken.py:Any"), own_traceback=True)
    assert output.startswith("error: broken.py raised ZeroDivisionError while imported: division by zero")
    assert 'broken.py", line 4, in early' in output and output.count("File ") == 2
    assert not runs.exists()


# ---------------------------------------------------------------------------------------------- run folders


def test_eval_and_fork_require_a_checkpoint(refused: Refused, trained: Path) -> None:
    run = find("cart", trained)
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    for verb in ("eval", "fork"):
        assert f"run {run.id} has no checkpoint" in refused(verb, "cart")


def test_checkpoint_of_another_env_or_model_is_refused_with_both_shapes(refused: Refused, trained: Path) -> None:
    run = find("cart", trained)
    newest = next(run.checkpoints.glob("0*"))
    for words in (
        ["train", "Acrobot-v1", f"resume={newest}", *TINY],
        ["train", "Acrobot-v1", "resume=cart", *TINY],
        ["fork", "cart", "env.id=Acrobot-v1"],
    ):
        output = refused(*words)
        assert "the weights belong to another model or env" in output and "(64, 4) there, (64, 6) here" in output
    assert "(64, 4) there, (32, 4) here" in refused("fork", "cart", "model.hidden=[32]")
    output = refused("eval", "cart", "env.id=Acrobot-v1", "--out", "elsewhere")
    assert "(4,)" in output and "(6,)" in output
    assert "eval cannot change model" in refused("eval", "cart", "model.hidden=[3]", "--out", "elsewhere")
    assert "cannot change env" in refused("resume", "cart", "env.id=Acrobot-v1")


def test_incomplete_runs_and_runs_of_a_newer_tiltyard_are_refused(refused: Refused, trained: Path) -> None:
    run = find("cart", trained)
    kept = {name: (run.folder / name).read_text() for name in ("status.json", "experiment.yaml")}
    (run.folder / "experiment.json").unlink()
    for name, text in kept.items():
        (run.folder / name).unlink()
        for verb in ("resume", "eval", "fork", "show"):
            assert f"is not a complete run: {name} is missing" in refused(verb, "cart/0001")
        (run.folder / name).write_text(text)
    atomic.write_sealed(run.folder / "status.json", {**json.loads(kept["status.json"]), "schema": 99})
    for verb in ("resume", "eval", "fork", "show"):
        assert "newer Tiltyard (schema 99, this one reads up to 1)" in refused(verb, "cart/0001")
    (run.folder / "status.json").write_text(kept["status.json"])
    run.experiment_file.write_text(kept["experiment.yaml"].replace("version: 1", "version: 99"))
    for verb in ("resume", "eval", "fork"):
        assert "newer Tiltyard" in refused(verb, "cart")
    run.experiment_file.write_text(kept["experiment.yaml"])
    manifest = next(run.checkpoints.glob("0*/manifest.json"))
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema": 99}))
    assert "written by a newer Tiltyard (schema 99" in refused("eval", str(manifest.parent), "--out", "elsewhere")


HOLDER = """
import sys, time
from pathlib import Path
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
with Lock(Run(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder() -> Iterator[Callable[[Run], subprocess.Popen[str]]]:
    """Start a process that holds the lock of a run."""
    started = []

    def hold(run: Run) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.folder)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_run_locked_by_a_live_process_is_refused_and_by_a_dead_one_recovered(
    refused: Refused, tiltyard: Command, trained: Path, holder: Callable[[Run], subprocess.Popen[str]]
) -> None:
    run = find("cart", trained)
    process = holder(run)
    named = f"is being written by pid {process.pid} on host {socket.gethostname()}"
    assert named in refused("resume", "cart")
    assert named in refused("resume", "cart", "stop.env_steps=96")
    assert named in refused("rm", "cart", "--yes")
    process.kill()
    process.wait()
    tiltyard("resume", "cart", "stop.env_steps=96")
    assert run.status()["progress"]["env_steps"] == 96
    assert any(event["kind"] == "recovered" for event in read_events(run))


def test_read_only_run_folder_is_reported(refused: Refused, trained: Path, tmp_path: Path) -> None:
    place = tmp_path / "shut"
    shutil.copytree(trained, place)
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", place, place], capture_output=True, text=True)
    if mounted.returncode == 0:
        subprocess.run(["mount", "-o", "remount,ro,bind", place], capture_output=True, check=False)
    try:
        try:
            (place / "probe").touch()
        except OSError:
            pass
        else:
            pytest.skip(f"no folder can be made read-only for this user here: {mounted.stderr.strip()}")
        run = find("cart", place)
        words = ["resume", str(run.folder)], ["resume", str(run.folder), "stop.env_steps=96"], ["eval", str(run.folder)]
        for each in words:
            output = refused(*each)
            assert "cannot be written" in output and "Read-only file system" in output
        os.environ["TILTYARD_RUNS"] = str(place)  # the fixture `runs` restores it
        assert "cannot be written: Read-only file system" in refused("train", "CartPole-v1", "name=new", *TINY)
        assert "Read-only file system" in refused("rm", "cart", "--yes")
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", place], check=True)


def test_rm_stays_inside_its_root_and_never_follows_symlinks(refused: Refused, trained: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "cart"
    elsewhere.mkdir(parents=True)
    outside = elsewhere / "0001-far-away"
    shutil.copytree(find("cart", trained).folder, outside)
    before = everything_below(outside)
    assert "is not a run folder inside the runs folder" in refused("rm", str(outside), "--yes")
    (trained / "cart" / "0002-linked-run").symlink_to(outside)
    (trained / "linked").symlink_to(elsewhere)
    for name in ("cart/0002-linked-run", "linked/0001-far-away", str(trained / "linked" / "0001-far-away")):
        assert "not removed through links" in refused("rm", name, "--yes")
    for name in (str(trained), str(trained / "cart"), "/", "..", str(tmp_path)):
        refused("rm", name, "--yes") if name != str(trained / "cart") else None
    assert "cannot ask without a terminal" in refused("rm", "cart")
    assert everything_below(outside) == before


# ---------------------------------------------------------------------------------------------- code of another user


def give_away(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files to another user")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER)


def poison(run: Run, mark: Path) -> None:
    """Make every plug-in of the run create the file `mark` when imported."""
    (run.folder / "provenance.json").unlink()  # it has their checksums
    for path in run.folder.glob("plugins/**/*.py"):
        path.write_text(path.read_text() + f"\nopen({str(mark)!r}, 'w').close()\n")


EVAL = ["--episodes", "1", "--out", "out"]


def test_code_of_another_user_runs_only_with_trust_code(
    refused: Refused, tiltyard: Command, trained: Path, tmp_path: Path
) -> None:
    run, mark = find("own", trained), tmp_path / "mark"
    poison(run, mark)
    give_away(run.folder)
    for words in (["eval", "own", *EVAL], ["resume", "own"], ["resume", "own", "stop.env_steps=96"], ["fork", "own"]):
        output = refused(*words)
        assert "belongs to another user" in output and "--trust-code" in output
    for words in (["show", "own"], ["ls"], ["diff", "own", "cart"]):
        tiltyard(*words)
    assert not mark.exists()
    tiltyard("eval", "own", *EVAL, "--trust-code")
    assert mark.exists()
    tiltyard("fork", "own", "name=mine", "stop.env_steps=96", "--trust-code")
    tiltyard("resume", "mine", "stop.env_steps=128")  # its copy of the code belongs to this user
    tiltyard("resume", "own", "stop.env_steps=96", "--trust-code")


@pytest.mark.parametrize("setting", ["env.id", "env.wrappers", "model.encoder"])
def test_each_kind_of_plug_in_requires_trust_code(
    refused: Refused, trained: Path, tmp_path: Path, setting: str
) -> None:
    """One plug-in is enough to refuse the run, even if all other parts are built in."""
    run, mark = find("own" if setting == "env.id" else "cart", trained), tmp_path / "mark"
    (run.folder / "plugins").mkdir(exist_ok=True)
    (run.folder / "plugins" / "one.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    text = run.experiment_file.read_text()
    old, new = {
        "env.id": ("id: plugins/parts.py:Corridor", "id: plugins/one.py:Corridor"),
        "env.wrappers": ("wrappers: []", "wrappers: [{id: plugins/one.py:Any}]"),
        "model.encoder": ("id: auto", "id: plugins/one.py:Any"),
    }[setting]
    assert old in text
    (run.folder / "experiment.json").unlink(missing_ok=True)
    run.experiment_file.write_text(text.replace(old, new, 1))
    give_away(run.folder)
    for words in (["eval", run.id, *EVAL], ["resume", run.id], ["fork", run.id]):
        assert "belongs to another user" in refused(*words)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["subprocess:Popen", "antigravity:Sky-v0"])
def test_names_of_installed_modules_also_require_trust_code(refused: Refused, trained: Path, name: str) -> None:
    run = find("cart", trained)
    (run.folder / "experiment.json").unlink(missing_ok=True)
    run.experiment_file.write_text(run.experiment_file.read_text().replace("id: CartPole-v1", f"id: {name}", 1))
    give_away(run.folder)
    for words in (["eval", "cart", *EVAL], ["fork", "cart"]):
        output = refused(*words)
        assert f"env.id = {name}" in output and "belongs to another user" in output
    assert "belongs to another user" in refused("resume", "cart")


def test_run_of_another_user_without_code_needs_no_trust_code(tiltyard: Command, trained: Path) -> None:
    give_away(find("cart", trained).folder)
    tiltyard("eval", "cart", *EVAL)
    tiltyard("fork", "cart", "name=mine", "stop.env_steps=96")
