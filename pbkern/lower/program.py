"""dsl.Kernel -> one MLIR function that runs programs [low, high) of its parallel grid dimensions.

The sequential grid dimensions are loops inside. Each body is lowered twice where some program's block crosses the edge
of an array: once for blocks that lie inside (no masks), once guarded; the test is on the block's start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..affine import Affine
from ..dsl.kernel import Blocked, BlockMapping, Kernel, Squeezed
from . import fuse_nests, nest
from .build import BodyBuilder, RefView
from .emit import NestEmitter, memref
from .nest import Buf, For, If, Let, Names, Nest, Sort, Stmt, While
from .parallel import parallel_dimensions
from .shapes import index_value
from .sort import emit_sort
from .text import Block, Text
from .values import Literal, Value

INT32 = np.dtype(np.int32)
ALIGNMENT = 64


@dataclass(frozen=True)
class LowerOptions:
    """What a target's CompilerParams mean for lowering."""

    approx_math: bool = False
    contract: bool = True
    vector_bits: int = 512
    semantics: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LoweredKernel:
    """`text` defines func.func @name(operands..., arena, low, high).

    programs: number of parallel programs; scratch_bytes: arena of one task; nests: readable nest IR.
    """

    name: str
    text: str
    programs: int
    scratch_bytes: int
    nests: str
    operand_count: int


