"""Exponentials of long rows, summed and multiplied run by run: every dress of attention, with few columns to a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
import pbkern.fuse.tiling.online_analysis
import pbkern.fuse.tiling.schedule
from pbkern.dsl.host_program import BufferKind
from pbkern.targets.costs.sizes import SIZES

from .attention_forms import FORMS, attend, by_tril, operands
from .checking import check, compare, planned, rand
from .test_attention import TOLERANCE


@pytest.fixture
def runs(monkeypatch):
    """runs(columns): so many columns to a run, wherever reductions are in L2."""

    def set_columns(columns: int) -> None:
        monkeypatch.setattr(pbkern.fuse.tiling.online_analysis, "CHUNK_COLUMNS", columns)
        monkeypatch.setattr(pbkern.fuse.tiling.schedule, "NEAR_CHUNK_SHARE", 0.0)

    return set_columns


def in_loops(kernel) -> bool:
    return any(e.primitive.name in ("while", "scan") for e in kernel.body.jaxpr.eqns)


def in_chunks(f, *args) -> bool:
    return any(map(in_loops, planned(f, *args).kernels()))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", FORMS)
def test_equals_jax(name, runs):
    runs(5)
    f, args = FORMS[name]
    check(f, *args, kernels=1, tolerance=TOLERANCE.get(str(args[0].dtype), 1e-5))


def test_runs_are_taken(runs):
    runs(5)
    taken = {name for name, (f, args) in FORMS.items() if in_chunks(f, *args)}
    assert len(taken) > 0.7 * len(FORMS), sorted(set(FORMS) - taken)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", [1, 8, 17, 50])
def test_any_number_of_columns(columns, runs):
    runs(columns)
    args = operands(q=33, k=100)
    assert in_chunks(attend, *args)
    check(attend, *args, kernels=1, tolerance=1e-5)


def test_rows_that_are_silent_at_first_or_throughout(runs):
    """Where all is -inf, exponentials are NaN in JAX; where runs start with -inf, they are not."""
    runs(8)
    q, k, v = operands(q=20, k=40)
    silent = (jnp.arange(40) < 19)[None] | (jnp.arange(20) == 3)[:, None]

    def f(q, k, v):
        return attend(q, k, v, mask=~silent, statistics=True)

    got, want = pbkern.jit(f)(q, k, v), jax.jit(f)(q, k, v)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert np.isnan(got[0][:, :, 3]).all()
    assert np.isfinite(got[0][:, :, 4]).all()


def powers_of_two(q, k, v):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    p = jnp.exp2(s - s.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bhkd->bhqd", p, v) / p.sum(-1)[..., None]


def chosen(q, k, v):
    """Rows of which nothing is chosen: 0 / 0 of their exponentials, but 0 of their sums."""
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    mask = (jnp.arange(s.shape[-1]) < 9) & (jnp.arange(s.shape[-2]) != 3)[:, None]
    s = jnp.where(mask, s, -jnp.inf)
    p = jnp.where(mask, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v), p.sum(-1)


@pytest.mark.parametrize("f", [powers_of_two, chosen])
def test_exponentials_of_other_kinds(f, runs):
    runs(6)
    args = operands(q=20, k=40)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        pbkern.jit(f)(*args),
        jax.jit(f)(*args),
    )


def test_results_may_need_what_runs_count(runs):
    """Positions are compared with the lengths of queries and of keys; results of queries beyond theirs are zero."""
    runs(8)

    def f(q, k, v, queries, keys):
        return jax.nn.dot_product_attention(
            q, k, v, query_seq_lengths=queries, key_value_seq_lengths=keys
        )

    args = [rand(1, 50, 2, 16, seed=n) for n in range(3)]
    lengths = jnp.array([43]), jnp.array([29])
    assert in_chunks(f, *args, *lengths)
    check(f, *args, *lengths, kernels=1, tolerance=1e-5)


@pytest.mark.parametrize("large", [np.inf, np.nan])
def test_infinite_scores(large, runs):
    runs(8)
    q, k, v = operands(q=6, k=40)
    k = k.at[:, :, 13, 0].set(large)
    np.testing.assert_array_equal(
        np.isnan(pbkern.jit(attend)(q, k, v)), np.isnan(jax.jit(attend)(q, k, v))
    )


GUARDS = {
    "by_comparison": lambda m: jnp.where(m == -jnp.inf, 0, m),
    "by_isfinite": lambda m: jnp.where(jnp.isfinite(m), m, jnp.zeros_like(m)),
    "by_bound": lambda m: jnp.maximum(m, -1e30),
    "after_scaling": lambda m: jnp.clip(0.5 * m + 1, -4, 4),
    "in_two_steps": lambda m: lax.stop_gradient(jnp.nan_to_num(m, neginf=-3.0)),
}


def guarded(guard, chosen, q, k, v, shown):
    """Attention that subtracts a function of its maxima; its sums without and with the guard beside it."""
    s = jnp.where(shown, jnp.einsum("bhqd,bhkd->bhqk", q, k), -jnp.inf)
    m = s.max(-1, keepdims=True)
    p = jnp.exp(s - guard(m))
    p = jnp.where(shown, p, 0) if chosen else p
    sums = p.sum(-1, keepdims=True)
    out = jnp.einsum("bhqk,bhkd->bhqd", p, v) / jnp.where(sums == 0, 1, sums)
    return out, jnp.log(sums) + guard(m), jnp.exp(s - m).sum(-1)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("name", GUARDS)
def test_guarded_maxima(name, chosen, runs):
    """A guard keeps rows finite of which a mask shows nothing, here rows 0 and 3; row 1 has a score of inf."""
    runs(8)
    q, k, v = operands(q=20, k=40)
    q, k = q.at[:, :, 1, 0].set(1e30), k.at[:, :, 17, 0].set(1e30)
    shown = (jnp.arange(40) < jnp.arange(20)[:, None]) & (jnp.arange(20) != 3)[:, None]
    shown = shown.at[1].set(True)
    args = q, k, v, shown
    f = functools.partial(guarded, GUARDS[name], chosen)
    assert in_chunks(f, *args)
    for ours, theirs in zip(pbkern.jit(f)(*args), jax.jit(f)(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_guarded_maxima_of_short_floats(dtype, runs):
    runs(8)

    def f(q, k, v):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        m = s.max(-1, keepdims=True)
        p = jnp.exp(s - jnp.where(m == -jnp.inf, 0, m))
        return jnp.einsum("bhqk,bhkd->bhqd", p, v) / p.sum(-1, keepdims=True)

    args = [x.astype(dtype) for x in operands(q=20, k=40)]
    assert in_chunks(f, *args)
    check(f, *args, kernels=1, tolerance=TOLERANCE[dtype])


def unnormalised(q, k, v):
    """Exponentials that something other than sums needs: they are needed as a whole."""
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return p, jnp.einsum("bhqk,bhkd->bhqd", p, v)


def by_columns(q, k, v):
    """Maxima of columns beside rows: x - m may be large."""
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    p = jnp.exp(s - s.max(-1)[:, :, None, :])
    return jnp.einsum("bhqk,bhkd->bhqd", p, v)


def squared(q, k, v):
    """Not linear in the exponentials."""
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bhkd->bhqd", p * p, v) / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("f", [unnormalised, by_columns, squared])
def test_what_is_not_linear_in_exponentials_of_its_rows(f, runs):
    """It is taken as a whole, or in a second pass, when the maxima are known."""
    runs(5)
    check(f, *operands(q=20, k=20), tolerance=1e-4)


def causal(q, k, v):
    return attend(q, k, v, mask=by_tril(q, k))


def gradient(f):
    return lambda given, *args: jax.vjp(f, *args)[1](given)


@pytest.mark.parametrize("f", [attend, pytest.param(causal, marks=pytest.mark.slow)])
def test_gradients(f):
    """Sums that need maxima and sums: a second pass."""
    given, *args = (rand(1, 1, 2048, 64) for _ in range(4))
    plan = planned(gradient(f), given, *args)
    assert any(in_loops(k) for k in plan.kernels())
    assert not plan.left_to_xla()
    compare(plan, gradient(f), (given, *args), 2e-5, reference=gradient(f))


def jax_nn(**given):
    """jax.nn.dot_product_attention and its operands: arrays beside q, k and v by name, the rest as it is."""
    arrays = [name for name, value in given.items() if isinstance(value, jax.ShapeDtypeStruct)]

    def f(q, k, v, *others):
        return jax.nn.dot_product_attention(q, k, v, **(given | dict(zip(arrays, others))))

    x, heads = jax.ShapeDtypeStruct((1, 4096, 4, 64), jnp.float32), given.pop("key_heads", 4)
    key = jax.ShapeDtypeStruct((1, 4096, heads, 64), jnp.float32)
    return f, (x, key, key, *(given[name] for name in arrays))


LENGTH = jax.ShapeDtypeStruct((1,), jnp.int32)
LONG = {
    "heads first": (attend, [jax.ShapeDtypeStruct((1, 4, 4096, 64), jnp.float32)] * 3),
    "plain": jax_nn(),
    "causal": jax_nn(is_causal=True),
    "window": jax_nn(local_window_size=(100, 0)),
    "bias": jax_nn(bias=jax.ShapeDtypeStruct((1, 4, 4096, 4096), jnp.float32)),
    "mask": jax_nn(mask=jax.ShapeDtypeStruct((1, 1, 4096, 4096), bool)),
    "lengths": jax_nn(query_seq_lengths=LENGTH, key_value_seq_lengths=LENGTH),
    "grouped heads": jax_nn(key_heads=1),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("loss", [jnp.sum, lambda o: (o * o).sum()], ids=["sum", "squares"])
def test_gradients_of_long_sequences_store_no_scores(name, loss):
    """No array between the kernels is larger than a few like the operands; scores take 64 of them."""
    f, args = LONG[name]

    def gradient(*args):
        return jax.grad(lambda *args: loss(f(*args)), (0, 1, 2))(*args)

    buffers = [
        b
        for p in planned(gradient, *args).programs()
        for b in p.buffers
        if b.kind is BufferKind.TEMP
    ]
    sizes = [int(np.prod(b.type.shape)) * b.type.dtype.itemsize for b in buffers]
    assert (
        max(sizes, default=0) <= 4096 * 4096 + 1
    )  # a mask of bytes may be turned; a head's scores take four times that
    assert sum(sizes) < 16 * 4 * 4096 * 64 * 4


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", [n for n in FORMS if "silent" not in n and "log-sum-exp" not in n])
def test_gradients_of_every_form(name, runs):
    runs(8)
    f, args = FORMS[name]
    floats = [n for n, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def gradient(*args):
        def loss(*given):
            every = list(args)
            for n, a in zip(floats, given):
                every[n] = a
            return (f(*every).astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, tuple(range(len(floats))))(*(args[n] for n in floats))

    check(gradient, *args, tolerance=8 * TOLERANCE.get(str(args[0].dtype), 1e-5))


@pytest.mark.parametrize("f", [attend, causal])
def test_long_sequences_store_no_scores(f):
    """At full size, without any setting."""
    x = jax.ShapeDtypeStruct((2, 4, 8192, 64), jnp.float32)
    assert len(planned(f, x, x, x).kernels()) == 1
    assert pbkern.jit(f).memory_analysis(x, x, x).temp_size_in_bytes < 8 << 20  # scores take 2 GB
    assert "in chunks of 512 columns" in str(pbkern.jit(f).explain(x, x, x))


def test_without_fast_math_sums_keep_their_order():
    x = jax.ShapeDtypeStruct((1, 2, 4096, 64), jnp.float32)
    assert not any(map(in_loops, planned(attend, x, x, x, mlir_disable_fast_math=True).kernels()))


def test_a_window_of_counted_positions_is_a_mask_of_indices():
    """jax.nn closes over np.arange: read from memory, it could not tell which keys a window leaves out."""
    x = jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.float32)
    f = pbkern.jit(
        lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=(64, 0)
        )
    )
    (kernel,) = f.kernels(x, x, x)
    assert len(kernel.inputs) == 3


@pytest.mark.parametrize(
    "counted",
    [
        np.arange(7),
        np.arange(9, -5, -2),
        np.arange(5, dtype=np.uint8) * 60,
        np.arange(3) + 2**31 - 3,
    ],
    ids=str,
)
def test_counted_constants(counted):
    counted = counted.astype(np.int32) if counted.dtype == np.int64 else counted
    f = lambda x: x[:, None] * counted + counted[::-1]
    np.testing.assert_array_equal(pbkern.jit(f)(jnp.arange(4)), jax.jit(f)(jnp.arange(4)))


@pytest.mark.parametrize(
    "constant", [np.array([1, 2, 4]), np.array([5, 5, 5]), np.array([7]), np.arange(3.0)]
)
def test_other_constants_stay(constant):
    f = lambda x: x[:, None] + constant
    np.testing.assert_array_equal(pbkern.jit(f)(jnp.arange(4)), jax.jit(f)(jnp.arange(4)))


def test_the_maximum_of_one_row_may_be_seen_through_views_without_dimensions():
    def f(x, v):
        peak = lax.broadcast_in_dim(lax.reduce_max(x, (0,)), (1,), ())
        whole = lax.broadcast_in_dim(lax.squeeze(peak, (0,)), x.shape, ())
        weights = jnp.exp(x - whole)
        return weights @ v / weights.sum()

    columns = 2 * pbkern.fuse.tiling.online_analysis.CHUNK_COLUMNS
    args = rand(columns), rand(columns, 4, seed=1)
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    found = pbkern.fuse.tiling.online_analysis.find_online(jaxpr.eqns, jaxpr.outvars, SIZES)
    assert found is not None
    assert found.maximum is jaxpr.eqns[0]
    assert len(found.sums) == 2
    check(f, *args, tolerance=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_under_a_large_mask_that_is_made_in_place(dtype):
    """The mask is computed again by each kernel, from small values that no other kernel reads."""

    def loss(q, k, v, bias, position, shown, places):
        queries, keys = (jnp.arange(x.shape[1]) for x in (q, k))
        up_to = places[:, None] <= position + queries[None, :, None]
        mask = up_to[:, None] | (shown[:, :, None] & (keys <= position))[:, None]
        return (jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask) ** 2).sum()

    def args(make, width, n, m):
        arrays = [((2, n, 2, width), dtype), ((2, m, 1, width), dtype), ((2, m, 1, width), dtype)]
        arrays += [((2, 1, 1, m), dtype), ((), "int32"), ((2, n), "bool"), ((2, m), "int32")]
        return [make(shape, np.dtype(element)) for shape, element in arrays]

    with jax.enable_x64(dtype == "float64"):
        large = args(jax.ShapeDtypeStruct, 64, 200, 4999)
        assert planned(jax.grad(loss, argnums=(0, 1, 2)), *large).kernels()
        drawn = np.random.default_rng(0)
        small = args(lambda shape, kind: jnp.asarray(drawn.normal(size=shape) * 3, kind), 8, 7, 30)
        check(jax.grad(loss, argnums=(0, 1, 2)), *small, tolerance=1e-4)
