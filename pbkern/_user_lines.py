"""Places in a user's code: as text, and as frames that tracebacks show. What JAX knows of them is in _jax.py."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, NoReturn


class UserLine(NamedTuple):
    """A place in a user's code. Its text is `file:line:column (function)`, without a column that nobody knows."""

    file: str
    line: int
    column: int
    function: str

    def __str__(self) -> str:
        column = f":{self.column}" if self.column else ""
        return f"{self.file}:{self.line}{column} ({self.function})"

    def called(self, function: Callable[[], Any]) -> Any:
        """The result of a call from code that is compiled to be at this line."""
        place = {
            "lineno": self.line,
            "col_offset": self.column,
            "end_lineno": self.line,
            "end_col_offset": self.column + 1,
        }
        call = ast.Call(ast.Name("called", ast.Load(), **place), [], [], **place)
        code = compile(ast.Expression(call), self.file, "eval").replace(
            co_name=self.function, co_qualname=self.function
        )
        return eval(code, {"called": function})


def line_of_frame(code: CodeType, line: int, instruction: int) -> UserLine:
    """The place of an instruction in Python code."""
    column = next(itertools.islice(code.co_positions(), instruction // 2, None), (0, 0, 0))[2]
    return UserLine(code.co_filename, line, column or 0, code.co_qualname)


def raise_at(error: Exception, line: UserLine | None) -> NoReturn:
    """Raises the error, with a frame of the user's line in its traceback where that is known."""

    def fail() -> NoReturn:
        raise error from None

    if line is not None:
        line.called(fail)
    fail()
