"""One Ray over the nodes of a job: the first node's agent starts its head, the others join it, all end together.

RUN/job/ray-JOB-RESTART/      readable by the user alone; a requeued job never reads what an earlier start has left
  token         what every process of this Ray has to know
  head.json     where the head listens, and which versions it has: written when it answers
  NODE.json     by a node's agent: that it has joined, or why it has not
  end           by the first node's agent, when the training is over

There are no sleeps for luck and no fixed ports: a port is picked by binding it. `ray stop` is never called, because it
would end every Ray of the user on that machine; an agent ends what it has started, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from tiltyard.engines.rllib.allocation import ALLOCATION
from tiltyard.engines.rllib.ray_cluster import (
    QUIET,
    SMALLEST_STORE,
    SOON,
    STORE,
    keep_logs,
    short_folder,
    token_variables,
)
from tiltyard.errors import TiltyardError
from tiltyard.processes import proc
from tiltyard.processes.child import die_with
from tiltyard.processes.resources import free_memory, own_address, usable_cores
from tiltyard.run import atomic
from tiltyard.slurm import FOLDER

POLL_SECONDS = 0.2  # seconds between looks at the folder
ANSWER = 120.0  # seconds for a head to answer on its port
FAREWELL = 10.0  # seconds for Ray to end when asked to
TRIES = 3  # ports that are tried
SPREAD = {"RAY_scheduler_spread_threshold": "0.0"}  # runners on every node, rather than one node after another


class RayNode:
    """This node's share of the Ray of a job."""

    def __init__(self, run: Path, task: Mapping[str, Any]) -> None:
        self.task = task
        job = os.environ.get("SLURM_HET_JOB_ID") or os.environ.get("SLURM_JOB_ID", "0")
        self.name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.place = run / FOLDER / f"ray-{job}-{os.environ.get('SLURM_RESTART_COUNT') or 0}"
        self.output = run / "logs" / "ray" / f"{self.name}.out"
        self.kept = run / "logs" / "ray" / self.name
        self.temp: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.offered = usable_cores()
        self.said: list[str] = []  # for the run's events
        self.ended = False

    # -- the first node

    def lead(self, learners: int) -> dict[str, str]:
        """Start the head; returns the variables by which the trainer finds this Ray. In a heterogeneous job the first
        group learns: no runner is put there."""
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write_token()
        learning = learners if learners > 1 else 0  # in processes of their own; a single one is in the trainer's
        taken = max(1, learners)
        if self.task["samplers"]:
            self.offered = taken = learning
        for tries_left in reversed(range(TRIES)):
            address, port = own_address(), _free_port()
            self._start("--head", f"--port={port}", "--include-dashboard=false", address=address)
            if self._answers(address, port):
                break
            self.stop()
            if not tries_left:
                raise TiltyardError(
                    f"Ray's head did not start on {self.name}: {_tail(self.output)}", f"its output is in {self.output}"
                )
        nodes = [name for name in os.environ.get("TILTYARD_NODES", "").split(",") if name]
        told = {
            "address": f"{address}:{port}",
            "nodes": nodes or [self.name],
            "cpus": self.offered + int(self.task["cpus_elsewhere"]) - taken,
            "wait": self.task["wait"],
            "folder": str(self.place),
            "logs": str(self.output.parent),
        }
        atomic.write_json(self.place / "head.json", {**told, **_versions()})
        self._tell("joined")
        return {**self._variables(), ALLOCATION: json.dumps(told)}

    def lost(self, timeout: float = 0.0) -> str:
        """Why the head has ended by itself; nothing where it still runs after so many seconds."""
        assert self.process is not None
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return ""
        return f"Ray's head on {self.name} has ended by itself (its output is in logs/ray/{self.output.name})"

    def poll_events(self, told: set[str]) -> Iterator[str]:
        """Sentences that other nodes' agents have for the run's events, each once."""
        for path in sorted(self.place.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                for sentence in atomic.read_json(path).get("said", []):
                    if sentence not in told:
                        told.add(sentence)
                        yield str(sentence)

    def end(self) -> None:
        """Let the other nodes go, and end this one's share."""
        with contextlib.suppress(OSError):
            (self.place / "end").touch()
        self.stop()
        (self.place / "token").unlink(missing_ok=True)

    # -- the other nodes

    def serve(self) -> None:
        """Join the head and stay until the first node says that it is over. A raylet that dies is started again."""
        signal.signal(signal.SIGTERM, self._note)
        head = self._head()
        if head is None:
            return
        ours, theirs = _versions(), {name: head[name] for name in _versions()}
        if ours != theirs:
            both = ", ".join(f"{name} {ours[name]} here and {theirs[name]} there" for name in ours)
            self._tell("failed", f"{self.name} cannot join Ray, versions differ: {both}")
            self._until_over(lambda: False)
            return
        tries = int(self.task["retry"])
        while True:
            self._start(f"--address={head['address']}", address=own_address())
            self._tell("joined")
            assert self.process is not None
            if self._until_over(lambda: self.process is not None and self.process.poll() is not None):
                break
            self.stop()
            if tries == 0:
                self._tell("failed", f"{self.name} lost its part of Ray: {_tail(self.output)}")
                self._until_over(lambda: False)
                break
            tries -= 1
            number = int(self.task["retry"]) - tries
            self._tell("lost", f"{self.name} lost its part of Ray, which is started again ({number})")
        self.stop()

    def _head(self) -> dict[str, Any] | None:
        """What the first node has to say; None when it is over before it said anything."""
        deadline = time.monotonic() + float(self.task["wait"])
        while not (self.place / "head.json").exists():
            if self.ended or (self.place / "end").exists():
                return None
            if time.monotonic() > deadline:
                raise TiltyardError(
                    f"{self.name} heard nothing of the first node for {self.task['wait']:g} s", f"see {self.place}"
                )
            time.sleep(POLL_SECONDS)
        found: dict[str, Any] = atomic.read_json(self.place / "head.json")
        return found

    def _until_over(self, failed: Callable[[], bool]) -> bool:
        """Wait for the end; False when `failed` comes first."""
        while not (self.ended or (self.place / "end").exists()):
            if failed():
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ended = True  # Slurm tells every process of a job, those of Ray too

    # -- Ray's own processes

    def _start(self, *words: str, address: str) -> None:
        self.temp = short_folder(_short_temp())
        store = max(SMALLEST_STORE, int(min(STORE * 2**30, (free_memory() or 2**34) / 8)))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
        command += [
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={address}",
            f"--node-name={self.name}",
            f"--temp-dir={self.temp}",
            f"--num-cpus={self.offered}",
            f"--object-store-memory={store}",
            f"--ray-client-server-port={_free_port()}",
            f"--dashboard-agent-listen-port={_free_port()}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            *([f"--num-gpus={count}"] if (count := _gpus()) is not None else []),
        ]
        if "--head" not in words:
            command = [word for word in command if not word.startswith("--ray-client-server-port")]
        parent = os.getpid()

        def prepare() -> None:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the time limit is the trainer's to know of
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with(parent)

        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                preexec_fn=prepare,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End this node's share of Ray with everything it has started, keep its logs, remove its folder."""
        if self.process is not None and self.temp is not None:
            started = {each.pid for each in proc.tree(self.process.pid)}
            if self.process.poll() is None:
                self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(FAREWELL)
            for pid in started | {each.pid for each in proc.tree(self.process.pid)}:
                if _of_ray(pid, self.temp):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        if self.temp is not None:
            keep_logs(self.temp, self.kept)
            shutil.rmtree(self.temp.parent, ignore_errors=True)
            self.temp = None

    def _answers(self, address: str, port: int) -> bool:
        deadline = time.monotonic() + ANSWER
        while self.process is not None and self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
                return True
            time.sleep(POLL_SECONDS)
        return False

    # -- words

    def _tell(self, state: str, sentence: str = "") -> None:
        self.said += [sentence] if sentence else []
        atomic.write_json(self.place / f"{self.name}.json", {"node": self.name, "state": state, "said": self.said})

    def _write_token(self) -> None:
        path = self.place / "token"
        if not path.exists():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32))

    def _variables(self) -> dict[str, str]:
        return {**token_variables(self.place / "token"), **SOON, **QUIET, **SPREAD}

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**kept, **self._variables(), "OMP_NUM_THREADS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


# ------------------------------------------------------------------------------------------------ this machine


def _versions() -> dict[str, str]:
    try:
        ray = version("ray")
    except PackageNotFoundError:
        ray = "none"
    return {"python": platform.python_version(), "ray": ray}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _short_temp() -> str | None:
    """A folder of this node whose name leaves room for those of Ray's sockets."""
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        place = os.environ.get(name, "")
        if place and len(place) <= 24 and os.access(place, os.W_OK):
            return place
    return None


def _gpus() -> int | None:
    """GPUs of this job on this node; None where nothing is said of them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([each for each in shown.split(",") if each and each != "NoDevFiles"])
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if given.isdecimal() else None


def _of_ray(pid: int, temp: Path) -> bool:
    """Whether the process is still one of this Ray's, and not another that was given its number."""
    found = proc.read(pid)
    if found is None:
        return False
    told = " ".join([found.command, *(f"{name}={value}" for name, value in proc.environment(pid).items())])
    return "ray" in told and str(temp) in told


def _tail(path: Path, lines: int = 5) -> str:
    try:
        return " / ".join(path.read_text(errors="replace").strip().splitlines()[-lines:]) or "it wrote nothing"
    except OSError:
        return "it wrote nothing"
