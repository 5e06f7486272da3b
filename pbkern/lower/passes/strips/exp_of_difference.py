"""Run of nests -> two of them over one long row: one finds the greatest x[k], a later one adds exp(x[k] - c), c of the row.

What running_maximum.py takes together, and what has to hold for that. Nothing here knows softmax: c
may be anything, terms may be multiplied with what does not depend on the exponential, and elements
that neither nest uses may be masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import compute_el, is_float
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Buf, Const, Expr, Gather, Load, Nest, Op, Pool, nodes

from .strip_mining import axis_of

EXPONENTIALS = ("exp", "exp2")
JOINED = ("sum", "max", "min")  # reductions whose results of parts are reduced in the same way
ROW = Affine.symbol("%row")  # one element of a row, in any nest


@dataclass(frozen=True)
class Row:
    """A nest that walks one dimension; the others are of one element."""

    nest: Nest
    d: str

    @staticmethod
    def of(nest: Nest) -> Row | None:
        live = [dim for dim, n in nest.dims.items() if n > 1]
        if (
            len(live) != 1
            or nest.ordered
            or any(reduction.op not in JOINED for reduction in nest.reductions)
        ):
            return None
        return Row(nest, live[0])

    @staticmethod
    def known(nest: Nest) -> Row:
        """That of a nest that is known to walk one."""
        row = Row.of(nest)
        assert row is not None
        return row

    @property
    def size(self) -> int:
        return self.nest.dims[self.d]

    def places(self, at: Affine) -> dict[str, Affine]:
        """Values of the nest's dimensions at one element."""
        return {dim: at if dim == self.d else Affine() for dim in self.nest.dims}

    def itemsize(self) -> int:
        """Bytes of the widest element that its reductions read along the row; 0 if they read none."""
        loads = Nest({}, reductions=self.nest.reductions).loads()
        return max((load.buf.dtype.itemsize for load in loads if self.d in load.symbols), default=0)


@dataclass
class ExpOfDifference:
    """A nest that finds a maximum, and a later one that adds what is proportional to exp(x - c).

    Nest `at` of a run finds the greatest x with its reduction `which`; nest `later` adds.

    weighted: those sums; scaled: buffers that it fills with what is proportional; telling: a sum
    that is NaN exactly if one of the x is.
    """

    run: list[Nest]
    at: int
    which: int
    later: int
    exponential: Expr
    weighted: set[int] = field(default_factory=set)
    scaled: set[Buf] = field(default_factory=set)
    telling: int | None = None

    @property
    def greatest(self) -> Row:
        return Row.known(self.run[self.at])

    @property
    def sums(self) -> Row:
        return Row.known(self.run[self.later])


def find_exp_of_difference(
    run: list[Nest], least_bytes: int, context: NestContext, elsewhere: set[Buf]
) -> Iterator[ExpOfDifference]:
    """Pairs of nests over rows of `least_bytes` or more.

    `elsewhere`: buffers that statements outside the run touch too.
    """
    for at, nest in enumerate(run):
        row = Row.of(nest)
        if (
            row is None
            or any(store.inner for store in nest.stores)
            or row.size * row.itemsize() < least_bytes
        ):
            continue
        numbers = [
            k
            for k, reduction in enumerate(nest.reductions)
            if reduction.op == "max" and _is_float(reduction.dtype)
        ]
        if not numbers or context.policy.vector_dimension(nest) != row.d:
            continue
        for later in range(at + 1, len(run)):
            other = Row.of(run[later])
            if other is not None and other.size == row.size and other.nest.reductions:
                pairs = (_Pair(run, at, number, later, context.pool) for number in numbers)
                yield from (pair.difference for pair in pairs if pair.holds(elsewhere))


