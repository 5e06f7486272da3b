"""Loops of very many steps in one program: what a step takes on the stack, it gives back."""

import jax
import numpy as np
import pytest

import pbkern

SIZE = 1 << 17


@pytest.mark.slow
def test_parallel_launches_in_half_a_million_steps():
    """The list of a launch's operands is written in a place of its own: one per step would fill the stack."""
    block = pbkern.BlockSpec((SIZE // 2,), lambda i: (i,))

    @pbkern.kernel(
        grid=(2,),
        in_specs=[block],
        out_specs=[block],
        out_shape=jax.ShapeDtypeStruct((SIZE,), "float32"),
    )
    def step(x, o):
        o[...] = x[...] + 1

    f = pbkern.jit(lambda x: jax.lax.fori_loop(0, 500_000, lambda _, x: step(x), x))
    assert "pbk_parallel" in f.as_text(np.zeros(SIZE, "f4"), stage="mlir").split("@pbk_main")[1]
    np.testing.assert_array_equal(f(np.zeros(SIZE, "f4")), 500_000)
