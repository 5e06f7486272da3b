"""Atomic updates: every update counts, in native code and interpreted, whatever dimension_semantics say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import KernelError, OutOfBoundsError

RNG = np.random.default_rng(0)
AT, VALUES, START = (
    RNG.integers(0, 10, 128).astype("i4"),
    RNG.integers(1, 255, 128).astype("i4"),
    np.full(10, 77, "i4"),
)
PARALLEL = pbkern.cpu.CompilerParams(dimension_semantics=("parallel",))
BLOCK, WHOLE = pbkern.BlockSpec((16,), lambda i: (i,)), pbkern.BlockSpec()
COMBINE = {
    pbkern.atomic_add: np.add,
    pbkern.atomic_max: np.maximum,
    pbkern.atomic_min: np.minimum,
    pbkern.atomic_and: np.bitwise_and,
    pbkern.atomic_or: np.bitwise_or,
    pbkern.atomic_xor: np.bitwise_xor,
}


def both(kernel, *args):
    """Results of native code after comparing them with the interpreter's and with the printed source's."""
    traced = kernel.trace(*args)
    got = jax.tree.leaves(kernel(*args))
    for other in (
        pbkern.interpret(traced, *args),
        pbkern.call_kernel(pbkern.rebuild(traced.source()), *args),
    ):
        for a, b in zip(got, other, strict=True):
            np.testing.assert_array_equal(a, b)
    return got


def over_all(body, *shapes, **options):
    """body(at, values, start, result, ...) over 8 programs that share the whole result."""
    return pbkern.kernel(
        body, grid=(8,), in_specs=[BLOCK, BLOCK, WHOLE], out_specs=[WHOLE, *[BLOCK] * len(shapes)],
        out_shape=[jax.ShapeDtypeStruct((10,), "i4"), *shapes], input_output_aliases={2: 0}, **options,
    )  # fmt: skip


@pytest.mark.parametrize("atomic", COMBINE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("params", [None, PARALLEL])
def test_array_indices_update_each_element_in_turn(atomic, params):
    def body(at, values, start, result):
        atomic(result, at[...], values[...])

    want = START.copy()
    COMBINE[atomic].at(want, AT, VALUES)
    np.testing.assert_array_equal(
        both(over_all(body, compiler_params=params), AT, VALUES, START)[0], want
    )


def test_masked_updates_return_what_was_there():
    def body(at, values, start, result, before):
        before[...] = pbkern.atomic_add(result, at[...], values[...], mask=values[...] % 2 == 0)

    want, old = START.copy(), np.zeros(128, "i4")
    for k, (i, v) in enumerate(zip(AT, VALUES)):
        if v % 2 == 0:
            old[k] = want[i]
            want[i] += v
    got = both(over_all(body, jax.ShapeDtypeStruct((128,), "i4")), AT, VALUES, START)
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], old)


def test_slices_points_exchange_and_compare_and_swap():
    def body(at, values, start, result, before):
        before[0:4] = pbkern.atomic_add(result, pbkern.ds(2, 4), values[0:4])
        before[4] = pbkern.atomic_xchg(result, 0, values[4])
        before[5] = pbkern.atomic_cas(result, 1, START[1], pbkern.program_id(0))
        before[6:16] = pbkern.atomic_cas(result, slice(None), 7, 8)

    want, old = START.copy(), np.zeros((8, 16), "i4")
    for p, v in enumerate(VALUES.reshape(8, 16)):
        old[p, :4], old[p, 4], old[p, 5] = want[2:6], want[0], want[1]
        want[2:6] += v[:4]
        want[0], want[1] = v[4], p if want[1] == START[1] else want[1]
        old[p, 6:] = want
        want[want == 7] = 8
    got = both(over_all(body, jax.ShapeDtypeStruct((128,), "i4")), AT, VALUES, START)
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], old.ravel())


def test_array_indices_beside_slices():
    def body(at, x, start, result):
        pbkern.atomic_add(result, (slice(1, 3), at[...]), x[...])

    kernel = pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct((4, 5), "f4"), input_output_aliases={2: 0}
    )
    at, x, start = (
        np.array([1, 1, 4], "i4"),
        RNG.integers(0, 9, (2, 3)).astype("f4"),
        np.zeros((4, 5), "f4"),
    )
    want = start.copy()
    np.add.at(want[1:3], (slice(None), at), x)
    np.testing.assert_array_equal(both(kernel, at, x, start)[0], want)


@pytest.mark.parametrize("access", ["load", "store", "atomic"])
def test_negative_elements_of_array_indices_lie_outside(access):
    def body(at, x, result):
        result[...] = jnp.zeros(8, jnp.int32)
        if access == "load":
            result[0:4] = x[at[...]]
        elif access == "store":
            result[at[...]] = x[0:4]
        else:
            pbkern.atomic_add(result, at[...], x[0:4])

    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((8,), "i4"))
    args = np.array([-1, 2, -3, 2], "i4"), np.arange(8, dtype="i4")
    with pytest.raises(OutOfBoundsError, match="index -1"):
        pbkern.interpret(kernel.trace(*args), *args)


def test_masked_updates_may_lie_outside():
    def body(at, values, result):
        result[...] = jnp.zeros(8, jnp.int32)
        pbkern.atomic_add(result, at[...], values[...], mask=at[...] >= 0)

    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((8,), "i4"))
    got = both(kernel, np.array([-1, 2, -9, 2], "i4"), np.arange(1, 5, dtype="i4"))
    np.testing.assert_array_equal(got[0], [0, 0, 6, 0, 0, 0, 0, 0])


def test_only_dimensions_with_blocks_of_their_own_stay_parallel():
    def body(at, result):
        pbkern.atomic_add(result, at[...], 1)

    params = pbkern.cpu.CompilerParams(dimension_semantics=("parallel", "parallel"))
    kernel = pbkern.kernel(
        body, grid=(4, 2), in_specs=[pbkern.BlockSpec((16,), lambda i, j: (i * 2 + j,))],
        out_specs=pbkern.BlockSpec((10,), lambda i, j: (i,)),
        out_shape=jax.ShapeDtypeStruct((40,), "i4"), compiler_params=params,
    )  # fmt: skip
    assert kernel.trace(AT).compiler_params["cpu"].dimension_semantics == ("parallel", "arbitrary")


def test_bitwise_updates_take_integers():
    kernel = pbkern.kernel(
        lambda o: pbkern.atomic_or(o, 0, 1) and None,
        out_shape=jax.ShapeDtypeStruct((4,), jnp.float32),
    )
    with pytest.raises(KernelError, match="atomic_or takes integers"):
        kernel.trace()
