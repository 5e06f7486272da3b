"""Operations that LLVM compiles without end -> operations that compute the same, and that it compiles.

LLVM 22 to 24 move a shuffle of 64 bytes, as of numbers that are repeated, before the operation that
made them, and back,
without end. They do not move what an empty assembly statement returns. Found by random graphs:
jnp.repeat(jnp.minimum(x, 3), 2, axis=1) of uint8.

Another fault is not repaired here: LLVM 22 makes masked stores of one truncated integer too wide.
`Text.store_vector` (lower/mlir/text.py) writes none, and `scalar_stores` (child.py) replaces those
whose mask is a constant after LLVM's passes.
"""

from __future__ import annotations

from collections.abc import Iterable

from pbkern.lower.mlir.operation import Operation, replaced

_TYPE = "vector<64xi8>"
_OPERANDS = f"{_TYPE}, {_TYPE}"


def repaired(operations: Iterable[Operation]) -> list[Operation]:
    """Holds the operands of shuffles of 64 bytes in place.

    For processors with AVX-512, the only ones with such vectors.
    """
    return replaced(operations, _held)


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
    asm = [
        Operation(
            "llvm.inline_asm",
            (operand,),
            f"({_TYPE}) -> {_TYPE}",
            ' "", "=v,0" %s',
            result=name,
        )
        for operand, name in held.items()
    ]
    return [*asm, op.renamed(lambda _: lambda name: held.get(name, name))]
