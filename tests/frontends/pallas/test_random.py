"""jax.random in bodies of Pallas kernels, typed PRNG keys as operands, and the generator of a TPU's core."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pbkern
from pbkern.core.errors import UnsupportedOp

KEY = jax.random.key(7)
KEYS = jax.random.split(jax.random.key(8), 6)
OUT = jax.ShapeDtypeStruct((8, 128), jnp.float32)
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
PROGRAMS = pltpu.CompilerParams(dimension_semantics=("parallel",))


def call(body, *args, out=OUT, **options):
    return pl.pallas_call(body, out_shape=out, **options)(*args)


# --- typed keys ----------------------------------------------------------------------------------------------------

DRAWS = {
    "bits": (jax.random.bits, jnp.uint32),
    "uniform": (jax.random.uniform, jnp.float32),
    "bernoulli": (lambda key, shape: jax.random.bernoulli(key, 0.3, shape), jnp.bool_),
    "randint": (lambda key, shape: jax.random.randint(key, shape, -5, 1000), jnp.int32),
    "bfloat16": (lambda key, shape: jax.random.uniform(key, shape, jnp.bfloat16), jnp.bfloat16),
    "bytes": (lambda key, shape: jax.random.bits(key, shape, jnp.uint8), jnp.uint8),
    "permuted keys": (lambda key, shape: jax.random.bits(jax.random.split(key, 5)[::-1][1], shape), jnp.uint32),
    "folded": (lambda key, shape: jax.random.bits(jax.random.fold_in(key, 3), shape), jnp.uint32),
    "folded in all": (lambda key, shape: jax.vmap(lambda n: jax.random.bits(jax.random.fold_in(key, n), shape[1:]))(
        jnp.arange(shape[0])), jnp.uint32),
    "a key of a seed": (lambda key, shape: jax.random.bits(jax.random.key(5), shape), jnp.uint32),
    "legacy": (lambda key, shape: jax.random.bits(jax.random.key_data(key), shape), jnp.uint32),
}  # fmt: skip


@pytest.mark.sampled(21)
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("partitionable", [False, True])
@pytest.mark.parametrize("shape", [(8, 128), (5,), (3, 1, 7)])
def test_draws_are_those_outside_the_kernel(name, partitionable, shape):
    draw, dtype = DRAWS[name]

    def body(key_ref, o_ref):
        o_ref[...] = draw(key_ref[...], shape)

    with jax.threefry_partitionable(partitionable), jax.legacy_prng_key("allow"):
        got = call(body, KEY, out=jax.ShapeDtypeStruct(shape, dtype))
        np.testing.assert_array_equal(got, draw(KEY, shape))


def test_normal_numbers_agree_to_rounding():
    def body(key_ref, o_ref):
        o_ref[...] = jax.random.normal(key_ref[...], o_ref.shape)

    np.testing.assert_allclose(
        call(body, KEY), jax.random.normal(KEY, OUT.shape), rtol=2e-5, atol=2e-7
    )


@pytest.mark.parametrize("x64", [False, True])
def test_keys_made_of_seeds_in_the_body(x64):
    def body(seed_ref, o_ref):
        key = jax.random.key(seed_ref[0])
        o_ref[...] = jax.random.bits(jax.random.fold_in(key, seed_ref[1]), o_ref.shape, jnp.uint32)

    with jax.enable_x64(x64):
        seeds = jnp.array([3, 11])
        got = call(body, seeds, out=jax.ShapeDtypeStruct((4, 5), jnp.uint32))
        np.testing.assert_array_equal(
            got, jax.random.bits(jax.random.fold_in(jax.random.key(3), 11), (4, 5), jnp.uint32)
        )


def test_blocks_of_a_key_array():
    def body(key_ref, o_ref):
        o_ref[...] = jax.random.bits(key_ref[0], (1, 16))

    spec = pl.BlockSpec((1, 16), lambda i: (i, 0))
    got = call(
        body, KEYS, out=jax.ShapeDtypeStruct((6, 16), jnp.uint32), grid=(6,), out_specs=spec,
        in_specs=[pl.BlockSpec((1,), lambda i: (5 - i,))],
    )  # fmt: skip
    np.testing.assert_array_equal(got, [jax.random.bits(k, (16,)) for k in KEYS[::-1]])


def test_keys_are_moved_stored_and_returned():
    def body(keys_ref, o_ref, kept):
        keys = keys_ref[...].reshape(2, 3)
        kept[...] = jnp.where(jnp.arange(3)[None] == 1, keys[::-1], keys).T
        o_ref[...] = jnp.concatenate([kept[1:], kept[:1]])
        o_ref[0, 1] = keys_ref[pl.program_id(0) + 5]

    got = pl.pallas_call(
        body, grid=(1,), out_shape=jax.ShapeDtypeStruct((3, 2), KEYS.dtype), in_specs=[SMEM],
        scratch_shapes=[pltpu.SMEM((3, 2), KEYS.dtype)],
    )(KEYS)  # fmt: skip
    keys = KEYS.reshape(2, 3)
    want = jnp.where(jnp.arange(3)[None] == 1, keys[::-1], keys).T
    want = jnp.concatenate([want[1:], want[:1]]).at[0, 1].set(KEYS[5])
    assert got.dtype == KEYS.dtype
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(want))


def test_keys_seen_in_another_shape():
    def body(keys_ref, o_ref):
        seen = keys_ref.reshape(2, 3).transpose((1, 0))
        o_ref[0] = jax.random.bits(seen[2, 1], (16,))
        o_ref[1] = jax.random.bits(seen[1, 0], (16,))

    out = jax.ShapeDtypeStruct((2, 16), jnp.uint32)
    got = pl.pallas_call(body, out_shape=out, in_specs=[SMEM])(KEYS)
    np.testing.assert_array_equal(got, [jax.random.bits(KEYS[n], (16,)) for n in (5, 1)])


def test_copies_of_some_keys_are_refused():
    def body(n_ref, keys_ref, o_ref, sem):
        copy = pltpu.make_async_copy(
            keys_ref.at[pl.ds(0, n_ref[0])], o_ref.at[pl.ds(0, n_ref[0])], sem
        )
        copy.start()
        copy.wait()

    f = pl.pallas_call(
        body,
        out_shape=KEYS,
        in_specs=[SMEM, SMEM],
        out_specs=SMEM,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    with pytest.raises(UnsupportedOp, match="a copy of PRNG keys of dynamic size"):
        f(np.array([3], "i4"), KEYS)


def test_keys_carried_by_loops_and_chosen_by_branches():
    def draw(key, n):
        def step(_, carry):
            key, total = carry
            key, mine = jax.random.split(key)
            return key, total + jax.random.uniform(mine, (16,))

        key = lax.cond(n > 2, lambda: jax.random.fold_in(key, n), lambda: key)
        key, total = lax.fori_loop(0, n, step, (key, jnp.zeros(16)))
        _, parts = lax.scan(
            lambda c, k: (c, jax.random.uniform(k, (16,))), 0, jax.random.split(key, 3)
        )
        return total + parts.sum(0)

    def body(key_ref, o_ref):
        o_ref[0] = draw(key_ref[...], 2)
        o_ref[1] = draw(key_ref[...], 3)

    got = call(body, KEY, out=jax.ShapeDtypeStruct((2, 16), jnp.float32))
    np.testing.assert_allclose(got, [draw(KEY, 2), draw(KEY, 3)], rtol=1e-6)


def test_kernels_with_keys_under_vmap_and_copies():
    def body(key_ref, o_ref):
        def copied(mine):
            pltpu.sync_copy(key_ref, mine)
            o_ref[...] = jax.random.bits(mine[...], o_ref.shape)

        pl.run_scoped(copied, pltpu.SMEM((), key_ref.dtype))

    out = jax.ShapeDtypeStruct((16,), jnp.uint32)
    got = jax.jit(jax.vmap(lambda k: pl.pallas_call(body, out_shape=out)(k)))(KEYS)
    np.testing.assert_array_equal(got, [jax.random.bits(k, (16,)) for k in KEYS])


def test_prefetched_keys():
    def body(keys_ref, o_ref):
        o_ref[...] = jax.random.bits(keys_ref[pl.program_id(0)], o_ref.shape)

    spec = pltpu.PrefetchScalarGridSpec(
        1, grid=(6,), in_specs=[], out_specs=pl.BlockSpec((1, 16), lambda i, _: (i, 0))
    )
    got = pl.pallas_call(body, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((6, 16), jnp.uint32))(
        KEYS
    )
    np.testing.assert_array_equal(got, [jax.random.bits(k, (16,)) for k in KEYS])


def test_what_has_no_meaning_is_refused():
    def hardware(key_ref, o_ref):
        o_ref[...] = jax.random.uniform(key_ref[...], o_ref.shape)

    with pytest.raises(UnsupportedOp, match=r"XLA's generator in a body\n  at   .*test_random.py"):
        call(hardware, jax.random.key(0, impl="rbg"))

    def masked(key_ref, o_ref):
        o_ref[...] = pltpu.load(key_ref, mask=jnp.ones(6, bool))

    with pytest.raises(UnsupportedOp, match="PRNG keys under a mask"):
        call(masked, KEYS, out=jax.ShapeDtypeStruct((6,), KEYS.dtype))

    def gamma(x_ref, o_ref):  # random_gamma lies in a function of JAX, whose lines nobody asked for
        o_ref[...] = jax.random.gamma(jax.random.key(0), x_ref[...])

    with pytest.raises(
        UnsupportedOp, match=r"gamma distribution in a body\n  at   .*test_random.py.*gamma"
    ):
        call(gamma, jnp.ones((8, 128)))


# --- the generator of a core ---------------------------------------------------------------------------------------


def bits_of(*seeds, shape=(64, 128), draws=1):
    def body(o_ref):
        pltpu.prng_seed(*seeds)
        for n in range(draws):
            o_ref[n] = pltpu.prng_random_bits(shape)

    return np.asarray(call(body, out=jax.ShapeDtypeStruct((draws, *shape), jnp.int32)))


def test_seeds_decide_the_numbers():
    np.testing.assert_array_equal(bits_of(3), bits_of(3))
    different = [
        bits_of(3),
        bits_of(4),
        bits_of(3, 4),
        bits_of(4, 3),
        bits_of(3, 0),
        *bits_of(3, draws=3)[1:, None],
    ]
    for n, a in enumerate(different):
        for b in different[:n]:
            assert (a == b).mean() < 1e-3


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (200, 300), (2, 8, 128)])
def test_bits_are_spread_evenly(shape):
    found = bits_of(11, shape=shape, draws=1).view(np.uint32).ravel()
    assert len(np.unique(found)) > 0.99 * found.size
    if found.size > 10000:
        ones = ((found[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
        np.testing.assert_allclose(ones, 0.5, atol=6 * 0.5 / np.sqrt(found.size))


def test_stateful_samplers():
    def body(o_ref):
        pltpu.prng_seed(pl.program_id(0))
        o_ref[0, 0] = pltpu.stateful_uniform((100, 128), minval=2.0, maxval=4.0)
        o_ref[0, 1] = pltpu.stateful_normal((100, 128))
        o_ref[0, 2] = pltpu.stateful_bernoulli(0.25, (100, 128)).astype(jnp.float32)

    found = np.asarray(pl.pallas_call(
        body, grid=(3,), out_specs=pl.BlockSpec((1, 3, 100, 128), lambda i: (i, 0, 0, 0)), compiler_params=PROGRAMS,
        out_shape=jax.ShapeDtypeStruct((3, 3, 100, 128), jnp.float32),
    )())  # fmt: skip
    for mean, spread, draws in zip((3, 0, 0.25), (3**-0.5, 1, 0.1875**0.5), found.swapaxes(0, 1)):
        np.testing.assert_allclose(draws.mean((1, 2)), mean, atol=6 * spread / np.sqrt(12800))
        np.testing.assert_allclose(draws.std((1, 2)), spread, rtol=0.05)
        assert not np.array_equal(draws[0], draws[1])


def test_programs_that_do_not_seed_go_on_from_those_before():
    """In order, though the author's cores would each have a state of their own: numbers are the same every time."""

    def body(o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            pltpu.prng_seed(5)

        o_ref[...] = pltpu.prng_random_bits(o_ref.shape)

    def unseeded(o_ref):
        o_ref[...] = pltpu.prng_random_bits(o_ref.shape)

    spec, out = pl.BlockSpec((1, 128), lambda i: (i, 0)), jax.ShapeDtypeStruct((6, 128), jnp.int32)
    kernel = pl.pallas_call(
        body, grid=(6,), out_specs=spec, out_shape=out, compiler_params=PROGRAMS
    )
    np.testing.assert_array_equal(kernel(), bits_of(5, shape=(1, 128), draws=6)[:, 0])
    kernel = pl.pallas_call(
        unseeded, grid=(6,), out_specs=spec, out_shape=out, compiler_params=PROGRAMS
    )
    np.testing.assert_array_equal(kernel(), kernel())
    assert len(np.unique(kernel())) > 760


def test_programs_that_seed_run_in_parallel():
    def body(o_ref):
        pltpu.prng_seed(pl.program_id(0))
        o_ref[...] = pltpu.prng_random_bits(o_ref.shape)

    spec, out = pl.BlockSpec((1, 128), lambda i: (i, 0)), jax.ShapeDtypeStruct((4, 128), jnp.int32)
    for options in ({}, {"compiler_params": PROGRAMS}):
        call = pl.pallas_call(body, grid=(4,), out_specs=spec, out_shape=out, **options)
        f = pbkern.jit(lambda call=call: call())
        assert "grid dimension 0 of 4: parallel" in str(f.explain())
        np.testing.assert_array_equal(
            f(), np.concatenate([bits_of(n, shape=(1, 128))[0] for n in range(4)])
        )


@pytest.mark.parametrize(
    "tpu_key", [pltpu.to_pallas_key(KEY), pltpu.to_pallas_key(KEY)[None, None]]
)
def test_keys_of_the_generator(tpu_key):
    def body(key_ref, o_ref):
        key = key_ref[(0,) * key_ref.ndim] if key_ref.ndim else key_ref[...]
        o_ref[0] = jax.random.uniform(key, (8, 128))
        o_ref[1] = jax.random.uniform(jax.random.fold_in(key, 2), (8, 128))
        pltpu.prng_seed(key)
        o_ref[2] = pltpu.stateful_uniform((8, 128))

    one, two, again = call(
        body, tpu_key, out=jax.ShapeDtypeStruct((3, 8, 128), jnp.float32), in_specs=[SMEM]
    )
    np.testing.assert_array_equal(one, again)
    assert (one != two).mean() > 0.99


# --- rounding at random --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_stochastic_round_takes_a_neighbour_and_is_unbiased(dtype):
    x = np.random.default_rng(0).normal(size=(200, 256)).astype("f4")
    x[0, :8] = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-4]
    x[1:3] *= np.float32(float(jnp.finfo(dtype).smallest_normal))
    random = np.random.default_rng(1).integers(0, 2**32, x.shape, np.uint32)

    def body(x_ref, r_ref, o_ref):
        o_ref[...] = pltpu.stochastic_round(x_ref[...], r_ref[...], target_dtype=dtype)

    got = np.asarray(
        call(body, x, random, out=jax.ShapeDtypeStruct(x.shape, dtype)).astype(jnp.float32)
    ).astype("f8")
    near = jnp.asarray(x).astype(dtype)
    up, down = (
        np.asarray(jnp.nextafter(near, jnp.asarray(end, dtype)).astype("f4")).astype("f8")
        for end in (448, -448)
    )
    near = np.asarray(near.astype("f4")).astype("f8")
    low, high = np.where(near > x, down, near), np.where(near < x, up, near)
    finite = np.isfinite(x)
    assert ((got == low) | (got == high))[finite].all()
    np.testing.assert_array_equal(got[~finite], near[~finite])
    with np.errstate(invalid="ignore"):
        gap = np.where(high > low, high - low, 1.0)
    steady = finite & (np.abs(x) > 2 * gap)
    error = (got[steady] - x[steady]) / gap[steady]
    assert abs(error.mean()) < 6 * error.std() / np.sqrt(error.size)
    assert error.std() > 0.2


def test_stochastic_round_to_other_types_is_refused():
    def body(x_ref, r_ref, o_ref):
        o_ref[...] = pltpu.stochastic_round(x_ref[...], r_ref[...], target_dtype=jnp.float16)

    with pytest.raises(UnsupportedOp, match="from float32 to float16"):
        call(
            body, jnp.ones(4), jnp.ones(4, jnp.uint32), out=jax.ShapeDtypeStruct((4,), jnp.float16)
        )
