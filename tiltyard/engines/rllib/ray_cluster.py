"""Ray for one run: started for this run and ended with it, or an existing one that the run joins.

    engine.address not set   our own Ray: one node, or `engine.nodes` emulated on this machine
    engine.address           a running one, which is left unchanged
    allocation()             the one that a job's agents have started on its nodes (slurm/ray_nodes.py)

Our own Ray has a token that only this user's processes know, its own temporary folder, no dashboard and no usage
statistics. It ignores RAY_ADDRESS and other Rays on this machine. Its logs are kept with the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiltyard.config.sections import Engine
from tiltyard.engines.rllib.allocation import allocation, wait_for_nodes
from tiltyard.errors import TiltyardError, UseError
from tiltyard.processes.resources import free_memory, usable_cores
from tiltyard.run import atomic
from tiltyard.run.provenance import package_version

FOLDER_PREFIX = "ty-"  # of Ray's temporary folders
INSTALL = "pip install 'tiltyard[ray]'"
STORE = 0.5  # default GiB of Ray's object store
LONGEST_LOG = 2**20  # bytes that are kept of each of Ray's logs
SMALLEST_STORE = 80 * 2**20  # bytes: Ray refuses less
DETECT_LOSS = {  # notice a lost node after seconds instead of a minute
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# Variable: below this folder, in ray/ray_current_cluster, Ray notes and reads the newest address. The default is /tmp,
# which all users of a machine share: the file may be another user's, or a FIFO.
SHARED_PLACE = "RAY_TMPDIR"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS": "0"}


def require_ray() -> None:
    """UseError with the command to type, unless Ray RLlib is installed."""
    found = package_version("ray")
    if found is None:
        raise UseError("engine.kind = rllib needs Ray RLlib, which is not installed", INSTALL)
    if not found.startswith("2.60."):
        raise UseError(f"engine.kind = rllib needs Ray 2.60, but {found} is installed", INSTALL)
    if any(find_spec(name) is None for name in ("tree", "lz4", "ormsgpack")):
        raise UseError("Ray is installed without the packages that RLlib needs", INSTALL)


@dataclass(frozen=True)
class Needs:
    """What a run's processes need: one CPU each, and the learners' GPUs."""

    runners: int
    learners: int
    gpus: float

    @property
    def cpus(self) -> int:
        return self.runners + self.learners

    def check(self, cpus: float, gpus: float, where: str) -> None:
        """UseError if the processes do not fit: Ray would wait for resources forever."""
        if self.cpus > cpus:
            wanted = f"engine.runners = {self.runners} and {self.learners} learner processes need {self.cpus} CPUs"
            hint = f"set engine.runners={max(0, int(cpus) - self.learners)}, or a larger engine.cpus"
            raise UseError(f"{wanted}, but {where} has {cpus:g}", hint)
        if self.gpus > gpus:
            wanted = f"the learners need {self.gpus:g} GPUs"
            raise UseError(f"{wanted}, but {where} has {gpus:g}", "set engine.device=cpu, or engine.gpus")


def object_store_bytes(gib: float | None = None) -> int:
    """The size of Ray's object store, by default STORE and at most an eighth of the free memory."""
    return max(SMALLEST_STORE, int((gib or min(STORE, free_memory() / 2**30 / 8)) * 2**30))


