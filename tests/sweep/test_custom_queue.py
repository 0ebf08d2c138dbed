"""Sweeps through a custom queue: a small `ngc` on PATH that runs submitted commands in the background."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.sweep.pbt_sweep import EXPERIMENT, plan
from tests.sweep.talker import PROGRAM, most_at_once, output, write_plan
from tiltyard.config.site import load_site
from tiltyard.config.yaml import dump_yaml, parse_yaml
from tiltyard.errors import ConfigError
from tiltyard.processes import proc
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.sweep.backends.custom_queue import words
from tiltyard.sweep.folder import Sweep, find_sweep
from tiltyard.sweep.report import summarize

# Jobs are processes; a file per job has its pid and the options of its submission.
NGC = """#!PYTHON
import json, os, pathlib, subprocess, sys, time
place = pathlib.Path(PLACE)
def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
words = sys.argv[1:]
if (place / "down").exists():
    sys.exit("the queue is down")
if words[:2] == ["batch", "run"]:
    given = dict(zip(words[2::2], words[3::2]))
    number = 1000 + len(list(place.glob("job-*")))
    child = subprocess.Popen(["bash", "-c", given["--commandline"]], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/")
    (place / f"job-{number}").write_text(json.dumps({"pid": child.pid, **given}))
    print(json.dumps({"id": number, "jobStatus": {"status": "QUEUED"}}, indent=2))
elif words[:2] == ["batch", "info"] and not (place / f"job-{words[2]}").exists():
    sys.exit(f"unknown job {words[2]}")
elif words[:2] == ["batch", "info"]:
    told = json.loads((place / f"job-{words[2]}").read_text())
    print(json.dumps({"status": "RUNNING" if alive(told["pid"]) else "FINISHED_SUCCESS"}))
elif words[:2] == ["batch", "kill"]:
    os.killpg(json.loads((place / f"job-{words[2]}").read_text())["pid"], 9)
"""
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sweeps.md"


def documented() -> dict[str, Any]:
    """The profile shown in the guide."""
    text = next(block for block in GUIDE.read_text().split("```yaml\n") if block.startswith("profiles:\n  ngc:"))
    profile: dict[str, Any] = parse_yaml(text.partition("```")[0], "the guide")["profiles"]["ngc"]
    return profile


def write_site(profile: dict[str, Any]) -> None:
    Path("tiltyard.yaml").write_text(dump_yaml({"profiles": {"ngc": profile}}))


@pytest.fixture
def queue(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the queue and return the folder of its jobs."""
    tools, place = tmp_path / "bin", tmp_path / "queue"
    tools.mkdir()
    place.mkdir()
    tool = tools / "ngc"
    tool.write_text(NGC.replace("PYTHON", sys.executable).replace("PLACE", repr(str(place))))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("TILTYARD_HEARTBEAT", "1")
    write_site(documented())
    yield place
    for job in place.glob("job-*"):
        try:
            os.killpg(atomic.read_json(job)["pid"], signal.SIGKILL)
        except OSError:
            continue


def wait_until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)


def gone(queue: Path, job: int) -> bool:
    """Whether the process of a job is gone, which includes its tick."""
    return proc.read(atomic.read_json(queue / f"job-{job}")["pid"]) is None


def over(sweep: Sweep) -> bool:
    return summarize(sweep).state in ("finished", "failed")


def test_jobs_respect_pause_between(tiltyard: Command, queue: Path) -> None:
    write_plan(space={"x": [1, 2, 3]}, max_parallel=3, pause_between=3.0)
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    wait_until(lambda: over(find_sweep("toy")))
    began = sorted(line["time"] for line in output("began"))
    assert len(began) == 3 and began[2] - began[0] > 2, "six seconds, and what starting a program takes more or less"


