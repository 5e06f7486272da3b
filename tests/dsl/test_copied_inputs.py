"""What a body writes to an operand stays in the kernel: the caller's array is not touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

ROWS = pbkern.BlockSpec((8,), lambda i: (i,))
SHAPE = jax.ShapeDtypeStruct((30,), jnp.float32)


def both(kernel, *args):
    """Results of native code, compared with the interpreter's; operands stay what they were."""
    before = [np.array(a) for a in args]
    args = [jnp.asarray(a) for a in args]
    got = np.asarray(kernel(*args))
    np.testing.assert_array_equal(got, pbkern.interpret(kernel.trace(*args), *before)[0])
    for a, b in zip(args, before):
        np.testing.assert_array_equal(a, b)
    return got


@pytest.mark.parametrize("aliases", [{}, {1: 0}])
def test_a_block_that_is_written_is_a_copy(aliases):
    def body(x_ref, start_ref, o_ref):
        x_ref[...] = x_ref[...] + 1

        @pbkern.when(pbkern.program_id(0) == 1)
        def _():
            x_ref[0] *= 10

        o_ref[...] = jnp.where(pbkern.in_bounds(x_ref, 0), x_ref[...] * 2, 0)

    kernel = pbkern.kernel(
        body,
        grid=(4,),
        in_specs=[ROWS, ROWS],
        out_specs=ROWS,
        out_shape=SHAPE,
        input_output_aliases=aliases,
    )
    x = np.arange(30, dtype="f4")
    want = (x + 1) * 2
    want[8] *= 10
    np.testing.assert_array_equal(both(kernel, x, np.zeros(30, "f4")), want)


@pytest.mark.parametrize("word", ["arbitrary", "parallel"])
def test_prefetched_operands_keep_their_state(word):
    def body(state_ref, x_ref, o_ref):
        state_ref[0] += 2
        o_ref[...] = x_ref[...] + state_ref[0]

    block = pbkern.BlockSpec((8,), lambda i, state: (i,))
    params = pbkern.cpu.CompilerParams(dimension_semantics=(word,))
    kernel = pbkern.kernel(
        body,
        grid=(4,),
        in_specs=[block],
        out_specs=block,
        out_shape=SHAPE,
        num_scalar_prefetch=1,
        compiler_params=params,
    )
    x = np.arange(30, dtype="f4")
    added = (
        [7, 9, 11, 13] if word == "arbitrary" else [7] * 4
    )  # parallel programs each begin with the operand's value
    np.testing.assert_array_equal(
        both(kernel, np.array([5], "i4"), x), x + np.repeat(added, 8)[:30]
    )
