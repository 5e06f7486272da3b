"""Copies of the operand of a product that does not vary along vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from pbkern.core.affine import Affine
from pbkern.core.machine import LINE_BYTES
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.split import split
from pbkern.lower.nest.ir import (
    Expr,
    Load,
    Nest,
    Stmt,
)
from pbkern.targets.cpu.packing.limits import PackLimits
from pbkern.targets.cpu.packing.operand_copies import (
    OperandCopies,
    copy_dtype,
    is_expensive,
    is_scattered,
    replace_operand,
    rows_conflict,
    stage,
)
from pbkern.targets.cpu.schedule.nest_schedule import scheduled
from pbkern.targets.cpu.schedule.prefetch import rows_ahead
from pbkern.targets.cpu.schedule.register_tiles.choice import choose


def stage_still(
    nest: Nest,
    stationary: Expr,
    converted: bool,
    context,
    limits: PackLimits,
    out: list[Stmt],
    staged: OperandCopies,
) -> tuple[Nest, Expr]:
    """The product with a copy of its broadcast operand, and that operand.

    The operand is copied where its rows collide in the cache, or, with `converted`, where reading
    it is expensive; else both are as they are.
    """
    if not isinstance(stationary, Load):
        return nest, stationary
    reuse, dtype = nest.reuse(stationary), stationary.buf.dtype
    if is_scattered(nest, stationary, reuse, context.options):
        before = len(out)
        copy = stage(
            nest,
            stationary,
            copy_dtype(dtype) if converted else dtype,
            context,
            out,
            staged,
            turned=True,
        )
        if len(out) > before:
            out[before:] = _in_row_blocks(cast(Nest, out[before]), context, limits)
        if copy is not None:
            return replace_operand(nest, stationary, copy), copy
    pays = rows_conflict(nest, stationary, reuse, limits) or (
        converted and is_expensive(stationary) and reuse >= limits.row_reuse
    )
    copy = (
        stage(nest, stationary, copy_dtype(dtype) if converted else dtype, context, out, staged)
        if pays
        else None
    )
    return (nest, stationary) if copy is None else (replace_operand(nest, stationary, copy), copy)


def _in_row_blocks(copy: Nest, context, limits: PackLimits) -> list[Stmt]:
    """A copy that transposes, in blocks of the source's rows: each block is read along all columns before the next one.

        t[j, i] = a[i, j]  (i < 20)    ->    t[j, 8 b + i] = a[8 b + i, j]  (b < 2, i < 8), t[j, 16 + i] = a[16 + i, j]  (i < 4)

    Column by column, parts of all rows are read for each vector of columns, and rows are in pages of their own. The rows of
    the copy, of which a block stores a few elements each, stay in the first cache where there are few columns.
    """
    schedule, pool = choose(copy, context.options.vectors), context.pool
    row, column = schedule.along, schedule.transpose
    if not has_parts_of_lines(context) or column is None:
        return [copy]
    count, left = divmod(copy.dims[row], schedule.lanes)
    if count < 2 or copy.dims[column] > limits.most_block_columns:
        return [copy]
    block, whole = context.names("d"), count * schedule.lanes
    blocks = split(
        part(copy, row, Affine(), whole, pool), {row: {block: count, row: schedule.lanes}}, pool
    )
    outer = [dim for dim in copy.dims if dim not in (row, column)]
    dims = {dim: blocks.dims[dim] for dim in (*outer, block, column, row)}
    prefetched = {
        root: distance
        for load in copy.loads()
        if isinstance(load, Load)
        for root, distance in rows_ahead(load, row, schedule.lanes).items()
    }
    last = [part(copy, row, Affine((), whole), left, pool)] if left else []
    return [scheduled(replace(blocks, dims=dims), prefetched=prefetched), *last]


def has_parts_of_lines(context) -> bool:
    """Whether a vector is a part of a line: tiles take as many lines from the second cache for fewer multiply-adds."""
    return context.options.vectors.bits < 8 * LINE_BYTES
