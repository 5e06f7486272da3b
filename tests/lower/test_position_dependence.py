"""Ragged grids: last blocks overlap others only where results do not depend on where a block starts
(lower/grid/position_dependence.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from tests.native.running import native

ROWS, COLUMNS, BLOCK = 17, 33, 7
X = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype("f")


def row():
    return lax.broadcasted_iota(jnp.int32, (BLOCK, COLUMNS), 0)


def in_turn(x):
    """A sum along the rows, in a loop."""
    return lax.fori_loop(
        0, BLOCK, lambda k, t: t.at[k].set(x[k] + jnp.where(k > 0, t[k - 1], 0)), jnp.zeros_like(x)
    )


# name -> body of a block, whether it is a function of places in the array
BODIES = {
    "every second row": (lambda x: jnp.where(row() % 2 == 0, x, -x), False),
    "rows in turn": (lambda x: jnp.roll(x, 1, 0), False),
    "the first row": (lambda x: x + x[:1], False),
    "running sum": (lambda x: jnp.cumsum(x, 0), False),
    "running sum in a loop": (in_turn, False),
    "sum of the rows before": (lambda x: x.at[1:].add(x[:-1]), False),
    "numbers of rows": (lambda x: x + (pbkern.program_id(0) * BLOCK + row()), True),
    "sorted rows": (lambda x: jnp.sort(x, 1), True),
    "running sum of each row": (lambda x: jnp.cumsum(x, 1), True),
    "columns in turn": (lambda x: jnp.exp(jnp.roll(x, 1, 1)) - x.max(1, keepdims=True), True),
}


def kernel(body):
    def whole(x, o):
        o[...] = body(x[...])

    spec = pbkern.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
    return pbkern.kernel(whole, grid=(-(-ROWS // BLOCK),), in_specs=[spec], out_specs=[spec],
                         out_shape=jax.ShapeDtypeStruct(X.shape, "f")).trace(X)  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_blocks_agree(name):
    """With the interpreter, which moves none, in rows that all of a block's rows are there for."""
    body, free = BODIES[name]
    k = kernel(body)
    (got,), (want,) = native(k, X), pbkern.interpret(k, X)
    known = ROWS if free else ROWS // BLOCK * BLOCK
    np.testing.assert_allclose(got[:known], want[:known], rtol=1e-5, atol=1e-5)
    assert ("%h0" in lower_kernel(k, "k").nests) is free  # the start of a block that is moved back


def test_scratch_that_is_read_by_fewer_dimensions():
    """Pairs of rows, which are read as rows; columns are cut into ragged blocks."""
    rows, columns, block = 20, 67, 32
    x = np.random.default_rng(0).normal(size=(rows, columns)).astype("f")

    def whole(x_ref, o_ref):
        pairs = jnp.stack([jnp.sin(x_ref[...]), jnp.cos(x_ref[...])], 1).reshape(2 * rows, block)
        o_ref[...] = pairs[1:-1:2] * pairs[2::2] + pairs[0:-2:2]

    k = pbkern.kernel(
        whole,
        grid=(-(-columns // block),),
        in_specs=[pbkern.BlockSpec((rows, block), lambda i: (0, i))],
        out_specs=[pbkern.BlockSpec((rows - 1, block), lambda i: (0, i))],
        out_shape=jax.ShapeDtypeStruct((rows - 1, columns), "f"),
    ).trace(x)
    (got,) = native(k, x)
    sin, cos = np.sin(x.astype("d")), np.cos(x.astype("d"))
    np.testing.assert_allclose(got, cos[:-1] * sin[1:] + sin[:-1], atol=1e-6)


def test_blocks_with_halos_do_not_overlap():
    """At the edge they would be computed with guards, where products that are chosen by a mask are rounded apart."""

    def f(a, b):
        p = jnp.pad(a * b, ((3, 3), (0, 0)))
        return p[:-2] + b.sum() * 0.3 + p[2:] * 1.7

    a, b = (
        jnp.asarray(np.random.default_rng(k).normal(size=(331, 1003)), jnp.float32)
        for k in range(2)
    )
    g = pbkern.jit(f)
    assert "%h0" not in g.as_text(a, b, stage="nests")
    first = np.asarray(g(a, b)).tobytes()
    assert all(np.asarray(g(a, b)).tobytes() == first for _ in range(30))


def test_masks_of_moved_blocks_stay():
    def body(x_ref, y_ref, o_ref):
        row = 64 * pbkern.program_id(0) + jax.lax.broadcasted_iota(jnp.int32, (64, 128), 0)
        o_ref[...] = jnp.where(row < 440, x_ref[...] * y_ref[...], 0) + y_ref[...]

    rows = pbkern.BlockSpec((64, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((500, 128), "float32")
    call = pbkern.kernel(body, out_shape=shape, grid=(8,), in_specs=[rows] * 2, out_specs=rows)
    x, y = (
        jnp.asarray(np.random.default_rng(k).normal(size=(500, 128)), jnp.float32) for k in range(2)
    )
    want = np.where(np.arange(500)[:, None] < 440, np.float64(x) * np.float64(y), 0) + np.float64(y)
    np.testing.assert_allclose(call(x, y), want, rtol=1e-6, atol=1e-6)
    text = pbkern.jit(lambda *a: call(*a)).as_text(x, y, stage="nests")
    assert "%h0" in text
    assert "case" not in text
