"""RuleTable: primitive name -> rule. Registering twice is an error; a missing rule says what is covered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .errors import UnsupportedOp

F = TypeVar("F", bound=Callable)


class RuleTable(Generic[F]):
    """One table per job (access, lowering, spelling, ...), keyed by the primitive's name."""

    def __init__(self, job: str):
        self.job = job
        self._rules: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        def add(rule: F) -> F:
            for name in names:
                if name in self._rules:
                    raise AssertionError(f"{self.job} rule for {name} registered twice")
                self._rules[name] = rule
            return rule

        return add

    def get(self, name: str) -> F | None:
        return self._rules.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._rules))

    def lookup(self, name: str, *, operands: str = "", at: str | None = None) -> F:
        """The rule for `name`.

        Raises UnsupportedOp, naming operand types, user line and covered primitives.
        """
        rule = self._rules.get(name)
        if rule is None:
            raise UnsupportedOp(
                f"no {self.job} rule for primitive `{name}`",
                at=at,
                why=f"operands ({operands}); covered: {', '.join(self)}",
                hint="leave this operation to XLA, or write it with covered primitives",
            )
        return rule
