"""Lifetime of a program's machine code: it stays while Python, or an executable of XLA's, may still call it.

XLA keeps the addresses of handlers, and executables outlive the functions they were made of. So
each of them counts: when XLA makes an executable it calls the program's @pbk_instantiate, which
adds one to a number in the program's own memory, and when the executable goes, @pbk_drop takes it
away again (runtime/xla.py). Code goes once nothing in Python refers to it and the number is zero.
What XLA registered under its name is never called again: names are given once.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import jax

from pbkern import _jax

from .objects.elf_loader import Image
from .runtime.arena import ARENAS

_waiting: list[Image] = []  # of programs that Python has forgotten and executables may still call


class _TypeInfo(ctypes.Structure):
    """XLA_FFI_TypeInfo."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


@functools.cache
def register_state(runtime: Image) -> _TypeInfo:
    """Makes the numbers known to XLA as states of handlers, once; `runtime` is the image of the runtime's functions."""
    info = _TypeInfo(ctypes.sizeof(_TypeInfo), None, runtime.address("pbk_drop"))
    capsules: Any = {
        "type_id": jax.ffi.pycapsule(runtime.address("pbk_state_type")),
        "type_info": jax.ffi.pycapsule(ctypes.addressof(info)),
    }
    jax.ffi.register_ffi_type("pbkern_program", capsules, platform="cpu")
    _hold(runtime)
    _hold(info)
    return info


def _hold(x: Any) -> None:
    """x stays, also when Python takes its modules apart as the process ends: executables may go later still."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))


def _let_go(x: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(x))


def register(name: str, image: Image) -> None:
    """Makes a program's handler callable by XLA under this name."""
    stages = {
        "instantiate": image.address("pbk_instantiate"),
        "execute": image.address("pbk_handler"),
    }
    jax.ffi.register_ffi_target(
        name, {kind: jax.ffi.pycapsule(stage) for kind, stage in stages.items()}, platform="cpu"
    )


def free_with(owner: Any, image: Image) -> None:
    """Frees the code some time after `owner` has gone."""
    _jax.on_clear_caches(sweep)
    sweep()
    _hold(image)
    weakref.finalize(
        owner, _retire, image
    ).atexit = False  # executables may run until the process ends


def _retire(image: Image) -> None:
    _waiting.append(image)
    sweep()


def sweep() -> None:
    """Frees the code that nothing calls any more."""
    for _ in range(len(_waiting)):
        image = _waiting.pop(0)
        if executables(image):
            _waiting.append(image)
        else:
            free_arenas(image)
            _let_go(image)


def executables(image: Image) -> int:
    """Counts XLA's executables that may call the code."""
    return ctypes.c_int64.from_address(image.address("pbk_held")).value


def free_arenas(image: Image) -> None:
    """Gives back the temporaries that a program keeps from call to call."""
    for place in (ctypes.c_int64 * (2 * ARENAS)).from_address(image.address("pbk_pool"))[1::2]:
        if place:
            ctypes.CDLL(None).free(ctypes.c_void_p(place))
