"""Programs at the ends of arrays compute what lies inside, and that alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel

from .running import native

RNG = np.random.default_rng(0)


def product(m, n, k, tile, dtype="f", total="f", scratch=False):
    """Blocks of sums over a third grid dimension; both operands are masked beyond its end."""
    bm, bn, bk = tile = tuple(map(min, (m, n, k), tile))
    grid = tuple(-(-size // block) for size, block in zip((m, n, k), tile))

    def body(x, y, o, *memory):
        sums = memory[0] if memory else o

        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            sums[...] = jnp.zeros((bm, bn), total)

        left = k - pbkern.program_id(2) * bk
        a = jnp.where(lax.broadcasted_iota("int32", (bm, bk), 1) < left, x[...], 0).astype(dtype)
        b = jnp.where(lax.broadcasted_iota("int32", (bk, bn), 0) < left, y[...], 0).astype(dtype)
        sums[...] += jnp.dot(a, b, preferred_element_type=total)

        if memory:

            @pbkern.when(pbkern.program_id(2) == grid[2] - 1)
            def _():
                o[...] = sums[...]

    make = pbkern.kernel(
        body, grid=grid, out_shape=jax.ShapeDtypeStruct((m, n), total),
        in_specs=[pbkern.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pbkern.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=[pbkern.BlockSpec((bm, bn), lambda i, j, k: (i, j))],
        scratch_shapes=[pbkern.Scratch((bm, bn), np.dtype(total))] if scratch else [],
    )  # fmt: skip
    return make.trace(jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(500, 300, 700), (150, 44, 130), (64, 64, 70), (65, 63, 63)]
)
def test_products(m, n, k, scratch):
    kernel = product(m, n, k, (64, 64, 64), scratch=scratch)
    x, y = RNG.normal(size=(m, k)).astype("f"), RNG.normal(size=(k, n)).astype("f")
    want = x.astype("d") @ y.astype("d")
    np.testing.assert_allclose(native(kernel, x, y)[0], want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "total"), [("int8", "int32"), ("int16", "int32"), (jnp.bfloat16, "f")]
)
def test_products_of_narrow_elements(dtype, total):
    kernel = product(45, 51, 77, (32, 32, 32), dtype, total)
    x, y = (
        RNG.integers(-99, 99, (45, 77)).astype(dtype),
        RNG.integers(-99, 99, (77, 51)).astype(dtype),
    )
    np.testing.assert_allclose(native(kernel, x, y)[0], x.astype("d") @ y.astype("d"), rtol=1e-6)


def test_each_case_multiplies_what_lies_inside():
    """116 rows, 44 columns and 60 terms are left of the last blocks; no access is guarded."""
    nests = lower_kernel(product(500, 300, 700, (128, 128, 128)), "k").nests
    dots = [
        line
        for line in nests.splitlines()
        if line.strip().startswith("nest") and line.count("*") == 1
    ]
    sizes = []
    for line in dots:
        dims = line.partition(" schedule(")[0]
        outer, inner, depth = dims.replace(",", "").split("<")[1:4]
        first = [int(part.split()[0].strip("*]")) for part in (outer, inner)]
        sizes.append((*first, int(depth.strip("*]"))))
    sizes.sort()
    assert sizes == sorted((m, n, k) for m in (128, 116) for n in (128, 44) for k in (128, 60))
    assert "?" not in nests


def test_few_columns_are_left_rather_than_computed_twice():
    """300 columns are 2 blocks of 128 and 44 more; a block moved back would multiply 84 columns again."""

    def body(x, y, o):
        o[...] = x[...] @ y[...]

    kernel = pbkern.kernel(
        body, grid=(3,), in_specs=[pbkern.BlockSpec(), pbkern.BlockSpec((50, 128), lambda j: (0, j))],
        out_shape=jax.ShapeDtypeStruct((40, 300), "f"), out_specs=[pbkern.BlockSpec((40, 128), lambda j: (0, j))],
    ).trace(np.zeros((40, 50), "f"), np.zeros((50, 300), "f"))  # fmt: skip
    assert "<44" in lower_kernel(kernel, "k").nests
    x, y = RNG.normal(size=(40, 50)).astype("f"), RNG.normal(size=(50, 300)).astype("f")
    np.testing.assert_allclose(native(kernel, x, y)[0], x @ y, rtol=1e-5, atol=1e-4)


def running(m, n, block, order):
    """Each block of rows, first to last or the other way round, is added to what scratch holds of those before."""
    steps = -(-m // block)
    rows = pbkern.BlockSpec((block, n), lambda i: (i if order > 0 else steps - 1 - i, 0))

    def body(x, o, total):
        at = pbkern.program_id(0)

        @pbkern.when(at == 0)
        def _():
            total[...] = jnp.zeros((block, n), "f")

        place = (at if order > 0 else steps - 1 - at) * block
        total[...] += jnp.where(lax.broadcasted_iota("int32", (block, n), 0) < m - place, x[...], 1)
        o[...] = total[...]

    return pbkern.kernel(
        body, grid=(steps,), out_shape=jax.ShapeDtypeStruct((m, n), "f"), in_specs=[rows], out_specs=[rows],
        scratch_shapes=[pbkern.Scratch((block, n), np.dtype("f"))],
    ).trace(jax.ShapeDtypeStruct((m, n), "f"))  # fmt: skip


@pytest.mark.parametrize("order", [1, -1])
def test_what_programs_hand_to_others_is_whole(order):
    """From the last block on, which comes first, later programs need all rows."""
    m, n, block = 37, 20, 8
    x = RNG.normal(size=(m, n)).astype("f")
    blocks = np.concatenate([x, np.ones((3, n), "f")]).reshape(-1, block, n)[::order]
    want = np.cumsum(blocks, 0)[::order].reshape(-1, n)[:m]
    np.testing.assert_allclose(
        native(running(m, n, block, order), x)[0], want, rtol=1e-5, atol=1e-5
    )


def test_a_masked_operand_alone_ends_no_product():
    """0 * infinity is no number: the other operand's elements count wherever they are read."""

    def body(x, y, o):
        o[...] = jnp.where(lax.broadcasted_iota("int32", (16, 32), 1) < 20, x[...], 0) @ y[...]

    columns = pbkern.BlockSpec((32, 16), lambda j: (0, j))
    kernel = pbkern.kernel(
        body, grid=(3,), in_specs=[pbkern.BlockSpec(), columns], out_specs=[pbkern.BlockSpec((16, 16), lambda j: (0, j))],
        out_shape=jax.ShapeDtypeStruct((16, 40), "f"),
    ).trace(np.zeros((16, 32), "f"), np.zeros((32, 40), "f"))  # fmt: skip
    x, y = np.ones((16, 32), "f"), np.ones((32, 40), "f")
    y[25, 39] = np.inf
    want = np.full((16, 40), 20.0)
    want[:, 39] = np.nan
    np.testing.assert_array_equal(native(kernel, x, y)[0], want)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rows", [1, 36, 100, 129])
@pytest.mark.parametrize(
    "cumulative",
    [jnp.cumsum, lambda x, d: lax.cummax(x, d), lambda x, d: lax.cumsum(x, d, reverse=True)],
)
def test_cumulative_rows_that_are_all_alike(rows, cumulative):
    """What the last block of rows has no place for is left out, although nothing that is read tells rows apart."""
    row, x = RNG.standard_normal(257).astype("f"), RNG.standard_normal((rows, 257)).astype("f")

    def f(row, x):
        alike = jnp.broadcast_to(row, x.shape)
        return (
            cumulative(alike, 1) * 0.5,
            cumulative(alike, 0)[:, :40] * x[:, :40],
            cumulative(jnp.sin(x), 1)[:, :3] * 2,
        )

    for got, want in zip(pbkern.jit(f)(row, x), jax.jit(f)(row, x)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
