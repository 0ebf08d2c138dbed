"""The process of the doctor's job on every node: `python -m tiltyard.doctor.node_probe FOLDER NODES SECONDS`.

    FOLDER/NAME.here     the address and port on which this node listens
    FOLDER/NAME.lock     locked by this node until all have reported
    FOLDER/NAME.report   findings, versions, which other nodes could be reached, and whose locks are not seen

Every node connects to every other one that starts within SECONDS and gets its name and time as an answer. It also tries
to lock the other's file, which must fail.
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
from tiltyard.run import atomic, mutex

CONNECT_TIMEOUT = 10.0
HERE, LOCK, REPORT = ".here", ".lock", ".report"


def main() -> int:
    """Run the checks on this node and connect to the others."""
    folder, nodes, timeout = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with listening(f"{folder.name} {name}") as port, contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where no file can be locked
            held.enter_context(locking(folder, name))
        atomic.write_json(folder / f"{name}{HERE}", {"address": own_address(), "port": port})
        findings = [asdict(finding) for finding in run_checks()]
        wait_for(folder, HERE, nodes, timeout)
        answers = {peer: connect(folder, peer) for peer in nodes_with(folder, HERE) if peer != name}
        report = {
            "findings": findings,
            "versions": versions(),
            "clocks": {peer: answer for peer, answer in answers.items() if isinstance(answer, float)},
            "unreached": {peer: answer for peer, answer in answers.items() if isinstance(answer, str)},
            "unlocked": [peer for peer in answers if is_free(folder, peer)],
        }
        atomic.write_json(folder / f"{name}{REPORT}", report)
        wait_for(folder, REPORT, len(answers) + 1, timeout)  # other nodes may still connect
    return 0


def nodes_with(folder: Path, suffix: str) -> list[str]:
    """The nodes that have written a file with that suffix."""
    return sorted(path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}"))


def wait_for(folder: Path, suffix: str, nodes: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while len(nodes_with(folder, suffix)) < nodes and time.monotonic() < deadline:
        time.sleep(0.1)


@contextlib.contextmanager
def locking(folder: Path, name: str) -> Iterator[bool]:
    """Lock a node's file, if no other process seems to hold it; gives whether that succeeded."""
    handle = mutex.open_private(folder / f"{name}{LOCK}")
    try:
        yield mutex.try_lock(handle)
    finally:
        os.close(handle)


def is_free(folder: Path, peer: str) -> bool:
    """Whether the lock of another node, which holds it, is not seen here."""
    try:
        with locking(folder, peer) as locked:
            return locked
    except OSError:  # the node's own check says so, too
        return True


@contextlib.contextmanager
def listening(name: str) -> Iterator[int]:
    """Answer connections with `name` and the time; gives the port."""
    with socket.create_server(("", 0), backlog=1024) as server:
        threading.Thread(target=_answer, args=(server, name), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # close() alone does not wake accept()


def _answer(server: socket.socket, name: str) -> None:
    while True:
        try:
            peer, _ = server.accept()
        except OSError:  # the server is closed
            return
        with contextlib.suppress(OSError), peer:
            peer.sendall(json.dumps({"name": name, "time": time.time()}).encode())


def connect(folder: Path, peer: str) -> float | str:
    """Seconds by which the peer's clock is ahead of ours, or why it cannot be reached."""
    try:
        place = atomic.read_json(folder / f"{peer}{HERE}")
        where = f"{place['address']}:{place['port']}"
        before = time.time()
        with socket.create_connection((place["address"], place["port"]), timeout=CONNECT_TIMEOUT) as connection:
            answer = json.loads(connection.makefile().read())
        after = time.time()
    except TimeoutError:
        return f"{where} does not answer"
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    except ValueError:
        answer = {}
    if answer.get("name") != f"{folder.name} {peer}":
        return f"{where}: another program answers there"
    return float(answer["time"]) - (before + after) / 2


if __name__ == "__main__":
    sys.exit(main())
