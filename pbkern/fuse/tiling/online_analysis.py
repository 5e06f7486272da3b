"""Group -> Online: reductions over a long dimension in chunks, where exponentials are summed and multiplied.

    m = max(x)   p = exp(x - m)   l = sum(p)   o = dot(p, v)

A chunk of columns may raise the maximum to m'. The sums so far hold a factor exp(-m) and need
exp(-m'): they are multiplied by exp(m - m'), and so is whatever is linear in p. Neither x nor p is
then needed as a whole. Where p = exp(x - g(m)), as with g(m) = where(m == -inf, 0, m), the sums get
the factor exp(m - g(m)) behind the last chunk. Source: Milakov & Gimelshein 2018, "Online normalizer calculation for
softmax"; Dao et al. 2022, "FlashAttention".

Sums that need these results, as in gradients, are a second pass over the columns, which computes x
and p again. Where maxima are given, as for gradients with respect to keys and values, there is only
the second pass.

This file looks at equations only; online_blocks.py works out their blocks. Emission is
fuse/emit/online_kernel.py.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax.numpy as jnp
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.process.context_values import during
from pbkern.fuse.access.dimension_map import MOVING, Places, moved
from pbkern.fuse.cost.sizes import Sizes
from pbkern.fuse.tiling.block_options import are_matrices

from .guarded_maximum import Guard, as_maximum

# Columns of a chunk: enough for deep products, few enough that a hundred rows of them stay in L2.
CHUNK_COLUMNS = 512
# Fewest columns of a chunk; the columns of every chunk are a multiple of it.
FEWEST_CHUNK_COLUMNS = 32
EXPONENTIALS = ("exp", "exp2")

_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "sums may be taken in chunks", default=True
)


def chunks_allowed(allowed: bool) -> AbstractContextManager:
    """In a `with` block, whether sums may be taken in chunks: it changes their order."""
    return during(_allowed, allowed)


def chunks_are_allowed() -> bool:
    return _allowed.get()


@dataclass(frozen=True)
class Online:
    """Reductions in chunks.

    Attributes:
      columns: number of reduced elements.
      chunk_columns: how many of them a chunk has.
      maximum: the equation of the maximum m = reduce_max(x); None: the first pass, if any, makes sums that need none.
      function: "exp", or "exp2".
      guards: per sum, what x has subtracted in place of the maximum; None: the maximum itself.
      sums: equations linear in exp(x - m), each with the dimension of x per dimension of its
        result; any, without a maximum.
      first_eqns: equations that x and the sums' operands need.
      totals: equations of the second pass.
      second_eqns: equations that the totals' operands need, given m and the sums.
      final_eqns: equations from m, the sums and the totals to the group's results.
      outer_extent: elements of another dimension that all totals sum over, such as the heads of queries that share a key; taken
        one by one. 1: there is none, or chunks hold all of it.
      leaves_out_hidden: whether a chunk of the first pass that a mask hides is left out as the kernel runs.
    """

    columns: int
    chunk_columns: int
    maximum: jex.JaxprEqn | None
    function: str
    sums: tuple[tuple[jex.JaxprEqn, Places], ...]
    first_eqns: tuple
    totals: tuple
    second_eqns: tuple
    final_eqns: tuple
    guards: tuple[Guard | None, ...] = ()
    outer_extent: int = 1
    leaves_out_hidden: bool = False

    @property
    def first_results(self) -> list:
        """The maximum and the sums, as values."""
        return [
            eqn.outvars[0]
            for eqn in (self.maximum, *(total for total, _ in self.sums))
            if eqn is not None
        ]

    @property
    def second_results(self) -> list:
        """The totals, as values."""
        return [total.outvars[0] for total in self.totals]

    def places_of_maximum(self) -> Places:
        """The dimension of x per dimension of the maximum, in a first pass."""
        assert self.maximum is not None, "there is no first pass"
        reduced = params_of(self.maximum)["axes"]
        ndim = array_aval(self.maximum.invars[0]).ndim
        return tuple(axis for axis in range(ndim) if axis not in reduced)


def find_online(eqns: Sequence, outputs: Sequence, sizes: Sizes) -> Online | None:
    """The reductions of a group that can be taken in chunks; None without a contraction.

    Args:
      eqns: the group's equations, in program order.
      outputs: its results.
      sizes: the target's.
    """
    chunk, are_tiles = CHUNK_COLUMNS, False
    for eqn in eqns:
        if eqn.primitive.name == "dot_general" and are_matrices(eqn, sizes):
            # Scores of a chunk stay in registers.
            chunk, are_tiles = sizes.matrix_tiles[0], True
    names = {eqn.primitive.name for eqn in eqns}
    if not _allowed.get() or "dot_general" not in names or names.isdisjoint(EXPONENTIALS):
        return None
    for maximum in (eqn for eqn in eqns if _is_long(eqn, chunk)):
        x, axis = maximum.invars[0], int(maximum.params["axes"][0])
        linear = _Linear(maximum, eqns)
        sums = tuple(linear.sums())
        first = {eqn.outvars[0] for eqn in (maximum, *(total for total, _ in sums))}
        first_eqns = leading_to(
            linear.unguarded(),
            {atom for eqn in (maximum, *(total for total, _ in sums)) for atom in atoms(eqn)},
            {maximum.outvars[0]},
        )
        if not sums or any(var in first for eqn in first_eqns for var in eqn.outvars):
            continue
        totals = [eqn for eqn in _totals(eqns, x).get(axis, ()) if eqn.outvars[0] not in first]
        first_pass = _FirstPass(
            maximum, linear.function or "", linear.guards_of_sums(), sums, tuple(first_eqns)
        )
        chunked = _complete(eqns, outputs, x.aval.shape[axis], first_pass, totals, chunk)
        if chunked is not None:
            return chunked
    for root in eqns:
        if root.primitive.name == "dot_general":
            by_axis = _totals(eqns, root.outvars[0])
            for axis, totals in by_axis.items():
                shape = root.outvars[0].aval.shape
                columns = shape[axis]
                outer_extent = _outer_extent(by_axis, axis, shape) if are_tiles else 1
                if columns < 2 * chunk:
                    continue
                sums_first = _plain_sums(eqns, totals) if are_tiles else _FirstPass()
                chunked = _complete(eqns, outputs, columns, sums_first, totals, chunk, outer_extent)
                if chunked and any(
                    eqn.primitive.name in EXPONENTIALS for eqn in chunked.second_eqns
                ):
                    return chunked
    return None


def _outer_extent(sums: dict[int, list], axis: int, shape: Sequence[int]) -> int:
    """Elements of the one dimension beside an axis that all its totals sum over; 1 if there is no such dimension."""
    axes = [{other for other in sums if total in sums[other]} - {axis} for total in sums[axis]]
    alike = all(other == axes[0] for other in axes) and len(axes[0]) == 1
    return shape[next(iter(axes[0]))] if alike else 1


@dataclass(frozen=True)
class _FirstPass:
    """The fields of Online that the first pass has; by default, there is none."""

    maximum: jex.JaxprEqn | None = None
    function: str = ""
    guards: tuple[Guard | None, ...] = ()
    sums: tuple[tuple[jex.JaxprEqn, Places], ...] = ()
    first_eqns: tuple = ()


def _plain_sums(eqns: Sequence, totals: Sequence) -> _FirstPass:
    """A first pass that makes the sums that other sums need, as the gradient of softmax needs its row sums."""
    summed = {total.outvars[0] for total in totals}
    needed: set = set()
    for total in totals:
        cone = leading_to(eqns, set(atoms(total)))
        needed |= summed & {var for eqn in cone for var in eqn.outvars}
    sums = [total for total in totals if total.outvars[0] in needed]
    first_eqns = leading_to(eqns, {atom for total in sums for atom in atoms(total)})
    return _FirstPass(sums=tuple((total, ()) for total in sums), first_eqns=tuple(first_eqns))


def _complete(
    eqns: Sequence,
    outputs: Sequence,
    columns: int,
    first_pass: _FirstPass,
    totals: Sequence,
    chunk: int,
    outer_extent: int = 1,
) -> Online | None:
    """Adds the equations of the second pass, if any, and of the results.

    Args:
      eqns: the group's equations.
      outputs: its results.
      columns: number of reduced elements.
      first_pass: its equations.
      totals: sums over the columns that a second pass may make; those that no result needs are dropped.
      chunk: columns of a chunk, at most.
      outer_extent: as in Online.

    Returns:
      None where a pass has no contraction, or where a sum of the second pass needs another one.
    """
    maximum, sums, first_eqns = first_pass.maximum, first_pass.sums, first_pass.first_eqns
    first = {
        eqn.outvars[0] for eqn in (maximum, *(summed for summed, _ in sums)) if eqn is not None
    }
    needed = {var for eqn in leading_to(eqns, set(outputs), first) for var in eqn.outvars}
    totals = [total for total in totals if total.outvars[0] in needed]
    second = {total.outvars[0] for total in totals}
    second_eqns = leading_to(eqns, {atom for total in totals for atom in atoms(total)}, first)
    if maximum is None and any(var in first for eqn in first_eqns for var in eqn.outvars):
        return None
    products = any(
        eqn.primitive.name == "dot_general"
        for eqn in (*totals, *second_eqns, *first_eqns, *(summed for summed, _ in sums))
    )
    if not products or any(var in second for eqn in second_eqns for var in eqn.outvars):
        return None
    final_eqns = leading_to(eqns, set(outputs), first | second)
    return Online(
        columns=columns,
        chunk_columns=chunk if outer_extent > 1 else _chunk_columns(columns, totals, chunk),
        maximum=maximum,
        function=first_pass.function,
        sums=sums,
        first_eqns=first_eqns,
        totals=tuple(totals),
        second_eqns=tuple(second_eqns),
        final_eqns=tuple(final_eqns),
        guards=first_pass.guards,
        outer_extent=outer_extent,
    )


def _chunk_columns(columns: int, totals: Sequence, chunk: int) -> int:
    """Columns of a chunk: fewer than `chunk` if sums go over other dimensions as well.

    Such a dimension are the queries that share a key.
    """
    over = [
        total.params["dimension_numbers"][0][0]
        if total.primitive.name == "dot_general"
        else total.params["axes"]
        for total in totals
    ]
    per_column = max(
        (
            math.prod(total.invars[0].aval.shape[dim] for dim in dims) // columns
            for total, dims in zip(totals, over)
        ),
        default=1,
    )
    if per_column <= 1:
        return chunk
    fewer = chunk // per_column // FEWEST_CHUNK_COLUMNS * FEWEST_CHUNK_COLUMNS
    return max(fewer, min(FEWEST_CHUNK_COLUMNS, chunk))


def _totals(eqns: Sequence, root) -> dict[int, list]:
    """Dimension of `root` -> sums and products over it of values that are elementwise functions of the root."""
    known: dict = {root: tuple(range(root.aval.ndim))}
    totals: dict[int, list] = {}
    for eqn in eqns:
        places = [None if isinstance(var, jex.Literal) else known.get(var) for var in eqn.invars]
        if not any(places) or root in eqn.outvars:
            continue
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        at: Places | None = None
        if name in MOVING and places[0] is not None:
            at = moved(eqn, places[0])
        elif name in ELEMENTWISE and len({place for place in places if place}) == 1:
            operand = next(place for place in places if place)
            at = operand if len(operand) == len(shape) else None
        else:
            for axis in _summed_over(eqn, places):
                totals.setdefault(axis, []).append(eqn)
        if at is not None:
            known[eqn.outvars[0]] = at
    return totals


def _summed_over(eqn, places: Sequence) -> list[int]:
    """The dimensions of the root that a sum or product reduces, if it reduces no other."""
    if eqn.primitive.name == "reduce_sum":
        over = [
            places[0][axis] for axis in eqn.params["axes"] if eqn.invars[0].aval.shape[axis] > 1
        ]
    elif eqn.primitive.name == "dot_general" and sum(map(bool, places)) == 1:
        side = 0 if places[0] else 1
        over = [
            places[side][dim]
            for dim in eqn.params["dimension_numbers"][0][side]
            if eqn.invars[side].aval.shape[dim] > 1
        ]
    else:
        return []
    return [] if None in over else over


def _is_long(eqn, chunk: int) -> bool:
    """Whether an equation is a maximum of floats over one dimension of at least two chunks."""
    if (
        eqn.primitive.name != "reduce_max"
        or len(eqn.params["axes"]) != 1
        or isinstance(eqn.invars[0], jex.Literal)
    ):
        return False
    aval = eqn.invars[0].aval
    return (
        jnp.issubdtype(aval.dtype, jnp.floating)
        and aval.shape[int(eqn.params["axes"][0])] >= 2 * chunk
    )


class _Linear:
    """Follows x, its maximum and values linear in exp(x - maximum) through a group, with their dimension maps.

    Any other value that depends on the maximum, or on exponentials, is `other`: it changes from
    chunk to chunk. A select between exponentials and zero is linear where a guard makes them finite. Without a guard, rows
    that are all -inf would have some elements NaN and some not, which sums cannot tell.
    """

    def __init__(self, maximum, eqns: Sequence) -> None:
        x, peak = maximum.invars[0], maximum.outvars[0]
        self.maximum, self.axis, self.eqns = maximum, int(maximum.params["axes"][0]), eqns
        dims = tuple(range(x.aval.ndim))
        self.known: dict = {
            x: ("x", dims),
            peak: ("maximum", tuple(dim for dim in dims if dim != self.axis)),
        }
        self.other: set = set()
        self.literals: dict = {}  # values that repeat a literal
        self.function: str | None = None
        self.origins: dict = {}  # functions of the maximum -> the equation that computes them, with a maximum of their shape
        self.guards: dict = {}  # differences and what is linear in their exponentials -> guard
        self.reductions: list[tuple[jex.JaxprEqn, Places]] = []

    def sums(self) -> list[tuple[jex.JaxprEqn, Places]]:
        ended: set = set()  # sums, and what depends on them: it waits for all chunks
        for eqn in self.eqns:
            if eqn is self.maximum:
                continue
            read = atoms(eqn)
            if any(atom in ended for atom in read):
                ended.update(eqn.outvars)
                continue
            if any(atom in self.other for atom in read):
                self.other.update(eqn.outvars)
            elif any(atom in self.known for atom in read):
                place = self._result(eqn)
                guard = next((self.guards[atom] for atom in read if atom in self.guards), None)
                if guard is not None:
                    self.guards[eqn.outvars[0]] = guard
                if place is None:
                    self.other.update(
                        eqn.outvars
                        if any(self.known.get(atom, "x")[0] != "x" for atom in read)
                        else ()
                    )
                elif place[0] == "sum":
                    self.reductions.append((eqn, place[1]))
                    ended.update(eqn.outvars)
                else:
                    self.known[eqn.outvars[0]] = place
            elif eqn.primitive.name in MOVING and (literal := self._literal(eqn.invars[0])):
                self.literals[eqn.outvars[0]] = literal
        return self.reductions

    def unguarded(self) -> list:
        """The equations, with the maximum itself in place of its guard."""
        results = {guard.result for guard in self.guards.values()}
        return [
            as_maximum(eqn, self.origins[eqn.outvars[0]][1]) if eqn.outvars[0] in results else eqn
            for eqn in self.eqns
        ]

    def guards_of_sums(self) -> tuple[Guard | None, ...]:
        return tuple(self.guards.get(total.outvars[0]) for total, _ in self.reductions)

    def _literal(self, atom) -> jex.Literal | None:
        return atom if isinstance(atom, jex.Literal) else self.literals.get(atom)

    def _result(self, eqn) -> tuple[str, Places] | None:
        name = eqn.primitive.name
        operands: list[tuple[str, Places] | None] = [
            None if isinstance(var, jex.Literal) else self.known.get(var) for var in eqn.invars
        ]
        first = operands[0]
        if name in MOVING and first is not None:
            places = moved(eqn, first[1])
            if eqn.invars[0] in self.origins:
                self.origins[eqn.outvars[0]] = self.origins[eqn.invars[0]]
            return None if places is None else (first[0], places)
        if name == "sub" and first is not None and (second := operands[1]) is not None:
            (kind, places), (other, levels) = first, second
            if kind != "x" or other not in ("maximum", "guard") or not self._fits(levels, places):
                return None
            if other == "guard":
                self.guards[eqn.outvars[0]] = self._guard(eqn.invars[1])
            return "difference", places
        if (
            name in EXPONENTIALS
            and first is not None
            and first[0] == "difference"
            and self.function in (None, name)
        ):
            self.function = name
            return "weight", first[1]
        if any(operand is not None and operand[0] in ("maximum", "guard") for operand in operands):
            return self._guarded(eqn, operands)
        if not all(operand is None or operand[0] == "weight" for operand in operands):
            return None
        if name == "select_n":
            return self._masked(eqn, operands)
        if (
            name in ("mul", "neg", "convert_element_type", "div")
            and sum(map(bool, operands)) == 1
            and (first or name == "mul")
        ):
            return "weight", next(operand for operand in operands if operand)[1]
        if name == "reduce_sum" and first is not None:
            return self._summed(first[1], eqn.params["axes"], eqn.invars[0].aval.shape)
        return (
            self._product(eqn, operands)
            if name == "dot_general" and sum(map(bool, operands)) == 1
            else None
        )

    def _guarded(self, eqn, operands: Sequence) -> tuple[str, Places] | None:
        """A function of the maximum alone, elementwise, of at least one operand that is the maximum itself."""
        places = {operand for operand in operands if operand is not None}
        alone = all(
            operand is not None or self._literal(atom) is not None
            for atom, operand in zip(eqn.invars, operands)
        )
        levels = {levels for _, levels in places}
        if eqn.primitive.name not in ELEMENTWISE or not alone or len(levels) > 1:
            return None
        maxima = (
            atom
            for atom, operand in zip(eqn.invars, operands)
            if operand and operand[0] == "maximum"
        )
        inner = (self.origins[atom][1] for atom in atoms(eqn) if atom in self.origins)
        maximum = next(maxima, next(inner, None))
        if maximum is None or maximum.aval.shape != eqn.outvars[0].aval.shape:
            return None
        self.origins[eqn.outvars[0]] = (eqn, maximum)
        return "guard", next(iter(levels))

    def _guard(self, moved_result) -> Guard:
        peak, result = self.maximum.outvars[0], self.origins[moved_result][0].outvars[0]
        return Guard(peak, result, tuple(leading_to(self.eqns, [result], [peak])))

    def _masked(self, eqn, operands: Sequence) -> tuple[str, Places] | None:
        """A select between exponentials that are finite, and zero."""
        predicate, *cases = operands
        zeros = [literal for atom in eqn.invars[1:] if (literal := self._literal(atom))]
        if predicate is not None or sum(map(bool, cases)) != 1 or len(zeros) != len(cases) - 1:
            return None
        guard = next((self.guards[atom] for atom in atoms(eqn) if atom in self.guards), None)
        finite = guard is not None and guard.is_finite_without_scores()
        all_zero = all(literal.val == 0 for literal in zeros)
        return next(case for case in cases if case) if finite and all_zero else None

    def _fits(self, levels: Places, places: Places) -> bool:
        """Whether every element meets the maximum of its row."""
        shape = self.maximum.invars[0].aval.shape
        return len(levels) == len(places) and all(
            maximum == place or maximum is None or shape[maximum] == 1
            for maximum, place in zip(levels, places)
        )

    def _summed(self, places: Places, axes, shape) -> tuple[str, Places] | None:
        over = [places[axis] for axis in axes if shape[axis] > 1]
        return (
            ("sum", tuple(place for axis, place in enumerate(places) if axis not in axes))
            if over == [self.axis]
            else None
        )

    def _product(self, eqn, operands) -> tuple[str, Places] | None:
        side = next(k for k, operand in enumerate(operands) if operand)
        contracted, batch = (pair[side] for pair in eqn.params["dimension_numbers"])
        product = self._summed(operands[side][1], contracted, eqn.invars[side].aval.shape)
        if product is None:
            return None
        places = operands[side][1]
        free = [places[axis] for axis in range(len(places)) if axis not in (*contracted, *batch)]
        beside = [None] * (eqn.outvars[0].aval.ndim - len(batch) - len(free))
        return "sum", (
            *(places[dim] for dim in batch),
            *(free + beside if side == 0 else beside + free),
        )
