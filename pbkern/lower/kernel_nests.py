"""Kernel -> KernelNests: all of a kernel that every target shares, before threads, vectors, memories are chosen.

A body is lowered for one case or for several; each program finds its own
(lower/grid/edge_variants.py): for blocks that are inside their arrays, without masks, and for those
at the ends. Where blocks do not divide an array, the last block is moved back if the body allows it
(lower/grid/block_shift.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedKernel
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.ordered_values import ordered_values
from pbkern.core.ops.shared_products import shared_products
from pbkern.core.passes import Pass, run_passes
from pbkern.dsl.conditional_results import unsure_results
from pbkern.dsl.interpret import poison
from pbkern.dsl.kernel import ArrayType, Blocked, BlockMapping, Kernel, Squeezed
from pbkern.lower.build import BodyBuilder
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.grid import block_copies, block_shift, edge_variants
from pbkern.lower.grid.edge_variants import EdgeVariant, Extent
from pbkern.lower.grid.parallelism import GridDimension, grid_dimensions
from pbkern.lower.grid.scratch_resets import is_overwritten_by_each, restarting_dimension
from pbkern.lower.mlir.element_types import ELEMENTS, SUB_BYTE
from pbkern.lower.nest import interpret, ir
from pbkern.lower.nest.conditions.index_tests import Bounds
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.interpret import NestMemory
from pbkern.lower.nest.ir import Buf, Let, Names, Nest, Stmt
from pbkern.lower.nest.verify import verify
from pbkern.lower.operand_buffers import operand_buffers
from pbkern.lower.passes.dead_points import DROP_DEAD_POINTS, Body
from pbkern.lower.passes.uniform_axes import narrow, narrowed_buffers, uniform_axes
from pbkern.lower.rules import debug_callbacks
from pbkern.lower.rules.views import index_value
from pbkern.lower.values.items import RefView
from pbkern.lower.values.values import Index, Lazy, Literal, Value

INT32 = np.dtype(np.int32)


def grid_symbol(dim: int) -> str:
    """Symbol by which statements call a program's index along a grid dimension."""
    return f"%g{dim}"


@dataclass(frozen=True)
class KernelOperand:
    """One array of the kernel.

    Attributes:
      buf: the whole array. Nests index it by absolute places: `starts` and the place in the block.
      mapping: which block of it each program sees.
      starts: first element of the block per array axis, affine in grid symbols, starts of shifted
        blocks, and names that the prologue defines.
      aliased: of a result, the operand whose memory it takes; else None.
    """

    buf: Buf
    mapping: BlockMapping
    starts: tuple[Affine, ...]
    aliased: int | None = None

    @property
    def axes(self) -> tuple[int | None, ...]:
        """Per array axis the axis of the Ref, None where it is squeezed."""
        ref_axes = iter(range(len(self.mapping.dims)))
        return tuple(
            None if isinstance(dim, Squeezed) else next(ref_axes) for dim in self.mapping.dims
        )

    @property
    def extents(self) -> list[Extent]:
        """The block's extent along each array axis."""
        return edge_variants.extents(self.starts, self.mapping.dims, self.mapping.array.shape)


@dataclass(frozen=True)
class Section:
    """Statements, and what passes over them may ask for."""

    statements: tuple[Stmt, ...]
    context: NestContext


@dataclass(frozen=True)
class BodyCase(Section):
    """The body for some of the programs: those inside, those at each end."""

    variant: EdgeVariant

    def __str__(self) -> str:
        return self.variant.title + ir.show(list(self.statements))


