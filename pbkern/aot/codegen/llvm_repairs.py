"""LLVM IR that llvmlite's LLVM does not come back from -> the same in a form that it compiles. Newer ones need none of it.

LLVM 22 moves a shuffle of 64 bytes, as of numbers that are repeated, in front of the operation that made them, and back,
without end. What an empty assembly statement has returned cannot be moved. Found by random graphs:
jnp.repeat(jnp.minimum(x, 3), 2, axis=1) of uint8.
"""

from __future__ import annotations

import re

_VALUE = r"%[\w.]+|poison|zeroinitializer|splat \([^)]*\)"
_SHUFFLE = re.compile(rf"^(\s*)(%[\w.]+) = shufflevector <64 x i8> ({_VALUE}), <64 x i8> ({_VALUE}), (.*)$", re.MULTILINE)


def repaired(text: str) -> str:
    """The text with operands of shuffles of 64 bytes held in place. For processors with registers of 512 bits."""
    return _SHUFFLE.sub(_held, text)


def _held(found: re.Match) -> str:
    space, name, *operands, rest = found.groups()
    lines, places = [], []
    for k, operand in enumerate(operands):
        if not operand.startswith("%"):
            places.append(operand)
        elif k and operand == operands[0]:
            places.append(places[0])
        else:
            places.append(f"%held.{name[1:]}.{k}")
            lines.append(f'{space}{places[-1]} = call <64 x i8> asm "", "=v,0"(<64 x i8> {operand})')
    lines.append(f"{space}{name} = shufflevector <64 x i8> {places[0]}, <64 x i8> {places[1]}, {rest}")
    return "\n".join(lines)
