"""Python's cyclic garbage collector, paused while a compilation runs.

A compilation makes a few hundred thousand small objects that live until it ends, so that the collector, which runs after
every 700 new ones, finds nothing and walks all that JAX has loaded again and again: a tenth to a fifth of the time of a
transformer block. What four blocks leave behind in cycles is 25 MB; the collector finds it once it goes on.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0  # that are under way, in any thread
_resume = False  # whether it ran before the first of them


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections while the body runs, also where several threads pause; one that was off stays off."""
    global _pauses, _resume
    with _lock:
        if _pauses == 0:
            _resume = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _resume:
                gc.enable()
