"""Every primitive's equation rebuilds from its spelling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.dsl import same_kernel

F32, BF16, I32, U8, BOOL = jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_


def kernel_of(f, *types):
    """A kernel that stores f(whole inputs)."""
    out = jax.eval_shape(f, *types)

    def body(*refs):
        results = f(*[r[...] for r in refs[: len(types)]])
        for ref, x in zip(refs[len(types) :], jax.tree.leaves(results)):
            ref[...] = x

    return pbkern.kernel(body, out_shape=jax.tree.leaves(out)).trace(*types)


def assert_rebuilds(k) -> str:
    text = str(k)
    again = pbkern.rebuild(text)
    assert same_kernel(k, again), f"{text}\n{k.body}\n{again.body}"
    assert str(again) == text
    return text


def s(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 floor is_finite lgamma log log1p logistic neg rsqrt sign sin sinh sqrt square tan tanh"
).split()


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    for dtype in (F32, BF16):
        assert "bind(" not in assert_rebuilds(kernel_of(getattr(lax, name), s((4, 8), dtype)))


@pytest.mark.parametrize("name", "add sub mul div rem max min pow atan2 nextafter".split())
def test_binary(name):
    f = getattr(lax, name)
    assert "bind(" not in assert_rebuilds(kernel_of(f, s((4, 8)), s((4, 8))))
    for literal in (2.5, 0.1, -0.0, np.inf, -np.inf, np.nan, 1e30):
        assert_rebuilds(kernel_of(lambda x: f(x, F32(literal)), s((4, 8))))  # noqa: B023
        assert_rebuilds(kernel_of(lambda x: f(F32(literal), x), s((4, 8))))  # noqa: B023


@pytest.mark.parametrize("name", "add sub mul div rem max min bitwise_and bitwise_or bitwise_xor shift_left "
                         "shift_right_logical shift_right_arithmetic eq ne lt le gt ge".split())  # fmt: skip
@pytest.mark.parametrize("dtype", [I32, U8, jnp.int8, jnp.uint32])
def test_integer_binary(name, dtype):
    f = getattr(lax, name)
    assert_rebuilds(kernel_of(f, s((4,), dtype), s((4,), dtype)))
    assert_rebuilds(kernel_of(lambda x: f(x, dtype(3)), s((4,), dtype)))
    assert_rebuilds(kernel_of(lambda x: f(dtype(3), x), s((4,), dtype)))


SHAPED = {
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 2, 8), (0, 2)), [s((4, 8))]),
    "full": (lambda: jnp.full((4, 8), 2.5, BF16), []),
    "full int": (lambda: jnp.zeros((4, 8), U8), []),
    "full bool": (lambda: jnp.ones((4, 8), bool), []),
    "reshape": (lambda x: lax.reshape(x, (8, 4)), [s((4, 8))]),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [s((4, 1, 8))]),
    "expand": (lambda x: lax.expand_dims(x, (1,)), [s((4, 8))]),
    "transpose": (lambda x: x.transpose(2, 0, 1), [s((4, 2, 8))]),
    "slice": (lambda x: x[1:3, ::2], [s((4, 8))]),
    "pad": (lambda x: lax.pad(x, F32(0), ((1, 2, 0), (0, -1, 1))), [s((4, 8))]),
    "concatenate": (lambda x, y: jnp.concatenate([x, y, x], 1), [s((4, 8)), s((4, 3))]),
    "rev": (lambda x: lax.rev(x, (0, 1)), [s((4, 8))]),
    "iota": (lambda: lax.broadcasted_iota(I32, (4, 8), 1), []),
    "arange": (lambda: jnp.arange(8), []),
    "select": (lambda x: jnp.where(x > 0, x, 0.0), [s((4, 8))]),
    "select by index": (lambda i, x: lax.select_n(i, x, -x, x * 2), [s((4,), I32), s((4,))]),
    "clamp": (lambda x: jnp.clip(x, 0.0, 1.0), [s((4, 8))]),
    "clamp bf16": (lambda x: lax.clamp(BF16(0.0), x, BF16(1.5)), [s((4, 8), BF16)]),
    "mixed shapes": (lambda x, y, z: (x + y) * z, [s((4, 8)), s((4, 1)), s(())]),
    "convert": (lambda x: x.astype(BF16).astype(I32).astype(bool), [s((4, 8))]),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, I32), [s((4, 8))]),
    "integer_pow": (lambda x: x**3 + x**-2, [s((4, 8))]),
    "round": (lambda x: jnp.round(x) + lax.round(x), [s((4, 8))]),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), [s((4, 8))]),
    "not": (lambda x: ~(x > 0) | (x < -1), [s((4, 8))]),
    "population_count": (lambda x: lax.population_count(x) + lax.clz(x), [s((4,), U8)]),
    "complex": (lambda x, y: lax.real(lax.complex(x, y) * 2j) + lax.imag(lax.conj(lax.complex(x, y))), [s((4,))] * 2),
    "split": (lambda x: jnp.split(x, 2, axis=1), [s((4, 8))]),
    "sort": (lambda x: jnp.sort(x, axis=0), [s((4, 8))]),
    "argsort": (lambda x: jnp.argsort(x), [s((8,))]),
    "sort two": (lambda x, y: lax.sort((x, y), num_keys=2), [s((4, 8)), s((4, 8), I32)]),
    "top_k": (lambda x: lax.top_k(x, 3), [s((4, 8))]),
    "dot": (lambda x, y: x @ y, [s((4, 8)), s((8, 4))]),
    "dot bf16": (lambda x, y: jnp.dot(x, y, preferred_element_type=F32), [s((4, 8), BF16), s((8, 4), BF16)]),
    "dot highest": (lambda x, y: jnp.dot(x, y, precision="highest"), [s((4, 8)), s((8, 4))]),
    "dot batched": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), [s((2, 4, 8)), s((2, 3, 8))]),
    "dot int": (lambda x, y: jnp.dot(x, y), [s((4, 8), I32), s((8, 4), I32)]),
    "matvec": (lambda x, y: x @ y, [s((4, 8)), s((8,))]),
    "conv": (lambda x, w: lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
             [s((1, 8, 8, 3)), s((3, 3, 3, 4))]),
    "conv groups": (lambda x, w: lax.conv_general_dilated(x, w, (1,), [(1, 1)], rhs_dilation=(2,), feature_group_count=4),
                    [s((1, 4, 16)), s((4, 1, 3))]),
    "max pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), [s((4, 8))]),
    "avg pool": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"), [s((4, 8))]),
    "min pool": (lambda x: lax.reduce_window(x, jnp.iinfo(I32).max, lax.min, (2,), (1,), "SAME"), [s((8,), I32)]),
    "take": (lambda x, i: jnp.take(x, i, axis=0), [s((4, 8)), s((3,), I32)]),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, axis=1), [s((4, 8)), s((4, 1), I32)]),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 8)), [s((4, 8)), s((), I32)]),
    "dynamic_update": (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), [s((4, 8)), s((2, 8)), s((), I32)]),
    "scatter": (lambda x, i: x.at[i].set(1.0), [s((4, 8)), s((3,), I32)]),
    "scatter-add": (lambda x, i: x.at[i].add(x[:3]), [s((4, 8)), s((3,), I32)]),
    "scatter-sub": (lambda x, i: x.at[i].subtract(x[:3]), [s((4, 8)), s((3,), I32)]),
    "scatter-max": (lambda x, i: x.at[i].max(0.0), [s((4, 8)), s((3,), I32)]),
    "softmax": (lambda x: jax.nn.softmax(x, axis=-1), [s((4, 8))]),
    "gelu": (jax.nn.gelu, [s((4, 8), BF16)]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), [s((4, 8))]),
    "relu": (jax.nn.relu, [s((4, 8))]),
    "layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5), [s((4, 8), BF16)]),
    "floor_divide": (lambda x: x // 3 + x % 5, [s((4, 8), I32)]),
    "median": (lambda x: jnp.median(x, axis=1), [s((4, 8))]),
    "searchsorted": (lambda x, y: jnp.searchsorted(x, y), [s((8,)), s((4,))]),
    "igamma": (lambda x, y: lax.igamma(x, y) + lax.betainc(x, x, y), [s((4,)), s((4,))]),
    "polygamma": (lambda x: lax.polygamma(x, x), [s((4,))]),
    "fft-free hypot": (lambda x, y: jnp.hypot(x, y), [s((4,)), s((4,))]),
    "cross": (lambda x, y: jnp.cross(x, y), [s((4, 3)), s((4, 3))]),
    "where nan": (lambda x: jnp.where(jnp.isnan(x), jnp.inf, x), [s((4,))]),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPED)
def test_equation(case):
    f, types = SHAPED[case]
    assert_rebuilds(kernel_of(f, *types))


@pytest.mark.parametrize("name", "sum max min prod".split())
@pytest.mark.parametrize("dtype", [F32, BF16, I32, U8])
def test_reduction(name, dtype):
    text = assert_rebuilds(
        kernel_of(lambda x: getattr(lax, f"reduce_{name}")(x, (1,)), s((4, 8), dtype))
    )
    assert "bind(" not in text
    assert_rebuilds(kernel_of(lambda x: getattr(jnp, name)(x, axis=0), s((4, 8), dtype)))


@pytest.mark.parametrize(
    "name", "any all argmax argmin cumsum cumprod cummax cummin cumlogsumexp".split()
)
def test_reduction_of_other_kinds(name):
    f = getattr(jnp, name, None) or getattr(lax, name)
    x = s((4, 8), BOOL) if name in ("any", "all") else s((4, 8))
    assert "bind(" not in assert_rebuilds(kernel_of(lambda x: f(x, axis=1), x))


def test_parameters_that_functions_cannot_say_are_bound():
    text = assert_rebuilds(
        kernel_of(lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), s((4,)))
    )
    assert "pbkern.bind('exp'" in text


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int64, jnp.uint64])
def test_64_bit_values(dtype):
    with jax.enable_x64(True):
        k = kernel_of(lambda x: x * 3 + jnp.arange(4).astype(dtype) + dtype(7), s((4,), dtype))
    assert k.body.jaxpr.eqns[-1].invars[1].aval.dtype == dtype
    assert_rebuilds(k)


def test_bodies_with_64_bit_python_numbers():
    for case in ("max pool", "avg pool", "where nan", "clamp", "floor_divide", "take", "gelu"):
        f, types = SHAPED[case]
        out = jax.eval_shape(f, *types)

        def body(*refs, f=f, types=types):
            n = len(types)
            wide = f(*[r[...] for r in refs[:n]]) + lax.iota(jnp.int64, 1)[0]
            refs[n][...] = wide.astype(F32)

        assert_rebuilds(pbkern.kernel(body, out_shape=s(out.shape, F32), x64=True).trace(*types))


def test_small_floats():
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        assert_rebuilds(kernel_of(lambda x: x.astype(F32) + 1, s((4,), dtype)))
