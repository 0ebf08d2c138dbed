"""What the doctor's job starts on every node: `python -m tiltyard.doctor.node_probe FOLDER NODES SECONDS`.

    FOLDER/NAME.here     where this node listens, as soon as it does
    FOLDER/NAME.report   the findings, the versions, and how the other nodes could be reached

Every node connects to every other one that has come up within so many seconds; who is called answers with its name and
its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tiltyard.doctor.checkup import run_checks
from tiltyard.doctor.software import versions
from tiltyard.processes.resources import own_address
from tiltyard.run import atomic

CALL = 10.0
HERE, REPORT = ".here", ".report"


def main() -> int:
    """This node's part of the visit."""
    folder, nodes, patience = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with listening(f"{folder.name} {name}") as port:
        atomic.write_json(folder / f"{name}{HERE}", {"address": own_address(), "port": port})
        findings = [asdict(finding) for finding in run_checks()]
        wait_for(folder, HERE, nodes, patience)
        called = {peer: call(folder, peer) for peer in named(folder, HERE) if peer != name}
        report = {
            "findings": findings,
            "versions": versions(),
            "clocks": {peer: told for peer, told in called.items() if isinstance(told, float)},
            "unreached": {peer: told for peer, told in called.items() if isinstance(told, str)},
        }
        atomic.write_json(folder / f"{name}{REPORT}", report)
        wait_for(folder, REPORT, len(called) + 1, patience)  # somebody may still want to call
    return 0


def named(folder: Path, ending: str) -> list[str]:
    """The nodes that have written a file of that ending."""
    return sorted(path.name.removesuffix(ending) for path in folder.glob(f"*{ending}"))


def wait_for(folder: Path, ending: str, nodes: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while len(named(folder, ending)) < nodes and time.monotonic() < deadline:
        time.sleep(0.1)


@contextlib.contextmanager
def listening(name: str) -> Iterator[int]:
    """Answer whoever calls, with `name` and the time; gives the port."""
    with socket.create_server(("", 0), backlog=1024) as server:
        threading.Thread(target=_answer, args=(server, name), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # closing alone does not wake who waits for a call


def _answer(server: socket.socket, name: str) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:  # closed: the visit is over
            return
        with contextlib.suppress(OSError), caller:
            caller.sendall(json.dumps({"name": name, "time": time.time()}).encode())


def call(folder: Path, peer: str) -> float | str:
    """How many seconds the other node's clock is ahead of ours, or why it cannot be reached."""
    try:
        place = atomic.read_json(folder / f"{peer}{HERE}")
        where = f"{place['address']}:{place['port']}"
        before = time.time()
        with socket.create_connection((place["address"], place["port"]), timeout=CALL) as line:
            told = json.loads(line.makefile().read())
        after = time.time()
    except TimeoutError:
        return f"{where} gives no answer"
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    except ValueError:
        return f"{where}: somebody else answers there"
    if told.get("name") != f"{folder.name} {peer}":
        return f"{where}: somebody else answers there"
    return float(told["time"]) - (before + after) / 2


if __name__ == "__main__":
    sys.exit(main())
