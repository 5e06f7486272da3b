"""Every access rule against JAX, at whole blocks and at odd ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .checking import check, check_blocks, compare, ints, planned, rand

X = rand(13, 22)
Y = rand(4, 7, 10)
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, w, **kw):
    kw.setdefault("dimension_numbers", NHWC)
    return lax.conv_general_dilated(
        x, w, kw.pop("strides", (1, 1)), kw.pop("padding", "VALID"), **kw
    )


IMAGE = rand(2, 11, 13, 4)

CASES = {
    "broadcast_unit": (lambda x: x[:, :1] * x + x[:1], X),
    "broadcast_new_dim": (lambda x: x[:, None, :] + x[None, :13, :], X),
    "scalar_operand": (lambda x, s: jnp.where(s > 0, x, s) + s, X, rand()),
    "reshape_merge": (lambda x: jnp.sin(x).reshape(28, 10) * 2, Y),
    "reshape_split": (lambda x: jnp.sin(x.reshape(28, 10).reshape(4, 7, 5, 2)) * 2, Y),
    "reshape_transposed": (lambda x: lax.reshape(jnp.sin(x), (20, 14), (1, 2, 0)) * 2, Y),
    "reshape_transposed_square": (
        lambda x: lax.reshape(jnp.sin(x[:, :13]), (13, 13), (1, 0)) * 2,
        X,
    ),
    "reshape_unit": (lambda x: jnp.sin(x.reshape(13, 1, 22, 1)) + 1, X),
    "reshape_mixed": (lambda x: jnp.exp(x.reshape(7, 4, 10)) + 1, Y),
    "reshape_then_transpose": (lambda x: jnp.sin(x).reshape(13, 2, 11).transpose(1, 0, 2) + 1, X),
    "squeeze": (lambda x: jnp.squeeze(x[:, 2:3] * 2, 1) + 1, X),
    "transpose": (lambda x: x.T * 2 + 1, X),
    "transpose_and_self": (lambda x: x + x.T, rand(17, 17)),
    "transpose3": (lambda x: jnp.tanh(x.transpose(2, 0, 1)), Y),
    "slice_strided": (lambda x: x[1::2, 3::3] + x[:-1:2, 1:-2:3], X),
    "slices_apart": (lambda x: x[:, :4] * x[:, -4:], rand(9, 300)),
    "pad": (lambda x: jnp.pad(x, ((2, 3), (1, 0)), constant_values=7) * 2, X),
    "pad_negative": (lambda x: lax.pad(x * 2, 0.5, ((-2, 3, 0), (4, -5, 0))) + 1, X),
    "pad_interior": (lambda x: lax.pad(x * 2, 0.5, ((1, 0, 1), (-1, 2, 2))) + 1, X),
    "pad_edge": (lambda x: jnp.pad(x, 2, mode="edge") * 2, X),
    "pad_edge_line": (lambda x: jnp.pad(x, 2, mode="edge") * 2, rand(501)),
    "reshaped_element": (
        lambda x: jnp.concatenate([x, x[5].reshape(1), (-x[7]).reshape(1), x * 2]),
        rand(501),
    ),
    "pad_only": (lambda x: lax.pad(x, 3.0, ((20, 0, 0), (0, 0, 0)))[:15] * 2, X),
    "concatenate": (lambda x: jnp.concatenate([x * 2, x[:5], x[3:]], 0) + 1, X),
    "concatenate_columns": (lambda x: jnp.concatenate([x, x[:, ::2]], 1) + 1, X),
    "roll": (lambda x: jnp.roll(x, 2, 0) + jnp.roll(x, -3, 1) - x, X),
    "stack": (lambda x: jnp.stack([x, x * 2], 1), X),
    "stack_derivative": (jax.grad(lambda x: (jnp.stack([x, x * 2, jnp.sin(x)], 1) ** 2).sum()), X),
    "unstack": (lambda x: sum(k * y for k, y in enumerate(jnp.unstack(x * 2, axis=1))), X),
    "tile": (lambda x: jnp.tile(x * 2, (2, 3)) + 1, X),
    "tile_derivative": (jax.grad(lambda x: (jnp.tile(x, (2, 1, 3)) ** 3).sum()), X),
    "roll_by_nothing_derivative": (
        jax.grad(lambda x: (jnp.roll(x, (1, 0), (0, 1)) ** 2 * x).sum()),
        X,
    ),
    "rev": (lambda x: x[::-1] + x[:, ::-1], X),
    "iota": (lambda x: x + jnp.arange(22) * jnp.arange(13)[:, None], X),
    "reduce_max": (lambda x: x.max(0) - x.min(0), X),
    "reduce_prod": (lambda x: jnp.prod(x, (0, 2)), Y),
    "reduce_all": (lambda x: x.sum() + x.max(), X),
    "reduce_logic": (lambda x: (jnp.any(x > 2, 1), jnp.all(x > -2, 1)), X),
    "argmax": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)), X),
    "cumsum": (lambda x: jnp.cumsum(x, 1) + lax.cummax(x, 0), X),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1, reverse=True) * 2, X),
    "sort": (lambda x: jnp.sort(x, 1) + 1, X),
    "argsort": (lambda x: jnp.argsort(x, 0), X),
    "dot_transposed": (lambda x: x.T @ x, X),
    "dot_batched": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), Y, rand(4, 9, 10)),
    "dot_outer_dims": (lambda x, w: jnp.einsum("bij,jkl->bikl", x, w), Y, rand(10, 3, 5)),
    "dot_vector": (lambda x, v: jnp.tanh(x @ v), X, rand(22)),
    "conv_stride": (
        lambda x, w: conv(x, w, strides=(2, 3), padding="SAME"),
        IMAGE,
        rand(3, 3, 4, 6),
    ),
    "conv_dilated": (lambda x, w: conv(x, w, rhs_dilation=(2, 1)), IMAGE, rand(3, 2, 4, 6)),
    "conv_transposed": (
        lambda x, w: conv(x, w, lhs_dilation=(2, 2), padding=((1, 2), (2, 1))),
        IMAGE,
        rand(3, 3, 4, 6),
    ),
    "conv_transposed_one_tap": (
        lambda x, w: conv(x, w, lhs_dilation=(2, 3), padding=((0, 1), (1, 2))),
        IMAGE,
        rand(1, 1, 4, 6),
    ),
    "conv_transposed_patches": (
        lambda x, w: (
            conv(x, w, lhs_dilation=(3, 4), padding=((2, 1), (-1, 6)), feature_group_count=2) + 1
        ),
        IMAGE,
        rand(3, 2, 2, 6),
    ),
    "conv_transposed_mixed": (
        lambda x, w: conv(x, w, lhs_dilation=(2, 2), padding=((1, 2), (0, 3))),
        IMAGE,
        rand(3, 2, 4, 6),
    ),
    "conv_transposed_row_patches": (
        lambda x, w: conv(x, w, lhs_dilation=(1, 2), padding=((1, 2), (0, 1))),
        IMAGE,
        rand(3, 2, 4, 6),
    ),
    "conv_transposed_channels_first": (
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            ((1, 1), (2, 0)),
            lhs_dilation=(2, 3),
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        ),
        rand(2, 4, 5, 6),
        rand(3, 4, 2, 3),
    ),
    "conv_one_pixel_of_72_channels": (
        lambda x, w: conv(x, w),
        rand(1, 1, 1, 30),
        rand(1, 1, 30, 72),
    ),
    "conv_depthwise": (lambda x, w: conv(x, w, feature_group_count=4), IMAGE, rand(3, 3, 1, 8)),
    "conv_groups": (lambda x, w: conv(x, w, feature_group_count=2), IMAGE, rand(3, 3, 2, 6)),
    "conv_batch_groups": (lambda x, w: conv(x, w, batch_group_count=2), IMAGE, rand(3, 3, 4, 6)),
    "conv_1d": (
        lambda x, w: lax.conv_general_dilated(x, w, (2,), ((3, 1),)),
        rand(2, 3, 19),
        rand(5, 3, 4),
    ),
    "max_pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "SAME"),
        IMAGE,
    ),
    "avg_pool": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 1, 2, 1), "VALID") / 6,
        IMAGE,
    ),
    "gather_rows": (lambda x, i: jnp.take(x, i, axis=0) * 2, X, ints(9, high=13)),
    "gather_columns": (lambda x, i: jnp.take(x, i, axis=1, mode="clip") * 2, X, ints(9, high=30)),
    "gather_along": (lambda x, i: jnp.take_along_axis(x, i, 1) + 1, X, ints(13, 5, high=22)),
    "gather_2d": (lambda x, i: x[i, i + 1] * 2, X, ints(9, high=12)),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (i[0], 0), (4, 22)) * 2,
        X,
        ints(1, high=13),
    ),
    "dynamic_update": (
        lambda x, i: lax.dynamic_update_slice(x * 2, x[:3, :], (i[0], 0)) + 1,
        X,
        ints(1, high=13),
    ),
    "clamp": (lambda x, lo: lax.clamp(lo, x, 1.0), X, rand()),
    "split": (lambda x: sum(jnp.split(x, 2, axis=1)), X),
    "bf16": (
        lambda x: jax.nn.softmax(x.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16),
        X,
    ),
    "integers": (lambda x: jnp.where(x % 3 == 0, x // 2, ~x ^ 5) << 1, ints(13, 22)),
    "bools": (lambda x: (x > 0) & ~(x > 1) | jnp.isnan(x), X),
    "random_bits": (
        lambda k: jax.random.uniform(jax.random.wrap_key_data(k), (13, 22)),
        jnp.array([1, 2], jnp.uint32),
    ),
}

LEFT = {"random_bits"}


@pytest.mark.apart
@pytest.mark.parametrize("name", CASES)
def test_equals_jax(name):
    f, *args = CASES[name]
    check(f, *args, left=name in LEFT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in CASES if n not in LEFT])
def test_equals_jax_at_odd_blocks(name, monkeypatch):
    f, *args = CASES[name]
    check_blocks(monkeypatch, f, *args, seeds=range(4))


def test_double_precision():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(13, 22)))
        plan = check(
            lambda x: jax.nn.softmax(jnp.pad(x, 1)) / 3 + jnp.arange(24), x, tolerance=1e-12
        )
        assert len(plan.kernels()) == 1


@pytest.mark.parametrize("padding", ["VALID", "SAME", ((1, 0), (2, 3))])
@pytest.mark.parametrize("first", [0.0, -np.inf, 2.5])
def test_windows_whose_start_is_an_array(first, padding):
    """Their bodies are jaxprs: one operation, or two side by side."""

    def one(x):
        return lax.reduce_window(x, jnp.asarray(first, x.dtype), lax.max, (3, 2), (2, 1), padding)

    def two(x):
        start = (jnp.asarray(1.0, x.dtype), jnp.asarray(first, x.dtype))
        both = lambda a, b: (a[0] + b[0], jnp.minimum(a[1], b[1]))
        return lax.reduce_window(
            (x, x * 2), start, both, (2, 3), (1, 2), padding, window_dilation=(2, 1)
        )

    for f in (one, two):
        plan = planned(f, rand(9, 11))
        assert not [left for s in plan.segments for left in s.left]
        compare(plan, f, (rand(9, 11),), 1e-6)


def test_windows_of_other_bodies_stay_with_xla():
    f = lambda x: lax.reduce_window(
        x, jnp.float32(0), lambda a, b: a + b * 0.5, (2, 2), (1, 1), "VALID"
    )
    plan = planned(f, rand(9, 11))
    assert [left.op for s in plan.segments for left in s.left] == ["reduce_window"]
