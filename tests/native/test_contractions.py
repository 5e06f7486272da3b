"""Contractions through every path of lowering: packed panels, staged rows, pairs of bfloat16, matrix-vector, convolutions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.machines.detect import detected_machine
from tests.arrays import array
from tests.lowered import lowered


def draw(shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return array(rng.integers(-5, 6, shape), dtype)
    return array(rng.standard_normal(shape), dtype)


def check(f, args, rtol, reference=None):
    """Against the same function in float64 (integers: int64): relative to the largest result."""
    got = np.asarray(pbkern.jit(f)(*args), np.float64)
    with jax.enable_x64(True):
        wide = [
            np.asarray(a, np.float64 if jnp.issubdtype(a.dtype, jnp.floating) else np.int64)
            for a in args
        ]
        want = np.asarray((reference or f)(*wide), np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(
        got, want, atol=rtol * max(np.abs(want).max(initial=0), 1e-30), rtol=0
    )


SHAPES = [
    (1, 1, 1),
    (3, 7, 5),
    (37, 50, 70),
    (128, 512, 96),
    (65, 1024, 130),
    (200, 31, 1),
    (1, 300, 200),
    (4, 2, 500),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("transpose", ["nn", "nt", "tn", "tt"])
def test_matmul(m, k, n, transpose):
    a = draw((m, k) if transpose[0] == "n" else (k, m), seed=1)
    b = draw((k, n) if transpose[1] == "n" else (n, k), seed=2)

    def f(a, b):
        return (a if transpose[0] == "n" else a.T) @ (b if transpose[1] == "n" else b.T)

    check(f, (a, b), 1e-6 * max(k, 8) ** 0.5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(100, 700, 100), (30, 1500, 9), (300, 1500, 50), (17, 700, 250), (45, 5000, 1)],
)
@pytest.mark.parametrize("form", ["mk,kn->mn", "km,kn->mn", "mk,nk->mn"])
def test_equal_rows_and_columns_give_equal_bits(m, k, n, form):
    """Wherever a row lies in register tiles, its sums are rounded alike: programs whose blocks overlap leave the same bits."""
    row, column = draw((k,), seed=1), draw((k,), seed=2)
    x, w = (row[None] + jnp.zeros((m, 1)), column[:, None] + jnp.zeros((1, n)))
    x, w = x.T if form[0] == "k" else x, w.T if form[3] == "n" else w
    got = pbkern.jit(lambda x, w: jnp.einsum(form, x, w))(x, w)
    assert len(np.unique(got)) == 1
    np.testing.assert_allclose(got[0, 0], np.dot(np.float64(row), np.float64(column)), rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "int8"])
def test_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        a, b = draw((33, 66), dtype, 1), draw((66, 50), dtype, 2)
        f = lambda a, b: jnp.matmul(
            a, b, preferred_element_type=jnp.int32 if dtype == "int8" else None
        )
        check(
            f,
            (a, b),
            {"float64": 1e-14, "float16": 2e-3, "bfloat16": 8e-3}.get(dtype, 0),
            jnp.matmul,
        )


@pytest.mark.skipif(not detected_machine().bf16_pairs, reason="the processor has no AVX512-BF16")
@pytest.mark.parametrize(("m", "k", "n"), [(64, 64, 64), (37, 50, 70), (5, 32, 9), (256, 512, 300)])
def test_pairs_of_bfloat16_accumulate_in_float32(m, k, n):
    a, b = draw((m, k), jnp.bfloat16, 1), draw((k, n), jnp.bfloat16, 2)
    f = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)
    assert "dpbf16ps" in pbkern.jit(f).as_text(a, b, stage="llvm")
    check(f, (a, b), 1e-6 * k**0.5, jnp.dot)


def test_batched_and_broadcast_operands():
    check(
        lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k),
        (draw((2, 3, 17, 24)), draw((2, 3, 19, 24), seed=3)),
        1e-5,
    )
    check(
        lambda q, k: jnp.einsum("bqhd,bkd->bhqk", q, k),
        (draw((2, 17, 3, 24)), draw((2, 19, 24), seed=3)),
        1e-5,
    )
    check(
        lambda x, w: jnp.einsum("abc,cde->abde", x, w),
        (draw((2, 5, 24)), draw((24, 3, 33), seed=3)),
        1e-5,
    )


def test_prologue_and_epilogue_are_fused():
    def f(x, scale, w, b, r):
        return jax.nn.gelu((x * scale) @ w + b) + r

    args = (draw((40, 64)), draw((64,)), draw((64, 96)), draw((96,)), draw((40, 96)))
    check(f, args, 1e-5)
    pbkern.jit(f).kernels(*args)
    assert len(pbkern.jit(f).kernels(*args)) == 1


CONVOLUTIONS = {
    "same": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 3), "padding": "VALID"},
    "asymmetric": {"window_strides": (1, 2), "padding": ((1, 2), (0, 1)), "rhs_dilation": (2, 1)},
    "transposed": {"window_strides": (1, 1), "padding": ((1, 2), (2, 1)), "lhs_dilation": (2, 2)},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolution(name, layout, dtype):
    x, w = draw((2, 9, 11, 4), dtype, 1), draw((3, 3, 4, 10), dtype, 2)
    if layout[0] == "NCHW":
        x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
    f = lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=layout, **CONVOLUTIONS[name])
    check(f, (x, w), 1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize(("filters", "order"), [("OIHW", [64, 3, 5]), ("HWIO", [3, 5, 64])])
def test_filters_are_read_in_their_order(filters, order, dtype):
    """Of many channels, each filter is read once from beginning to end, not once for each place of the window."""
    shape = {"O": 48, "I": 64, "H": 3, "W": 5}
    x, w = (
        draw((2, 64, 9, 36), dtype, 1),
        draw([shape[c] for c in filters], dtype, 2),
    )  # 32 results fill their vectors
    f = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NCHW", filters, "NCHW")
    )
    nests = lowered(f, x, w).splitlines()
    (product,) = (
        line for line in nests if line.count("*") == 3 and line.strip().startswith("nest")
    )
    assert [int(n) for n in re.findall(r"<(\d+)\*", product)] == order
    check(f, (x, w), {"float16": 1e-3, "float32": 1e-5}.get(dtype, 0))


def test_filters_of_bfloat16_are_converted_once():
    """Where channels come first, no words of two features can be read: each element of a filter would be converted anew."""
    x, w = draw((2, 24, 9, 32), "bfloat16", 1), draw((32, 24, 3, 5), "bfloat16", 2)
    f = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    nests = lowered(f, x, w)
    (copy,) = re.findall(r"dot= .*(%t\d+)\[d\d+, 5\*k\d+ \+ k\d+ \+ 15\*k\d+\]", nests)
    assert re.search(rf"nest \[d\d+<16, d\d+<360\].*\n  {copy}\[", nests)
    check(f, (x, w), 1e-2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 10, 13, 16, 17, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_few_columns(columns, transposed):
    """Rows whose length maps them to one cache set, times few columns."""
    rng = np.random.default_rng(columns)
    a = rng.normal(size=(67, 1024)).astype(np.float32)
    b = rng.normal(size=(columns, 1024) if transposed else (1024, columns)).astype(np.float32)
    f = (lambda a, b: a @ b.T) if transposed else (lambda a, b: a @ b)
    np.testing.assert_allclose(
        pbkern.jit(f)(a, b), f(a.astype(np.float64), b.astype(np.float64)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shape", [(8192, 512), (5003, 600), (4096, 1024)])
def test_sums_over_far_rows(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    w = np.random.default_rng(1).normal(size=shape[:1]).astype(np.float32)
    got = pbkern.jit(lambda w, x: (w @ x, x.sum(0), x.max(0)))(w, x)
    wide = x.astype(np.float64)
    for g, want in zip(got, (w.astype(np.float64) @ wide, wide.sum(0), wide.max(0))):
        np.testing.assert_allclose(g, want, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16"), ("int8", "int32")],
)
def test_nothing_is_summed(dtype, out):
    """A contraction of no dimension, with and without a batch."""
    a, b = draw((30, 5), dtype, 1), draw((30, 7), dtype, 2)
    outer = lambda a, b, batch: lax.dot_general(
        a, b, (((), ()), (batch, batch)), preferred_element_type=out
    )
    check(
        lambda a, b: outer(a, b, (0,)) * 2,
        (a, b),
        1e-3,
        lambda a, b: a[:, :, None] * b[:, None] * 2,
    )
    check(lambda a, b: outer(a, b, ()), (a, b), 1e-3, lambda a, b: jnp.multiply.outer(a, b))
    check(lambda a, b: outer(a[0, 0], b, ()), (a, b), 1e-3, lambda a, b: a[0, 0] * b)

    @pbkern.kernel(grid=(), out_shape=jax.ShapeDtypeStruct((30, 5, 7), out))
    def written(a, b, c):
        c[...] = outer(a[...], b[...], (0,))

    check(written, (a, b), 1e-3, lambda a, b: a[:, :, None] * b[:, None])


def test_rows_of_a_table():
    """Looked-up rows are contiguous; indices wrap and clamp as in JAX."""
    rng = np.random.default_rng(2)
    table = rng.normal(size=(500, 77)).astype(np.float32)
    index = jnp.asarray([[0, -1, 499], [500, 7, -500]])
    f = lambda t, i: t[i] * 2 + 1
    np.testing.assert_allclose(pbkern.jit(f)(table, index), jax.jit(f)(table, index), rtol=1e-6)


@pytest.mark.parametrize("width", [4, 8, 12, 16, 20])
def test_bfloat16_of_little_depth(width):
    """Pairs are multiplied where the microkernel is, and nowhere else."""
    q, k = (
        np.asarray(np.random.default_rng(s).normal(size=(2, 3, 17, width)), jnp.bfloat16)
        for s in (0, 1)
    )
    f = lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k)
    want = f(np.asarray(q, np.float64), np.asarray(k, np.float64))
    np.testing.assert_allclose(
        np.asarray(pbkern.jit(f)(q, k), np.float64), want, rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("columns", [2, 3, 12])
def test_bfloat16_of_few_columns(columns):
    a = np.asarray(np.random.default_rng(0).normal(size=(300, 1024)), jnp.bfloat16)
    b = np.asarray(np.random.default_rng(1).normal(size=(1024, columns)), jnp.bfloat16)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(
        np.asarray(pbkern.jit(lambda a, b: a @ b)(a, b), np.float64), want, rtol=2e-2, atol=0.2
    )


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_fast_math_off_keeps_the_order_of_products(columns):
    """Few columns run along the depth, in partial sums, only where sums may be reassociated."""
    rng = np.random.default_rng(0)
    a = (rng.normal(size=(5, 1024)) * 10.0 ** rng.integers(-6, 7, (5, 1024))).astype(np.float32)
    b = rng.normal(size=(1024, columns)).astype(np.float32)
    want = np.zeros((5, columns), np.float32)
    for k in range(1024):
        want += a[:, k : k + 1] * b[k : k + 1]
    f = pbkern.jit(lambda a, b: a @ b, compile_options={"mlir_disable_fast_math": True})
    np.testing.assert_array_equal(f(a, b), want)


NARROW_TYPES = [
    ("int8", "int8"), ("uint8", "int8"), ("int8", "uint8"), ("uint8", "uint8"), ("int16", "int16"), ("int8", "int16"),
]  # fmt: skip
NARROW_PRODUCTS = {
    "plain": ("mk,kn->mn", (64, 96), (96, 80)),
    "one column more than panels": ("bmk,bnk->bmn", (12, 65, 64), (12, 65, 64)),
    "right turned": ("mk,nk->mn", (33, 64), (70, 64)),
    "left turned": ("km,kn->mn", (128, 40), (128, 100)),
    "batched": ("bmk,bkn->bmn", (3, 20, 32), (3, 32, 48)),
    "depth of pairs": ("mk,kn->mn", (40, 34), (34, 40)),
    "odd depth": ("mk,kn->mn", (40, 31), (31, 40)),
    "two depths": ("mkl,kln->mn", (24, 6, 16), (6, 16, 72)),
    "few rows": ("mk,kn->mn", (2, 64), (64, 200)),
    "few columns": ("mk,kn->mn", (200, 64), (64, 3)),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("form", NARROW_PRODUCTS)
@pytest.mark.parametrize("dtypes", NARROW_TYPES, ids="-".join)
def test_narrow_integers_with_wide_sums(form, dtypes):
    """Every value of the type occurs, and sums of int16 wrap as NumPy's do."""
    rng = np.random.default_rng(2)
    spec, *shapes = NARROW_PRODUCTS[form]
    a, b = (
        rng.integers(np.iinfo(d).min, np.iinfo(d).max, s, dtype=d, endpoint=True)
        for s, d in zip(shapes, dtypes)
    )
    f = pbkern.jit(lambda a, b: jnp.einsum(spec, a, b, preferred_element_type=jnp.int32) * 2 + 1)
    want = np.einsum(spec, a.astype(np.int32), b.astype(np.int32)) * 2 + 1
    np.testing.assert_array_equal(f(a, b), want)


