"""Scratch of a program -> registers of threads, shared memory or global memory.

registers.py says which scratch is in registers. Shared memory is the thread block's; what does not
fit there is in global memory of the block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field

from pbkern.core.errors import KernelError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.kernel_nests import KernelNests
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.nest import effects, scratch
from pbkern.lower.nest.ir import Buf, Stmt
from pbkern.targets.simt.device import SHARED_SPACE


@dataclass(frozen=True)
class Placement:
    """Places of scratch.

    Attributes:
      offsets: root buffer -> first byte in its memory.
      in_global: which of them lie in global memory.
      shared_bytes, global_bytes: of one block.
      slots: root buffer in registers -> what each thread keeps of it. private: MLIR's number of the memory of one thread.
    """

    offsets: Mapping[Buf, int]
    in_global: frozenset[Buf]
    shared_bytes: int
    global_bytes: int
    slots: Mapping[Buf, Buf] = field(default_factory=dict)
    private: int = 0

    def is_private(self, buf: Buf) -> bool:
        return buf.root in self.slots or buf.root in self.slots.values()

    def is_shared(self, buf: Buf) -> bool:
        return buf.root in self.offsets and buf.root not in self.in_global

    def memref(self, buf: Buf) -> str:
        """Type of the flat memref that holds a buffer."""
        root = self.slots.get(buf.root, buf.root)
        number = (
            SHARED_SPACE if self.is_shared(root) else self.private if self.is_private(root) else 0
        )
        space = f", {number}" if number else ""
        return f"memref<{max(root.size, 1)}x{mlir_type(storage_el(root.dtype))}{space}>"

    def place(self, buf: Buf) -> tuple[str, int, int]:
        """(memory, first byte, one behind the last): places of one memory that overlap are the same bytes.

        Those in registers are the same for nobody.
        """
        root = buf.root
        if self.is_private(root):
            return "registers", 0, 0
        if root not in self.offsets:
            return root.name, 0, 1
        start = self.offsets[root]
        return (
            ("global" if root in self.in_global else "shared"),
            start,
            start + scratch.padded_bytes(root),
        )


def place(
    nests: KernelNests, slots: Mapping[Buf, Buf], limit: int, reserved: int, private: int = 0
) -> Placement:
    """Places all scratch of a kernel.

    Scratch that has `slots` is in registers. `reserved` bytes of shared memory come first, `limit`
    at most. The largest buffers go to global memory until the others fit.

    Raises KernelError where those that have to be shared do not.
    """
    touched = {
        buf
        for case in (nests.prologue, *nests.cases)
        for buf in effects.touched(list(case.statements))
        if buf.arena
    }
    every = sorted(
        touched - slots.keys(),
        key=lambda buffer: (bool(buffer.space), -scratch.padded_bytes(buffer), buffer.name),
    )
    free = sum(not buffer.space for buffer in every)
    for count in range(free + 1):
        far = frozenset(every[:count])
        near = frozenset(every[count:])
        shared, end = _placed(nests, near, far | slots.keys(), reserved)
        if end <= limit:
            offsets, global_end = _placed(nests, far, near | slots.keys(), 0)
            return Placement(shared | offsets, far, end, global_end, slots, private)
    raise _too_large(nests, every[free:], end, limit)


def _too_large(nests: KernelNests, tiles: Sequence[Buf], needed: int, limit: int) -> KernelError:
    """The error for tiles that shared memory does not hold, with the most steps of blocks that it would hold."""
    kernel, stages = nests.kernel, getattr(nests.options, "stages", 1)
    rings = [buf for buf in tiles if buf.circular and buf.shape[0] == stages > 1]
    step = sum(scratch.padded_bytes(buf) // stages for buf in rings)
    most = (limit - needed + stages * step) // step if step else 0
    return KernelError(
        f"blocks of kernel `{kernel.name}` do not fit shared memory",
        at=kernel.defined_at or None,
        why=f"{needed} bytes are needed, a block has {limit}"
        + (f"; {stages} steps at a time of {step} bytes each" if step else ""),
        hint=f"max_concurrent_steps={most}, or smaller blocks" if most > 1 else "smaller blocks",
    )


def _placed(
    nests: KernelNests, wanted: frozenset[Buf], elsewhere: frozenset[Buf], start: int
) -> tuple[dict[Buf, int], int]:
    """(offset of each wanted buffer, end of the last).

    Kept scratch lives all along, cases exclude each other.
    """
    places: dict[Buf, int] = {}
    for buf in nests.scratch:
        if buf in wanted:
            places[buf], start = start, start + scratch.padded_bytes(buf)
    prologue: Sequence[Stmt] = nests.prologue.statements
    offsets, start = scratch.place(list(prologue), start, {*places, *elsewhere})
    places |= offsets
    live, end = {*places, *elsewhere}, start
    for case in nests.cases:
        offsets, last = scratch.place(list(case.statements), start, live)
        places |= offsets
        end = max(end, last)
    return places, end


def fewest_index_bits(nests: KernelNests) -> int:
    """32 where places of all elements are integers of 32 bits, else 64."""
    roots = [operand.buf.root for operand in nests.operands]
    return (
        64
        if any(math.prod(root.shape) * max(root.dtype.itemsize, 1) >= 1 << 31 for root in roots)
        else 32
    )
