"""Processes read from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tiltyard.processes import proc

CHILD = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"


def test_process_and_its_descendants_are_read() -> None:
    began = time.time()
    environment = {**os.environ, "MARK": "a b"}
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        found = proc.tree(child.pid)
        assert [each.pid for each in found] == [child.pid, grandchild]
        assert found[1].command == "sleep 100" and found[1].parent == child.pid
        assert found[0].threads == 1 and found[0].rss > 1e6 and abs(found[0].started - began) < 10
        assert 0 < (proc.pss(child.pid) or 0) <= found[0].rss * 1.1
        assert proc.environment(child.pid)["MARK"] == "a b"
        assert {child.pid, grandchild} <= {each.pid for each in proc.own_processes()}
    finally:
        os.kill(grandchild, 9)
        child.wait(100)
    assert proc.read(child.pid) is None
    assert proc.environment(child.pid) == {} and proc.pss(child.pid) is None
