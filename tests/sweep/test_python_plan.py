"""Sweep plans in Python: parameter grids, their plans, and programs that get parameters as flags."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.conftest import Command
from tiltyard.config.yaml import dump_yaml
from tiltyard.errors import UseError
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.sweep.folder import find_sweep, sweeps
from tiltyard.sweep.python_plan import Experiment, ParamGrid, ParamList, RunDescription, load_description, seeds
from tiltyard.sweep.report import summarize

PARAMS = ParamGrid(
    [("seed", seeds(2)), ("algo.lr", [1e-3, 1e-4]), (("algo.rollout", "algo.minibatch"), ([8, 16], [16, 32]))]
)


def test_grids_and_lists_generate_their_combinations() -> None:
    found = list(PARAMS.generate_params())
    assert len(found) == 8
    assert found[0] == {"seed": 0, "algo.lr": 1e-3, "algo.rollout": 8, "algo.minibatch": 16}
    assert found[1] == {"seed": 0, "algo.lr": 1e-3, "algo.rollout": 16, "algo.minibatch": 32}
    mixed = list(PARAMS.generate_params(randomize=True))
    assert mixed != found
    assert sorted(map(str, mixed)) == sorted(map(str, found))
    assert list(ParamList([{"a": 1}, {"b": 2}]).generate_params()) == [{"a": 1}, {"b": 2}]
    with pytest.raises(UseError, match="does not have 2 values"):
        list(ParamGrid([(("a", "b"), [[1]])]).generate_params())
    with pytest.raises(UseError, match="no value for 'x'"):  # rather than combinations without x
        list(ParamGrid([("y", [1, 2]), ("x", [])]).generate_params())


def test_trainings_become_plans_with_seeds() -> None:
    made = RunDescription(
        "study",
        [Experiment("one run", "tiltyard train cartpole.yaml stop.env_steps=1e4", PARAMS, {"A": "b c"})],
        settings={"max_parallel": 3},
    )
    [plan] = made.plans()
    assert plan["name"] == "study-one-run"
    assert plan["experiment"] == "cartpole.yaml"
    assert plan["seeds"] == [0, 1]
    assert plan["environment"] == {"A": "b c"}
    assert plan["max_parallel"] == 3
    assert len(plan["points"]) == 4
    assert plan["points"][0] == {"stop.env_steps": 1e4, "algo.lr": 1e-3, "algo.rollout": 8, "algo.minibatch": 16}
    uneven = ParamList([{"x": 1, "seed": 0}, {"x": 2, "seed": 1}])
    with pytest.raises(UseError, match="the combinations have different seeds"):
        RunDescription("s", [Experiment("e", "tiltyard train x.yaml", uneven)]).plans()
    with pytest.raises(UseError, match="a sweep cannot run the command"):
        RunDescription("s", [Experiment("e", "tiltyard train x.yaml --on there")]).plans()


def test_variables_of_an_experiment_are_merged_with_the_common_ones() -> None:
    made = RunDescription(
        "s",
        [Experiment("e", "python x.py", env_vars={"A": "own", "B": "b"})],
        settings={"environment": {"A": "a", "C": "c"}},
    )
    assert made.plans()[0]["environment"] == {"A": "own", "B": "b", "C": "c"}


def test_command_with_an_open_quote_is_reported_as_a_user_error(tiltyard: Command) -> None:
    Path("study.py").write_text(
        "from tiltyard.sweep.python_plan import Experiment, RunDescription\n"
        "RUN_DESCRIPTION = RunDescription('s', [Experiment('e', 'python \"x.py')])\n"
    )
    printed = tiltyard("sweep", "start", "study.py", expect=2).stderr
    assert (
        "cannot parse the command" in printed and "No closing quotation" in printed and "internal error" not in printed
    )


DESCRIPTION = """
from names import NAMES
from tiltyard.sweep.python_plan import Experiment, ParamGrid, ParamList, RunDescription

