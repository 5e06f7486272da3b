"""Atomic operations on memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pbkern.simulate import ops
from pbkern.simulate.counts import Memo
from pbkern.simulate.operands import Mask, Step, operand
from pbkern.simulate.parse import Instruction, PtxProgram

from .accesses import address_of, space_of, view_to_write

_ATOMICS: dict[str, Callable] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


def atomic(program: PtxProgram, instruction: Instruction) -> Step:
    """atom and red: lanes one after the other, in the order of their numbers.

    Atomic accesses do not race with each other.
    """
    dtype, space, returns = (
        ops.TYPES[instruction.op[-1]],
        space_of(instruction),
        instruction.op[0] == "atom",
    )
    kind = next(
        (modifier for modifier in instruction.op[1:] if modifier in (*_ATOMICS, "cas")), None
    )
    if kind is None:
        raise ops.Unknown("operation")
    first = 1 if returns else 0
    address = address_of(program, instruction.operands[first])
    values, memo = (
        [operand(program, text, dtype) for text in instruction.operands[first + 1 :]],
        Memo(),
    )

    def step(gang: Any, mask: Mask) -> None:
        here = np.ones(gang.shape, bool) if mask is None else mask
        if not here.any():
            return
        addresses = np.broadcast_to(address(gang), gang.shape)
        arguments = [np.broadcast_to(value(gang), gang.shape)[here] for value in values]
        watched, gang.launch.arrays.shadows = gang.launch.arrays.shadows, {}
        near, gang.shared.shadow = gang.shared.shadow, None
        view, places, size = view_to_write(
            gang, addresses, here, space, ops.unsigned(dtype.itemsize), 1, memo
        )
        gang.launch.arrays.shadows, gang.shared.shadow = watched, near
        flat, old = view.view(dtype), np.zeros(len(places), dtype)
        for k, at in enumerate(places // size):
            old[k] = flat[at]
            if kind == "cas":
                flat[at] = arguments[1][k] if old[k] == arguments[0][k] else old[k]
            else:
                flat[at] = _ATOMICS[kind](old[k], arguments[0][k])
        if returns:
            whole = np.zeros(gang.shape, dtype)
            whole[here] = old
            gang.put(instruction.operands[0], whole, here)

    return step
