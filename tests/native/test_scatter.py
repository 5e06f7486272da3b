"""Scatters as machine code equal NumPy's, whatever the shapes, types, modes and blocks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from pbkern import jit
from pbkern.fuse.tiling import block_search
from pbkern.lower.rules.coverage import supports
from pbkern.targets.cpu.machines.detect import detected_machine
from tests.fuse import checking
from tests.fuse.checking import random_blocks
from tests.fuse.test_scatter import CASES, LOOPS, MANY, STEPS
from tests.lowered import lowered

from .running import native_program


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_scatter(name, monkeypatch):
    f, *args = CASES[name]
    run(f, *args)
    for seed in range(2):
        monkeypatch.setattr(block_search, "_descend", random_blocks(seed))
        run(f, *args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MANY)
def test_private_results(name):
    f, *args = MANY[name]
    run(f, *args)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name):
    run(LOOPS[name], *STEPS)


def run(f, *args):
    plan = checking.planned(f, *args, supports=supports)
    assert not plan.left_to_xla(), str(plan.explanation)
    got = [np.asarray(x) for x in plan.evaluate(list(args), native_program)]
    for g, w in zip(got, map(np.asarray, jax.tree.leaves(f(*args)))):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        tolerance = 5e-2 if g.dtype.itemsize == 2 else 2e-3
        np.testing.assert_allclose(
            g.astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance
        )
    return got


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1024, 1025, 2300])
@pytest.mark.parametrize("rows", [37, 600_000], ids=["near", "far"])
def test_points_are_made_in_strips(count, rows):
    """Places and updates by arithmetic, the last one of several at a place, some outside."""
    rng = np.random.default_rng(count)
    i, v = rng.integers(-rows, rows // 2 + 9, count), rng.normal(size=count).astype(np.float32)

    def f(i, v):
        return jnp.zeros(rows).at[2 * i].add(jnp.exp(v), mode="drop"), jnp.zeros(rows).at[
            i + 1
        ].set(v * v, mode="drop")

    run(f, jnp.asarray(i, jnp.int32), v)


COMBINE = {
    "add": np.add.at,
    "subtract": np.subtract.at,
    "multiply": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


@given(st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_rows_as_numpy_does(data):
    """x.at[i].combine(v) in float64, one update after the other."""
    rows, count, width = (data.draw(st.integers(1, n)) for n in (9, 20, 40))
    dtype = data.draw(st.sampled_from(["float32", "int32", "int8", "uint8", "bfloat16"]))
    combine = data.draw(st.sampled_from(list(COMBINE)))
    mode = data.draw(st.sampled_from(["drop", "clip"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    x, v = (rng.integers(1, 4, size=(n, width)) for n in (rows, count))
    i = rng.integers(-2 * rows, 2 * rows, size=count)

    def f(x, i, v):
        return getattr(x.at[i], combine)(v, mode=mode)

    args = jnp.asarray(x, dtype), jnp.asarray(i, jnp.int32), jnp.asarray(v, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_search, "_descend", random_blocks(data.draw(st.integers(0, 100))))
        (got,) = run(f, *args)
    want = np.array(np.asarray(args[0]), np.float64 if dtype == "bfloat16" else dtype)
    for k, row in zip(np.where(i < 0, i + rows, i), np.asarray(args[2]).astype(want.dtype)):
        k = min(max(k, 0), rows - 1) if mode == "clip" else k
        if 0 <= k < rows:
            _one(want, k, row, combine)
    tolerance = 0.1 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance)


def _one(a, k, row, combine):
    if combine == "set":
        a[k] = row
    else:
        COMBINE[combine](a, (np.full(len(row), k), np.arange(len(row))), row)


@given(st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_dimension_numbers(data):
    """Windows, batches and chosen dimensions in any arrangement, at any place."""
    rank = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(1, 6)) for _ in range(rank))
    kinds = [data.draw(st.sampled_from(["window", "chosen", "batch"])) for _ in range(rank)]
    batches = [d for d in range(rank) if kinds[d] == "batch"]
    windows = [d for d in range(rank) if kinds[d] == "window"]
    chosen = [d for d in range(rank) if kinds[d] == "chosen"] + [
        d for d in windows if data.draw(st.booleans())
    ]
    assume(chosen)  # arrays of no index stay with XLA
    loops = [shape[d] for d in batches] + [
        data.draw(st.integers(1, 5)) for _ in range(data.draw(st.integers(0, 2)))
    ]
    order = data.draw(st.permutations(range(len(loops))))
    sizes = [data.draw(st.integers(1, shape[d])) for d in windows]
    at = sorted(data.draw(st.permutations(range(len(loops) + len(windows))))[: len(windows)])
    extents, rest = iter(sizes), iter([loops[k] for k in order])
    updates = tuple(
        next(extents) if d in at else next(rest) for d in range(len(loops) + len(windows))
    )
    numbers = lax.ScatterDimensionNumbers(
        tuple(at), tuple(d for d in range(rank) if kinds[d] == "chosen"), tuple(chosen), tuple(batches),
        tuple(order.index(k) for k in range(len(batches))))  # fmt: skip
    mode = data.draw(st.sampled_from(["drop", "clip"]))
    scatter = data.draw(
        st.sampled_from([lax.scatter, lax.scatter_add, lax.scatter_mul, lax.scatter_max])
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    x, v = (jnp.asarray(rng.integers(1, 5, size=n), jnp.float32) for n in (shape, updates))
    starts = rng.integers(-2, 8, size=(*(loops[k] for k in order), len(chosen)))
    i = jnp.asarray(starts, data.draw(st.sampled_from(["int32", "int8"])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_search, "_descend", random_blocks(data.draw(st.integers(0, 100))))
        run(lambda x, i, v: scatter(x, i, v, numbers, mode=mode), x, i, v)


def test_wide_and_unsigned_indices(monkeypatch):
    """Indices beyond 32 bits are outside, whichever block they are counted from."""
    x, v = jnp.arange(40.0).reshape(8, 5), jnp.ones((6, 5))
    with jax.enable_x64(True):
        far = np.asarray([1, 1 << 32, (1 << 32) + 3, -(1 << 40), 7, 8])
        for blocks in (None, random_blocks(1), random_blocks(2)):
            if blocks is not None:
                monkeypatch.setattr(block_search, "_descend", blocks)
            for mode in ("drop", "clip"):
                for dtype in ("int64", "uint64", "uint32"):
                    index = jnp.asarray(far.astype(dtype))
                    run(
                        lambda x, i, v, mode=mode: x.at[i].add(
                            v, mode=mode, wrap_negative_indices=False
                        ),
                        x,
                        index,
                        v,
                    )


COLUMNS = {
    "add": lambda x, i, v, mode: x.at[:, i].add(v, mode=mode),
    "set": lambda x, i, v, mode: x.at[:, i].set(v, mode=mode),
    "max": lambda x, i, v, mode: x.at[:, i].max(v, mode=mode),
    "made": lambda x, i, v, mode: x.at[:, i].add(jnp.sin(v), mode=mode),
    "made set": lambda x, i, v, mode: x.at[..., i].set(v * v, mode=mode),
    "turned": lambda x, i, v, mode: x.at[:, i].add(v.T.copy().T, mode=mode),
}
OF_COLUMNS = {
    "add": np.add,
    "set": lambda old, new: new,
    "max": np.maximum,
    "made": lambda old, new: old + np.sin(new),
    "made set": lambda old, new: new * new,
    "turned": np.add,
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", ["drop", "clip"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8"])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_updates_name(name, dtype, mode):
    """Many columns, some of them twice, outside or counted from the end, of a result that leaves the nearest cache."""
    rng = np.random.default_rng(7)
    kind = np.dtype(dtype)
    if kind.kind == "u" and name == "made":
        pytest.skip("no sine of integers")
    draw = rng.standard_normal if kind.kind == "f" else lambda shape: rng.integers(0, 15, shape)
    x, v = draw((67, 1003)).astype(kind), draw((67, 150)).astype(kind)
    index = rng.integers(-1003, 1100, 150).astype(np.int32)
    index[40:60] = index[:20]
    want = x.astype(np.float64 if kind.kind == "f" else kind)
    for k, column in enumerate(np.where(index < 0, index + 1003, index)):
        if column < 1003 or mode == "clip":
            at = min(column, 1002)
            want[:, at] = OF_COLUMNS[name](want[:, at], v[:, k].astype(want.dtype))
    with jax.enable_x64(kind == np.float64):
        got = np.asarray(jit(lambda x, i, v: COLUMNS[name](x, i, v, mode))(x, index, v))
    assert got.dtype == kind
    tolerance = {2: 1e-2, 4: 1e-5, 8: 1e-12}.get(kind.itemsize, 0)
    np.testing.assert_allclose(got.astype(want.dtype), want, rtol=tolerance, atol=tolerance)


def test_rows_take_all_updates_of_columns_in_turn():
    """Updates that are computed are made in vectors; where a near result or its updates want columns, these stay."""
    index = np.zeros(400, np.int32)

    def updates(f, *args):
        return [line for line in lowered(f, *args).splitlines() if line.lstrip().startswith("for ")]

    def add(x, i, v):
        return x.at[:, i].add(jnp.sin(v))

    wide, near = np.ones((64, 1000), np.float32), np.ones((8, 30), np.float32)
    assert len(updates(add, wide, index, wide[:, :400])) == 2
    assert len(updates(add, near, index, np.ones((8, 400), np.float32))) == 1
    assert len(updates(lambda x, i, v: x.at[:, i].add(v.T), wide, index, wide.T[:400])) == 1


def test_elements_of_float16_do_not_wait_for_one_another():
    """A load into the lowest lane of a register waits for the others, so elements come by general registers."""
    if not detected_machine().avx2:
        pytest.skip("the processor has no AVX2")
    x, index = np.ones((64, 1000), np.float16), np.zeros(300, np.int32)
    text = jit(lambda x, i: x.at[i].add(1)).as_text(x[0], index, stage="asm")
    assert "vcvtph2ps" in text
    assert not re.search(r"vpinsrw.*\(", text)
