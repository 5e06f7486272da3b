"""Values that are made once, however many threads ask for them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, MutableMapping
from typing import Generic, TypeVar

Value = TypeVar("Value")


class MadeOnce(Generic[Value]):
    """Makes values by key and keeps them in `objects`; a thread that asks for one which another thread makes waits for it."""

    def __init__(self, objects: MutableMapping[Hashable, Value]):
        self.objects = objects
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, threading.Event] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `key`. Raises what `make` raises; others that wait then make it themselves."""
        while True:
            with self._lock:
                known = self.objects.get(key)
                if known is not None:
                    return known
                done = self._under_way.get(key)
                if done is None:
                    mine = self._under_way[key] = threading.Event()
                    break
            done.wait()
        try:
            value = self.objects[key] = make()
            return value
        finally:
            with self._lock:
                del self._under_way[key]
            mine.set()
