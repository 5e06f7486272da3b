"""Names of operations in the text of a nest, where these are used twice or are tall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .expressions import Expr, Gather, Op

# Nested operations that a line of printed nests may show.
TALLEST_PRINTED = 8


def name_shared(every: Sequence[Expr], rows: list[str], indent: str) -> dict[int, str]:
    """Adds a row per operation that is used twice or stands on a tall stack of unnamed ones."""
    uses = Counter(id(arg) for node in every for arg in node.args)
    names: dict[int, str] = {}
    height: dict[int, int] = {}
    for expr in every:
        height[id(expr)] = 1 + max((height[id(arg)] for arg in expr.args), default=0)
        if isinstance(expr, Op | Gather) and (
            uses[id(expr)] > 1 or height[id(expr)] > TALLEST_PRINTED
        ):
            rows.append(f"{indent}v{len(names)} = {expr.text(names)}")
            names[id(expr)], height[id(expr)] = f"v{len(names)}", 0
    return names
