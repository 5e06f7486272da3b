"""Expressions and reductions that few functions have, many in one function, simulated and compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern import BlockSpec, Scratch
from pbkern.core.options import CompileOptions
from pbkern.targets import get_target

RNG = np.random.default_rng(0)
GPU = {"target": "nvgpu"}


def kernel_code(f, *types):
    build, _ = pbkern.jit(f, compile_options=GPU).build(types, {})
    return [
        c
        for p in build.plan.programs()
        for c in get_target("nvgpu").compile(p, CompileOptions(target="nvgpu")).distinct()
    ]


def test_reductions():
    def f(x, n, flags):
        return {
            "xor": lax.reduce_xor(n, (1,)), "and": lax.reduce_and(n | 3, (1,)), "or": lax.reduce_or(n, (1,)),
            "prod": lax.reduce_prod(n, (1,)), "prod of reals": lax.reduce_prod(x, (1,)),
            "largest flag": jnp.argmax(flags, 1), "smallest flag": jnp.argmin(flags, 1),
            "any": flags.any(0), "all": flags.all(0), "max": lax.reduce_max(flags, (1,)), "min": lax.reduce_min(flags, (1,)),
            "log of sums": lax.cumlogsumexp(x, 1), "from the end": lax.cumlogsumexp(x, 1, reverse=True),
        }  # fmt: skip

    x, n = RNG.standard_normal((3, 70)).astype("f4"), RNG.integers(-9, 9, (3, 70)).astype("i4")
    x[0, 5], x[1, 3] = -np.inf, 80
    flags = RNG.random((3, 70)) > 0.97
    flags[1] = False
    sums, ends = (np.logaddexp.accumulate(v.astype("f8"), 1) for v in (x, x[:, ::-1]))
    want = {
        "xor": np.bitwise_xor.reduce(n, 1), "and": np.bitwise_and.reduce(n | 3, 1), "or": np.bitwise_or.reduce(n, 1),
        "prod": n.prod(1, dtype="i4"), "prod of reals": x.astype("f8").prod(1), "largest flag": flags.argmax(1),
        "smallest flag": flags.argmin(1), "any": flags.any(0), "all": flags.all(0), "max": flags.any(1), "min": flags.all(1),
        "log of sums": sums, "from the end": ends[:, ::-1],
    }  # fmt: skip
    found = pbkern.simulate(f, x, n, flags).results
    for name, got in zip(
        sorted(want), found if isinstance(found, list | tuple) else found.values()
    ):
        np.testing.assert_allclose(
            np.asarray(got, "f8"), want[name].astype("f8"), rtol=2e-5, atol=1e-5, err_msg=name
        )


def test_places_of_64_bits():
    """What 32 bits do not hold lies outside; a sum of large numbers is computed with 64."""
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    i = np.array([0, 49, 50, -1, 1 << 32, (1 << 32) + 7, -(1 << 33) + 3, 20])

    with jax.enable_x64(True):

        @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.int64))
        def far(i, o):
            o[...] = lax.iota(jnp.int64, 1 << 33)[:: 1 << 30] + i[...]

        def f(x, i, u):
            taken = [lax.gather(x, k[:, None], numbers, (1,), mode="clip") for k in (i, u)]
            return *taken, jnp.stack([lax.dynamic_slice(x, (i[k],), (3,)) for k in (4, 6)]), far(i)

        x = RNG.standard_normal(50).astype("f4")
        got = pbkern.simulate(f, x, i, i.astype("u8")).results
        want = (x[i.clip(0, 49)], x[i.astype("u8").clip(0, 49).astype("i8")], np.stack([x[47:], x[:3]]),
                np.arange(8) * (1 << 30) + i)  # fmt: skip
        for g, w in zip(got, want):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(("f", "types"), [
    (lambda x: jnp.exp(x) + 1, [((1 << 26) + 3, 33)]),
    (lambda x: wide_scratch(x), [(7200, 75000)]),
], ids=["arrays", "scratch"])  # fmt: skip
def test_places_that_32_bits_do_not_hold(f, types):
    (code,) = kernel_code(f, *(jax.ShapeDtypeStruct(t, jnp.float32) for t in types))
    assert code.function.index_bits == 64
    (small,) = kernel_code(f, *(jax.ShapeDtypeStruct((80, t[1]), jnp.float32) for t in types))
    assert small.function.index_bits == 32


def wide_scratch(x):
    """Every block has 300 kB of its own in the device's memory."""
    spec = BlockSpec((1, x.shape[1]), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(x.shape[0],),
        out_shape=x,
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[Scratch((1, x.shape[1]), jnp.float32)],
    )
    def body(x_ref, o_ref, t_ref):
        t_ref[...] = x_ref[...] * 2
        o_ref[...] = t_ref[...][:, ::-1]

    return body(x)


def test_empty_arrays():
    """Whatever is read of them is the value for places outside, and nothing is stored."""

    def f(x, none, i):
        return (
            jnp.pad(none, (4, 3), constant_values=2.0) * x,
            x.at[i].add(none.sum()),
            none.at[i].add(x, mode="drop") * 2,
            jnp.concatenate([none, x, none]) + 1,
        )

    x, i = RNG.standard_normal(7).astype("f4"), np.arange(7, dtype="i4") - 2
    found = pbkern.simulate(f, x, x[:0], i).results
    for got, want in zip(found, (2 * x, x, x[:0], x + 1)):
        np.testing.assert_array_equal(got, want)


def test_the_magnitude_of_which_only_the_sign_is_used_may_be_undefined():
    x = np.tile(np.float32([-0.0, 0.0, -2.0, 3.0]), 8)
    for f in (jnp.tanh, jnp.arcsinh, lambda x: jnp.arctan2(x, jnp.abs(x) + 1)):
        result = pbkern.simulate(lambda x, f=f: jnp.signbit(f(x)), x).results
        np.testing.assert_array_equal(jax.tree.leaves(result)[0], np.signbit(x))