class Cluster:
    """The Ray that this process is connected to."""

    def __init__(self, engine: Engine, needs: Needs, logs: Path | None) -> None:
        self.engine, self.logs, self._closed = engine, logs, False
        self._emulated: Any = None  # Ray's cluster of emulated nodes
        self._temp: Path | None = None
        self._before = {
            name: os.environ.get(name)
            for name in ("RAY_ADDRESS", SHARED_PLACE, *token_variables(Path()), *DETECT_LOSS, *QUIET)
        }
        self.job = allocation() if engine.address is None else None
        own = engine.address is None and self.job is None
        if own:
            import torch

            cpus, gpus = (engine.cpus or usable_cores()) * engine.nodes, torch.cuda.device_count()
            needs.check(cpus, gpus, "this machine" if engine.nodes == 1 else f"{engine.nodes} emulated nodes")
        with self.redirect_stderr():
            self._connect(own)
        if not own:
            import ray

            found = ray.cluster_resources()
            try:
                where = f"the cluster at {engine.address}" if self.job is None else "the job"
                needs.check(found.get("CPU", 0), found.get("GPU", 0), where)
            except UseError:
                self.close()
                raise

    def _connect(self, own: bool) -> None:
        os.environ.update(QUIET)
        if self.engine.address is None:
            os.environ.pop("RAY_ADDRESS", None)
        if own:
            self._temp = short_folder(self.engine.temp_dir)
            os.environ.update({**DETECT_LOSS, **token_variables(_token_file()), SHARED_PLACE: str(self._temp.parent)})
            os.environ.pop("RAY_AUTH_TOKEN", None)
        import ray

        _reload_ray_environment()
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        address = self.engine.address if self.job is None else self.job.address
        store = {"object_store_memory": object_store_bytes(self.engine.object_store)}
        try:
            with _signals_kept():
                if own and self.engine.nodes == 1:
                    address = "local"
                    options |= {"num_cpus": self.engine.cpus or usable_cores(), "include_dashboard": False}
                    options |= {"_temp_dir": str(self._temp), **store}
                elif own:
                    address = self._start_emulated_nodes(store)
                ray.init(address=address, **options)
            if self.job is not None:
                wait_for_nodes(self.job)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self.close()
            cluster = f"engine.address = {self.engine.address}" if self.job is None else "the job's own Ray"
            where = "Ray could not be started" if own else f"{cluster}: no Ray answers there"
            hint = "its logs are in the run's logs/ray" if own else "check the address and RAY_AUTH_TOKEN_PATH"
            raise TiltyardError(f"{where}: {str(error).splitlines()[0]}", hint) from error

    def _start_emulated_nodes(self, store: dict[str, int]) -> str:
        """Start emulated nodes; returns their address. The head has no CPUs, so that runners are never lost with it."""
        from ray.cluster_utils import Cluster as Nodes

        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(self._temp)}
        self._emulated = Nodes(initialize_head=False)
        self._emulated.add_node(**head, **store)
        for _ in range(self.engine.nodes):
            self._emulated.add_node(num_cpus=self.engine.cpus or usable_cores(), **store)
        return str(self._emulated.address)

    @contextlib.contextmanager
    def redirect_stderr(self) -> Iterator[None]:
        """Send Ray's terminal output to driver.log, also what its loggers write later."""
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
        place = os.devnull if self.logs is None else self.logs / "driver.log"
        sys.stderr.flush()
        terminal = os.dup(2)
        try:
            with Path(place).open("ab") as log:
                os.dup2(log.fileno(), 2)
            yield
            for name in [each for each in logging.root.manager.loggerDict if each.split(".")[0] == "ray"]:
                logger = logging.getLogger(name)
                for handler in [each for each in logger.handlers if isinstance(each, logging.StreamHandler)]:
                    logger.removeHandler(handler)
                    logger.addHandler(logging.FileHandler(place))
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)

    def nodes(self) -> dict[str, str]:
        """Names of the nodes that are alive, by id; the beginning of the id if the name is only the address."""
        import ray

        return {
            node["NodeID"]: node["NodeID"][:8] if node["NodeName"] == node["NodeManagerAddress"] else node["NodeName"]
            for node in ray.nodes()
            if node["Alive"]
        }

    def describe(self) -> str:
        import ray

        found = ray.cluster_resources()
        nodes = len(self.nodes()) - (self._emulated is not None)
        what = f"{found.get('CPU', 0):g} CPUs" + (f", {found['GPU']:g} GPUs" if found.get("GPU") else "")
        if self.job is not None:
            return f"Ray on the job's {nodes} nodes, {what}"
        if self.engine.address is not None:
            return f"Ray at {self.engine.address}, {what} on {nodes} node{'s' if nodes > 1 else ''}"
        return f"its own Ray, {what}" + (f" on {nodes} emulated nodes" if self._emulated is not None else "")

    def close(self) -> None:
        """End what was started here, keep its logs, restore the environment."""
        import ray

        if self._closed:
            return
        self._closed = True
        with _signals_kept():
            ray.shutdown()
            if self._emulated is not None:
                self._emulated.shutdown()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reload_ray_environment()
        if self._temp is not None:
            if self.logs is not None:
                keep_logs(self._temp, self.logs)
            shutil.rmtree(self._temp.parent, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ place and token

_tokens: list[Path] = []  # of this process; Ray reads it only once


def token_variables(file: Path) -> dict[str, str]:
    """The variables by which Ray's processes find their token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def _reload_ray_environment() -> None:
    """Make Ray read its environment variables again, which it cached when it was imported."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _token_file() -> Path:
    """The token file of this process, readable only by this user."""
    import atexit

    if not _tokens or not _tokens[0].exists():
        folder = Path(tempfile.mkdtemp(prefix="tiltyard-token-"))  # 0700
        _tokens[:] = [folder / "token"]
        atomic.write_private(_tokens[0], secrets.token_hex(32), 0o600)
        owner = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return _tokens[0]


_locks: list[int] = []  # locks on this process's folders, which show that it is alive


def short_folder(parent: str | None) -> Path:
    """Make a folder with a short path, inside one that only this user can enter: Ray opens its own to all users.

    It is called r, beside a folder ray for SHARED_PLACE. Folders of killed processes are removed.
    """
    place = Path(parent or "/tmp")
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place)
        outer = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
        (outer / "ray").mkdir()
        lock = os.open(outer / "new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (outer / "new").rename(outer / "lock")
        _locks.append(lock)
    except OSError as error:
        hint = "set it to a folder that you may write to"
        raise UseError(f"engine.temp_dir = {parent}: {error.strerror or error}", hint) from None
    return outer / "r"


def _remove_abandoned(place: Path) -> None:
    for lock in place.glob(f"{FOLDER_PREFIX}*/lock"):
        with contextlib.suppress(OSError):
            # What belongs to another user is not opened: it may be a FIFO, which would block.
            if {lock.parent.lstat().st_uid, lock.lstat().st_uid} != {os.geteuid()} or lock.is_symlink():
                continue
            with lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its owner is alive
                shutil.rmtree(lock.parent, ignore_errors=True)


def keep_logs(place: Path, logs: Path) -> None:
    """Copy the last part of the logs of Ray's newest session."""
    for session in sorted(place.glob("session_2*"))[-1:]:
        for file in (session / "logs").glob("*"):
            if file.is_file() and file.stat().st_size and file.suffix in (".log", ".err", ".out"):
                logs.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError), file.open("rb") as source:
                    source.seek(max(0, file.stat().st_size - LONGEST_LOG))
                    (logs / file.name).write_bytes(source.read())


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep our signal handlers. Ray's own would exit in the middle of its start, which looks like an exit of an env."""
    from ray._private import utils

    kept = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    set_handler, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        for name, handler in kept.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread, or not a Python handler
                signal.signal(name, handler)