RUN_DESCRIPTION = RunDescription(
    "study",
    [
        Experiment(NAMES[0], "python say.py --fixed 'a b'", ParamGrid([("lr", [0.1, 0.2]), ("layers", [[1, 2]])])),
        Experiment(NAMES[1], "python say.py", ParamList([{"on": True, "text": "it's $HOME"}]), {"TOLD": "x;y"}),
    ],
    experiment_arg_name="--experiment",
    experiment_dir_arg_name="--train_dir",
    settings={"max_parallel": 2},
)
"""
SAY = """
import json, os, sys
open("said", "a").write(json.dumps([sys.argv[1:], os.environ.get("TOLD")]) + "\\n")
"""


@pytest.mark.parametrize("word", ["study.py", "study"])
def test_any_program_gets_its_parameters_as_flags(word: str, tiltyard: Command, runs: Path) -> None:
    Path("study.py").write_text(DESCRIPTION)
    Path("names.py").write_text("NAMES = ['first', 'second']")
    Path("say.py").write_text(SAY)
    tiltyard("sweep", "start", word, "--dry-run")
    assert not runs.exists()
    tiltyard("sweep", "start", word)
    assert [sweep.id for sweep in sweeps(runs)] == ["study-first/sweep-0001", "study-second/sweep-0001"]
    output = [json.loads(line) for line in Path("said").read_text().splitlines()]
    first, second = find_sweep("study-first"), find_sweep("study-second")
    assert sorted(argv for argv, _ in output[:2]) == [
        [
            "--fixed",
            "a b",
            f"--lr={lr}",
            "--layers",
            "1",
            "2",
            f"--experiment={first.place(number).name}",
            f"--train_dir={first.folder}",
        ]
        for number, lr in ((1, 0.1), (2, 0.2))
    ]
    assert output[2][0][:2] == ["--on=True", "--text=it's $HOME"]
    assert output[2][1] == "x;y"
    assert second.trials()[0].settings == {"on": True, "text": "it's $HOME"}


def test_seeds_of_a_program_become_seeds_of_the_plan(tiltyard: Command, runs: Path) -> None:
    """Combinations are then compared across seeds, and more seeds can be added."""
    grid = ParamGrid([("seed", seeds(2)), ("lr", [0.1, 0.2])])
    (plan,) = RunDescription("study", [Experiment("toy", "python say.py", grid)]).plans()
    assert (plan["points"], plan["seeds"]) == ([{"lr": 0.1}, {"lr": 0.2}], [0, 1])
    alone = ParamList([{"seed": 5, "lr": 0.1}, {"seed": 6, "lr": 0.2}])  # nothing to compare over
    (plan,) = RunDescription("study", [Experiment("toy", "python say.py", alone)]).plans()
    assert plan["points"][0] == {"seed": 5, "lr": 0.1} and "seeds" not in plan
    Path("say.py").write_text(SAY)
    Path("plan.yaml").write_text(dump_yaml(plan))
    tiltyard("sweep", "start", "plan.yaml")
    assert "so --seeds would set it twice" in tiltyard("sweep", "extend", "--seeds", "1", expect=2).stderr


def test_description_may_define_dataclasses(tiltyard: Command, runs: Path) -> None:
    Path("study.py").write_text(
        "from __future__ import annotations\n"
        "import sys\n"
        "from dataclasses import dataclass\n"
        "from tiltyard.sweep.python_plan import Experiment, ParamList, RunDescription\n"
        "sys.path.insert(0, 'elsewhere')\n"
        "@dataclass\n"
        "class Size:\n"
        "    wide: int\n"
        "points = ParamList([{'wide': Size(3).wide}])\n"
        "RUN_DESCRIPTION = RunDescription('study', [Experiment('toy', 'python say.py', points)])\n"
    )
    Path("say.py").write_text(SAY)
    tiltyard("sweep", "start", "study.py")
    assert "--wide=3" in Path("said").read_text()


def test_missing_descriptions_are_reported(tiltyard: Command) -> None:
    Path("empty.py").write_text("")
    assert "has no RUN_DESCRIPTION" in tiltyard("sweep", "start", "empty.py", expect=2).stderr
    assert "no such file: nowhere.py" in tiltyard("sweep", "start", "nowhere.py", expect=2).stderr
    assert "no sweep" in tiltyard("sweep", "start", "nowhere", expect=2).stderr
    with pytest.raises(UseError):
        load_description("empty.py")


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("import nothing_here", "study.py raised ModuleNotFoundError: No module named 'nothing_here'"),
        ("this is = no Python", "study.py raised SyntaxError"),
        (
            "from tiltyard.sweep.python_plan import *\nRunDescription('s', [], odd=1)",
            "unexpected keyword argument 'odd'",
        ),
    ],
)
def test_error_in_a_description_is_reported_as_a_user_error(text: str, output: str, tiltyard: Command) -> None:
    Path("study.py").write_text(text)
    printed = tiltyard("sweep", "start", "study.py", expect=2).stderr
    assert output in printed and "internal error" not in printed
    assert 'study.py", line' in printed, "where it is wrong"


SCORES = """
import json, os, sys
x = float(sys.argv[1].partition("=")[2])
with open(os.environ["TILTYARD_TRIAL"] + "/metrics.jsonl", "a") as file:
    file.write(json.dumps({"env_steps": 70, "metrics": {"score": 2 * x}}) + "\\n")
