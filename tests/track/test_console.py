"""The console: the live panel, plain lines and their frequency, and terminals that are closed."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap

import pytest
from rich.console import Console as RichConsole

from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Stop
from tiltyard.run import metrics
from tiltyard.track.console import Console, clock, nearest_budget, seconds_left
from tiltyard.types import Progress

SPLIT = {"env": 0.5, "inference": 0.2, "learn": 0.3}
SPEED = "speed/env_steps_per_second"


def experiment(**stop):
    return Experiment.model_validate({"env": "CartPole-v1", "stop": stop or {"env_steps": 100_000}})


def plain(tmp_path, **stop):
    stream = io.StringIO()
    return Console(experiment(**stop), "cartpole/0001-calm-newt", tmp_path, stream=stream), stream


def shown(console, width=100):
    screen = RichConsole(width=width, height=40, file=io.StringIO(), record=True)
    screen.print(console.render())
    return screen.export_text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.9, "0:00:59"), (3725, "1:02:05"), (90061, "1 d 01:01:01"), (-3, "0:00:00")],
)
def test_clock_formats_seconds(seconds, text):
    assert clock(seconds) == text


def test_most_used_budget_is_shown_and_the_first_to_end_gives_the_time_left():
    stop = Stop(env_steps=1000, updates=10, seconds=1000.0)
    assert nearest_budget(stop, Progress(env_steps=500, updates=9, seconds=1)) == ("updates", 10.0, 0.9)
    assert nearest_budget(Stop(env_steps=None, train_return=1.0), Progress(env_steps=5)) == ("", 0.0, 0.0)
    earlier, now = Progress(env_steps=0, updates=0, seconds=0), Progress(env_steps=500, updates=9, seconds=90)
    assert seconds_left(stop, earlier, now) == 10.0
    assert seconds_left(stop, now, now) is None


def test_plain_lines_are_printed_per_2_percent_and_per_evaluation(tmp_path):
    console, stream = plain(tmp_path)
    console.start(["run cartpole/0001-calm-newt"])
    for step in range(1, 1001):
        found = {"train/return": 20.0}
        if step == 555:
            found |= {"eval/return": 99.0, "eval/return_low": 90.0, "eval/return_high": 108.0}
        console.update(Progress(step * 100, step * 100, step, step, step * 0.01), found, SPLIT)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run cartpole/0001-calm-newt"
    assert 48 <= len(lines) - 1 <= 53
    assert sum("evaluation 99 [90, 108]" in line for line in lines) == 1
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().isascii()


def test_plain_line_has_all_values(tmp_path):
    console, stream = plain(tmp_path)
    console.start([])
    console.update(Progress(10_000, 10_000, 5, 9, 10.0), {"train/return": 21.25, SPEED: 1000.0}, SPLIT)
    console.update(Progress(30_000, 30_000, 15, 19, 20.0), {"train/return": 61.25, SPEED: 2000.0}, SPLIT)
    assert stream.getvalue().splitlines()[-1] == (
        "     30,000 env steps  30% | 0:00:20 (0:00:35 left) | return 61.2 | 2,000 env steps/s | env 50% inference 20% learn 30%"
    )


def test_time_shares_are_weighted_by_seconds_and_add_up_to_100(tmp_path):
    console, stream = plain(tmp_path)
    console.start([])
    console.progress = Progress(env_steps=9000)  # a resume: earlier steps took no time in this attempt
    console.update(Progress(10_000, 10_000, 1, 9, 1.0), {SPEED: 1000.0}, {"env": 0.666, "learn": 0.334})  # 1 s
    assert stream.getvalue().splitlines()[-1].endswith(" | env 67% learn 33%")
    console.update(Progress(20_000, 20_000, 2, 9, 1.5), {SPEED: 100.0}, {"env": 0.01, "eval": 0.99})  # 100 s
    # seconds: env 0.9 * 0.666 + 1, learn 0.9 * 0.334, eval 99
    assert stream.getvalue().splitlines()[-1].endswith(" | env 2% eval 98%")
    console.update(Progress(20_000, 20_000, 2, 9, 1.5), {"eval/return": 1.0}, {})  # evaluation at the end
    assert stream.getvalue().splitlines()[-1].endswith(" | env 2% eval 98%")


def test_no_time_left_is_shown_when_the_budget_is_used_up(tmp_path):
    console, stream = plain(tmp_path)
    console.start([])
    for steps in (50_000, 100_352):
        console.update(Progress(steps, steps, 5, 9, steps / 1000), {}, {})
    assert stream.getvalue().splitlines()[-1] == "    100,352 env steps 100% | 0:01:40 | 1,000 env steps/s"
    assert "left" not in shown(console)


def test_speed_and_time_left_are_measured_in_this_attempt(tmp_path):
    console, stream = plain(tmp_path)
    console.start([])
    # Resumed after a day of slow training, which does not count.
    console.update(Progress(50_000, 50_000, 5, 9, 86_400.0), {}, SPLIT)
    console.update(Progress(60_000, 60_000, 6, 9, 86_401.0), {}, SPLIT)
    assert "(0:00:04 left)" in stream.getvalue()
    assert "10,000 env steps/s" in stream.getvalue()


def test_finish_prints_the_outcome_and_the_given_lines(tmp_path):
    console, stream = plain(tmp_path)
    console.start([])
    console.update(Progress(100, 100, 1, 1, 1.0), {}, {})
    console.finish("finished: stop.return reached", ["next  tiltyard eval last"])
    assert stream.getvalue().splitlines() == [
        "        100 env steps   0% | 0:00:01",
        "finished: stop.return reached after 100 env steps in 0:00:01",
        "next  tiltyard eval last",
    ]


def test_live_panel_shows_progress_curve_returns_speed_and_time(tmp_path):
    console, _ = plain(tmp_path, env_steps=100_000, **{"return": 475.0})
    for update in range(1, 51):
        found = {"train/return": update * 9.0, SPEED: 2000.0}
        if update == 40:
            found |= {"eval/return": 470.0, "eval/return_low": 460.0, "eval/return_high": 480.0}
        console.update(Progress(update * 1000, update * 1000, update, update * 3, update * 0.5), found, SPLIT)
    text = shown(console)
    for expected in ("cartpole/0001-calm-newt", "50%", "50,000 of 100,000 env steps", "0:00:25 · 0:00:25 left", "training 450",
                     "evaluation 470 [460, 480]", "goal 475", "2,000 env steps/s", "env 50%", "learn 30%", "CartPole-v1 · ppo · seed 0"):  # fmt: skip
        assert expected in text
    assert re.search("[\u2801-\u28ff]", text) and "◆" in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_live_panel_fits_any_width_before_and_after_the_first_update(tmp_path, width):
    console, _ = plain(tmp_path)
    console.rich = RichConsole(width=width, height=10, file=io.StringIO())
    before = shown(console, max(width, 34))
    console.update(Progress(1000, 1000, 1, 1, 1.0), {"train/return": float("nan")}, {"env": 0.0})
    after = shown(console, max(width, 34))
    assert "no finished episode yet" in before
    assert max(len(line) for line in (before + after).splitlines()) <= max(width, 34)


def test_run_without_a_budget_shows_steps_and_time(tmp_path):
    console, _ = plain(tmp_path, env_steps=None, train_return=5.0)
    console.update(Progress(1234, 1234, 1, 1, 61.0), {}, {})
    assert "1,234 env steps · 0:01:01" in shown(console)


def test_curve_of_earlier_attempts_is_shown_without_superseded_records(tmp_path):
    for steps, value in ((100, 1.0), (200, 2.0), (300, 9999.0)):
        metrics.append(tmp_path, {"env_steps": steps, "metrics": {"train/return": value, "eval/return": value}})
    metrics.rewind(tmp_path, 200, 2)
    console = Console(experiment(), "a/b", tmp_path, live=True, stream=io.StringIO())
    console.start([])
    console.close()
    assert console.returns == console.evaluations == [(100, 1.0), (200, 2.0)]


def test_long_runs_keep_a_bounded_curve(tmp_path):
    console, _ = plain(tmp_path, env_steps=10**9)
    for update in range(1, 20_001):
        console.update(Progress(update * 10, update * 10, update, update, update * 0.001), {"train/return": 1.0}, {})
    assert 1000 < len(console.returns) <= 4001
    assert console.returns[0][0] < 1000 and console.returns[-1][0] > 199_000


class Gone(io.StringIO):
    """A terminal with a closed window."""

    def write(self, text):
        raise OSError(5, "Input/output error")


def test_closed_terminal_does_not_stop_training(tmp_path):
    console = Console(experiment(), "a/b", tmp_path, stream=Gone())
    console.start(["hello"])
    console.update(Progress(50_000, 50_000, 1, 1, 1.0), {"eval/return": 1.0}, SPLIT)
    console.say("still here")
    console.finish("finished", ["done"])
    assert console.progress.env_steps == 50_000


def test_characters_that_a_stream_cannot_write_are_replaced(tmp_path):
    raw = io.BytesIO()
    console = Console(experiment(), "a/b", tmp_path, stream=io.TextIOWrapper(raw, encoding="ascii"))
    console.say("schön ◆")
    assert raw.getvalue() == b"sch?n ?\n"


CHILD = """
import os, sys, termios, time
from tiltyard.config.experiment import Experiment
from tiltyard.track.console import Console
from tiltyard.types import Progress
console = Console(Experiment.model_validate({"env": "CartPole-v1"}), "a/b", ".")
console.start(["hello"])
for update in range(1, 21):
    console.update(Progress(update * 1000, update * 1000, update, 1, update * 0.1), {"train/return": 1.0 * update}, {"env": 1.0})
    if update == 10:
        console.say("a sentence")
        time.sleep(0.6)
    if update == 15 and "END" in os.environ:  # as an env might, or what it starts
        mode = termios.tcgetattr(2)
        mode[3] &= ~termios.ECHO
        termios.tcsetattr(2, termios.TCSANOW, mode)
        os.kill(os.getpid(), int(os.environ["END"]))
