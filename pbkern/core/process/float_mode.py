"""The processor's mode for floats, which a thread has for itself."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import sys
from collections.abc import Iterator

# Room for C's fenv_t. Bytes; 32 on x86-64, 8 on AArch64 (glibc, bits/fenv.h).
ENVIRONMENT_BYTES = 64
# FE_DFL_ENV, the environment in which a program starts (glibc, bits/fenv.h).
DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C library's functions of floats; None where FE_DFL_ENV is another value."""
    name = ctypes.util.find_library("m") if sys.platform == "linux" else None
    return ctypes.CDLL(name) if name else None


@contextlib.contextmanager
def subnormals_kept() -> Iterator[None]:
    """In the block, arithmetic and comparisons of this thread keep subnormal numbers: XLA's threads take them for zeros."""
    library = _library()
    if library is None:
        yield
        return
    before = ctypes.create_string_buffer(ENVIRONMENT_BYTES)
    library.fegetenv(before)
    library.fesetenv(DEFAULT_ENVIRONMENT)
    try:
        yield
    finally:
        library.fesetenv(before)