@dataclass(frozen=True)
class KernelNests:
    """A kernel without last stage, as nests over whole arrays and scratch.

    No text, no place in memory, no schedule.

    Attributes:
      grid: per dimension, whether its programs are parallel and why. A target maps parallel ones to
        tasks or to blocks of threads; the others are loops inside, in order.
      shifts: dimension -> where its blocks start: at symbol `block_shift.symbol(dimension)`, which is
        min(grid index * block, limit).
      prologue: scalars of index maps that are not affine, before any case.
      operands: inputs, then outputs. scratch: as the kernel has it; kept along dimensions that are
        not parallel.
      copies: operand -> buffer that holds what it was when the kernel was launched: failed checks show it.
      ragged: grid dimensions at whose last index a case of its own runs.
      crossing: extents by which two cases differ: the first is for programs where all of them are
        inside. Others, which cross an end in every program, stay guarded there.
      cases: at least one, unless the grid has no programs; `case_of` tells which holds for a
        program.
      looped: grid dimensions whose programs are steps of a loop that the statements have, which copies blocks.
    """

    kernel: Kernel
    grid: tuple[GridDimension, ...]
    shifts: Mapping[int, block_shift.Shift]
    prologue: Section
    operands: tuple[KernelOperand, ...]
    scratch: tuple[Buf, ...]
    copies: Mapping[int, Buf]
    ragged: tuple[int, ...]
    crossing: tuple[Extent, ...]
    cases: tuple[BodyCase, ...]
    looped: tuple[int, ...] = ()

    @property
    def parallel(self) -> tuple[int, ...]:
        """Grid dimensions whose programs may run at the same time."""
        return tuple(grid_dim.axis for grid_dim in self.grid if grid_dim.parallel)

    @property
    def step_counter(self) -> str:
        """Counter of the loop over programs that the statements have; "" if they have none."""
        if len(self.looped) > 1:
            return block_copies.STEP_COUNTER
        return "".join(map(grid_symbol, self.looped))

    @property
    def in_order(self) -> tuple[int, ...]:
        """Grid dimensions that are loops around the statements."""
        return tuple(
            grid_dim.axis
            for grid_dim in self.grid
            if not grid_dim.parallel and grid_dim.axis not in self.looped
        )

    def case_of(self, symbols: Mapping[str, int]) -> BodyCase:
        """The one for a program with these values of grid symbols, starts of shifted blocks and names of the prologue."""
        if self.ragged:
            last = {
                dim for dim in self.ragged if symbols[grid_symbol(dim)] == self.kernel.grid[dim] - 1
            }
            return next(case for case in self.cases if case.variant.last == last)
        starts = ((extent, extent.start.evaluate(symbols)) for extent in self.crossing)
        return self.cases[
            0 if all(0 <= at <= extent.length - extent.size for extent, at in starts) else -1
        ]

    @property
    def options(self) -> BuildOptions:
        """The target's, by which these were built."""
        return self.prologue.context.options

    def after(self, passes: Sequence[Pass]) -> KernelNests:
        """The nests after passes over statements, (statements, context) -> statements.

        All passes run on the prologue, then all on each case.
        """

        def passed(section: Any, what: str, symbols: frozenset[str]) -> Any:
            if not section.statements:
                return section
            statements = run_passes(
                "nests",
                passes,
                list(section.statements),
                section.context,
                of=f"{self.kernel.name}{what}",
                show=ir.show,
                verify=lambda stmts: verify(stmts, symbols),
            )
            return replace(section, statements=tuple(statements))

        prologue = passed(self.prologue, ", prologue", self._symbols())
        known = replace(self, prologue=prologue)._symbols(inside=True)
        titles = [
            f", {title.strip(':')}" if (title := case.variant.title.strip()) else ""
            for case in self.cases
        ]
        return replace(
            self,
            prologue=prologue,
            cases=tuple(passed(case, heading, known) for case, heading in zip(self.cases, titles)),
        )

    def _symbols(self, inside: bool = False) -> frozenset[str]:
        """Symbols that statements know: those of the prologue, or those of cases (`inside`)."""
        symbols = {grid_symbol(axis) for axis in range(len(self.kernel.grid))} | set(
            map(block_shift.symbol, self.shifts)
        )
        return frozenset(
            symbols
            | {stmt.name for stmt in self.prologue.statements if inside and isinstance(stmt, Let)}
        )

    def verify(self) -> None:
        """Checks ranks, known symbols and static bounds of accesses. Raises InternalError."""
        verify(list(self.prologue.statements), self._symbols())
        for case in self.cases:
            verify(list(case.statements), self._symbols(inside=True))

    def interpret(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Runs every program in order on NumPy arrays, one per input; the results.

        The oracle between the kernel's body (dsl/interpret.py) and what a target emits. Scratch is
        poisoned where programs that may run at the same time follow one another. Raises
        InternalError for accesses outside buffers.
        """
        return _NestsRun(self, arrays).results()

    def __str__(self) -> str:
        rows = [f"{self.kernel.name}:", *map(str, self.grid)]
        rows += [
            f"block of grid dimension {dim} starts at {block_shift.symbol(dim)} = "
            f"min({grid_symbol(dim)} * {shift.block}, {shift.limit})"
            for dim, shift in self.shifts.items()
        ]
        for operand in self.operands:
            block = ", ".join(
                f"{start} .. + {dim.size}"
                for start, dim in zip(operand.starts, operand.mapping.dims)
            )
            rows.append(
                f"{operand.buf}, block [{block}]"
                + ("" if operand.aliased is None else f", in place of %a{operand.aliased}")
            )
        rows += [f"scratch {buf}" for buf in self.scratch]
        rows += [ir.show(list(self.prologue.statements))] if self.prologue.statements else []
        return "\n".join([*rows, *map(str, self.cases)])


def kernel_nests(kernel: Kernel, options: BuildOptions) -> KernelNests:
    """The nests of a kernel that has no last stage.

    Raises UnsupportedOp for equations without a rule, and for dtypes that have no register type.
    """
    check_dtypes(kernel)
    try:
        return _Building(
            kernel, options, block_shift.find(kernel) if options.may_shift else {}
        ).nests()
    except block_shift.CannotShift:
        return _Building(kernel, options, {}).nests()


class _NestsRun:
    """KernelNests on NumPy arrays."""

    def __init__(self, nests: KernelNests, arrays: Sequence[np.ndarray]):
        self.nests, count = nests, len(nests.kernel.inputs)
        self.outputs = nests.operands[count:]
        contents = {
            operand.buf: np.array(array).reshape(-1)
            for operand, array in zip(nests.operands, arrays)
        }
        contents |= {buf: contents[nests.operands[i].buf].copy() for i, buf in nests.copies.items()}
        unsure = {nests.operands[count + result].buf for result in unsure_results(nests.kernel)}
        contents |= {
            output.buf: np.full(
                output.buf.size,
                0 if output.buf in unsure else poison(output.buf.dtype),
                output.buf.dtype,
            )
            for output in self.outputs
            if output.aliased is None
        }
        self.whole = NestMemory(contents)

    def results(self) -> list[np.ndarray]:
        kernel, parallel = self.nests.kernel, self.nests.parallel
        sizes = {
            dim: min(int(self.whole.read(self.nests.operands[operand].buf)), kernel.grid[dim])
            for dim, operand in kernel.dynamic_grid
        }
        together, scratch = None, NestMemory()
        for index in itertools.product(
            *(
                range(1 if axis in self.nests.looped else sizes.get(axis, size))
                for axis, size in enumerate(kernel.grid)
            )
        ):
            if together != (together := tuple(index[dim] for dim in parallel)):
                scratch = NestMemory()
            contents = {buf: scratch.flat(buf) for buf in self.nests.scratch}
            self._program(NestMemory(self.whole.arrays | contents), index)
        return [self.whole.read(output.buf) for output in self.outputs]

    def _program(self, memory: NestMemory, index: tuple[int, ...]) -> None:
        nests = self.nests
        symbols = {grid_symbol(axis): position for axis, position in enumerate(index)}
        symbols |= {
            block_shift.symbol(dim): min(index[dim] * shift.block, shift.limit)
            for dim, shift in nests.shifts.items()
        }
        interpret.run(nests.prologue.statements, memory, symbols, self._trace)
        interpret.run(nests.case_of(symbols).statements, memory, symbols, self._trace)
        memory.copies.check_end()
        memory.products.check_end()

    def _trace(self, number: int, values: list[np.ndarray]) -> None:
        """Hands to the process what compiled code would hand to it."""
        site = debug_callbacks.SITES[number]
        site.receive(values[: len(site.types)], lambda: values[len(site.types) :])


class _Building:
    """State of building one kernel's nests."""

    def __init__(self, kernel: Kernel, options: BuildOptions, shifts: dict[int, block_shift.Shift]):
        self.kernel, self.options, self.shifts = kernel, options, shifts
        self.names = Names()
        self.bufs = operand_buffers(kernel)
        # What failed checks hand over; of operands that the kernel updates, the copy that the
        # launch makes before.
        handed = kernel.in_types if debug_callbacks.hands_over_operands(kernel) else ()
        self.copies = {
            i: Buf(f"%before{i}", handed[i].shape, handed[i].dtype)
            for i, _ in kernel.aliases
            if handed
        }
        self.handed = tuple(self.copies.get(i, self.bufs[i]) for i in range(len(handed)))
        self.scratch = tuple(
            Buf(self.names("%t"), scratch.shape, scratch.dtype, arena=True)
            for scratch in kernel.scratch
        )

    def nests(self) -> KernelNests:
        kernel, grid = self.kernel, grid_dimensions(self.kernel, self.options)
        operands, prologue = self._operands()
        blocks = list(dict.fromkeys(extent for operand in operands for extent in operand.extents))
        bounds = self._bounds()
        ragged = edge_variants.ragged_dimensions(blocks, bounds, kernel)
        crossing: tuple[Extent, ...] = ()
        if self.options.one_case:
            ragged = ()
            guarded = not all(block.is_in_bounds(bounds) for block in blocks)
            variants = [EdgeVariant(bounds, guarded)]
        elif ragged:
            variants = edge_variants.variants(ragged, blocks, bounds, kernel)
        else:
            states = {block: block.is_in_bounds(bounds) for block in blocks}
            never_inside = False in states.values()
            variants = [EdgeVariant(bounds, never_inside)]
            if None in states.values():
                crossing = tuple(extent for extent, state in states.items() if state is None)
                variants = [
                    EdgeVariant(_inside(crossing, bounds), never_inside),
                    EdgeVariant(bounds, True),
                ]
        looped: tuple[int, ...] = ()
        if self.options.block_copy_bytes:
            looped = tuple(dim.axis for dim in grid if not dim.parallel)
        self.looped = looped
        scratch, cases = self._cases(operands, [] if 0 in kernel.grid else variants, prologue)
        return KernelNests(
            kernel,
            grid,
            self.shifts,
            replace(prologue, statements=()) if looped else prologue,
            operands,
            scratch,
            self.copies,
            ragged,
            crossing,
            cases,
            looped,
        )

    # ---------------------------------------------------------------- where blocks start

    def _operands(self) -> tuple[tuple[KernelOperand, ...], Section]:
        context = self._context()
        statements: list[Stmt] = []
        aliased = {result: i for i, result in self.kernel.aliases}
        operands = []
        for k, (mapping, buf) in enumerate(
            zip((*self.kernel.inputs, *self.kernel.outputs), self.bufs)
        ):
            starts = self._starts(mapping, context, statements)
            operands.append(
                KernelOperand(buf, mapping, starts, aliased.get(k - len(self.kernel.inputs)))
            )
        return tuple(operands), Section(tuple(statements), context)

    def _starts(
        self, mapping: BlockMapping, context: NestContext, statements: list[Stmt]
    ) -> tuple[Affine, ...]:
        """First element per array axis, affine in grid symbols; other index maps become statements that compute scalars."""
        affine = [start for start in mapping.starts if start is not None]
        if len(affine) == len(mapping.starts):
            starts = (block_shift.moved(start, self.shifts) for start in affine)
            return tuple(
                start.substitute(
                    lambda dim: Affine.symbol(grid_symbol(dim)) if isinstance(dim, int) else None
                )
                for start in starts
            )
        builder = BodyBuilder(context)
        jaxpr, rank = mapping.index_map.jaxpr, len(self.kernel.grid)
        env = {
            invar: self._grid_value(builder, axis) for axis, invar in enumerate(jaxpr.invars[:rank])
        }
        for k, var in enumerate(jaxpr.invars[rank:]):
            builder.refs[var] = _whole(self.bufs[k])
        indices: list[Affine] = []
        statements += builder.region(
            jaxpr,
            env,
            lambda local: indices.extend(
                builder.index_symbol(builder.read(local, outvar)) for outvar in jaxpr.outvars
            ),
        )
        return tuple(
            i * (dim.size if isinstance(dim, Blocked) else 1)
            for i, dim in zip(indices, mapping.dims)
        )

    def _context(self) -> NestContext:
        context = NestContext(self.options, self.names)
        context.persistent = frozenset(self.scratch)
        context.programs = math.prod(self.kernel.grid)
        return context

    def _grid_value(self, builder: BodyBuilder, axis: int) -> Value:
        return index_value((), INT32, lambda ix: Affine.symbol(grid_symbol(axis)), builder)

    def _bounds(self) -> dict[str, tuple[int, int]]:
        """(smallest, largest) of grid indices and shifted starts."""
        bounds = {grid_symbol(axis): (0, size - 1) for axis, size in enumerate(self.kernel.grid)}
        return bounds | {
            block_shift.symbol(dim): (0, shift.limit) for dim, shift in self.shifts.items()
        }

    # ---------------------------------------------------------------- the body

    def _cases(
        self, operands: Sequence[KernelOperand], variants: list[EdgeVariant], prologue: Section
    ) -> tuple[tuple[Buf, ...], tuple[BodyCase, ...]]:
        """The scratch, and the body for each variant; they agree about uniform scratch, which all of them use."""
        built = [self._build(operands, edge_variant, prologue) for edge_variant in variants]
        axes = uniform_axes([stmts for _, stmts in built])
        narrowed = narrowed_buffers(axes)
        scratch = tuple(narrowed.get(buf, buf) for buf in self.scratch)
        bodies = [
            Body(
                narrow(stmts, axes, narrowed, context.pool),
                context.pool,
                context.bounds,
                self._handed_on(edge_variant, narrowed),
            )
            for (context, stmts), edge_variant in zip(built, variants)
        ]
        if any(edge_variant.guarded for edge_variant in variants):
            bodies = run_passes(
                "nests",
                (DROP_DEAD_POINTS,),
                bodies,
                of=self.kernel.name,
                show=lambda bodies: "\n\n".join(ir.show(body.stmts) for body in bodies),
            )
        for (context, _), variant in zip(built, variants):
            context.persistent = frozenset() if self.looped else frozenset(scratch)
            context.fresh = frozenset(
                buf for n, buf in enumerate(scratch) if is_overwritten_by_each(self.kernel, n)
            )
            context.bounds.update(variant.bounds)
        return scratch, tuple(
            BodyCase(tuple(body.stmts), ctx, edge_variant)
            for (ctx, _), body, edge_variant in zip(built, bodies, variants)
        )

    def _handed_on(self, variant: EdgeVariant, narrowed: Mapping[Buf, Buf]) -> dict[Buf, tuple]:
        """Scratch -> what is equal for cases whose programs may hand it to each other: their place before its dimension."""
        handover_keys = {}
        for n, (scratch, buf) in enumerate(zip(self.kernel.scratch, self.scratch)):
            first = (
                len(self.kernel.grid) if scratch.scoped else restarting_dimension(self.kernel, n)
            )
            handover_keys[narrowed.get(buf, buf)] = (
                n,
                frozenset(dim for dim in variant.last if dim < first),
            )
        return handover_keys

    def _build(
        self, operands: Sequence[KernelOperand], variant: EdgeVariant, prologue: Section
    ) -> tuple[NestContext, list[Stmt]]:
        context = prologue.context if self.looped else self._context()
        context.bounds.update(variant.bounds)
        builder = BodyBuilder(context)
        builder.kernel, builder.operands = self.kernel, self.handed
        builder.grid = tuple(
            self._grid_value(builder, axis) for axis in range(len(self.kernel.grid))
        )
        dynamic = dict(self.kernel.dynamic_grid)
        builder.grid_sizes = tuple(
            self._dynamic_size(builder, dynamic[axis], size)
            if axis in dynamic
            else Literal((), INT32, size)
            for axis, size in enumerate(self.kernel.grid)
        )
        refs = [
            RefView(
                operand.buf,
                operand.mapping.ref_shape,
                operand.mapping.array.dtype,
                operand.starts,
                operand.axes,
                variant.guarded
                and any(not extent.is_in_bounds(variant.bounds) for extent in operand.extents),
            )
            for operand in operands
        ]
        copies = self._block_copies(operands, refs, context) if self.looped else []
        refs += map(_whole, self.scratch)
        jaxpr = self.kernel.body.jaxpr
        builder.refs = dict(zip(jaxpr.invars, refs))
        builder.rounded_once = ordered_values(jaxpr)
        if self.options.contract:
            builder.rounded_once |= shared_products(jaxpr)
        statements = block_shift.apply(builder.region(jaxpr, {}), builder.pool, self.shifts)
        if self.looped:
            sizes = {grid_symbol(axis): self.kernel.grid[axis] for axis in self.looped}
            head = prologue.statements
            statements = block_copies.step_loop(sizes, copies, head, statements, context)
        return context, statements

    def _block_copies(
        self, operands: Sequence[KernelOperand], refs: list[RefView], context: NestContext
    ) -> list[Nest]:
        """Nests that copy blocks of inputs; their Refs become views of the copies."""
        moving = {grid_symbol(axis) for axis in self.looped}
        copies = []
        for at in block_copies.copied_inputs(self.kernel):
            operand, ref = operands[at], refs[at]
            copy = block_copies.block_copy(operand.buf, operand.starts, operand.mapping, context)
            block = copy.stores[0].buf
            symbols = frozenset().union(*(start.symbols for start in operand.starts))
            known = {grid_symbol(axis) for axis in range(len(self.kernel.grid))}
            is_fixed = not symbols & moving and symbols <= known
            if is_fixed and block.size * block.dtype.itemsize > self.options.block_copy_bytes:
                continue
            starts: Index = (Affine(),) * len(block.shape)
            refs[at] = RefView(block, ref.shape, ref.dtype, starts, ref.axes, copied=ref)
            copies.append(copy)
        return copies

    def _dynamic_size(self, builder: BodyBuilder, operand: int, bound: int) -> Value:
        """Programs along a grid dimension whose size is an operand: no more than the bound."""
        operands = builder.whole(self.bufs[operand]), Literal((), INT32, bound)
        least = lambda pool, ix, sizes: builder.op("min", INT32, *sizes)
        return builder.new(Lazy((), INT32, operands, lambda ix: ((), ()), least))


def _whole(buf: Buf) -> RefView:
    """A Ref to all of a buffer."""
    rank = len(buf.shape)
    return RefView(buf, buf.shape, buf.dtype, (Affine(),) * rank, tuple(range(rank)))


def _inside(blocks: Sequence[Extent], bounds: Bounds) -> dict[str, tuple[int, int]]:
    """Narrows the bounds to where all blocks are inside."""
    narrowed = dict(bounds)
    for block in blocks:
        if (
            len(block.start.terms) == 1
            and block.start.terms[0][1] > 0
            and block.start.terms[0][0] in narrowed
        ):
            symbol, coefficient = block.start.terms[0]
            low, high = narrowed[symbol]
            narrowed[symbol] = (
                max(low, -(block.start.const // coefficient)),
                min(high, (block.length - block.size - block.start.const) // coefficient),
            )
    return narrowed


def check_dtypes(kernel: Kernel) -> None:
    """Raises UnsupportedKernel for blocks and scratch whose dtype has no register type, and operands of less than a byte."""
    arrays = [(mapping.origin, mapping.array) for mapping in (*kernel.inputs, *kernel.outputs)]
    with_scratch = arrays + [
        (f"scratch {n}", ArrayType(scratch.shape, scratch.dtype))
        for n, scratch in enumerate(kernel.scratch)
    ]
    for what, array in with_scratch:
        if array.dtype.name not in ELEMENTS:
            raise UnsupportedKernel(
                f"{what} of kernel `{kernel.name}` has a dtype that this target lacks",
                at=kernel.defined_at or None,
                why=f"{array}; covered: {', '.join(ELEMENTS)}",
                hint="convert it outside the kernel",
            )
    for what, array in arrays:
        if array.dtype.name in SUB_BYTE:
            raise UnsupportedKernel(
                f"{what} of kernel `{kernel.name}` has elements smaller than a byte",
                at=kernel.defined_at or None,
                why=str(array),
                hint="pass int8 and convert in the body",
            )
