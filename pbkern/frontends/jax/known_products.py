"""Jaxpr of a function and its tangents -> the same with products that are known in place of others.

    dot(p * t + p * r, v)  ->  dot(p * t, v) + r * dot(p, v)        where dot(p, v) is known, and r is one number per row

Tangents of softmax are such sums: r is a sum over a row of weights. Transposed, the left side computes r's derivative from
dot(g, v), for whose sake a kernel makes two products more; the right side from the result: sum_d(g[d] * dot(p, v)[d]). What
this reads must be saved then, beside the statistics of the rows. Source: Dao et al. 2022, "FlashAttention", section B.4.

Conversions between float32 and floats of 16 bits do not hide such sums, and are left out of what is rewritten: rows of one key
have a gradient of zero, a difference of which only one side would be rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again, source_context, without_dead_code
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import literal_value, primitive_names
from pbkern.core.lazy_dataclass import dataclass

# Types between which values are followed, rounded or not.
FOLLOWED = frozenset(("float32", "float16", "bfloat16"))
# Terms of a sum that are followed: those of softmax, of dropout and of a maximum's tangent are fewer.
MOST_TERMS = 6
# Whole arrays that a followed term is a product of, at most.
MOST_FACTORS = 4
# Times fewer elements that a row of the known product has than one of p, at least, as for sums that the fuser rewrites
# (fuse/algebra/reassociate_row_sums.py).
TIMES_SHORTER = 2


def use_known_products(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites equations outside of control flow of jaxprs that hold exponentials and products. Changes rounding."""
    names = primitive_names(closed)
    if "dot_general" not in names or names.isdisjoint(("exp", "exp2")):
        return closed
    rules = _Rules()
    rewritten = jax.make_jaxpr(lambda *args: _run(closed, args, rules))(*closed.in_avals)
    return without_dead_code(rewritten) if rules.rewritten else closed


