"""Shared memory of the driver and the workers."""

import subprocess
import sys

CODE = """
import os, resource
from tiltyard.engines.local.shared_memory import make_memory
from tiltyard.errors import TiltyardError
before = os.listdir("/proc/self/fd")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # of a file, in memory or not
os.close(make_memory(1 << 20))
try:
    make_memory(8 << 20)
except TiltyardError as error:
    print(error.message, error.hint)
assert os.listdir("/proc/self/fd") == before, "nothing stays open"
"""


def test_failed_allocation_raises_an_error_with_a_hint() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cannot allocate 8 MiB of shared memory") and "TMPDIR" in done.stdout
