"""Proof that row i of a function's results depends on row i of its operands only, by the rows that reach each element.

The function is traced for two sizes, `FEWER` and `MORE` rows. Both jaxprs have to consist of the
same equations with the same values, so that nothing but extents depends on the size. Then each
element of each value gets the set of the rows that may reach it, as bits: through the structure of
arrays exactly (a reshape moves sets as it moves elements), through sums and products along a
dimension as the union. Numbers that count rows (iota along them) are a set of their own: what they
reach depends on where a row is. A result's row may hold the bit of its own number alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern._jax import bind_again, params_of, user_line
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE

from .sizes import TracedForSizes

# Rows of the first trace.
FEWER = 3
# Rows of the second trace: without a common factor, so that no reshape keeps rows together by chance.
MORE = 5
# The bit of what depends on the place of a row.
PLACE_OF_ROW = 1 << 7
# Primitives that move, repeat or leave out elements: they do to sets what they do to elements.
MOVES = frozenset(
    "reshape transpose squeeze expand_dims broadcast_in_dim slice rev concatenate split copy pad "
    "stop_gradient reduce_precision tile".split()
)
ALONG_AXES = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
ALONG_ONE = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
}
# Parameters that are extents, or follow from them.
EXTENTS: dict[str, tuple[str, ...]] = {
    "reshape": ("new_sizes", "dimensions"),
    "broadcast_in_dim": ("shape",),
    "iota": ("shape",),
    "slice": ("start_indices", "limit_indices"),
    "pad": ("padding_config",),
    "dynamic_slice": ("slice_sizes",),
    "gather": ("slice_sizes",),
    "split": ("sizes",),
    "tile": ("reps",),
    "random_bits": ("shape",),
}
# Those of them that repeat their operand, along dimensions that it need not have.
MAKING_ROWS = ("broadcast_in_dim", "tile")
# Those of them that name a part of an operand's dimensions.
PARTS = frozenset("slice pad dynamic_slice gather".split())
# Parameters of loops and branches that are no jaxprs. A loop over rows takes other steps for other sizes.
LOOP_PARAMETERS: dict[str, tuple[str, ...]] = {
    "scan": ("length", "num_carry", "num_consts", "reverse"),
    "while": ("cond_nconsts", "body_nconsts"),
    "cond": (),
}
WINDOWS = frozenset("reduce_window_sum reduce_window_max reduce_window_min".split())

Sets = np.ndarray
NOTHING: Sets = np.zeros((), np.uint8)


@dataclass(frozen=True)
class Differing:
    """The part of an equation that the size changes.

    Attributes:
      axes: dimensions of its first result that have other extents.
      cuts: whether it takes another part of a dimension that has no rows.
    """

    axes: tuple[int, ...]
    cuts: bool = False


class Depends(Exception):
    """Rows depend on each other, or on the size; the text says why."""


def why_rows_depend(
    fewer: TracedForSizes, more: TracedForSizes, extents: Sequence[int], results: Sequence[int]
) -> str:
    """The reason why rows may not be computed apart, or "".

    Args:
      fewer: the function for FEWER rows.
      more: the function for MORE rows, all other sizes alike.
      extents: per argument, elements of its first dimension per row; 0 where it has no rows.
      results: the same of results.
    """
    try:
        differing = compared(fewer, more)
        given = [
            *(np.zeros(np.shape(value), np.uint8) for value in fewer.held),
            *(
                _own_rows(aval.shape, extent)
                for aval, extent in zip(fewer.given, extents, strict=True)
            ),
        ]
        followed = _Follower(differing).jaxpr(fewer.closed, given)
    except Depends as e:
        return str(e)
    for n, (sets, extent) in enumerate(zip(followed, results, strict=True)):
        foreign = sets & ~_own_rows(sets.shape, extent)
        if foreign.any():
            what = "on the place of its row" if (foreign & PLACE_OF_ROW).any() else "on other rows"
            return f"result {n} depends {what}"
    return ""


def _own_rows(shape: Sequence[int], extent: int) -> Sets:
    """Sets of an array whose rows are `extent` elements of its first dimension: the bit of the row."""
    sets = np.zeros(shape, np.uint8)
    if extent:
        rows = np.arange(shape[0]) // extent
        sets |= (1 << rows).astype(np.uint8).reshape(-1, *(1 for _ in shape[1:]))
    return sets


def parts_differ(
    at: Callable[[int], TracedForSizes], rows: int, arguments: Sequence[int], results: Sequence[int]
) -> bool:
    """Whether rows computed in parts are others than those computed together, tried once on random arrays.

    It is no proof, and what the proof leaves open: a trace for one row has no broadcasts along rows,
    so that its equations are not compared with those of others.

    Args:
      at: the function for a number of rows.
      rows: their number, of which the binary digits are the parts.
      arguments: per argument, elements of its first dimension per row; 0 where it has no rows.
      results: the same of results.
    Raises what JAX raises.
    """
    whole = at(rows)
    if not all(isinstance(aval.dtype, np.dtype) for aval in whole.given):
        return True  # keys of random numbers are not drawn
    rng = np.random.default_rng(0)
    arrays = [_drawn(rng, aval) for aval in whole.given]

    def run(traced: TracedForSizes, xs: list) -> list:
        with _jax.types_kept(traced.closed):
            return jax.jit(jex.jaxpr_as_fun(traced.closed))(*traced.held, *xs)

    together = run(whole, arrays)
    done = 0
    for part in (1 << bit for bit in reversed(range(rows.bit_length())) if rows >> bit & 1):
        rows_of = lambda x, extent, part=part, done=done: (
            x[done * extent : (done + part) * extent] if extent else x
        )
        alone = run(at(part), list(map(rows_of, arrays, arguments)))
        for expected, extent, got in zip(together, results, alone, strict=True):
            if not _agree(np.asarray(rows_of(expected, extent)), np.asarray(got)):
                return True
        done += part
    return False


def _drawn(rng: np.random.Generator, aval: Any) -> np.ndarray:
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return rng.standard_normal(aval.shape).astype(aval.dtype)
    return rng.integers(0, 2, aval.shape).astype(aval.dtype)


def _agree(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether results differ by rounding at most."""
    if not jnp.issubdtype(left.dtype, jnp.inexact):
        return np.array_equal(left, right)
    part = float(jnp.finfo(left.dtype).eps) ** 0.5
    kind = complex if left.dtype.kind == "c" else float
    wide = left.astype(kind)
    most = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
    return np.allclose(wide, right.astype(kind), rtol=part, atol=part * most, equal_nan=True)


