"""Settings of the whole process that hold while at least one thread needs them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class WhileAny:
    """A context manager: `change()` when the first thread enters, `restore(what it returned)` when the last one leaves."""

    def __init__(self, change: Callable[[], Any], restore: Callable[[Any], None]):
        self._change, self._restore = change, restore
        # A finalizer that runs in `restore` may need the setting as well.
        self._lock, self._inside, self._before = threading.RLock(), 0, None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._before = self._change()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._restore(self._before)
