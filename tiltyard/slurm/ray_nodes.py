"""One Ray over all nodes of a job: the first node's agent starts the head, the others join it, all end together.

RUN/job/ray-JOB-RESTART/      readable only by the user; a requeued job has another folder
  token         the secret that every process of this Ray needs
  head.json     address and versions of the head, written when it answers
  NODE.json     written by a node's agent: it has joined, or why it has not
  end           written by the first node's agent when training is over

Ports are picked by binding them. `ray stop` is never called, because it would end every Ray of the user on the machine;
an agent ends only the processes that it has started.
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
from pathlib import Path
from types import FrameType
from typing import Any

from tiltyard.engines.rllib.allocation import ALLOCATION
from tiltyard.engines.rllib.ray_cluster import (
    DETECT_LOSS,
    QUIET,
    SHARED_PLACE,
    keep_logs,
    object_store_bytes,
    short_folder,
    token_variables,
)
from tiltyard.errors import TiltyardError
from tiltyard.processes import proc
from tiltyard.processes.lifetime import die_with
from tiltyard.processes.resources import own_address, usable_cores
from tiltyard.run import atomic
from tiltyard.run.logs import last_lines
from tiltyard.run.provenance import package_version
from tiltyard.slurm import FOLDER

POLL_SECONDS = 0.2
START_TIMEOUT = 120.0  # seconds for a head to answer on its port
STOP_TIMEOUT = 10.0  # seconds for Ray to end after SIGTERM
PORT_TRIES = 3
SPREAD = {"RAY_scheduler_spread_threshold": "0.0"}  # runners spread over all nodes instead of filling one by one


class RayProcess:
    """Ray's processes on this node: started, checked and ended, with a temporary folder that is removed afterwards."""

    def __init__(self, name: str, output: Path, token: Path) -> None:
        self.name, self.output, self.token = name, output, token
        self.temp: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, address: str, cpus: int) -> None:
        self.temp = short_folder(_short_temp())
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        command += [
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={address}",
            f"--node-name={self.name}",
            f"--temp-dir={self.temp}",
            f"--num-cpus={cpus}",
            f"--object-store-memory={object_store_bytes()}",
            *([f"--ray-client-server-port={_free_port()}"] if "--head" in options else []),
            f"--dashboard-agent-listen-port={_free_port()}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            *([f"--num-gpus={count}"] if (count := _gpus()) is not None else []),
        ]
        parent = os.getpid()

        def prepare() -> None:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # only the trainer handles the time limit
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with(parent)

        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment(), "OMP_NUM_THREADS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
                preexec_fn=prepare,
                start_new_session=True,
            )

    def exited(self, timeout: float = 0.0) -> bool:
        """Whether the process has exited, or does so within the timeout."""
        assert self.process is not None
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def answers(self, address: str, port: int) -> bool:
        """Wait until the port accepts connections; False if the process exits or START_TIMEOUT passes first."""
        deadline = time.monotonic() + START_TIMEOUT
        while self.process is not None and self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def stop(self) -> None:
        """End Ray on this node with all its child processes, keep its logs, remove its temporary folder."""
        if self.process is not None and self.temp is not None:
            started = {each.pid for each in proc.tree(self.process.pid)}
            if self.process.poll() is None:
                self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT)
            for pid in started | {each.pid for each in proc.tree(self.process.pid)}:
                if _of_ray(pid, self.temp):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        if self.temp is not None:
            keep_logs(self.temp, self.output.with_suffix(""))
            shutil.rmtree(self.temp.parent, ignore_errors=True)
            self.temp = None

    def environment(self) -> dict[str, str]:
        """The environment of processes that find this Ray."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        place = {SHARED_PLACE: str(self.temp.parent)} if self.temp is not None else {}
        return {**kept, **place, **token_variables(self.token), **DETECT_LOSS, **QUIET, **SPREAD}

    def last_words(self) -> str:
        return " / ".join(last_lines(self.output, 5)) or "it wrote nothing"


class RayNode:
    """This node's part of a job's Ray: `lead` on the first node, `serve` on the others."""

    def __init__(self, run: Path, task: Mapping[str, Any]) -> None:
        self.task = task
        job = os.environ.get("SLURM_HET_JOB_ID") or os.environ.get("SLURM_JOB_ID", "0")
        self.name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.folder = run / FOLDER / f"ray-{job}-{os.environ.get('SLURM_RESTART_COUNT') or 0}"
        self.process = RayProcess(self.name, run / "logs" / "ray" / f"{self.name}.out", self.folder / "token")
        self.events: list[str] = []  # sentences for the run's events
        self.terminated = False

    # -- the first node

    def lead(self, learners: int) -> dict[str, str]:
        """Start the head; returns the trainer's environment, by which it finds this Ray.

        In a heterogeneous job the first group only learns: it offers no CPUs to runners.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write_private(self.process.token, secrets.token_hex(32), 0o600)
        remote_learners = learners if learners > 1 else 0  # a single learner runs in the trainer's process
        cpus, taken = usable_cores(), max(1, learners)
        if self.task["samplers"]:
            cpus = taken = remote_learners
        for _ in range(PORT_TRIES):
            address, port = own_address(), _free_port()
            self.process.start("--head", f"--port={port}", "--include-dashboard=false", address=address, cpus=cpus)
            if self.process.answers(address, port):
                break
            self.process.stop()
        else:
            hint = f"its output is in {self.process.output}"
            raise TiltyardError(f"Ray's head did not start on {self.name}: {self.process.last_words()}", hint)
        nodes = [name for name in os.environ.get("TILTYARD_NODES", "").split(",") if name]
        allocation = {
            "address": f"{address}:{port}",
            "nodes": nodes or [self.name],
            "cpus": cpus + int(self.task["cpus_elsewhere"]) - taken,
            "wait": self.task["wait"],
            "folder": str(self.folder),
            "logs": str(self.process.output.parent),
        }
        atomic.write_json(self.folder / "head.json", {**allocation, **_versions()})
        self._publish("joined")
        return {**self.process.environment(), ALLOCATION: json.dumps(allocation)}

    def lost(self, timeout: float = 0.0) -> str:
        """A sentence if the head has exited, or does so within the timeout; else empty."""
        if not self.process.exited(timeout):
            return ""
        return f"Ray's head on {self.name} exited (its output is in logs/ray/{self.process.output.name})"

    def poll_events(self, reported: set[str]) -> Iterator[str]:
        """New sentences from other nodes' agents for the run's events; adds them to `reported`."""
        for path in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                for sentence in atomic.read_json(path).get("said", []):
                    if sentence not in reported:
                        reported.add(sentence)
                        yield str(sentence)

    def end(self) -> None:
        """Let the other nodes' agents exit, and end Ray on this node."""
        with contextlib.suppress(OSError):
            (self.folder / "end").touch()
        self.process.stop()
        self.process.token.unlink(missing_ok=True)

    # -- the other nodes

    def serve(self) -> None:
        """Join the head and stay until the first node ends the job's Ray. Ray is restarted here if it dies."""
        signal.signal(signal.SIGTERM, self._handle_sigterm)
        head = self._wait_for_head()
        if head is None:
            return
        ours, theirs = _versions(), {name: head[name] for name in _versions()}
        if ours != theirs:
            both = ", ".join(f"{name} {ours[name]} here, {theirs[name]} there" for name in ours)
            self._publish("failed", f"{self.name} cannot join Ray: versions differ from the head's: {both}")
            self._wait_for_end(lambda: False)
            return
        retries = int(self.task["retry"])
        for number in range(1, retries + 2):
            self.process.start(f"--address={head['address']}", address=own_address(), cpus=usable_cores())
            self._publish("joined")
            if self._wait_for_end(self.process.exited):
                break
            self.process.stop()
            if number <= retries:
                self._publish("lost", f"Ray died on {self.name}; restarting it ({number})")
        else:
            self._publish("failed", f"Ray died on {self.name}: {self.process.last_words()}")
            self._wait_for_end(lambda: False)
        self.process.stop()

    def _wait_for_head(self) -> dict[str, Any] | None:
        """The contents of head.json; None if the job's Ray ended first."""
        deadline = time.monotonic() + float(self.task["wait"])
        while not (self.folder / "head.json").exists():
            if self.terminated or (self.folder / "end").exists():
                return None
            if time.monotonic() > deadline:
                late = f"the first node did not start Ray within {self.task['wait']:g} s (slurm.wait)"
                raise TiltyardError(f"{late}, seen from {self.name}", f"see {self.folder}")
            time.sleep(POLL_SECONDS)
        return atomic.read_json(self.folder / "head.json")

    def _wait_for_end(self, failed: Callable[[], bool]) -> bool:
        """Wait until the job's Ray is ended; False if `failed` becomes true first."""
        while not (self.terminated or (self.folder / "end").exists()):
            if failed():
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _handle_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True  # Slurm signals every process of a job, including Ray's

    def _publish(self, state: str, sentence: str = "") -> None:
        """Write this node's state and events for the first node and the trainer."""
        self.events += [sentence] if sentence else []
        atomic.write_json(self.folder / f"{self.name}.json", {"node": self.name, "state": state, "said": self.events})


# ------------------------------------------------------------------------------------------------ this machine


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "ray": package_version("ray") or "none"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _short_temp() -> str | None:
    """A temporary folder of this node whose path is short enough for Ray's socket names."""
    places = (os.environ.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR"))
    return next((place for place in places if 0 < len(place) <= 24 and os.access(place, os.W_OK)), None)


def _gpus() -> int | None:
    """GPUs of this job on this node; None if no variable names them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([each for each in shown.split(",") if each and each != "NoDevFiles"])
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if given.isdecimal() else None


def _of_ray(pid: int, temp: Path) -> bool:
    """Whether the pid still belongs to this Ray and was not reused."""
    found = proc.read(pid)
    if found is None:
        return False
    text = " ".join([found.command, *(f"{name}={value}" for name, value in proc.environment(pid).items())])
    return "ray" in text and str(temp) in text