# --- two traces that differ in extents alone
# ----------------------------------------------------------------------------


def compared(fewer: TracedForSizes, more: TracedForSizes) -> dict[int, Differing]:
    """Equations that the size changes, by their ids. Raises Depends where the traces differ in more than extents."""
    for left, right in zip(fewer.held, more.held):
        if np.shape(left) != np.shape(right) or not np.array_equal(left, right):
            raise Depends("an array of the function's scope depends on the size")
    differing: dict[int, Differing] = {}
    _compare(fewer.closed, more.closed, differing)
    return differing


def _compare(
    left: jex.ClosedJaxpr, right: jex.ClosedJaxpr, differing: dict[int, Differing]
) -> None:
    if len(left.jaxpr.eqns) != len(right.jaxpr.eqns):
        raise Depends("other operations are traced for other sizes")
    for constants in zip(left.consts, right.consts):
        if np.shape(constants[0]) != np.shape(constants[1]) or not np.array_equal(*constants):
            raise Depends("an array of the function's scope depends on the size")
    for one, other in zip(left.jaxpr.eqns, right.jaxpr.eqns):
        at = f" at {user_line(one) or 'an unknown line'}"
        if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
            raise Depends(f"other operations are traced for other sizes: {one.primitive.name}{at}")
        for atoms in zip(one.invars, other.invars):
            literals = [atom.val for atom in atoms if isinstance(atom, jex.Literal)]
            if literals and not _are_equal(literals):
                raise Depends(f"a value depends on the size: {one.primitive.name}{at}")
        if _parameters_differ(one, other):
            raise Depends(f"a parameter depends on the size: {one.primitive.name}{at}")
        axes = _varying_axes(one, other)
        if axes or _cuts(one, other):
            differing[id(one)] = Differing(axes, _cuts(one, other))
        for inner in zip(inner_jaxprs(one), inner_jaxprs(other), strict=True):
            _compare(*inner, differing)


