"""Register tiles hold points of two dimensions where those of one would leave the processor waiting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Buf, Nest, Pool, Reduction, Store
from pbkern.targets.cpu.schedule.register_tiles import along_results
from pbkern.targets.cpu.schedule.register_tiles.choice import choose

F32 = np.dtype(np.float32)
LAYOUTS = {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW")}


def weight_gradient(vector_last: bool) -> Nest:
    """out[h, w, c] = sum of image[n, h + y, w + x] * change[n, y, x, c], or change[n, c, y, x]."""
    pool, at = Pool(), {d: Affine.symbol(d) for d in "chwyxn"}
    dims = {"h": 3, "w": 3, "c": 32} if vector_last else {"c": 32, "h": 3, "w": 3}
    image, out = Buf("image", (8, 30, 30), F32), Buf("out", tuple(dims.values()), F32)
    change = Buf("change", (8, 28, 28, 32) if vector_last else (8, 32, 28, 28), F32)
    left = pool.load(F32, image, (at["n"], at["h"] + at["y"], at["w"] + at["x"]), False)
    right = pool.load(F32, change, tuple(at[d] for d in ("nyxc" if vector_last else "ncyx")), False)
    store = Store(out, tuple(at[d] for d in dims), pool.accumulator(F32, 0), inner=False)
    return Nest(
        dims | {"y": 28, "x": 28, "n": 8},
        ("y", "x", "n"),
        (Reduction("dot", (left, right), F32),),
        (store,),
    )


def test_all_places_of_a_window_share_the_vectors():
    schedule = choose(weight_gradient(vector_last=True))
    assert schedule.vector == "c"
    assert schedule.jam == {"w": 3, "h": 3}


def test_tiles_along_the_reduction_have_points_on_both_sides():
    schedule = choose(weight_gradient(vector_last=False))
    assert schedule.vector == "x"
    assert schedule.jam.get("w") == 3
    assert schedule.jam.get("c", 1) > 1


def test_products_of_equal_sizes_are_searched_once():
    def product(m: str, n: str, k: str) -> Nest:
        pool, at = Pool(), {d: Affine.symbol(d) for d in (m, n, k)}
        left, right, out = (Buf(name, (37, 37), F32) for name in ("left", "right", "out"))
        args = (
            pool.load(F32, left, (at[m], at[k]), False),
            pool.load(F32, right, (at[k], at[n]), False),
        )
        store = Store(out, (at[m], at[n]), pool.accumulator(F32, 0), inner=False)
        return Nest({m: 37, n: 37, k: 37}, (k,), (Reduction("dot", args, F32),), (store,))

    first = choose(product("i", "j", "k"))
    searched = along_results._best_tile.cache_info().misses
    second = choose(product("x", "y", "z"))
    assert along_results._best_tile.cache_info().misses == searched
    assert (first.vector, first.jam) == ("j", {"i": second.jam["x"]})
    assert (second.vector, second.unroll) == ("y", first.unroll)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_weights(layout):
    def f(x, w, y):
        conv = lambda w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[layout]
        )
        return jax.vjp(conv, w)[1](y)[0]

    rng = np.random.default_rng(0)
    shapes = {
        "NHWC": ((2, 9, 11, 5), (3, 3, 5, 21), (2, 9, 11, 21)),
        "NCHW": ((2, 5, 9, 11), (7, 5, 3, 3), (2, 7, 9, 11)),
    }
    x, w, y = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes[layout])
    np.testing.assert_allclose(pbkern.jit(f)(x, w, y), f(x, w, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("step", "shared"), [(4, False), (2, True)])
def test_rows_side_by_side_share_no_loads(step, shared):
    """out[w, c] = sum of x[step * w + y, c] over four y: windows share rows only where they overlap."""
    pool, at = Pool(), {d: Affine.symbol(d) for d in "wcy"}
    x, out = Buf("x", (60, 150), F32), Buf("out", (12, 150), F32)
    rows = pool.load(F32, x, (at["w"] * step + at["y"], at["c"]), False)
    store = Store(out, (at["w"], at["c"]), pool.accumulator(F32, 0), inner=False)
    nest = Nest({"w": 12, "c": 150, "y": 4}, ("y",), (Reduction("sum", (rows,), F32),), (store,))
    schedule = choose(nest)
    assert schedule.vector == "c"
    assert bool(schedule.jam) == shared
