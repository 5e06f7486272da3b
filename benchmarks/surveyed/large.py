"""Copies, sums and functions of arrays in memory, 12 to 130 MB, most of which begin rows anywhere in a cache line."""

import jax
import jax.numpy as jnp
from jax import lax

WIDE = "f32[3000,2001]"
TALL = "f32[3001,2003]"
SQUARE = "f32[2501,2501]"


def repeated(x, rows):
    return jnp.broadcast_to(x[0] * 2, (rows, x.shape[1]))


def heads(x):
    return x.reshape(*x.shape[:2], -1, 64).transpose(0, 2, 1, 3)


def together(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def layer_norm(x, g, b):
    m = x.mean(-1, keepdims=True)
    v = ((x - m) ** 2).mean(-1, keepdims=True)
    return (x - m) * lax.rsqrt(v + 1e-5) * g + b


def batch_norm(x, axes):
    m, v = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - m) * lax.rsqrt(v + 1e-5)


def rope(x, c, s):
    a, b = x[..., :32], x[..., 32:]
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def cross_entropy(x, i):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), i[:, None], 1).mean()


def quantized(x):
    largest = jnp.abs(x).max(1, keepdims=True)
    return jnp.round(x / (largest / 127)).astype(jnp.int8), largest


def adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def huber(x, y):
    d = jnp.abs(x - y)
    return jnp.where(d < 1, 0.5 * d * d, d - 0.5).mean()