def _run(closed: jex.ClosedJaxpr, args: Sequence, rules: _Rules) -> list:
    """Binds every equation again, those of plain calls as well. Calls with derivatives of their own stay as they are."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts)) | dict(zip(closed.jaxpr.invars, args))

    def read(atom):
        return literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        with source_context(eqn):
            if eqn.primitive.name in ("jit", "pjit"):
                results = _run(eqn.params["jaxpr"], operands, rules)
            else:
                rule = getattr(rules, f"of_{eqn.primitive.name}", bind_again)
                results = rule(eqn, operands)
                if results is None:
                    results = bind_again(eqn, operands)
        env.update(zip(eqn.outvars, results))
    return [read(var) for var in closed.jaxpr.outvars]


@dataclass(frozen=True)
class _WholeFactor:
    """A whole array as a factor, by its id, or zeros and ones by which one case of a selection is taken."""

    of: int
    order: tuple[int, ...]  # its dimension, for each dimension of the term
    case: int | None = None

    def transposed(self, order: Sequence[int]) -> _WholeFactor:
        return _WholeFactor(self.of, tuple(self.order[dim] for dim in order), self.case)


@dataclass(frozen=True)
class _Term:
    """A summand: whole arrays, times those of `over`, divided by those of `under`, which repeat along dimensions of one point.

    value: the result of that, which may repeat as well where there is no whole array.
    """

    value: jax.Array
    whole: tuple[_WholeFactor, ...]
    over: tuple = ()
    under: tuple = ()

    def transposed(self, order: Sequence[int]) -> _Term:
        over, under = (
            tuple(lax.transpose(x, order) if jnp.ndim(x) else x for x in rows)
            for rows in (self.over, self.under)
        )
        whole = _sorted(factor.transposed(order) for factor in self.whole)
        return _Term(lax.transpose(self.value, order), whole, over, under)


@dataclass(frozen=True)
class _Known:
    """A product with a single term, p * row, on one side, and its result."""

    term: _Term
    side: int
    other: _WholeFactor
    dimensions: tuple
    result: jax.Array


class _Rules:
    """Remembers, by value: its terms, and of which value it is a transpose or a conversion."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.exponentials: set[int] = set()
        self.known: list[_Known] = []
        self.rewritten = False

    # --- terms

    def _terms(self, x, eqn) -> tuple[_Term, ...]:
        """Terms of an operand of an elementwise equation; what repeats there is one number per row."""
        if jnp.shape(x) != eqn.outvars[0].aval.shape:
            return (_Term(x, (), (x,)),)
        noted = self.notes.find("terms", x)
        if noted:
            return noted[0]
        self.notes.note("whole", x)
        return (_whole(x),)

    def _bound(self, eqn, operands, terms):
        """The equation's result, with its terms where these are few."""
        if not all(map(_is_float, (eqn.outvars[0].aval, *(term.value for term in terms)))):
            return None
        if len(terms) > MOST_TERMS or any(len(term.whole) > MOST_FACTORS for term in terms):
            return None
        return self.notes.bound("terms", eqn, operands, tuple(terms))

    def of_exp(self, eqn, operands):
        (result,) = bind_again(eqn, operands)
        self.exponentials.add(id(result))
        return self.notes.note("terms", result, (_whole(result),))

    of_exp2 = of_exp

    def of_mul(self, eqn, operands):
        left, right = (self._terms(x, eqn) for x in operands)
        if len(left) * len(right) > MOST_TERMS:
            return None
        return self._bound(eqn, operands, [_product(a, b) for a in left for b in right])

    def of_div(self, eqn, operands):
        above, below = (self._terms(x, eqn) for x in operands)
        if len(below) > 1 or below[0].whole:
            return None
        return self._bound(eqn, operands, [_quotient(term, below[0]) for term in above])

    def of_add(self, eqn, operands):
        return self._summed(eqn, operands, [t for x in operands for t in self._terms(x, eqn)])

    of_add_any = of_add

    def of_sub(self, eqn, operands):
        left, right = (self._terms(x, eqn) for x in operands)
        return self._summed(eqn, operands, [*left, *map(_negative, right)])

    def _summed(self, eqn, operands, terms: Sequence[_Term]):
        """A sum. Terms that are neither weights nor repeat are one: no known product has them, and they share what follows."""
        apart = [term for term in terms if not term.whole or self._is_weight(term)]
        if not apart:
            return None
        together = [term.value for term in terms if term.whole and not self._is_weight(term)]
        if together:
            value = _sum(together)
            self.notes.note("whole", value)
            apart.append(_whole(value))
        return self._bound(eqn, operands, apart)

    def of_neg(self, eqn, operands):
        terms = self._terms(operands[0], eqn)
        return self._bound(eqn, operands, [_negative(term) for term in terms])

    def of_select_n(self, eqn, operands):
        """One case, where the other one is zero."""
        mask, *cases = operands
        shape = eqn.outvars[0].aval.shape
        if len(cases) != 2 or jnp.shape(mask) != shape:
            return None
        for case in (0, 1):
            if not self._is_zero(cases[1 - case]) or jnp.shape(cases[case]) != shape:
                continue
            chosen = _WholeFactor(id(mask), tuple(range(len(shape))), case)
            self.notes.note("mask", mask)
            terms = []
            for term in self._terms(cases[case], eqn):
                zero = jnp.zeros((), term.value.dtype)
                value = jnp.broadcast_to(term.value, shape)
                both = [jnp.broadcast_to(zero, shape), value]
                value = lax.select_n(mask, *(both if case else both[::-1]))
                whole = _sorted((*term.whole, chosen))
                terms.append(_Term(value, whole, term.over, term.under))
            return self._bound(eqn, operands, terms)
        return None

    def _is_zero(self, x) -> bool:
        while noted := self.notes.find("repeated", x):
            (x,) = noted
        return isinstance(x, (np.ndarray, np.generic)) and not np.any(x)

    def of_broadcast_in_dim(self, eqn, operands):
        """An array of fewer dimensions, with dimensions of one point in place of those along which it repeats."""
        x, shape = operands[0], eqn.outvars[0].aval.shape
        if not _is_float(eqn.outvars[0].aval) or jnp.shape(x) == shape:
            return None
        place = dict(zip(eqn.params["broadcast_dimensions"], jnp.shape(x)))
        compact = tuple(place.get(dim, 1) for dim in range(len(shape)))
        if compact == shape:
            return None
        row = x if not jnp.ndim(x) else lax.reshape(x, compact)
        (result,) = self.notes.bound("repeated", eqn, operands, x)
        return self.notes.note("terms", result, (_Term(row, (), (row,)),))

    def of_transpose(self, eqn, operands):
        x, order = self._origin(operands[0])
        permutation = eqn.params["permutation"]
        (result,) = self.notes.bound(
            "origin", eqn, operands, x, tuple(order[dim] for dim in permutation)
        )
        noted = self.notes.find("terms", operands[0])
        if noted and all(jnp.ndim(term.value) == len(permutation) for term in noted[0]):
            terms = tuple(term.transposed(permutation) for term in noted[0])
            self.notes.note("terms", result, terms)
        return [result]

    def of_convert_element_type(self, eqn, operands):
        if not jnp.ndim(operands[0]):
            return self.notes.bound("repeated", eqn, operands, operands[0])
        types = {operands[0].dtype.name, np.dtype(eqn.params["new_dtype"]).name}
        if not types <= FOLLOWED:
            return None
        (result,) = self.notes.bound("origin", eqn, operands, *self._origin(operands[0]))
        noted = self.notes.find("terms", operands[0])
        return self.notes.note("terms", result, *noted) if noted else [result]

    def _origin(self, x) -> tuple:
        """(the value of which x is a transpose or a conversion, its dimension for each dimension of x)."""
        return self.notes.find("origin", x) or (x, tuple(range(jnp.ndim(x))))

    # --- products

    def of_dot_general(self, eqn, operands):
        for side in (0, 1):
            noted = self.notes.find("terms", operands[side])
            result = self._with_known(eqn, operands, side, noted[0]) if noted else None
            if result is not None:
                self.rewritten = True
                return [result]
        (result,) = self.notes.bound("product", eqn, operands)
        for side in (0, 1):
            noted = self.notes.find("terms", operands[side])
            if noted and len(noted[0]) == 1 and self._is_weight(noted[0][0]):
                key = (side, self._factor(operands[1 - side]), eqn.params["dimension_numbers"])
                self.known.append(_Known(noted[0][0], *key, result))
        return [result]

    def _factor(self, x) -> _WholeFactor:
        origin, order = self._origin(x)
        self.notes.note("operand", origin)
        return _WholeFactor(id(origin), order)

    def _is_weight(self, term: _Term) -> bool:
        return any(factor.of in self.exponentials for factor in term.whole)

    def _with_known(self, eqn, operands, side: int, terms: Sequence[_Term]):
        """The product of a sum of terms as that of some of them and known products; None without such."""
        other, dimensions = self._factor(operands[1 - side]), eqn.params["dimension_numbers"]
        out = eqn.outvars[0].aval
        contracted, batch = (pair[side] for pair in dimensions)
        depth = math.prod(operands[side].shape[dim] for dim in contracted)
        columns = math.prod(
            size
            for dim, size in enumerate(operands[1 - side].shape)
            if dim not in (*dimensions[0][1 - side], *dimensions[1][1 - side])
        )
        if TIMES_SHORTER * columns > depth:
            return None
        rest, of_known = [], []
        for term in terms:
            ratios = (
                (_ratio(term, known.term), known.result)
                for known in self.known
                if (known.side, known.other, known.dimensions) == (side, other, dimensions)
                and known.term.whole == term.whole
                and known.result.dtype == out.dtype
            )
            for ratio, result in ratios:
                if not jnp.ndim(ratio) or all(ratio.shape[dim] == 1 for dim in contracted):
                    row = _of_result(ratio, contracted, batch, side, out.ndim)
                    of_known.append(lax.mul(*_wider(row, result)))
                    break
            else:
                rest.append(term.value)
        if not of_known:
            return None
        if rest:
            summed = jnp.broadcast_to(_sum(rest), operands[side].shape)
            both = _wider(summed, operands[1 - side])
            both = both if side == 0 else both[::-1]
            of_known.append(eqn.primitive.bind(*both, **eqn.params))
        return lax.convert_element_type(_sum(of_known), out.dtype)


