"""Population-based training over runs: replacement, copies, recovery from kills, and reports.

The reward of the env is a setting, so scores are known in advance; weights, optimisers and settings are real.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command
from tests.counts import only_when_long
from tests.sweep import pbt_sweep
from tests.sweep.pbt_sweep import EXPERIMENT, RULES, begun, plan, run_sweep, started, weights
from tests.sweep.test_controller import kill_trials
from tiltyard import api
from tiltyard.algos.schedules import ScheduledValue
from tiltyard.config.yaml import dump_yaml
from tiltyard.errors import TiltyardError
from tiltyard.run import metrics
from tiltyard.run.create import Source, create
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.run.status import write_status
from tiltyard.sweep import preflight
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.pbt import lineage
from tiltyard.sweep.pbt.controller import Population
from tiltyard.sweep.report import summarize
from tiltyard.training import resume


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A finished population of three members; tests must not change it."""
    with _elsewhere(tmp_path_factory.mktemp("three")):
        plan([3.0, 2.0, 1.0])
        return started()


@contextmanager
def _elsewhere(place: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("TILTYARD_RUNS", str(place / "runs"))
        yield


def exploits(sweep: Sweep) -> list[dict[str, Any]]:
    return [line for line in sweep.decisions() if line["kind"] == "exploit"]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_worst_member_becomes_a_copy_of_the_best_with_new_settings_in_effect(three: Sweep) -> None:
    sweep = three
    first = exploits(sweep)[0]
    assert (first["trial"], first["source"]) == (3, 1)
    assert first["score"] == pytest.approx(4.0)
    assert first["source_score"] == pytest.approx(12.0)
    member, source = Run(sweep.place(3)), Run(sweep.place(1))
    assert same(weights(member, first["counts_from"]), weights(source, first["source_env_steps"]))
    assert not same(weights(member), weights(source))

    after = first["after"]
    assert after["algo.lr"] != first["before"]["algo.lr"]
    assert after["algo.lr"] != 0.001, "it is the source's, moved"
    assert 0.001 / 1.5 <= after["algo.lr"] <= 0.001 * 1.5
    second = next((line["attempt"] for line in exploits(sweep)[1:] if line["trial"] == 3), math.inf)
    own = [each for each in metrics.read(member) if first["attempt"] < each["attempt"] <= second]
    assert {each["metrics"]["setting/lr"] for each in own} == {after["algo.lr"]}
    # the window of 100 episodes is cleared, because the source filled it with another level
    assert own[0]["metrics"]["train/return"] == pytest.approx(4 * after["env.options.level"])

    events = [event for event in read_events(member) if event["kind"] == "exploited"]
    assert events[0]["source"] == 1
    assert events[0]["after"] == after
    assert "became a copy of member 1" in events[0]["sentence"]
    assert summarize(sweep).counts == {"finished": 3}
    assert {row.env_steps for row in summarize(sweep).rows} == {256}


@pytest.mark.parametrize(
    ("levels", "metric", "goal", "worst"),
    [
        ([-3.0, -2.0, -1.0], "train/return", "maximise", 1),
        ([-3.0, -2.0, -1.0], "train/return", "minimise", 3),
        ([3.0, 2.0, 1.0], "episode/true_objective", "maximise", 1),  # all negative, and opposite to the rewards
    ],
)
def test_negative_scores_and_true_objectives_rank_correctly(
    levels: list[float], metric: str, goal: str, worst: int, runs: Path
) -> None:
    experiment = {**EXPERIMENT, "stop": {"env_steps": 96}}
    plan(levels, metric=metric, goal=goal, experiment=experiment, population={**RULES, "rate": 0.0})
    sweep = started()
    found = exploits(sweep)
    assert [(line["trial"], line["source"]) for line in found] == [(worst, 4 - worst)]
    assert found[0]["score"] == pytest.approx(-3.0 if "true" in metric else 4 * levels[worst - 1])
    settings = {row.trial.number: row.trial.settings for row in summarize(sweep).rows}
    assert settings[worst] == settings[4 - worst], "rate 0 moves nothing"


def test_pause_does_not_change_the_training(runs: Path) -> None:
    """A scheduled change of settings takes effect without a pause."""
    plan([1.0, 2.0])
    whole, paused, changing = (_run(schedule) for schedule in (None, SettingsSchedule([(0, {})], 100, 1), CHANGES))
    outcome = [api.run_training(run, resume.prepare_resume(run)[1], live=False) for run in (whole, paused, changing)]
    assert [each.exit_code for each in outcome] == [0, 75, 0]
    assert paused.status()["state"] == "stopped"
    assert paused.status()["progress"]["env_steps"] == 112, "the first update beyond 100"
    assert "paused at env step 100" in paused.status()["reason"]
    api.resume(paused, live=False)
    assert paused.status()["progress"]["env_steps"] == 112
    SettingsSchedule([(0, {})], None, 2).write(paused.folder)
    api.resume(paused, live=False)
    assert same(weights(whole), weights(paused))
    assert _curve(whole) == _curve(paused)

    assert not same(weights(whole), weights(changing))
    used = {each["env_steps"]: each["metrics"]["setting/lr"] for each in metrics.read(changing)}
    assert used == {**dict.fromkeys(range(16, 81, 16), 0.01), **dict.fromkeys(range(96, 257, 16), 0.02)}
    assert changing.experiment().algo.lr == 0.02
    with pytest.raises(TiltyardError, match=r"cannot change algo\.lr"):
        resume.prepare_resume(changing, ["algo.lr=0.5"])


CHANGES = SettingsSchedule([(0, {"algo.lr": 0.01}), (80, {"algo.lr": 0.02})])


def _run(schedule: SettingsSchedule | None) -> Run:
    loaded = preflight.load({**EXPERIMENT, "name": "alone"})
    return create(Path("runs"), loaded.experiment, Source(base=loaded.base), schedule=schedule)


def _curve(run: Run) -> list[tuple[int, float]]:
    return [(each["env_steps"], each["metrics"].get("loss/policy", 0.0)) for each in metrics.read(run)]


def test_setting_that_is_not_in_effect_is_an_error_with_both_values(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard against a common bug: restoring a checkpoint also restores its old learning rate unnoticed."""
    plan([1.0, 2.0])
    run = _run(SettingsSchedule(CHANGES.parts[:1], 80))
    api.resume(run, live=False)
    CHANGES.write(run.folder)

    def restore(self: ScheduledValue, tree: Any) -> None:
        self.setting = tree["setting"]

    monkeypatch.setattr(ScheduledValue, "load", restore)
    with pytest.raises(TiltyardError, match=r"algo.lr is 0.02 in the run's settings, but the restored engine has 0.01"):
        api.resume(run, live=False)
    assert "0.02" in run.status()["reason"]

    monkeypatch.setattr("tiltyard.training.loop.check_restored", lambda *_: None)
    with pytest.raises(TiltyardError, match=r"algo.lr is 0.02 in the run's settings, but the first update used 0.01"):
        api.resume(run, live=False)


# ------------------------------------------------------------------------------------------------ kills

KILLED = """
import os, signal, sys
from tests.sweep.pbt_sweep import run_sweep
from tiltyard.run import checkpoint
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.sweep.folder import Sweep

point, before = sys.argv[2], {}

def end_after(owner, name, when=lambda *words, **more: True):
    real = getattr(owner, name)
    def until_then(*words, **more):
        result = real(*words, **more)
        if when(*words, **more):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, until_then)

if point == "pinned":
    end_after(checkpoint, "pin", lambda source, place: place.name.startswith("0002"))
if point == "noted":
    end_after(Sweep, "decide", lambda self, kind, **facts: kind == "period" and facts["trial"] == 2)
if point == "decided":
    end_after(Sweep, "decide", lambda self, kind, **facts: kind == "exploit")
if point == "copied":
    end_after(checkpoint, "copy_into")
if point == "set up":
    end_after(SettingsSchedule, "write", lambda self, folder: self.period == 2 and "0002-" in folder.name)
sys.exit(run_sweep(Sweep(__import__("pathlib").Path(sys.argv[1]))))
"""

POINTS = ("pinned", "noted", "decided", "copied", "set up")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[int, Any]]:
    with _elsewhere(tmp_path_factory.mktemp("undisturbed")):
        _small_plan()
        return _outcome(started())


def _small_plan() -> None:
    experiment = {**EXPERIMENT, "stop": {"env_steps": 160}}
    plan([2.0, 1.0], experiment=experiment, population={**RULES, "replace": 0.5})


def _outcome(sweep: Sweep) -> tuple[list[Any], dict[int, Any]]:
    decisions = [{key: value for key, value in line.items() if key != "time"} for line in sweep.decisions()]
    assert {row.state for row in summarize(sweep).rows} == {"finished"}
    return decisions, {trial.number: weights(sweep.place(trial.number)) for trial in sweep.trials()}


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_at_every_point_of_an_exploit_does_not_change_the_result(
    point: str, runs: Path, undisturbed: Any
) -> None:
    _small_plan()
    sweep = begun()
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(sweep.folder), point],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    assert run_sweep(sweep) == 0
    decisions, found = _outcome(sweep)
    assert decisions == undisturbed[0]
    assert any(line["kind"] == "exploit" for line in decisions)
    for number, each in undisturbed[1].items():
        assert same(found[number], each)
    assert not list(sweep.folder.glob("pinned/.tmp-*")), "what the killed one left is swept away"
    events = [event for event in read_events(Run(sweep.place(2))) if event["kind"] == "exploited"]
    assert len(events) == len({event["period"] for event in events}), "told once each"


@pytest.mark.timeout(3000)
def test_kill_9_of_controllers_and_members_repeats_no_decision(runs: Path) -> None:
    """Each recorded decision is applied once, and all members finish with their decided settings."""
    only_when_long("five minutes")
    rng = random.Random(3)
    plan([4.0, 3.0, 2.0, 1.0], max_parallel=2, retries=1000, back_off=0.0)
    sweep, command = begun(), [sys.executable, "-m", "tiltyard", "sweep", "start"]
    for _ in range(20):
        child = subprocess.Popen([*command, str(sweep.folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(rng.uniform(2.0, 12.0))
        child.kill()
        child.wait()
        if rng.random() < 0.5:
            kill_trials(sweep)
    assert run_locally(sweep) == 0
    assert summarize(sweep).counts == {"finished": 4}
    story = lineage.read(sweep)
    for kind in ("period", "exploit", "stays"):
        lines = [(line["trial"], line["period"]) for line in sweep.decisions() if line["kind"] == kind]
        assert len(lines) == len(set(lines)), kind
    assert story.copies
    for member, periods in story.periods.items():
        assert [each.number for each in periods] == list(range(1, len(periods) + 1))
        run = Run(sweep.place(member))
        last = metrics.read(run)[-1]["metrics"]
        assert last["setting/lr"] == story.settings(member)["algo.lr"] == run.experiment().algo.lr
        events = [event["period"] for event in read_events(run) if event["kind"] == "exploited"]
        assert events == [copy.period for copy in story.copies if copy.member == member]


def run_locally(sweep: Sweep) -> int:
    from tiltyard.sweep import controller
    from tiltyard.sweep.backends.local import Local

    return controller.run_controller(sweep, Local, print)


# ------------------------------------------------------------------------------------------------ slots, processes


def test_population_runs_with_fewer_slots_than_members(tiltyard: Command) -> None:
    """The member with the fewest env steps runs next, and none is replaced before all have a score."""
    plan([3.0, 2.0, 1.0], max_parallel=2, experiment={**EXPERIMENT, "stop": {"env_steps": 96}})
    out = tiltyard("sweep", "start", "plan.yaml")
    assert "3: 3 finished" in out.stdout
    sweep = Sweep(next(Path("runs").absolute().glob("steady/sweep-*")))
    assert sorted(line["trial"] for line in sweep.decisions() if line["kind"] == "period") == [1, 2, 3]
    assert [(line["trial"], line["source"]) for line in exploits(sweep)] == [(3, 1)]
    assert sorted(line["attempt"] for line in map(Run.status, map(Run, map(sweep.place, (1, 2, 3))))) == [2, 2, 2]

    shown = tiltyard("sweep", "status").stdout
    assert shown == out.stdout
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()[:1].isdigit()}
    assert "1 at " in rows["3"]
    lines = tiltyard("sweep", "lineage").stdout.splitlines()
    assert len(lines) == len(exploits(sweep))
    assert lines[0].startswith("Member 3 became a copy of member 1 (12 against 4) at env step 64")
    printed = json.loads(tiltyard("sweep", "lineage", "--json", "--member", "3").stdout)
    assert [each["from"] for each in printed["schedules"]["3"]][:2] == [0, 64]
    assert "is a population" in tiltyard("sweep", "extend", "--trials", "1", expect=2).stderr
    best = json.loads(tiltyard("sweep", "best", "--json").stdout)
    ahead = max(summarize(sweep).rows, key=lambda row: row.value or 0.0)
    assert (best["best"]["trial"], best["settings"]) == (ahead.trial.number, ahead.trial.settings)
    assert best["values"] == [ahead.value], "members are no seeds of one point"
    pictures = tiltyard("sweep", "plot").stdout.split()
    assert [Path(each).name for each in pictures] == ["curves.png", "lineage.png"]
    assert "no member 9" in tiltyard("sweep", "lineage", "--member", "9", expect=2).stderr


def test_failed_member_can_be_retried_while_the_others_continue(runs: Path) -> None:
    plan([3.0, 2.0, 1.0], retries=0, experiment={**EXPERIMENT, "stop": {"env_steps": 96}})
    sweep = begun()
    bad = sweep.folder / "plugins" / "steady.py"
    text = bad.read_text()
    bad.write_text(text.replace("self.steps += 1", "self.steps += 1\n        assert self.level != 2.0"))
    assert run_sweep(sweep) == 1
    assert summarize(sweep).counts == {"finished": 2, "failed": 1}
    assert [line["trial"] for line in exploits(sweep)] == [3]
    (sweep.place(2) / "plugins" / "steady.py").write_text(text)
    sweep.decide("retry", trial=2)
    assert run_sweep(sweep) == 0
    assert summarize(sweep).counts == {"finished": 3}


@pytest.mark.parametrize("failures", [1, 2])
def test_member_without_retries_left_is_not_ranked(failures: int, runs: Path) -> None:
    """It would stay the only candidate for replacement forever. With a retry left, it still counts as the worst."""
    sweep = _after_one_period({1: 500.0, 2: 450.0, 3: 5.0, 4: 1.0}, replace=0.25)
    for attempt in range(1, failures + 1):
        sweep.decide("failed", trial=4, attempt=attempt, reason="the loss is not a number")
    write_status(Run(sweep.place(4)), state="failed")
    Population(sweep, sweep.plan()).set_up(1, [1, 2, 3])
    assert [(line["trial"], line["source"]) for line in exploits(sweep)] == ([(3, 1)] if failures > 1 else [])


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("state", ["running", "queued"])
def test_population_does_not_wait_for_a_member_that_failed_in_its_first_period(
    state: str, failures: int, runs: Path
) -> None:
    """A killed process leaves its last state in the status file, and the state of an unstarted job is `queued`."""
    sweep = _after_one_period({1: 12.0, 2: None, 3: 4.0}, replace=0.5)
    for attempt in range(1, failures + 1):
        sweep.decide("failed", trial=2, attempt=attempt, reason="signal 9")
    write_status(Run(sweep.place(2)), state=state)
    Population(sweep, sweep.plan()).set_up(1, [1, 3])
    assert [(line["trial"], line["source"]) for line in exploits(sweep)] == ([(3, 1)] if failures > 1 else [])


def _after_one_period(scores: dict[int, float | None], **rules: Any) -> Sweep:
    """Create a population from recorded scores without training; a member without a score is in its first period."""
    plan([float(number) for number in scores], retries=1, population={**RULES, **rules})
    sweep = begun()
    for trial in sweep.trials():
        preflight.make_trial(sweep, sweep.plan(), trial)
        if (score := scores[trial.number]) is not None:
            sweep.decide("period", trial=trial.number, period=1, env_steps=64, score=score)
    return sweep


def test_pb2_proposes_settings_from_the_gains_of_periods(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiltyard.algos import pb2

    asked, real = [], pb2.propose

    def spy(tunables: Any, gains: Any, others: Any, *more: Any) -> Any:
        made = real(tunables, gains, others, *more)
        asked.append((list(gains), list(others), made))
        return made

    monkeypatch.setattr(pb2, "propose", spy)
    space = {"env.options.level": {"range": [-10.0, 10.0]}}
    points = [{"env.options.level": level} for level in (9.0, 5.0, 1.0)]
    experiment = {**EXPERIMENT, "stop": {"env_steps": 64 * 5}}
    plan([9.0, 5.0, 1.0], space=space, points=points, experiment=experiment, population={**RULES, "explore": "pb2"})
    sweep = started()
    made = exploits(sweep)
    assert len(made) == len(asked) >= 2
    gains, others, chosen = asked[-1]
    assert len(gains) >= 4, "enough to learn from"
    assert len(others) == 2
    assert made[-1]["after"] == chosen
    assert -10 <= chosen["env.options.level"] <= 10
    scores = {(line["trial"], line["period"]): line for line in sweep.decisions() if line["kind"] == "period"}
    untouched = [each for each in gains if each.settings == {"env.options.level": 9.0}]
    assert untouched
    assert all(each.gain == pytest.approx(0.0) for each in untouched), "the level of member 1 never changed"
    assert len(scores) > len(gains), "the first period of each has nothing to be compared with"


def test_each_number_of_a_reward_mapping_is_varied(runs: Path) -> None:
    experiment = {**EXPERIMENT, "env": {"id": "steady.py:Steady", "options": {"rewards": {"hit": 4.0, "walk": -0.5}}}}
    space = {"env.options.rewards": {"weights": True}}
    rules = {**RULES, "relative_gap": 0.0}
    plan([1.0, 2.0], space=space, points=[], experiment=experiment, metric="episode/shaped", population=rules)
    sweep = started()
    trials = sweep.trials()
    assert trials[0].settings == {"env.options.rewards.hit": 4.0, "env.options.rewards.walk": -0.5}
    second = trials[1].settings
    assert all(
        1.09 < max(abs(second[key] / value), abs(value / second[key])) < 1.51
        for key, value in trials[0].settings.items()
    )
    found = exploits(sweep)[0]
    options = Run(sweep.place(found["trial"])).experiment().env.options
    assert options["rewards"] == {
        name: summarize(sweep).rows[found["trial"] - 1].trial.settings[f"env.options.rewards.{name}"]
        for name in ("hit", "walk")
    }
    assert options["rewards"] != {"hit": 4.0, "walk": -0.5}


# ------------------------------------------------------------------------------------------------ repeat a member


def test_schedule_of_a_member_is_repeated_bit_for_bit_despite_a_kill(three: Sweep, tiltyard: Command) -> None:
    sweep, name = three, str(three.folder)
    story = lineage.read(sweep)
    member = story.copies[-1].member
    schedule = story.schedule(member)
    assert len(schedule) > 1
    assert len({settings["seed"] for _, settings in schedule}) > 1, "its ancestors drew numbers of their own"
    assert len(tiltyard("sweep", "replay", name, "--member", str(member), "--dry-run").stdout.splitlines()) == 1 + len(
        schedule
    )

    run = lineage.make(sweep, member, ["tiltyard"])
    child = subprocess.Popen(
        [sys.executable, "-m", "tiltyard", "resume", str(run.folder), "--here", "--plain"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 200
    while not list(run.checkpoints.glob("0*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL, "it was over before it could be killed"
    api.resume(run, live=False)
    assert run.status()["state"] == "finished"
    assert same(weights(run), weights(sweep.place(member)))
    alone = [run.experiment().algo.lr, run.experiment().seed, run.experiment().env.options]
    last = Run(sweep.place(member)).experiment()
    assert alone == [last.algo.lr, last.seed, last.env.options]


def test_replay_command_repeats_the_best_member(tiltyard: Command) -> None:
    plan([2.0, 1.0], experiment={**EXPERIMENT, "stop": {"env_steps": 96}}, population={**RULES, "replace": 0.5})
    sweep = started()
    out = tiltyard("sweep", "replay")
    best = summarize(sweep).groups[0].rows[0].trial.number
    assert f"repeats the schedule of member {best}" in out.stderr
    alone = Run(next(Path("runs").absolute().glob("steady/0*")))
    assert same(weights(alone), weights(sweep.place(best)))


# ------------------------------------------------------------------------------------------------ curves


@pytest.mark.parametrize("ahead", [64, -64])
def test_env_steps_of_a_copy_continue_from_its_source(ahead: int, runs: Path) -> None:
    """A source with more env steps moves the member forward; one with fewer discards the records after that step."""
    plan([2.0, 1.0], population={**RULES, "period": 128, "start": 128, "replace": 0.5})
    sweep = begun()
    for number, until in ((1, 128 + max(0, ahead)), (2, 128 + max(0, -ahead))):
        folder = preflight.make_trial(sweep, sweep.plan(), sweep.trials()[number - 1])
        SettingsSchedule([(0, sweep.trials()[number - 1].settings)], until, 1).write(folder)
        pbt_sweep.train(folder)
    assert run_sweep(sweep) == 0
    found = exploits(sweep)[0]
    assert (found["trial"], found["counts_from"] - found["env_steps"]) == (2, ahead)
    steps = [each["env_steps"] for each in metrics.read(sweep.place(2))]
    kept = range(16, min(found["env_steps"], found["counts_from"]) + 1, 16)
    assert steps == [*kept, *range(found["counts_from"] + 16, 257, 16)]
    report = summarize(sweep)
    assert [row.env_steps for row in report.rows] == [256, 256]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("more", "output"),
    [
        ({"space": {"model.hidden": [[8], [16]]}, "points": []}, "cannot change during a run"),
        ({"space": {"algo.gamma": {"range": [0.5, 1.0]}}, "points": []}, "must stay below 1"),
        ({"space": {"algo.lr": {"range": [0.1, 0.5], "step": 0.1}}, "points": []}, "multiplies numbers by factors"),
        ({"space": {"env.options.rewards": {"weights": True}}, "points": []}, "no numbers there"),
        ({"population": {}}, "first decision would be at env step 20,000,000"),
        ({"metric": "eval/return"}, "needs evaluations"),
        ({"seeds": 2}, "one seed for a population"),
        ({"trials": 1, "points": []}, "at least 2 for a population"),
        ({"points": [{"algo.lr": 0.1}] * 2}, "env.options.level is in the space but not in every point"),
        ({"stop": {"rule": "asha", "after": 10}}, "cannot be combined with search = population"),
        ({"search": "random", "points": []}, "set search: population"),
        ({"experiment": {**EXPERIMENT, "eval": {"every": 100}}, "metric": "eval/return"}, "eval.every = 100"),
    ],
)
def test_invalid_populations_are_refused(more: Any, output: str, tiltyard: Command) -> None:
    plan([1.0, 2.0], **more)
    assert output in tiltyard("sweep", "start", "plan.yaml", expect=2).stderr
    assert not Path("runs").exists()


def test_hint_lists_the_settings_that_rllib_can_vary(runs: Path) -> None:
    from tiltyard.config.load import load
    from tiltyard.sweep.pbt.members import _movable

    Path("steady.py").write_text(pbt_sweep.ENV)
    experiment = load({**EXPERIMENT, "engine": {"kind": "rllib", "envs": 2}}).experiment
    assert _movable("algo.lr", experiment) is None
    assert _movable("env.options.level", experiment) is None
    problem = _movable("algo.gamma", experiment)
    assert problem is not None
    assert "lr, clip, entropy and kl" in problem.hint


@pytest.mark.timeout(900)
def test_members_can_train_with_rllib(tiltyard: Command) -> None:
    """Each period starts its own Ray; the copy continues with the weights of its source and its own learning rate."""
    pytest.importorskip("ray.rllib", reason="Ray RLlib is not installed: pip install 'tiltyard[ray]'")
    only_when_long("two minutes")
    engine = {"kind": "rllib", "envs": 2, "runners": 0}
    experiment = {**EXPERIMENT, "engine": engine, "stop": {"env_steps": 96}}
    plan([2.0, 1.0], max_parallel=1, experiment=experiment, population={**RULES, "replace": 0.5})
    assert "2: 2 finished" in tiltyard("sweep", "start", "plan.yaml").stdout
    sweep = Sweep(next(Path("runs").absolute().glob("steady/sweep-*")))
    (only,) = exploits(sweep)
    assert (only["trial"], only["source"]) == (2, 1)
    copied = weights(sweep.place(2), only["counts_from"]), weights(sweep.place(1), only["source_env_steps"])
    assert same(*copied)
    used = metrics.curve(sweep.place(2), "setting/lr").last
    assert used == pytest.approx(only["after"]["algo.lr"], rel=1e-6)


def test_member_that_never_began_its_period_is_due_again(runs: Path) -> None:
    """The controller may have been killed, or the queue refused the job. A member that a user stopped is not due."""
    plan([2.0, 1.0])
    sweep = begun()
    whole = sweep.plan()
    folder = preflight.make_trial(sweep, whole, sweep.trials()[0])
    members = Population(sweep, whole)
    members.set_up(1, [1])
    pbt_sweep.train(folder)
    assert members.record_periods([1]) == {1}
    members.set_up(1, [1])
    assert members.record_periods([1]) == {1}
    write_status(Run(folder), reason="job 7 was cancelled")
    assert members.record_periods([1]) == set()


def test_lineage_and_replay_require_a_population(tiltyard: Command) -> None:
    Path("plan.yaml").write_text(dump_yaml({"name": "toy", "program": ["python", "-c", "1"], "space": {"x": [1]}}))
    tiltyard("sweep", "start", "plan.yaml", "--dry-run")
    tiltyard("sweep", "start", "plan.yaml", expect=0)
    assert "is not a population" in tiltyard("sweep", "lineage", expect=2).stderr
    assert "is not a population" in tiltyard("sweep", "replay", expect=2).stderr
