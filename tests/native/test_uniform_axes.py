"""Scratch that repeats one value along an axis is kept once (lower/passes/uniform_axes.py); scratch that only seems to do so
is not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.dsl.kernel import Kernel
from pbkern.targets.cpu.codegen.kernel import lower_kernel

from .running import native

STEPS = 3


def rows_of(x):
    """float32[rows, 1]: a number of each row."""
    return jnp.sin(x).max(1, keepdims=True)


def lanes_of(ref):
    return lax.broadcasted_iota(jnp.int32, ref.shape, 1)


# What a step does to two scratch buffers [rows, lanes]; `repeating` ones keep the lanes of both equal if they were.


def keeps_maximum(x, a, b):
    a[...] = jnp.maximum(a[...], rows_of(x))


def rescales(x, a, b):
    new = jnp.maximum(a[...], rows_of(x))
    b[...] = jnp.exp(a[...] - new) * b[...] + jnp.exp(x - new[:, :1]).sum(1, keepdims=True)
    a[...] = new


def mixes(x, a, b):
    a[...] = 0.5 * a[...] + b[...]
    b[...] = b[...] - a[...] * 0.25


def reverses_lanes(x, a, b):
    a[...] = a[...][:, ::-1] + rows_of(x)


def reverses_rows(x, a, b):
    b[...] = a[...][::-1] * 0.5


def selects_rows(x, a, b):
    a[...] = jnp.where(rows_of(x) > 0.5, a[...], b[...] + 1)


def stores_some_rows(x, a, b):
    mask = jnp.broadcast_to(rows_of(x) > 0.5, a.shape)
    pbkern.store(a, (slice(None), slice(None)), b[...] + 1, mask=mask)


def tiles(x, a, b):
    rows, lanes = a.shape
    wide = lax.broadcast_in_dim(a[...], (rows, 3, lanes), (0, 2)).reshape(rows, 3 * lanes)
    b[...] = b[...] + jnp.exp(-jnp.abs(wide)).sum(1, keepdims=True) * (0.1 / lanes)


def sums_lanes(x, a, b):
    a[...] = a[...] + b[...].sum(1, keepdims=True) * (0.1 / a.shape[1])


def in_a_loop(x, a, b):
    @pbkern.loop(0, 2)
    def _(_):
        a[...] = a[...] * 0.75 + b[...]


REPEATING = [keeps_maximum, rescales, mixes, reverses_lanes, reverses_rows, selects_rows, stores_some_rows, tiles, sums_lanes,
             in_a_loop]  # fmt: skip


def numbers_lanes(x, a, b):
    a[...] = a[...] + lanes_of(a) * 0.125


def in_one_branch(x, a, b):
    @pbkern.when(pbkern.program_id(0) == 1)
    def _():
        b[...] = jnp.where(lanes_of(b) == b.shape[1] - 1, a[...], b[...])


def stores_one_lane(x, a, b):
    a[:, 0] = rows_of(x)[:, 0] + 3


def stores_some_lanes(x, a, b):
    pbkern.store(b, (slice(None), slice(None)), a[...] - 1, mask=lanes_of(b) % 2 == 0)


def takes_columns(x, a, b):
    a[...] = a[...] + jnp.resize(x[:, :1] * x[:1, :], a.shape)


def adds_products(x, a, b):
    b[...] = b[...] + x @ jnp.resize(x, (x.shape[1], b.shape[1])) * 0.125


def accumulates(x, a, b):
    a[...] = jnp.cumsum(a[...], axis=1) * (0.5 / a.shape[1])


VARYING = [
    numbers_lanes,
    in_one_branch,
    stores_one_lane,
    stores_some_lanes,
    takes_columns,
    adds_products,
    accumulates,
]


def kernel_of(steps, rows: int, lanes: int, columns: int) -> Kernel:
    """Runs the steps on each block of x and tells both scratch buffers after every program."""

    def body(x_ref, a_out, b_out, a, b):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            a[...] = jnp.full(a.shape, -1.0)
            b[...] = jnp.full(b.shape, 0.5)

        for step in steps:
            step(x_ref[...], a, b)
        a_out[0] = a[...]
        b_out[0] = b[...] * 1.5

    block = pbkern.BlockSpec((1, rows, lanes), lambda i: (i, 0, 0))
    out = jax.ShapeDtypeStruct((STEPS, rows, lanes), "f4")
    kernel = pbkern.kernel(
        body, grid=(STEPS,), in_specs=[pbkern.BlockSpec((rows, columns), lambda i: (i, 0))], out_specs=[block, block],
        out_shape=[out, out], scratch_shapes=[pbkern.Scratch((rows, lanes), "f4")] * 2,
    )  # fmt: skip
    return kernel.trace(jax.ShapeDtypeStruct((STEPS * rows, columns), "f4"))


def check(kernel: Kernel) -> None:
    x = np.random.default_rng(0).normal(size=kernel.in_types[0].shape).astype("f4")
    for got, want in zip(native(kernel, x), pbkern.interpret(kernel, x)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def narrow_scratch(kernel: Kernel) -> set[str]:
    """Which of the kernel's scratch buffers is only accessed at lane 0."""
    nests = lower_kernel(kernel, "k").nests
    lanes = {
        name: set(re.findall(rf"%{name}(?:\.j\d+)?\[([^\]]*)\]", nests)) for name in ("t0", "t1")
    }
    return {
        name
        for name, found in lanes.items()
        if found and all(re.search(r"(^|, )0$", ix) for ix in found)
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", REPEATING, ids=lambda f: f.__name__)
def test_repeated_values_are_kept_once(step):
    kernel = kernel_of([step], 8, 24, 40)
    check(kernel)
    assert narrow_scratch(kernel) == {"t0", "t1"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", VARYING, ids=lambda f: f.__name__)
def test_one_store_that_varies_keeps_every_lane(step):
    kernel = kernel_of([keeps_maximum, step], 8, 24, 40)
    check(kernel)
    assert len(narrow_scratch(kernel)) < 2
    kernel = kernel_of([step, mixes], 8, 24, 40)  # what is made of it varies too
    check(kernel)
    assert not narrow_scratch(kernel)


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(
    st.lists(st.sampled_from(REPEATING + VARYING), min_size=1, max_size=4),
    st.sampled_from([1, 3, 8, 16]), st.sampled_from([1, 2, 17, 24, 128]), st.sampled_from([1, 5, 40]),
)  # fmt: skip
def test_random_steps(steps, rows, lanes, columns):
    check(kernel_of(steps, rows, lanes, columns))


def test_blocks_inside_and_at_the_edge_agree_about_scratch():
    """The body is lowered twice; at the edge, a guarded load varies along lanes that are equal inside."""

    def body(x_ref, o_ref, a):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            a[...] = jnp.zeros(a.shape)

        inside = pbkern.in_bounds(x_ref, 1)[None]
        a[...] = a[...] + jnp.where(inside, x_ref[...], -9).max(1, keepdims=True)
        a[...] = jnp.where(inside, a[...], -a[...])
        o_ref[0] = a[...]

    x = np.random.default_rng(1).normal(size=(8, 52)).astype("f4")
    kernel = pbkern.kernel(
        body, grid=(4,), in_specs=[pbkern.BlockSpec((8, 16), lambda i: (0, i))],
        out_specs=pbkern.BlockSpec((1, 8, 16), lambda i: (i, 0, 0)), out_shape=jax.ShapeDtypeStruct((4, 8, 16), "f4"),
        scratch_shapes=[pbkern.Scratch((8, 16), "f4")],
    ).trace(x)  # fmt: skip
    got, want = np.array(native(kernel, x)[0]), np.zeros((8, 16))
    for i in range(4):
        block = x[:, 16 * i : 16 * i + 16]
        want = want + block.max(1, keepdims=True)
        want[:, block.shape[1] :] *= -1
        np.testing.assert_allclose(got[i], want, rtol=1e-6)
