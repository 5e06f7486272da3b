"""Contraction of bfloat16 operands -> products of pairs, one instruction for two multiply-adds (AVX512-BF16 vdpbf16ps).

Before -> after:  acc += a[m, k] * b[k, n]   ->   acc += pair(a[m, 2k:2k+2]) . pair(b[2k:2k+2, n])
A pair is a 32-bit word, the lower half first. The operand that is broadcast is read as words in place; the other one is
interleaved while it is packed. Accumulation is in float32; the instruction flushes subnormals (Intel SDM, VDPBF16PS).
"""

from __future__ import annotations

import numpy as np

from ..affine import Affine
from .nest import Buf, Expr, Nest, Reduction

UINT16, UINT32, INT32 = np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.int32)
OP = "dot_bf16"


def pair_products(nest: Nest, moving: Expr, still: Expr, builder) -> tuple[Nest, Expr, Expr] | None:
    """(nest over pairs, its packed operand, its broadcast operand), or None if the operands do not allow it."""
    r = nest.reductions[0]
    if r.dtype != np.float32 or any(not _is_plain_bfloat16(e) for e in (moving, still)):
        return None
    k = next((d for d in reversed(nest.rdims) if nest.dims[d] > 1), None)
    if k is None or nest.dims[k] % 2:
        return None
    flat = Affine()
    for i, stride in zip(still.info[1], still.info[0].strides):
        flat = flat + i * stride
    rest = flat - Affine.symbol(k, flat.coefficient(k))
    if flat.coefficient(k) != 1 or rest.const % 2 or any(c % 2 for _, c in rest.terms):
        return None
    pool = builder.pool
    words = Buf(f"{still.info[0].name}.words", (max(still.info[0].root.size // 2, 1),), INT32, storage=still.info[0].root)
    half = Affine.make({s: c // 2 for s, c in rest.terms}, rest.const // 2) + Affine.symbol(k)
    broadcast = pool.make("load", INT32, (words, (half,), False))
    packed = _interleaved(moving, k, builder)
    args = tuple(broadcast if a is still else packed for a in r.args)
    dims = {d: n // 2 if d == k else n for d, n in nest.dims.items()}
    return Nest(dims, nest.rdims, [Reduction(OP, args, r.dtype)], list(nest.writes), nest.ordered, nest.at), packed, broadcast


def _is_plain_bfloat16(e: Expr) -> bool:
    return e.kind == "load" and not e.info[2] and e.info[0].dtype.name == "bfloat16" and e.info[0].root.dtype.name == "bfloat16"


def _interleaved(moving: Expr, k: str, builder) -> Expr:
    """moving[2k] in the lower half of a word, moving[2k + 1] in the upper one."""
    buf, pool = moving.info[0], builder.pool
    bits = Buf(f"{buf.name}.bits", buf.shape, UINT16, storage=buf)
    halves = []
    for offset in (0, 1):
        index = tuple(i.substitute({k: Affine.symbol(k, 2) + offset}.get) for i in moving.info[1])
        e = pool.make("load", UINT16, (bits, index, False))
        halves.append(builder.op("convert_element_type", UINT32, e, params={"new_dtype": UINT32}))
    upper = builder.op("shift_left", UINT32, halves[1], builder.const(16, UINT32))
    return builder.op("or", UINT32, halves[0], upper)
