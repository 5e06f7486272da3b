"""Steps of one to sixteen tokens: products of few rows with weights of all types, in both orders, and attention to a cache."""

import jax
import jax.numpy as jnp
from jax import lax

ROWS = (1, 3, 8, 16)
TYPES = ("f32", "bf16", "f16", "i8")
SIZE = 2048


def product(x, w, axis):
    """x's rows times w, which is contracted along `axis`."""
    out = jnp.int32 if x.dtype == jnp.int8 else x.dtype
    return lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=out)


def dequantised(x, w, scales):
    """Weights of bytes with a scale for each column of the result, [columns, depth]."""
    return x @ (w.astype(x.dtype) * scales[:, None]).T


def scaled(x, w, scales):
    return (x @ w.astype(x.dtype).T) * scales


def attend(q, k, v):
    """q[heads, size]; k and v[heads, tokens, size]."""
    weights = jax.nn.softmax(jnp.einsum("hd,hkd->hk", q, k) / q.shape[-1] ** 0.5)
    return jnp.einsum("hk,hkd->hd", weights, v)


def attend_in_order_of_tokens(q, k, v):
    """q[heads, size]; k and v[tokens, heads, size]."""
    return attend(q, k.swapaxes(0, 1), v.swapaxes(0, 1))


def _products():
    for kind in TYPES:
        for rows in ROWS:
            for order, axis in (("ab", 0), ("abT", 1)):
                yield (
                    f"token_{kind}_{rows}_{order}",
                    (
                        lambda x, w, axis=axis: product(x, w, axis),
                        f"{kind}[{rows},{SIZE}]",
                        f"{kind}[{SIZE},{SIZE}]",
                    ),
                )


def _with_scales():
    for kind in ("f32", "bf16"):
        for rows in (1, 8):
            arguments = f"{kind}[{rows},{SIZE}]", f"i8[{SIZE},{SIZE}]", f"{kind}[{SIZE}]"
            yield f"token_dequantised_{kind}_{rows}", (dequantised, *arguments)
            yield f"token_scaled_{kind}_{rows}", (scaled, *arguments)


def _attention():
    for kind in ("f32", "bf16", "f16"):
        heads, tokens = f"{kind}[8,4096,64]", f"{kind}[4096,8,64]"
        yield f"token_attends_{kind}", (attend, f"{kind}[8,64]", heads, heads)
        yield (
            f"token_attends_in_order_{kind}",
            (attend_in_order_of_tokens, f"{kind}[8,64]", tokens, tokens),
        )


CASES = dict([*_products(), *_with_scales(), *_attention()])
