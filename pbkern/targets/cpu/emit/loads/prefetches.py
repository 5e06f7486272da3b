"""Prefetches of lines that loads of a later step read."""

from __future__ import annotations

from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Buf, Load
from pbkern.targets.cpu.emit.addressing import NestWalk, Point, memref
from pbkern.targets.cpu.schedule.nest_schedule import prefetched_by


def leads(walk: NestWalk, buf: Buf, index) -> bool:
    """Whether no load of the nest is ahead of this one, whose line that one would ask for."""
    loads = [
        load.access
        for load in walk.nest.loads()
        if isinstance(load, Load) and load.buf.root is buf.root
    ]
    return flat_index(buf, index).const == max(flat_index(other, i).const for other, i in loads)


def fetch(
    text: Text, walk: NestWalk, block: Block, buf: Buf, index, point: Point, run: int = 1
) -> None:
    """Asks for the line in which the `run` neighbours that a later step loads end; addresses behind the end do not fault.

    A vector that begins inside a line begins in the one where the vector before it ends.
    """
    flat = flat_index(buf, index) + (run - 1)
    offset = (
        sum(flat.coefficient(dim) * shift for dim, shift in point.items())
        + prefetched_by(walk.nest)[buf.root]
    )
    _, address = text.affine(block, flat, offset)
    block.add(
        "memref.prefetch",
        (buf.root.name, address),
        memref(buf),
        " %s[%s], read, locality<2>, data",
    )
