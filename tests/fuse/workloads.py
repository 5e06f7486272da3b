"""The functions whose fusion is promised: name -> (function, small arguments, full-size types, kernels)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .checking import ints, rand


def unsharp_slices(x):
    k = [1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16]
    h, w, _ = x.shape
    b = sum(k[i] * x[i : i + h - 4] for i in range(5))
    b = sum(k[i] * b[:, i : i + w - 4] for i in range(5))
    c = x[2:-2, 2:-2]
    return jnp.where(jnp.abs(c - b) < 0.01, c, 1.5 * c - 0.5 * b)


def unsharp_pads(x):
    return unsharp_slices(jnp.pad(x, ((2, 2), (2, 2), (0, 0))))


def unsharp_conv(x):
    k = jnp.array([1, 4, 6, 4, 1], "f") / 16
    y = x.transpose(2, 0, 1)[:, None]
    b = lax.conv_general_dilated(y, k.reshape(1, 1, 5, 1), (1, 1), "SAME")
    b = lax.conv_general_dilated(b, k.reshape(1, 1, 1, 5), (1, 1), "SAME")[:, 0].transpose(1, 2, 0)
    return jnp.where(jnp.abs(x - b) < 0.01, x, 1.5 * x - 0.5 * b)


def blur(x, kx, ky):
    layout = ("NHWC", "HWIO", "NHWC")
    a = lax.conv_general_dilated(x, kx, (1, 1), "VALID", dimension_numbers=layout)
    return lax.conv_general_dilated(a, ky, (1, 1), "VALID", dimension_numbers=layout)


def harris_slices(x):
    def box(a):
        h, w = a.shape
        return sum(a[i : h - 2 + i, j : w - 2 + j] for i in range(3) for j in range(3))

    def sobel(a):
        h, _w = a.shape
        return (
            sum(k * (a[i : h - 2 + i, 2:] - a[i : h - 2 + i, :-2]) for i, k in enumerate((1, 2, 1)))
            / 12
        )

    ix, iy = sobel(x), sobel(x.T).T
    xx, yy, xy = box(ix * ix), box(iy * iy), box(ix * iy)
    return xx * yy - xy * xy - 0.04 * (xx + yy) ** 2


def harris_convs(x):
    def conv(a, k):
        return lax.conv_general_dilated(
            a[None, None], jnp.asarray(k, "f")[None, None], (1, 1), "SAME"
        )[0, 0]

    sx, one = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]]), np.ones((3, 3))
    ix, iy = conv(x, sx), conv(x, sx.T)
    xx, yy, xy = conv(ix * ix, one), conv(iy * iy, one), conv(ix * iy, one)
    return xx * yy - xy * xy - 0.04 * (xx + yy) ** 2


def bias_gelu(x, b):
    return jax.nn.gelu(x + b)


def bias_gelu_erf(x, b):
    return jax.nn.gelu(x + b, approximate=False)


def softmax(x):
    return jax.nn.softmax(x, -1)


def layer_norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


def rms_norm(x, g):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def matmul_bias_gelu(x, w, b):
    return jax.nn.gelu(x @ w + b)


def conv_bias_relu(x, w, b, stride=1, layout=("NHWC", "HWIO", "NHWC")):
    y = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=layout)
    return jax.nn.relu(y + (b if layout[0] == "NHWC" else b[:, None, None]))


conv_stem = functools.partial(conv_bias_relu, stride=2)
conv_nchw = functools.partial(conv_bias_relu, layout=("NCHW", "OIHW", "NCHW"))


def log_softmax(x):
    return jax.nn.log_softmax(x)


def cross_entropy(logits, labels):
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1)


def attention(q, k, v, causal=False):
    s = jnp.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -1e30)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s, -1), v)


causal_attention = functools.partial(attention, causal=True)


def mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2


def sincos(x):
    return jnp.sin(x), jnp.cos(x)


def sum_of_squares(x):
    return (x * x).sum()


def column_sums(x):
    return (x * x).sum(0)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


WORKLOADS = {
    "unsharp_slices": (unsharp_slices, (rand(23, 31, 3),), (f32(1080, 1920, 3),), 1),
    "unsharp_pads": (unsharp_pads, (rand(23, 31, 3),), (f32(1080, 1920, 3),), 1),
    "unsharp_conv": (unsharp_conv, (rand(23, 31, 3),), (f32(1080, 1920, 3),), 1),
    "blur": (
        blur,
        (rand(3, 23, 31, 1), rand(1, 5, 1, 1), rand(5, 1, 1, 1)),
        (f32(3, 1080, 1920, 1), f32(1, 5, 1, 1), f32(5, 1, 1, 1)),
        1,
    ),
    "harris_slices": (harris_slices, (rand(23, 31),), (f32(2048, 2048),), 1),
    "harris_convs": (harris_convs, (rand(23, 31),), (f32(2048, 2048),), 1),
    "bias_gelu": (bias_gelu, (rand(37, 51), rand(51)), (f32(4096, 1024), f32(1024)), 1),
    "bias_gelu_erf": (bias_gelu_erf, (rand(37, 51), rand(51)), (f32(4096, 1024), f32(1024)), 1),
    "softmax": (softmax, (rand(37, 51),), (f32(4096, 1024),), 1),
    "softmax_wide": (softmax, (rand(7, 151),), (f32(4096, 4096),), 1),
    "layer_norm": (
        layer_norm,
        (rand(37, 51), rand(51), rand(51)),
        (f32(4096, 1024), f32(1024), f32(1024)),
        1,
    ),
    "rms_norm": (rms_norm, (rand(37, 51), rand(51)), (f32(4096, 1024), f32(1024)), 1),
    "matmul_bias_gelu": (
        matmul_bias_gelu,
        (rand(19, 33), rand(33, 45), rand(45)),
        (f32(512, 768), f32(768, 3072), f32(3072)),
        1,
    ),
    "conv_bias_relu": (
        conv_bias_relu,
        (rand(2, 9, 11, 4), rand(3, 3, 4, 6), rand(6)),
        (f32(8, 56, 56, 64), f32(3, 3, 64, 64), f32(64)),
        1,
    ),
    "conv_stem": (
        conv_stem,
        (rand(1, 15, 17, 3), rand(7, 7, 3, 5), rand(5)),
        (f32(1, 224, 224, 3), f32(7, 7, 3, 64), f32(64)),
        1,
    ),
    "conv_nchw": (
        conv_nchw,
        (rand(2, 4, 9, 11), rand(6, 4, 3, 3), rand(6)),
        (f32(8, 64, 56, 56), f32(64, 64, 3, 3), f32(64)),
        1,
    ),
    "log_softmax": (log_softmax, (rand(37, 51),), (f32(4096, 1024),), 1),
    "cross_entropy": (
        cross_entropy,
        (rand(13, 57), ints(13, high=57)),
        (f32(8192, 32000), i32(8192)),
        1,
    ),
    "attention": (
        attention,
        (rand(2, 17, 8), rand(2, 19, 8), rand(2, 19, 8)),
        (f32(16, 1024, 64),) * 3,
        1,
    ),
    "causal_attention": (
        causal_attention,
        (rand(2, 17, 8), rand(2, 17, 8), rand(2, 17, 8)),
        (f32(16, 2048, 64),) * 3,
        1,
    ),
    "mlp": (
        mlp,
        (rand(9, 12), rand(12, 20), rand(20), rand(20, 7), rand(7)),
        (f32(512, 768), f32(768, 3072), f32(3072), f32(3072, 768), f32(768)),
        2,
    ),
    "sincos": (sincos, (rand(37, 51),), (f32(1000, 1000),), 1),
    "sum_of_squares": (sum_of_squares, (rand(300001),), (f32(64 << 20),), 1),
    "column_sums": (column_sums, (rand(3001, 37),), (f32(100000, 200),), 1),
}
