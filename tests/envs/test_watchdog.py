"""Envs in this very process: one that hangs is interrupted, one in which somebody debugs is not."""

import bdb
import os
import signal
import time

import pytest

from tiltyard.envs.watchdog import RESETTING, Watchdog, calling_envs


def stuck(sentence: str) -> None:
    raise AssertionError(sentence)


def test_a_call_that_does_not_come_back_is_interrupted() -> None:
    with Watchdog(0.5, 60.0, stuck), calling_envs(), pytest.raises(TimeoutError, match=r"step\(\) within 0.5 s"):
        time.sleep(100)


def test_a_reset_may_take_longer_and_what_is_no_call_as_long_as_it_likes() -> None:
    with Watchdog(0.5, 60.0, stuck):
        time.sleep(1.5)
        with calling_envs(RESETTING):
            time.sleep(1.5)


def test_somebody_who_debugs_has_all_the_time_in_the_world() -> None:
    with Watchdog(0.5, 60.0, stuck), calling_envs():
        bdb.Bdb().runcall(lambda: time.sleep(1.5))


def test_a_signal_of_somebody_else_is_theirs() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with Watchdog(60.0, 60.0, stuck):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
        assert heard == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        assert heard == [signal.SIGUSR1] * 2, "and again afterwards"
    finally:
        signal.signal(signal.SIGUSR1, before)
