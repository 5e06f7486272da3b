"""Derivatives of pallas_calls without rules of their own, against those of the plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention, decode_attention, paged_attention
from jax.experimental.pallas.ops.gpu import softmax as softmax_of_jax
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.matmul import matmul as matmul_of_jax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.paged_attention import (
    paged_attention as paged_attention_for_tpus,
)

import pbkern
from pbkern.core.errors import KernelError, UnsupportedKernel

SIZE, BLOCK = 32, 8


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 2


def doubled_sine(x_ref, o_ref):
    o_ref[...] = jnp.sin(x_ref[...]) * 2


def sine_call(shape, **options):
    return pl.pallas_call(doubled_sine, out_shape=jax.ShapeDtypeStruct(shape, "float32"), **options)


def product(a, b, o, acc):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    acc[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o[...] = jax.nn.relu(acc[...])


def product_call():
    shape = (BLOCK, BLOCK)
    return pl.pallas_call(
        product, grid=(SIZE // BLOCK,) * 3, out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), "float32"),
        in_specs=[pl.BlockSpec(shape, lambda i, j, k: (i, k)), pl.BlockSpec(shape, lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec(shape, lambda i, j, k: (i, j)), scratch_shapes=[pltpu.VMEM(shape, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )  # fmt: skip


def plain_product(a, b):
    return jax.nn.relu(a @ b)


def gradients(function, *xs):
    return jax.grad(lambda *xs: (function(*xs) ** 2).sum(), range(len(xs)))(*xs)


def close(got, want):
    for mine, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=0, atol=3e-6 * float(abs(exact).max()))


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, pbkern.jit], ids=["eager", "jit", "pbkern.jit"]
)
def test_gradients_and_tangents(around):
    xs = numbers(SIZE, SIZE), numbers(SIZE, SIZE, seed=1)
    call = product_call()
    close(gradients(around(call), *xs), gradients(plain_product, *xs))
    close(around(lambda *xs: gradients(call, *xs))(*xs), gradients(plain_product, *xs))
    close(jax.jvp(around(call), xs, xs), jax.jvp(plain_product, xs, xs))


def test_gradients_go_with_vmap():
    a, b = numbers(3, SIZE, SIZE), numbers(SIZE, SIZE, seed=1)

    def of_both(function):
        stacked = jax.vmap(function, (0, None))
        return gradients(stacked, a, b), jax.vmap(
            lambda a, b: gradients(function, a, b), (0, None)
        )(a, b)

    close(of_both(product_call()), of_both(plain_product))


def test_memory_shared_with_an_operand():
    x = numbers(8, 8)
    call = sine_call((8, 8), input_output_aliases={0: 0})
    close(gradients(call, x), gradients(lambda x: jnp.sin(x) * 2, x))
    close(jax.jvp(call, (x,), (x,)), jax.jvp(lambda x: jnp.sin(x) * 2, (x,), (x,)))


def test_without_install_derivatives_are_those_of_jax():
    call = sine_call((8,))
    jax.grad(lambda x: call(x).sum())(jnp.ones(8))
    pbkern.pallas.uninstall()
    try:
        with pytest.raises(ValueError, match="Linearization failed"):
            jax.grad(lambda x: call(x).sum())(jnp.ones(8))
    finally:
        pbkern.pallas.install()


def causal(queries, keys, values, tokens):
    """Attention with the axes (batch, token, head, column), those before the last in the order that `tokens` says."""
    spelled = {"first": "bqhd,bkhd->bhqk", "second": "bhqd,bhkd->bhqk"}[tokens]
    scores = jnp.einsum(spelled, queries, keys)
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e9))
    back = {"first": "bhqk,bkhd->bqhd", "second": "bhqk,bhkd->bhqd"}[tokens]
    return jnp.einsum(back, weights, values)


def tpu_attention(queries, keys, values):
    """The forward kernel alone: its function has a rule by hand."""
    return flash_attention._flash_attention_impl(
        queries, keys, values, None, None, False, True, 1.0, 1, 128, 128, 128, False
    )


def gpu_attention(*xs):
    """The forward kernel alone, whose loop ends at the diagonal."""
    return attention.mha.__wrapped__(*xs, None, causal=True, block_sizes=SIXTEEN)


STARTS, ENDS = np.array([3, 0]), np.array([50, 64])


def decoded(*xs):
    return decode_attention.mqa(*xs, STARTS, ENDS, block_h=16, block_k=16, k_splits=2)


PAGES, LENGTHS = np.array([[0, 3, 5, 1], [2, 7, 6, 4]]), np.array([9, 16])


def paged(*xs):
    options = {"block_h": 16, "pages_per_compute_block": 1, "k_splits": 2}
    return paged_attention.paged_attention(*xs, PAGES, LENGTHS, **options)


def plain_paged(queries, key_pages, value_pages):
    keys, values = (pages[:, PAGES].reshape(2, 2, 16, 16) for pages in (key_pages, value_pages))
    scores = jnp.einsum("bhgd,hbtd->bhgt", queries.reshape(2, 2, 2, 16), keys)
    allowed = jnp.arange(16) < LENGTHS[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e9))
    return jnp.einsum("bhgt,hbtd->bhgd", weights, values).reshape(2, 4, 16)


GROUPS = np.array([30, 0, 41, 25], np.int32)


def grouped(rows, tables, of_groups):
    ends = np.cumsum(GROUPS)
    parts = zip(ends - GROUPS, ends, tables)
    return jnp.concatenate([of_groups(rows[a:b], table) for a, b, table in parts])


def paged_for_tpus(*xs):
    """Pages that are copied ahead, two at a time. The kernel rounds keys and values to bfloat16."""
    options = {"pages_per_compute_block": 2, "inline_seq_dim": False}
    return paged_attention_for_tpus(*xs, LENGTHS, PAGES, **options)


def coarse(*shape, seed):
    """Numbers that bfloat16 has."""
    return np.asarray(jnp.asarray(numbers(*shape, seed=seed), "bfloat16"), np.float32)


def plain_paged_for_tpus(queries, key_pages, value_pages):
    keys, values = (pages[:, PAGES].reshape(2, 2, 16, 128) for pages in (key_pages, value_pages))
    scores = jnp.einsum("bhgd,hbtd->bhgt", queries.reshape(2, 2, 2, 128), keys)
    allowed = jnp.arange(16) < LENGTHS[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e9))
    return jnp.einsum("bhgt,hbtd->bhgd", weights, values).reshape(2, 4, 128)


SHIPPED = {
    "products of groups": (
        lambda a, b: gmm(a, b, GROUPS, jnp.float32, (32, 16, 16)),
        lambda a, b: grouped(a, b, jnp.matmul),
        [numbers(96, 32), numbers(4, 32, 48, seed=1)],
    ),
    "products of groups, turned": (
        lambda a, b: gmm(a, b, GROUPS, jnp.float32, (32, 16, 16), transpose_rhs=True),
        lambda a, b: grouped(a, b, lambda rows, table: rows @ table.T),
        [numbers(96, 32), numbers(4, 48, 32, seed=1)],
    ),
    "products along groups": (
        lambda a, b: tgmm(a, b, GROUPS, jnp.float32, (32, 16, 16)),
        lambda a, b: jnp.stack(
            [
                a[:, end - size : end] @ b[end - size : end]
                for size, end in zip(GROUPS, np.cumsum(GROUPS))
            ]
        ),
        [numbers(32, 96), numbers(96, 48, seed=1)],
    ),
    "softmax": (softmax_of_jax.softmax, jax.nn.softmax, [numbers(16, 100)]),
    "matmul": (
        lambda a, b: matmul_of_jax(a, b, block_shape=(128, 128), block_k=128),
        lambda a, b: a @ b,
        [numbers(256, 256), numbers(256, 256, seed=1)],
    ),
    "flash attention for TPUs": (
        tpu_attention,
        lambda *xs: causal(*xs, "second"),
        [numbers(1, 1, 256, 128, seed=n) for n in range(3)],
    ),
    "attention for GPUs, with its rule": (
        lambda *xs: attention.mha(*xs, None, causal=True, block_sizes=SIXTEEN),
        lambda *xs: causal(*xs, "first"),
        [numbers(1, 64, 2, 32, seed=n) for n in range(3)],
    ),
    "attention for GPUs": (
        gpu_attention,
        lambda *xs: causal(*xs, "first"),
        [numbers(1, 64, 2, 32, seed=n) for n in range(3)],
    ),
    "decode attention": (
        decoded,
        lambda *xs: decode_attention.mqa_reference(*xs, STARTS, ENDS),
        [numbers(2, 4, 32), numbers(2, 64, 32, seed=1), numbers(2, 64, 32, seed=2)],
    ),
    "paged attention": (
        paged,
        plain_paged,
        [numbers(2, 4, 16), numbers(2, 8, 4, 16, seed=1), numbers(2, 8, 4, 16, seed=2)],
    ),
}
SIXTEEN = attention.BlockSizes(
    **dict.fromkeys(("block_q", "block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 16)
)  # fmt: skip


def test_an_online_softmax_of_pallas_saves_no_states():
    """Its final maxima are results of the forward kernel, with dtypes and shapes of the call."""

    def body(q, k, v, o, m, l, acc):
        @pl.when(pl.program_id(1) == 0)
        def _():
            m[...] = jnp.full_like(m, -jnp.inf)
            l[...] = jnp.zeros_like(l)
            acc[...] = jnp.zeros_like(acc)

        scores = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
        new = jnp.maximum(m[...], scores.max(1, keepdims=True))
        p, shrunk = jnp.exp(scores - new), jnp.exp(m[...] - new)
        l[...] = l[...] * shrunk + p.sum(1, keepdims=True)
        acc[...] = acc[...] * shrunk + p @ v[...]
        m[...] = new

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o[...] = (acc[...] / l[...]).astype(o.dtype)

    rows, keys = (
        pl.BlockSpec((8, 16), lambda i, j: (i, 0)),
        pl.BlockSpec((8, 16), lambda i, j: (j, 0)),
    )
    call = pl.pallas_call(
        body, grid=(2, 3), in_specs=[rows, keys, keys], out_specs=rows, out_shape=jax.ShapeDtypeStruct((16, 16), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, n), jnp.float32) for n in (1, 1, 16)],
    )  # fmt: skip

    def plain(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    xs = numbers(16, 16), numbers(24, 16), numbers(24, 16)
    for mine, exact in zip(gradients(call, *xs), gradients(plain, *xs)):
        np.testing.assert_allclose(mine, exact, rtol=0, atol=2e-6 * float(abs(exact).max()))
    text = str(jax.make_jaxpr(lambda *xs: gradients(call, *xs))(*xs))
    assert "_final" in text
    assert "_saving" not in text


def test_paged_attention_for_tpus():
    xs = numbers(2, 4, 128), coarse(2, 8, 4, 128, seed=1), coarse(2, 8, 4, 128, seed=2)
    for mine, exact in zip(gradients(paged_for_tpus, *xs), gradients(plain_paged_for_tpus, *xs)):
        np.testing.assert_allclose(mine, exact, rtol=0, atol=2e-2 * float(abs(exact).max()))


def test_products_of_groups_are_refused_where_states_would_be_saved():
    """The number of programs, each of which depends on the one before, has no limit but its type."""

    def powers(count_ref, x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.ones_like(o_ref)

        o_ref[...] *= x_ref[...]

    def call(x):
        count = jnp.int32(3)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(count,),
            in_specs=[pl.BlockSpec((4,), lambda i, _: (0,))], out_specs=pl.BlockSpec((4,), lambda i, _: (0,)),
        )  # fmt: skip
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        return pl.pallas_call(powers, grid_spec=spec, out_shape=shape)(count[None], x)

    np.testing.assert_allclose(call(np.full(4, 2.0, np.float32)), 8)
    with pytest.raises(UnsupportedKernel, match="a number of programs that is not known"):
        jax.grad(lambda x: call(x).sum())(jnp.ones(4))


@pytest.mark.parametrize("name", SHIPPED)
def test_kernels_that_jax_ships(name):
    kernel, plain, xs = SHIPPED[name]
    close(jax.jit(lambda *xs: gradients(kernel, *xs))(*xs), gradients(plain, *xs))


def test_kernels_with_loops_of_unknown_length_are_refused_at_the_loop():
    def powers(count_ref, x_ref, o_ref):
        def step(_, carry):
            return carry * x_ref[...]

        o_ref[...] = jax.lax.fori_loop(0, count_ref[0], step, x_ref[...])

    call = pl.pallas_call(powers, out_shape=jax.ShapeDtypeStruct((4,), "float32"))
    with pytest.raises(UnsupportedKernel) as raised:
        gradients(lambda x: call(jnp.array([3]), x), numbers(4))
    assert isinstance(raised.value, KernelError)
    assert "how often this loop runs" in str(raised.value)
    assert "test_derivatives.py:" in raised.value.at
    assert "jax.custom_vjp" in raised.value.hint


def test_floats_of_eight_bits_are_refused():
    def widened(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype("float32")

    call = pl.pallas_call(widened, out_shape=jax.ShapeDtypeStruct((8,), "float32"))
    with pytest.raises(UnsupportedKernel, match="float8_e4m3fn has too few digits"):
        jax.grad(lambda x: call(x).sum())(jnp.ones(8, "float8_e4m3fn"))
