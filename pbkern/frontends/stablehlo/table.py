"""The table of operations.

    @rule("stablehlo.iota")
    def iota(op, ...): ...

A rule gets the Operation and its operands, arrays of JAX or constants of NumPy, and returns one
array, or a sequence of them if the operation has several results. A check looks at an operation
before anything is traced and returns why its rule does not cover it, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pbkern.core.rules import RuleTable

RULES: RuleTable[Callable[..., Any]] = RuleTable("StableHLO")
CHECKS: RuleTable[Callable[[Any], str | None]] = RuleTable("StableHLO check")


def rule(*names: str) -> Callable:
    """Registers a rule for operations by name, such as "stablehlo.add"."""
    return RULES.register(*names)


def check(*names: str) -> Callable:
    """Registers a check: MLIR operation -> why it cannot be imported, or None."""
    return CHECKS.register(*names)


def names() -> list[str]:
    """Operations that are imported, in order."""
    return sorted(RULES)
