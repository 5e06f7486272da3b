"""Loops that update an element at a computed place keep nothing else: no copy of what was there, no copy of constants."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel

from .running import native

AT = np.random.default_rng(0).integers(0, 20, 96).astype(np.int32)
VALUES = np.random.default_rng(1).integers(-9, 9, 96).astype(np.int32)


def loop(lower) -> str:
    """What the loop of a kernel's nests does."""
    return lower.nests.split("\nfor ")[1]


def counted(by_operand, wanted):
    """A kernel that adds to one of 20 elements for each index, and may return what was there."""

    def body(at_ref, value_ref, o_ref, old_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        old_ref[...] = jnp.zeros_like(old_ref)
        old = pbkern.atomic_add(o_ref, (at_ref[...],), value_ref[...] if by_operand else 1)
        if wanted:
            old_ref[...] = old

    shapes = [jax.ShapeDtypeStruct((20,), jnp.int32), jax.ShapeDtypeStruct((96,), jnp.int32)]
    return pbkern.kernel(body, out_shape=shapes).trace(AT, VALUES)


@pytest.mark.parametrize("by_operand", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_atomic_updates(by_operand, wanted):
    kernel, total, old = counted(by_operand, wanted), np.zeros(20, np.int32), np.zeros(96, np.int32)
    for k, (at, value) in enumerate(zip(AT, VALUES)):
        old[k] = total[at] if wanted else 0
        total[at] += value if by_operand else 1
    for got, want in zip(native(kernel, AT, VALUES), (total, old)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("by_operand", [False, True])
def test_only_the_element_is_stored(by_operand):
    inside = loop(lower_kernel(counted(by_operand, False), "k"))
    assert len(re.findall(r"\] = ", inside)) == inside.count("let ") == 1
    assert by_operand or re.search(r"= add\(%a2\[%s\d+\], 1\)", inside)


def test_stacked_results_that_are_read():
    """Of three that a loop stacks, the one in the middle is read, and one that only another loop's unread result needs."""

    def body(x_ref, o_ref):
        def step(carry, x):
            return carry + x, (x * 2, carry - x, carry * 3)

        total, (_, kept, third) = lax.scan(step, jnp.int32(1), x_ref[...])
        _, _unread = lax.scan(lambda c, x: (c, x + 1), 0, third)
        o_ref[...] = kept + total

    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((96,), jnp.int32)).trace(VALUES)
    before = 1 + np.cumsum(VALUES) - VALUES
    (got,) = native(kernel, VALUES)
    np.testing.assert_array_equal(got, before - VALUES + 1 + VALUES.sum())
    assert "* 3" not in kernel.source()
    assert kernel.source().count("lax.scan(") == 1


def test_one_index_for_several_accesses_is_evaluated_once():
    def body(at_ref, o_ref, p_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        p_ref[...] = jnp.ones_like(p_ref)

        def step(i, _):
            at = at_ref[i] & 15
            o_ref[at] += p_ref[at]
            p_ref[at] = o_ref[at] + 1
            return 0

        lax.fori_loop(0, 96, step, 0)

    kernel = pbkern.kernel(body, out_shape=[jax.ShapeDtypeStruct((20,), jnp.int32)] * 2).trace(AT)
    o, p = np.zeros(20, np.int32), np.ones(20, np.int32)
    for at in AT & 15:
        o[at] += p[at]
        p[at] = o[at] + 1
    for got, want in zip(native(kernel, AT), (o, p)):
        np.testing.assert_array_equal(got, want)
    assert loop(lower_kernel(kernel, "k")).count("let ") == 1