def distances(a, b):
    return jnp.sqrt(jnp.maximum((a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T, 0))


def table_gradient(w, i, g):
    return jax.vjp(lambda table: table[i], w)[1](g)[0]


CASES = {
    "outer": (lambda a, b: a[:, None] * b, "f32[3000]", "f32[2001]"),
    "tanh_of_outer_sum": (lambda a, b: jnp.tanh(a[:, None] + b), "f32[3000]", "f32[2001]"),
    "tile": (lambda x: jnp.tile(x, (5, 3)), "f32[600,667]"),
    "repeat_rows": (lambda x: jnp.repeat(x, 5, 0), "f32[1200,1001]"),
    "repeat_columns": (lambda x: jnp.repeat(x, 5, 1), "f32[3000,401]"),
    "repeat_row": (lambda x: repeated(x, 6000), "f32[2,1001]"),
    "repeat_row_f16": (lambda x: repeated(x, 6000), "f16[2,2001]"),
    "repeat_row_i8": (lambda x: repeated(x, 6000), "i8[2,4001]"),
    "concatenate_rows": (lambda x, y: jnp.concatenate([x, y]), "f32[2000,1001]", "f32[3001,1001]"),
    "concatenate_columns": (
        lambda x, y: jnp.concatenate([x, y], 1),
        "f32[3000,1001]",
        "f32[3000,1002]",
    ),
    "stack": (lambda x, y: jnp.stack([x, y], 1), "f32[3000,1001]", "f32[3000,1001]"),
    "stack_last": (lambda x, y: jnp.stack([x, y], -1), "f32[3000,1001]", "f32[3000,1001]"),
    "pad": (lambda x: jnp.pad(x, ((3, 3), (1, 2))), WIDE),
    "one_hot": (lambda i: jax.nn.one_hot(i, 1003), "i32[6000]<1003"),
    "transpose": (lambda x: x.T, TALL),
    "transpose_bf16": (lambda x: x.T, "bf16[4001,4003]"),
    "transpose_i8": (lambda x: x.T, "i8[4001,4003]"),
    "transpose_to_bf16": (lambda x: x.T.astype(jnp.bfloat16), TALL),
    "transpose_and_add": (lambda x, y: x.T + y, TALL, "f32[2003,3001]"),
    "symmetric": (lambda x: x + x.T, SQUARE),
    "transpose_1_0_2": (lambda x: x.transpose(1, 0, 2), "f32[300,200,101]"),
    "transpose_0_2_1": (lambda x: x.transpose(0, 2, 1), "f32[30,2000,101]"),
    "transpose_2_1_0": (lambda x: x.transpose(2, 1, 0), "f32[201,203,205]"),
    "transpose_2_0_1": (lambda x: x.transpose(2, 0, 1), "f32[801,803,13]"),
    "heads": (heads, "f32[8,1024,768]"),
    "heads_together": (together, "f32[8,12,1024,64]"),
    "nchw_of_nhwc": (lambda x: x.transpose(0, 3, 1, 2), "f32[8,111,113,64]"),
    "nhwc_of_nchw": (lambda x: x.transpose(0, 2, 3, 1), "f32[8,64,111,113]"),
    "planes_of_image": (lambda x: x.transpose(2, 0, 1) / 255, "f32[2160,1921,3]"),
    "image_of_planes": (lambda x: x.transpose(1, 2, 0) / 255, "f32[3,2160,1921]"),
    "roll": (lambda x: jnp.roll(x, 3, 1), WIDE),
    "flip": (lambda x: x[:, ::-1], WIDE),
    "fftshift": (jnp.fft.fftshift, "f32[2501,2503]"),
    "lower_triangle": (jnp.tril, SQUARE),
    "pairwise": (lambda x, y: ((x[:, None] - y) ** 2).sum(-1), "f32[2501,3]", "f32[2503,3]"),
    "meshgrid": (lambda a, b: jnp.stack(jnp.meshgrid(a, b)), "f32[2001]", "f32[1999]"),
    "diagonal_differences": (lambda x: x[1:, 1:] - x[:-1, :-1], "f32[2501,2503]"),
    "differences": (lambda x: jnp.diff(x, axis=0), TALL),
    "image_gradient": (lambda x: jnp.stack(jnp.gradient(x)), "f32[2001,2003]"),
    "sum_rows": (lambda x: x.sum(1), "f32[3001,4003]"),
    "sum_columns": (lambda x: x.sum(0), "f32[3001,4003]"),
    "sum_middle": (lambda x: x.sum(1), "f32[301,203,205]"),
    "sum_first_and_last": (lambda x: x.sum((0, 2)), "f32[301,203,205]"),
    "max_first_and_last": (lambda x: x.max((0, 2)), "f32[301,203,205]"),
    "max_columns": (lambda x: x.max(0), "f32[3001,4003]"),
    "argmax_rows": (lambda x: x.argmax(1), "f32[3001,4003]"),
    "argmax_columns": (lambda x: x.argmax(0), "f32[3001,4003]"),
    "var_columns": (lambda x: x.var(0), "f32[3001,4003]"),
    "unit_rows": (lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True), WIDE),
    "unit_columns": (lambda x: x / jnp.linalg.norm(x, axis=0), "f32[3001,4003]"),
    "cumsum_rows": (lambda x: x.cumsum(1), WIDE),
    "cumsum_columns": (lambda x: x.cumsum(0), WIDE),
    "softmax_rows": (lambda x: jax.nn.softmax(x, 1), WIDE),
    "softmax_columns": (lambda x: jax.nn.softmax(x, 0), WIDE),
    "softmax_of_transpose": (lambda x: jax.nn.softmax(x.T, 1), TALL),
    "logsumexp_columns": (lambda x: jax.nn.logsumexp(x, 0), TALL),
    "layer_norm": (layer_norm, "f32[8001,1023]", "f32[1023]", "f32[1023]"),
    "batch_norm_nhwc": (lambda x: batch_norm(x, (0, 1, 2)), "f32[8,111,113,64]"),
    "batch_norm_nchw": (lambda x: batch_norm(x, (0, 2, 3)), "f32[8,64,111,113]"),
    "cross_entropy": (cross_entropy, "f32[1000,32001]", "i32[1000]<32001"),
    "cross_entropy_gradient": (jax.grad(cross_entropy), "f32[1000,32001]", "i32[1000]<32001"),
    "huber": (huber, TALL, TALL),
    "adam": (adam, "f32[5000001]", "f32[5000001]", "f32[5000001]>0.1", "f32[5000001]"),
    "gelu": (jax.nn.gelu, "f32[4001,2003]"),
    "gelu_bf16": (jax.nn.gelu, "bf16[4001,2003]"),
    "swiglu_bf16": (lambda x: jax.nn.silu(x[:, :4096]) * x[:, 4096:], "bf16[2001,8192]"),
    "rope": (rope, "f32[2,12,2048,64]", "f32[2048,32]", "f32[2048,32]"),
    "quantize_rows": (quantized, TALL),
    "dequantize_rows": (lambda x, s: x.astype(s.dtype) * s[:, None], "i8[3001,2003]", "f32[3001]"),
    "to_bf16": (lambda x: x.astype(jnp.bfloat16), TALL),
    "masked_scores": (lambda x, m: jnp.where(m, x, -1e9), "f32[12,1001,1001]", "bool[1001,1001]"),
    "grey": (lambda x: x @ jnp.array([0.3, 0.6, 0.1]), "f32[2160,3840,3]"),
    "maxima_of_windows": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID"),
        "f32[20,1001,1003]",
    ),
    "embedding": (lambda w, i: w[i], "f32[5000,513]", "i32[100,117]<5000"),
    "embedding_gradient": (
        table_gradient,
        "f32[32001,129]",
        "i32[4,1024]<32001",
        "f32[4,1024,129]",
    ),
    "take_columns": (lambda x, i: x[:, i], TALL, "i32[1999]<2003"),
    "take_elements": (lambda x, i: x[i], "f32[3000001]", "i32[3000001]<3000001"),
    "take_along_rows": (
        lambda x, i: jnp.take_along_axis(x, i, 1),
        "f32[3001,1003]",
        "i32[3001,1003]<1003",
    ),
    "distances": (distances, "f32[3001,65]", "f32[2003,65]"),
    "matrix_vector": (lambda a, b: a @ b, "f32[5001,4003]", "f32[4003]"),
    "vector_matrix": (lambda a, b: b @ a, "f32[5001,4003]", "f32[5001]"),
    "sort_rows": (lambda x: jnp.sort(x, 1), "f32[2000,1003]"),
    "top_40": (lambda x: lax.top_k(x, 40), "f32[300,32001]"),
    "iota": (lambda x: jnp.arange(6_000_001) * x[0], "f32[1]"),
}
