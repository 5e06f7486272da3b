"""Buffers of a kernel's operands and results."""

from __future__ import annotations

from pbkern.dsl.kernel import Kernel
from pbkern.lower.nest.ir import Buf


def operand_buffers(kernel: Kernel) -> list[Buf]:
    """Makes one buffer per operand, then one per result; an aliased result is stored in its operand."""
    operand_of = {len(kernel.inputs) + result: operand for operand, result in kernel.aliases}
    buffers: list[Buf] = []
    for k, mapping in enumerate((*kernel.inputs, *kernel.outputs)):
        storage = buffers[operand_of[k]] if k in operand_of else None
        array = mapping.array
        buffers.append(Buf(f"%a{k}", array.shape, array.dtype, storage=storage))
    return buffers
