"""Register tiles at the ends of rows, and of rows that would evict one another from the first cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Buf, Nest, Pool, Reduction, Store
from pbkern.targets.costs.caches import fit
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.register_tiles.choice import contraction_tile
from pbkern.targets.cpu.schedule.sliding_windows import chunks
from tests.arrays import array


def draw(shape, dtype, seed):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def product(rows: int, columns: int, depth: int, dtype=np.float32) -> Nest:
    pool, dtype = Pool(), np.dtype(dtype)
    i, j, k = map(Affine.symbol, "ijk")
    left = pool.load(dtype, Buf("left", (rows, depth), dtype), (i, k), False)
    right = pool.load(dtype, Buf("right", (depth, columns), dtype), (k, j), False)
    store = Store(
        Buf("out", (rows, columns), dtype), (i, j), pool.accumulator(dtype, 0), inner=False
    )
    return Nest(
        {"i": rows, "j": columns, "k": depth},
        ("k",),
        (Reduction("dot", (left, right), dtype),),
        (store,),
    )


@pytest.mark.parametrize(("columns", "tail"), [(20, 4), (24, 8), (40, 8), (63, 15)])
def test_a_partial_vector_shares_rows_with_the_whole_ones_before_it(columns, tail):
    nest = product(500, columns, 500)
    *_, last = chunks(nest, contraction_tile(nest, "j", Vectors())[1])
    assert last.high == columns
    assert last.tail == tail
    assert last.vectors > 1


@pytest.mark.parametrize("columns", [17, 20, 36, 40])
def test_a_partial_vector_leaves_registers_for_its_zeros(columns):
    """Beside accumulators: vectors of one operand, an element of the other one, zeros, and what replaces some of them."""
    sched = contraction_tile(product(500, columns, 500), "j", Vectors())[1]
    assert sched.tile + sched.unroll + 3 <= 32


@pytest.mark.sampled(5)
@pytest.mark.parametrize("columns", [17, 20, 31, 40, 47, 100])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_nothing_is_stored_behind_a_partial_vector(columns, dtype):
    """Of results whose rows follow each other, with what is added behind the product."""

    def f(x, w, bias, residual):
        return jax.nn.gelu(x @ w + bias) + residual

    with jax.enable_x64(True):
        shapes = (75, 66), (66, columns), (columns,), (75, columns)
        args = [draw(s, dtype, n) for n, s in enumerate(shapes)]
        want = np.asarray(jax.jit(f)(*(np.asarray(a, np.float64) for a in args)))
        got = np.asarray(pbkern.jit(f)(*args), np.float64)
    rtol = {"float64": 1e-13, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(got, want, atol=rtol * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.argmin])
def test_columns_of_a_partial_vector(reduce):
    x = draw((300, 41), "float32", 1)
    np.testing.assert_allclose(
        pbkern.jit(lambda x: reduce(x, 0))(x), reduce(np.float64(x), 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("depth", [512, 1024, 4096])
@pytest.mark.parametrize("columns", [16, 24, 64])
def test_rows_of_a_tile_stay_in_the_cache(columns, depth):
    """Rows that lie whole powers of two apart fall into few sets: a tile has no more of them than these hold."""
    nest = product(1000, columns, depth)
    assert fit(contraction_tile(nest, "j", Vectors())[1].jam["i"], 4 * depth, Vectors())
    assert contraction_tile(product(1000, 16, 500), "j", Vectors())[1].jam["i"] > 16


def test_rows_of_few_columns_are_not_copied():
    """What the columns of a few register tiles share is not read often enough for a copy without conflicts to pay."""
    x, w = draw((512, 1024), "float32", 1), draw((1024, 24), "float32", 2)
    f = pbkern.jit(lambda x, w: x @ w)
    assert f.as_text(x, w, stage="nests").count("nest [") == 1
    np.testing.assert_allclose(f(x, w), np.float64(x) @ np.float64(w), atol=2e-4)
