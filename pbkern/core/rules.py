"""RuleTable: primitive name -> rule. Registering twice is an error; a missing rule says what is covered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .errors import UnsupportedOp
from .ops.elementwise import ELEMENTWISE

F = TypeVar("F", bound=Callable)


class RuleTable(Generic[F]):
    """One table per job (access, lowering, spelling, ...), keyed by the primitive's name.

    A job that treats all elementwise primitives alike has one rule for them, beside those that it has by name.
    """

    def __init__(self, job: str):
        self.job = job
        self._rules: dict[str, F] = {}
        self._elementwise: F | None = None

    def elementwise(self, rule: F) -> F:
        """Registers the rule for every row of ELEMENTWISE that has none of its own."""
        if self._elementwise is not None:
            raise AssertionError(f"{self.job} rule for elementwise primitives registered twice")
        self._elementwise = rule
        return rule

    def register(self, *names: str) -> Callable[[F], F]:
        def add(rule: F) -> F:
            for name in names:
                if name in self._rules:
                    raise AssertionError(f"{self.job} rule for {name} registered twice")
                self._rules[name] = rule
            return rule

        return add

    def get(self, name: str) -> F | None:
        rule = self._rules.get(name)
        return self._elementwise if rule is None and name in ELEMENTWISE else rule

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        rows = ELEMENTWISE if self._elementwise is not None else ()
        return iter(sorted({*self._rules, *rows}))

    def lookup(self, name: str, *, operands: str = "", at: str | None = None) -> F:
        """The rule for `name`.

        Raises UnsupportedOp, naming operand types, user line and covered primitives.
        """
        rule = self.get(name)
        if rule is None:
            raise UnsupportedOp(
                f"no {self.job} rule for primitive `{name}`",
                at=at,
                why=f"operands ({operands}); covered: {', '.join(self)}",
                hint="leave this operation to XLA, or write it with covered primitives",
            )
        return rule
