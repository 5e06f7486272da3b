"""Known numbers: values that depend on nothing but numbers of the function, while equations are bound again.

    i = iota(2 n); p = convert(floor((i + 0.5) * n / (2 n)))      ->      p = [0, 0, 1, 1, ...]

Whole numbers that are made of floats, such as the places from which images are resized, are computed here, with all roundings:
later passes may replace a quotient by a product, which can be less than the whole number that the quotient is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import inner_jaxprs, primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.views import iota_numbers
from pbkern.core.passes import threshold
from pbkern.dsl.interpret import SHAPE_RULES, numpy_result
from pbkern.fuse.simplify.driver import retrace

# Equations whose results are computed where their operands are known: those that are exact, and those that move elements.
EXACT = {name for name, row in ELEMENTWISE.items() if row.is_exact and not row.unlowered}
FOLLOWED = {*EXACT, *SHAPE_RULES, "iota"}
# Types in which an operation has one result, whatever precision code computes it in.
PRECISE = "f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 b1".split()


class KnownNumbers:
    """Remembers how values that depend on numbers alone were made; computes them when they are asked for.

    most: elements of the largest array that is computed; repetitions do not count.
    """

    def __init__(self, most: float) -> None:
        self.notes, self.most = Notes(), most

    def rules(self) -> dict[str, Callable]:
        return dict.fromkeys(FOLLOWED, self.followed)

    def followed(self, eqn, operands) -> list | None:
        if not self._follows(eqn, operands):
            return None
        return self.notes.bound("made", eqn, operands, eqn, operands)

    def _follows(self, eqn, operands) -> bool:
        return (
            len(eqn.outvars) == 1
            and _is_precise(eqn.outvars[0].aval)
            and all(map(self._is_known, operands))
        )

    def note_constant(self, value, constant) -> None:
        if isinstance(value, jax.core.Tracer) and self._is_known(constant):
            self.notes.note("made", value)
            self.notes.note("numbers", value, np.asarray(constant))

    def _is_known(self, x) -> bool:
        if not isinstance(x, jax.core.Tracer):
            return _is_precise(x) and np.size(x) <= self.most
        return self.notes.find("made", x) is not None

    def numbers(self, x) -> np.ndarray | None:
        """The elements of a value that depends on numbers alone, if they are few."""
        if not isinstance(x, jax.core.Tracer):
            return np.asarray(x) if self._is_known(x) else None
        if computed := self.notes.find("numbers", x):
            return computed[0]
        maker = self.notes.find("made", x)
        if maker is None:
            return None
        numbers = self._computed(*maker)
        self.notes.note("numbers", x, numbers)
        return numbers

    def _computed(self, eqn, operands) -> np.ndarray | None:
        """The result, computed once where it repeats along a dimension; None where it is large otherwise."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        if name == "iota":
            return iota_numbers(eqn.params) if max(shape) <= self.most else None
        known = [self.numbers(operand) for operand in operands]
        arrays = [array for array in known if array is not None]
        if len(arrays) < len(operands):
            return None
        if name == "broadcast_in_dim":
            return numpy_result(eqn, arrays)
        if name in EXACT:
            arrays = [np.broadcast_to(array, shape) for array in arrays]
            once = tuple(
                slice(None if any(array.strides[axis] for array in arrays) else 1)
                for axis in range(len(shape))
            )
            arrays = [array[once] for array in arrays]
            size = arrays[0].size
        else:
            size = math.prod(shape)
        if size > self.most:
            return None
        result = numpy_result(eqn, arrays)
        return np.broadcast_to(result, shape) if name in EXACT and result is not None else result


def _is_precise(x) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.str[1:] in PRECISE


@dataclass(frozen=True)
class NumbersOfFloats:
    """Makes constants of whole numbers that are made of known floats."""

    most: int = threshold(
        16384, "numbers of an array that are computed: time of compilation. An image has fewer rows"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        names = primitive_names(closed)
        if "iota" not in names or not leads_to(closed.jaxpr, _is_rounding):
            return closed
        numbers = KnownNumbers(self.most)

        def computed(eqn, operands):
            results = numbers.followed(eqn, operands)
            if results is None or not eqn.outvars[0].aval.shape:
                return results
            # What follows from numbers that are made constants here becomes a constant, too.
            if not _is_rounding(eqn) and not any(
                isinstance(x, np.ndarray) and x.ndim for x in operands
            ):
                return results
            array = numbers.numbers(results[0])
            return results if array is None else [np.ascontiguousarray(array)]

        rules = numbers.rules() | dict.fromkeys(EXACT, computed)
        return retrace(closed, rules, numbers.note_constant)


def _is_rounding(eqn) -> bool:
    """Whether the equation makes whole numbers of floats."""
    return (
        eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.dtype.kind == "f"
        and np.dtype(eqn.params["new_dtype"]).kind in "iu"
    )


def leads_to(jaxpr: jex.Jaxpr, asked: Callable[[jex.JaxprEqn], bool], place: int = 0) -> bool:
    """Whether equations that are followed lead from numbers alone to operand `place` of an equation that is asked for."""
    return _follow(jaxpr, (), asked, place)[0]


def _follow(
    jaxpr: jex.Jaxpr,
    known_operands: Iterable[bool],
    asked: Callable[[jex.JaxprEqn], bool],
    place: int,
) -> tuple[bool, list[bool]]:
    """(whether an equation that is asked for is found, at any depth; which results are known)."""
    known = {var for var, is_known in zip(jaxpr.invars, known_operands) if is_known}
    known.update(jaxpr.constvars)
    is_found = False
    for eqn in jaxpr.eqns:
        operands = [isinstance(atom, jex.Literal) or atom in known for atom in eqn.invars]
        name = eqn.primitive.name
        if (called := called_jaxpr(eqn)) is not None:
            is_inside, results = _follow(called.jaxpr, operands, asked, place)
            is_found |= is_inside
        else:
            results = [name in FOLLOWED and all(operands)] * len(eqn.outvars)
            is_found |= all(operands[place : place + 1]) and asked(eqn)
            is_found |= any(
                _follow(inner.jaxpr, (), asked, place)[0] for inner in inner_jaxprs(eqn)
            )
        known.update(var for var, is_known in zip(eqn.outvars, results) if is_known)
    return is_found, [isinstance(x, jex.Literal) or x in known for x in jaxpr.outvars]
