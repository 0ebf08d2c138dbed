"""Whether there is something to draw on: the display, an invisible one (Xvfb), and none at all.

Nothing here is `bad`: most envs draw nothing. Unity's players, and whatever else needs a window, do.
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

UNITY = (3, 2)  # the least OpenGL that its players take
TIMEOUT = 30.0  # seconds for a driver to answer, and for Xvfb to come up


def check_display() -> Finding:
    name = os.environ.get("DISPLAY")
    xvfb = shutil.which("Xvfb") is not None
    if not name and not xvfb:
        hint = "for envs that open a window: install Xvfb (Debian: xvfb), or load the site's module"
        return Finding("display", "note", "none, and no Xvfb to make one", hint)
    if not name:
        return Finding("display", "ok", "none; Xvfb makes one: xvfb-run -a tiltyard train ...")
    told = ask_driver("glx", name)
    if told.get("error") == "the display cannot be opened":
        return Finding("display", "note", f"DISPLAY={name} cannot be opened", "unset DISPLAY, or start it again")
    return Finding("display", "ok", f"{name} answers{'' if xvfb else '; no Xvfb'}")


def check_opengl() -> Finding:
    name = os.environ.get("DISPLAY")
    if not name:
        return Finding("opengl", "ok", "no display to ask")
    return judged("opengl", f"on display {name}", ask_driver("glx", name))


def check_opengl_xvfb() -> Finding:
    if shutil.which("Xvfb") is None:
        return Finding("gl xvfb", "ok", "no Xvfb to ask")
    with invisible_display() as name:
        told = ask_driver("glx", name) if name else {"error": "Xvfb does not start"}
    return judged("gl xvfb", "in Xvfb", told)


def check_opengl_offscreen() -> Finding:
    return judged("gl egl", "without a display", ask_driver("egl", None))


def judged(what: str, where: str, told: dict[str, str]) -> Finding:
    """What the driver told, and whether Unity can use it."""
    if "error" in told:
        hint = "for envs that draw with OpenGL: install a driver (Debian: libgl1-mesa-dri libegl1)"
        return Finding(what, "note", f"none {where}: {told['error']}", hint)
    found = f"{told['version']} {where}, {told['renderer']}"
    version = re.search(r"(\d+)\.(\d+)", told["version"])
    if version is None:
        return Finding(what, "note", f"{found}: the version cannot be told")
    if (int(version[1]), int(version[2])) < UNITY:
        return Finding(
            what, "note", found, "Unity needs OpenGL 3.2 or newer: update the driver, or use Mesa's llvmpipe"
        )
    return Finding(what, "ok", found)


def ask_driver(way: str, display: str | None) -> dict[str, str]:
    """What opengl.py prints in a process of its own; `error` where that crashes or never ends."""
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    if display is not None:
        environment["DISPLAY"] = display
    command = [sys.executable, "-m", "tiltyard.doctor.opengl", way]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        told: dict[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"the driver gave no answer for {TIMEOUT:.0f} s"}
    except (OSError, ValueError):
        return {"error": "the driver crashed when it was asked"}
    return told


@contextmanager
def invisible_display() -> Iterator[str | None]:
    """An Xvfb for as long as this lasts, by its name; None where it does not come up."""
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-screen", "0", "640x480x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[writing], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(writing)
    try:
        said = os.read(reading, 16).decode().strip() if select.select([reading], [], [], TIMEOUT)[0] else ""
        yield f":{said}" if said.isdecimal() else None
    finally:
        os.close(reading)
        server.terminate()
        try:
            server.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
