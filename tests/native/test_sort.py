"""Sorts of lines against NumPy's stable sorts: every type of key, lines of all lengths, several keys, what travels along."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.costs.sorts import digit_bits, is_network, network_passes
from pbkern.targets.cpu.lower_options import LowerOptions

pytestmark = pytest.mark.usefixtures("wide_types")
DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 bfloat16 float16 float32 float64 int4 uint4".split()
# In registers, by ranks, by digits of several widths.
LENGTHS = (1, 2, 9, 17, 33, 70, 300, 3001, 40000)


def keys_of(dtype: str, shape, rng) -> np.ndarray:
    """Many equal keys, the ends of the range, and among floats zeros of both signs, infinities and several NaNs."""
    dt = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dt.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        info = ml_dtypes.iinfo(dt)
        few = rng.integers(max(int(info.min), -3), 4, shape).astype(dt)
        kind = np.int64 if int(info.max) < 2**63 else np.uint64
        wide = rng.integers(int(info.min), int(info.max), shape, dtype=kind, endpoint=True)
        return np.where(rng.random(shape) < 0.4, few, wide.astype(dt)).astype(dt)
    x = (rng.standard_normal(shape) * np.exp(rng.uniform(-6, 6, shape))).astype(dt)
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, np.finfo(np.float32).tiny / 4],
        np.float64,
    ).astype(dt)
    return np.where(rng.random(shape) < 0.3, special[rng.integers(0, len(special), shape)], x)


def order(keys: list[np.ndarray]) -> np.ndarray:
    """NumPy's stable lexicographic order along the last axis, first key first; NaN last, -0 equal to 0."""

    def plain(k):
        return k if k.dtype.kind in "biu" else k.astype(np.float64) + 0.0

    return np.lexsort([plain(k) for k in reversed(keys)], axis=-1)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


def check(keys, others, axis=-1):
    operands = [*keys, *others]
    sort = pbkern.jit(lambda *xs: lax.sort(xs, dimension=axis % xs[0].ndim, num_keys=len(keys)))
    got = sort(*map(jnp.asarray, operands))
    moved = [np.moveaxis(x, axis, -1) for x in operands]
    places = order(moved[: len(keys)])
    for g, x in zip(got, moved, strict=True):
        np.testing.assert_array_equal(
            bits(np.moveaxis(np.asarray(g), axis, -1)), bits(np.take_along_axis(x, places, -1))
        )


@pytest.mark.sampled(15)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_alone_and_with_a_companion(dtype, length, rng):
    x = keys_of(dtype, (3 if length < 1000 else 1, length), rng)
    places = np.broadcast_to(np.arange(length, dtype=np.int32), x.shape)
    if "int4" in dtype:  # operands of kernels are whole bytes
        f = pbkern.jit(lambda x: lax.sort(x.astype(dtype)).astype(jnp.int8))
        np.testing.assert_array_equal(f(x.astype(np.int8)), np.sort(x.astype(np.int8), -1))
        return
    check([x], [])
    check([x], [places])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [5, 40, 500])
@pytest.mark.parametrize(
    "names",
    [("int8", "float32"), ("float64", "int32"), ("bool", "uint16", "float16"), ("int64", "int64")],
)
def test_several_keys(names, length, rng):
    keys = [keys_of(n, (4, length), rng) for n in names]
    keys[0] = np.where(rng.random(keys[0].shape) < 0.8, keys[0][:, :1], keys[0])
    places = np.arange(4 * length).reshape(4, length)
    check(keys, [rng.standard_normal((4, length)).astype(np.float32), places.astype(np.int16)])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("length", [17, 64, 101])
@pytest.mark.parametrize("dtype", [name for name in DTYPES if "int4" not in name])
def test_lines_side_by_side(dtype, length, rng):
    """As many lines as fill two groups, and some more."""
    x = keys_of(dtype, (37, length), rng)
    assert is_network(37, length, [x.dtype], 1, length) or dtype == "bool"
    check([x], [])
    check([x], [np.broadcast_to(np.arange(length, dtype=np.int16), x.shape)])


@pytest.mark.parametrize("names", [("int8", "float32"), ("float64", "int32"), ("int64", "uint64")])
def test_several_keys_side_by_side(names, rng):
    keys = [keys_of(name, (21, 50), rng) for name in names]
    keys[0] = np.where(rng.random(keys[0].shape) < 0.8, keys[0][:, :1], keys[0])
    check(keys, [rng.standard_normal((21, 50)).astype(np.float32)])


def test_first_elements_of_lines_side_by_side(rng):
    x = keys_of("float32", (37, 60), rng)
    assert is_network(37, 60, [x.dtype], 1, 40)
    got = pbkern.jit(lambda x: lax.sort(x)[:, :40])(x)
    want = np.take_along_axis(x, order([x])[:, :40], -1)
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("length", [2, 3, 16, 17, 23])
def test_networks_sort_all_zeros_and_ones(length, rng):
    """A network that sorts every line of zeros and ones sorts every line; of the longest lines some are drawn."""
    most = 1 << 12
    codes = np.arange(1 << length) if length <= 12 else rng.integers(0, 1 << length, most)
    lines = codes[:, None] >> np.arange(length) & 1
    want = np.sort(lines, 1)
    for p, r, d in network_passes(length):
        low = np.array([i for i in range(length - d) if i & p == r], int)
        left, right = lines[:, low], lines[:, low + d]
        lines[:, low], lines[:, low + d] = np.minimum(left, right), np.maximum(left, right)
    np.testing.assert_array_equal(lines, want)


@pytest.mark.parametrize(
    ("shape", "axis"), [((40, 7), 0), ((3, 300, 5), 1), ((0, 30), 1), ((30, 0), 0), ((2000,), 0)]
)
def test_along_other_axes(shape, axis, rng):
    x = keys_of("float32", shape, rng)
    check([x], [np.arange(x.size, dtype=np.int32).reshape(shape)], axis)


@pytest.mark.parametrize(
    "x",
    [np.zeros(5000, np.int32), np.arange(5000, dtype=np.int32)[::-1] << 16],
    ids=["equal", "few"],
)
def test_digits_that_all_share_take_no_pass(x):
    check([x], [])
    check([x], [np.arange(x.size, dtype=np.int32)])


def test_every_way_of_sorting_is_met():
    in_registers = LowerOptions().sorts_in_registers
    ways = {
        "registers" if in_registers(n, 1, 1) else digit_bits(n, b)
        for n in LENGTHS
        for b in (1, 8, 16, 32, 64)
    }
    assert {"registers", None} < ways
    assert len(ways) > 4


def test_sorted_values_fuse_with_what_reads_them(rng):
    x = keys_of("int32", (50, 400), rng)
    got = pbkern.jit(lambda x: jnp.sort(x * 2 + 1, -1)[:, ::7] - 3)(x)
    np.testing.assert_array_equal(got, np.sort(x * 2 + 1, -1)[:, ::7] - 3)