def test_one_column_behind_panels_of_bfloat16():
    """Instructions for pairs take vectors of four words at least."""
    a, b = draw((12, 65, 64), jnp.bfloat16), draw((12, 65, 64), jnp.bfloat16, 1)
    f = pbkern.jit(
        lambda a, b: jnp.einsum("bik,bjk->bij", a, b, preferred_element_type=jnp.float32)
    )
    want = np.einsum("bik,bjk->bij", np.asarray(a, np.float64), np.asarray(b, np.float64))
    np.testing.assert_allclose(f(a, b), want, rtol=1e-4, atol=1e-4)


needs_vnni = pytest.mark.skipif(
    not detected_machine().vnni, reason="the processor has no AVX512-VNNI"
)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("depth", [16, 17, 30, 199, 1023])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("turned", [False, True])
def test_depths_that_words_do_not_divide(depth, dtype, turned):
    """What is left over is added to the sums, which an epilogue reads; all values of the type, so that sums are exact."""
    limits, rng = np.iinfo(dtype), np.random.default_rng(depth)
    a, b = (
        rng.integers(limits.min, limits.max + 1, s).astype(dtype)
        for s in ((61, depth), (depth, 75))
    )

    def f(a, b):
        b = b.T if turned else b
        return jnp.minimum(
            lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32) + 3,
            10**6,
        )

    want = np.minimum((a.astype(np.int64) @ b).astype(np.int32) + np.int32(3), 10**6)
    fused = pbkern.jit(f)
    given = a, b.T.copy() if turned else b
    np.testing.assert_array_equal(fused(*given), want)
    if (detected_machine().vnni or detected_machine().avx2) and depth > 16:
        assert re.search(
            "by vpdpbusd=|by vpdpwssd=|by pmaddwd=", fused.as_text(*given, stage="nests")
        )


