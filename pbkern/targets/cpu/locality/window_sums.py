"""Weighted sums over windows -> sums along one dimension of the window after the other.

    o[i, j] = t[i, j] + t[i, j + 1] + t[i + 1, j] + t[i + 1, j + 1]
        ->    r = t[i, j] + t[i + 1, j]    o[i, j] = r + (r at j + 1)

Weights that are the outer product of a column and a row allow that: those of box filters, binomial filters and derivatives.
Neighbouring points share the sums along the first dimension: nine terms become three and three. Weights of both signs are
applied first, where differences of neighbours are still exact; else rows are added before vectors are shifted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.ir import Const, Expr, Load, Nest, Op, Stmt, with_nests

FLOATS = ("float32", "float64")
SUMS = frozenset(("add", "sub", "mul", "neg"))


@dataclass(frozen=True)
class FactorWindowSums:
    """Factors sums over windows where that is less work."""

    most_cycles: float = threshold(
        0.95, "time, relative to before, up to which sums of windows are factored"
    )
    weight_error: float = threshold(
        4.0, "units in the last place by which a product of factors may miss a weight"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return with_nests(stmts, lambda nest: [self._factored(nest, context)])

    def _factored(self, nest: Nest, context: NestContext) -> Nest:
        written = {store.buf.root for store in nest.stores}
        if (
            nest.reductions
            or nest.ordered
            or any(load.buf.root in written for load in nest.loads())
        ):
            return nest
        factoring = _Factoring(nest, context, self.weight_error)
        new = nest.mapped(factoring.rewritten)
        if not factoring.count:
            return nest
        cycles = [
            context.policy.cycles(collapse(candidate, context.pool, context.aliases), 0.0)
            for candidate in (nest, new)
        ]
        return new if 0 < cycles[1] < self.most_cycles * cycles[0] else nest


@dataclass(frozen=True)
class _Factor:
    """Weights along one dimension: of values so far along it, in ascending order."""

    dim: str
    distances: tuple[int, ...]
    weights: np.ndarray

    @property
    def has_both_signs(self) -> bool:
        return bool((self.weights > 0).any() and (self.weights < 0).any())


class _Factoring:
    """Rewrites the expressions of a nest. count: the sums that were factored."""

    def __init__(self, nest: Nest, context: NestContext, weight_error: float) -> None:
        self.nest, self.context, self.pool = nest, context, context.pool
        self.weight_error = weight_error
        self.count = 0
        self.users = Counter(id(arg) for node in nest.nodes() for arg in node.args)
        self.users.update(map(id, nest.expressions()))
        self.order = {dim: number for number, dim in enumerate(nest.dims)}
        self.known: dict[Expr, Expr] = {}

    def rewritten(self, expr: Expr) -> Expr:
        if expr not in self.known:
            self.known[expr] = self._sum(expr) or self._with_args(expr)
        return self.known[expr]

    def _with_args(self, expr: Expr) -> Expr:
        args = tuple(map(self.rewritten, expr.args))
        same = all(arg is new for arg, new in zip(expr.args, args))
        return expr if same else expr.with_args(args, self.pool)

    def _sum(self, expr: Expr) -> Expr | None:
        """A sum with its windows factored; None where it has none."""
        if not _is_sum(expr):
            return None
        terms: list[tuple[float, Expr]] = []
        self._expand(expr, 1.0, terms, is_root=True)
        rows: dict[tuple, dict[Load, float]] = {}
        for weight, term in terms:
            if isinstance(term, Load) and not term.guard:
                key = (term.buf, *(index.linear() for index in term.index))
                window = rows.setdefault(key, {})
                window[term] = window.get(term, 0.0) + weight
        done: set[Expr] = set()
        total: list[tuple[float, Expr]] = []
        for window in rows.values():
            factors = self._factors(window, expr.dtype)
            if factors is not None:
                total.append((1.0, self._applied(window, factors)))
                done |= window.keys()
        if not done:
            return None
        self.count += 1
        total += [
            (1.0, self._number(weight, term))
            if isinstance(term, Const)
            else (weight, self.rewritten(term))
            for weight, term in terms
            if term not in done
        ]
        return self._weighted(total)

    def _expand(
        self, expr: Expr, weight: float, terms: list[tuple[float, Expr]], is_root: bool = False
    ) -> None:
        """Appends (weight, term) for each term of a sum. Sums that others use as well are terms."""
        if not is_root and self.users[id(expr)] > 1 and not _is_weighted_load(expr):
            terms.append((weight, expr))
            return
        match expr.info.primitive if isinstance(expr, Op) and _is_sum(expr) else "":
            case "add":
                for arg in expr.args:
                    self._expand(arg, weight, terms)
            case "sub":
                self._expand(expr.args[0], weight, terms)
                self._expand(expr.args[1], -weight, terms)
            case "neg":
                self._expand(expr.args[0], -weight, terms)
            case "mul":
                number, value = _number_first(expr)
                self._expand(value, weight * float(number.value), terms)
            case _:
                terms.append((weight, expr))

    def _factors(self, window: dict[Load, float], dtype: np.dtype) -> list[_Factor] | None:
        """Factors of a window's weights, in the order in which they are applied."""
        loads = list(window)
        places = [[load.index[axis].const for load in loads] for axis in range(len(loads[0].index))]
        axes = [axis for axis, along in enumerate(places) if len(set(along)) > 1]
        dims = [self._dim_of(loads[0], axis) for axis in axes]
        starts = [sorted(set(places[axis])) for axis in axes]
        sizes = tuple(map(len, starts))
        if len(axes) < 2 or None in dims or math.prod(sizes) != len(loads):
            return None
        weights = np.zeros(sizes)
        for load, weight in window.items():
            at = tuple(start.index(load.index[axis].const) for axis, start in zip(axes, starts))
            weights[at] = weight
        lines = self._lines(weights, dtype)
        if lines is None:
            return None
        factors = [
            _Factor(dim, tuple(place - start[0] for place in start), line)
            for dim, start, line in zip(dims, starts, lines)
            if dim is not None
        ]
        factors.sort(key=lambda factor: (not factor.has_both_signs, self.order[factor.dim]))
        return _scaled_last(factors)

    def _dim_of(self, load: Load, axis: int) -> str | None:
        """The dimension by which this index alone moves, step by step, if there is one."""
        live = [(dim, step) for dim, step in load.index[axis].terms if dim in self.nest.dims]
        if len(live) != 1 or live[0][1] != 1:
            return None
        dim = live[0][0]
        return dim if sum(dim in index.symbols for index in load.index) == 1 else None

    def _lines(self, weights: np.ndarray, dtype: np.dtype) -> list[np.ndarray] | None:
        """Weights along each dimension, whose outer product these are."""
        at = np.unravel_index(np.abs(weights).argmax(), weights.shape)
        if not weights[at] or not np.isfinite(weights).all():
            return None
        lines: list[np.ndarray] = []
        for axis in range(weights.ndim):
            line = weights[tuple(slice(None) if k == axis else at[k] for k in range(weights.ndim))]
            lines.append(line if not lines else line / weights[at])
        product = lines[0]
        for line in lines[1:]:
            product = np.multiply.outer(product, line)
        bound = self.weight_error * np.finfo(dtype).eps * np.abs(weights)
        return lines if np.all(np.abs(product - weights) <= bound) else None

    def _applied(self, window: dict[Load, float], factors: list[_Factor]) -> Expr:
        """The sum of a window, one factor after the other."""
        first = next(iter(window))
        least = tuple(
            index.linear() + min(load.index[axis].const for load in window)
            for axis, index in enumerate(first.index)
        )
        value: Expr = self.pool.load(first.dtype, first.buf, least, False)
        for factor in factors:
            value = self._weighted(
                (float(weight), self._at(value, factor.dim, distance))
                for weight, distance in zip(factor.weights, factor.distances)
            )
        return value

    def _at(self, value: Expr, dim: str, distance: int) -> Expr:
        if not distance:
            return value
        if isinstance(value, Load):
            index = tuple(i + distance if dim in i.symbols else i for i in value.index)
            return self.pool.load(value.dtype, value.buf, index, False)
        return self.pool.shifted(value.dtype, ((dim, distance),), (value,))

    def _weighted(self, terms: Iterable[tuple[float, Expr]]) -> Expr:
        """The sum of terms times weights; a weight that all have is applied to the sum."""
        terms = list(terms)
        sizes = {abs(weight) for weight, _ in terms}
        size = sizes.pop() if len(sizes) == 1 else 1.0
        if size != 1.0 and all(weight < 0 for weight, _ in terms):
            size = -size
        terms = sorted(
            ((weight / size, value) for weight, value in terms), key=lambda term: term[0] < 0
        )
        total = self._times(terms[0][1], terms[0][0])
        for weight, value in terms[1:]:
            name = "sub" if weight < 0 else "add"
            total = self._op(name, total, self._times(value, abs(weight)))
        return self._times(total, size)

    def _times(self, value: Expr, weight: float) -> Expr:
        if weight == 1.0:
            return value
        return self._op("mul", value, self.pool.const(value.dtype, value.dtype.type(weight)))

    def _number(self, weight: float, number: Const) -> Expr:
        value = number.dtype.type(weight * float(number.value))
        return self.pool.const(number.dtype, value)

    def _op(self, name: str, *args: Expr) -> Expr:
        return self.context.op(name, args[0].dtype, *args)


