"""Operations that LLVM compiles without end, or wrongly -> operations that compute the same, and that it compiles.

LLVM 22 to 24 move a shuffle of 64 bytes, as of numbers that are repeated, before the operation that
made them, and back,
without end. They do not move what an empty assembly statement returns. Found by random graphs:
jnp.repeat(jnp.minimum(x, 3), 2, axis=1) of uint8.

LLVM 24 confuses two of eight float64. A shuffle moves the second one to the front, and only a comparison of that lane is
read, as in the last one of 9 or 17 rows: LLVM then compares the first one. Its selection of instructions makes the fault,
at all levels. It does not make it where an empty assembly statement returns the shuffled vector. Found by random programs:
sum((x[:, k] == t) for k in range(m)).

Another fault is not repaired here: LLVM 22 makes masked stores of one truncated integer too wide.
`Text.store_vector` (lower/mlir/text.py) writes none, and `scalar_stores` (child.py) replaces those
whose mask is a constant after LLVM's passes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from pbkern.lower.mlir.operation import Operation, replaced

_TYPE = "vector<64xi8>"
_OPERANDS = f"{_TYPE}, {_TYPE}"
_EIGHT = "vector<8xf64>"


def repaired(operations: Iterable[Operation]) -> list[Operation]:
    """Holds operands of shuffles of 64 bytes in place, and results of those of float64 that begin with a second lane.

    For processors with AVX-512, the only ones with such vectors.
    """
    return replaced(operations, lambda op: _held(op) or _held_result(op))


def is_shuffled_without_end(text: str) -> bool:
    """Whether a function holds vectors of 64 bytes.

    LLVM's own vectorisers, from level 2 on, make more shuffles of such vectors of scalar loops
    beside them, whose operands nothing holds. Random graphs found sorted and repeated bytes.
    """
    return _TYPE in text


def _held(op: Operation) -> list[Operation] | None:
    if op.name != "vector.shuffle" or op.types != _OPERANDS:
        return None
    if any("#" in operand for operand in op.operands):  # results of a loop: nothing moves past it
        return None
    held = {operand: f"{op.result}_of{k}" for k, operand in enumerate(dict.fromkeys(op.operands))}
    asm = [_hold(operand, _TYPE, name) for operand, name in held.items()]
    return [*asm, op.renamed(lambda _: lambda name: held.get(name, name))]


def _held_result(op: Operation) -> list[Operation] | None:
    if op.name != "vector.shuffle" or op.types != f"{_EIGHT}, {_EIGHT}" or op.result is None:
        return None
    order = ast.literal_eval(str(op.syntax).replace("%s, %s", "").strip())
    if len(order) < 2 or order[0] % 8 != 1:
        return None
    moved = f"{op.result}_moved"
    shuffle = Operation(op.name, op.operands, op.types, op.syntax, result=moved)
    return [shuffle, _hold(moved, f"vector<{len(order)}xf64>", op.result)]


def _hold(value: str, kind: str, name: str) -> Operation:
    """An empty assembly statement that returns a value, of which LLVM then knows nothing."""
    return Operation(
        "llvm.inline_asm", (value,), f"({kind}) -> {kind}", ' "", "=v,0" %s', result=name
    )
