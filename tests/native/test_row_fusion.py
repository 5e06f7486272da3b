"""What is made of each row and sums of products of rows with it, in one loop (targets/cpu/locality/row_fusion.py,
targets/cpu/schedule/register_promotion.py)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from tests.lowered import lowered

from .running import native


def least_squares(x, w, d):
    return x.T @ (x @ w - d)


def logistic(x, w, d):
    return x.T @ (jax.nn.sigmoid(x @ w) - d)


def in_float64(f, *arrays):
    with jax.enable_x64(True):
        return np.asarray(jax.jit(f)(*(jnp.asarray(np.asarray(a, np.float64)) for a in arrays)))


def operands(rows, columns, dtype):
    r = np.random.default_rng(rows)
    return tuple(jnp.asarray(r.normal(size=s) / 4, dtype) for s in ((rows, columns), columns, rows))


def loops_over_rows(text: str) -> list[int]:
    """Rows of loops that add a product with each row to a sum."""
    return [
        int(n)
        for n in re.findall(
            r"for %i\d+ < (\d+):\n(?:(?! *for ).*\n)*? .* = add\(%t\d+\[[^+]*?, mul\(%a0\[", text
        )
    ]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(10000, 200), (5000, 256), (10007, 130), (997, 97), (1, 300)]
)
@pytest.mark.parametrize("f", [least_squares, logistic], ids=lambda f: f.__name__)
def test_gradients(f, rows, columns, dtype):
    with jax.enable_x64(dtype == "float64"):
        args = operands(rows, columns, dtype)
        got, want = np.asarray(pbkern.jit(f)(*args), np.float64), in_float64(f, *args)
    error = {"float32": 4e-6, "float64": 1e-14, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=error * np.abs(want).max())


def test_rows_are_taken_in_turn():
    args = operands(10000, 200, "float32")
    (rows,) = loops_over_rows(lowered(least_squares, *args))
    assert 128 <= rows <= 256  # as long as sums of one accumulator
    mlir = lowered(least_squares, *args, stage="mlir")
    carried = re.search(r"iter_args\((.*?)\) -> \((.*?)\)", mlir)
    assert carried is not None
    assert carried[2].count("vector<16xf32>") == 13


def test_functions_of_sums_of_rows_are_computed_in_vectors_of_rows():
    nests = pbkern.jit(logistic).as_text(*operands(10000, 200, "float32"), stage="nests")
    assert not loops_over_rows(nests)
    assert re.search(r"nest \[d\d+<\d+\].*\n *%t\d+\[d\d+\] = sub\(logistic\(%t", nests), nests


def test_wide_rows_are_not():
    """40 vectors do not fit into registers."""
    args = operands(10000, 640, "float32")
    assert not loops_over_rows(pbkern.jit(least_squares).as_text(*args, stage="nests"))


def sums(size, trips, dtype=jnp.float32):
    """Kernel: adds each row of x, times its first element, to a sum in scratch, which starts with y."""

    def body(x, y, out, total):
        total[...] = y[...]

        def add(k, _):
            row = x[pbkern.ds(k, 1), :]
            total[...] = total[...] + row[0] * row[0, 0]
            return 0

        jax.lax.fori_loop(0, trips, add, 0)
        out[...] = total[...]

    operands = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((max(trips, 1), size), (size,)))
    scratch = [pbkern.Scratch((size,), dtype)]
    return pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct((size,), dtype), scratch_shapes=scratch
    ).trace(*operands)


@pytest.mark.parametrize("size", [1, 5, 40, 256, 257])
@pytest.mark.parametrize("trips", [0, 1, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_loops_of_hand_written_kernels(size, trips, dtype):
    kernel = sums(size, trips, dtype)
    r = np.random.default_rng(size)
    x, y = (r.integers(-3, 3, s).astype(dtype) for s in ((max(trips, 1), size), (size,)))
    (got,) = native(kernel, x, y)
    np.testing.assert_array_equal(got, y + (x[:trips] * x[:trips, :1]).sum(0, dtype=dtype))


def test_what_fits_is_carried():
    assert "iter_args" in lower_kernel(sums(256, 7), "k").text
    assert "iter_args" not in lower_kernel(sums(257, 7), "k").text
