"""KernelNests -> one MLIR function that runs programs [low, high) of its parallel grid dimensions.

The sequential grid dimensions are loops inside; a program finds its case of the body by its grid
indices, or by where its blocks start.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from pbkern.core.affine import Affine
from pbkern.core.budget import Budget
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import LINE_BYTES
from pbkern.core.ops.scatter import SCATTERS
from pbkern.dsl.kernel import Kernel
from pbkern.lower.grid import block_shift
from pbkern.lower.kernel_nests import BodyCase, KernelNests, kernel_nests
from pbkern.lower.mlir import range_reports
from pbkern.lower.mlir.operation import Operation, Region, for_syntax
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest import effects, scratch
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Buf, For, If, Let, Nest, Prefetch, Sort, Stmt, Trace, While, every
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.lower.programs import ProgramText
from pbkern.lower.rules import debug_callbacks
from pbkern.targets.cpu.emit.addressing import memref
from pbkern.targets.cpu.emit.nests import CpuNestEmitter
from pbkern.targets.cpu.emit.sorts.lines import emit_sort
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.math.table import AVX2, AVX512, NEON, X86
from pbkern.targets.cpu.passes import CPU_PASSES
from pbkern.targets.cpu.schedule import register_promotion
from pbkern.targets.cpu.schedule.schedule_text import schedule_text
from pbkern.targets.host.kernel_text import FunctionText, LoweredKernel
from pbkern.targets.llvm.repairs import repaired

from .outlining import (
    ARENA,
    ARENA_TYPE,
    FRAME,
    FRAMED,
    EmittedFunction,
    Outliner,
    StatementRange,
    call,
)
from .repeated_nests import NestForm, repeated_forms

# Most lines of one kernel's text; a longer kernel falls back to plain code, and from there to XLA. MLIR
# and LLVM take about 0.1 ms for a line.
KERNEL_LINES = 600_000
# Most seconds of writing one kernel's text; a slower kernel goes the same way.
KERNEL_SECONDS = 120
NOALIAS = " {llvm.noalias}"
# Functions of the runtime -> their declarations.
OF_THE_RUNTIME = {
    debug_callbacks.FUNCTION: debug_callbacks.DECLARATION,
    range_reports.REPORT: f"func.func private @{range_reports.REPORT}()",
}


@dataclass(frozen=True)
class NestFunction:
    """A function that computes nests of one form. types: of its arrays, in order."""

    name: str
    types: tuple[str, ...]


class KernelLowering(ProgramText):
    """State of writing one kernel's nests as MLIR."""

    def __init__(self, nests: KernelNests, name: str):
        super().__init__(nests)
        self.name = name
        assert isinstance(nests.options, LowerOptions)
        self.options = options = nests.options
        self.names = nests.prologue.context.names
        plain = X86 if options.asymmetric_minima else NEON
        functions = AVX512 if options.avx512 else AVX2 if options.avx2 else plain
        limited = not (
            options.plain and self.kernel.defined_at
        )  # nothing runs a kernel written by hand but its own code
        budget = Budget(KERNEL_LINES, KERNEL_SECONDS) if limited else Budget()
        self.text = Text(
            approx=options.approx_math,
            contract=options.contract,
            math=functions,
            pins=options.avx512,
            most_constants=options.vectors.registers if options.avx2 and not options.avx512 else 0,
            budget=budget,
        )
        self.emitter = CpuNestEmitter(self.text, options.vectors, name)
        self.emitter.plain = options.plain
        self.emitter.programs = math.prod(self.kernel.grid)
        self.emitter.stores.streamed = frozenset() if options.plain else self._streamed()
        self.emitter.stores.puts_lines_together = options.avx512
        self.emitter.stores.divisors = {
            block_shift.symbol(dim): shift.divisor for dim, shift in nests.shifts.items()
        }
        self.bufs = [operand.buf for operand in nests.operands]
        operands = {buf.name: memref(buf) for buf in (*self.bufs, *nests.copies.values())}
        self.outliner = Outliner(name, self.text, operands, repaired if options.avx512 else iter)
        self.offsets: dict[Buf, int] = {}
        self.arena_bytes = 0
        self._place()
        self.repeated = {} if options.plain else self._repeated()
        self.nest_functions: dict[Hashable, NestFunction] = {}  # by the key of their form

    def _streamed(self) -> frozenset[Buf]:
        """Results that are written past the caches.

        They are large ones of kernels whose arrays together do not stay there, unless they are read
        again.
        """
        operands, options = self.nests.operands, self.options
        if (
            sum(operand.mapping.array.nbytes for operand in operands) <= options.stream_traffic
            or self.kernel.aliases
        ):
            return frozenset()
        results = operands[len(self.kernel.inputs) :]
        large = {
            result.buf for result in results if result.mapping.array.nbytes >= options.stream_bytes
        }
        nests = [
            stmt
            for case in self.nests.cases
            if large
            for stmt in every(list(case.statements))
            if isinstance(stmt, Nest)
        ]
        return frozenset(large - {load.buf.root for nest in nests for load in nest.loads()})

    def _place(self) -> None:
        """Gives scratch its places in the arena: what is kept between programs, of the prologue, then of the cases."""
        for buf, declared in zip(self.nests.scratch, self.kernel.scratch):
            self.offsets[buf] = self.arena_bytes
            self.arena_bytes += scratch.padded_bytes(Buf(buf.name, declared.shape, declared.dtype))
        offsets, start = scratch.place(
            list(self.nests.prologue.statements), self.arena_bytes, self.nests.scratch
        )
        self.offsets |= offsets
        persistent, self.arena_bytes = frozenset(self.offsets), start
        for case in self.nests.cases:  # they exclude each other: all start behind what is kept
            offsets, end = scratch.place(list(case.statements), start, persistent)
            self.offsets |= offsets
            self.arena_bytes = max(self.arena_bytes, end)

    def lower(self) -> LoweredKernel:
        kernel, parallel = self.kernel, self.nests.parallel
        programs = math.prod(kernel.grid[dim] for dim in parallel)
        block = Block(self.text.top)
        block.values["%p"] = "%p"
        self.text.indices.add("%p")
        self._delinearise(block, parallel)
        self.in_order(
            block, [axis for axis in range(len(kernel.grid)) if axis not in parallel], self.program
        )
        return LoweredKernel(
            *self._functions(block),
            programs,
            self.arena_bytes,
            "\n".join(self.shown),
            schedule_text(self.nests, self.options.prefetch_steps),
            sum(buf.storage is None for buf in self.bufs),
            tuple(self.nests.copies),
        )

    def _delinearise(self, block: Block, parallel: tuple[int, ...]) -> None:
        rest = "%p"
        for dim in reversed(parallel):
            extent = self.kernel.grid[dim]
            if dim == parallel[0]:
                block.values[f"%g{dim}"] = rest if extent > 1 else 0
            elif extent > 1:
                size = self.text.index(extent)
                block.values[f"%g{dim}"] = self.text.put(
                    block, "arith.remui", (rest, size), "index"
                )
                rest = self.text.put(block, "arith.divui", (rest, size), "index")
            else:
                block.values[f"%g{dim}"] = 0

    def dynamic_size(self, block: Block, operand: int) -> str:
        buf = self.bufs[operand]
        size = self.text.put(block, "memref.load", (buf.name, self.text.index(0)), memref(buf))
        return self.text.put(block, "arith.index_cast", (size,), "i32 to index")

    # ---------------------------------------------------------------- one program

    def before_body(self, block: Block) -> None:
        if self.options.prefetch_steps:
            self._prefetch(block)

    def body(self, block: Block, case: BodyCase) -> None:
        stmts = list(case.statements)
        if self._scatters_much() or not block_shift.is_function(
            self.kernel
        ):  # what is read again stays in caches
            self.emitter.stores.streamed -= effects.read(stmts)
        super().body(block, case)

    def _scatters_much(self) -> bool:
        """Whether a scatter combines more elements than its result has."""
        scatters = [eqn for eqn in self.kernel.body.jaxpr.eqns if eqn.primitive.name in SCATTERS]
        return any(
            scatter.invars[2].aval.size > scatter.invars[0].aval.size for scatter in scatters
        )

    def _prefetch(self, block: Block) -> None:
        """Prefetches the input blocks of the step `prefetch_steps` ahead: one prefetch per cache line.

        Those never fault, so the last steps need no test.
        """
        inner = [
            axis
            for axis in range(len(self.kernel.grid))
            if self.kernel.grid[axis] > 1 and axis not in self.nests.parallel
        ]
        inner = inner or [dim for dim in self.nests.parallel if self.kernel.grid[dim] > 1]
        if not inner:
            return
        last = inner[-1]
        shifts = self.nests.shifts
        streamed = {
            f"%g{last}": 1,
            block_shift.symbol(last): shifts[last].block if last in shifts else 0,
        }
        for operand in self.nests.operands[: len(self.kernel.inputs)]:
            ahead = [
                start
                + sum(start.coefficient(symbol) * shift for symbol, shift in streamed.items())
                * self.options.prefetch_steps
                for start in operand.starts
            ]
            if ahead != list(operand.starts):
                self._prefetch_block(
                    block, operand.buf, ahead, [dim.size for dim in operand.mapping.dims]
                )

    def _prefetch_block(
        self, block: Block, buf: Buf, starts: list[Affine], sizes: list[int]
    ) -> None:
        line = max(LINE_BYTES // buf.dtype.itemsize, 1)
        symbols = [self.names("%x") for _ in sizes]
        flat: Affine = Affine()
        for start, symbol, stride in zip(starts, symbols, buf.strides):
            flat = flat + (start + Affine.symbol(symbol)) * stride

        def walk(scope: Block, axis: int) -> list:
            if axis == len(sizes):
                _, address = self.text.affine(scope, flat)
                scope.add(
                    "memref.prefetch",
                    (buf.root.name, address),
                    memref(buf),
                    " %s[%s], read, locality<2>, data",
                )
            else:
                step = line if axis == len(sizes) - 1 else 1
                self.text.loop(
                    scope,
                    symbols[axis],
                    0,
                    sizes[axis],
                    step,
                    lambda inner, _: walk(inner, axis + 1),
                )
            return []

        walk(block, 0)

    # ---------------------------------------------------------------- statements

    def statements(self, block: Block, stmts: Sequence[Stmt]) -> None:
        """Appends statements; where they are many, as calls of functions that hold them."""
        before, self.emitter.has_scalar_loops = self.emitter.has_scalar_loops, False
        runs: list[list[StatementRange]] = [[]]
        scalar = False
        for stmt in stmts:
            if isinstance(stmt, Let):  # known to all that follows
                self._let(block, stmt.name, stmt.value)
                runs.append([])
            else:
                runs[-1].append(self._segment(block, stmt))
                scalar |= runs[-1][-1].scalar
        cut = self.outliner.outline(
            block, runs, lambda: {offset.name: memref(offset) for offset in self.offsets}
        )
        self.emitter.has_scalar_loops = before | (scalar and not cut)

    def _segment(self, block: Block, stmt: Stmt) -> StatementRange:
        """Appends one statement. What it shares with later ones is in `block`, before it."""
        inner, self.emitter.has_scalar_loops = Block(block), False
        self._statement(inner, stmt)
        inner.report()
        start = len(block.operations)
        block.take(inner)
        block.has_long_loops |= inner.has_long_loops
        return StatementRange(
            start,
            len(block.operations),
            sum(op.size for op in inner.operations),
            self.emitter.has_scalar_loops,
        )

    def _statement(self, block: Block, stmt: Stmt) -> None:
        match stmt:
            case Nest() if id(stmt) in self.repeated:
                self._call_nest(block, self.repeated[id(stmt)])
            case Nest():
                self.emitter.emit(block, stmt)
            case If():
                self.branch(block, stmt)
            case For():
                self._for(block, stmt)
            case While():
                self.conditional_loop(block, stmt)
                self.emitter.has_scalar_loops |= _is_scalar(stmt)
            case Sort():
                self.emitter.has_scalar_loops = True
                emit_sort(self.text, block, stmt, wide_minima=self.options.avx512)
            case Prefetch():
                self._fetch(block, stmt)
            case Trace():
                debug_callbacks.emit_trace(self.text, block, stmt, memref)

    def _repeated(self) -> dict[int, NestForm]:
        """Forms of nests that are calls of functions. Stores past the caches rely on where arrays begin."""
        apart = {
            buf for buf, attribute in self._arrays().items() if attribute
        } | self.offsets.keys()
        sections = (self.nests.prologue, *self.nests.cases)
        stmts = [stmt for section in sections for stmt in section.statements]
        return repeated_forms(stmts, apart - self.emitter.stores.streamed)

    def _call_nest(self, block: Block, form: NestForm) -> None:
        """Appends the call of the function that computes a nest, which the first of its form makes."""
        function = self.nest_functions.get(form.key)
        if function is None:
            function = self.nest_functions[form.key] = self._nest_function(form)
        arrays = [
            self._seen_as(block, root, kind) for root, kind in zip(form.roots, function.types)
        ]
        places = [*form.starts.values(), *map(Affine.symbol, form.symbols)]
        indices = [self.text.affine(block, place)[1] for place in places]
        types = (*function.types, *["index"] * len(indices))
        block.operations.append(call(function.name, (*arrays, *indices), types))

    def _nest_function(self, form: NestForm) -> NestFunction:
        arrays = {root: f"%array{number}" for number, root in enumerate(form.roots)}
        starts = {root: f"%start{number}" for number, root in enumerate(form.starts)}
        symbols = {symbol: f"%symbol{number}" for number, symbol in enumerate(form.symbols)}
        outer, top = self.text.top, Block(None, self.text)
        top.values |= {name: name for name in starts.values()} | symbols
        self.text.top, self.emitter.has_scalar_loops = top, False
        block = Block(top)
        self.emitter.emit(block, form.template(arrays, starts, self.nests.prologue.context.pool))
        self.text.top = outer
        top.take(block)
        top.report()
        types = tuple(map(memref, form.roots))
        passed = dict(zip(arrays.values(), types)) | dict.fromkeys(
            (*starts.values(), *symbols.values()), "index"
        )
        self.text.indices.update((*starts.values(), *symbols.values()))
        name = self.outliner.function(top.operations, passed, self.emitter.has_scalar_loops)
        self.emitter.has_scalar_loops = False
        return NestFunction(name, types)

    def _seen_as(self, block: Block, root: Buf, kind: str) -> str:
        """A buffer under a type of another length."""
        declared = memref(root)
        if declared == kind:
            return root.name
        length = kind.partition("<")[2].partition("x")[0]
        syntax = f" %s to offset: [0], sizes: [{length}], strides: [1]"
        return self.text.put(
            block, "memref.reinterpret_cast", (root.name,), f"{declared} to {kind}", syntax
        )

    def _fetch(self, block: Block, fetch: Prefetch) -> None:
        """One prefetch per cache line: they never fault."""
        line = max(LINE_BYTES // fetch.buf.dtype.itemsize, 1)
        flat = flat_index(fetch.buf, fetch.index)
        for k in range(0, fetch.count, line):
            _, address = self.text.affine(block, flat + k)
            block.add(
                "memref.prefetch",
                (fetch.buf.root.name, address),
                memref(fetch.buf),
                " %s[%s], write, locality<3>, data",
            )

    def _let(self, block: Block, name: str, value) -> None:
        holder = Nest({})
        scalar = self.emitter.scalar(block, value, holder)
        cast = "index_castui" if value.dtype.kind in "ub" else "index_cast"
        block.values[name] = self.text.put(
            block, f"arith.{cast}", (scalar.name,), f"{scalar.el} to index"
        )

    def _for(self, block: Block, loop: For) -> None:
        promoted = (
            None if self.options.plain else register_promotion.plan(loop, self.options.vectors)
        )
        if promoted is not None:
            trips = self.trips(block, loop)
            self.emitter.promoted.emit(block, loop, trips, promoted, self.emitter.emit)
        else:
            self.counted_loop(block, loop)
            self.emitter.has_scalar_loops |= _is_scalar(loop)

    # ---------------------------------------------------------------- the function

    def _arena_bytes(self) -> int:
        return max(self.arena_bytes, scratch.BUFFER_ALIGNMENT)

    def _functions(self, block: Block) -> tuple[FunctionText, tuple[FunctionText, ...]]:
        """The kernel's own, and those that it calls, callees before callers."""
        self.text.top.report()
        block.report()
        arena_type = f"memref<{self._arena_bytes()}xi8>"
        arrays = self._arrays()
        callees = self._callees(arrays, arena_type)
        declarations = OF_THE_RUNTIME | {
            callee.name: self._sized(callee.declaration) for callee in callees
        }
        pieces = tuple(self._function(callee, declarations) for callee in callees)
        whole = self._main(block, arrays, arena_type)
        return self._function(whole, declarations), pieces

    def _arrays(self) -> dict[Buf, str]:
        """Arrays that the kernel is given, with their attributes."""
        aliased = {i for i, _ in self.kernel.aliases}
        arrays = {
            buf: "" if k in aliased else NOALIAS
            for k, buf in enumerate(self.bufs)
            if buf.storage is None
        }
        return arrays | dict.fromkeys(self.nests.copies.values(), NOALIAS)

    def _callees(self, arrays: Mapping[Buf, str], arena_type: str) -> list[EmittedFunction]:
        """Functions of long operations, then parts of the kernel."""
        attributes = {operand.name: array for operand, array in arrays.items()} | {ARENA: NOALIAS}
        for function in self.nest_functions.values():  # see _repeated
            attributes |= {f"%array{number}": NOALIAS for number in range(len(function.types))}
        views = {
            buf.name: f"{buf.name} = memref.view %arena[{buf.name}_at][] : {arena_type} to {memref(buf)}"
            for buf in self.offsets
        }
        outlined = self.outliner.functions(
            attributes, views, {slot.name: offset for slot, offset in self.offsets.items()}
        )
        # Parts are compiled and loaded in order: functions come before those that call them.
        return [
            *(
                EmittedFunction(
                    function.name, function.text(FRAME), function.declaration, False, function.calls
                )
                for function in self.emitter.expressions.functions.called
            ),
            *outlined,
        ]

    def _main(self, block: Block, arrays: Mapping[Buf, str], arena_type: str) -> EmittedFunction:
        """The function that runs the kernel's programs from %low to %high."""
        one = self.text.index(1)
        args = [f"{operand.name}: {memref(operand)}{array}" for operand, array in arrays.items()]
        args += [f"%arena: {arena_type}{NOALIAS}", "%low: index", "%high: index"]
        head = [
            f"{slot.name} = memref.view %arena[{self.text.index(offset)}][] : {arena_type} to {memref(slot)}"
            for slot, offset in self.offsets.items()
        ]
        programs = Operation(
            "scf.for",
            ("%p", "%low", "%high", one),
            "",
            for_syntax(()),
            (Region(block.operations),),
            arguments=("%p",),
        )
        # Stores past the caches are not ordered with others: the fence comes before any word that
        # the work is done.
        fence = (
            ['llvm.inline_asm has_side_effects "sfence", "" : () -> ()']
            if self.emitter.stores.streams
            else []
        )
        body, calls = self.outliner.printed([*self.text.top.operations, programs])
        constants, at_end = range_reports.definitions(self.text.constants.values())
        main = [
            f"func.func @{self.name}({', '.join(args)}) {FRAMED} {{",
            *constants,
            *head,
            *body,
            *fence,
            *at_end,
            "return",
            "}",
        ]
        calls |= range_reports.calls(at_end)
        return EmittedFunction(self.name, "\n".join(main), "", self.emitter.has_scalar_loops, calls)

    def _sized(self, text: str) -> str:
        return text.replace(ARENA_TYPE, f"memref<{self._arena_bytes()}xi8>")

    def _function(self, function: EmittedFunction, declarations: Mapping[str, str]) -> FunctionText:
        calls = frozenset(declarations[name] for name in function.calls)
        return FunctionText(
            function.name,
            self._sized(function.text),
            calls,
            self._sized(function.declaration),
            function.scalar,
        )


def _is_scalar(loop: For | While) -> bool:
    """Whether a loop's nests compute single elements."""
    nests = [stmt for stmt in every((loop,)) if isinstance(stmt, Nest)]
    return all(size == 1 for nest in nests for size in nest.dims.values())


def emit(nests: KernelNests, name: str) -> LoweredKernel:
    """Text of the function of nests after the CPU's passes; their options are LowerOptions."""
    nests.verify()
    return KernelLowering(nests, name).lower()


def lower_kernel(kernel: Kernel, name: str, options: LowerOptions | None = None) -> LoweredKernel:
    """Text of one kernel's function. Raises UnsupportedOp for equations without a rule."""
    return emit(
        kernel_nests(kernel, options or LowerOptions()).after((*SHARED_PASSES, *CPU_PASSES)), name
    )