class _Pair:
    """One reduction of a nest, and a later nest."""

    def __init__(self, run: list[Nest], at: int, which: int, later: int, pool: Pool):
        self.run, self.pool, self.sums = run, pool, Row.known(run[later])
        of = pool.rename(run[at].reductions[which].args[0], Row.known(run[at]).places(ROW))
        # Elements without the greatest of all: where a test chooses the branch that is a constant.
        self.left_out = {
            (of.args[0], k)
            for k in range(2)
            if _is_choice(of) and isinstance(of.args[1 + k], Const)
        }
        self.everywhere = True  # whether the exponential is of what the greatest is of, where that is a constant too
        exponential = self._exponential(of)
        self.has_exponential = exponential is not None
        self.difference = ExpOfDifference(
            run, at, which, later, of if exponential is None else exponential
        )

    def _normal(self, expr: Expr) -> Expr:
        return self.pool.rename(expr, self.sums.places(ROW))

    def _exponential(self, of: Expr) -> Expr | None:
        """The nest's one exp(x - c)."""
        exponentials = [node for node in self.sums.nest.nodes() if self._is_exponential(node)]
        if len(exponentials) != 1:
            return None
        x = self._normal(exponentials[0].args[0].args[0])
        self.everywhere = x is of
        inner = [of.args[2 - side] for _, side in self.left_out]
        return exponentials[0] if self.everywhere or x in inner else None

    def _is_exponential(self, expr: Expr) -> bool:
        if not isinstance(expr, Op) or expr.info.primitive not in EXPONENTIALS:
            return False
        (x,) = expr.args
        return (
            isinstance(x, Op) and x.info.primitive == "sub" and self.sums.d not in x.args[1].symbols
        )

    def holds(self, elsewhere: set[Buf]) -> bool:
        """Whether the two nests may be taken together; completes what was found."""
        pair, nest = self.difference, self.sums.nest
        if not self.has_exponential:
            return False
        for k, reduction in enumerate(nest.reductions):
            if reduction.op == "sum" and self._is_proportional(reduction.args[0], self.everywhere):
                pair.weighted.add(k)
            elif not self._is_free(reduction.args[0]):
                return False
        pair.telling = next(
            (
                number
                for number in sorted(pair.weighted)
                if self._tells(nest.reductions[number].args[0])
            ),
            None,
        )
        inner = [store for store in nest.stores if store.inner]
        pair.scaled |= {
            inner_write.buf
            for inner_write in inner
            if self._is_proportional(inner_write.value, self.everywhere)
        }
        if any(
            inner_write.guard
            or inner_write.mask is not None
            or not (inner_write.buf in pair.scaled or self._is_free(inner_write.value))
            for inner_write in inner
        ):
            return False
        return (
            bool(pair.weighted)
            and self._may_move()
            and all(self._is_private(buf, elsewhere) for buf in pair.scaled)
        )

    # ---- expressions

    def _is_free(self, expr: Expr) -> bool:
        """Whether an expression does not depend on the exponential."""
        return all(node is not self.difference.exponential for node in nodes([expr]))

    def _is_left_out(self, test: Expr, branch: int) -> bool:
        return (self._normal(test), branch) in self.left_out

    def _is_proportional(self, expr: Expr, taken: bool) -> bool:
        """Whether an expression is the exponential times something.

        `taken`: all elements here are among those whose greatest is known; the exponential of
        others might overflow.
        """
        if expr is self.difference.exponential:
            return taken
        name = expr.info.primitive if isinstance(expr, Op) else ""
        if name == "mul":
            x, y = expr.args if self._is_free(expr.args[1]) else expr.args[::-1]
            return self._is_free(y) and self._is_proportional(x, taken)
        if name == "div":
            return self._is_free(expr.args[1]) and self._is_proportional(expr.args[0], taken)
        if name in ("neg", "convert_element_type"):
            return _is_float(expr.dtype) and self._is_proportional(expr.args[0], taken)
        if not _is_choice(expr) or not self._is_free(expr.args[0]):
            return False
        zeros = [
            k for k in range(2) if isinstance(case := expr.args[1 + k], Const) and case.value == 0
        ]
        return any(
            self._is_proportional(
                expr.args[2 - side], taken or self._is_left_out(expr.args[0], side)
            )
            for side in zeros
        )

    def _tells(self, expr: Expr) -> bool:
        """Whether a term is the exponential wherever an element may be the greatest, so that NaN shows in the sum."""
        if expr is self.difference.exponential:
            return True
        if _is_choice(expr):
            return any(
                self._is_left_out(expr.args[0], k) and self._tells(expr.args[2 - k])
                for k in range(2)
            )
        return (
            isinstance(expr, Op)
            and expr.info.primitive == "convert_element_type"
            and _is_float(expr.dtype)
            and self._tells(expr.args[0])
        )

    # ---- memory

    def _may_move(self) -> bool:
        """Whether the sums, which do without c then, may be taken before the statements between the two nests."""
        exp, nest = self.difference.exponential, self.sums.nest
        without = self.pool.rewriter(lambda node: exp.args[0].args[0] if node is exp else None)
        inner = [store for store in nest.stores if store.inner]
        read = {
            load.buf.root
            for reduction in nest.reductions
            for load in _loads(without(reduction.args[0]))
        }
        read |= {
            load.buf.root for inner_write in inner for load in _loads(without(inner_write.value))
        }
        written = {inner_write.buf.root for inner_write in inner}
        before = self.run[self.difference.at : self.difference.later]
        return not (read & (written | effects.written(before)) or written & effects.touched(before))

    def _is_private(self, buf: Buf, elsewhere: set[Buf]) -> bool:
        """Whether only later nests, which walk it along the row, read a buffer, and this one alone writes it."""
        if not buf.arena or buf.storage is not None or buf in elsewhere:
            return False
        if sum(store.buf.root is buf for store in self.sums.nest.stores) > 1:
            return False
        users = [
            at
            for at, nest in enumerate(self.run)
            if buf in effects.touched([nest]) and at != self.difference.later
        ]
        return all(
            at > self.difference.later and self._reads_along(self.run[at], buf) for at in users
        )

    def _reads_along(self, nest: Nest, buf: Buf) -> bool:
        row = Row.of(nest)
        if row is None or row.size != self.sums.size or buf in effects.written([nest]):
            return False
        loads = [load for load in nest.loads() if load.buf.root is buf]
        if any(not isinstance(load, Load) or load.buf is not buf or load.guard for load in loads):
            return False
        return all(axis_of(load.index, row.d) is not None for load in loads)


def _is_choice(expr: Expr) -> bool:
    return (
        isinstance(expr, Op)
        and expr.info.primitive == "select_n"
        and len(expr.args) == 3
        and expr.args[0].dtype == np.dtype(bool)
    )


def _is_float(dtype: np.dtype) -> bool:
    return is_float(compute_el(dtype))


def _loads(expr: Expr) -> list[Load | Gather]:
    return [node for node in nodes([expr]) if isinstance(node, Load | Gather)]
