"""Commands ls, show, logs, stop, rm and diff with real processes, folders and signals."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiltyard.cli import main
from tiltyard.config.experiment import Experiment
from tiltyard.run import checkpoint, metrics, state_file
from tiltyard.run.create import Source, create
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run, find
from tiltyard.run.status import write_status
from tiltyard.types import Progress

HEAVY = ("torch", "ray", "gymnasium", "numpy")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def tiltyard(root, tmp_path, monkeypatch, capsys):
    """Run a command with a stdin that is not a terminal."""
    monkeypatch.setenv("TILTYARD_RUNS", str(root))
    monkeypatch.chdir(tmp_path)

    def type_(*words, code=0):
        capsys.readouterr()
        with Path(os.devnull).open() as nobody, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", nobody)
            with pytest.raises(SystemExit) as left:
                main([str(word) for word in words])
        output = capsys.readouterr()
        assert left.value.code == code and "Traceback" not in output.err, output.err
        return SimpleNamespace(stdout=output.out, stderr=output.err)

    return type_


def make(root, name="toy", **settings):
    return create(root, Experiment.model_validate({"name": name, "env": {"id": "CartPole-v1"}, **settings}))


def trained(root, name="toy", **settings):
    """Create a finished run with metrics and two checkpoints, like one after training."""
    run = make(root, name, **settings)
    for steps, value in ((100, 10.0), (200, 22.5)):
        found = {
            "train/return": value,
            "train/return_min": 1,
            "train/return_max": 50,
            "time/env": 0.75,
            "time/learn": 0.25,
            "speed/env_steps_per_second": 50.0,
        }
        metrics.append(
            run,
            {"env_steps": steps, "metrics": {**found, "eval/return": value * 2}},
        )
        checkpoint.commit(
            run,
            steps,
            Progress(env_steps=steps),
            value * 2,
            lambda folder: state_file.write_tree(folder, "x", {"a": 1}),
        )
    progress = Progress(env_steps=200, updates=2, episodes=9, seconds=75.0)
    write_status(
        run,
        state="finished",
        reason="stop.env_steps",
        progress=progress,
        best=45.0,
        **{"return": 22.5, "eval_return": 45.0},
    )
    log_event(run, "finished", "finished at env step 200")
    return run


# ---------------------------------------------------------------------------------------------- ls


def test_ls_lists_filters_and_prints_json(root, tiltyard):
    one = trained(root, tags=["paper", "fast"], notes="the Good one\nsecond line")
    two = make(root, "other", tags=["paper"])
    out = tiltyard("ls").stdout
    assert out.splitlines()[0].split()[:3] == ["run", "state", "env"] and one.id in out and two.id in out
    assert "22.5" in out and "45" in out and "1 min 15 s" in out and "paper,fast" in out and "second line" not in out
    rows = json.loads(tiltyard("ls", "--json").stdout)
    assert [row["id"] for row in rows] == [one.id, two.id] and rows[0]["eval_return"] == 45.0
    for words, expected in (
        (["--tag", "paper"], [one.id, two.id]),
        (["--tag", "paper", "--tag", "fast"], [one.id]),
        (["--name", "other"], [two.id]),
        (["--state", "finished"], [one.id]),
        (["--notes", "good"], [one.id]),
        (["--notes", "bad"], []),
    ):
        assert [row["id"] for row in json.loads(tiltyard("ls", "--json", *words).stdout)] == expected, words
    assert "none of the 2 runs" in tiltyard("ls", "--tag", "none").stderr
    assert "did you mean 'finished'" in tiltyard("ls", "--state", "finish", code=2).stderr


def test_ls_shows_at_most_100_percent_and_100_only_when_done(root, tiltyard):
    for steps in (9_999, 10_000, 250_000):
        write_status(make(root, stop={"env_steps": 10_000}), progress=Progress(env_steps=steps))
    shares = [line.split("  ") for line in tiltyard("ls").stdout.splitlines()[1:]]
    assert [next(cell.strip() for cell in line if "%" in cell) for line in shares] == ["99 %", "100 %", "100 %"]


def test_ls_without_runs_and_with_a_missing_root(root, tiltyard, tmp_path):
    done = tiltyard("ls")
    assert done.stdout == "" and "tiltyard train" in done.stderr
    assert json.loads(tiltyard("ls", "--json").stdout) == []
    assert "is not a folder" in tiltyard("ls", "--root", tmp_path / "missing", code=2).stderr


def test_control_characters_in_notes_do_not_reach_the_terminal(root, tiltyard):
    run = make(root, notes="red \x1b[31m and \x07 bell")
    for words in (["ls"], ["show", run.id]):
        assert "\x1b" not in tiltyard(*words).stdout and "\x07" not in tiltyard(*words).stdout


def test_broken_and_half_deleted_runs_are_listed_as_damaged(root, tiltyard):
    one, two = make(root), make(root)
    (one.folder / "status.json").write_text("{")
    (two.folder / "status.json").unlink()
    assert [row["state"] for row in json.loads(tiltyard("ls", "--json").stdout)] == ["damaged", "damaged"]
    assert "damaged" in tiltyard("ls").stdout


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["show", "last"], ["--help"]])
def test_read_only_commands_import_no_heavy_package(root, tmp_path, words):
    trained(root)
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: sys.stderr.write('HEAVY ' + ' '.join(sorted(set({HEAVY}) & set(sys.modules))) + '\\n'))\n"
        f"from tiltyard.cli import main\nmain({words})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "TILTYARD_RUNS": str(root)}, check=True)  # fmt: skip
    assert done.stderr.splitlines()[-1] == "HEAVY "


# ---------------------------------------------------------------------------------------------- show


MEASURED = """
import json, re, sys
from pathlib import Path
from tiltyard.cli.show import facts_of
from tiltyard.run.folder import Run

