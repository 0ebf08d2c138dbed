"""The worker processes of one command: started, replaced when they die, and ended by a signal.

The first one loads the policies before dataset.json is written, so that one that does not fit leaves no folder behind.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import wait
from typing import Any, cast

from tiltyard.collection.committed import Committed
from tiltyard.collection.progress import ProgressView
from tiltyard.collection.request import Prepared, create
from tiltyard.envs.spaces import spec_to_json
from tiltyard.errors import EnvError, ResumableError, TiltyardError
from tiltyard.processes.channel import error_from
from tiltyard.processes.fork_server import Forked, ForkServer
from tiltyard.training.signals import StopSignals

WORKER = "tiltyard.collection.worker:work"
PRELOAD = ("tiltyard.collection.preload",)
TRAINED = ("tiltyard.models.policy", "tiltyard.engines.policies.policy_set")  # these import torch
DEATHS = 3  # of workers, one after another without an episode in between: then collecting fails
POLL_SECONDS = 0.2
AGAIN = "type the same command again to collect the rest"


def stopped(prepared: Prepared, committed: Committed, stop: StopSignals) -> ResumableError:
    return ResumableError(f"stopped by {stop.received}: {_there(prepared, committed)}", AGAIN)


def _there(prepared: Prepared, committed: Committed) -> str:
    committed.refresh()
    return f"{committed.count + prepared.beyond:,} of {prepared.request.episodes:,} episodes are there"


def disk_failure(error: TiltyardError) -> ResumableError:
    return ResumableError(error.message, f"no episode is lost: free some space, then {AGAIN}", error.details)


class Pool:
    """The workers of one command, replaced when they die."""

    def __init__(
        self, server: ForkServer, prepared: Prepared, count: int, committed: Committed, stop: StopSignals
    ) -> None:
        self._server, self._prepared, self._count = server, prepared, count
        self._committed, self._stop = committed, stop
        self._task = prepared.task()
        self._go: dict[str, Any] | None = None
        self._alive: list[Forked] = []
        self._names = iter(range(sys.maxsize))
        self._deaths = 0  # since an episode was committed
        self._steps = 0
        self._failure: TiltyardError | None = None

    def run(self) -> None:
        """Work until all episodes are committed; raises what makes that impossible."""
        self._start()
        beyond = self._prepared.beyond
        with ProgressView(self._prepared.request.episodes, self._committed.count + beyond) as view:
            while self._alive:
                if self._stop.received:
                    raise stopped(self._prepared, self._committed, self._stop)
                channels = {each.channel.fileno(): each for each in self._alive}
                for ready in wait([self._server.fileno(), *channels], POLL_SECONDS):
                    if (forked := channels.get(cast(int, ready))) is not None:
                        self._read(forked)
                for forked in self._server.exits():
                    self._ended(forked)
                self._committed.refresh()
                view.update(self._committed.count + beyond, self._steps)

    def _start(self) -> None:
        forked = self._server.fork(WORKER, self._task, name=f"collect-{next(self._names)}")
        self._alive.append(forked)
        if self._go is not None:
            forked.send(self._go)

    def _read(self, forked: Forked) -> None:
        """Handle what a worker has sent."""
        while forked.channel.is_ready():
            try:
                message = forked.channel.recv()
            except EOFError:
                return
            if "ready" in message and self._go is None:  # the first one: the policies fit, so that the folder is made
                about = create(self._prepared)
                self._go = {
                    "folder": str(self._prepared.folder),
                    "env": about.env,
                    "spec": spec_to_json(about.spec),
                    "digest": about.digest,
                    "seed": about.seed,
                }
                forked.send(self._go)
                for _ in range(self._count - 1):
                    self._start()
            elif "committed" in message:
                self._deaths = 0
                self._steps += message["steps"]
                self._committed.add(message["committed"])
            elif "done" in message:
                self._alive.remove(forked)
            elif "error" in message:
                self._fail(forked, message)

    def _fail(self, forked: Forked, message: dict[str, Any]) -> None:
        """Raise a worker's error, or let another worker try: an env may fail once and not again."""
        error = error_from(message)
        if message["later"]:
            raise disk_failure(error)
        if not message["again"] or self._go is None:
            raise error
        self._alive.remove(forked)
        self._replace(error)

    def _ended(self, forked: Forked) -> None:
        """Replace a worker that has died without a word."""
        if forked in self._alive:
            self._read(forked)  # what it sent before
        if forked in self._alive:
            self._alive.remove(forked)
            hint = "the env or the system ended it; its output is above"
            self._replace(EnvError(f"a collecting process {forked.how()}", hint))

    def _replace(self, error: TiltyardError) -> None:
        self._deaths += 1
        if self._deaths >= DEATHS or self._go is None:
            there = _there(self._prepared, self._committed)
            hint = f"{error.hint}; {there}, and {DEATHS} processes failed one after another"
            raise EnvError(error.message, hint, error.details)
        sys.stderr.write(f"{error.message}; another process takes its place\n")
        self._start()
