"""dsl.Kernel -> one MLIR function that runs programs [low, high) of its parallel grid dimensions.

The sequential grid dimensions are loops inside. Where blocks do not divide an array, the last block is moved back if the
body allows it (lower/grid/block_shift.py). Otherwise a body some of whose blocks cross an edge is lowered for several cases, of
which each program finds its own (lower/grid/edge_variants.py): for blocks that lie inside, without masks, and for those at the
ends of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedKernel, UnsupportedOp
from pbkern.core.machine import LINE_BYTES
from pbkern.core.ops.scatter import SCATTERS
from pbkern.dsl.kernel import ArrayType, Blocked, BlockMapping, Kernel, Squeezed
from pbkern.lower.build import BodyBuilder
from pbkern.lower.grid import block_shift, edge_variants
from pbkern.lower.grid.edge_variants import Extent, Variant
from pbkern.lower.grid.parallelism import parallel_dimensions
from pbkern.lower.grid.scratch_resets import restarting_dimension
from pbkern.lower.mlir.element_types import ELEMENTS, SUB_BYTE
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest import ir, scratch
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.index_tests import Bounds
from pbkern.lower.nest.ir import Buf, Fetch, For, If, Let, Names, Nest, Sort, Stmt, Trace, While
from pbkern.lower.passes.dead_points import Body, trim
from pbkern.lower.passes.uniform_axes import narrow, narrowed_buffers, uniform_axes
from pbkern.lower.rules import debug_callbacks
from pbkern.lower.rules.views import index_value
from pbkern.lower.values.items import RefView
from pbkern.lower.values.values import Literal, Value
from pbkern.targets.cpu import passes
from pbkern.targets.cpu.emit.addressing import memref
from pbkern.targets.cpu.emit.nests import NestEmitter
from pbkern.targets.cpu.emit.radix_sort import emit_sort
from pbkern.targets.cpu.schedule import register_promotion

from .merge_functions import CALL
from .outlining import ARENA, ARENA_TYPE, FRAMED, Made, Outliner, Segment

INT32 = np.dtype(np.int32)
NEVER = 1 << 62
NOALIAS = " {llvm.noalias}"


@dataclass(frozen=True)
class LowerOptions:
    """What a target's CompilerParams mean for lowering."""

    approx_math: bool = False
    contract: bool = True
    vector_bits: int = 512
    semantics: tuple[str, ...] | None = None
    prefetch_steps: int = 0
    avx512: bool = False  # the machine has AVX-512F
    bf16_pairs: bool = False  # the machine has AVX512-BF16
    vnni: bool = False  # the machine has AVX512-VNNI
    l1_bytes: int = 32 << 10
    stream_bytes: int = NEVER  # results of this size and more are written past the caches; they start at a cache line
    stream_traffic: int = 0  # if operands and results are more than this many bytes


@dataclass(frozen=True)
class Function:
    """Text of a function.

    calls: declarations of functions that it calls; declaration: its own, where others call it by one; has_scalar_loops:
    whether LLVM's optimiser is worth its time.
    """

    name: str
    text: str
    calls: frozenset[str] = frozenset()
    declaration: str = ""
    has_scalar_loops: bool = False


@dataclass(frozen=True)
class LoweredKernel:
    """`main` is func.func @name(operands..., copies..., arena, low, high), which calls `pieces`.

    programs: number of parallel programs; scratch_bytes: arena of one task; nests: readable nest IR; copies: numbers of the
    operands of which it takes a copy from before the launch.
    """

    main: Function
    pieces: tuple[Function, ...]
    programs: int
    scratch_bytes: int
    nests: str
    operand_count: int
    copies: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.main.name

    @property
    def functions(self) -> tuple[Function, ...]:
        return (*self.pieces, self.main)

    @property
    def text(self) -> str:
        return "\n".join(f.text for f in self.functions)

    @property
    def prints(self) -> bool:
        """Whether the text holds numbers of print sites."""
        return any(debug_callbacks.DECLARATION in f.calls for f in self.functions)


