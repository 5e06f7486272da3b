"""What is measured: each workload as an ordinary jax.numpy function, its shapes, its work, and the same in NumPy.

Flops count multiply-adds as two and any other arithmetic on one element as one. Compulsory bytes are every
argument read once and every result written once; a workload that passes over more data than the caches of the cores
hold says so in `l3_bytes`. The NumPy functions are the reference (in float64, at small shapes) and a peer (in float32,
at full size); those of torch_peers.py are peers only.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .matrix_products import PRODUCTS
from .workload import Spec, Workload

BINOMIAL = np.array([1, 4, 6, 4, 1], np.float32) / 16
SOBEL = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]], np.float32) / 12
NHWC = ("NHWC", "HWIO", "NHWC")


# --- image pipelines ------------------------------------------------------------------------------------------------


def blur(image):
    """float32[c, h, w] -> float32[c, h - 4, w - 4]: horizontal, then vertical convolution."""
    x = lax.conv_general_dilated(image[:, None], BINOMIAL.reshape(1, 1, 1, 5), (1, 1), "VALID")
    return lax.conv_general_dilated(x, BINOMIAL.reshape(1, 1, 5, 1), (1, 1), "VALID")[:, 0]


def numpy_blur(image):
    h, w = image.shape[1:]
    x = sum(BINOMIAL[i] * image[:, :, i : w - 4 + i] for i in range(5))
    return sum(BINOMIAL[i] * x[:, i : h - 4 + i] for i in range(5))


def blur_slices(image):
    """The same blur written with slices."""
    return numpy_blur(image)


def unsharp(image):
    """float32[h, w, c] -> float32[h - 4, w - 4, c]: the difference to a blur, amplified where it is not noise."""
    h, w, _ = image.shape
    rows = sum(BINOMIAL[i] * image[i : h - 4 + i] for i in range(5))
    blurred = sum(BINOMIAL[i] * rows[:, i : w - 4 + i] for i in range(5))
    centre = image[2:-2, 2:-2]
    return jnp.where(jnp.abs(centre - blurred) < 0.01, centre, 1.5 * centre - 0.5 * blurred)


def numpy_unsharp(image):
    h, w, _ = image.shape
    rows = sum(BINOMIAL[i] * image[i : h - 4 + i] for i in range(5))
    blurred = sum(BINOMIAL[i] * rows[:, i : w - 4 + i] for i in range(5))
    centre = image[2:-2, 2:-2]
    return np.where(np.abs(centre - blurred) < 0.01, centre, 1.5 * centre - 0.5 * blurred)


def unsharp_conv(image):
    """float32[h, w, c] -> the same shape: unsharp written with padded convolutions, one channel at a time."""
    x = image.transpose(2, 0, 1)[:, None]
    x = lax.conv_general_dilated(x, BINOMIAL.reshape(1, 1, 5, 1), (1, 1), "SAME")
    x = lax.conv_general_dilated(x, BINOMIAL.reshape(1, 1, 1, 5), (1, 1), "SAME")[:, 0].transpose(
        1, 2, 0
    )
    return jnp.where(jnp.abs(image - x) < 0.01, image, 1.5 * image - 0.5 * x)


def numpy_unsharp_conv(image):
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    h, w, _ = padded.shape
    rows = sum(BINOMIAL[i] * padded[i : h - 4 + i] for i in range(5))
    blurred = sum(BINOMIAL[i] * rows[:, i : w - 4 + i] for i in range(5))
    return np.where(np.abs(image - blurred) < 0.01, image, 1.5 * image - 0.5 * blurred)


def harris(image):
    """float32[h, w] -> float32[h - 4, w - 4]: corner response from gradients summed over 3 by 3 windows."""

    def box(a):
        h, w = a.shape
        return sum(a[i : h - 2 + i, j : w - 2 + j] for i in range(3) for j in range(3))

    def sobel(a):
        h, _ = a.shape
        return (
            sum(k * (a[i : h - 2 + i, 2:] - a[i : h - 2 + i, :-2]) for i, k in enumerate((1, 2, 1)))
            / 12
        )

    ix, iy = sobel(image), sobel(image.T).T
    xx, yy, xy = box(ix * ix), box(iy * iy), box(ix * iy)
    return xx * yy - xy * xy - 0.04 * (xx + yy) ** 2


def harris_conv(image):
    """float32[h, w] -> the same shape: Harris written with padded convolutions."""

    def conv(a, kernel):
        return lax.conv_general_dilated(
            a[None, None], jnp.asarray(kernel)[None, None], (1, 1), "SAME"
        )[0, 0]

    ones = np.ones((3, 3), np.float32)
    ix, iy = conv(image, SOBEL), conv(image, SOBEL.T)
    xx, yy, xy = conv(ix * ix, ones), conv(iy * iy, ones), conv(ix * iy, ones)
    return xx * yy - xy * xy - 0.04 * (xx + yy) ** 2


def numpy_harris_conv(image):
    def conv(a, kernel):
        padded, (h, w) = np.pad(a, 1), a.shape
        return sum(kernel[i, j] * padded[i : h + i, j : w + j] for i in range(3) for j in range(3))

    ones = np.ones((3, 3), np.float32)
    ix, iy = conv(image, SOBEL), conv(image, SOBEL.T)
    xx, yy, xy = conv(ix * ix, ones), conv(iy * iy, ones), conv(ix * iy, ones)
    return xx * yy - xy * xy - 0.04 * (xx + yy) ** 2


# --- convolutions and products --------------------------------------------------------------------------------------


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)


def numpy_conv(x, w, stride=1):
    n, height, width, _ = x.shape
    kh, kw, _, channels = w.shape
    out = [-(-size // stride) for size in (height, width)]
    around = [
        max((o - 1) * stride + k - size, 0) for o, k, size in zip(out, (kh, kw), (height, width))
    ]
    x = np.pad(x, ((0, 0), *((p // 2, p - p // 2) for p in around), (0, 0)))
    result = np.zeros((n, *out, channels), x.dtype)
    for i in range(kh):
        for j in range(kw):
            rows, columns = (slice(k, k + stride * size, stride) for k, size in zip((i, j), out))
            result += x[:, rows, columns] @ w[i, j]
    return result


def conv_stem(x, w):
    """float32[n, h, w, 3], float32[7, 7, 3, o] -> float32[n, h / 2, w / 2, o]."""
    return conv(x, w, 2)


def conv_bias_relu(x, w, b):
    """float32[n, h, w, c], float32[3, 3, c, o], float32[o] -> float32[n, h, w, o]."""
    return jax.nn.relu(conv(x, w) + b)


def conv_residual_relu(x, w, b, residual):
    return jax.nn.relu(conv(x, w) + b + residual)


def matmul(a, b):
    return a @ b


def matmul_bf16(a, b):
    return a @ b


def gelu(x):
    return jax.nn.gelu(x)


def numpy_gelu(x):
    return (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * (x * x * x))))
    )


def matmul_bias_gelu(x, w, b):
    return gelu(x @ w + b)


def mlp(x, w1, b1, w2, b2):
    return gelu(x @ w1 + b1) @ w2 + b2


def mlp_gradient(x, w1, b1, w2, b2):
    """Loss sum(mlp ** 2) / 2 and its gradient with respect to all five arguments."""

    def loss(*arguments):
        return 0.5 * (mlp(*arguments) ** 2).sum()

    value, gradient = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))(x, w1, b1, w2, b2)
    return value, *gradient


def numpy_mlp_gradient(x, w1, b1, w2, b2):
    c = np.sqrt(2 / np.pi).astype(x.dtype)
    h = x @ w1 + b1
    t = np.tanh(c * (h + 0.044715 * h * h * h))
    a = 0.5 * h * (1 + t)
    y = a @ w2 + b2
    da = y @ w2.T
    dh = da * (0.5 * (1 + t) + 0.5 * h * (1 - t * t) * c * (1 + 3 * 0.044715 * h * h))
    return 0.5 * (y * y).sum(), dh @ w1.T, x.T @ dh, dh.sum(0), a.T @ y, y.sum(0)


# --- rows -----------------------------------------------------------------------------------------------------------


def softmax(x):
    return jax.nn.softmax(x, -1)


def numpy_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


def numpy_layer_norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


def rms_norm(x, g):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def numpy_rms_norm(x, g):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def cross_entropy(logits, labels):
    """float32[n, classes], int32[n] -> float32[n]."""
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jax.nn.logsumexp(logits, -1) - picked


def cross_entropy_one_hot(logits, labels):
    """The same, as it is often written: no index, a mask over the classes."""
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1)


def numpy_cross_entropy(logits, labels):
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return log_sum - np.take_along_axis(logits, labels[:, None], -1)[:, 0]


def elementwise(x):
    """Ten operations on each element."""
    y = jnp.exp(-x * x) * 0.5 + x
    return jnp.tanh(y) * y + jnp.sqrt(jnp.abs(x)) - 1.0


def numpy_elementwise(x):
    y = np.exp(-x * x) * np.float32(0.5) + x
    return np.tanh(y) * y + np.sqrt(np.abs(x)) - np.float32(1.0)


def sum_of_squares(x):
    return (x * x).sum()


def numpy_sum_of_squares(x):
    return np.dot(x, x)


# --- attention ------------------------------------------------------------------------------------------------------


def attention(q, k, v, causal=False):
    """float32[heads, tokens, width] three times -> the same shape."""
    s = jnp.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -1e30)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s, -1), v)


def numpy_attention(q, k, v, causal=False):
    s = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]).astype(q.dtype)
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, q.dtype.type(-1e30))
    return numpy_softmax(s) @ v


causal_attention = functools.partial(attention, causal=True)
numpy_causal_attention = functools.partial(numpy_attention, causal=True)
HEADS = 8


def transformer_block(x, qkv, projection, g1, b1, g2, b2, w1, c1, w2, c2):
    """float32[tokens, width] -> the same: layer norm, attention of 8 heads, layer norm, MLP, residual around both."""
    tokens, width = x.shape
    q, k, v = (
        (layer_norm(x, g1, b1) @ qkv)
        .reshape(tokens, 3, HEADS, width // HEADS)
        .transpose(1, 2, 0, 3)
    )
    x = x + attention(q, k, v).transpose(1, 0, 2).reshape(tokens, width) @ projection
    return x + mlp(layer_norm(x, g2, b2), w1, c1, w2, c2)


def numpy_transformer_block(x, qkv, projection, g1, b1, g2, b2, w1, c1, w2, c2):
    tokens, width = x.shape
    q, k, v = (
        (numpy_layer_norm(x, g1, b1) @ qkv)
        .reshape(tokens, 3, HEADS, width // HEADS)
        .transpose(1, 2, 0, 3)
    )
    x = x + numpy_attention(q, k, v).transpose(1, 0, 2).reshape(tokens, width) @ projection
    return x + numpy_gelu(numpy_layer_norm(x, g2, b2) @ w1 + c1) @ w2 + c2


def transformer_specs(tokens: int, width: int) -> tuple[Spec, ...]:
    s, small = Spec, width**-0.5
    return (
        s((tokens, width)), s((width, 3 * width), scale=small), s((width, width), scale=small),
        s((width,)), s((width,)), s((width,)), s((width,)),
        s((width, 4 * width), scale=small), s((4 * width,)), s((4 * width, width), scale=small / 2), s((width,)),
    )  # fmt: skip


# --- loops ----------------------------------------------------------------------------------------------------------


def gradient_descent(x, d, steps=100):
    """Least squares: float32[n, m], float32[n] -> float32[m], `steps` steps of rate 0.1 / n from zero."""
    rate = 0.1 / x.shape[0]
    return lax.fori_loop(
        0, steps, lambda _, w: w - rate * (x.T @ (x @ w - d)), jnp.zeros(x.shape[1], x.dtype)
    )


def numpy_gradient_descent(x, d, steps=100):
    rate, w = x.dtype.type(0.1 / x.shape[0]), np.zeros(x.shape[1], x.dtype)
    for _ in range(steps):
        w = w - rate * (x.T @ (x @ w - d))
    return w


def jacobi(x, steps=50):
    """float32[h, w] -> the same: each element becomes the mean of its four neighbours, zero outside, `steps` times."""

    def step(_, a):
        p = jnp.pad(a, 1)
        return 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])

    return lax.fori_loop(0, steps, step, x)


def numpy_jacobi(x, steps=50):
    a = x
    for _ in range(steps):
        p = np.pad(a, 1)
        a = p.dtype.type(0.25) * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])
    return a


def jacobi_at(x, steps=50):
    """Jacobi with the border held fixed: only inner elements are updated, in place."""

    def step(_, a):
        return a.at[1:-1, 1:-1].set(
            0.25 * (a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:])
        )

    return lax.fori_loop(0, steps, step, x)


def numpy_jacobi_at(x, steps=50):
    a = x.copy()
    for _ in range(steps):
        a[1:-1, 1:-1] = a.dtype.type(0.25) * (
            a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]
        )
    return a


# --- the table ------------------------------------------------------------------------------------------------------


def _attention(name: str, tokens: int, causal: bool) -> Workload:
    scores = 16 * tokens * tokens * (0.5 if causal else 1.0)
    function, numpy_function = (
        (causal_attention, numpy_causal_attention) if causal else (attention, numpy_attention)
    )
    return Workload(
        name, function, (Spec((16, tokens, 64)),) * 3, (Spec((2, 67, 16)),) * 3, scores * (4 * 64 + 5), numpy_function,
        note="half of the scores are masked and not counted" if causal else "",
    )  # fmt: skip


def _matmul(n: int) -> Workload:
    return Workload(
        f"matmul_{n}",
        matmul,
        (Spec((n, n)),) * 2,
        (Spec((65, 130)), Spec((130, 70))),
        2.0 * n**3,
        matmul,
    )


MLP = (
    Spec((256, 768)),
    Spec((768, 1024), scale=0.04),
    Spec((1024,)),
    Spec((1024, 768), scale=0.03),
    Spec((768,)),
)
SMALL_MLP = (
    Spec((17, 24)),
    Spec((24, 40), scale=0.2),
    Spec((40,)),
    Spec((40, 24), scale=0.2),
    Spec((24,)),
)
FRAME, SMALL_FRAME = (1080, 1920), (37, 53)
PLANES, SMALL_PLANES = (Spec((3, *FRAME)),), (Spec((3, *SMALL_FRAME)),)
PIXELS, SMALL_PIXELS = (Spec((*FRAME, 3)),), (Spec((*SMALL_FRAME, 3)),)
SQUARE, SMALL_SQUARE = (Spec((2048, 2048)),), (Spec(SMALL_FRAME),)
SAMPLES, SQUARE_SIZE = 1080 * 1920 * 3, 2048 * 2048
LOGITS = (Spec((8192, 32_000)), Spec((8192,), high=32_000))
SMALL_LOGITS = (Spec((13, 301)), Spec((13,), high=301))

WORKLOADS = {
    w.name: w
    for w in (
        Workload("blur", blur, PLANES, SMALL_PLANES, 18.0 * SAMPLES, numpy_blur),
        Workload("blur_slices", blur_slices, PLANES, SMALL_PLANES, 18.0 * SAMPLES, numpy_blur),
        Workload("unsharp", unsharp, PIXELS, SMALL_PIXELS, 24.0 * SAMPLES, numpy_unsharp),
        Workload("unsharp_conv", unsharp_conv, PIXELS, SMALL_PIXELS, 24.0 * SAMPLES,
                 numpy_unsharp_conv, note="padded"),
        Workload("harris", harris, SQUARE, SMALL_SQUARE, 50.0 * SQUARE_SIZE, harris),
        Workload("harris_conv", harris_conv, SQUARE, SMALL_SQUARE, 50.0 * SQUARE_SIZE,
                 numpy_harris_conv, note="padded"),
        Workload("conv_stem", conv_stem, (Spec((1, 224, 224, 3)), Spec((7, 7, 3, 64))),
                 (Spec((1, 31, 29, 3)), Spec((7, 7, 3, 9))), 2.0 * 112 * 112 * 64 * 147,
                 functools.partial(numpy_conv, stride=2)),
        Workload("conv_bias_relu", conv_bias_relu, (Spec((8, 56, 56, 64)), Spec((3, 3, 64, 64)), Spec((64,))),
                 (Spec((2, 9, 13, 8)), Spec((3, 3, 8, 12)), Spec((12,))), 2.0 * 8 * 56 * 56 * 64 * 9 * 64,
                 lambda x, w, b: np.maximum(numpy_conv(x, w) + b, 0)),
        Workload("conv_residual_relu", conv_residual_relu,
                 (Spec((8, 28, 28, 128)), Spec((3, 3, 128, 128)), Spec((128,)), Spec((8, 28, 28, 128))),
                 (Spec((2, 9, 13, 8)), Spec((3, 3, 8, 12)), Spec((12,)), Spec((2, 9, 13, 12))),
                 2.0 * 8 * 28 * 28 * 128 * 9 * 128, lambda x, w, b, r: np.maximum(numpy_conv(x, w) + b + r, 0)),
        _matmul(512), _matmul(1024), _matmul(2048),
        Workload("matmul_bf16_1024", matmul_bf16, (Spec((1024, 1024), jnp.bfloat16),) * 2,
                 (Spec((65, 130), jnp.bfloat16), Spec((130, 70), jnp.bfloat16)), 2.0 * 1024**3, matmul,
                 tolerance=1e-2, dtype="bfloat16"),
        *PRODUCTS,
        Workload("matmul_bias_gelu", matmul_bias_gelu, (Spec((512, 768)), Spec((768, 3072), scale=0.04), Spec((3072,))),
                 (Spec((17, 33)), Spec((33, 45)), Spec((45,))), 2.0 * 512 * 768 * 3072,
                 lambda x, w, b: numpy_gelu(x @ w + b)),
        Workload("softmax", softmax, (Spec((4096, 4096)),), (Spec((37, 301)),), 5.0 * 4096**2, numpy_softmax),
        Workload("layer_norm", layer_norm, (Spec((4096, 1024)), Spec((1024,)), Spec((1024,))),
                 (Spec((37, 51)), Spec((51,)), Spec((51,))), 8.0 * 4096 * 1024, numpy_layer_norm),
        Workload("rms_norm", rms_norm, (Spec((4096, 1024)), Spec((1024,))), (Spec((37, 51)), Spec((51,))),
                 5.0 * 4096 * 1024, numpy_rms_norm),
        _attention("attention_1024", 1024, False), _attention("attention_1024_causal", 1024, True),
        _attention("attention_2048", 2048, False), _attention("attention_2048_causal", 2048, True),
        Workload("elementwise", elementwise, (Spec((1 << 24,)),), (Spec((1003,)),), 10.0 * (1 << 24),
                 numpy_elementwise),
        Workload("sum_of_squares", sum_of_squares, (Spec((1 << 26,)),), (Spec((100_003,)),), 2.0 * (1 << 26),
                 numpy_sum_of_squares),
        Workload("gradient_descent", gradient_descent, (Spec((10_000, 200)), Spec((10_000,))),
                 (Spec((203, 21)), Spec((203,))), 100 * 4.0 * 10_000 * 200, numpy_gradient_descent,
                 l3_bytes=100 * 10_000 * 200 * 4.0, note="100 steps"),
        Workload("mlp_gradient", mlp_gradient, MLP, SMALL_MLP, 6 * 2.0 * 256 * 768 * 1024, numpy_mlp_gradient),
        Workload("transformer_block", transformer_block, transformer_specs(512, 512), transformer_specs(19, 32),
                 2.0 * 512 * 512 * 512 * 12 + 4.0 * 512 * 512 * 512, numpy_transformer_block),
        Workload("cross_entropy", cross_entropy, LOGITS, SMALL_LOGITS, 4.0 * 8192 * 32_000, numpy_cross_entropy),
        Workload("cross_entropy_one_hot", cross_entropy_one_hot, LOGITS, SMALL_LOGITS, 4.0 * 8192 * 32_000,
                 numpy_cross_entropy),
        Workload("jacobi", jacobi, SQUARE, SMALL_SQUARE, 50 * 4.0 * SQUARE_SIZE, numpy_jacobi,
                 note="50 steps"),
        Workload("jacobi_at", jacobi_at, SQUARE, SMALL_SQUARE, 50 * 4.0 * SQUARE_SIZE, numpy_jacobi_at,
                 note="50 steps"),
    )
}  # fmt: skip
