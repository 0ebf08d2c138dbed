"""The watchdog of envs in this process: it interrupts hung envs, but not envs in a debugger."""

import bdb
import os
import signal
import time

import pytest

from tiltyard.envs.watchdog import RESETTING, Watchdog, calling_envs


def stuck(sentence: str) -> None:
    raise AssertionError(sentence)


def test_hung_call_is_interrupted() -> None:
    with Watchdog(0.5, 60.0, stuck), calling_envs(), pytest.raises(TimeoutError, match=r"step\(\) within 0.5 s"):
        time.sleep(100)


def test_reset_has_a_longer_timeout_and_other_code_has_none() -> None:
    with Watchdog(0.5, 60.0, stuck):
        time.sleep(1.5)
        with calling_envs(RESETTING):
            time.sleep(1.5)


def test_debugger_has_no_timeout() -> None:
    with Watchdog(0.5, 60.0, stuck), calling_envs():
        bdb.Bdb().runcall(lambda: time.sleep(1.5))


def test_signals_from_elsewhere_reach_the_previous_handler() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with Watchdog(60.0, 60.0, stuck):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
        assert received == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        assert received == [signal.SIGUSR1] * 2, "also after the watchdog ended"
    finally:
        signal.signal(signal.SIGUSR1, before)