class KernelLowering:
    """State of lowering one kernel."""

    def __init__(self, kernel: Kernel, name: str, options: LowerOptions, shifts: dict[int, block_shift.Shift]):
        self.kernel, self.name, self.options, self.shifts = kernel, name, options, shifts
        self.names = Names()
        self.text = Text(approx=options.approx_math, contract=options.contract, avx512=options.avx512)
        self.emitter = NestEmitter(self.text, options.vector_bits)
        self.nests: list[str] = []
        self.symbols: set[str] = set()  # scalars of index maps, known to bodies
        mappings = (*kernel.inputs, *kernel.outputs)
        self.bufs = [Buf(f"%a{k}", m.array.shape, m.array.dtype) for k, m in enumerate(mappings)]
        for m in mappings:
            if m.array.dtype.name in SUB_BYTE:
                raise UnsupportedOp(f"{m.origin} of kernel `{kernel.name}` has elements smaller than a byte",
                                    at=kernel.defined_at or None, why=str(m.array), hint="pass int8 and convert in the body")
        for i, o in kernel.aliases:
            self.bufs[len(kernel.inputs) + o].storage = self.bufs[i]
        if not kernel.aliases:
            results = zip(kernel.outputs, self.bufs[len(kernel.inputs):])
            traffic = sum(m.array.nbytes for m in mappings)
            least = options.stream_bytes if traffic > options.stream_traffic else NEVER
            self.emitter.streamed = frozenset(b for m, b in results if m.array.nbytes >= least)
        # What failed checks hand over; of operands that the kernel updates, the copy that the launch makes before.
        handed = kernel.in_types if debug_callbacks.hands_over_operands(kernel) else ()
        self.copies = {i: Buf(f"%before{i}", handed[i].shape, handed[i].dtype) for i, _ in kernel.aliases if handed}
        self.handed = tuple(self.copies.get(i, self.bufs[i]) for i in range(len(handed)))
        operands = {b.name: memref(b) for b in (*self.bufs, *self.copies.values())}
        self.outliner = Outliner(name, self.text, operands)
        self.scratch = [Buf(self.names("%t"), s.shape, s.dtype, arena=True) for s in kernel.scratch]
        self.offsets: dict[Buf, int] = {}
        self.arena_bytes = 0
        for b in self.scratch:  # kept between programs
            self.offsets[b] = self.arena_bytes
            self.arena_bytes += scratch.padded_bytes(b)
        self.kept_bytes, self.kept = self.arena_bytes, frozenset(self.offsets)

    def lower(self) -> LoweredKernel:
        kernel = self.kernel
        self.parallel = parallel = parallel_dimensions(kernel, self.options.semantics)
        programs = math.prod(kernel.grid[d] for d in parallel)
        block = Block(self.text.top)
        block.values["%p"] = "%p"
        self.text.indices.add("%p")
        self._delinearise(block, parallel)
        self._sequential(block, [d for d in range(len(kernel.grid)) if d not in parallel])
        return LoweredKernel(*self._functions(block), programs, self.arena_bytes,
                             "\n".join(self.nests), sum(b.storage is None for b in self.bufs), tuple(self.copies))

    def _delinearise(self, block: Block, parallel: tuple[int, ...]) -> None:
        rest = "%p"
        for d in reversed(parallel):
            n = self.kernel.grid[d]
            if d == parallel[0]:
                block.values[f"%g{d}"] = rest if n > 1 else 0
            elif n > 1:
                size = self.text.index(n)
                block.values[f"%g{d}"] = self.text.put(block, f"arith.remui {rest}, {size} : index")
                rest = self.text.put(block, f"arith.divui {rest}, {size} : index")
            else:
                block.values[f"%g{d}"] = 0

    def _sequential(self, block: Block, dims: list[int]) -> None:
        if not dims:
            self._program(block)
            return

        def fill(inner: Block, _) -> list:
            self._sequential(inner, dims[1:])
            return []

        self.text.loop(block, f"%g{dims[0]}", 0, self._grid_size(block, dims[0]), 1, fill)

    def _grid_size(self, block: Block, dim: int) -> int | str:
        """Size of a grid dimension: a constant, or the value of its operand."""
        operand = dict(self.kernel.dynamic_grid).get(dim)
        if operand is None:
            return self.kernel.grid[dim]
        buf = self.bufs[operand]
        size = self.text.put(block, f"memref.load {buf.name}[{self.text.index(0)}] : {memref(buf)}")
        return self.text.put(block, f"arith.index_cast {size} : i32 to index")

    # ---------------------------------------------------------------- one program

    def _program(self, block: Block) -> None:
        """Block starts, then the body: guarded only where some block may cross an edge."""
        for d, s in self.shifts.items():
            _, start = self.text.affine(block, Affine.symbol(f"%g{d}", s.block))
            limit = self.text.index(s.limit)
            block.values[block_shift.symbol(d)] = self.text.put(block, f"arith.minsi {start}, {limit} : index")
        views = self._views(block)
        if self.options.prefetch_steps:
            self._prefetch(block, views)
        blocks = list(dict.fromkeys(
            e for _, offsets, _, m in views for e in edge_variants.extents(offsets, m.dims, m.array.shape)))
        bounds = self._bounds()
        ragged = edge_variants.ragged_dimensions(blocks, bounds, self.kernel)
        if ragged:
            cases = edge_variants.variants(ragged, blocks, bounds, self.kernel)
            self._choose(block, ragged, list(zip(cases, self._bodies(views, cases))))
            return
        states = {e: e.lies_inside(bounds) for e in blocks}
        if None not in states.values() or False in states.values():
            cases = [Variant(bounds, False in states.values())]
            (stmts,) = self._bodies(views, cases)
            self._body(block, stmts, cases[0])
            return
        condition = self._all_inside(block, [e for e, state in states.items() if state is None])
        cases = [Variant(_inside(blocks, bounds), False), Variant(bounds, True)]
        inside, guarded = self._bodies(views, cases)
        self.text.when(block, condition, lambda b: self._body(b, inside, cases[0]), lambda b: self._body(b, guarded, cases[1]))

    def _choose(self, block: Block, ragged: Sequence[int], bodies: list[tuple[Variant, list[Stmt]]]) -> None:
        """The body for the programs at this place of the grid."""
        if not ragged:
            ((variant, stmts),) = bodies
            self._body(block, stmts, variant)
            return
        d, *rest = ragged
        last = self.text.index(self.kernel.grid[d] - 1)
        test = self.text.put(block, f"arith.cmpi ult, {self._name(block.lookup(f'%g{d}')[1])}, {last} : index")
        before, at_end = ([(v, s) for v, s in bodies if (d in v.last) is end] for end in (False, True))
        self.text.when(block, test, lambda b: self._choose(b, rest, before), lambda b: self._choose(b, rest, at_end))

    def _views(self, block: Block) -> list[tuple]:
        """Per operand (buf, offsets, axes, mapping)."""
        views = []
        for m, buf in zip((*self.kernel.inputs, *self.kernel.outputs), self.bufs):
            offsets = self._starts(block, m)
            axes, k = [], 0
            for d in m.dims:
                axes.append(None if isinstance(d, Squeezed) else k)
                k += not isinstance(d, Squeezed)
            views.append((buf, offsets, tuple(axes), m))
        return views

    def _prefetch(self, block: Block, views: list) -> None:
        """Asks for the input blocks of the step `prefetch_steps` ahead: one prefetch per cache line. Those never fault,
        so the last steps need no test."""
        inner = [d for d in range(len(self.kernel.grid)) if self.kernel.grid[d] > 1 and d not in self.parallel]
        inner = inner or [d for d in self.parallel if self.kernel.grid[d] > 1]
        if not inner:
            return
        last = inner[-1]
        moving = {f"%g{last}": 1, block_shift.symbol(last): self.shifts[last].block if last in self.shifts else 0}
        for buf, offsets, axes, m in views[: len(self.kernel.inputs)]:
            ahead = [o + sum(o.coefficient(s) * n for s, n in moving.items()) * self.options.prefetch_steps for o in offsets]
            if ahead == list(offsets):
                continue
            sizes = [1 if a is None else d.size for a, d in zip(axes, m.dims)]
            self._prefetch_block(block, buf, ahead, sizes)

    def _prefetch_block(self, block: Block, buf: Buf, starts: list[Affine], sizes: list[int]) -> None:
        line = max(LINE_BYTES // buf.dtype.itemsize, 1)
        symbols = [self.names("%x") for _ in sizes]
        flat = Affine()
        for start, x, stride in zip(starts, symbols, buf.strides):
            flat = flat + (start + Affine.symbol(x)) * stride

        def walk(b: Block, k: int) -> list:
            if k == len(sizes):
                _, address = self.text.affine(b, flat)
                b.lines.append(f"memref.prefetch {buf.root.name}[{address}], read, locality<2>, data : {memref(buf)}")
            else:
                step = line if k == len(sizes) - 1 else 1
                self.text.loop(b, symbols[k], 0, sizes[k], step, lambda inner, _: walk(inner, k + 1))
            return []

        walk(block, 0)

    def _all_inside(self, block: Block, blocks: list[Extent]) -> str:
        """Whether these lie inside their arrays."""
        tests = []
        for e in blocks:
            _, name = self.text.affine(block, e.start)
            a = self.text.put(block, f"arith.cmpi sge, {name}, {self.text.index(0)} : index")
            b = self.text.put(block, f"arith.cmpi sle, {name}, {self.text.index(e.length - e.size)} : index")
            tests.append(self.text.put(block, f"arith.andi {a}, {b} : i1"))
        condition, *rest = dict.fromkeys(tests)
        for t in rest:
            condition = self.text.put(block, f"arith.andi {condition}, {t} : i1")
        return condition

    def _starts(self, block: Block, m: BlockMapping) -> tuple[Affine, ...]:
        """First element per array axis, affine in grid symbols; other index maps are computed here as scalars."""
        if all(s is not None for s in m.starts):
            starts = (block_shift.moved(s, self.shifts) for s in m.starts)
            return tuple(s.substitute(lambda g: Affine.symbol(f"%g{g}") if isinstance(g, int) else None) for s in starts)
        builder = BodyBuilder(self.names)
        env = {v: self._grid_value(builder, d) for d, v in enumerate(m.index_map.jaxpr.invars[: len(self.kernel.grid)])}
        for k, v in enumerate(m.index_map.jaxpr.invars[len(self.kernel.grid):]):
            builder.refs[v] = self._whole(self.bufs[k])
        found: list[Affine] = []
        stmts = builder.region(m.index_map.jaxpr, env, lambda e: found.extend(
            builder.index_symbol(builder.read(e, o)) for o in m.index_map.jaxpr.outvars))
        self._statements(block, self._finish(builder, stmts))
        self.kept_bytes, self.kept = self.arena_bytes, frozenset(self.offsets)
        return tuple(i * (d.size if isinstance(d, Blocked) else 1) for i, d in zip(found, m.dims))

    def _grid_value(self, builder: BodyBuilder, d: int) -> Value:
        return index_value((), INT32, lambda ix: Affine.symbol(f"%g{d}"), builder)

    def _whole(self, buf: Buf) -> RefView:
        rank = len(buf.shape)
        return RefView(buf, buf.shape, buf.dtype, (Affine(),) * rank, tuple(range(rank)))

    def _bodies(self, views: list, cases: list[Variant]) -> list[list[Stmt]]:
        """The body's statements, for each case; they agree about uniform scratch, which all of them use."""
        built = [self._build(views, case) for case in cases]
        axes = uniform_axes([stmts for _, stmts in built])
        made = narrowed_buffers(axes)
        self.offsets = {made.get(b, b): offset for b, offset in self.offsets.items()}
        self.kept = frozenset(made.get(b, b) for b in self.kept)
        narrowed = [narrow(stmts, axes, made, b.pool) for b, stmts in built]
        if any(case.guarded for case in cases):
            narrowed = trim([Body(stmts, b.pool, b.bounds, self._handed_on(case, made))
                             for (b, _), stmts, case in zip(built, narrowed, cases)])
        return [self._finish(b, stmts, b.bounds | case.bounds) for (b, _), stmts, case in zip(built, narrowed, cases)]

    def _handed_on(self, case: Variant, made: dict[Buf, Buf]) -> dict[Buf, tuple]:
        """Scratch -> what is equal for cases whose programs may hand it to each other: their place before its dimension."""
        found = {}
        for n, (s, buf) in enumerate(zip(self.kernel.scratch, self.scratch)):
            first = len(self.kernel.grid) if s.scoped else restarting_dimension(self.kernel, n)
            found[made.get(buf, buf)] = (n, frozenset(d for d in case.last if d < first))
        return found

    def _body(self, block: Block, stmts: list[Stmt], case: Variant) -> None:
        if self._scatters_much() or not block_shift.is_function(self.kernel):  # what is read again stays in caches
            self.emitter.streamed -= scratch.read(stmts)
        self.nests.append(case.title + ir.show(stmts))
        self._statements(block, stmts)

    def _build(self, views: list, case: Variant) -> tuple[BodyBuilder, list[Stmt]]:
        builder = BodyBuilder(self.names)
        builder.kernel, builder.operands, builder.bounds = self.kernel, self.handed, dict(case.bounds)
        builder.grid = tuple(self._grid_value(builder, d) for d in range(len(self.kernel.grid)))
        dynamic = dict(self.kernel.dynamic_grid)
        builder.grid_sizes = tuple(builder.whole(self.bufs[dynamic[d]]) if d in dynamic else Literal((), INT32, n)
                                   for d, n in enumerate(self.kernel.grid))
        refs = [RefView(buf, m.ref_shape, m.array.dtype, offsets, axes, self._may_cross(m, offsets, case))
                for buf, offsets, axes, m in views]
        refs += [self._whole(b) for b in self.scratch]
        jaxpr = self.kernel.body.jaxpr
        builder.refs = dict(zip(jaxpr.invars, refs))
        return builder, block_shift.apply(builder.region(jaxpr, {}), builder.pool, self.shifts)

    def _may_cross(self, m: BlockMapping, offsets, case: Variant) -> bool:
        extents = edge_variants.extents(offsets, m.dims, m.array.shape)
        return case.guarded and any(not e.lies_inside(case.bounds) for e in extents)

    def _scatters_much(self) -> bool:
        """Whether a scatter combines more elements than its result has."""
        scatters = [e for e in self.kernel.body.jaxpr.eqns if e.primitive.name in SCATTERS]
        return any(e.invars[2].aval.size > e.invars[0].aval.size for e in scatters)

    def _bounds(self) -> dict[str, tuple[int, int]]:
        """(smallest, largest) of grid indices and shifted starts."""
        bounds = {f"%g{d}": (0, n - 1) for d, n in enumerate(self.kernel.grid)}
        return bounds | {block_shift.symbol(d): (0, s.limit) for d, s in self.shifts.items()}

    def _finish(self, builder: BodyBuilder, stmts: list[Stmt], bounds: dict | None = None) -> list[Stmt]:
        stmts = passes.optimise(stmts, builder, self.options, bounds or {}, self.kept)
        # Bodies for inner and for edge blocks exclude each other: both start behind what is kept.
        offsets, end = scratch.place(stmts, self.kept_bytes, self.kept)
        self.offsets |= offsets
        self.arena_bytes = max(self.arena_bytes, end)
        indices = {f"%g{d}" for d in range(len(self.kernel.grid))} | {block_shift.symbol(d) for d in self.shifts}
        ir.verify(stmts, frozenset(indices | self.symbols))
        return stmts

    # ---------------------------------------------------------------- statements

    def _statements(self, block: Block, stmts: list[Stmt]) -> None:
        """Appends statements; where they are many, as calls of functions that hold them."""
        before, self.emitter.has_scalar_loops = self.emitter.has_scalar_loops, False
        runs: list[list[Segment]] = [[]]
        scalar = False
        for s in stmts:
            if isinstance(s, Let):  # known to all that follows
                self._let(block, s.name, s.value)
                runs.append([])
            else:
                runs[-1].append(self._segment(block, s))
                scalar |= runs[-1][-1].scalar
        cut = self.outliner.outline(block, runs, lambda: {b.name: memref(b) for b in self.offsets})
        self.emitter.has_scalar_loops = before | (scalar and not cut)

    def _segment(self, block: Block, s: Stmt) -> Segment:
        """Appends one statement. What it shares with later ones is in `block`, before it."""
        inner, self.emitter.has_scalar_loops = Block(block), False
        self._statement(inner, s)
        start = len(block.lines)
        block.lines += inner.lines
        block.has_long_loops |= inner.has_long_loops
        return Segment(start, len(block.lines), self.emitter.has_scalar_loops)

    def _statement(self, block: Block, s: Stmt) -> None:
        match s:
            case Nest():
                self.emitter.emit(block, s)
            case If(index=i, branches=branches):
                self._if(block, i, branches)
            case For():
                self._for(block, s)
            case While(condition=c, predicate=p, body=body):
                self._while(block, c, p, body)
            case Sort():
                self.emitter.has_scalar_loops = True
                emit_sort(self.text, block, s)
            case Fetch():
                self._fetch(block, s)
            case Trace():
                debug_callbacks.emit_trace(self.text, block, s, memref)

    def _fetch(self, block: Block, s: Fetch) -> None:
        """One prefetch per cache line: they never fault."""
        line = max(LINE_BYTES // s.buf.dtype.itemsize, 1)
        flat = flat_index(s.buf, s.index)
        for k in range(0, s.count, line):
            _, address = self.text.affine(block, flat + k)
            block.lines.append(f"memref.prefetch {s.buf.root.name}[{address}], write, locality<3>, data : {memref(s.buf)}")

    def _let(self, block: Block, name: str, value) -> None:
        holder = Nest({})
        v = self.emitter.scalar(block, value, holder)
        cast = "index_castui" if value.dtype.kind in "ub" else "index_cast"
        block.values[name] = self.text.put(block, f"arith.{cast} {v.name} : {v.el} to index")
        self.symbols.add(name)

    def _if(self, block: Block, index: str, branches: list[list[Stmt]]) -> None:
        _, value = block.lookup(index)

        def chain(b: Block, k: int) -> None:
            if k == len(branches) - 1:
                self._statements(b, branches[k])
                return
            test = self.text.put(b, f"arith.cmpi eq, {self._name(value)}, {self.text.index(k)} : index")
            self.text.when(b, test, lambda x: self._statements(x, branches[k]), lambda x: chain(x, k + 1))

        chain(block, 0)

    def _name(self, value: str | int) -> str:
        return value if isinstance(value, str) else self.text.index(value)

    def _for(self, block: Block, loop: For) -> None:
        high = loop.trips if isinstance(loop.trips, int) else self._name(block.lookup(loop.trips)[1])
        kept = register_promotion.plan(loop, self.options.vector_bits, self.options.contract)
        if kept is not None:
            self.emitter.loop_in_registers(block, loop, high, kept)
            return

        def fill(inner: Block, _) -> list:
            self._statements(inner, loop.body)
            return []

        self.text.loop(block, loop.counter, 0, high, 1, fill)

    def _while(self, block: Block, condition: list[Stmt], predicate: str, body: list[Stmt]) -> None:
        before, after = Block(block), Block(block)
        self._statements(before, condition)
        value = self._name(before.lookup(predicate)[1]) if predicate.startswith("%") else self.text.index(int(predicate))
        test = self.text.put(before, f"arith.cmpi ne, {value}, {self.text.index(0)} : index")
        self._statements(after, body)
        block.lines += ["scf.while : () -> () {", *before.lines, f"scf.condition({test})", "} do {", *after.lines,
                        "scf.yield", "}"]

    # ---------------------------------------------------------------- the function

    def _arena_bytes(self) -> int:
        return max(self.arena_bytes, scratch.ALIGNMENT)

    def _functions(self, block: Block) -> tuple[Function, tuple[Function, ...]]:
        """The kernel's own, and those that it calls."""
        aliased = {i for i, _ in self.kernel.aliases}
        arena_type, one = f"memref<{self._arena_bytes()}xi8>", self.text.index(1)
        arrays = {b: "" if k in aliased else NOALIAS for k, b in enumerate(self.bufs) if b.storage is None}
        arrays |= dict.fromkeys(self.copies.values(), NOALIAS)
        args = [f"{b.name}: {memref(b)}{a}" for b, a in arrays.items()]
        args += [f"%arena: {arena_type}{NOALIAS}", "%low: index", "%high: index"]
        head = [f"{b.name} = memref.view %arena[{self.text.index(offset)}][] : {arena_type} to {memref(b)}"
                for b, offset in self.offsets.items()]
        constants = [f"{n} = {t}" for t, n in self.text.constants.items()]
        # Stores past the caches are not ordered with others: the fence comes before any word that the work is done.
        fence = ['llvm.inline_asm has_side_effects "sfence", "" : () -> ()'] if self.emitter.streams else []
        main = [f"func.func @{self.name}({', '.join(args)}) {FRAMED} {{", *constants, *head, *self.text.top.lines,
                f"scf.for %p = %low to %high step {one} {{", *block.lines, "}", *fence, "return", "}"]
        attributes = {b.name: a for b, a in arrays.items()} | {ARENA: NOALIAS}
        views = {b.name: f"{b.name} = memref.view %arena[{b.name}_at][] : {arena_type} to {memref(b)}" for b in self.offsets}
        made = self.outliner.functions(attributes, views, {b.name: offset for b, offset in self.offsets.items()})
        pieces = tuple(self._function(m.name, m.text, m.declaration, m.scalar, made) for m in made)
        return self._function(self.name, "\n".join(main), "", self.emitter.has_scalar_loops, made), pieces

    def _function(self, name: str, text: str, declaration: str, scalar: bool, made: list[Made]) -> Function:
        def sized(text: str) -> str:
            return text.replace(ARENA_TYPE, f"memref<{self._arena_bytes()}xi8>")

        text = "\n".join(self.outliner.calls.get(line, line) for line in text.splitlines())
        calls = {sized(m.declaration) for m in made if f"{CALL}{m.name}(" in text}
        calls |= {debug_callbacks.DECLARATION} if debug_callbacks.TRACE in text else set()
        return Function(name, sized(text), frozenset(calls), sized(declaration), scalar)


def _inside(blocks: list[Extent], bounds: Bounds) -> dict[str, tuple[int, int]]:
    """What is left of the bounds where all blocks lie inside."""
    found = dict(bounds)
    for e in blocks:
        if len(e.start.terms) == 1 and e.start.terms[0][1] > 0 and e.start.terms[0][0] in found:
            symbol, c = e.start.terms[0]
            low, high = found[symbol]
            found[symbol] = (max(low, -(e.start.const // c)), min(high, (e.length - e.size - e.start.const) // c))
    return found


def check_dtypes(kernel: Kernel) -> None:
    """Raises UnsupportedKernel for blocks and scratch whose dtype has no register type."""
    found = [(m.origin, m.array) for m in (*kernel.inputs, *kernel.outputs)]
    found += [(f"scratch {n}", ArrayType(s.shape, s.dtype)) for n, s in enumerate(kernel.scratch)]
    for what, array in found:
        if array.dtype.name not in ELEMENTS:
            raise UnsupportedKernel(
                f"{what} of kernel `{kernel.name}` has a dtype that this target lacks", at=kernel.defined_at or None,
                why=f"{array}; covered: {', '.join(ELEMENTS)}",
                hint="convert it outside the kernel (a complex array: pass real and imaginary parts)",
            )  # fmt: skip


def lower_kernel(kernel: Kernel, name: str, options: LowerOptions | None = None) -> LoweredKernel:
    """Text of one kernel's function. Raises UnsupportedOp for equations without a rule."""
    check_dtypes(kernel)
    options = options or LowerOptions()
    try:
        return KernelLowering(kernel, name, options, block_shift.find(kernel)).lower()
    except block_shift.CannotShift:
        return KernelLowering(kernel, name, options, {}).lower()