def state():
    peak = re.search("VmHWM: +([0-9]+)", Path("/proc/self/status").read_text().replace("\t", " "))
    return int(Path("/proc/self/io").read_text().split()[1]), int(peak[1]) * 1024

before, facts, after = state(), facts_of(Run(Path(sys.argv[1]))), state()
print(json.dumps([facts["metrics"]["train/return"], after[0] - before[0], after[1] - before[1]]))
"""


def test_show_reads_many_records_in_little_memory_and_the_second_time_almost_none(root):
    run = trained(root)
    found = {f"loss/{number}": number / 7 for number in range(20)}
    with run.metrics_file.open("a") as file:
        for steps in range(20_000):
            record = {"env_steps": 300 + steps, "metrics": {**found, "train/return": steps / 3}}
            file.write(json.dumps(record) + "\n")
    size = run.metrics_file.stat().st_size
    for most in (3 * size, size / 4):
        command = [sys.executable, "-c", MEASURED, str(run.folder)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        value, read, memory = json.loads(output)
        assert value == 19_999 / 3 and read < most and memory < 3 * size, (size, output)


def test_show_prints_a_summary_json_or_events(root, tiltyard):
    run = trained(root, tags=["a"], notes="mine")
    out = tiltyard("show", "last").stdout
    for words in ("finished: stop.env_steps", "200 of 1,000,000", "22.5 in training", "45 at env step 200, best 45", "env 75%",
                  "3 env steps per second", "eval/return 45, best, newest", f"tiltyard eval {run.id}", str(run.folder)):  # fmt: skip
        assert words in out, words
    facts = json.loads(tiltyard("show", run.id, "--json").stdout)
    assert [one["env_steps"] for one in facts["checkpoints"]] == [100, 200] and facts["damaged"] == []
    assert "finished at env step 200" in tiltyard("show", run.id, "--events").stdout
    assert [event["kind"] for event in json.loads(tiltyard("show", run.id, "--events", "--json").stdout)] == [
        "created",
        "finished",
    ]


def test_show_names_every_budget_and_goal(root, tiltyard):
    stop = {"env_steps": None, "seconds": 100, "updates": 4, "frames": 400, "return": 475, "train_return": 300}
    out = tiltyard("show", trained(root, stop=stop).id).stdout
    assert (
        "200 env steps, 0 of 400 frames (0 %), 2 of 4 updates (50 %), 9 episodes, 1 min 15 s of 1 min 40 s (75 %), "
        "attempt 0"
    ) in out
    assert "1 to 50), goal 300\n" in out and "best 45, goal 475\n" in out


def typed(line):
    """Split a printed command like a shell, without the leading `tiltyard`."""
    first, *words = shlex.split(line)
    assert first == "tiltyard"
    return words


@pytest.mark.parametrize("place", ["runs", "my other runs", "-odd"])
def test_printed_commands_work_from_any_folder(root, tiltyard, tmp_path, monkeypatch, place):
    run = trained(tmp_path / place)
    pytest.importorskip("matplotlib")
    for here in (tmp_path, run.folder.parent, root.parent / "elsewhere"):
        here.mkdir(exist_ok=True)
        monkeypatch.chdir(here)
        line = tiltyard("show", run.folder).stdout.splitlines()[-1]
        assert line.strip().startswith(f"tiltyard show {run.id} ") == (place == "runs")
        tiltyard(*typed(line))
        assert (here / "curve.png").exists()


def test_printed_commands_do_not_use_a_name_that_matches_another_run(root, tiltyard, tmp_path, monkeypatch):
    run = trained(root)
    shutil.copytree(run.folder, tmp_path / "copies" / run.id)
    write_status(Run(tmp_path / "copies" / run.id), notes="the copy")
    monkeypatch.chdir(tmp_path / "copies")  # here the id is also the path of the copy
    facts = json.loads(tiltyard("show", run.folder, "--json").stdout)
    assert all(str(run.folder) in command for command in facts["next"])
    copy = json.loads(tiltyard("show", run.id, "--json").stdout)
    assert copy["notes"] == "the copy" and all(run.id in typed(command) for command in copy["next"])


def test_show_reports_damage_and_works_before_training(root, tiltyard):
    run = trained(root)
    (run.checkpoints / "000000000200" / "manifest.json").write_text("{")
    with run.metrics_file.open("a") as file:
        file.write('{"torn')
    out = tiltyard("show", run.id).stdout
    assert "checkpoint 000000000200: manifest.json cannot be read" in out and "line 3 of metrics.jsonl" in out
    fresh = make(root, "fresh")
    assert "created" in (out := tiltyard("show", fresh.id).stdout) and f"tiltyard resume {fresh.id}" in out


def test_show_plots_the_learning_curve(root, tiltyard, tmp_path):
    pytest.importorskip("matplotlib")
    run = trained(root)
    tiltyard("show", run.id, "--plot", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_run_is_reported_in_one_sentence(root, tiltyard):
    run = make(root)
    for verb in ("show", "logs", "stop", "rm"):
        done = tiltyard(verb, run.id[:-1], code=2)
        assert done.stdout == "" and done.stderr.startswith("error: there is no run") and run.id in done.stderr


# ---------------------------------------------------------------------------------------------- logs and stop

TRAINER = """
import signal, sys, time
from pathlib import Path
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.status import write_status
run, obeys = Run(Path(sys.argv[1])), sys.argv[2] == "obeys"
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(run.folder / "logs").mkdir(exist_ok=True)
with Lock(run), (run.folder / "logs" / "attempt-001.log").open("w") as log:
    write_status(run, state="running")
    log.write("first line\\n"); log.flush()
    print("running", flush=True)
    while not (asked and obeys):
        time.sleep(0.01)
    log.write("last line\\n"); log.flush()
    write_status(run, state="stopped", reason="asked to stop")
