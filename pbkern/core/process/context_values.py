"""Values of context variables for the length of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def during(variable: ContextVar[T], value: T) -> Iterator[T]:
    """In a `with` block, and in this thread only, `variable` has `value`."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
