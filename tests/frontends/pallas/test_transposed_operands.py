"""Operands that are transposed for a kernel are read where they lie, and otherwise copied; results are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pbkern.pallas


def doubled(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def by_head(x, kept: int = 2):
    """A kernel over [heads..., rows, columns], a program per head and 8 rows."""
    lead = x.shape[:-kept]
    spec = pl.BlockSpec(
        (None,) * len(lead) + (8, *x.shape[1 - kept :]), lambda *at: (*at, *(0,) * (kept - 1))
    )
    grid = (*lead, pl.cdiv(x.shape[-kept], 8))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(doubled, grid=grid, in_specs=[spec], out_specs=spec, out_shape=shape)(x)


# function of int32[2, 24, 3, 16] -> whether the kernel reads it in place
VIEWS = {
    "heads before rows": (lambda x: jnp.swapaxes(x, 1, 2), True),
    "rows split": (lambda x: jnp.swapaxes(x, 1, 2).reshape(2, 3, 3, 8, 16), True),
    "heads before the batch": (lambda x: x.transpose(2, 0, 1, 3).reshape(1, 3, 2, 24, 16), True),
    "as it lies": (lambda x: x.reshape(6, 24, 16), False),
    "rows and columns change places": (lambda x: x.transpose(0, 2, 3, 1), False),
    "a part": (lambda x: jnp.swapaxes(x[:, 1:20], 1, 2), True),
    "short rows": (lambda x: jnp.swapaxes(x[..., :4], 1, 2), False),
    "dimensions that a reshape joins after they moved": (
        lambda x: jnp.swapaxes(x, 1, 2).reshape(2, 72, 16),
        False,
    ),
    "nothing": (lambda x: jnp.swapaxes(x[:0], 1, 2), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    make, in_place = VIEWS[name]
    x = jnp.arange(2 * 24 * 3 * 16, dtype=jnp.int32).reshape(2, 24, 3, 16)
    with pbkern.pallas.installed():
        f = jax.jit(lambda x: by_head(make(x)))
        np.testing.assert_array_equal(f(x), make(x) * 2)
        copies = " transpose(" in f.lower(x).compile().as_text()
    assert not (copies and in_place)


def test_under_vmap_and_grad():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 3, 128)), jnp.float32)
    with pbkern.pallas.installed():
        found = jax.jit(jax.vmap(jax.vmap(by_head)))(jnp.swapaxes(x, 1, 2)[None])
    np.testing.assert_array_equal(found[0], np.swapaxes(x, 1, 2) * 2)