def _whole(x) -> _Term:
    """A value as one factor; it must stay alive as long as the term."""
    return _Term(x, (_WholeFactor(id(x), tuple(range(jnp.ndim(x)))),))


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _sorted(factors) -> tuple[_WholeFactor, ...]:
    return tuple(sorted(factors, key=lambda x: (x.of, x.order, -1 if x.case is None else x.case)))


def _wider(*values) -> list:
    """The values in the widest of their types."""
    dtype = jnp.result_type(*(x.dtype for x in values))
    return [x if x.dtype == dtype else lax.convert_element_type(x, dtype) for x in values]


def _sum(values: Sequence):
    total = values[0]
    for x in values[1:]:
        total = jnp.add(*_wider(total, x))
    return total


def _product(a: _Term, b: _Term) -> _Term:
    value = jnp.multiply(*_wider(a.value, b.value))
    return _Term(value, _sorted((*a.whole, *b.whole)), (*a.over, *b.over), (*a.under, *b.under))


def _quotient(a: _Term, b: _Term) -> _Term:
    """a / b, for a term b without whole arrays."""
    value = jnp.divide(*_wider(a.value, b.value))
    return _Term(value, a.whole, (*a.over, *b.under), (*a.under, *b.over))


def _negative(a: _Term) -> _Term:
    return _Term(lax.neg(a.value), a.whole, (*a.over, -np.ones((), a.value.dtype)), a.under)


def _ratio(a: _Term, b: _Term):
    """a / b, for terms of the same whole arrays. What is on both sides cancels."""
    over, under = [*a.over, *b.under], []
    for x in (*a.under, *b.over):
        same = next((n for n, y in enumerate(over) if y is x), None)
        if same is None:
            under.append(x)
        else:
            del over[same]
    ratio = functools.reduce(_multiplied, over, np.ones((), a.value.dtype))
    return jnp.divide(*_wider(ratio, functools.reduce(_multiplied, under))) if under else ratio


def _multiplied(x, y):
    return jnp.multiply(*_wider(x, y))


def _of_result(row, contracted: Sequence[int], batch: Sequence[int], side: int, ndim: int):
    """A number per row of an operand as one per row of its product's result, that repeats along the other dimensions."""
    if not jnp.ndim(row):
        return row
    free = [dim for dim in range(row.ndim) if dim not in (*contracted, *batch)]
    row = lax.transpose(row, [*batch, *free, *contracted])
    of_batch, of_free = row.shape[: len(batch)], row.shape[len(batch) : len(batch) + len(free)]
    ones = (1,) * (ndim - len(batch) - len(free))
    return lax.reshape(row, (*of_batch, *(of_free + ones if side == 0 else ones + of_free)))
