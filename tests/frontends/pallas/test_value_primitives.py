"""Primitives of values that only Pallas kernels have, and stores that add, many in one kernel, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from pbkern.core.errors import UnsupportedOp

F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 8)).astype("f4")
N = RNG.integers(-(2**31), 2**31 - 1, (4, 8), np.int64).astype("i4")


def of_each(functions, *args):
    """What functions of whole arrays return, all computed by one kernel."""

    def kernel(*refs):
        given = [r[...] for r in refs[: len(args)]]
        pl.delay(1)
        for f, out in zip(functions.values(), refs[len(args) :], strict=True):
            out[...] = f(*given)
        plt.debug_barrier()

    shapes = [jax.eval_shape(f, *args) for f in functions.values()]
    return dict(zip(functions, map(np.asarray, pl.pallas_call(kernel, out_shape=shapes)(*args))))


def parts(n, k, dtype):
    """The k-th part of each word."""
    return np.ascontiguousarray(n).view(dtype).reshape(*n.shape, -1)[..., k]


def nibbles(n):
    """The eight 4-bit numbers of each word, lowest first, each in a row of its own."""
    rows = [(n.view("u4") >> np.uint32(4 * k)) & np.uint32(15) for k in range(8)]
    return np.stack(rows, 1).reshape(-1, n.shape[1]).astype("i4")


def test_values():
    half = lambda x: x.astype(BF16).astype(F32)
    functions = {
        "roll": lambda x, n, s: pltpu.roll(x, 3, 1),
        "roll by a computed number": lambda x, n, s: pltpu.roll(x, s[0] & 3, 0),
        "roll of rows": lambda x, n, s: pltpu.roll(n, 6, 1, stride=3, stride_axis=0),
        "reciprocal": lambda x, n, s: pl.reciprocal(x, approx=True),
        "tanh": lambda x, n, s: plt.approx_tanh(x),
        "halves": lambda x, n, s: pltpu.pack_elementwise([x, x * 2], packed_dtype=BF16),
        "bytes": lambda x, n, s: pltpu.pack_elementwise(
            [n, n >> 9, n * 3, n + 1], packed_dtype=jnp.int8
        ),
        "second half": lambda x, n, s: pltpu.unpack_elementwise(
            n & 0x3FFF3FFF, index=1, packed_dtype=BF16, unpacked_dtype=F32
        ),
        "third byte": lambda x, n, s: pltpu.unpack_elementwise(
            n, index=2, packed_dtype=jnp.int8, unpacked_dtype=I32
        ),
        "last byte": lambda x, n, s: pltpu.unpack_elementwise(
            n, index=3, packed_dtype=jnp.uint8, unpacked_dtype=jnp.uint32
        ),
        "nibbles": lambda x, n, s: pltpu.bitcast(n, jnp.int4).astype(I32),
        "nibbles without a sign": lambda x, n, s: pltpu.bitcast(n, jnp.uint4).astype(I32),
        "nibbles back": lambda x, n, s: pltpu.bitcast(pltpu.bitcast(n, jnp.int4), I32),
        "for this machine": lambda x, n, s: lax.platform_dependent(
            x, cpu=lambda x: x + 1, default=lambda x: x * 3
        ),
        "hints": lambda x, n, s: x + pl.multiple_of(s[1], 2).astype(F32),
    }
    got = of_each(functions, X, N, np.array([7, 4], "i4"))
    packed = [half(X), half(X * 2)]
    n8 = [n.astype("i1").astype("u1").astype("u4") for n in (N, N >> 9, N * 3, N + 1)]
    want = {
        "roll": np.roll(X, 3, 1),
        "roll by a computed number": np.roll(X, 3, 0),
        "roll of rows": np.stack([np.roll(row, 6 + 3 * k) for k, row in enumerate(N)]),
        "reciprocal": 1 / X,
        "tanh": np.tanh(X.astype("f8")),
        "halves": sum(
            np.asarray(p).view("u4") >> np.uint32(16 - 16 * k) for k, p in enumerate(packed)
        ),
        "bytes": sum(n << np.uint32(8 * k) for k, n in enumerate(n8)),
        "second half": parts(N & 0x3FFF3FFF, 1, ml_dtypes.bfloat16).astype("f4"),
        "third byte": parts(N, 2, "i1").astype("i4"),
        "last byte": parts(N, 3, "u1").astype("u4"),
        "nibbles": (nibbles(N) ^ 8) - 8,
        "nibbles without a sign": nibbles(N),
        "nibbles back": N,
        "for this machine": X + 1,
        "hints": X + 4,
    }
    for name, w in want.items():
        assert got[name].shape == w.shape, name
        exact = w.dtype.kind in "iu" or "half" in name
        np.testing.assert_allclose(got[name], w, rtol=0 if exact else 2e-6, atol=0, err_msg=name)


def test_values_that_only_one_machine_has():
    def exp2(x):
        made = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return plt.elementwise_inline_asm("ex2.approx.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
                                          result_shape_dtypes=[made])[0]  # fmt: skip

    with pytest.raises(UnsupportedOp, match="inline assembly in a Pallas kernel"):
        of_each({"asm": exp2}, X)
    with pytest.raises(UnsupportedOp, match="no branch for the CPU"):
        of_each(
            {
                "branch": lambda x: lax.platform_dependent(
                    x, tpu=lambda x: x + 1, cuda=lambda x: x * 3
                )
            },
            X,
        )


def test_stores_that_add_and_masks():
    """Through what an access can express; through a reshape and to 8-bit floats, which are read and written back."""
    f8 = jnp.float8_e4m3fn
    small = np.array([[1, 2, -3, 0.5], [4, 5, 6, 7]], "f4").astype(ml_dtypes.float8_e4m3fn)

    def kernel(x_ref, small_ref, a_ref, b_ref, c_ref, d_ref, e_ref, f_ref):
        for ref in (a_ref, b_ref, d_ref, e_ref, f_ref):
            ref[...] = x_ref[...]
        jax.ref.addupdate(a_ref, (pl.ds(1, 2), slice(None)), x_ref[0:2, :])
        jax.ref.addupdate(a_ref.T, (3, slice(None)), lax.iota(F32, 4) + 1)
        jax.ref.addupdate(
            b_ref.reshape(2, 2, 8).at[1].reshape(16), (pl.ds(2, 9),), jnp.arange(9, dtype=F32)
        )
        c_ref[...] = small_ref[...]
        jax.ref.addupdate(c_ref, (0, pl.ds(1, 2)), jnp.full(2, 2, f8))
        odd = lax.broadcasted_iota(I32, (2, 8), 1) % 2 == 1
        plt.atomic_add(d_ref, (pl.ds(1, 2), slice(None)), jnp.ones((2, 8), F32), mask=odd)
        plt.store(e_ref.at[pl.ds(0, 2), :], plt.load(x_ref.at[pl.ds(2, 2), :]))
        shuffled = f_ref.reshape(8, 4).transpose((1, 0))
        shuffled[pl.ds(1, 2), 3] = lax.iota(F32, 2) + 8
        shuffled[0] = shuffled[3] * 2

    whole = jax.ShapeDtypeStruct((4, 8), F32)
    shapes = [whole, whole, jax.ShapeDtypeStruct((2, 4), f8), whole, whole, whole]
    a, b, c, d, e, f = (
        np.array(r).astype("f8") for r in pl.pallas_call(kernel, out_shape=shapes)(X, small)
    )
    want = X.astype("f8")
    want[1:3] += X[:2]
    want[:, 3] += [1, 2, 3, 4]
    np.testing.assert_allclose(a, want, rtol=1e-6)
    want = X.astype("f8").ravel()
    want[18:27] += np.arange(9)
    np.testing.assert_allclose(b.ravel(), want, rtol=1e-6)
    np.testing.assert_array_equal(c, [[1, 4, -1, 0.5], [4, 5, 6, 7]])
    want = X.astype("f8")
    want[1:3, 1::2] += 1
    np.testing.assert_allclose(d, want, rtol=1e-6)
    np.testing.assert_array_equal(e, np.concatenate([X[2:], X[2:]]))
    want = X.astype("f8").reshape(8, 4)
    want[3, 1:3] = [8, 9]
    want[:, 0] = want[:, 3] * 2
    np.testing.assert_array_equal(f.reshape(8, 4), want)


def test_indices_after_indices_and_other_views():
    def kernel(x_ref, n_ref, at_ref, *outs):
        at = at_ref[...]
        values = [
            x_ref.at[at].at[:, pl.ds(2, 3)][1:],
            x_ref.reshape(32).at[at * 8 + 3].at[pl.ds(1, 2)][...],
            x_ref.reshape(8, 4).transpose((1, 0)).at[pl.ds(1, 2)][:, 2],
            n_ref.bitcast(jnp.int16)[5],
            n_ref.bitcast(jnp.int16).at[pl.ds(2, 2)].bitcast(F32)[...],
            n_ref.reshape(2, 2, 8).transpose((0, 2, 1))[1, 3],
        ]
        for value, out in zip(values, outs, strict=True):
            out[...] = value

    at = np.array([3, 0, 2], "i4")
    halves = N.view("i2").reshape(4, 8, 2).swapaxes(1, 2).reshape(8, 8)
    want = [
        X[at][1:, 2:5], X.ravel()[at * 8 + 3][1:3], X.reshape(8, 4).T[1:3, 2], halves[5], N.view("f4")[1:2],
        N.reshape(2, 2, 8).transpose(0, 2, 1)[1, 3],
    ]  # fmt: skip
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in want]
    for got, w in zip(pl.pallas_call(kernel, out_shape=shapes)(X, N, at), want, strict=True):
        np.testing.assert_array_equal(got, w)
