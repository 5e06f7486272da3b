"""Values of a nest's expressions, each in the shallowest block that knows its symbols.

Values are shared between points of a register tile through the addresses they resolve to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pbkern.lower.mlir.element_types import compute_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.ir import (
    Accumulator,
    Const,
    Expr,
    Gather,
    IndexValue,
    InRange,
    Load,
    Op,
    Pool,
    Shifted,
)
from pbkern.lower.nest.rounding import may_cancel
from pbkern.targets.cpu.schedule.sliding_windows import key_of, parts

from .addressing import Addressing, NestWalk, Point, Tail
from .loads.gathers import GatherLoads
from .loads.strided import StridedAccesses
from .loads.vectors import Loader
from .math_functions import MathFunctions
from .promoted_loops import PromotedLoops

# Types in which a product and a sum are one operation.
FUSED = (np.dtype(np.float32), np.dtype(np.float64))


class ExpressionValues:
    """Owns values of expressions. functions: of the kernel, which operations call."""

    def __init__(
        self, places: Addressing, promoted: PromotedLoops, strided: StridedAccesses, kernel: str
    ):
        self.text, self.places = places.text, places
        self.pool = Pool()  # of expressions made here
        self.loader = Loader(places, promoted, strided)
        self.gathers = GatherLoads(places, strided.vectors, self.pool, self.value)
        self.functions = MathFunctions(kernel)
        self.text.call_rare = self.functions.call_rare
        self.squares: dict[Expr, Expr] = {}  # of cubes that are computed with a sum

    def value(
        self,
        walk: NestWalk,
        block: Block,
        expr: Expr,
        point: Point,
        tail: Tail | None,
        accs: dict | None = None,
    ) -> Ssa:
        if isinstance(expr, Accumulator):
            assert accs is not None, "only what follows a reduction reads its result"
            return accs[expr.number]
        scalar_epilogue = accs is not None and walk.sched.vector in walk.nest.rdims
        vector = None if scalar_epilogue else walk.sched.vector
        lanes = walk.sched.lanes if vector and vector in expr.symbols else 0
        where = walk.place(block, expr)
        key = memo_key(key_of(expr, point), lanes, tail if lanes else None)
        if self._depends_on_acc(walk, expr):
            assert accs is not None
            key = (*key, *(acc.name for acc in accs.values()))
        if key not in where.memo:
            where.memo[key] = self._make(
                walk, where, expr, point, tail if lanes else None, lanes, accs
            )
        return where.memo[key]

    def _depends_on_acc(self, walk: NestWalk, expr: Expr) -> bool:
        key = ("acc", id(expr))
        if key not in walk.memo:
            walk.memo[key] = isinstance(expr, Accumulator) or any(
                self._depends_on_acc(walk, arg) for arg in expr.args
            )
        return walk.memo[key]

    def _make(
        self,
        walk: NestWalk,
        block: Block,
        expr: Expr,
        point: Point,
        tail: Tail | None,
        lanes: int,
        accs: dict | None,
    ) -> Ssa:
        b = self.text.builder(block, lanes)
        match expr:
            case Const():
                return b.c(expr.value, compute_el(expr.dtype))
            case IndexValue():
                return self.places.index(
                    walk, block, expr.affine, point, lanes, compute_el(expr.dtype)
                )
            case InRange():
                return self.places.in_range(
                    walk, block, (expr.affine, expr.low, expr.high), point, lanes
                )
            case Load():
                return self.loader.load(walk, block, expr, point, tail, lanes)
            case Gather():
                return self.gathers.load(walk, block, expr, point, tail, lanes, accs)
            case Shifted():
                return self._moved(walk, block, expr, point, lanes)
        assert isinstance(expr, Op)
        live = (
            self.places.tail_mask(tail, lanes)
            if tail and lanes and expr.info.primitive == "in_range"
            else None
        )
        return self.operation(
            walk,
            block,
            expr,
            lanes,
            lambda arg: self.value(walk, block, arg, point, tail, accs),
            live,
        )

    def operation(
        self,
        walk: NestWalk,
        block: Block,
        expr: Op,
        lanes: int,
        value: Callable[[Expr], Ssa],
        live: Ssa | None = None,
    ) -> Ssa:
        """An operation on the values of its operands. live: lanes of elements that exist, where that matters."""
        product = self._contracted(walk, expr)
        if product is None:
            args = [value(arg) for arg in expr.args]
        else:
            factor = expr.args[product]
            assert isinstance(factor, Op)
            args = [*self._factors(factor, value), value(expr.args[1 - product])]
        lanes = max([lanes, *(arg.lanes for arg in args)])
        b = self.text.builder(block, lanes)
        args = [b.broadcast(arg, lanes) for arg in args]
        if product is None:
            b = b.strict() if may_cancel(expr) else b
            b = b if live is None else b.of_lanes(live)
            doubled = _doubled(expr)
            if doubled is not None:
                return b.add(args[doubled], args[doubled])
            return self.functions.emit(b, expr, args)
        x, y, z = args
        if expr.info.primitive == "sub":
            x, z = (b.neg(x), z) if product else (x, b.neg(z))
        return b.fma(x, y, z)

    def _contracted(self, walk: NestWalk, expr: Op) -> int | None:
        """Which operand of a sum or difference is a product that is rounded with it, if any.

        LLVM would decide by how often the product is used, which differs from row to row of a
        block; results must not. Products that other loops compute stay there.
        """
        sums = expr.info.primitive in ("add", "add_any", "sub") and not may_cancel(expr)
        if not self.text.contract or not sums or expr.dtype not in FUSED:
            return None
        products: list[int] = []
        for k, arg in enumerate(expr.args):
            if _is_product(arg) and arg.dtype == expr.dtype:
                here = (
                    arg.symbols if walk.sched.vector is None else walk.sched.vector in arg.symbols
                )
                if here or any(
                    isinstance(factor, Accumulator) for factor in arg.args
                ):  # sums are multiplied where they end
                    products.append(k)
        # Of two, the one that an addition does not make as well.
        return min(products, key=lambda k: _doubled(expr.args[k]) is not None, default=None)

    def _factors(self, product: Op, value: Callable[[Expr], Ssa]) -> tuple[Ssa, Ssa]:
        """Two values whose product it is: of a cube, the number and its square."""
        x, *rest = product.args
        if rest:
            return value(x), value(rest[0])
        if product.info.primitive == "integer_pow" and product.info.params["y"] == 3:
            if product not in self.squares:
                info = replace(product.info, params={**product.info.params, "y": 2})
                self.squares[product] = self.pool.op(product.dtype, info, (x,))
            return value(x), value(self.squares[product])
        return value(x), value(x)

    def _moved(self, walk: NestWalk, block: Block, expr: Shifted, point: Point, lanes: int) -> Ssa:
        """The operand's value at another place, of the whole vectors around it."""
        places = parts(expr, point, walk.sched.vector, lanes)
        halves = [self.value(walk, block, expr.args[0], place, None) for place in places]
        if len(halves) == 1:
            return halves[0]
        low, high = halves
        lane = (point.get(walk.sched.along, 0) + dict(expr.moves).get(walk.sched.along, 0)) % lanes
        return self.text.builder(block, lanes).shuffle(low, high, range(lane, lane + lanes))


def _is_product(expr: Expr) -> bool:
    """Whether a multiplication makes the value."""
    if not isinstance(expr, Op):
        return False
    name = expr.info.primitive
    return name in ("mul", "square") or (name == "integer_pow" and expr.info.params["y"] in (2, 3))


def _doubled(expr: Expr) -> int | None:
    """Which operand of a product an addition doubles, if the other one is 2: some cores add beside multiplications."""
    if not isinstance(expr, Op) or expr.info.primitive != "mul" or expr.dtype not in FUSED:
        return None
    for k, arg in enumerate(expr.args):
        if isinstance(arg, Const) and arg.value == 2:
            return 1 - k
    return None


def memo_key(key: tuple, lanes: int, tail: Tail | None = None) -> tuple:
    """The key of a value within a block."""
    return (*key, tail.live if tail else None, lanes)
