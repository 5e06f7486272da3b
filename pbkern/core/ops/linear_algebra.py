"""Factorisations of small matrices and triangular systems as lax equations, for fusion and for bodies of kernels.

Rows and columns are the first two dimensions inside of the rules, so that vectors run over many
matrices, which are the last one. Algorithms go from column to column. Each step is a few equations
over whole matrices with masks, for a column whose number is known or is a loop's counter: small
matrices have their steps written out, others a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jax import lax
from jax import numpy as jnp

# Rows and columns of the largest matrix that these equations are for: larger ones stay with LAPACK.
# Source: docs/decisions/097-small-linear-algebra.md.
LARGEST_SIZE = 32
# Steps that are written out, so that they fuse with what is around them; more are a loop. Each step
# takes a tenth of a second to compile. Source: docs/decisions/097-small-linear-algebra.md.
MOST_WRITTEN_STEPS = 8
# Sweeps of Jacobi rotations, at most: convergence is quadratic, and 32 x 32 matrices of float64 need
# 6 to 8. Source: LAPACK's limit for one-sided rotations is 30.
MOST_SWEEPS = 30


# ---- matrices

# Dimension that counts rows.
DOWN = 0
# Dimension that counts columns.
ACROSS = 1


def _index(x, axis: int):
    """Row or column of each element."""
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return lax.broadcasted_iota(np.int32, shape, axis)


def _take(x, at, axis: int):
    """One row or column, as a matrix."""
    if isinstance(at, int):
        return lax.slice_in_dim(x, at, at + 1, axis=axis)
    return lax.dynamic_slice_in_dim(x, at, 1, axis=axis)


def _where(condition, x, y):
    """Elements of x where the condition holds, else of y; operands may have size 1 in any dimension."""
    shape = jnp.broadcast_shapes(condition.shape, x.shape, y.shape)
    return lax.select(*(jnp.broadcast_to(operand, shape) for operand in (condition, x, y)))


def _zero(x):
    return jnp.zeros((1,) * x.ndim, x.dtype)


def _turned(x):
    return lax.transpose(x, (1, 0, *range(2, x.ndim)))


def _line(values, axis: int):
    """Makes a matrix of one row or column of the values that a reduction gives."""
    return lax.expand_dims(values, (axis,))


def _total(x, axis: int):
    return _line(lax.reduce_sum(x, (axis,)), axis)


def _steps(count: int, step: Callable, state: tuple) -> tuple:
    """Runs step(number, state) -> state for each number below `count`."""
    if count > MOST_WRITTEN_STEPS:
        return lax.fori_loop(np.int32(0), np.int32(count), step, state)
    for number in range(count):
        state = step(number, state)
    return state


# ---- factorisations


def _cholesky(params, matrix) -> list:
    """The lower factor; NaN throughout where a pivot is not positive, and from a pivot on that is NaN, as LAPACK has it."""
    row, column = _index(matrix, DOWN), _index(matrix, ACROSS)

    def step(k, state):
        rest, is_definite = state
        pivots = _take(rest, k, ACROSS)
        pivot = _take(pivots, k, DOWN)
        root = lax.sqrt(pivot)
        below = _where(row > k, pivots / root, _zero(rest))
        rest = _where((row > k) & (column > k), rest - below * _turned(below), rest)
        rest = _where(column == k, _where(row == k, root, below), rest)
        return rest, is_definite & ~(pivot <= 0)

    is_definite = jnp.ones((1, 1, *matrix.shape[2:]), bool)
    factor, is_definite = _steps(len(matrix), step, (matrix, is_definite))
    factor = _where(row >= column, factor, _zero(factor))
    return [_where(is_definite, factor, _zero(factor) + factor.dtype.type(np.nan))]


def _triangular_solve(params, matrix, right) -> list:
    """Substitution: each step finds a row of the solution and takes it out of the others."""
    is_lower, is_left = params["lower"], params["left_side"]
    if params["transpose_a"] == is_left:
        matrix, is_lower = _turned(matrix), not is_lower
    right = right if is_left else _turned(right)
    size, row = len(matrix), _index(right, DOWN)

    def step(number, state):
        (rest,) = state
        k = number if is_lower else size - 1 - number
        solved = _take(rest, k, DOWN)
        factors = _take(matrix, k, ACROSS)
        if not params["unit_diagonal"]:
            solved = solved / _take(factors, k, DOWN)
        rest = _where(row > k if is_lower else row < k, rest - factors * solved, rest)
        return (_where(row == k, solved, rest),)

    (solution,) = _steps(size, step, (right,))
    return [solution if is_left else _turned(solution)]


def _exchanged(x, k, other) -> tuple:
    """x with two rows exchanged, and the row that comes to k."""
    row = _index(x, DOWN)
    arrives = _total(_where(row == other, x, _zero(x)), DOWN)
    rest = _where(row == other, _take(x, k, DOWN), x)
    return _where(row == k, arrives, rest), arrives


def _lu(params, matrix) -> list:
    """Factors in one matrix, rows that they were exchanged with, and the order of rows."""
    height, width, *batch = matrix.shape
    count = min(height, width)
    row, column = _index(matrix, DOWN), _index(matrix, ACROSS)
    order = jnp.broadcast_to(row, (height, 1, *batch))
    pivots = jnp.zeros((1, count, *batch), np.int32)
    place = _index(pivots, ACROSS)

    def step(k, state):
        rest, order, pivots = state
        sizes = _where(row >= k, lax.abs(_take(rest, k, ACROSS)), _zero(rest) - 1)
        largest = _line(lax.argmax(sizes, DOWN, np.int32), DOWN)
        rest, pivot_row = _exchanged(rest, k, largest)
        order, _ = _exchanged(order, k, largest)
        pivots = _where(place == k, largest, pivots)
        pivot, below = _take(pivot_row, k, ACROSS), _take(rest, k, ACROSS)
        below = _where(pivot == 0, below, below / pivot)
        rest = _where((row > k) & (column > k), rest - below * pivot_row, rest)
        return _where((row > k) & (column == k), below, rest), order, pivots

    factors, order, pivots = _steps(count, step, (matrix, order, pivots))
    return [factors, lax.squeeze(pivots, (DOWN,)), lax.squeeze(order, (ACROSS,))]


def _geqrf(params, matrix) -> list:
    """Householder reflectors below R, and their factors."""
    height, width, *batch = matrix.shape
    count = min(height, width)
    row, column = _index(matrix, DOWN), _index(matrix, ACROSS)
    factors = jnp.zeros((1, count, *batch), matrix.dtype)
    place, one = _index(factors, ACROSS), _zero(matrix) + 1

    def step(k, state):
        rest, factors = state
        below = _where(row >= k, _take(rest, k, ACROSS), _zero(rest))
        # Squares of elements that are at most 1 do not overflow.
        scale = _line(lax.reduce_max(lax.abs(below), (DOWN,)), DOWN)
        scaled = below / _where(scale > 0, scale, one)
        length = scale * lax.sqrt(_total(scaled * scaled, DOWN))
        first = _take(below, k, DOWN)
        below = _where(row > k, below, _zero(rest))
        is_done = _line(lax.reduce_and(below == 0, (DOWN,)), DOWN)
        end = _where(first < 0, length, -length)
        factor = _where(is_done, _zero(rest), (end - first) / end)
        below = _where(is_done, below, below / (first - end))
        reflector = _where(row == k, one, below)
        product = _total(reflector * rest, DOWN)
        rest = _where((column > k) & (row >= k), rest - factor * reflector * product, rest)
        rest = _where((column == k) & (row > k), below, rest)
        rest = _where((column == k) & (row == k), _where(is_done, first, end), rest)
        return rest, _where(place == k, factor, factors)

    matrix, factors = _steps(count, step, (matrix, factors))
    return [matrix, lax.squeeze(factors, (DOWN,))]


def _lu_pivots_to_permutation(params, pivots) -> list:
    """The order of rows after rows are exchanged with those of the pivots, one after the other."""
    pivots = _line(pivots, ACROSS)
    shape = (params["permutation_size"], *pivots.shape[1:])
    order = lax.broadcasted_iota(np.int32, shape, DOWN)

    def step(k, state):
        (order,) = state
        return _exchanged(order, k, _take(pivots, k, DOWN))[:1]

    (order,) = _steps(len(pivots), step, (order,))
    return [lax.squeeze(order, (ACROSS,))]


def _householder_product(params, reflectors, factors) -> list:
    """The product of reflectors: the last one is applied first to columns of the identity."""
    row, column = _index(reflectors, DOWN), _index(reflectors, ACROSS)
    one = _zero(reflectors) + 1
    identity = jnp.broadcast_to(_where(row == column, one, _zero(one)), reflectors.shape)
    return _reflected(reflectors, factors, identity, last_first=True)


def _ormqr(params, reflectors, factors, matrix) -> list:
    """The product of reflectors, or its transpose, times a matrix, or a matrix times it."""
    is_left = params["left"]
    (product,) = _reflected(
        reflectors,
        factors,
        matrix if is_left else _turned(matrix),
        last_first=is_left != params["transpose"],
    )
    return [product if is_left else _turned(product)]


def _reflected(reflectors, factors, matrix, last_first: bool) -> list:
    """Applies reflectors to the columns of a matrix, the last or the first one first."""
    count, row = len(factors), _index(reflectors, DOWN)
    factors, one = _line(factors, DOWN), _zero(reflectors) + 1

    def step(number, state):
        (product,) = state
        k = count - 1 - number if last_first else number
        below = _where(row > k, _take(reflectors, k, ACROSS), _zero(reflectors))
        reflector = _where(row == k, one, below)
        factor = _take(factors, k, ACROSS)
        return (product - factor * reflector * _total(reflector * product, DOWN),)

    return list(_steps(count, step, (matrix,)))


def _qr(params, matrix) -> list | None:
    """Q with as many columns as R has rows, or square; None for pivots."""
    if params["pivoting"]:
        return None
    height, width, *batch = matrix.shape
    reduced, factors = _geqrf(params, matrix)
    columns = height if params["full_matrices"] else min(height, width)
    start = lax.slice_in_dim(reduced, 0, min(columns, width), axis=ACROSS)
    missing = columns - start.shape[ACROSS]
    if missing:
        more = jnp.zeros((height, missing, *batch), matrix.dtype)
        start = lax.concatenate([start, more], ACROSS)
    (q,) = _householder_product(params, start, factors)
    r = lax.slice_in_dim(reduced, 0, columns, axis=DOWN)
    return [q, _where(_index(r, DOWN) <= _index(r, ACROSS), r, _zero(r))]


# ---- eigenvalues


def _eigh(params, matrix) -> list | None:
    """Jacobi rotations of half as many pairs as there are rows at once, until nothing is left beside the diagonal."""
    size = len(matrix)
    if params["subset_by_index"] not in (None, (0, size)):
        return None
    row, column = _index(matrix, DOWN), _index(matrix, ACROSS)
    is_known = row >= column if params["lower"] else row <= column
    matrix = _where(is_known, matrix, _turned(matrix))
    finite = lax.reduce_and(lax.is_finite(matrix), (DOWN, ACROSS))
    is_finite = lax.expand_dims(finite, (DOWN, ACROSS))
    matrix = _where(is_finite, matrix, _zero(matrix))
    one = _zero(matrix) + 1
    vectors = jnp.broadcast_to(_where(row == column, one, _zero(one)), matrix.shape)
    if size > 1:
        matrix, vectors = _rotated(matrix, vectors)
    values = _total(_where(row == column, matrix, _zero(matrix)), ACROSS)
    across = _turned(values)
    if params["sort_eigenvalues"]:
        is_before = (across < values) | ((values == across) & (column < row))
        rank = _total(_where(is_before, one, _zero(one)), ACROSS)
    else:
        rank = lax.convert_element_type(row, matrix.dtype)
    # Eigenvectors are rows until here.
    columns = [
        _total(_where(rank == place, vectors, _zero(vectors)), DOWN) for place in range(size)
    ]
    values = [_total(_where(rank == place, values, _zero(values)), DOWN) for place in range(size)]
    nan = one + matrix.dtype.type(np.nan)
    vectors = _where(is_finite, _turned(lax.concatenate(columns, DOWN)), nan)
    values = _where(is_finite, lax.concatenate(values, DOWN), nan)
    return [vectors, lax.squeeze(values, (ACROSS,))]


def _rotated(matrix, vectors) -> tuple:
    """A diagonal matrix that is similar to `matrix`, and the rows that make it so.

    The rows of a pair are neighbours in the two halves. After each round all but the first row move
    on by one place, so that each row meets each other one in a sweep.
    """
    size, half = len(matrix), -(-len(matrix) // 2)
    zero, even = np.zeros((), matrix.dtype), (0, 2 * half - size, 0)
    batch = [(0, 0, 0)] * (matrix.ndim - 2)
    padded = lax.pad(matrix, zero, [even, even, *batch])
    rows = lax.pad(vectors, zero, [even, (0, 0, 0), *batch])
    row, column = _index(padded, DOWN), _index(padded, ACROSS)
    small = matrix.dtype.type(np.finfo(matrix.dtype).eps ** 2)

    def goes_on(state):
        sweep, padded, _ = state
        squares = padded * padded
        total = lax.reduce_sum(squares, (DOWN, ACROSS))
        off = _where(row == column, _zero(squares), squares)
        waits = lax.reduce_sum(off, (DOWN, ACROSS)) > small * total
        return (sweep < MOST_SWEEPS) & lax.reduce_or(waits, tuple(range(waits.ndim)))

    def sweep(state):
        number, padded, rows = state
        padded, rows = lax.fori_loop(
            np.int32(0), np.int32(2 * half - 1), lambda k, now: _round(*now, half), (padded, rows)
        )
        return number + np.int32(1), padded, rows

    _, padded, rows = lax.while_loop(goes_on, sweep, (np.int32(0), padded, rows))
    padded = lax.slice_in_dim(lax.slice_in_dim(padded, 0, size, axis=DOWN), 0, size, axis=ACROSS)
    return padded, lax.slice_in_dim(rows, 0, size, axis=DOWN)


def _round(matrix, rows, half: int) -> tuple:
    """Makes the element of each pair zero by a rotation, then moves the rows on."""
    row, column = _index(matrix, DOWN), _index(matrix, ACROSS)
    diagonal = _total(_where(row == column, matrix, _zero(matrix)), ACROSS)
    meeting = _total(_where(row + half == column, matrix, _zero(matrix)), ACROSS)
    meeting = lax.slice_in_dim(meeting, 0, half, axis=DOWN)
    first = lax.slice_in_dim(diagonal, 0, half, axis=DOWN)
    second = lax.slice_in_dim(diagonal, half, None, axis=DOWN)
    is_zero = meeting == 0
    ratio = (second - first) / _where(is_zero, _zero(meeting) + 1, 2 * meeting)
    tangent = 1 / (lax.abs(ratio) + lax.sqrt(1 + ratio * ratio))
    tangent = _where(is_zero, _zero(meeting), _where(ratio < 0, -tangent, tangent))
    cosine = 1 / lax.sqrt(1 + tangent * tangent)
    sine = tangent * cosine

    def turn(x):
        above = lax.slice_in_dim(x, 0, half, axis=DOWN)
        below = lax.slice_in_dim(x, half, None, axis=DOWN)
        above, below = cosine * above - sine * below, sine * above + cosine * below
        bounds = [(above, 0, 1), (below, 0, 1), (above, 1, half - 1), (below, 1, half)]
        bounds += [(above, half - 1, half)] if half > 1 else []
        return lax.concatenate(
            [
                lax.slice_in_dim(part, *ends, axis=DOWN)
                for part, *ends in bounds
                if ends[0] < ends[1]
            ],
            DOWN,
        )

    return turn(_turned(turn(matrix))), turn(rows)


# Primitive -> rule: parameters, operands -> results, or None for parameters that it has no algorithm
# for.
RULES: dict[str, Callable[..., list | None]] = {
    "cholesky": _cholesky,
    "eigh": _eigh,
    "geqrf": _geqrf,
    "householder_product": _householder_product,
    "lu": _lu,
    "lu_pivots_to_permutation": _lu_pivots_to_permutation,
    "ormqr": _ormqr,
    "qr": _qr,
    "triangular_solve": _triangular_solve,
}
# Those whose steps are few equations.
OF_SHORT_STEPS = ("cholesky", "lu_pivots_to_permutation", "triangular_solve")
# Those whose steps work on all rows, of which there may be many more than columns.
OF_TALL_MATRICES = ("geqrf", "householder_product", "ormqr", "qr")


def matrix_shape(eqn) -> tuple[int, ...]:
    """The shape of the matrix, or the vector of pivots, that a primitive works on."""
    vectors = eqn.primitive.name == "lu_pivots_to_permutation"
    return eqn.invars[0].aval.shape[-1 if vectors else -2 :]


def is_small(eqn, tall: bool = True) -> bool:
    """Whether real matrices, or pivots, have elements and are at most LARGEST_SIZE in rows and columns.

    `tall`: matrices of as many elements as LARGEST_SIZE squared are small too, where steps work on all rows.
    """
    shape, dtype = matrix_shape(eqn), eqn.invars[0].aval.dtype
    most = max(shape)
    if tall and eqn.primitive.name in OF_TALL_MATRICES and math.prod(shape) <= LARGEST_SIZE**2:
        most = min(shape)
    most = max(most, eqn.params.get("permutation_size", 0))
    return (
        dtype in (np.float32, np.float64, np.int32)
        and all(var.aval.size for var in eqn.invars)
        and most <= LARGEST_SIZE
    )


def is_written(eqn) -> bool:
    """Whether the steps are few and short enough to fuse with the equations around them."""
    is_short = eqn.primitive.name in OF_SHORT_STEPS
    return is_short and matrix_shape(eqn)[-1] <= MOST_WRITTEN_STEPS


def as_equations(eqn, operands: Sequence) -> list | None:
    """The results of a small factorisation or solve, by lax equations; None where LAPACK has more to say."""
    if not is_small(eqn):
        return None
    batch = operands[0].shape[: -len(matrix_shape(eqn))]
    many = (math.prod(batch),) if math.prod(batch) > 1 else ()

    def last(x):
        """The dimensions of the batch as one, behind those of the matrix."""
        x = lax.reshape(x, (*many, *x.shape[len(batch) :]))
        return lax.transpose(x, (*range(1, x.ndim), 0)) if many else x

    def first(x):
        x = lax.transpose(x, (x.ndim - 1, *range(x.ndim - 1))) if many else x
        return lax.reshape(x, (*batch, *x.shape[len(many) :]))

    results = RULES[eqn.primitive.name](eqn.params, *map(last, operands))
    return results and list(map(first, results))