print("x was", x, flush=True)
"""
SEVERAL = """
from tiltyard.sweep.python_plan import Experiment, ParamGrid, RunDescription
grid = ParamGrid([("x", [1, 2])])
RUN_DESCRIPTION = RunDescription(
    "s", [Experiment(name, "python scores.py", grid) for name in ("a", "b")], settings={"metric": "scor"}
)
"""


def test_several_detached_sweeps_run_one_after_another(tiltyard: Command, runs: Path) -> None:
    Path("scores.py").write_text(SCORES)
    Path("study.py").write_text(SEVERAL)
    output = tiltyard("sweep", "start", "study.py", "--detach")
    assert output.stdout.split() == ["s-a/sweep-0001", "s-b/sweep-0001"]
    assert len(set(re.findall(r"in the background \(pid (\d+), one after another", output.stderr))) == 1
    until = time.monotonic() + 120
    while not (summarize(find_sweep("s-b")).state == "finished" and not find_sweep("s-b").controlled):
        assert time.monotonic() < until
        time.sleep(0.1)
    ends = [read_events(run)[-1]["time"] for run in map(Run, find_sweep("s-a").trial_folders())]
    starts = [read_events(run)[0]["time"] for run in map(Run, find_sweep("s-b").trial_folders())]
    assert max(ends) <= min(starts)


def test_trial_of_a_program_is_shown_like_a_run(tiltyard: Command, runs: Path) -> None:
    Path("scores.py").write_text(SCORES)
    Path("study.py").write_text(SEVERAL)
    output = tiltyard("sweep", "start", "study.py").stdout
    assert "none of the 2 trials that are over recorded scor; did you mean 'score'?" in output
    assert "did you mean 'score'?" in tiltyard("sweep", "best", "s-a", expect=2).stderr
    shown = tiltyard("show", "s-a/sweep-0001/2").stdout
    for line in (
        "program   python scores.py --x=2",
        "state     finished: exit code 0",
        "progress  70 env steps",
        "score     4",
    ):
        assert line in shown
    assert json.loads(tiltyard("show", "s-a/sweep-0001/2", "--json").stdout)["metrics"] == {"score": 4.0}
    assert "started" in tiltyard("show", "s-a/sweep-0001/2", "--events").stdout
    assert tiltyard("logs", "s-a/sweep-0001/1").stdout == "x was 1.0\n"
    assert "is a trial of another program" in tiltyard("eval", "s-a/sweep-0001/1", expect=2).stderr
    Path("study.py").write_text(SEVERAL.replace('"scor"', '"score"'))
    tiltyard("sweep", "start", "study.py")
    best = tiltyard("sweep", "best", "s-a")
    assert "x=2" in best.stdout and f"tiltyard show s-a/sweep-0002/{find_sweep('s-a').place(2).name}" in best.stdout


def test_deleted_program_is_named_in_the_reason(tiltyard: Command, runs: Path) -> None:
    """Trials are created while the sweep runs: the program or its folder may be deleted by then."""
    program = Path("mine.sh")
    program.write_text("#!/bin/sh\nrm mine.sh\n")
    program.chmod(0o755)
    Path("plan.yaml").write_text(dump_yaml({"name": "gone", "program": ["./mine.sh"], "seeds": 2, "retries": 0}))
    tiltyard("sweep", "start", "plan.yaml", expect=1)
    reasons = [row.reason for row in summarize(find_sweep("gone")).rows]
    assert reasons == [
        "exit code 0",
        "exit code 127: ./mine.sh could not be started: ./mine.sh: No such file or directory",
    ]


def test_copied_sweep_works_and_is_deleted_as_a_whole(tiltyard: Command, runs: Path) -> None:
    Path("scores.py").write_text(SCORES)
    Path("study.py").write_text(SEVERAL)
    tiltyard("sweep", "start", "study.py")
    shutil.copytree(runs / "s-a", runs / "copied")
    assert "trials   2: 2 finished" in tiltyard("sweep", "status", "copied").stdout
    assert "would continue 0 trials of copied/sweep-0001" in tiltyard("sweep", "start", "copied", "--dry-run").stderr
    assert "a trial of a sweep" in tiltyard("rm", "copied", "--yes", expect=2).stderr
    assert "tiltyard sweep stop copied/sweep-0001" in tiltyard("stop", "copied/sweep-0001", expect=2).stderr
    output = tiltyard("rm", "copied/sweep-0001", "--yes").stderr
    assert output.count("deleted ") == 3 and "deleted sweep copied/sweep-0001" in output
    assert not (runs / "copied").exists() and find_sweep("s-a").trial_folders()