"""


@pytest.fixture
def trainer(request):
    """Start a process that holds the lock of a run, like training."""
    started = []

    def start(run, manner="obeys"):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(run.folder), manner], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "running\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_stop_waits_for_the_run_and_reports_its_state(root, tiltyard, trainer):
    run = make(root)
    process = trainer(run)
    assert "running" in tiltyard("ls").stdout
    done = tiltyard("stop", run.id)
    assert f"asked pid {process.pid}" in done.stderr and "is stopped: asked to stop" in done.stderr
    assert f"tiltyard resume {run.id}" in done.stderr and find(run.id, root).state == "stopped"
    assert f"run {run.id} is not running (stopped)" in tiltyard("stop", run.id, code=2).stderr


def test_stop_gives_up_after_its_timeout(root, tiltyard, trainer):
    run = make(root)
    trainer(run, "deaf")
    assert "still finishing its update" in tiltyard("stop", run.id, "--wait", "0.2", code=1).stderr


def test_stop_names_another_host_and_never_signals_an_unrelated_process(root, tiltyard):
    run = make(root)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        owner = {"host": "node9", "pid": stranger.pid, "boot": "", "pids": "", "started": "1", "mark": "x"}
        (run.folder / "lock.json").write_text(json.dumps(owner))
        done = tiltyard("stop", run.id, code=2)
        assert f"pid {stranger.pid} on host node9" in done.stderr and "on that host: tiltyard stop" in done.stderr
        from tiltyard.run.lock import this_process

        # Same host and pid, but another start time: the pid was reused.
        (run.folder / "lock.json").write_text(json.dumps({**this_process(), "pid": stranger.pid, "started": "1"}))
        tiltyard("stop", run.id, code=2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_logs_prints_and_follows_to_the_end(root, tiltyard, trainer, tmp_path):
    run = make(root)
    assert "has written no log yet" in tiltyard("logs", run.id).stderr
    process = trainer(run)
    assert tiltyard("logs", run.id).stdout == "first line\n"
    follower = subprocess.Popen([sys.executable, "-m", "tiltyard", "logs", "-f", run.id, "--root", str(root)],
                                stdout=subprocess.PIPE, text=True, cwd=tmp_path)  # fmt: skip
    assert follower.stdout.readline() == "first line\n"
    process.send_signal(signal.SIGTERM)
    out, _ = follower.communicate(timeout=30)
    assert out == "last line\n" and follower.returncode == 0


def test_logs_stops_following_a_run_whose_process_was_killed(root, tiltyard, trainer):
    run = make(root)
    process = trainer(run)
    process.kill()
    process.wait()
    assert tiltyard("logs", "-f", run.id).stdout == "first line\n"
    assert "lost" in tiltyard("ls").stdout


# ---------------------------------------------------------------------------------------------- rm


def test_rm_deletes_nothing_unless_all_runs_are_found(root, tiltyard):
    one, two, three = make(root), make(root), make(root)
    assert "add --yes" in tiltyard("rm", one.id, code=2).stderr
    tiltyard("rm", one.id, "no-such-run", "--yes", code=2)
    assert one.folder.exists()
    done = tiltyard("rm", one.id, two.id, one.folder, "--yes")
    assert done.stderr.count("deleted") == 2
    assert [path.name for path in (root / "toy").iterdir()] == [three.folder.name]


def test_rm_refuses_live_runs_symlinks_and_other_folders(root, tiltyard, trainer, tmp_path):
    live, elsewhere = make(root), make(tmp_path / "others")
    process = trainer(live)
    assert f"pid {process.pid} on host" in tiltyard("rm", live.id, "--yes", code=2).stderr
    link = root / "toy" / "0042-sly-fox"
    link.symlink_to(elsewhere.folder)
    for victim in (link, elsewhere.folder, tmp_path, "/"):
        tiltyard("rm", victim, "--yes", code=2)
    assert live.status() and elsewhere.status()


def test_rm_asks_for_confirmation_at_a_terminal(root, tmp_path):
    run = make(root)
    for answer, left in ((b"\n", True), (b"n\n", True), (b"y\n", False)):
        ours, theirs = os.openpty()
        process = subprocess.Popen([sys.executable, "-m", "tiltyard", "rm", run.id, "--root", str(root)],
                                   stdin=theirs, stderr=subprocess.PIPE, cwd=tmp_path)  # fmt: skip
        os.close(theirs)
        time.sleep(0.05)
        os.write(ours, answer)
        _, err = process.communicate(timeout=30)
        os.close(ours)
        assert b"permanently? [y/N]" in err and run.folder.exists() is left, (answer, err)


# ---------------------------------------------------------------------------------------------- diff


def test_diff_prints_the_settings_that_differ(root, tiltyard, tmp_path):
    one = make(root, seed=1, algo={"id": "ppo", "lr": 1e-4})
    two = make(root, seed=2, algo={"id": "ppo", "lr": {"kind": "linear", "start": 1e-3}})
    rows = {
        row["setting"]: (row["left"], row["right"])
        for row in json.loads(tiltyard("diff", one.id, two.id, "--json").stdout)
    }
    assert rows["seed"] == (1, 2) and rows["algo.lr"] == (1e-4, None) and rows["algo.lr.kind"] == (None, "linear")
    assert set(rows) == {"seed", "algo.lr", "algo.lr.kind", "algo.lr.start", "algo.lr.end", "algo.lr.over"}
    assert "algo.lr.kind" in tiltyard("diff", one.id, two.id).stdout
    assert "no setting differs" in tiltyard("diff", one.id, one.id).stderr
    (tmp_path / "mine.yaml").write_text("name: toy\nenv: CartPole-v1\nseed: 3\nalgo: {id: ppo, lr: 1e-4}\n")
    rows = json.loads(tiltyard("diff", one.id, "mine.yaml", "--json").stdout)
    assert rows == [{"setting": "seed", "left": 1, "right": 3}]


def test_diff_and_show_import_no_plug_in_and_diff_detects_changed_ones(root, tiltyard, tmp_path):
    source = tmp_path / "net.py"
    runs = []
    for text in ("raise SystemExit('imported!')\n", "raise SystemExit('imported again!')\n"):
        source.write_text(text)
        wanted = Experiment.model_validate({"name": "toy", "env": {"id": "CartPole-v1"}, "model": {"id": "net.py:Net"}})
        runs.append(create(root, wanted, Source(base=[tmp_path])))
    rows = json.loads(tiltyard("diff", runs[0].id, runs[1].id, "--json").stdout)
    assert [row["setting"] for row in rows] == ["plugins/net.py"] and rows[0]["left"] != rows[0]["right"]
    assert "CartPole-v1" in tiltyard("show", runs[0].id).stdout