console.finish("finished", ["bye"])
"""


def in_terminal(tmp_path, end=0, **environment):
    """Run the child above in a terminal and return its output; check the exit code and the final terminal mode."""
    parent, child = pty.openpty()
    mode = termios.tcgetattr(parent)
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    env |= {"TERM": "xterm-256color", "PYTHONUTF8": "1", "COLUMNS": "100", "LINES": "30", **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD)], stdin=child, stdout=child, stderr=child, cwd=tmp_path, env=env
    )
    os.close(child)
    received = b""
    try:
        while piece := os.read(parent, 65536):
            received += piece
    except OSError:  # the child closed the terminal
        pass
    assert process.wait() == -end, received.decode()
    assert termios.tcgetattr(parent) == mode
    os.close(parent)
    return received.decode()


def test_terminal_gets_the_live_panel_and_its_cursor_is_restored(tmp_path):
    received = in_terminal(tmp_path)
    assert "╭─" in received and "hello" in received and "a sentence" in received and "bye" in received
    assert received.count("\x1b[?25l") == received.count("\x1b[?25h") == 1
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", received), "there are colours"


@pytest.mark.parametrize("end", [0, signal.SIGSEGV, signal.SIGKILL])
def test_terminal_is_restored_on_every_exit(tmp_path, end):
    """SIGSEGV is a crash of an env, SIGKILL an out-of-memory kill; 0 is no signal."""
    received = in_terminal(tmp_path, end, END=str(int(end)))
    assert received.count("\x1b[?25l") == received.count("\x1b[?25h") == 1


def test_no_color_is_respected(tmp_path):
    received = in_terminal(tmp_path, NO_COLOR="1")
    assert "╭─" in received
    assert not re.search(r"\x1b\[([0-9]+;)*(3[0-8]|9[0-7]|4[0-8])(;[0-9]+)*m", received)


def test_dumb_terminal_gets_plain_lines(tmp_path):
    received = in_terminal(tmp_path, TERM="dumb")
    assert "╭─" not in received and "\x1b" not in received
    assert "env steps" in received
