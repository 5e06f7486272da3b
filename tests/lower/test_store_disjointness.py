"""Programs that choose their elements by program_id: which grid dimensions are proved to be parallel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.lower.grid.parallelism import grid_dimensions
from pbkern.targets.cpu.lower_options import LowerOptions

X = np.random.default_rng(0).normal(size=(12, 64)).astype("f")


def rows(x, o):
    o[pbkern.program_id(0)] = x[pbkern.program_id(0)] * 2


def rows_of_two(x, o):
    at = pbkern.program_id(0) * 2 + jnp.arange(2)
    o[at, :] = x[at, :]


def overlapping(x, o):
    at = pbkern.program_id(0) * 2 + jnp.arange(3)
    pbkern.store(o, (at, slice(None)), x[pbkern.ds(0, 3)], mask=(at < 12)[:, None])


def one_row(x, o):
    o[0] = x[pbkern.program_id(0)]
    o[1:] = x[1:]


def total(x, o):
    i = pbkern.program_id(0)
    o[i] = x[i]
    o[0] = o[0] + x[i]


def row_before(x, o):
    i = pbkern.program_id(0)
    o[i] = x[i]
    o[i] = x[i] + o[jnp.maximum(i - 1, 0)]


def clamped_at_the_end(x, o):
    o[pbkern.ds(pbkern.program_id(0) * 5, 5)] = x[pbkern.ds(pbkern.program_id(0) * 5, 5)]


def reversed_rows(x, o):
    o[11 - pbkern.program_id(0)] = x[pbkern.program_id(0)]


def halves(x, o):
    i = pbkern.program_id(0)
    o[i, pbkern.ds(0, 32)], o[i, pbkern.ds(32, 32)] = (
        x[i, pbkern.ds(32, 32)],
        x[i, pbkern.ds(0, 32)],
    )


def quotients(x, o):
    i = pbkern.program_id(0)
    o[i % 3 * 4 + i // 3] = x[i]


def remainders(x, o):
    o[pbkern.program_id(0) % 5] = x[pbkern.program_id(0)]


def blocks_in_loops(x, o):
    def turn(n, _):
        o[pbkern.program_id(0), n * 16 + jnp.arange(16)] = x[
            pbkern.program_id(0), n * 16 + jnp.arange(16)
        ]
        return 0

    lax.fori_loop(0, 4, turn, 0)


def looked_up(x, o):
    o[jnp.abs(x[pbkern.program_id(0), 0]).astype(jnp.int32)] = x[pbkern.program_id(0)]


def counted(x, o):
    """The number of programs is the same for all."""
    o[pbkern.num_programs(0) - 1] = x[pbkern.program_id(0)]


def from_the_end(x, o):
    o[pbkern.num_programs(0) - 1 - pbkern.program_id(0)] = x[pbkern.program_id(0)]


def printed(x, o):
    jax.debug.print("row {}", pbkern.program_id(0))
    o[pbkern.program_id(0)] = x[pbkern.program_id(0)]


# body, programs, whether they are proved to be apart
BODIES = [
    (rows, 12, True), (rows_of_two, 6, True), (overlapping, 6, False), (one_row, 12, False), (total, 12, False),
    (row_before, 12, False), (clamped_at_the_end, 3, False), (clamped_at_the_end, 2, True), (reversed_rows, 12, True),
    (halves, 12, True), (quotients, 12, True), (remainders, 12, False), (remainders, 5, True), (blocks_in_loops, 12, True),
    (looked_up, 12, False), (printed, 12, False), (counted, 12, False), (from_the_end, 12, True),
]  # fmt: skip


def traced(body, grid):
    return pbkern.kernel(body, grid=grid, in_specs=[pbkern.BlockSpec()], out_specs=[pbkern.BlockSpec()],
                         out_shape=jax.ShapeDtypeStruct(X.shape, "f")).trace(X)  # fmt: skip


@pytest.mark.parametrize(("body", "programs", "apart"), BODIES)
def test_one_dimension(body, programs, apart):
    (found,) = grid_dimensions(traced(body, (programs,)), LowerOptions())
    assert found.parallel is apart
    assert (
        "proved: its programs write disjoint elements" in str(found)
        if apart
        else "in order" in str(found)
    )


@pytest.mark.parametrize(("body", "programs"), [(body, n) for body, n, apart in BODIES if apart])
def test_results(body, programs):
    k = traced(body, (programs,))
    want = pbkern.interpret(k, X)[0]
    written = ~np.isnan(want)
    np.testing.assert_array_equal(np.asarray(pbkern.call_kernel(k, X)[0])[written], want[written])


def test_dimensions_are_judged_one_by_one():
    """Sums over the second dimension: only the first may run in parallel."""

    def body(x, o):
        i, k = pbkern.program_id(0), pbkern.program_id(1)

        @pbkern.when(k == 0)
        def _():
            o[i] = jnp.zeros(64)

        o[i] = o[i] + x[i] * (k + 1)

    k = traced(body, (12, 3))
    assert [d.parallel for d in grid_dimensions(k, LowerOptions())] == [True, False]
    np.testing.assert_allclose(pbkern.call_kernel(k, X)[0], X * 6, rtol=1e-6)


def test_more_programs_than_are_tried():
    """Multiples of the program's number suffice."""
    n = 70_000

    def body(x, o):
        o[pbkern.program_id(0) * 2 + jnp.arange(2)] = (
            x[pbkern.program_id(0) * 2 + jnp.arange(2)] + 1
        )

    x = np.arange(2 * n, dtype="f")
    k = pbkern.kernel(body, grid=(n,), in_specs=[pbkern.BlockSpec()], out_specs=[pbkern.BlockSpec()],
                      out_shape=jax.ShapeDtypeStruct(x.shape, "f")).trace(x)  # fmt: skip
    assert grid_dimensions(k, LowerOptions())[0].parallel
    np.testing.assert_array_equal(pbkern.call_kernel(k, x)[0], x + 1)


def test_what_the_author_says_comes_first():
    assert not grid_dimensions(traced(rows, (12,)), LowerOptions(semantics=("arbitrary",)))[
        0
    ].parallel