def _parameters_differ(one, other) -> bool:
    """Whether parameters differ, but for extents, and for jaxprs, which are compared themselves."""
    name = one.primitive.name
    if called_jaxpr(one) is not None:
        return False
    extents = EXTENTS.get(name, ())
    of_one, of_other = params_of(one), params_of(other)
    keys = LOOP_PARAMETERS.get(name, of_one.keys())
    return any(
        of_one[key] != of_other[key] and repr(of_one[key]) != repr(of_other[key])
        for key in keys
        if key not in extents
    )  # NaN, which fills what a gather finds outside, is not equal to itself


def _varying_axes(one, other) -> tuple[int, ...]:
    """Dimensions of the first result whose extents depend on the size."""
    if not one.outvars:
        return ()
    before, after = (getattr(eqn.outvars[0].aval, "shape", ()) for eqn in (one, other))
    return tuple(axis for axis, sizes in enumerate(zip(before, after)) if sizes[0] != sizes[1])


def _cuts(one, other) -> bool:
    """Whether an equation takes a part that depends on the size out of a dimension that does not, or adds such a part.

    Parts of rows are seen by their sets, and parts of what has no rows are not.
    """
    if one.primitive.name not in PARTS:
        return False
    extents = zip(one.invars[0].aval.shape, other.invars[0].aval.shape)
    fixed = [axis for axis, sizes in enumerate(extents) if sizes[0] == sizes[1]]
    for key in EXTENTS[one.primitive.name]:
        left, right = one.params[key], other.params[key]
        if left is not None and any(left[axis] != right[axis] for axis in fixed):
            return True
    return False


def _are_equal(literals: Sequence) -> bool:
    """Whether both are values, and the same."""
    if len(literals) < 2:
        return False
    left, right = map(np.asarray, literals)
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


# --- which rows reach an element
# ----------------------------------------------------------------------------------------