class KernelLowering:
    """State of lowering one kernel."""

    def __init__(self, kernel: Kernel, name: str, options: LowerOptions):
        self.kernel, self.name, self.options = kernel, name, options
        self.names = Names()
        self.text = Text(approx=options.approx_math, contract=options.contract)
        self.emitter = NestEmitter(self.text, options.vector_bits)
        self.arena: list[Buf] = []
        self.nests: list[str] = []
        self.symbols: set[str] = set()  # scalars of index maps, known to bodies
        mappings = (*kernel.inputs, *kernel.outputs)
        self.bufs = [Buf(f"%a{k}", m.array.shape, m.array.dtype) for k, m in enumerate(mappings)]
        for i, o in kernel.aliases:
            self.bufs[len(kernel.inputs) + o].storage = self.bufs[i]
        self.scratch = [Buf(self.names("%t"), s.shape, s.dtype, arena=True) for s in kernel.scratch]
        self.arena += self.scratch

    def lower(self) -> LoweredKernel:
        kernel = self.kernel
        parallel = parallel_dimensions(kernel, self.options.semantics)
        programs = math.prod(kernel.grid[d] for d in parallel)
        block = Block(self.text.top)
        block.values["%p"] = "%p"
        self._delinearise(block, parallel)
        self._sequential(block, [d for d in range(len(kernel.grid)) if d not in parallel])
        return LoweredKernel(self.name, self._function(block), programs, self._arena_bytes(), "\n".join(self.nests),
                             sum(b.storage is None for b in self.bufs))

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
        views, tests, certain = self._views(block)
        if not tests:
            self._body(block, views, guarded=certain)
            return
        condition = tests[0]
        for t in tests[1:]:
            condition = self.text.put(block, f"arith.andi {condition}, {t} : i1")
        self.text.when(block, condition, lambda b: self._body(b, views, guarded=False),
                       lambda b: self._body(b, views, guarded=True))

    def _views(self, block: Block) -> tuple[list, list[str], bool]:
        """Per operand (buf, offsets, axes); scalar tests that all blocks lie inside; whether none can."""
        views, tests, never_inside = [], [], False
        for m, buf in zip((*self.kernel.inputs, *self.kernel.outputs), self.bufs):
            offsets = self._starts(block, m)
            axes, k = [], 0
            for d in m.dims:
                axes.append(None if isinstance(d, Squeezed) else k)
                k += not isinstance(d, Squeezed)
            views.append((buf, offsets, tuple(axes), m))
            for start, d, extent in zip(offsets, m.dims, m.array.shape):
                state = self._inside(start, d.size, extent)
                if state is False:
                    never_inside = True
                elif state is None:
                    tests += self._inside_tests(block, start, d.size, extent)
        return views, [] if never_inside else list(dict.fromkeys(tests)), never_inside

    def _inside(self, start: Affine, size: int, extent: int) -> bool | None:
        """Whether the block lies inside for every program, for none, or for some (None)."""
        if not all(str(s).startswith("%g") for s in start.symbols):
            return None
        low, high = start.bounds(lambda s: self.kernel.grid[int(str(s)[2:])])
        if low >= 0 and high + size <= extent:
            return True
        return False if high < 0 or low + size > extent else None

    def _inside_tests(self, block: Block, start: Affine, size: int, extent: int) -> list[str]:
        _, name = self.text.affine(block, start)
        key = ("inside", name, size, extent)
        if key not in block.memo:
            a = self.text.put(block, f"arith.cmpi sge, {name}, {self.text.index(0)} : index")
            b = self.text.put(block, f"arith.cmpi sle, {name}, {self.text.index(extent - size)} : index")
            block.memo[key] = self.text.put(block, f"arith.andi {a}, {b} : i1")
        return [block.memo[key]]

    def _starts(self, block: Block, m: BlockMapping) -> tuple[Affine, ...]:
        """First element per array axis, affine in grid symbols; other index maps are computed here as scalars."""
        if all(s is not None for s in m.starts):
            return tuple(s.substitute(lambda g: Affine.symbol(f"%g{g}")) for s in m.starts)
        builder = BodyBuilder(self.names)
        env = {v: self._grid_value(builder, d) for d, v in enumerate(m.index_map.jaxpr.invars[: len(self.kernel.grid)])}
        for k, v in enumerate(m.index_map.jaxpr.invars[len(self.kernel.grid):]):
            builder.refs[v] = self._whole(self.bufs[k])
        found: list[Affine] = []
        stmts = builder.region(m.index_map.jaxpr, env, lambda e: found.extend(
            builder.index_symbol(builder.read(e, o)) for o in m.index_map.jaxpr.outvars))
        self._statements(block, self._finish(builder, stmts))
        return tuple(i * (d.size if isinstance(d, Blocked) else 1) for i, d in zip(found, m.dims))

    def _grid_value(self, builder: BodyBuilder, d: int) -> Value:
        return index_value((), INT32, lambda ix: Affine.symbol(f"%g{d}"), builder)

    def _whole(self, buf: Buf) -> RefView:
        rank = len(buf.shape)
        return RefView(buf, buf.shape, buf.dtype, (Affine(),) * rank, tuple(range(rank)))

    def _body(self, block: Block, views: list, guarded: bool) -> None:
        builder = BodyBuilder(self.names)
        builder.grid = tuple(self._grid_value(builder, d) for d in range(len(self.kernel.grid)))
        dynamic = dict(self.kernel.dynamic_grid)
        builder.grid_sizes = tuple(builder.whole(self.bufs[dynamic[d]]) if d in dynamic else Literal((), INT32, n)
                                   for d, n in enumerate(self.kernel.grid))
        refs = [RefView(buf, m.ref_shape, m.array.dtype, offsets, axes, guarded and self._may_cross(m, offsets))
                for buf, offsets, axes, m in views]
        refs += [self._whole(b) for b in self.scratch]
        jaxpr = self.kernel.body.jaxpr
        builder.refs = dict(zip(jaxpr.invars, refs))
        stmts = self._finish(builder, builder.region(jaxpr, {}))
        self.nests.append(("guarded:\n" if guarded else "") + nest.show(stmts))
        self._statements(block, stmts)

    def _may_cross(self, m: BlockMapping, offsets) -> bool:
        return any(self._inside(o, d.size, n) is not True for o, d, n in zip(offsets, m.dims, m.array.shape))

    def _finish(self, builder: BodyBuilder, stmts: list[Stmt]) -> list[Stmt]:
        stmts = fuse_nests.optimise(stmts, builder, self.options.vector_bits)
        self.arena += builder.arena
        nest.verify(stmts, frozenset({f"%g{d}" for d in range(len(self.kernel.grid))} | self.symbols))
        return stmts

    # ---------------------------------------------------------------- statements

    def _statements(self, block: Block, stmts: list[Stmt]) -> None:
        for s in stmts:
            match s:
                case Nest():
                    self.emitter.emit(block, s)
                case Let(name=name, value=value):
                    self._let(block, name, value)
                case If(index=i, branches=branches):
                    self._if(block, i, branches)
                case For(counter=c, trips=trips, body=body):
                    self._for(block, c, trips, body)
                case While(condition=c, predicate=p, body=body):
                    self._while(block, c, p, body)
                case Sort():
                    emit_sort(self.text, block, s)

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

    def _for(self, block: Block, counter: str, trips: int | str, body: list[Stmt]) -> None:
        high = trips if isinstance(trips, int) else self._name(block.lookup(trips)[1])

        def fill(inner: Block, _) -> list:
            self._statements(inner, body)
            return []

        self.text.loop(block, counter, 0, high, 1, fill)

    def _while(self, block: Block, condition: list[Stmt], predicate: str, body: list[Stmt]) -> None:
        before, after = Block(block), Block(block)
        self._statements(before, condition)
        value = self._name(before.lookup(predicate)[1]) if predicate.startswith("%") else self.text.index(int(predicate))
        test = self.text.put(before, f"arith.cmpi ne, {value}, {self.text.index(0)} : index")
        self._statements(after, body)
        block.lines += ["scf.while : () -> () {", *before.lines, f"scf.condition({test})", "} do {", *after.lines,
                        "scf.yield", "}"]

    # ---------------------------------------------------------------- the function

    def _roots(self) -> list[Buf]:
        return [b for b in self.arena if b.storage is None]

    def _arena_bytes(self) -> int:
        return max(sum(_padded(b) for b in self._roots()), ALIGNMENT)

    def _function(self, block: Block) -> str:
        aliased = {i for i, _ in self.kernel.aliases}
        args = [f"{b.name}: {memref(b)}" + ("" if k in aliased else " {llvm.noalias}")
                for k, b in enumerate(self.bufs) if b.storage is None]
        head, offset = [], 0
        for b in self._roots():
            head.append(f"{b.name} = memref.view %arena[{self.text.index(offset)}][] : "
                        f"memref<{self._arena_bytes()}xi8> to {memref(b)}")
            offset += _padded(b)
        one = self.text.index(1)
        constants = [f"{n} = {t}" for t, n in self.text.constants.items()]
        args += [f"%arena: memref<{self._arena_bytes()}xi8> {{llvm.noalias}}", "%low: index", "%high: index"]
        lines = [f"func.func @{self.name}({', '.join(args)}) {{", *constants, *head, *self.text.top.lines,
                 f"scf.for %p = %low to %high step {one} {{", *block.lines, "}", "return", "}"]
        return "\n".join(lines)


def _padded(b: Buf) -> int:
    size = max(b.size, 1) * max(np.dtype(b.dtype).itemsize, 1)
    return -(-size // ALIGNMENT) * ALIGNMENT


def lower_kernel(kernel: Kernel, name: str, options: LowerOptions | None = None) -> LoweredKernel:
    """Text of one kernel's function. Raises UnsupportedOp for equations without a rule."""
    return KernelLowering(kernel, name, options or LowerOptions()).lower()
