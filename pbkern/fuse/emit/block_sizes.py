"""Schedule -> BlockSizes: by which names a kernel's source calls the sizes of its blocks, and the kernel with others."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping

import jax
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.dsl.kernel import BlockSize, BlockSizes, Kernel
from pbkern.fuse.tiling.schedule import Schedule, resized

# Names of the sizes along the dimensions of a result, by its rank.
NAMES = {1: ("ELEMENTS",), 2: ("ROWS", "COLUMNS"), 3: ("PLANES", "ROWS", "COLUMNS")}
# Name of the size of the chunks in which reductions are taken.
CHUNK = "CHUNK"


def block_sizes(
    eqns: list[jex.JaxprEqn], schedule: Schedule, emitted: Callable[[Schedule], Kernel]
) -> BlockSizes | None:
    """Sizes of a group's blocks, and of its chunks; None where nothing is cut.

    `emitted` makes the kernel of a schedule.
    """
    if schedule.wave is not None or schedule.loop is not None:
        return None
    shape = array_aval(schedule.outputs[0][0]).shape
    rank = len(shape)
    names = NAMES.get(rank) or tuple(f"BLOCK_{dim}" for dim in range(rank))
    cut = {name: dim for dim, name in enumerate(names) if schedule.blocks[dim] < shape[dim]}
    sizes = {
        name: BlockSize(schedule.blocks[dim], shape[dim], f"{name.lower()} of a block")
        if rank in NAMES
        else BlockSize(schedule.blocks[dim], shape[dim], f"block of the result's dimension {dim}")
        for name, dim in cut.items()
    }
    chunk_columns = 0
    if schedule.online is not None:
        online = schedule.online.online
        chunk_columns = online.chunk_columns
        sizes[CHUNK] = BlockSize(
            chunk_columns, online.columns, "reduced elements that are taken at a time"
        )
    if not sizes:
        return None
    context, wide = contextvars.copy_context(), jax.config.read("jax_enable_x64")

    def at(sizes_of: Mapping[str, int]) -> Kernel:
        blocks = list(schedule.blocks)
        for name, dim in cut.items():
            blocks[dim] = sizes_of[name]

        def emit() -> Kernel:
            with jax.enable_x64(wide):
                columns = sizes_of.get(CHUNK, chunk_columns)
                return emitted(resized(eqns, schedule, blocks, columns))

        return context.copy().run(emit)

    return BlockSizes(sizes, at)
