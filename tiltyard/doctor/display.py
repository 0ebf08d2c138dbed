"""Checks of display and OpenGL: on the display, on a virtual one (Xvfb), and without any.

Nothing here is `bad`: most envs need no display. Unity players and other programs with a window do.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tiltyard.doctor.finding import Finding

UNITY = (3, 2)  # the oldest OpenGL version that Unity players accept
TIMEOUT = 30.0  # seconds for a driver to answer, and for Xvfb to start


def check_display() -> Finding:
    name = os.environ.get("DISPLAY")
    xvfb = shutil.which("Xvfb") is not None
    if not name and not xvfb:
        hint = "for envs that open a window: install Xvfb (Debian: xvfb), or load the site's module"
        return Finding("display", "note", "none, and Xvfb is not installed", hint)
    if not name:
        return Finding("display", "ok", "none; Xvfb can provide one: xvfb-run -a tiltyard train ...")
    answer = query_driver("glx", name)
    if answer.get("error") == "the display cannot be opened":
        return Finding("display", "note", f"DISPLAY={name} cannot be opened", "unset DISPLAY, or restart the X server")
    return Finding("display", "ok", f"{name} answers{'' if xvfb else '; no Xvfb'}")


def check_opengl() -> Finding:
    name = os.environ.get("DISPLAY")
    if not name:
        return Finding("opengl", "ok", "no display")
    return opengl_finding("opengl", f"on display {name}", query_driver("glx", name))


def check_opengl_xvfb() -> Finding:
    if shutil.which("Xvfb") is None:
        return Finding("gl xvfb", "ok", "no Xvfb")
    with virtual_display() as name:
        answer = query_driver("glx", name) if name else {"error": "Xvfb does not start"}
    return opengl_finding("gl xvfb", "in Xvfb", answer)


def check_opengl_offscreen() -> Finding:
    return opengl_finding("gl egl", "without a display", query_driver("egl", None))


def opengl_finding(what: str, where: str, answer: dict[str, str]) -> Finding:
    """The driver's answer, and whether Unity can use it."""
    if "error" in answer:
        hint = "for envs that draw with OpenGL: install a driver (Debian: libgl1-mesa-dri libegl1)"
        return Finding(what, "note", f"none {where}: {answer['error']}", hint)
    found = f"{answer['version']} {where}, {answer['renderer']}"
    version = re.search(r"(\d+)\.(\d+)", answer["version"])
    if version is None:
        return Finding(what, "note", f"{found}: unknown version")
    if (int(version[1]), int(version[2])) < UNITY:
        hint = "Unity needs OpenGL 3.2 or newer: update the driver, or use Mesa's llvmpipe"
        return Finding(what, "note", found, hint)
    return Finding(what, "ok", found)


def query_driver(way: str, display: str | None) -> dict[str, str]:
    """The output of opengl.py, run in a child process; `error` if that crashes or hangs."""
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    if display is not None:
        environment["DISPLAY"] = display
    command = [sys.executable, "-m", "tiltyard.doctor.opengl", way]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        answer: dict[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"the driver did not answer within {TIMEOUT:.0f} s"}
    except (OSError, ValueError):
        return {"error": "the driver crashed"}
    return answer


@contextmanager
def virtual_display() -> Iterator[str | None]:
    """Run Xvfb inside the `with` block; gives its display name, or None if it does not start."""
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-screen", "0", "640x480x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[writing], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(writing)
    try:
        number = os.read(reading, 16).decode().strip() if select.select([reading], [], [], TIMEOUT)[0] else ""
        yield f":{number}" if number.isdecimal() else None
    finally:
        os.close(reading)
        server.terminate()
        try:
            server.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
