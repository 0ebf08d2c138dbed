"""The OpenGL driver's version: `python -m tiltyard.doctor.opengl glx|egl` prints JSON. A child, as drivers may crash.

    glx   through the X server in DISPLAY
    egl   without a display: the first device, then the software renderer

It requests a core profile of version 3.2, which Unity needs; older drivers report the version that they have.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

# GL/gl.h, GL/glx.h, EGL/egl.h, EGL/eglext.h
_VENDOR, _RENDERER, _VERSION = 0x1F00, 0x1F01, 0x1F02
_MAJOR, _MINOR, _PROFILE, _CORE = 0x2091, 0x2092, 0x9126, 1
_DRAWABLE_TYPE, _PBUFFER_BIT, _PBUFFER_HEIGHT, _PBUFFER_WIDTH, _RGBA_TYPE = 0x8010, 4, 0x8040, 0x8041, 0x8014
_DEVICE, _SURFACELESS, _OPENGL_API, _OPENGL_BIT = 0x313F, 0x31DD, 0x30A2, 8
_EGL_SURFACE_TYPE, _EGL_PBUFFER_BIT, _EGL_RENDERABLE, _EGL_WIDTH, _EGL_HEIGHT = 0x3033, 1, 0x3040, 0x3057, 0x3056
_EGL_MAJOR, _EGL_MINOR, _EGL_PROFILE, _EGL_NONE = 0x3098, 0x30FB, 0x30FD, 0x3038


class Refused(Exception):
    """The driver or the display refused a request."""


def _ints(*values: int) -> Any:
    return (c_int * len(values))(*values)


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise Refused(f"{name} not found") from error


def _function(library: Any, name: str, answer: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = answer, list(arguments)
    return function


def _strings(library: Any) -> dict[str, str]:
    """Version, renderer and vendor of the current context."""
    get = _function(library, "glGetString", c_char_p, c_uint)
    names = {"version": _VERSION, "renderer": _RENDERER, "vendor": _VENDOR}
    found = {name: (get(number) or b"").decode(errors="replace") for name, number in names.items()}
    if not found["version"]:
        raise Refused("the driver reports no version")
    return found


def glx() -> dict[str, str]:
    """OpenGL through the X server in DISPLAY."""
    x11, gl = _library("libX11.so.6"), _library("libGL.so.1")
    display = _function(x11, "XOpenDisplay", c_void_p, c_char_p)(None)
    if not display:
        raise Refused("the display cannot be opened")
    # The default handler ends the process.
    handler = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)(lambda display, error: 0)
    _function(x11, "XSetErrorHandler", c_void_p, c_void_p)(handler)
    count = c_int()
    choose = _function(gl, "glXChooseFBConfig", POINTER(c_void_p), c_void_p, c_int, POINTER(c_int), POINTER(c_int))
    wanted = _ints(_DRAWABLE_TYPE, _PBUFFER_BIT, 0)
    configs = choose(display, _function(x11, "XDefaultScreen", c_int, c_void_p)(display), wanted, byref(count))
    if not configs or not count.value:
        raise Refused("the display has no usable GLX configuration")
    config = c_void_p(configs[0])
    size = _ints(_PBUFFER_WIDTH, 8, _PBUFFER_HEIGHT, 8, 0)
    buffer = _function(gl, "glXCreatePbuffer", c_void_p, c_void_p, c_void_p, POINTER(c_int))(display, config, size)
    find = _function(gl, "glXGetProcAddressARB", c_void_p, c_char_p)
    context = None
    if address := find(b"glXCreateContextAttribsARB"):
        create = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))(address)
        context = create(display, config, None, 1, _ints(_MAJOR, 3, _MINOR, 2, _PROFILE, _CORE, 0))
    if not context:
        plain = _function(gl, "glXCreateNewContext", c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int)
        context = plain(display, config, _RGBA_TYPE, None, 1)
    enter = _function(gl, "glXMakeContextCurrent", c_int, c_void_p, c_void_p, c_void_p, c_void_p)
    if not context or not enter(display, buffer, buffer, context):
        raise Refused("the display refused a context")
    return _strings(gl)


def egl() -> dict[str, str]:
    """OpenGL without a display."""
    library, reasons = _library("libEGL.so.1"), ["no device and no software renderer"]
    for display in _egl_displays(library):
        try:
            return _egl_on(library, display)
        except Refused as error:
            reasons.append(str(error))
    raise Refused(reasons[-1])


def _egl_displays(library: Any) -> Iterator[int]:
    find = _function(library, "eglGetProcAddress", c_void_p, c_char_p)
    address = find(b"eglGetPlatformDisplayEXT")
    if not address:
        raise Refused("EGL is too old to render without a display")
    of_platform = ctypes.CFUNCTYPE(c_void_p, c_uint, c_void_p, c_void_p)(address)
    if address := find(b"eglQueryDevicesEXT"):
        query = ctypes.CFUNCTYPE(c_uint, c_int, c_void_p, POINTER(c_int))(address)
        devices, count = (c_void_p * 16)(), c_int()
        if query(16, devices, byref(count)):
            for device in devices[: count.value]:
                if display := of_platform(_DEVICE, device, None):
                    yield display
    if display := of_platform(_SURFACELESS, None, None):
        yield display


def _egl_on(library: Any, display: int) -> dict[str, str]:
    pointer = POINTER(c_int)
    if not _function(library, "eglInitialize", c_uint, c_void_p, pointer, pointer)(display, None, None):
        raise Refused("EGL does not start")
    if not _function(library, "eglBindAPI", c_uint, c_uint)(_OPENGL_API):
        raise Refused("EGL has no OpenGL")
    config, count = c_void_p(), c_int()
    choose = _function(library, "eglChooseConfig", c_uint, c_void_p, pointer, POINTER(c_void_p), c_int, pointer)
    wanted = _ints(_EGL_SURFACE_TYPE, _EGL_PBUFFER_BIT, _EGL_RENDERABLE, _OPENGL_BIT, _EGL_NONE)
    if not choose(display, wanted, byref(config), 1, byref(count)) or not count.value:
        raise Refused("EGL has no OpenGL configuration")
    size = _ints(_EGL_WIDTH, 8, _EGL_HEIGHT, 8, _EGL_NONE)
    make = _function(library, "eglCreatePbufferSurface", c_void_p, c_void_p, c_void_p, pointer)
    surface = make(display, config, size)
    create = _function(library, "eglCreateContext", c_void_p, c_void_p, c_void_p, c_void_p, pointer)
    modern = _ints(_EGL_MAJOR, 3, _EGL_MINOR, 2, _EGL_PROFILE, _CORE, _EGL_NONE)
    context = create(display, config, None, modern) or create(display, config, None, None)
    enter = _function(library, "eglMakeCurrent", c_uint, c_void_p, c_void_p, c_void_p, c_void_p)
    if not context or not enter(display, surface, surface, context):
        raise Refused("EGL refused a context")
    return _strings(_library("libGL.so.1"))


def main() -> int:
    """Print the driver's strings, or the error."""
    try:
        found = {"glx": glx, "egl": egl}[sys.argv[1]]()
    except Refused as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
