"""A storm of damages: `python -m tests.faults.storm FOLDER FIRST COUNT` writes a line about each to FOLDER/report.jsonl.

Four places are trained once: a run, a sweep, a population, and a folder of recorded episodes. For each damage a place is
copied, one file of it is damaged, and a process forked from this one, which has everything imported, types the commands.
What they print is compared with what they print for the same place without damage.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.damage import KINDS, unsealed
from tests.sweep import pbt_sweep
from tiltyard.cli import main
from tiltyard.config.sections import Env
from tiltyard.config.yaml import dump_yaml
from tiltyard.data.folder import read_episodes
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError
from tiltyard.evaluation import evaluate
from tiltyard.run import checkpoint
from tiltyard.run.folder import find
from tiltyard.run.status import run_folders
from tiltyard.training import preflight

HANG_SECONDS = 300
REPORT = "report.jsonl"
UNTRUE = ("seconds", "updated", "heartbeat", "host", "pid", "bound", "time", "files", "message")  # differ by chance
NAMES = ("run", "sweep", "population", "episodes")
ENV = pbt_sweep.ENV.replace("0.0 * action", "0.25 * float(action)")  # returns depend on the policy
EXPERIMENT = {
    **pbt_sweep.EXPERIMENT,
    "stop": {"env_steps": 48},
    "eval": {"every": 0, "at_end": True, "episodes": 2},
    "save": {"env_steps": 16, "last": 3, "best": 1},
}


# ------------------------------------------------------------------------------------------------ places


def build(folder: Path) -> None:
    """Train the four places, each in a runs folder of its own with a run beside it."""
    folder.mkdir()
    (folder / "steady.py").write_text(ENV)
    use_one_spec(folder)
    os.chdir(folder)
    Path("beside.yaml").write_text(dump_yaml({**EXPERIMENT, "name": "beside", "stop": {"env_steps": 16}}))
    Path("run.yaml").write_text(dump_yaml({**EXPERIMENT, "name": "struck", "notes": "one of many", "tags": ["a", "b"]}))
    grid = {"experiment": EXPERIMENT, "space": {"algo.lr": [0.001, 0.002]}, "metric": "eval/return", "name": "struck"}
    for name in NAMES:
        os.environ["TILTYARD_RUNS"] = str(folder / name / "runs")
        type_words("train", "beside.yaml", "--plain")
        if name in ("run", "episodes"):
            type_words("train", "run.yaml", "--plain")
        elif name == "sweep":
            Path("plan.yaml").write_text(dump_yaml(grid))
            pbt_sweep.started()
        else:
            pbt_sweep.ENV = ENV  # only in the storm's own process
            pbt_sweep.plan(
                [5.0, 1.0, 3.0], name="struck", experiment={**pbt_sweep.EXPERIMENT, "stop": {"env_steps": 192}}
            )
            pbt_sweep.started()
        if name == "episodes":
            type_words("eval", "struck", "--episodes", "3", "--save-rollouts", str(folder / name / "data"))


def use_one_spec(folder: Path) -> None:
    """Probe the env of all places once: each probe starts a process."""
    spec = probe(Env(id="steady.py:Steady"), base=[folder])
    preflight.probe = evaluate.probe = pbt_sweep.probe = lambda env, **more: spec


def files(place: str, folder: Path) -> list[Path]:
    """The files of a place that may be damaged: all that are not empty."""
    where = folder / "data" if place == "episodes" else folder / "runs" / "struck"
    return sorted(path.relative_to(folder) for path in where.rglob("*") if path.is_file() and path.stat().st_size)


def commands(place: str, folder: Path, struck: Path | None) -> Iterator[tuple[str, ...]]:
    """The command lines to type. What a file of one trial is damaged in is also evaluated and resumed."""
    runs = [each for each in run_folders(folder / "runs") if "struck" in each.parts]
    chosen = next((each for each in runs if struck is not None and each in (folder / struck).parents), runs[0])
    run = str(chosen.relative_to(folder / "runs"))
    yield "ls", "--json"
    yield "completion", "bash", "--words", "tiltyard show "
    yield "show", "last" if place == "run" else run, "--json"
    yield "show", run
    if place in ("sweep", "population"):
        sweep = str(chosen.parent.relative_to(folder / "runs"))
        yield "sweep", "status", sweep, "--json"
        yield "sweep", "start", sweep, "--dry-run"
    record = ("--save-rollouts", "data") if place == "episodes" else ()
    yield "eval", run, "--episodes", "2", "--json", "--out", "results", *record
    if place != "episodes":
        steps = 208 if place == "population" else 64
        yield "resume", run, f"stop.env_steps={steps}", "--json", "--plain"


# ------------------------------------------------------------------------------------------------ commands


def type_words(*words: str) -> int:
    """Run a command in this process."""
    try:
        main(list(words))
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("main() returned")


def observe(place: str, folder: Path, struck: Path | None) -> dict[str, Any]:
    """Type all commands in a forked process; what each did, and whether the process hung."""
    answer = folder / "answer.json"
    child = os.fork()
    if not child:
        try:
            found = _type_all(place, folder, struck)
        except BaseException:  # noqa: BLE001 - reported by the parent
            found = {"crash": traceback.format_exc()}
        answer.write_text(json.dumps(found))
        os._exit(0)
    until = time.monotonic() + HANG_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.005)
    typed = folder / "typed"
    return json.loads(answer.read_text()) if answer.exists() else {"ended while typing": typed.read_text()}


def _type_all(place: str, folder: Path, struck: Path | None) -> dict[str, Any]:
    os.chdir(folder)
    os.environ["TILTYARD_RUNS"] = str(folder / "runs")
    found: dict[str, Any] = {}
    for words in commands(place, folder, struck):
        Path("typed").write_text(" ".join(words))
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        code = type_words(*words)
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (Path(name).read_text(errors="replace").replace(str(folder), "HERE") for name in ("out", "err"))
        found[" ".join(words[:2] if words[0] in ("sweep", "show") else words[:1])] = [code, _true(out), err]
        if words[0] == "resume" and code == 0:
            found["weights"] = _weights(folder, words[1])
    if place == "episodes":
        found["episodes"] = _episodes(folder / "data")
    return found


def _true(text: str) -> Any:
    """What a command printed, without what differs from one time to the next."""
    try:
        return _kept(json.loads(text))
    except ValueError:
        return text


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        prefixes = ("time/", "speed/", "eval/seconds")
        return {key: _kept(each) for key, each in value.items() if key not in UNTRUE and not key.startswith(prefixes)}
    return [_kept(each) for each in value] if isinstance(value, list) else value


def _weights(folder: Path, name: str) -> str:
    """A digest of the policy after training."""
    run = find(name, folder / "runs")
    assert '"rewind_to": 0,' not in run.metrics_file.read_text(errors="replace"), "it started over"
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    return hashlib.sha256((newest.folder / "policies" / "main.safetensors").read_bytes()).hexdigest()


def _episodes(folder: Path) -> list[Any]:
    try:
        return [0, [[each.seed, float(each.reward.sum())] for each in read_episodes(folder)][:3], ""]
    except TiltyardError as error:
        return [1, [], error.message]


# ------------------------------------------------------------------------------------------------ judging


def judge(struck: Path, sealed: bool, sound: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What must not be: a crash, a hang, an internal error, or another result without a message that names the file."""
    wrong = [f"{what}: {found[what]}" for what in found if what in ("crash", "ended while typing")]
    for what, (code, out, err) in ((what, each) for what, each in found.items() if isinstance(each, list)):
        text = f"{json.dumps(out)} {err}"
        named = struck.name in text or any(f"checkpoint{part}" in text for part in _checkpoints(struck))
        # A plug-in that is damaged may raise: its own traceback, after the line that it was changed.
        own = "plugins" in struck.parts and f"{struck.name} was changed after" in err and "the traceback is the " in err
        if "internal error" in text or ("Traceback" in text and not own) or code not in (0, 1, 2, 75):
            wrong.append(f"{what}: exit code {code}: {text[-1000:]}")
        elif sealed and [code, out] != sound[what][:2] and not named:
            wrong.append(
                f"{what}: exit code {code}, a different result: {text[-600:]} instead of {str(sound[what])[-600:]}"
            )
    if "ls" in found and _others(found["ls"][1], struck) != _others(sound["ls"][1], struck):
        wrong.append(f"ls: other runs are listed differently: {found['ls']}")
    if sealed and found.get("weights", sound.get("weights")) != sound.get("weights"):
        said = f"{found['resume']}"
        if struck.name not in said and not any(f"checkpoint{part}" in said for part in _checkpoints(struck)):
            wrong.append(f"resume: other weights, and no message names the file: {said[-600:]}")
    return wrong


