"""Location of an operation -> UserLine: the user's line that it was written at, where the program tells it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pbkern import _jax
from pbkern._user_lines import UserLine
from pbkern.core.lazy_dataclass import dataclass

TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"(?::(\d+):(\d+))?')
PARSED = "-"  # MLIR's parser calls the file of a text without locations so
LIBRARIES = re.compile(r"[/\\](tensorflow|keras|tf_keras)[/\\]")


def names_a_line(location: Any) -> bool:
    """Whether an MLIR location has a file and a line."""
    return any(line for _, line, _ in TOKEN.findall(str(location)))


@dataclass(frozen=True)
class SourcePlaces:
    """Finds the places of a program's operations.

    Attributes:
      file: stands for the program's own text, whose lines are places where the program names no
        others.
      named: place by the name of an operation, where only the framework that it comes from knows
        it.
    """

    file: str = "program"
    named: Mapping[str, UserLine] = field(default_factory=dict)

    def of(self, op: Any) -> UserLine | None:
        """The innermost line that is no line of TensorFlow's own, else what the operation's name is known for."""
        tokens = TOKEN.findall(str(op.location))
        function = ""
        for text, line, column in tokens:
            if line and not LIBRARIES.search(text):
                name = self.file if text == PARSED else text
                return UserLine(name, int(line), int(column), function or "program")
            function = text if not line else ""
        known = (self.named[text] for text, line, _ in tokens if not line and text in self.named)
        return next(known, None)

    def context(self, op: Any) -> contextlib.AbstractContextManager:
        """Equations bound inside belong to the operation's place; without one, to the place around them."""
        place = self.of(op)
        if place is None:
            return contextlib.nullcontext()
        return _jax.context_of_line(place)
