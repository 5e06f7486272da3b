"""Values that are made once, however many threads ask for them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, MutableMapping
from typing import Generic, TypeVar

Value = TypeVar("Value")


class MadeOnce(Generic[Value]):
    """Makes values by key and keeps them in `kept`; a thread that asks for one which another thread makes waits for it."""

    def __init__(self, kept: MutableMapping[Hashable, Value]):
        self.kept = kept
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, threading.Event] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `key`. Raises what `make` raises; others that wait then make it themselves."""
        while True:
            with self._lock:
                found = self.kept.get(key)
                if found is not None:
                    return found
                done = self._under_way.get(key)
                if done is None:
                    mine = self._under_way[key] = threading.Event()
                    break
            done.wait()
        try:
            value = self.kept[key] = make()
            return value
        finally:
            with self._lock:
                del self._under_way[key]
            mine.set()
