"""Scalars known while a body is built: no branch, loop or memory is left of them, and values stay what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from tests.native.running import native

X = np.random.default_rng(0).normal(size=(6, 32)).astype("f")


def traced(body, grid=()):
    return pbkern.kernel(body, grid=grid, in_specs=[pbkern.BlockSpec()], out_specs=[pbkern.BlockSpec()],
                         out_shape=jax.ShapeDtypeStruct(X.shape, "f")).trace(X)  # fmt: skip


def nests(kernel) -> str:
    return lower_kernel(kernel, "k").nests


def test_branches_by_constants_are_taken():
    def body(x, o):
        @pbkern.when(jnp.int32(3) * 2 == 6)
        def _():
            o[...] = x[...] + 1

        @pbkern.when(jnp.int32(3) > 4)
        def _():
            o[...] = x[...] * 0

    k = traced(body)
    np.testing.assert_array_equal(native(k, X)[0], X + 1)
    assert "case" not in nests(k)


def test_branches_by_the_grid():
    """A dimension of one program has one index; of others the branch depends on it."""

    def body(x, o):
        i, j = pbkern.program_id(0), pbkern.program_id(1)

        @pbkern.when(j == 0)
        def _():
            o[i] = x[i] * 2

        @pbkern.when(i == 4)
        def _():
            o[i] = x[i] * 3

    k = traced(body, grid=(6, 1))
    want = X * 2
    want[4] = X[4] * 3
    np.testing.assert_array_equal(native(k, X)[0], want)
    assert nests(k).count("case") == 2  # one conditional


@pytest.mark.parametrize(("name", "trips"), [
    ("remainder", lambda i: (i * 0 + 17) % 5),
    ("quotient", lambda i: (i * 0 + 8) // 4),
    ("quotient of a negative number", lambda i: 1 - (i * 0 - 7) // 7),
    ("rounded up", lambda i: (i * 128 + 128 - i * 128 + 63) // 64),
    ("clipped", lambda i: jnp.clip(i * 0 + 9, 0, 2)),
])  # fmt: skip
def test_loops_of_known_length(name, trips):
    def body(x, o):
        i = pbkern.program_id(0)
        o[i] = lax.fori_loop(0, trips(i), lambda n, v: v * 0.5 + n, x[i])

    k = traced(body, grid=(6,))
    want = X.copy()
    for n in range(2):
        want = want * np.float32(0.5) + n
    np.testing.assert_array_equal(native(k, X)[0], want)
    assert "for %i" in nests(k)
    assert "let" not in nests(k)


def test_starts_of_slices_stay_affine():
    def body(x, o):
        i = pbkern.program_id(0)

        def turn(n, _):
            at = pbkern.ds(n * 8 + 8 - 8, 8)
            o[i, at] = x[i, at] + 1
            return 0

        lax.fori_loop(0, 4, turn, 0)

    k = traced(body, grid=(6,))
    np.testing.assert_array_equal(native(k, X)[0], X + 1)
    assert "let" not in nests(k)


def test_integers_wrap_as_in_jax():
    def body(x, o):
        big = jnp.int32(2**31 - 1) + jnp.int32(1) + pbkern.program_id(0) * 0  # the least number
        o[...] = jnp.where(big < 0, x[...], 0.0)

    np.testing.assert_array_equal(native(traced(body, grid=(1,)), X)[0], X)


def test_tests_that_hold_for_all_programs():
    """Found by trying them: the quotient of a grid index is not affine."""

    def body(x, o):
        i = pbkern.program_id(0)

        @pbkern.when(i // 2 * 2 <= i)
        def _():
            o[i] = x[i] * 2

    k = traced(body, grid=(6,))
    np.testing.assert_array_equal(native(k, X)[0], X * 2)
    assert "case" not in nests(k)


def test_quotients_by_zero_are_left_to_run():
    def body(x, o):
        i = pbkern.program_id(0)
        o[i] = x[i] + (lax.div(jnp.int32(6), i) > 1)

    k = traced(body, grid=(6,))
    got = native(k, X)[0]
    np.testing.assert_array_equal(
        got[1:], (X + (6 // np.maximum(np.arange(6), 1) > 1)[:, None])[1:]
    )


@pytest.mark.parametrize(
    ("shift", "moved"),
    [(lax.shift_left, lambda i: i << 2), (lax.shift_right_arithmetic, lambda i: i >> 2)],
)
def test_shifts(shift, moved):
    def body(x, o):
        i = pbkern.program_id(0)
        o[i] = x[i] + shift(i, jnp.int32(2))

    want = X + moved(np.arange(6)).astype("f")[:, None]
    np.testing.assert_array_equal(native(traced(body, grid=(6,)), X)[0], want)
