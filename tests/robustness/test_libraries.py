"""Programs of libraries that are built on JAX agree with jax.jit, in both precisions, and so do their gradients.

What is not installed is skipped by name: `pip install -e '.[libraries]'` brings all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from .library_programs import PROGRAMS

pytestmark = pytest.mark.slow

# Relative to the largest number of an array. Iterations stop where a test of convergence says so, which rounding moves.
TOLERANCE = {np.dtype(np.float32): 2e-3, np.dtype(np.float64): 1e-7}


def close(got, want, what):
    """Compares two trees of arrays: integers and booleans are equal, floats near each other, NaN at the same places."""
    assert jax.tree.structure(got) == jax.tree.structure(want), what
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
        where = f"{what}{jax.tree_util.keystr(path)}"
        assert (g.shape, g.dtype) == (w.shape, w.dtype), where
        if jnp.issubdtype(g.dtype, jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        g, w = np.asarray(g), np.asarray(w)
        if g.dtype not in TOLERANCE:
            np.testing.assert_array_equal(g, w, err_msg=where)
            continue
        scale = np.max(np.abs(w), initial=0.0, where=np.isfinite(w))
        np.testing.assert_allclose(
            g, w, rtol=TOLERANCE[g.dtype], atol=TOLERANCE[g.dtype] * scale, err_msg=where
        )


def one_number(f):
    """Returns the sum of all floats among the results, each with a weight of its own."""

    def weighted(*args):
        floats = [r for r in jax.tree.leaves(f(*args)) if jnp.issubdtype(r.dtype, jnp.floating)]
        return sum(
            jnp.sum(r * jnp.cos(jnp.arange(r.size, dtype=r.dtype) + k).reshape(r.shape))
            for k, r in enumerate(floats)
        )

    return weighted


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_and_its_gradient(name, x64):
    program = PROGRAMS[name]
    for module in program.modules:
        pytest.importorskip(module, exc_type=ImportError)
    with jax.enable_x64(x64):
        f, args = program.make()
        close(pbkern.jit(f)(*args), jax.jit(f)(*args), "result")
        if program.gradient:
            number = one_number(f)
            want = jax.jit(jax.grad(number, allow_int=True))(*args)
            close(pbkern.jit(jax.grad(number, allow_int=True))(*args), want, "gradient inside")
            close(jax.grad(pbkern.jit(number), allow_int=True)(*args), want, "gradient around")