def test_sweep_runs_through_the_commands_of_a_queue(tiltyard: Command, queue: Path) -> None:
    odd = 'it\'s "$(touch never)"; $HOME\na b'
    write_site({**documented(), "environment": {"ODD_TOKEN": odd}})
    write_plan(
        space={"x": [1, 2, 3, 4], "text": [odd], "sleep": [0.2]}, max_parallel=2, bad="3", environment={"ODD": odd}
    )
    shown = tiltyard("sweep", "start", "plan.yaml", "--on", "ngc", "--dry-run").stdout
    assert shown.startswith("# submitted with: ngc batch run --name toy.sweep-NNNN.0001-")
    assert list(queue.iterdir()) == [] and subprocess.run(["bash", "-n"], input=shown, text=True).returncode == 0

    Path("wait").touch()
    out = tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("toy")
    wait_until(lambda: len(output("began")) == 2)
    Path("wait").unlink()
    assert "Trial 1 was submitted as job 1000." in out.stderr and "Trial 3" not in out.stderr
    wait_until(lambda: over(sweep))  # every job submits the next one: there is no controller
    assert summarize(sweep).counts == {"finished": 3, "failed": 1}
    assert most_at_once() == 2 and len(output("began")) == 4
    assert {(line["odd"], line["hidden"], line["given"]["text"]) for line in output("began")} == {(odd, odd, odd)}
    asked = atomic.read_json(queue / "job-1000")
    assert asked["--name"] == f"toy.sweep-0001.{sweep.place(1).name}"
    assert asked["--instance"] == "dgxa100.80g.1.norm"
    assert not list(Path().rglob("never*"))
    assert "ODD_TOKEN" not in (sweep.folder / "template" / "job-0001" / "script.sh").read_text()

    assert "trial 3 failed: exit code 1: x is bad today" in tiltyard("sweep", "status", expect=1).stdout
    Path("bad").write_text("")
    tiltyard("sweep", "retry", "--failed")
    wait_until(lambda: over(sweep))
    assert len(output("began")) == 5 and summarize(sweep).counts == {"finished": 4}


def test_search_continues_from_its_jobs(tiltyard: Command, queue: Path) -> None:
    write_plan(space={"x": {"range": [0.0, 1.0]}}, search="tpe", trials=5, max_parallel=2)
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("toy")
    wait_until(lambda: over(sweep))
    assert Counter(line["trial"] for line in output("done")) == Counter({sweep.place(n).name: 1 for n in range(1, 6)})


