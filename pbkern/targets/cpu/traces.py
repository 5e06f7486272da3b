"""The process's side of jax.debug.print and checks in kernels: addresses of values -> NumPy arrays -> what receives them."""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np

from ...lower.traces import SITES

_arrived = threading.local()


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
def _trace(site: int, operand: int, address: int) -> None:
    """Called from compiled code, on its threads. Errors cannot pass through it: they are reported and dropped."""
    try:
        s = SITES[site]
        values = _arrived.values = [] if operand == 0 else _arrived.values
        if s.types:
            shape, dtype = s.types[operand]
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            values.append(np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape))
        if len(values) == len(s.types):
            s.receive(*values)
    except Exception as e:
        print(f"pbkern: a print or check in a kernel failed: {e!r}", file=sys.stderr)


ADDRESS = ctypes.cast(_trace, ctypes.c_void_p).value