@needs_vnni
@pytest.mark.parametrize(
    ("dtypes", "words", "instruction"),
    [
        (("int8", "int8"), "by vpdpbusd=", "vpdpbusd"),
        (("uint8", "int8"), "by vpdpbusd=", "vpdpbusd"),
        (("int8", "int16"), "by vpdpwssd=", "vpdpwssd"),
    ],
)
def test_narrow_integers_are_multiplied_in_words(dtypes, words, instruction):
    a, b = (jax.ShapeDtypeStruct((256, 256), d) for d in dtypes)
    f = pbkern.jit(lambda a, b: lax.dot(a.astype(jnp.int32), b.astype(jnp.int32)))
    assert words in f.as_text(a, b, stage="nests")
    assert instruction in f.as_text(a, b, stage="asm")


@pytest.mark.skipif(
    not detected_machine().avx2 or detected_machine().vnni, reason="for x86-64 without AVX512-VNNI"
)
@pytest.mark.parametrize(
    ("dtypes", "rows", "words"),
    [
        (("int8", "int8"), 256, "by pmaddwd="),
        (("uint8", "int8"), 256, "by pmaddwd="),
        (("int8", "int16"), 256, "by pmaddwd="),
        (("int8", "int8"), 3, "by pmaddwd_int8_int8="),
        (("uint8", "int8"), 3, "by pmaddwd_uint8_int8="),
        (("int8", "uint8"), 3, "by pmaddwd_uint8_int8="),
        (("uint8", "uint8"), 3, "by pmaddwd_uint8_uint8="),
    ],
)
def test_narrow_integers_are_multiplied_as_pairs(dtypes, rows, words):
    """Few rows are read where they are, in words of four bytes."""
    a, b = jax.ShapeDtypeStruct((rows, 512), dtypes[0]), jax.ShapeDtypeStruct((256, 512), dtypes[1])
    f = pbkern.jit(lambda a, b: lax.dot(a.astype(jnp.int32), b.T.astype(jnp.int32)))
    nests = f.as_text(a, b, stage="nests")
    assert words in nests
    assert "dot=" not in nests
    assert "vpmaddwd" in f.as_text(a, b, stage="asm")


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("depth", [256, 511, 1028])
@pytest.mark.parametrize(
    "dtypes", [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8"), ("int8", "uint8")]
)
@pytest.mark.parametrize("turned", [False, True])
def test_few_rows_of_bytes(rows, depth, dtypes, turned):
    """All values of the types, the least and greatest above all."""
    rng = np.random.default_rng(rows + depth)

    def drawn(shape, dtype):
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
        values[rng.random(shape) < 0.5] = limits.min if limits.min else limits.max
        return values

    a, b = drawn((rows, depth), dtypes[0]), drawn((depth, 45), dtypes[1])
    want = a.astype(np.int32) @ b.astype(np.int32)
    f = pbkern.jit(
        lambda a, b: lax.dot(a.astype(jnp.int32), (b.T if turned else b).astype(jnp.int32))
    )
    np.testing.assert_array_equal(f(a, b.T.copy() if turned else b), want)


def test_sums_of_pairs_wrap():
    """Two products of the least int16 leave int32."""
    a = np.full((20, 64), -(2**15), np.int16)
    with np.errstate(over="ignore"):
        want = np.full((20, 20), 64 * 2**30, np.int64).astype(np.int32)
    f = pbkern.jit(lambda a, b: lax.dot(a.astype(jnp.int32), b.T.astype(jnp.int32)))
    np.testing.assert_array_equal(f(a, a), want)


@needs_vnni
def test_unsigned_times_signed_bytes_need_no_copy_of_the_rows():
    a, b = jax.ShapeDtypeStruct((64, 256), jnp.uint8), jax.ShapeDtypeStruct((256, 64), jnp.int8)
    nests = pbkern.jit(lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32)).as_text(
        a, b, stage="nests"
    )
    assert "%a0.words" in nests
    assert "xor" not in nests


