"""Checks of the system: cores, memory, limits, threads, ports, the clock, LD_PRELOAD."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tiltyard.config.site_file import runs_root
from tiltyard.doctor.finding import Finding, State
from tiltyard.errors import TiltyardError
from tiltyard.processes import proc
from tiltyard.processes.resources import free_memory, usable_cores

LOW_MEMORY = 2 << 30
LOW_FILES, FEW_FILES = 1024, 256  # Ray and many workers open hundreds each; below the second number nothing works
LOW_PROCESSES, FEW_PROCESSES = 1000, 100  # still available to this user; threads count, and Ray starts hundreds
THREADS = 200  # started as a test
RAY_PORTS = (6379, 8265, 10001)  # of a Ray that was started by hand
PORTS = 32
CLOCK_TOLERANCE = 2.0  # seconds; beyond it, file times of one node mislead another


def check_cores(usable: int | None = None) -> Finding:
    allowed, here, load = usable or usable_cores(), os.cpu_count() or 1, os.getloadavg()[0]
    found = f"{allowed} of {here} usable, load {load:.1f}"
    if load > allowed and allowed == here:
        return Finding("cores", "note", found, "other programs use the cores: training will be slower")
    return Finding("cores", "ok", found)


def check_memory() -> Finding:
    return memory_finding(free_memory())


def memory_finding(free: int) -> Finding:
    state: State = "ok" if free > LOW_MEMORY else "note"
    return Finding("memory", state, f"{free / 2**30:.1f} GiB free", "" if state == "ok" else "use fewer envs")


def check_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _unlimited(soft) or soft >= LOW_FILES:
        return Finding("files", "ok", f"a process may open {_limit(soft)}")
    ask = "ask the administrators for a higher limit of open files (ulimit -n)"
    hint = f"ulimit -n {_limit(hard)}" if hard > soft else ask
    return Finding("files", "bad" if soft < FEW_FILES else "note", f"a process may open only {soft}", hint)


def check_processes(threads: int | None = None) -> Finding:
    """How many more this user may start. The limits of user and control group count threads too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    left = [] if _unlimited(soft) else [soft - (own_threads() if threads is None else threads)]
    with contextlib.suppress(OSError, ValueError):
        most, now = (int(Path(f"/sys/fs/cgroup/pids.{name}").read_text()) for name in ("max", "current"))
        left.append(most - now)
    if not left or min(left) >= LOW_PROCESSES:
        return Finding("processes", "ok", f"{min(left):,} more may be started" if left else "no limit")
    ask = "end unused processes, or ask the administrators for a higher ulimit -u"
    hint = f"ulimit -u {_limit(hard)}" if hard > soft or _unlimited(hard) else ask
    state: State = "bad" if min(left) < FEW_PROCESSES else "note"
    return Finding("processes", state, f"only {max(0, min(left))} more may be started, threads included", hint)


def check_threads() -> Finding:
    """Start some threads, to see whether that works."""
    gate, started = threading.Event(), []
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=gate.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        hint = "raise ulimit -u, ulimit -v or the job's process limit; or use smaller stacks: ulimit -s 1024"
        return Finding("threads", "bad", f"a process could start only {len(started)}", hint)
    finally:
        gate.set()
        for thread in started:
            thread.join()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > usable_cores():
        hint = f"export OMP_NUM_THREADS={usable_cores()}, or unset it"
        return Finding("threads", "note", f"OMP_NUM_THREADS={asked} on {usable_cores()} usable cores", hint)
    return Finding("threads", "ok", f"{THREADS} start at once{f', OMP_NUM_THREADS={asked}' if asked else ''}")


def own_threads() -> int:
    """The number of threads of all this user's processes."""
    return sum(process.threads for process in proc.own_processes())


def check_ports(usual: Sequence[int] = RAY_PORTS) -> Finding:
    """Bind free ports, connect to this machine by its own name, and look for a Ray on its usual ports."""
    with contextlib.ExitStack() as kept:
        try:
            bound = [kept.enter_context(socket.create_server(("", 0))) for _ in range(PORTS)]
        except OSError as error:
            return Finding("ports", "bad", f"none is available: {error.strerror}", "end programs that hold many ports")
        number = bound[0].getsockname()[1]
        for name in ("127.0.0.1", socket.gethostname()):
            try:
                socket.create_connection((name, number), timeout=10).close()
            except OSError as error:
                reason = f"cannot connect to this machine as {name}: {error.strerror or error}"
                hint = "make the host name resolve, and allow its own ports in the firewall"
                return Finding("ports", "bad", reason, hint)
        taken = [port for port in usual if not _free(port)]
    if taken:
        found = f"in use: {', '.join(map(str, taken))}, the usual ports of Ray"
        hint = "nothing to do: Tiltyard picks free ports; end a leftover Ray of your own"
        return Finding("ports", "note", found, hint)
    return Finding("ports", "ok", f"{PORTS} bound, this machine reached by its name")


def _free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def check_preload() -> Finding:
    listed = os.environ.get("LD_PRELOAD", "")
    if not listed:
        return Finding("preload", "ok", "LD_PRELOAD is not set")
    missing = [name for name in listed.replace(":", " ").split() if "/" in name and not Path(name).exists()]
    if missing:
        return Finding("preload", "bad", f"LD_PRELOAD names {missing[0]}, which does not exist", "unset LD_PRELOAD")
    hint = "unset LD_PRELOAD: it breaks Ray on many sites; jobs unset it unless slurm.keep_ld_preload is true"
    return Finding("preload", "note", f"LD_PRELOAD={listed}", hint)


def check_clock() -> Finding:
    """Compare the clock with that of the runs' file system, which is another machine's on a cluster."""
    try:
        place = existing(runs_root())
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"now")
            file.flush()
            off = time.time() - Path(file.name).stat().st_mtime
    except (OSError, TiltyardError) as error:
        return Finding("clock", "note", f"cannot compare: {error}")
    found = f"{off:+.1f} s against the file system of the runs"
    if abs(off) > CLOCK_TOLERANCE:
        return Finding("clock", "bad", found, "set this machine's clock (chronyc makestep), or ask the administrators")
    return Finding("clock", "ok", found)


def existing(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return path


def _unlimited(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY


def _limit(limit: int) -> str:
    return "unlimited" if _unlimited(limit) else str(limit)
