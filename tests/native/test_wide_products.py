"""Wide products made of 16-bit halves become one operation, in any form; what only looks like one does not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from pbkern.targets.cpu.lower_options import LowerOptions

from .running import native

M = 0xFFFF


def by_carry(x, y):
    xh, xl, yh, yl = x >> 16, x & M, y >> 16, y & M
    a, b, low = xh * yl, xl * yh, xl * yl
    carry = (a & M) + (b & M) + (low >> 16)
    return xh * yh + (a >> 16) + (b >> 16) + (carry >> 16), (carry << 16) + (low & M)


def in_steps(x, y):
    xh, xl, yh, yl = x >> 16, x & M, y >> 16, y & M
    low = xl * yl
    t = xh * yl + (low >> 16)
    w = (t & M) + xl * yh
    return xh * yh + (t >> 16) + (w >> 16), (w << 16) + (low & M)


def without_a_carry(x, y):
    """Not the upper half: what the lower product carries is left out."""
    xh, xl, yh, yl = x >> 16, x & M, y >> 16, y & M
    a, b = xh * yl, xl * yh
    return xh * yh + (a >> 16) + (b >> 16) + (((a & M) + (b & M)) >> 16), (a << 16) + (
        b << 16
    ) + xl * yl


@pytest.mark.parametrize("second", [None, 0xCD9E8D57, 0xFFFFFFFF, 65537])
@pytest.mark.parametrize(
    ("halves", "is_product"), [(by_carry, True), (in_steps, True), (without_a_carry, False)]
)
def test_upper_and_lower_halves(halves, is_product, second):
    ends = [
        0,
        1,
        0xFFFF,
        0x10000,
        0x10001,
        0x7FFFFFFF,
        0x80000000,
        0xFFFF0000,
        0xFFFFFFFE,
        0xFFFFFFFF,
    ]
    x, y = (v.ravel().astype(np.uint32) for v in np.meshgrid(ends, ends))
    rng = np.random.default_rng(0)
    x, y = (np.concatenate([v, rng.integers(0, 2**32, 301, np.uint32)]) for v in (x, y))
    y = y if second is None else np.full_like(y, second)

    def body(x, y, high, low):
        high[...], low[...] = halves(x[...], y[...] if second is None else jnp.uint32(second))

    k = pbkern.kernel(body, out_shape=[jax.ShapeDtypeStruct(x.shape, "uint32")] * 2).trace(x, y)
    high, low = native(k, x, y)
    want_high, want_low = halves(x, y)
    np.testing.assert_array_equal(high, want_high)
    np.testing.assert_array_equal(low, want_low)
    if is_product:
        wide = x.astype(np.uint64) * y.astype(np.uint64)
        np.testing.assert_array_equal(high, (wide >> np.uint64(32)).astype(np.uint32))
    # Of a number whose halves are both 1, the terms of two unknowns fall together: it is not found.
    assert ("mulhi" in lower_kernel(k, "k").nests) is (is_product and second != 65537)


def test_what_chooses_the_instruction_of_products_stays_constant():
    """64-bit factors of 32 bits have an instruction of their own, and shifts by constants: LLVM has to see which they are."""

    def body(x, o):
        for _ in range(6):
            x = by_carry(x[...], jnp.uint32(0xCD9E8D57))[0] ^ 7
        o[...] = x

    x = np.arange(4096, dtype=np.uint32)
    k = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(x.shape, "uint32")).trace(x)
    text = lower_kernel(k, "k", LowerOptions(avx512=True)).text
    constants = dict(re.findall(r"(%v\d+) = arith.constant (dense<.*>) : vector<\d+xi64>", text))
    kept = re.findall(r'inline_asm has_side_effects "", "=v,0" (%v\d+)', text)
    assert set(constants.values()) >= {"dense<32>", "dense<4294967295>"}
    assert not set(kept) & constants.keys()