def quantised(x, w, scale):
    """A layer whose activations are quantised row by row."""
    step = jnp.abs(x).max(-1, keepdims=True) / 127
    rounded = jnp.clip(jnp.round(x / step), -127, 127).astype(jnp.int8)
    return lax.dot(rounded, w, preferred_element_type=jnp.int32).astype(jnp.float32) * step * scale


def convolution(layout, stride=1):
    dims = {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW")}[layout]
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=dims, preferred_element_type=jnp.int32
    )


NARROW_LAYERS = {
    "quantised on the way": (
        quantised,
        ((40, 64), np.float32),
        ((64, 48), np.int8),
        ((48,), np.float32),
    ),
    "convolution": (convolution("NHWC"), ((2, 9, 11, 16), np.int8), ((3, 3, 16, 24), np.int8)),
    "convolution with stride": (
        convolution("NHWC", 2),
        ((2, 9, 11, 16), np.uint8),
        ((3, 3, 16, 24), np.uint8),
    ),
    "channels first": (convolution("NCHW"), ((2, 16, 9, 11), np.int8), ((24, 16, 3, 3), np.int8)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NARROW_LAYERS)
def test_what_is_more_than_a_copy_of_narrow_integers_stays_narrow(name):
    """Padded images and activations that were quantised in the same kernel lie in scratch of 8 bits."""
    f, *operands = NARROW_LAYERS[name]
    args = [
        draw(s, d, k)
        if d == np.float32
        else np.random.default_rng(k).integers(-128, 128, s).astype(d)
        for k, (s, d) in enumerate(operands)
    ]
    f = pbkern.jit(f)
    wide = [a if a.dtype == np.float32 else a.astype(np.int32) for a in args]
    want = NARROW_LAYERS[name][0](*(wide if name != "quantised on the way" else args))
    np.testing.assert_allclose(f(*args), want, rtol=1e-6)
    if detected_machine().vnni:
        nests = f.as_text(*args, stage="nests")
        assert "by vpdpbusd=" in nests
        assert "dot=" not in nests


@pytest.mark.parametrize("shape", [(32, 32, 32), (40, 32, 50)])
def test_blocks_of_narrow_integers_are_products_of_words(shape):
    """Operands of one shape are converted in one nest; blocks at the edges are guarded."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    x, y = (
        rng.integers(-128, 128, (m, k)).astype(np.int8),
        rng.integers(-128, 128, (k, n)).astype(np.int8),
    )

    def body(x, y, o):
        o[...] = lax.dot(x[...], y[...], preferred_element_type=jnp.int32)

    block = pbkern.BlockSpec((32, 32), lambda i, j: (i, j))
    kernel = pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct((m, n), "int32"), grid=(-(-m // 32), -(-n // 32)), out_specs=[block],
        in_specs=[pbkern.BlockSpec((32, 32), lambda i, j: (i, 0)), pbkern.BlockSpec((32, 32), lambda i, j: (0, j))],
    ).trace(x, y)  # fmt: skip
    np.testing.assert_array_equal(
        pbkern.call_kernel(kernel, x, y)[0], x.astype(np.int32) @ y.astype(np.int32)
    )
    nests = lower_kernel(kernel, "k", LowerOptions(vnni=True)).nests
    assert "by vpdpbusd=" in nests
    assert "dot=" not in nests


def test_float16_is_converted_once():
    """Both operands lie in copies of float32, also the one that is contiguous along the columns."""
    a, b = draw((64, 256), np.float16, 1), draw((256, 128), np.float16, 2)
    nests = pbkern.jit(jnp.matmul).as_text(a, b, stage="nests")
    products = [line for line in nests.splitlines() if "dot=" in line]
    assert products
    assert not any("%a0[" in line or "%a1[" in line for line in products)
    check(jnp.matmul, (a, b), 1e-3)


def test_operands_at_edges_are_tested_once():
    """In the body for blocks that reach over the edge, products read copies of what may lie outside."""

    def body(x, y, o):
        o[...] = x[...] @ y[...]

    x, y = (
        draw((56, 64)),
        draw((64, 128), seed=1),
    )  # no grid dimension alone tells which block is the last
    kernel = pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct((56, 128), "f"), grid=(2, 2), in_specs=[
        pbkern.BlockSpec((16, 64), lambda i, j: (2 * i + j, 0)), pbkern.BlockSpec()],
        out_specs=[pbkern.BlockSpec((16, 128), lambda i, j: (2 * i + j, 0))],
    ).trace(x, y)  # fmt: skip
    np.testing.assert_allclose(pbkern.call_kernel(kernel, x, y)[0], x @ y, rtol=1e-4, atol=1e-4)
    products = [
        line
        for line in lower_kernel(kernel, "k").nests.split("guarded:")[1].splitlines()
        if "dot=" in line
    ]
    assert products
    assert not any("]?" in line for line in products)


def test_products_of_narrow_integers_in_loops_are_of_words():
    def body(x, y, o):
        def step(k, total):
            part = pbkern.ds(k * 32, 32)
            return total + lax.dot(x[:, part], y[part], preferred_element_type=jnp.int32)

        o[...] = lax.fori_loop(0, 3, step, jnp.zeros((16, 32), jnp.int32))

    rng = np.random.default_rng(0)
    x, y = (
        rng.integers(-128, 128, (16, 96)).astype(np.int8),
        rng.integers(-128, 128, (96, 32)).astype(np.int8),
    )
    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((16, 32), "int32")).trace(x, y)
    np.testing.assert_array_equal(
        pbkern.call_kernel(kernel, x, y)[0], x.astype(np.int32) @ y.astype(np.int32)
    )
    nests = lower_kernel(kernel, "k", LowerOptions(vnni=True)).nests
    assert "by vpdpbusd=" in nests
    assert "dot=" not in nests


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["mk,kn->mn", "mk,nk->mn", "km,kn->mn"])
@pytest.mark.parametrize("depth", [8192, 8195])
def test_deep_products_are_packed_in_runs(form, depth):
    """A panel of all 8192 rows would leave the nearest caches: each run's panel is packed, and adds to the sums."""
    x, w = draw((256, depth), seed=1), draw((depth, 512), seed=2)
    x, w = x.T if form[0] == "k" else x, w.T if form[3] == "n" else w
    f = lambda x, w: jnp.tanh(jnp.einsum(form, x, w) / 100)
    nests = lowered(f, x, w)
    depths = [int(n) for n in re.findall(r"k\d+<(\d+)\*", nests)]
    assert depths
    assert max(depths) <= 2048
    assert re.search(r"= add\(%t\d+\[.*, acc0\)", nests)
    check(f, (x, w), 1e-5)


def test_filters_gradient_of_bfloat16_whose_padding_is_chosen_from_equal_values():
    """LLVM once folded what is stored in the padding to a constant after it had stopped looking for instructions."""
    shapes = {"window_strides": (1, 3), "padding": [(0, 2), (1, 0)], "rhs_dilation": (1, 2)}
    layout = {"dimension_numbers": ("NCHW", "HWIO", "NHWC"), "feature_group_count": 3}
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s)) for s in ((3, 9, 7, 14), (2, 3, 3, 6)))

    def loss(w, x):
        return jnp.sin(lax.conv_general_dilated(x, w, **shapes, **layout).astype(jnp.float32)).sum()

    got = pbkern.jit(jax.grad(loss))(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
    exact = jax.grad(loss)(
        w.astype(jnp.bfloat16).astype(jnp.float32), x.astype(jnp.bfloat16).astype(jnp.float32)
    )
    assert float(jnp.abs(got.astype(jnp.float32) - exact).max()) <= 0.03 * float(
        jnp.abs(exact).max()
    )


def test_one_pair_of_features_is_packed():
    """The gradient of an image with two output features: a reduced dimension of one word."""
    layout = {"padding": [(0, 2), (2, 2), (2, 0)], "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
        for s in ((8, 5, 8, 5, 64), (1, 5, 3, 64, 2))
    )

    def loss(x, w):
        y = lax.conv_general_dilated(
            x, w, (3, 1, 1), lhs_dilation=(2, 1, 1), rhs_dilation=(2, 1, 1), **layout
        )
        return jnp.sin(y.astype(jnp.float32)).sum()

    got, exact = (
        pbkern.jit(jax.grad(loss))(x, w),
        jax.grad(loss)(x.astype(jnp.float32), w.astype(jnp.float32)),
    )
    assert float(jnp.abs(got.astype(jnp.float32) - exact).max()) <= 0.03 * float(
        jnp.abs(exact).max()
    )


@pytest.mark.parametrize(
    ("left", "right"), [("int8", "int8"), ("uint8", "int8"), ("int16", "int16"), ("uint8", "uint8")]
)
@pytest.mark.parametrize("depth", [8191, 8200, 16386, 40001])
def test_deep_products_of_narrow_integers(left, right, depth):
    """Words are summed in runs, whose panels stay in a near cache; sums wrap around as int32."""
    rng = np.random.default_rng(depth)
    x, y = (
        rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
        for dtype, shape in ((left, (17, depth)), (right, (depth, 37)))
    )
    product = lambda x, y: jax.lax.dot(
        x.astype("int32"), y.astype("int32"), preferred_element_type=jnp.int32
    )
    exact = x.astype("i8") @ y.astype("i8")
    want = exact.astype("i4")
    np.testing.assert_array_equal(pbkern.jit(product)(x, y), want)
    scaled = pbkern.jit(lambda x, y: product(x, y) * 0.5 + 1)(x, y)
    np.testing.assert_allclose(scaled, want * np.float32(0.5) + 1, rtol=1e-6)
