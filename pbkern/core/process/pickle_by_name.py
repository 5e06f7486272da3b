"""Pickling by name, as of functions, of objects that a module holds under their own name: decorators' results."""

from __future__ import annotations

import functools
import sys
from typing import Any


def global_name(x: Any) -> str | None:
    """The qualified name under which `x.__module__` holds x, None where it holds nothing or something else there."""
    module = sys.modules.get(getattr(x, "__module__", None) or "")
    name = getattr(x, "__qualname__", "")
    named = functools.reduce(
        lambda outer, part: getattr(outer, part, None), name.split("."), module
    )
    return name if named is x else None


class PickledByName:
    """Base of the objects that decorators return: one object in each process, as functions are.

    Copies are the object itself.

    Others, such as `g = jit(f)`, are pickled as `remade` says.
    """

    def remade(self) -> tuple:
        """(function, arguments) that make the object again, all of which can be pickled."""
        raise NotImplementedError

    def __reduce__(self) -> str | tuple:
        return global_name(self) or self.remade()

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self
