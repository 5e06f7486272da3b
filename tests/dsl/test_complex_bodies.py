"""Kernels by hand on complex arrays, against NumPy in complex128 and derivatives of plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.errors import UnsupportedKernel

ROWS, COLUMNS = 8, 16
BS = pbkern.BlockSpec


def numbers(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)


def struct(*shape, dtype=np.complex64):
    return jax.ShapeDtypeStruct(shape, dtype)


def close(got, want, tolerance=2e-6):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert (got.dtype.kind == "c") == (want.dtype.kind == "c")
    assert abs(got - want).max(initial=0) <= tolerance * max(abs(want).max(initial=0), 1e-30)


def by_rows(function, dtype=np.complex64):
    """A kernel of two operands, in blocks of rows."""

    def body(x, y, o):
        o[...] = function(x[...], y[...])

    rows = BS((4, COLUMNS), lambda i: (i, 0))
    return pbkern.kernel(
        body, grid=(ROWS // 4,), in_specs=[rows, rows], out_specs=rows, out_shape=struct(ROWS, COLUMNS, dtype=dtype),
        name="rows",
    )  # fmt: skip


FUNCTIONS = {
    "sum": (lambda x, y: x + y, np.complex64),
    "product and conjugate": (lambda x, y: x * jnp.conj(y) - 2j * x, np.complex64),
    "quotient": (lambda x, y: x / y, np.complex64),
    "exponential": (lambda x, y: jnp.exp(x) * y, np.complex64),
    "modulus": (lambda x, y: jnp.abs(x) + lax.real(y) * lax.imag(x), np.float32),
    "parts": (lambda x, y: lax.complex(lax.imag(x), lax.real(y)), np.complex64),
    "rows of sums": (lambda x, y: x.sum(1, keepdims=True) * y, np.complex64),
    "choice": (lambda x, y: jnp.where(lax.real(x) > 0, x, y), np.complex64),
    "real operands": (lambda x, y: lax.real(x) * y + 1.0, np.complex64),
}


def in_numpy(function, *xs):
    """The function in complex128, by JAX's own execution."""
    with jax.enable_x64(True):
        return np.asarray(function(*(jnp.asarray(x, np.complex128) for x in xs)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_elements(name):
    function, dtype = FUNCTIONS[name]
    kernel, xs = by_rows(function, dtype), (numbers(ROWS, COLUMNS), numbers(ROWS, COLUMNS, seed=1))
    want = in_numpy(function, *xs)
    for call in (
        kernel,
        jax.jit(kernel),
        pbkern.jit(kernel),
        lambda *xs: pbkern.interpret(kernel.trace(*xs), *xs)[0],
    ):
        close(call(*xs), want)


def matmul(size=16, block=8):
    def body(a, b, o, total):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += a[...] @ b[...]

        @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
        def _():
            o[...] = total[...]

    return pbkern.kernel(
        body, name="matmul", grid=(size // block,) * 3,
        in_specs=[BS((block, block), lambda i, j, k: (i, k)), BS((block, block), lambda i, j, k: (k, j))],
        out_specs=BS((block, block), lambda i, j, k: (i, j)), out_shape=struct(size, size),
        scratch_shapes=[pbkern.Scratch((block, block), np.complex64)],
    )  # fmt: skip


def test_products_in_scratch():
    a, b = numbers(16, 16), numbers(16, 16, seed=1)
    close(matmul()(a, b), a.astype(complex) @ b.astype(complex))


def test_loops_and_places():
    """A carry of a loop, rows at computed places, steps of two, an addition in memory."""

    def body(x, o):
        def step(n, z):
            o[n] = z
            return z * x[n] + 1j

        last = lax.fori_loop(0, ROWS, step, jnp.ones(COLUMNS, np.complex64))
        o[0:ROWS:2] += x[0:ROWS:2]
        o[ROWS - 1, :4] = last[:4]

    x = numbers(ROWS, COLUMNS)
    want, z = np.empty((ROWS, COLUMNS), complex), np.ones(COLUMNS, complex)
    for n in range(ROWS):
        want[n], z = z, z * x[n] + 1j
    want[::2] += x[::2]
    want[-1, :4] = z[:4]
    close(pbkern.kernel(body, out_shape=struct(ROWS, COLUMNS))(x), want)


def test_masks_and_arrays_of_indices():
    def body(x, places, o):
        mask = jnp.arange(COLUMNS) < 13
        row = pbkern.load(
            x, (2, slice(None)), mask=mask, other=jnp.full(COLUMNS, 3 - 1j, np.complex64)
        )
        o[...] = x[places[...]]
        pbkern.store(o, (0, slice(None)), row, mask=mask)

    x, places = numbers(ROWS, COLUMNS), np.array([3, 0, 7, 3], np.int32)
    want = x[places].copy()
    want[0, :13] = x[2, :13]
    close(pbkern.kernel(body, out_shape=struct(4, COLUMNS))(x, places), want)


def test_ragged_edges_and_several_dimensions():
    def body(x, o):
        o[...] = jnp.conj(x[...]).T

    x = numbers(3, 10, 7)
    kernel = pbkern.kernel(
        body, grid=(3, 3, 2), in_specs=[BS((None, 4, 4), lambda n, i, j: (n, i, j))],
        out_specs=BS((None, 4, 4), lambda n, i, j: (n, j, i)), out_shape=struct(3, 7, 10),
    )  # fmt: skip
    close(kernel(x), x.conj().transpose(0, 2, 1))


def test_complex128():
    def body(x, o):
        o[...] = jnp.exp(x[...]) * 2

    with jax.enable_x64(True):
        x = numbers(ROWS, COLUMNS).astype(np.complex128)
        kernel = pbkern.kernel(body, out_shape=struct(ROWS, COLUMNS, dtype=np.complex128))
        close(kernel(x), 2 * np.exp(x), 1e-14)


def test_in_functions_and_batches():
    """Between fused operations, in a loop, and stacked."""
    kernel, x, y = matmul(), numbers(16, 16) / 8, numbers(16, 16, seed=1)

    def function(x, y):
        return lax.fori_loop(0, 3, lambda _, z: kernel(x, z) + 1j * y, jnp.abs(y) + 0j)

    want = abs(y.astype(complex)) + 0j
    for _ in range(3):
        want = x.astype(complex) @ want + 1j * y
    close(pbkern.jit(function)(x, y), want)
    stack = np.stack([x, 2 * x])
    close(jax.vmap(kernel, (0, None))(stack, y), stack.astype(complex) @ y.astype(complex))


@pytest.mark.parametrize("name", ["product and conjugate", "exponential", "modulus", "products"])
def test_derivatives(name):
    """Both modes, beside those of JAX for the plain function in complex128."""
    if name == "products":
        kernel, plain, xs = matmul(), lambda a, b: a @ b, (numbers(16, 16), numbers(16, 16, seed=1))
    else:
        plain, dtype = FUNCTIONS[name]
        kernel, xs = by_rows(plain, dtype), (numbers(ROWS, COLUMNS), numbers(ROWS, COLUMNS, seed=1))

    def losses(function):
        return lambda *xs: (jnp.abs(function(*xs)) ** 2).sum()

    with jax.enable_x64(True):
        wide = [jnp.asarray(x, np.complex128) for x in xs]
        want = jax.grad(losses(plain), (0, 1), holomorphic=False)(*wide)
        moved = jax.jvp(plain, wide, wide[::-1])[1]
        want, moved = jax.tree.map(np.asarray, (want, moved))
    for got, exact in zip(jax.grad(losses(kernel), (0, 1))(*xs), want):
        close(got, exact, 1e-5)
    close(jax.jvp(kernel, xs, xs[::-1])[1], moved, 1e-5)


def test_simulated_gpus():
    kernel, xs = matmul(), (numbers(16, 16), numbers(16, 16, seed=1))
    close(
        pbkern.simulate(pbkern.jit(kernel), *xs).results,
        xs[0].astype(complex) @ xs[1].astype(complex),
    )


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (jnp.fft.fft, "fft"),
        (lambda x: jnp.sort(x, 1), "sort"),
        (lambda x: jnp.linalg.svd(x)[0] @ x, "svd"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(function, primitive):
    def body(x, o):
        o[...] = function(x[...])

    kernel = pbkern.kernel(body, out_shape=struct(ROWS, ROWS), name="spectrum")
    with pytest.raises(UnsupportedKernel, match=primitive) as error:
        kernel(numbers(ROWS, ROWS))
    assert "spectrum" in str(error.value)
    assert "test_complex_bodies.py" in str(error.value)
