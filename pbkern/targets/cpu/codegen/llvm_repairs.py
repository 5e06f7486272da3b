"""MLIR of kernels that LLVM does not come back from -> the same in a form that it compiles.

LLVM 22 to 24 move a shuffle of 64 bytes, as of numbers that are repeated, in front of the operation that made them, and back,
without end. What an empty assembly statement has returned cannot be moved. Found by random graphs:
jnp.repeat(jnp.minimum(x, 3), 2, axis=1) of uint8.
"""

from __future__ import annotations

import re

_TYPE = "vector<64xi8>"
_SHUFFLE = re.compile(rf"^(\s*)(%\w+) = vector\.shuffle (%\w+), (%\w+) (\[[^\]]*\]) : {_TYPE}, {_TYPE}$", re.MULTILINE)


def repaired(text: str) -> str:
    """The text with operands of shuffles of 64 bytes held in place. For processors with AVX-512."""
    return _SHUFFLE.sub(_held, text)


def _held(found: re.Match) -> str:
    space, name, low, high, order = found.groups()
    places = {operand: f"{name}_of{k}" for k, operand in enumerate(dict.fromkeys((low, high)))}
    held = f": ({_TYPE}) -> {_TYPE}"
    lines = [f'{space}{place} = llvm.inline_asm "", "=v,0" {operand} {held}' for operand, place in places.items()]
    return "\n".join([*lines, f"{space}{name} = vector.shuffle {places[low]}, {places[high]} {order} : {_TYPE}, {_TYPE}"])