def test_watch_submits_trials_if_jobs_cannot(
    tiltyard: Command, queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the queue are not on PATH inside the jobs."""
    setup = [f"PATH={shlex.quote(os.environ['PATH'].partition(':')[2])}"]
    write_site({**documented(), "template": {**documented()["template"], "setup": setup}})
    write_plan(space={"x": [1, 2, 3]}, max_parallel=1)
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("toy")
    events = sweep.folder / "events.jsonl"
    wait_until(lambda: "A tick failed: ngc: command not found" in events.read_text())
    wait_until(lambda: summarize(sweep).state == "stopped")  # the tick logs before it releases the lock
    assert len(output("done")) == 1
    assert "3: 3 finished" in tiltyard("sweep", "watch", "--every", "0.3").stdout
    assert len(output("began")) == 3


def test_watch_survives_a_queue_outage(tiltyard: Command, queue: Path) -> None:
    setup = [f"PATH={shlex.quote(os.environ['PATH'].partition(':')[2])}"]
    write_site({**documented(), "template": {**documented()["template"], "setup": setup}})
    write_plan(space={"x": [1, 2]}, max_parallel=1)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    wait_until(lambda: len(output("began")) == 1)
    (queue / "down").touch()

    events = find_sweep("toy").folder / "events.jsonl"

    def up_again() -> None:
        wait_until(lambda: "A tick failed" in events.read_text())
        Path("wait").unlink()
        (queue / "down").unlink()

    threading.Thread(target=up_again).start()
    watched = tiltyard("sweep", "watch", "--every", "0.3")
    assert "the queue is down" in watched.stderr and "2: 2 finished" in watched.stdout


def test_last_job_retries_until_a_queue_outage_is_over(tiltyard: Command, queue: Path) -> None:
    """No other process polls the sweep: a trial that this job does not submit would never run."""
    write_plan(space={"x": {"range": [0.0, 1.0]}}, search="tpe", trials=2, max_parallel=1)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("toy")
    wait_until(lambda: len(output("began")) == 1)
    (queue / "down").touch()
    Path("wait").unlink()
    events = sweep.folder / "events.jsonl"
    wait_until(lambda: "A tick failed: trial 2 was refused" in events.read_text())
    (queue / "down").unlink()
    wait_until(lambda: over(sweep))
    assert summarize(sweep).counts == {"finished": 2} and len(output("began")) == 2


def test_killed_job_counts_as_failed_and_stopped_job_as_stopped(tiltyard: Command, queue: Path) -> None:
    write_plan(space={"x": [1, 2, 3]}, max_parallel=2, retries=1)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("toy")
    wait_until(lambda: len(output("began")) == 2)
    os.killpg(atomic.read_json(queue / "job-1000")["pid"], signal.SIGKILL)
    wait_until(lambda: Run(sweep.place(1)).state == "lost")
    tiltyard("sweep", "stop")
    assert summarize(sweep).counts == {"lost": 1, "stopped": 1, "waiting": 1}
    wait_until(lambda: summarize(sweep).state == "stopped")  # the stopped job still runs its tick
    assert [each["reason"] for each in sweep.decisions() if each["kind"] == "failed"] == [
        'job 1000 ended: {"status": "FINISHED_SUCCESS"}'
    ]
    Path("wait").unlink()
    tiltyard("sweep", "start", "toy")
    wait_until(lambda: over(sweep))
    assert summarize(sweep).counts == {"finished": 3}


def test_retry_does_not_restart_stopped_trials(tiltyard: Command, queue: Path) -> None:
    write_plan(space={"x": [1, 2, 3]}, max_parallel=1, bad="1")
    Path("program.py").write_text(PROGRAM.replace("while pathlib", 'while given["x"] == "2" and pathlib'))
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("toy")
    wait_until(lambda: len(output("began")) == 2)
    tiltyard("sweep", "stop")
    assert summarize(sweep).counts == {"failed": 1, "stopped": 1, "waiting": 1}
    wait_until(lambda: gone(queue, 1001))  # until then it occupies the only slot
    Path("bad").write_text("")
    tiltyard("sweep", "retry", "--failed")
    wait_until(lambda: summarize(sweep).counts == {"finished": 2, "stopped": 1})
    assert [line["given"]["x"] for line in output("began")] == ["1", "2", "1", "3"]
    Path("wait").unlink()
    tiltyard("sweep", "start", "toy")
    wait_until(lambda: over(sweep))
    assert summarize(sweep).counts == {"finished": 3}


# Records nothing. Exits with code 75 on SIGTERM, or with 0 when the file `wait` is gone.
SILENT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path("ready").touch()
while pathlib.Path("wait").exists():
    time.sleep(0.05)
"""


def start_silent(tiltyard: Command) -> Sweep:
    """Start a sweep with one SILENT program, which waits."""
    write_plan(space={"x": [1]})
    Path("program.py").write_text(SILENT)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    return find_sweep("toy")


def test_warning_before_the_time_limit_does_not_count_as_a_failure(tiltyard: Command, queue: Path) -> None:
    sweep = start_silent(tiltyard)
    for job in (1000, 1001):  # twice: a program without records shows no progress
        wait_until(Path("ready").exists)
        Path("ready").unlink()
        if job == 1001:
            (queue / "down").touch()  # a delayed submission must not count as a failure either
        os.kill(atomic.read_json(queue / f"job-{job}")["pid"], signal.SIGUSR2)
    wait_until(lambda: "A tick failed" in (sweep.folder / "events.jsonl").read_text())
    (queue / "down").unlink()
    wait_until(Path("ready").exists)
    assert atomic.read_json(sweep.place(1) / "job" / "counts.json")["requeues"] == 2
    Path("wait").unlink()
    wait_until(lambda: over(sweep))
    assert summarize(sweep).counts == {"finished": 1} and summarize(sweep).rows[0].attempt == 3
    assert not [each for each in sweep.decisions() if each["kind"] == "failed"]


def test_sweep_can_be_stopped_while_a_trial_is_between_two_jobs(tiltyard: Command, queue: Path) -> None:
    setup = [f"PATH={shlex.quote(os.environ['PATH'].partition(':')[2])}"]  # so that its job cannot submit the next one
    write_site({**documented(), "template": {**documented()["template"], "setup": setup}})
    sweep = start_silent(tiltyard)
    wait_until(Path("ready").exists)
    os.kill(atomic.read_json(queue / "job-1000")["pid"], signal.SIGUSR2)
    wait_until(lambda: gone(queue, 1000))
    assert "A tick failed" in (sweep.folder / "events.jsonl").read_text()
    tiltyard("sweep", "stop")
    assert summarize(sweep).counts == {"stopped": 1} and summarize(sweep).state == "stopped"


def test_trial_of_a_job_that_gets_sigterm_is_stopped(tiltyard: Command, queue: Path) -> None:
    """The job was cancelled or preempted: only the user knows whether the trial should continue."""
    sweep = start_silent(tiltyard)
    wait_until(Path("ready").exists)
    os.kill(atomic.read_json(queue / "job-1000")["pid"], signal.SIGTERM)
    wait_until(lambda: summarize(sweep).state == "stopped")
    Path("wait").unlink()
    tiltyard("sweep", "start", "toy")
    wait_until(lambda: over(sweep))
    assert summarize(sweep).counts == {"finished": 1}


def test_trials_refused_by_the_queue_are_submitted_at_the_next_start(tiltyard: Command, queue: Path) -> None:
    write_plan(space={"x": [1, 2]}, max_parallel=2)
    (queue / "down").touch()
    out = tiltyard("sweep", "start", "plan.yaml", "--on", "ngc", expect=1)
    assert "trial 1 was refused: the queue is down" in out.stderr
    sweep = find_sweep("toy")
    assert summarize(sweep).counts == {"created": 2} or summarize(sweep).counts == {"created": 1, "waiting": 1}
    (queue / "down").unlink()
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    wait_until(lambda: over(sweep))
    assert len(output("began")) == 2


def test_template_gone_matches_the_error_of_a_forgotten_job(tiltyard: Command, queue: Path) -> None:
    write_plan(space={"x": [1]}, retries=1)
    Path("wait").touch()
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("toy")
    wait_until(lambda: output("began"))
    os.killpg(atomic.read_json(queue / "job-1000")["pid"], signal.SIGKILL)
    (queue / "job-1000").rename(queue / "forgotten")
    wait_until(lambda: Run(sweep.place(1)).state == "lost")
    assert "set template.gone" in tiltyard("sweep", "start", "toy", expect=1).stderr
    write_site({**documented(), "template": {**documented()["template"], "gone": "unknown job"}})
    (queue / "down").touch()
    assert "failed: the queue is down" in tiltyard("sweep", "start", "toy", expect=1).stderr
    assert not [each for each in sweep.decisions() if each["kind"] == "failed"]
    (queue / "down").unlink()
    Path("wait").unlink()
    tiltyard("sweep", "start", "toy")
    wait_until(lambda: over(sweep))
    assert summarize(sweep).counts == {"finished": 1} and "job 1000 ended: GONE" in atomic.to_json(sweep.decisions())


def test_runs_outside_of_sweeps_are_refused(tiltyard: Command, queue: Path) -> None:
    assert "submits trials of sweeps" in tiltyard("train", "CartPole-v1", "--on", "ngc", expect=2).stderr
    write_plan(space={"x": [1]}, trials_per_gpu=1)
    assert (
        "trials_per_gpu is for trials on this machine"
        in tiltyard("sweep", "start", "plan.yaml", "--on", "ngc", expect=2).stderr
    )


def test_placeholders_are_filled_in_without_a_shell() -> None:
    values = {"command": "bash '/a b/script.sh'", "name": "a; rm -rf $HOME", "gpus": ""}
    assert words("run --name={name} '{command} && true' {{x}} {gpus} a\\ b", values) == [
        "run",
        "--name=a; rm -rf $HOME",
        "bash '/a b/script.sh' && true",
        "{x}",
        "",
        "a b",
    ]


SENSIBLE = {"submit": "x {command}", "poll": "x {id}", "cancel": "x {id}"}


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        (None, "template: is missing"),
        ({**SENSIBLE, "submit": "x {comand}"}, "unknown placeholder {comand}; known: command, name"),
        ({**SENSIBLE, "submit": "x 'y"}, "must be a command line"),
        ({**SENSIBLE, "submit": "x {{command}}"}, "must contain {command}"),
        ({**SENSIBLE, "poll": "x"}, "must contain {id}"),
        ({**SENSIBLE, "cancel": "x {id} {name}"}, "unknown placeholder {name}; known: id"),
        ({**SENSIBLE, "alive": "("}, "must be a regular expression"),
        ({"submit": "x {command}", "poll": "x {id}"}, "template.cancel"),
    ],
)
def test_invalid_templates_are_refused(runs: Path, template: dict[str, str] | None, wrong: str) -> None:
    profile: dict[str, Any] = {"launcher": "template"} | ({"template": template} if template else {})
    Path("tiltyard.yaml").write_text(dump_yaml({"profiles": {"p": profile}}))
    with pytest.raises(ConfigError) as error:
        load_site()
    assert wrong in error.value.details


def test_population_decides_inside_the_jobs_of_its_members(tiltyard: Command, queue: Path) -> None:
    """Fewer slots than members: the job of a paused member runs the tick, replaces the worst and submits the next."""
    plan([3.0, 2.0, 1.0], max_parallel=2, experiment={**EXPERIMENT, "stop": {"env_steps": 96}})
    tiltyard("sweep", "start", "plan.yaml", "--on", "ngc")
    sweep = find_sweep("steady")
    wait_until(lambda: over(sweep))
    assert summarize(sweep).counts == {"finished": 3}
    copies = [(line["trial"], line["source"]) for line in sweep.decisions() if line["kind"] == "exploit"]
    assert copies == [(3, 1)]
    assert {Run(sweep.place(number)).status()["attempt"] for number in (1, 2, 3)} == {2}, "a pause each"
    assert len(list(queue.glob("job-*"))) > 3  # a pause ends the job, unless the same member is next
