"""Scatters with index arrays are fused: updates are computed where they are added, blocks are disjoint, values are JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.fuse.partition.leave_layouts_to_xla import REASON as BESIDE

from .checking import check, check_blocks, ints, planned, rand

IDS = ints(40, low=-3, high=23)  # for 20 rows: some wrap around, some are dropped, many meet
X, V = rand(20, 30), rand(40, 30, seed=1)


def gradient_of_lookup(table, ids):
    return jax.grad(lambda t: (jnp.tanh(t[ids]) ** 2).sum())(table)


def at_points(x, i, j, v):
    return x.at[i, j].add(v)


def windows(x, starts, v):
    """Windows of 3 by 4 elements at any place."""
    dn = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return lax.scatter_add(x, starts, v, dn)


CASES = {
    "add rows": (lambda x, i, v: x.at[i].add(v), X, IDS, V),
    "set rows": (lambda x, i, v: x.at[i].set(v), X, IDS, V),
    "subtract rows": (lambda x, i, v: x.at[i].subtract(v), X, IDS, V),
    "multiply rows": (lambda x, i, v: x.at[i].multiply(v), X, IDS, 1 + 0.1 * V),
    "least rows": (lambda x, i, v: x.at[i].min(v), X, IDS, V),
    "greatest rows": (lambda x, i, v: x.at[i].max(v), X, IDS, V),
    "clipped": (lambda x, i, v: x.at[i].add(v, mode="clip"), X, IDS, V),
    "clipped below": (
        lambda x, i, v: x.at[i].add(v, mode="clip", wrap_negative_indices=False),
        X,
        IDS,
        V,
    ),
    "promised": (lambda x, i, v: x.at[i].add(v, mode="promise_in_bounds"), X, IDS % 20, V),
    "columns": (lambda x, i, v: x.at[:, i].add(v), X, IDS, rand(20, 40)),
    "points": (at_points, X, IDS, ints(40, high=30, seed=2), rand(40)),
    "points of a grid": (at_points, X, IDS[:5, None], ints(1, 7, high=33, seed=2), rand(5, 7)),
    "points, clipped": (
        lambda x, i, j, v: x.at[i, j].add(v, mode="clip"),
        X,
        IDS,
        ints(40, high=40, seed=2),
        rand(40),
    ),
    "planes of a middle dimension": (
        lambda x, i, v: x.at[:, i].set(v),
        rand(4, 20, 6),
        IDS,
        rand(4, 40, 6),
    ),
    "windows": (windows, X, ints(9, 2, low=-1, high=25), rand(9, 3, 4)),
    "one number everywhere": (lambda x, i: x.at[i].add(1), ints(20), IDS),
    "truths": (lambda x, i, v: x.at[i].set(v), X > 0, IDS, V > 0),
    "short numbers": (
        lambda x, i, v: x.at[i].add(v),
        rand(20, 30, dtype="bfloat16"),
        IDS,
        rand(40, 30, dtype="bfloat16"),
    ),
    "short indices": (lambda x, i, v: x.at[i].add(v), X, IDS.astype("int8"), V),
    "unsigned indices": (lambda x, i, v: x.at[i].add(v), X, IDS.astype("uint32"), V),
    "batches": (
        jax.vmap(lambda x, i, v: x.at[i].add(v)),
        rand(3, 20, 6),
        ints(3, 9, high=22),
        rand(3, 9, 6),
    ),
    "gradient of a lookup": (gradient_of_lookup, X, IDS % 20),
    "gradient of take_along_axis": (
        jax.grad(lambda x, i: (jnp.take_along_axis(x, i, 0) ** 2).sum()),
        X,
        ints(7, 30, high=20),
    ),
    "gradient of a gather of windows": (
        jax.grad(
            lambda x, i: (jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (3, 30)))(i) ** 2).sum()
        ),
        X,
        IDS,
    ),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 20), V, IDS),
    "segment_max": (lambda x, i: jax.ops.segment_max(x, i, 20), V, IDS),
    "bincount": (lambda i: jnp.bincount(i, length=25), ints(50, high=30)),
    "gradient of overlapping max pooling": (
        jax.grad(
            lambda x: (
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") ** 2
            ).sum()
        ),
        rand(2, 9, 10, 3),
    ),
    "updates from sums": (lambda x, i, v: x.at[i].add(v.sum(1, keepdims=True) * v), X, IDS, V),
    "indices from arithmetic": (lambda x, i, v: x.at[i * 3 % 20].add(v), X, IDS, V),
    "read afterwards": (lambda x, i, v: jnp.tanh(x.at[i].add(v)) * 2, X, IDS, V),
    "summed afterwards": (lambda x, i, v: x.at[i].add(v).sum(1), X, IDS, V),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_scatter(name, monkeypatch):
    f, *args = CASES[name]
    check(f, *args)
    check_blocks(monkeypatch, f, *args, seeds=range(3))


@pytest.mark.parametrize(
    "name", ["gradient of a lookup", "segment_sum", "points", "bincount", "set rows"]
)
def test_one_kernel(name):
    f, *args = CASES[name]
    check(f, *args, kernels=1)


MANY = {
    "histogram": (lambda i: jnp.zeros(50, jnp.int32).at[i].add(1), ints(100_003, high=60)),
    "least": (lambda i, v: jnp.full(40, 2.0).at[i].min(v), ints(60_000, high=60), rand(60_000)),
    "differences": (
        lambda i, v: rand(30, seed=3).at[i].subtract(v, mode="clip"),
        ints(50_000, high=60),
        rand(50_000),
    ),
    "products": (
        lambda i, v: jax.ops.segment_prod(v, i, 7),
        ints(60_000, high=9),
        1 + 1e-3 * rand(60_000),
    ),
    "rows": (lambda i, v: jax.ops.segment_sum(v, i, 11), ints(40_009, high=12), rand(40_009, 5)),
    "batches": (
        jax.vmap(lambda i, v: jnp.zeros(20).at[i].add(v)),
        ints(3, 30_000, high=20),
        rand(3, 30_000),
    ),
    "points of a grid": (
        lambda i, j: jnp.zeros((5, 6)).at[i, j].add(1.0),
        ints(50_000, high=5),
        ints(50_000, high=7),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MANY)
def test_many_updates_of_little_are_combined_in_private(name, monkeypatch):
    f, *args = MANY[name]
    plan = check(f, *args, tolerance=2e-3)
    assert max(k.grid[0] for k in plan.kernels() if k.grid) > 1, str(plan.explanation)
    check(f, *args, tolerance=2e-3, mlir_disable_fast_math=True)


def test_the_last_update_wins():
    x, i = jnp.zeros((4, 3)), jnp.asarray([1, 1, 2, 1])
    v = jnp.arange(12.0).reshape(4, 3)
    plan = planned(lambda x, i, v: x.at[i].set(v), x, i, v)
    from .oracle import run_program

    (got,) = plan.evaluate([x, i, v], run_program)
    np.testing.assert_array_equal(got, np.stack([x[0], v[3], v[2], x[3]]))


def test_no_updates():
    check(lambda x, i, v: x.at[i].add(v) * 2, X, ints(0), rand(0, 30))


def test_what_stays_with_xla_says_why():
    i = IDS[:3]
    plan = check(lambda x, i: x.at[i].apply(jnp.sin) + 1, X, i, left=True, supports=_cpu())
    assert [x.why for x in plan.left_to_xla() if x.why != BESIDE] == [
        "it applies a function of its own to the elements"
    ]
    plan = check(lambda x: x.at[0].apply(jnp.sin), X, left=True, supports=_cpu())
    assert plan.left_to_xla()


LOOPS = {
    "rows": lambda x, i, v: lax.fori_loop(0, 6, lambda k, a: a.at[i[k]].add(jnp.sin(v[k])), x),
    "one row": lambda x, i, v: lax.fori_loop(0, 6, lambda k, a: a.at[i[k, 0]].set(v[k, 0]), x),
    "scan": lambda x, i, v: lax.scan(lambda a, t: (a.at[t[0]].max(t[1]), t[1].sum()), x, (i, v)),
    "seen at each step": lambda x, i, v: lax.scan(lambda a, t: ((b := a.at[t].add(1.0)), b[0]), x, i),
    "backwards": lambda x, i, v: lax.scan(lambda a, t: (a.at[t[0]].set(t[1]), None), x, (i, v), reverse=True)[0],
    "while": lambda x, i, v: lax.while_loop(
        lambda s: s[0] * s[0] < 20, lambda s: (s[0] + 1, s[1].at[i[s[0]]].multiply(v[s[0]])), (0, x)),
    "after arithmetic": lambda x, i, v: lax.fori_loop(0, 6, lambda k, a: (a * 0.5).at[i[k]].add(v[k]), x),
    "two carries": lambda x, i, v: lax.fori_loop(
        0, 6, lambda k, s: (s[0].at[i[k]].add(1.0), s[1] + v[k]), (x, v[0])),
    "a constant": lambda x, i, v: lax.fori_loop(0, 6, lambda k, a: a.at[k, 0].set(1.0).at[k, i[k, 0] % 8].add(2.0), x),
    "of its own": lambda x, i, v: lax.fori_loop(0, 6, lambda k, a: a + jnp.zeros_like(a).at[i[k]].add(v[k]), x),
    "of another array": lambda x, i, v: lax.fori_loop(0, 6, lambda k, a: a + x.at[i[k]].add(v[k]), x),
    "read as well": lambda x, i, v: lax.fori_loop(0, 6, lambda k, s: (s[0].at[i[k]].add(1.0), s[1] + s[0][3]), (x, x[0])),
    "read before": lambda x, i, v: lax.fori_loop(
        0, 6, lambda k, s: (lambda y: (y, s[1].at[i[k, 0]].set(y)))(jnp.sin(v[k, 0, :2] @ s[1])[::-1]),
        (jnp.zeros(20000), jnp.tile(x.reshape(2, 80), 250))),
    "a loop in a loop": lambda x, i, v: lax.fori_loop(
        0, 3, lambda j, a: lax.fori_loop(0, 6, lambda k, b: b.at[i[k]].add(v[k]), a), x),
    "a branch": lambda x, i, v: lax.fori_loop(
        0, 6, lambda k, a: lax.cond(i[k, 0] > 3, lambda a: a.at[i[k]].add(v[k]), lambda a: a, a), x),
}  # fmt: skip
COPIES = {
    "a constant, and read": lambda x, i, v: lax.fori_loop(0, 6, lambda k, a: a.at[k, 1].add(1.0) + a.sum(), x),
}  # fmt: skip
STEPS = rand(20, 8), ints(6, 5, low=-3, high=23), rand(6, 5, 8, seed=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_update_their_carry_in_place(name):
    check(LOOPS[name], *STEPS)


@pytest.mark.parametrize("name", COPIES)
def test_loops_that_would_copy_stay_with_xla(name):
    plan = check(COPIES[name], rand(600, 8), *STEPS[1:], left=True)
    assert any("a scatter in its body would copy its operand" in x.why for x in plan.left_to_xla())
    check(COPIES[name], *STEPS)  # a copy of few bytes takes less than a step's launches


def _cpu():
    from pbkern.lower.rules.coverage import supports

    return supports


# ---- empty index vectors: every window starts at the first element; XLA is wrong about several of them -----------------

COMBINED = {
    lax.scatter: lambda old, new: new, lax.scatter_add: np.add, lax.scatter_sub: np.subtract, lax.scatter_mul: np.multiply,
    lax.scatter_min: np.minimum, lax.scatter_max: np.maximum,
}  # fmt: skip


@pytest.mark.parametrize("op", COMBINED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("count", [(), (1,), (3,), (2, 2), (0,)])
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("shape", "inserted"),
    [((), ()), ((5,), ()), ((5,), (0,)), ((3, 4), (0,)), ((2, 3), (0, 1)), ((2, 3, 4), (1,))],
)
def test_scatters_without_an_index(shape, inserted, count, op):
    window = [n for d, n in enumerate(shape) if d not in inserted]
    x = np.arange(np.prod(shape, dtype=int), dtype="f").reshape(shape) + 1
    updates = np.random.default_rng(0).integers(2, 9, (*count, *window)).astype("f")
    numbers = lax.ScatterDimensionNumbers(tuple(range(len(count), updates.ndim)), inserted, ())
    f = pbkern.jit(lambda x, v: op(x * 2, jnp.zeros((*count, 0), jnp.int32), v, numbers) + 1)
    want, place = (
        np.array(x * 2),
        tuple(0 if d in inserted else slice(None) for d in range(len(shape))),
    )
    for update in updates.reshape(-1, *window):
        want[place] = COMBINED[op](want[place], update)
    np.testing.assert_array_equal(f(x, updates), want + 1)
