"""Reductions, copies, integer arithmetic and functions of all element types: what is measured for float32 elsewhere."""

import jax
import jax.numpy as jnp
from jax import lax

FLOATS = ("bf16", "f16", "f64")
INTEGERS = ("i8", "u8", "i16", "i32", "u32", "i64")
SHAPE = "[1000,1001]"


def scatter(x, indices, updates):
    return x.at[indices].add(updates)


def reflect(x):
    return jnp.pad(x, ((1, 1), (3, 5)), mode="reflect")


def nearest(x):
    return jax.image.resize(x, (240, 320, x.shape[2]), "nearest")


EVERY = {
    "sum_rows": (lambda x: x.sum(1), SHAPE),
    "max_rows": (lambda x: x.max(1), SHAPE),
    "min_columns": (lambda x: x.min(0), SHAPE),
    "argmax_columns": (lambda x: x.argmax(0), SHAPE),
    "cumsum_rows": (lambda x: x.cumsum(1), SHAPE),
    "transpose": (lambda x: x.T, SHAPE),
    "reverse": (lambda x: x[::-1, ::-1], SHAPE),
    "strided": (lambda x: x[::2, 1::3], SHAPE),
    "reflect": (reflect, SHAPE),
    "clip": (lambda x: jnp.clip(x, 2, 50) * 3, SHAPE),
    "take_rows": (lambda x, i: x[i], SHAPE, "i32[3000]<1000"),
    "take_columns": (lambda x, i: x[:, i], SHAPE, "i32[700]<1000"),
    "repeat_row": (lambda x: jnp.broadcast_to(x[0] * 2, (6000, x.shape[1])), SHAPE),
    "transpose_far": (lambda x: x.T, "[3001,2003]"),
    "mask_rows": (lambda x, m: jnp.where(m[:, None], x, 0), SHAPE, "bool[1000]"),
    "sort": (lambda x: jnp.sort(x, 1), "[1000,100]"),
    "scatter": (scatter, "[1000,64]", "i32[3000]<1000", "[3000,64]"),
    "product": (lambda x, y: x @ y, "[201,300]", "[300,177]"),
    "nearest_rgb": (nearest, "[360,480,3]"),
    "nearest_8": (nearest, "[360,480,8]"),
}
OF_INTEGERS = {
    "floor_divide": (lambda x: x // 7 + x % 13, SHAPE),
    "divide": (lambda x, y: x // (y + 1), SHAPE, SHAPE),
    "scaled": (lambda x: x.astype(jnp.float32) / 255 - 0.5, SHAPE),
    "shifted": (lambda x: (x << 2) ^ (x >> 1), SHAPE),
}
OF_FLOATS = {
    "softmax": (lambda x: jax.nn.softmax(x, 1), SHAPE),
    "softmax_columns": (lambda x: jax.nn.softmax(x, 0), SHAPE),
    "gelu": (jax.nn.gelu, SHAPE),
    "sin_cos": (lambda x: (jnp.sin(x), jnp.cos(x)), SHAPE),
    "outer": (lambda x, y: x[:, None] * y, "[1000]", "[1001]"),
    "log1p": (lambda x: lax.log1p(x * x), SHAPE),
}


def _arguments(kind, shapes):
    return (shape if shape[0].isalpha() else kind + shape for shape in shapes)


CASES = {
    f"{name}_{kind}": (function, *_arguments(kind, shapes))
    for kinds, group in (
        (FLOATS + INTEGERS, EVERY),
        (INTEGERS, OF_INTEGERS),
        (FLOATS, OF_FLOATS),
    )
    for kind in kinds
    for name, (function, *shapes) in group.items()
}
