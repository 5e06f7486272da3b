"""Concatenations that are read where their operands are: the same elements, and nothing is stored for them."""

import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.lowered import lowered

DTYPES = ["int8", "uint8", "int16", "int32", "bfloat16", "float16", "float32", "bool"]


def drawn(shape, dtype="float32"):
    return np.random.default_rng(3).integers(-50, 50, shape).astype(dtype)


def check(f, *arrays):
    """Compares with the same function of NumPy arrays, element by element."""
    got = pbkern.jit(lambda *xs: f(jnp, *xs))(*arrays)
    want = f(np, *arrays)
    np.testing.assert_array_equal(np.asarray(got).astype("d"), np.asarray(want).astype("d"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reflect_of_every_type(dtype):
    check(lambda xp, x: xp.pad(x, ((1, 1), (3, 5)), mode="reflect"), drawn((100, 101), dtype))


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "wrap", "edge"])
@pytest.mark.parametrize("shape", [(7,), (200,), (2, 3), (33, 65), (5, 6, 7), (40, 3, 130)])
def test_pads(mode, shape):
    widths = [(1, 1 + k % 2) for k in range(len(shape))]
    check(lambda xp, x: xp.pad(x, widths, mode=mode), drawn(shape))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2, 3), (16, 16), (1, 63), (40, 200)])
@pytest.mark.parametrize("axis", [0, 1])
def test_two_readers(sizes, axis):
    """Each reads other operands at one point."""

    def f(xp, *xs):
        joined = xp.concatenate(xs, axis)
        return joined[::-1, ::-1] * 3 + joined

    check(f, *(drawn((size, 50) if axis == 0 else (50, size)) for size in sizes))


@pytest.mark.parametrize("step", [1, 2, 3, -1, -2, -5])
@pytest.mark.parametrize("start", [0, 1, 4])
def test_steps_across_operands(step, start):
    def f(xp, a, b, c):
        joined = xp.concatenate([a, b, c], 0)
        return joined[start:][::step] * 2 + joined[start:][::step][::-1]

    check(f, drawn((9, 70)), drawn((1, 70)), drawn((13, 70)))


def test_joined_inside_joined():
    def f(xp, a, b):
        inner = xp.concatenate([a, b], 0)
        outer = xp.concatenate([inner[1:], a, inner[::-1]], 0)
        return xp.concatenate([outer[:, :9] - outer[:, 30:39], outer, outer[:, ::-1]], 1)

    check(f, drawn((17, 41)), drawn((6, 41)))


def test_computed_operands_and_sums():
    """An operand that is summed, and a reader that sums, keep what they have."""

    def f(xp, a, b):
        joined = xp.concatenate([a * a + 1, b.sum(0, keepdims=True), abs(b)], 0)
        return joined.sum(1), joined[::-1] - joined, joined.max(0)

    got = pbkern.jit(lambda a, b: f(jnp, a, b))(a := drawn((30, 40)), b := drawn((9, 40)))
    for left, right in zip(got, f(np, a, b), strict=True):
        np.testing.assert_array_equal(left, right)


def test_beyond_the_ends():
    """Padding asks for elements that a concatenation does not have."""

    def f(xp, a, b):
        joined = xp.concatenate([a, b], 0)
        return xp.pad(joined, ((2, 1), (1, 4)))[1:] + xp.pad(joined, ((1, 1), (4, 1)))

    check(f, drawn((12, 30)), drawn((5, 30)))


def test_written_over_while_it_is_read():
    """Rows of a Ref are stored in the other order, through a concatenation of its halves."""

    @pbkern.kernel(out_shape=jnp.zeros((8, 40), jnp.float32), input_output_aliases={0: 0})
    def swap(x, out):
        rows = out[...]
        out[...] = jnp.concatenate([rows[4:], rows[:4]], 0)[::-1] + 1

    x = drawn((8, 40))
    np.testing.assert_array_equal(swap(x), np.concatenate([x[4:], x[:4]], 0)[::-1] + 1)


def test_nothing_is_stored():
    x = drawn((100, 101))
    text = lowered(lambda x: jnp.pad(x, ((1, 1), (3, 5)), mode="reflect"), x)
    assert "%t" not in text
    assert text.count("nest [") >= 6


def test_many_parts_are_stored():
    """Cut at each operand, the nests would be more than what they save."""
    xs = [drawn((2, 300)) for _ in range(20)]

    def f(*xs):
        joined = jnp.concatenate(xs, 0)
        return joined[::-1] * joined

    assert "%t" in lowered(f, *xs)
    np.testing.assert_array_equal(pbkern.jit(f)(*xs), np.concatenate(xs)[::-1] * np.concatenate(xs))
