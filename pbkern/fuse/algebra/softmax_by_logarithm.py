"""ClosedJaxpr -> the same with softmax as a quotient where it is written by the logarithm of its sum.

    m = max(x), e = exp(x - m), l = sum(e)
    exp(x - (m + log(l)))  ->  e / l
    exp((x - m) - log(l))  ->  e / l

So `exp(log_softmax(x))` computes one exponential per element, and no later pass meets a softmax in this form. Rounding errors
are smaller: that of x - (m + log(l)) grows with the size of x. Rows with an infinite maximum are NaN in both forms. Where
something guards the maximum against that, as in `jax.nn.logsumexp`, the function stays as it is: rows with an
infinity have zeros, too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.fuse.access.dimension_map import MOVING, Places, moved
from pbkern.fuse.simplify.driver import retrace


def softmax_as_quotient(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs that hold maxima, exponentials, sums and logarithms. Changes rounding."""
    if not primitive_names(closed) >= {"reduce_max", "sub", "exp", "reduce_sum", "log"}:
        return closed
    seen = _RowValues()
    rules = dict.fromkeys((*MOVING, "abs", "stop_gradient"), seen.view)
    names = "reduce_max sub exp reduce_sum log add"
    return retrace(closed, rules | {name: getattr(seen, name) for name in names.split()})


class _Exponential(NamedTuple):
    """exp(x - shift), where shift is the maximum of each row; `rows`: the dimensions of x that it has."""

    x: jax.Array
    shift: jax.Array
    rows: Places
    value: jax.Array


# Kinds of facts about values with a number per row. The last item of each fact is the dimension of x that each dimension of the
# value is.
ROW_KINDS = ("shift", "sum", "log", "logsumexp")


class _RowValues:
    """Remembers, by value: maxima of rows, exponents x - maximum, exponentials, and sums and logarithms of these."""

    def __init__(self) -> None:
        self.notes = Notes()

    def view(self, eqn, operands):
        """A view of a number per row; sums of exponentials are their own sizes."""
        name = eqn.primitive.name
        if len(operands) > 1:
            return None
        for kind in ROW_KINDS:
            fact = self.notes.find(kind, operands[0])
            if fact is None or (name == "abs" and kind != "sum"):
                continue
            *what, places = fact
            to = moved(eqn, places) if name in MOVING else places
            return None if to is None else self.notes.bound(kind, eqn, operands, *what, to)
        return None

    def reduce_max(self, eqn, operands):
        (x,) = operands
        value = eqn.primitive.bind(x, **eqn.params)
        rows = _kept(eqn, x)
        return self.notes.note("shift", value, x, value, rows, rows)

    def sub(self, eqn, operands):
        """x - m is an exponent; x - (m + log(l)) and (x - m) - log(l) are logarithms of quotients."""
        x, y = operands
        shift = self._of_same_rows("shift", y, x)
        if shift is not None and shift[0] is x:
            return self.notes.bound("exponent", eqn, operands, *shift[:-1])
        logsumexp = self._of_same_rows("logsumexp", y, x)
        if logsumexp is not None and logsumexp[0] is x:
            _, exponential, total, _ = logsumexp
            return self.notes.bound("quotient", eqn, operands, exponential, total)
        exponent, log = self.notes.find("exponent", x), self._of_same_rows("log", y, x)
        if exponent is None or log is None:
            return None
        exponential, total, _ = log
        if exponential.x is not exponent[0] or exponential.shift is not exponent[1]:
            return None
        return self.notes.bound("quotient", eqn, operands, exponential, total)

    def _of_same_rows(self, kind: str, numbers, x):
        """The fact about a number per row where each number meets its own row of x; else None."""
        if jnp.ndim(numbers) != jnp.ndim(x):
            return None
        fact = self.notes.find(kind, numbers)
        return fact if fact is not None and _is_beside(fact[-1], x) else None

    def exp(self, eqn, operands):
        (x,) = operands
        quotient = self.notes.find("quotient", x)
        if quotient is not None:
            exponential, (total, places) = quotient
            value = exponential.value
            beside = [size if axis in places else 1 for axis, size in enumerate(value.shape)]
            return [lax.div(value, lax.broadcast_in_dim(total, beside, places))]
        exponent = self.notes.find("exponent", x)
        if exponent is None:
            return None
        value = eqn.primitive.bind(*operands, **eqn.params)
        return self.notes.note("exponential", value, _Exponential(*exponent, value))

    def reduce_sum(self, eqn, operands):
        (x,) = operands
        fact = self.notes.find("exponential", x)
        places = _kept(eqn, x)
        if fact is None or fact[0].rows != places:
            return None
        value = eqn.primitive.bind(x, **eqn.params)
        return self.notes.note("sum", value, *fact, (value, places), places)

    def log(self, eqn, operands):
        fact = self.notes.find("sum", operands[0])
        return fact and self.notes.bound("log", eqn, operands, *fact)

    def add(self, eqn, operands):
        """log(l) + m, in either order, of the same rows."""
        for log, shift in (operands, operands[::-1]):
            sums, maxima = self.notes.find("log", log), self.notes.find("shift", shift)
            if sums is None or maxima is None or jnp.shape(log) != jnp.shape(shift):
                continue
            exponential, total, places = sums
            x, root, _, rows = maxima
            if exponential.x is x and exponential.shift is root and places == rows:
                return self.notes.bound("logsumexp", eqn, operands, x, exponential, total, places)
        return None


def _kept(eqn, x) -> Places:
    """The dimensions of x that a reduction leaves."""
    return tuple(axis for axis in range(x.ndim) if axis not in eqn.params["axes"])


def _is_beside(places: Places, x) -> bool:
    """Whether each of a row's numbers meets its own row of x."""
    return all(
        place is None or place == axis or x.shape[place] == 1 for axis, place in enumerate(places)
    )