def _checkpoints(struck: Path) -> list[str]:
    """How a message names the checkpoint of a damaged file."""
    step = next((part for part in struck.parts if re.fullmatch(r"\d{12}", part)), "")
    return [f"s/{step}", f" {step}"] if step else []


def _others(rows: Any, struck: Path) -> Any:
    return [row for row in rows if not struck.is_relative_to(Path("runs") / row["id"])]


def strike(number: int, home: Path, sound: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One damage, by its number, and what it did."""
    rng, place = random.Random(number), NAMES[number % len(NAMES)]
    kinds: dict[str, list[Path]] = {}
    for path in files(place, home / place):  # files of one kind count as one: else most damages would hit checkpoints
        kinds.setdefault(re.sub(r"\d+", "", path.name), []).append(path)
    struck = rng.choice(kinds[rng.choice(sorted(kinds))])
    kind, folder = KINDS[number // len(NAMES) % len(KINDS)], home / f"storm-{number}"
    shutil.copytree(home / place, folder)
    how = kind(folder / struck, rng)
    try:
        key = f"{place} {next((part for part in struck.parts if re.match(r'[0-9]{4}-', part)), '')}"
        if key not in sound:
            shutil.copytree(home / place, folder / "sound")
            sound[key] = observe(place, folder / "sound", struck)
            shutil.rmtree(folder / "sound")
        wrong = judge(struck, kind is not unsealed, sound[key], observe(place, folder, struck))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"number": number, "file": str(struck), "kind": kind.__name__, "how": how, "wrong": wrong}


if __name__ == "__main__":
    home, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    use_one_spec(home) if home.exists() else build(home)
    undamaged: dict[str, dict[str, Any]] = {}
    with (home / REPORT).open("a") as report:
        for each in range(first, first + count):
            report.write(json.dumps(strike(each, home, undamaged)) + "\n")
            report.flush()