class _Follower:
    """Carries sets through equations. differing: ids of those whose results have other extents for other sizes."""

    def __init__(self, differing: Mapping[int, Differing]):
        self.differing = differing

    def jaxpr(self, closed: jex.ClosedJaxpr, given: Sequence[Sets]) -> list[Sets]:
        constants = [np.zeros(np.shape(value), np.uint8) for value in closed.consts]
        values: dict[jex.Var, Sets] = dict(
            zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*constants, *given), strict=True)
        )

        def read(atom) -> Sets:
            if isinstance(atom, jex.Literal):
                return np.zeros(np.shape(atom.val), np.uint8)
            return values[atom]

        for eqn in closed.jaxpr.eqns:
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            for var, sets in zip(eqn.outvars, results, strict=True):
                values[var] = np.broadcast_to(sets, array_aval(var).shape)
        return [read(atom) for atom in closed.jaxpr.outvars]

    def equation(self, eqn, given: list[Sets]) -> list[Sets]:
        name = eqn.primitive.name
        differing = self.differing.get(id(eqn), Differing(()))
        if name == "iota":
            counts = eqn.params["dimension"] in differing.axes
            return [np.array(PLACE_OF_ROW if counts else 0, np.uint8)]
        of_places = np.array(PLACE_OF_ROW if differing.axes else 0, np.uint8)
        if name in ELEMENTWISE:
            return [_union(given)] * len(eqn.outvars)
        rule = RULES.get(name)
        if rule is not None:
            results = rule(eqn, given)
            if name in MAKING_ROWS:
                return [results[0] | self.new_rows(eqn, differing.axes)]
            return (
                [sets | np.uint8(PLACE_OF_ROW) for sets in results] if differing.cuts else results
            )
        if name in CONTROL:
            return CONTROL[name](self, eqn, given)
        inner = called_jaxpr(eqn)
        if inner is not None:
            return self.jaxpr(inner, given)
        if not any(sets.any() for sets in given) and not eqn.effects:
            return [of_places] * len(eqn.outvars)  # as of random numbers for each row
        raise Depends(
            f"nothing is known of the rows of {name} at {user_line(eqn) or 'an unknown line'}"
        )

    @staticmethod
    def new_rows(eqn, axes: Sequence[int]) -> Sets:
        """Sets of rows that a broadcast makes: each element along a new dimension belongs to its row alone."""
        shape = array_aval(eqn.outvars[0]).shape
        before = array_aval(eqn.invars[0]).shape
        mapped = eqn.params.get("broadcast_dimensions", range(len(before)))
        sets: Sets = NOTHING
        for axis in axes:
            if axis in mapped and before[mapped.index(axis)] == shape[axis] != 1:
                continue
            rows = (
                _own_rows((shape[axis],), shape[axis] // FEWER)
                if shape[axis] % FEWER == 0
                else None
            )
            along = rows if rows is not None else np.full(shape[axis], PLACE_OF_ROW, np.uint8)
            sets = sets | along.reshape(-1, *(1 for _ in shape[axis + 1 :]))
        return sets


def _union(given: Sequence[Sets]) -> Sets:
    return functools.reduce(np.bitwise_or, given)


def _of_all(sets: Sets) -> np.uint8:
    return np.bitwise_or.reduce(sets, axis=None)


def _spread(sets: Sets, axes: Sequence[int]) -> Sets:
    """Sets whose elements along `axes` all hold the union of those."""
    if not axes or not sets.size or not sets.ndim:
        return sets
    union = np.bitwise_or.reduce(sets, axis=tuple(axes), keepdims=True)
    return np.broadcast_to(union, sets.shape)


def _moved(eqn, given: list[Sets]) -> list[Sets]:
    results = bind_again(eqn, [jnp.asarray(sets) for sets in given])
    return list(map(np.asarray, results))


def _reduced(eqn, given: list[Sets]) -> list[Sets]:
    return [np.bitwise_or.reduce(_union(given), axis=tuple(eqn.params["axes"]))]


def _along_one(eqn, given: list[Sets]) -> list[Sets]:
    axis = eqn.params[ALONG_ONE[eqn.primitive.name]]
    return [_spread(_union(given), [axis])] * len(eqn.outvars)


def _top(eqn, given: list[Sets]) -> list[Sets]:
    shape = array_aval(eqn.outvars[0]).shape
    axis = eqn.params.get("axis", len(shape) - 1) % len(shape)
    first = np.take(_spread(given[0], [axis]), range(min(1, given[0].shape[axis])), axis=axis)
    return [first] * 2


def _product(eqn, given: list[Sets]) -> list[Sets]:
    """Batch dimensions, then the left operand's own, then the right one's."""
    contracted, batch = eqn.params["dimension_numbers"]
    sides = []
    for sets, along, shared in zip(given, contracted, batch):
        free = [axis for axis in range(sets.ndim) if axis not in (*along, *shared)]
        rest = np.bitwise_or.reduce(sets, axis=tuple(along), keepdims=True) if along else sets
        turned = np.transpose(rest, (*shared, *free, *along))
        sides.append(turned.reshape(turned.shape[: len(shared) + len(free)]))
    left, right = sides
    shared_count = len(batch[0])
    own_axes = left.ndim - shared_count
    left = left.reshape((*left.shape, *(1 for _ in right.shape[shared_count:])))
    right = right.reshape(
        (*right.shape[:shared_count], *(1,) * own_axes, *right.shape[shared_count:])
    )
    return [left | right]


def _bits_of(sets: Sets, through: Callable[[jax.Array], jax.Array]) -> Sets:
    """The union over bits of what `through` makes of arrays of 0 and 1."""
    union: Sets | None = None
    for bit in range(8):
        part = ((sets >> bit) & 1).astype(np.float32)
        if part.any():
            reached = (np.asarray(through(jnp.asarray(part))) > 0).astype(np.uint8) << bit
            union = reached if union is None else union | reached
    return NOTHING if union is None else union


def _convolution(eqn, given: list[Sets]) -> list[Sets]:
    params = eqn.params | {"preferred_element_type": None, "precision": None}
    run = lambda left, right: eqn.primitive.bind(left, right, **params)
    ones = [jnp.ones(sets.shape, jnp.float32) for sets in given]
    left = _bits_of(given[0], lambda part: run(part, ones[1]))
    right = _bits_of(given[1], lambda part: run(ones[0], part))
    return [left | right]


def _window(eqn, given: list[Sets]) -> list[Sets]:
    params = eqn.params
    through = lambda part: lax.reduce_window(
        part,
        0.0,
        lax.max,
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params["base_dilation"],
        params["window_dilation"],
    )
    return [_bits_of(given[0], through)]


def _gathered(eqn, given: list[Sets]) -> list[Sets]:
    """Elements of indexed dimensions may be any; those of batch dimensions are their own."""
    operand, indices = given
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    spread = _spread(operand, numbers.start_index_map)
    anywhere = jnp.zeros(indices.shape, jnp.int32)
    values = lax.gather(jnp.asarray(spread), anywhere, numbers, params["slice_sizes"], mode="clip")
    chosen = np.bitwise_or.reduce(indices, axis=-1)  # per place of the batch
    result = np.asarray(values)
    batch_axes = [axis for axis in range(result.ndim) if axis not in numbers.offset_dims]
    shape = [1] * result.ndim
    for axis, size in zip(batch_axes, chosen.shape, strict=True):
        shape[axis] = size
    return [result | chosen.reshape(shape)]


def _sliced_by_value(eqn, given: list[Sets]) -> list[Sets]:
    operand, *starts = given
    sizes = eqn.params["slice_sizes"]
    moving = [axis for axis, size in enumerate(sizes) if size < operand.shape[axis]]
    part = _spread(operand, moving)[tuple(slice(0, size) for size in sizes)]
    return [part | _union([NOTHING, *starts])]


def _updated_by_value(eqn, given: list[Sets]) -> list[Sets]:
    operand, update, *starts = given
    moving = [axis for axis, size in enumerate(update.shape) if size < operand.shape[axis]]
    union = np.bitwise_or.reduce(update, axis=tuple(moving), keepdims=True) if moving else update
    return [operand | union | _union([NOTHING, *starts])]


RULES: dict[str, Callable] = {
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(ALONG_AXES, _reduced),
    **dict.fromkeys(ALONG_ONE, _along_one),
    **dict.fromkeys(WINDOWS, _window),
    "top_k": _top,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gathered,
    "dynamic_slice": _sliced_by_value,
    "dynamic_update_slice": _updated_by_value,
}


# --- loops and branches
# -----------------------------------------------------------------------------------------------


def _until_stable(step: Callable[[list[Sets]], list[Sets]], carry: list[Sets]) -> list[Sets]:
    """The sets of a loop's carry after any number of steps. They only grow, so that this ends."""
    while True:
        after = [before | more for before, more in zip(carry, step(carry), strict=True)]
        if all(map(np.array_equal, carry, after)):
            return after
        carry = after


def _scan(follower: _Follower, eqn, given: list[Sets]) -> list[Sets]:
    """Steps share their sets: an element of one step counts for all."""
    params = params_of(eqn)
    constants, carried = params["num_consts"], params["num_carry"]
    fixed, carry = given[:constants], given[constants : constants + carried]
    along = [
        np.bitwise_or.reduce(sets, axis=0) if len(sets) else np.zeros(sets.shape[1:], np.uint8)
        for sets in given[constants + carried :]
    ]
    run = lambda state: follower.jaxpr(params["jaxpr"], [*fixed, *state, *along])
    stable = _until_stable(lambda state: run(state)[:carried], list(carry))
    return [*stable, *(sets[np.newaxis] for sets in run(stable)[carried:])]


def _while(follower: _Follower, eqn, given: list[Sets]) -> list[Sets]:
    """Carried values are reached by all that decides when the loop ends."""
    params = eqn.params
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, body = given[:of_test], given[of_test : of_test + of_body]

    def step(state: list[Sets]) -> list[Sets]:
        (ends,) = follower.jaxpr(params["cond_jaxpr"], [*test, *state])
        return [
            sets | _of_all(ends) for sets in follower.jaxpr(params["body_jaxpr"], [*body, *state])
        ]

    return _until_stable(step, list(given[of_test + of_body :]))


def _cond(follower: _Follower, eqn, given: list[Sets]) -> list[Sets]:
    index, *operands = given
    branches = [follower.jaxpr(branch, operands) for branch in eqn.params["branches"]]
    return [_union(results) | _of_all(index) for results in zip(*branches)]


CONTROL: dict[str, Callable] = {"scan": _scan, "while": _while, "cond": _cond}
