"""Scatters on NVIDIA GPUs: teams of threads take updates at the same time, by atomic operations; results beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.options import CompileOptions
from pbkern.targets import get_target

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def places(count, below, low=0):
    return RNG.integers(low, below, count).astype(np.int32)


def simulated(f, *args):
    """The simulated run of a function, whose result is that of float64."""
    found = pbkern.simulate(f, *args, device="sm_90a")
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in map(np.asarray, args)]
        want = f(*map(jnp.asarray, wide))
    for got, expected in zip(jax.tree.leaves(found.results), jax.tree.leaves(want)):
        assert got.dtype.kind == np.asarray(expected).dtype.kind
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    return found


def atomics(found):
    return sum(ptx.count("atom.") for ptx in found.ptx)


SUMS = {
    "rows": (lambda x, i: jax.ops.segment_sum(x, i, 50), floats(600, 64), places(600, 50)),
    "odd rows": (lambda x, i: jax.ops.segment_sum(x, i, 7), floats(131, 37), places(131, 7)),
    "rows longer than a block": (
        lambda x, i: jax.ops.segment_sum(x, i, 5),
        floats(33, 1100),
        places(33, 5),
    ),
    "numbers": (lambda x, i: jax.ops.segment_sum(x, i, 30), floats(5000), places(5000, 30)),
    "places outside": (
        lambda x, i: jnp.ones((40, 8)).at[i].add(x),
        floats(333, 8),
        places(333, 60, -50),
    ),
    "clipped": (
        lambda x, i: jnp.ones((40, 8)).at[i].add(x, mode="clip"),
        floats(333, 8),
        places(333, 60),
    ),
    "what is computed": (
        lambda x, i: jnp.zeros((20, 16)).at[i % 20].add(jnp.exp(-x * x)),
        floats(250, 16),
        places(250, 90),
    ),
    "points of a plane": (
        lambda x, i: jnp.zeros((9, 11)).at[i, i % 11].add(x),
        floats(700),
        places(700, 9),
    ),
    "gradient of a look-up": (
        lambda e, i, g: jax.vjp(lambda e: e[i], e)[1](g)[0],
        floats(100, 96),
        places(70, 100),
        floats(70, 96),
    ),
    "a batch": (
        jax.vmap(lambda x, i: jnp.zeros((6, 5)).at[i].add(x)),
        floats(3, 40, 5),
        places((3, 40), 6),
    ),
    "integers": (lambda i: jnp.zeros(50, np.int32).at[i].add(3), places(2000, 50)),
    "greatest": (
        lambda x, i: jnp.zeros(9, np.int32).at[i].max(x),
        places(300, 99, -9),
        places(300, 9),
    ),
    "least of naturals": (
        lambda x, i: jnp.full(9, 70, np.uint32).at[i].min(x),
        places(300, 99).astype(np.uint32),
        places(300, 9),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_updates_are_atomic(name):
    f, *args = SUMS[name]
    assert atomics(simulated(f, *args)) > 0


IN_ORDER = {
    "the last one stays": (
        lambda x, i: jnp.zeros((9, 4)).at[i].set(x),
        floats(40, 4),
        places(40, 9),
    ),
    "products": (lambda x, i: jnp.ones((9, 4)).at[i].mul(x), floats(40, 4), places(40, 9)),
    "greatest floats": (lambda x, i: jax.ops.segment_max(x, i, 9), floats(40, 4), places(40, 9)),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_other_updates_keep_their_order(name):
    f, x, i = IN_ORDER[name]
    if name != "the last one stays":
        assert atomics(simulated(f, x, i)) == 0
        return
    found = pbkern.simulate(f, x, i, device="sm_90a")
    want = np.zeros((9, 4), np.float32)
    for row, at in zip(x, i):
        want[at] = row
    np.testing.assert_array_equal(found.results, want)
    assert atomics(found) == 0


def test_sums_of_floats_keep_their_order_without_fast_math():
    f, x, i = SUMS["rows"]
    options = {"target": "nvgpu", "device": "sm_90a", "mlir_disable_fast_math": True}
    ptx = pbkern.jit(f, compile_options=options).as_text(x, i, stage="ptx")
    assert "atom." not in ptx


def test_what_a_step_adds_may_not_depend_on_the_steps_before():
    def chained(i, x):
        def step(n, y):
            return y.at[i[n]].add(x[n] + y[i[n] - 1])

        return jax.lax.fori_loop(0, 8, step, jnp.zeros(16))

    i, x = np.arange(1, 9, dtype=np.int32), floats(8)
    found = simulated(chained, i, x)
    assert atomics(found) == 0


def test_a_sum_at_one_place_stays_a_loop():
    def kernel(x, o):
        o[...] = jnp.zeros_like(o)

        def step(n, _):
            o[0, :] += x[n, :]
            return 0

        jax.lax.fori_loop(0, 24, step, 0)

    x = floats(24, 8)
    written = pbkern.kernel(kernel, out_shape=jax.ShapeDtypeStruct((1, 8), jnp.float32))
    found = pbkern.simulate(written, x)
    np.testing.assert_allclose(
        jax.tree.leaves(found.results)[0], x.sum(0, keepdims=True), rtol=1e-5
    )
    assert atomics(found) == 0


def test_nothing_is_loaded_for_updates_of_other_programs():
    """Programs that own rows read the indices of all, and the values of their own."""
    x, i = floats(512, 128), places(512, 64)
    counts = simulated(lambda x, i: jax.ops.segment_sum(x, i, 64), x, i).counts
    assert counts.sectors * 32 < 10 * x.nbytes


def test_blocks_of_scatters_fill_the_device():
    """As many chunks as have one update per result."""
    s = jax.ShapeDtypeStruct
    args = s((100000, 64), jnp.float32), s((100000,), jnp.int32)
    f = pbkern.jit(
        lambda x, i: jax.ops.segment_sum(x, i, 1000),
        compile_options={"target": "nvgpu", "device": "sm_90a"},
    )
    first, second = f.kernels(*args)
    assert np.prod(first.grid) >= 132
    assert np.prod(second.grid) >= 132
    build, _ = f.build(args, {})
    options = CompileOptions(target="nvgpu", device="sm_90a")
    codes = get_target("nvgpu").compile(build.plan.programs()[0], options).distinct()
    assert codes[0].function.threads == 512


def test_results_of_few_short_lines_are_cut():
    """A sum of many planes has more programs than one."""
    f = pbkern.jit(lambda x: x.sum(0), compile_options={"target": "nvgpu", "device": "sm_90a"})
    (kernel,) = f.kernels(jax.ShapeDtypeStruct((60, 50, 64), jnp.float32))
    assert np.prod(kernel.grid) >= 50
