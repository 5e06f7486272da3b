"""KernelNests -> one MLIR function for the threads of a block; block number p runs program p of the parallel grid dimensions.

The other grid dimensions are loops inside the block. All threads walk all statements; a nest's
points are mapped to them (threads.py), scalars are computed by each. What only one thread needs
lies in its registers (registers.py). Where statements meet in memory, threads wait (barriers.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.kernel_nests import BodyCase, KernelNests, grid_symbol
from pbkern.lower.mlir import operation
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest import scratch
from pbkern.lower.nest.ir import (
    AsyncCopy,
    AsyncProduct,
    Buf,
    For,
    If,
    IndexValue,
    Let,
    Nest,
    Prefetch,
    Sort,
    Stmt,
    Trace,
    Wait,
    While,
    every,
    nodes,
)
from pbkern.lower.nest.tiles.axes import row_major
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.lower.programs import ProgramText
from pbkern.targets.simt.device import SHARED_SPACE, Nvidia
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.schedule import memory
from pbkern.targets.simt.schedule.barriers import Barriers, Pending
from pbkern.targets.simt.schedule.lane_products import operand_words
from pbkern.targets.simt.schedule.registers import keep, live

from . import reductions, sorts
from .nests import THREAD, SimtNestEmitter
from .recorder import Profile, Recorder
from .reports import Reports, ReportWriter
from .tiles.copies import TileCopies
from .tiles.points import TilePoints
from .tiles.products import ProductsOfTiles
from .tiles.threads import TileThreads
from .updates import UpdateEmitter

# Arrays of XLA and of this target start at multiples of this many bytes, of whole vectors.
ARGUMENT_ALIGNMENT = 16
# Names of values in a kernel's text: places for what threads exchange.
SLOTS = "%slots"
# Bytes of which the address of shared memory is a multiple, at least.
SHARED_ALIGNMENT = 128
# Registers for places of windows, as convolutions have them. Source: what ptxas 13 takes more than for products.
WINDOW_WORDS = 32
# Of a fence: what a thread has stored in shared memory is there for instructions that read tiles by themselves.
SHARED_FENCE = " {kind = #nvvm.proxy_kind<async.shared>, space = #nvvm.shared_space<cta>}"
# The name of shared memory.
ARENA = "%arena"
# The name of the argument for scratch in device memory.
FAR = "%far"
# The name of the argument for times of blocks.
RECORD = "%record"
# The name of the argument for prints and failed checks.
REPORTS = "%reports"


@dataclass(frozen=True)
class ThreadFunction:
    """func.func @name(operands..., scratch, times, reports).

    Scratch is in global memory, if there is any; times are there if they are recorded, reports if
    anything is printed or checked.

    Attributes:
      blocks, threads: of a launch.
      shared_bytes: of a block. dynamic_shared_bytes: of them, what the launch has to ask for.
        global_bytes: of a block's scratch in global memory.
      index_bits: of integers that stand for places.
      nests: readable, as they were emitted. operands: operands and results without memory of
        others.
      reads_unwritten: whether scratch may be read where nothing has been stored, which is not used
        then: windows of rows that fusion has made, before all rows are there, and buffers of
        pipelines, behind ragged blocks.
      tile_words: registers of 32 bits of each thread for arrays that instructions spread over threads, as many as are alive
        between two statements.
        sum_words: those of them to which products under way add, and more where steps compute places of windows; or
        those of the largest array, if they are more.
      profile: what it records, if it does. reports: what it prints and checks, if it does.
    """

    name: str
    text: str
    nests: str
    blocks: int
    threads: int
    shared_bytes: int
    dynamic_shared_bytes: int
    global_bytes: int
    index_bits: int
    operands: tuple[int, ...]
    reads_unwritten: bool = False
    tile_words: int = 0
    sum_words: int = 0
    profile: Profile | None = None
    reports: Reports | None = None

    @property
    def is_shared(self) -> bool:
        """Whether equal kernels, and later processes, may use it: the text holds no numbers of print sites."""
        return self.reports is None

    @property
    def record_bytes(self) -> int:
        """Bytes that all blocks record."""
        return self.profile.words * 8 * self.blocks if self.profile else 0


def alignment_of(nbytes: int) -> int:
    """Bytes, of which the address of an array of `nbytes` is a multiple: vector loads rely on it."""
    return min(nbytes & -nbytes, ARGUMENT_ALIGNMENT) if nbytes else 1


def emit(nests: KernelNests, name: str) -> ThreadFunction:
    """The function of nests that have gone through all passes; their options are ThreadOptions."""
    if 0 not in nests.kernel.grid:  # blocks of empty arrays lie nowhere
        nests.verify()
    return _Lowering(nests, name).lower()


class _Lowering(ProgramText):
    """State of writing one kernel."""

    def __init__(self, nests: KernelNests, name: str):
        options, registers = nests.options, keep(nests)
        assert isinstance(options, ThreadOptions)
        self.name, self.options = name, options
        nests = registers.nests
        super().__init__(nests)
        self.text = Text(
            approx=self.options.approx_math,
            contract=self.options.contract,
            math=self.options.device.math(self.options.approx_math),
        )
        self.mappings, self.updates = registers.mappings, registers.updates
        self.has_group_products = any(
            isinstance(stmt, Nest) and isinstance(stmt.by, Tiling) and stmt.by.instruction.row_bytes
            for stmt in self._every()
        )
        self.slots = max(
            (self._slots(stmt) for stmt in self._every() if isinstance(stmt, Nest)), default=0
        )
        self.placement = memory.place(
            nests,
            registers.slots,
            self.options.shared_bytes,
            -(-self.slots * reductions.SLOT_BYTES // 64) * 64,
            self.options.device.private,
        )
        self.index_bits = self._index_bits()
        self.emitter = SimtNestEmitter(
            self.text, self.placement, nests.prologue.context, self.index_bits
        )
        self.emitter.team = reductions.Team(
            self.text,
            self.options.device,
            self.options.threads,
            THREAD,
            SLOTS,
            f"memref<{max(self.slots, 1)}xi64, {SHARED_SPACE}>",
            self._barrier,
        )
        threads = TileThreads(self.emitter, self.options.threads, self.options.device, ARENA)
        self.copies, self.points = TileCopies(threads), TilePoints(threads)
        self.products = ProductsOfTiles(threads)
        self.waits: set[int] = set()
        self.record = ""  # the parameter that times are stored to
        self.recorder: Recorder | None = None  # of steps that are a loop of the statements
        self.reports = Reports.of(
            [stmt for stmt in self._every() if isinstance(stmt, Trace)], list(nests.copies)
        )
        if self.reports:
            self.writer = ReportWriter(
                self.text, self.reports, REPORTS, THREAD, "%p", self.placement.memref
            )

    def _every(self) -> list[Stmt]:
        return [
            stmt
            for part in (self.nests.prologue, *self.nests.cases)
            for stmt in every(list(part.statements))
        ]

    def _slots(self, nest: Nest) -> int:
        if nest.by is not None or not nest.reductions:
            return 0
        warp = self.options.device.warp
        wide = self.mappings[id(nest)].team > warp
        return reductions.slots(nest.reductions, self.options.threads // warp) if wide else 0

    def _index_bits(self) -> int:
        """64 where a place, or a 64-bit integer that is computed as one, may not fit 32 bits."""
        if memory.fewest_index_bits(self.nests) == 64:
            return 64
        if self.placement.global_bytes * self._blocks() >= 1 << 31:
            return 64
        for stmt in self._every():
            held = [
                node
                for expr in (
                    stmt.expressions()
                    if isinstance(stmt, Nest)
                    else [stmt.value]
                    if isinstance(stmt, Let)
                    else ()
                )
                for node in nodes([expr])
            ]
            if any(
                isinstance(expr, IndexValue)
                and expr.dtype.itemsize == 8
                and _is_long(expr.affine, stmt)
                for expr in held
            ):
                return 64
        return 32

    def _blocks(self) -> int:
        return math.prod(self.kernel.grid[dim] for dim in self.nests.parallel)

    # ---------------------------------------------------------------- the function

    def lower(self) -> ThreadFunction:
        mlir_text, top = self.text, self.text.top
        put = partial(mlir_text.put, top)
        device = self.options.device
        top.add("arith.index_castui", (device.thread(put),), "i32 to index", result=THREAD)
        top.add("arith.index_castui", (device.block(put),), "i32 to index", result="%p")
        for name in (THREAD, "%p"):
            top.values[name] = name
            mlir_text.indices.add(name)
        self._views(top)
        if self.reports:
            self.writer.begin(top)
        block = Block(top)
        self._delinearise(block)
        inner = list(self.nests.in_order)
        self._plan(inner)
        profile = self._recorded(block, inner)
        return ThreadFunction(
            self.name,
            self._function(block),
            "\n".join(self.shown),
            self._blocks(),
            self.options.threads,
            self.placement.shared_bytes,
            self.placement.shared_bytes if self._is_dynamic() else 0,
            self.placement.global_bytes,
            self.index_bits,
            tuple(
                k for k, operand in enumerate(self.nests.operands) if operand.buf.storage is None
            ),
            self._reads_unwritten(),
            self._live_words(),
            self._sum_words(),
            profile,
            self.reports,
        )

    def _recorded(self, block: Block, inner: list[int]) -> Profile | None:
        """All programs of the block, and what is recorded of them."""
        space, folder = self.options.profile_space, self.options.profile_dir
        if not space:
            self.in_order(block, inner, self._anew if inner else self.program)
            return None
        dims = [dim.axis for dim in self.nests.grid if not dim.parallel]
        steps = {grid_symbol(dim): self.kernel.grid[dim] for dim in dims}
        profile = Profile(space, folder, tuple((dim, self.kernel.grid[dim]) for dim in dims))
        device = self.options.device
        assert isinstance(device, Nvidia), device
        kind = f"memref<{profile.words * self._blocks()}xi64>"
        wait = self._barrier if self.options.barriers else lambda _: None
        recorder = Recorder(self.text, device, profile, RECORD, kind, THREAD, "%p", wait)
        recorder.begin(block)
        if inner:
            self.in_order(
                block, inner, lambda b: recorder.around(b, row_major(steps), self.program)
            )
        else:
            self.recorder = recorder if dims else None
            self.program(block)
        recorder.end(block)
        self.record = f"{RECORD}: {kind}"
        return profile

    def _anew(self, block: Block) -> None:
        """A program, which computes places from a thread's number as the device knows it in this step alone."""
        inner = Block(block)
        self.program(inner)
        thread = self.options.device.hidden(partial(self.text.put, block), THREAD)
        if thread != THREAD:
            inner.operations = [
                op.renamed(lambda _: lambda name: thread if name == THREAD else name)
                for op in inner.operations
            ]
        block.take(inner)

    def _recorded_steps(self, block: Block, loop: For, recorder: Recorder) -> None:
        """A loop over programs, of which each is recorded."""

        def fill(inner: Block, _: object) -> list:
            number = Affine.symbol(loop.counter)
            recorder.around(inner, number, lambda body: self.statements(body, loop.body))
            return []

        self.text.loop(block, loop.counter, 0, self.trips(block, loop), 1, fill)

    def _views(self, top: Block) -> None:
        """Names of arrays and scratch: views of bytes."""
        placement, text, bases = self.placement, self.text, self.emitter.bases
        for operand in self.nests.operands:
            if operand.buf.storage is None:
                bases[operand.buf] = f"{operand.buf.name}_bytes", text.index(0), _bytes(operand.buf)
        shared = f"memref<{placement.shared_bytes}xi8, {SHARED_SPACE}>"
        if placement.shared_bytes:
            top.add("memref.get_global", (), shared, f" @{self.name}_shared", result=ARENA)
            if self.slots:
                top.add(
                    "memref.view",
                    (ARENA, text.index(0)),
                    f"{shared} to {self.emitter.team.slots_type}",
                    result=SLOTS,
                )
        if placement.global_bytes:
            start = text.put(top, "arith.muli", ("%p", text.index(placement.global_bytes)), "index")
        for buf, offset in placement.offsets.items():
            near = placement.is_shared(buf)
            at = (
                text.index(offset)
                if near
                else text.put(top, "arith.addi", (start, text.index(offset)), "index")
            )
            bases[buf] = (ARENA, at, shared) if near else (FAR, at, self._far())
        for buf in placement.slots.values():
            self._registers(top, buf)
        for buf, (base, at, kind) in bases.items():
            top.add(
                "memref.view", (base, at), f"{kind} to {placement.memref(buf)}", result=buf.name
            )

    def _registers(self, top: Block, slots: Buf) -> None:
        """A variable of each thread, of which LLVM makes registers: all its places are constants.

        It starts as zeros: points that are kept inside read, and do not use, what no thread has
        stored.
        """
        kind, zero = (
            self.placement.memref(slots),
            self.text.builder(top, 0).c(0, storage_el(slots.dtype)),
        )
        top.add("memref.alloca", (), kind, "()", result=slots.name)
        for n in range(slots.size):
            top.add("memref.store", (zero.name, slots.name, self.text.index(n)), kind)

    def _held_words(self, *layouts: type) -> dict[Buf, int]:
        """Registers of 32 bits of each thread for each array that such layouts spread over threads."""
        return {
            buf: slots.size * slots.dtype.itemsize // 4
            for buf, slots in self.placement.slots.items()
            if isinstance(buf.layout, layouts)
        }

    def _live_words(self) -> int:
        """Most words of arrays of tiles, and of what is on its way to some, that are alive between two statements."""
        words = self._held_words(Tiling, Chunking)
        return max((live(case.statements, words)[0] for case in self.nests.cases), default=0)

    def _sum_words(self) -> int:
        held = self._held_words(Tiling)
        for buf, count in held.items():
            if isinstance(buf.layout, Tiling) and buf.layout.instruction.is_of_lanes:
                held[buf] = count + operand_words(count)
        words = sum(
            count
            for buf, count in held.items()
            if isinstance(buf.layout, Tiling) and buf.layout.instruction.row_bytes
        )
        of_windows = any(
            isinstance(stmt, For) and {Let, AsyncProduct} <= {type(inner) for inner in stmt.body}
            for stmt in self._every()
        )
        return max([words + WINDOW_WORDS if of_windows else words, *held.values()])

    def _alignment(self) -> int:
        """Bytes of which the address of the block's shared memory is a multiple."""
        near = filter(self.placement.is_shared, self.placement.offsets)
        return max(SHARED_ALIGNMENT, max(map(scratch.alignment, near), default=1))

    def _reads_unwritten(self) -> bool:
        scratch = self.kernel.scratch
        return (bool(scratch) and not self.kernel.defined_at) or any(
            entry.scoped for entry in scratch
        )

    def _is_dynamic(self) -> bool:
        """Whether the launch gives shared memory: a text may declare less than there is."""
        return self.placement.shared_bytes > self.options.device.declared_bytes

    def _far(self) -> str:
        return f"memref<{self.placement.global_bytes * self._blocks()}xi8>"

    def _function(self, block: Block) -> str:
        text, placement = self.text, self.placement
        arrays = [
            (k, operand.buf)
            for k, operand in enumerate(self.nests.operands)
            if operand.buf.storage is None
        ]
        args = [f"{buf.name}_bytes: {_bytes(buf)}{self._attributes(k, buf)}" for k, buf in arrays]
        args += (
            [f"{FAR}: {self._far()} {{llvm.align = {ARGUMENT_ALIGNMENT} : i64, llvm.noalias}}"]
            if placement.global_bytes
            else []
        )
        args += (
            [f"{self.record} {{llvm.align = {ARGUMENT_ALIGNMENT} : i64, llvm.noalias}}"]
            if self.record
            else []
        )
        args += (
            [
                f"{REPORTS}: {self.writer.type} {{llvm.align = {ARGUMENT_ALIGNMENT} : i64, llvm.noalias}}"
            ]
            if self.reports
            else []
        )
        constants = [constant.head for constant in text.constants.values()]
        shared = f"memref<{placement.shared_bytes}xi8, {SHARED_SPACE}>"
        private, start = ("", "") if self._is_dynamic() else ('"private" ', " = uninitialized")
        head = [
            f"memref.global {private}@{self.name}_shared : {shared}{start} {{alignment = {self._alignment()} : i64}}"
        ]
        body = operation.lines([*text.top.operations, *block.operations])
        lines = [
            *(head if placement.shared_bytes else ()),
            f"func.func @{self.name}({', '.join(args)}) {{",
            *constants,
            *body,
            "return",
            "}",
        ]
        return "\n".join(lines)

    def _attributes(self, operand: int, buf: Buf) -> str:
        """Attributes of an argument.

        LLVM makes vectors of neighbouring loads, and reads what lies behind the last one: it may
        know no alignment that would let that lie behind the array.
        """
        nbytes = max(buf.size, 1) * max(buf.dtype.itemsize, 1)
        aligned = f"llvm.align = {alignment_of(nbytes)} : i64"
        aliased = operand in {i for i, _ in self.kernel.aliases}
        return f" {{{aligned}}}" if aliased else f" {{{aligned}, llvm.noalias}}"

    def _delinearise(self, block: Block) -> None:
        """Grid indices along parallel dimensions."""
        rest, parallel = "%p", self.nests.parallel
        longer = [axis for axis in parallel if self.kernel.grid[axis] > 1]
        for dim in reversed(parallel):
            extent = self.kernel.grid[dim]
            if extent == 1:
                block.values[f"%g{dim}"] = 0
            elif dim == longer[0]:
                block.values[f"%g{dim}"] = rest
            else:
                size = self.text.index(extent)
                block.values[f"%g{dim}"] = self.text.put(
                    block, "arith.remui", (rest, size), "index"
                )
                rest = self.text.put(block, "arith.divui", (rest, size), "index")

    def dynamic_size(self, block: Block, operand: int) -> str:
        value = self.emitter.load_stored(block, self.nests.operands[operand].buf, Affine())
        return self.text.put(block, "arith.index_cast", (value.name,), f"{value.el} to index")

    # ---------------------------------------------------------------- barriers

    def _plan(self, inner: list[int]) -> None:
        """Before which statements all threads wait."""
        plan = Barriers(
            self.placement.place,
            lambda nest: isinstance(nest, Nest) and self._slots(nest) > 0,
            only_copies=not self.options.barriers,
            is_one=lambda loop: id(loop) in self.updates,
        )
        prologue = list(self.nests.prologue.statements)
        for case in self.nests.cases:
            stmts = [*prologue, *case.statements]
            every_case = [stmt for other in self.nests.cases for stmt in other.statements]
            start = Pending()
            if inner:  # what any program may have left, of whichever case it was
                start.add(*plan.effects([*prologue, *every_case]))
            plan.run(stmts, start)
        self.waits = plan.before

    def _barrier(self, block: Block) -> None:
        # Instructions that read tiles by themselves see no other stores.
        if self.has_group_products:
            block.add("nvvm.fence.proxy", syntax=SHARED_FENCE)
        block.operations += self.options.device.barrier()

    def body(self, block: Block, case: BodyCase) -> None:
        self.emitter.context = case.context
        super().body(block, case)

    # ---------------------------------------------------------------- statements

    def statements(self, block: Block, stmts: Sequence[Stmt]) -> None:
        for stmt in stmts:
            if id(stmt) in self.waits:
                self._barrier(block)
            self._statement(block, stmt)

    def _statement(self, block: Block, stmt: Stmt) -> None:
        match stmt:
            case Let(name=name, value=value):
                scalar = self.emitter.scalar(block, value)
                block.values[name] = self.emitter.to_index(block, scalar, value.dtype.kind in "ub")
            case Nest(by=Tiling() as by):
                is_product = any(reduction.is_product for reduction in stmt.reductions)
                emit_tile = self.products.one if is_product else self.points.elementwise
                emit_tile(block, stmt, by)
            case Nest(by=Chunking() as by):
                self.copies.by_threads(block, stmt, by)
            case Nest():
                self.emitter.emit(block, stmt, self.mappings[id(stmt)])
            case AsyncCopy(body=body):
                self.copies.by_device(block, [nest for nest in body if isinstance(nest, Nest)])
            case AsyncProduct(body=body):
                self.products.group(block, [nest for nest in body if isinstance(nest, Nest)])
            case Wait(groups=groups, products=True):
                block.add("nvvm.wgmma.wait.group.sync.aligned", syntax=f" {groups}")
            case Wait(groups=groups):
                block.add("nvvm.cp.async.wait.group", syntax=f" {groups}")
            case If():
                self.branch(block, stmt)
            case For(counter=counter) if self.recorder and counter == self.nests.step_counter:
                self._recorded_steps(block, stmt, self.recorder)
            case For() if id(stmt) in self.updates:
                UpdateEmitter(self.emitter, self.updates[id(stmt)], self.options.threads).emit(
                    block
                )
            case For():
                self.counted_loop(block, stmt)
            case While():
                self.conditional_loop(block, stmt)
            case Sort():
                sorts.emit_sort(self.emitter, block, stmt, self.options.threads, self._barrier)
            case Trace():
                self.writer.store(block, stmt)
            case Prefetch():
                pass  # changes nothing


def _bytes(buf: Buf) -> str:
    """Type of an array as bytes."""
    return f"memref<{max(buf.size, 1) * max(buf.dtype.itemsize, 1)}xi8>"


def _is_long(affine: Affine, stmt: Stmt) -> bool:
    """Whether an index that is computed as an integer of 64 bits may exceed 32.

    It may not if it only counts points, or is a scalar.
    """
    dims = stmt.dims if isinstance(stmt, Nest) else {}
    if affine.symbols <= dims.keys():
        low, high = affine.bounds(lambda dim: dims[dim])
        return low < -(1 << 31) or high >= 1 << 31
    return not (len(affine.terms) == 1 and affine.terms[0][1] == 1 and affine.const == 0)
