"""Nests with masks have a variant without, which runs where the masks hold at all points."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel

from .running import compiled, native

SPEC = pbkern.BlockSpec()


def tile(limits, x, o):
    """Rows and columns from the ends of an array, under masks; the column limit is an operand."""
    rows = pbkern.program_id(0) * 32 + jnp.arange(32)[:, None]
    columns = pbkern.program_id(1) * 48 + jnp.arange(48)[None, :]
    mask = (rows < x.shape[0]) & (columns < limits[0]) & (x.shape[1] - 1 - columns >= limits[1])
    found = pbkern.load(x, (rows, columns), mask=mask, other=-1.0)
    pbkern.store(
        o,
        (rows, columns),
        jnp.where(mask, found * 2, 0.0),
        mask=(rows < x.shape[0]) & (columns < x.shape[1]),
    )


@pytest.mark.parametrize("shape", [(64, 96), (33, 49), (100, 143), (1, 1), (70, 96)])
def test_tiles(shape):
    x = np.random.default_rng(0).normal(size=shape).astype("f")
    grid = -(-shape[0] // 32), -(-shape[1] // 48)
    k = pbkern.kernel(
        tile,
        out_shape=jax.ShapeDtypeStruct(shape, "f"),
        grid=grid,
        in_specs=[SPEC, SPEC],
        out_specs=[SPEC],
    )
    k = k.trace(np.zeros(2, np.int32), x)
    assert ("case" in lower_kernel(k, "k").nests) is (
        shape[0] >= 32
    )  # a mask that no program passes is kept
    call, columns = compiled(k), np.arange(shape[1])
    for most, first in (
        (shape[1], 0),
        (50, 0),
        (0, 0),
        (2**31 - 1, 10),
        (-5, 0),
        (shape[1], 2**31 - 1),
        (96, -(2**31)),
    ):
        live = (columns < most) & (shape[1] - 1 - columns >= first)
        np.testing.assert_array_equal(
            call(np.array([most, first], np.int32), x)[0], np.where(live, x * 2, 0)
        )


def test_rounds_of_a_loop():
    """Only the last round is cut off; sums over what is left out find nothing."""

    def body(x, o):
        def turn(i, total):
            at = i * 64 + jnp.arange(64)[None, :]
            return total + pbkern.load(
                x, (jnp.arange(16)[:, None], at), mask=at < x.shape[1], other=0.0
            ).sum(1)

        o[...] = lax.fori_loop(0, 4, turn, jnp.zeros(16, "f"))

    x = np.random.default_rng(0).normal(size=(16, 201)).astype("f")
    k = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((16,), "f")).trace(x)
    np.testing.assert_allclose(native(k, x)[0], x.astype("d").sum(1), rtol=1e-5, atol=1e-5)
    assert "case" in lower_kernel(k, "k").nests


def test_operands_under_masks_that_always_hold_are_read_in_place():
    """Blocks of 16 rows that divide 64: the mask changes nothing, so no copy of the operand of a product is made for it."""

    def body(load, x, w, o):
        rows = pbkern.program_id(0) * 16 + jnp.arange(16)
        o[...] = x[...] @ load(w, (rows < 64)[:, None])

    def selected(w, mask):
        return jnp.where(mask, w[...], 0)

    def loaded(w, mask):
        return pbkern.load(
            w,
            (pbkern.ds(0, 16), pbkern.ds(0, 32)),
            mask=jnp.broadcast_to(mask, (16, 32)),
            other=0.0,
        )

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 8, 16)).astype("f"), rng.normal(size=(64, 32)).astype("f")
    blocks = [
        pbkern.BlockSpec((None, 8, 16), lambda i: (i, 0, 0)),
        pbkern.BlockSpec((16, 32), lambda i: (i, 0)),
    ]
    out = pbkern.BlockSpec((None, 8, 32), lambda i: (i, 0, 0))
    for load in (selected, loaded):
        k = pbkern.kernel(functools.partial(body, load), out_shape=jax.ShapeDtypeStruct((4, 8, 32), "f"), grid=(4,),
                          in_specs=blocks, out_specs=[out]).trace(x, w)  # fmt: skip
        assert lower_kernel(k, "k").nests.count("nest") == 1
        np.testing.assert_allclose(
            native(k, x, w)[0], x @ w.reshape(4, 16, 32), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("shift", [100, -7, 39_999, 20_000])
def test_elements_that_come_around(shift):
    """Most programs read one end of the array alone: they have no test, and no load of what is far outside."""
    x = np.arange(40_000, dtype=np.float32)
    rolled = pbkern.jit(lambda a: jnp.roll(a, shift))
    np.testing.assert_array_equal(rolled(x), np.roll(x, shift))