def _is_sum(expr: Expr) -> bool:
    """Whether it is a sum or difference of floats, or a float times a number."""
    if not isinstance(expr, Op) or expr.dtype.name not in FLOATS:
        return False
    if expr.info.primitive not in SUMS or any(arg.dtype != expr.dtype for arg in expr.args):
        return False
    return expr.info.primitive != "mul" or any(isinstance(arg, Const) for arg in expr.args)


def _number_first(product: Expr) -> tuple[Const, Expr]:
    number, value = sorted(product.args, key=lambda arg: not isinstance(arg, Const))
    assert isinstance(number, Const)
    return number, value


def _is_weighted_load(expr: Expr) -> bool:
    """Whether it is an element times a number, which costs nothing to compute again beside a sum."""
    return (
        _is_sum(expr)
        and isinstance(expr, Op)
        and expr.info.primitive == "mul"
        and isinstance(_number_first(expr)[1], Load)
    )


def _scaled_last(factors: list[_Factor]) -> list[_Factor]:
    """Factors whose least weight is 1 or -1, but for the last one: it is computed once for each result."""
    scaled, scale = [], 1.0
    for factor in factors[:-1]:
        least = min(abs(weight) for weight in factor.weights if weight)
        is_negative = factor.weights.sum() < 0
        is_turned = factor.has_both_signs and (scale * factors[-1].weights <= 0).all()
        least = -least if is_negative or is_turned else least
        scaled.append(_Factor(factor.dim, factor.distances, factor.weights / least))
        scale *= least
    last = factors[-1]
    return [*scaled, _Factor(last.dim, last.distances, last.weights * scale)]
