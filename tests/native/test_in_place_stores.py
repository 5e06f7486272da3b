"""Scratch that is updated from its own neighbouring elements: as if all were read before any is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.targets.cpu.locality.walk_order import walks_ahead
from tests.lowered import lowered


def updated(fields, writes, height, width):
    """What the kernel does, in NumPy: each write is (field, row, column, [(weight, field, row, column)])."""
    new = [
        (f, r, c, sum(w * fields[g][i : i + height, j : j + width] for w, g, i, j in terms))
        for f, r, c, terms in writes
    ]
    fields = [x.copy() for x in fields]
    for f, r, c, value in new:
        fields[f][r : r + height, c : c + width] = value
    return fields


def kernel(shape, dtype, count, writes, height, width):
    def body(*refs):
        xs, outs, scratch = refs[:count], refs[count : 2 * count], refs[2 * count :]
        for x, t in zip(xs, scratch):
            t[...] = x[...]
        new = [
            sum(dtype(w) * scratch[g][i : i + height, j : j + width] for w, g, i, j in terms)
            for *_, terms in writes
        ]
        for (f, r, c, _), value in zip(writes, new):
            scratch[f][r : r + height, c : c + width] = value
        for o, t in zip(outs, scratch):
            o[...] = t[...]

    types = [jax.ShapeDtypeStruct(shape, dtype)] * count
    return pbkern.kernel(
        body, out_shape=types, scratch_shapes=[pbkern.Scratch(shape, dtype)] * count
    )


def drawn(rng, count):
    """(shape, height, width, writes) of updates at some distance, most of them such that rows follow each other."""
    height, width = int(rng.integers(1, 12)), int(rng.choice([1, 15, 16, 33, 64, 100, 163]))
    far = int(rng.integers(1, 4))
    whole = 32 if rng.random() < 0.8 else 1  # rows of whole vectors
    shape = height + 2 * far, -(-(width + 2 * far) // whole) * whole
    row, column = int(rng.choice([0, 0, far])), far
    writes = []
    for f in range(count):
        terms = []
        for _ in range(int(rng.integers(1, 6))):
            low = row if rng.random() < 0.8 else 0
            place = int(rng.integers(low, 2 * far + 1)), int(rng.integers(0, 2 * far + 1))
            terms.append((float(rng.integers(1, 4)), int(rng.integers(0, count)), *place))
        writes.append((f, row, column, terms))
    return shape, height, width, writes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("seed", range(8))
def test_updates_agree(seed, dtype):
    rng = np.random.default_rng(seed)
    count = 1 + seed % 2
    shape, height, width, writes = drawn(rng, count)
    with jax.enable_x64(dtype == np.float64):
        xs = [rng.integers(0, 9, shape).astype(dtype) for _ in range(count)]
        got = kernel(shape, dtype, count, writes, height, width)(*map(jnp.asarray, xs))
        for g, w in zip(got, updated(xs, writes, height, width)):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(("row", "in_place"), [(0, True), (1, False)])
def test_rows_follow_each_other_without_a_copy(row, in_place, monkeypatch):
    """A sum of four neighbours, below and beside the element that it is stored to: over the row before or over its own."""
    found, safe = [], walks_ahead
    monkeypatch.setattr(
        "pbkern.targets.cpu.locality.policy.walks_ahead",
        lambda *args: found.append(safe(*args)) or found[-1],
    )
    writes = [(0, row, 16, [(1.0, 0, 0, 16), (1.0, 0, 2, 16), (1.0, 0, 1, 15), (1.0, 0, 1, 17)])]
    x = np.random.default_rng(0).integers(0, 9, (14, 96)).astype(np.float32)
    made = kernel(x.shape, np.float32, 1, writes, 12, 64)
    lowered(made, jnp.asarray(x))
    assert found == [in_place]
    np.testing.assert_array_equal(made(jnp.asarray(x))[0], updated([x], writes, 12, 64)[0])
