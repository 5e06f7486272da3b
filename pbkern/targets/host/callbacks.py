"""The process's side of jax.debug.print and checks in kernels: addresses of values -> NumPy arrays -> what receives them."""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np

from pbkern.lower.rules.debug_callbacks import SITES

_arrived = threading.local()  # addresses of one site's operands


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
def _trace(site: int, operand: int, address: int) -> None:
    """Called from compiled code, on its threads.

    Errors cannot pass through it: they are reported and dropped.
    """
    try:
        callback = SITES[site]
        types = (*callback.types, *callback.operands)
        arrived = _arrived.operands = [] if operand == 0 else _arrived.operands
        arrived.append(address)
        if len(arrived) == max(len(types), 1):
            values, operands = (
                zip(callback.types, arrived),
                zip(callback.operands, arrived[len(callback.types) :]),
            )
            callback.receive(
                [_read(*value) for value in values],
                lambda: [_read(*argument) for argument in operands],
            )
    except Exception as e:
        print(f"pbkern: a print or check in a kernel failed: {e!r}", file=sys.stderr)


def _read(of_type: tuple, address: int) -> np.ndarray:
    """A copy of the array at an address."""
    shape, dtype = of_type
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


ADDRESS = ctypes.cast(_trace, ctypes.c_void_p).value
