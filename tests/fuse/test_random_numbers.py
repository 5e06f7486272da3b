"""jax.random in functions: JAX's numbers, in the kernels that use them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl, threefry_prng_impl

import pbkern
from pbkern.testing import assert_kernels

SHAPE = (65, 130)
X = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE).astype("float32"))
KEYS = {"legacy": jax.random.PRNGKey(7), "typed": jax.random.key(7)}

FUNCTIONS = {
    "dropout": lambda k: jnp.where(jax.random.bernoulli(k, 0.9, SHAPE), X / 0.9, 0),
    "noise": lambda k: X + 0.1 * jax.random.normal(k, SHAPE),
    "integers": lambda k: jax.random.randint(k, SHAPE, -5, 77),
    "bytes": lambda k: jax.random.bits(k, (37, 55), jnp.uint8),
    "half": lambda k: jax.random.uniform(k, (33,), jnp.float16),
    "one": lambda k: jax.random.normal(k),
    "split": lambda k: [jax.random.normal(q, (9,)) for q in jax.random.split(k, 3)],
    "fold_in": lambda k: jax.random.uniform(jax.random.fold_in(k, 12), (40,)),
    "each": lambda k: jax.vmap(lambda q, v: jax.random.normal(q, v.shape) + v)(
        jax.random.split(k, 5), X[:5]
    ),
    "gumbel": lambda k: jax.random.categorical(k, X),
}


def same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        exact = not jnp.issubdtype(g.dtype, jnp.floating)
        np.testing.assert_allclose(
            np.asarray(g), np.asarray(w), rtol=0 if exact else 2e-6, atol=0 if exact else 3e-6
        )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_numbers_are_those_of_jax(name, key):
    f, k = FUNCTIONS[name], KEYS[key]
    jitted = pbkern.jit(f)
    same(jitted(k), jax.jit(f)(k))
    assert not jitted.explain(k).left


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["dropout", "noise", "integers", "gumbel"])
def test_one_kernel_makes_and_uses_them(name):
    assert_kernels(FUNCTIONS[name], (KEYS["typed"],), 1)


def test_no_numbers():
    f = lambda k: jax.random.normal(k, (0, 3))
    same(pbkern.jit(f)(KEYS["typed"]), jax.jit(f)(KEYS["typed"]))


def test_keys_as_operands_and_results():
    def f(k, n):
        new = jax.random.split(k, 3)
        return new, jax.random.fold_in(new[1], n), new.reshape(3, 1)

    k = KEYS["typed"]
    got, want = pbkern.jit(f)(k, 4), jax.jit(f)(k, 4)
    for g, w in zip(got, want):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        np.testing.assert_array_equal(jax.random.key_data(g), jax.random.key_data(w))


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_a_loop_carries(key):
    def f(k):
        def step(k, _):
            k, q = jax.random.split(k)
            return k, jax.random.normal(q, (30,))

        return jax.lax.scan(step, k, None, length=4)

    (k, got), (want_k, want) = pbkern.jit(f)(KEYS[key]), jax.jit(f)(KEYS[key])
    same(got, want)
    np.testing.assert_array_equal(
        *(jax.random.key_data(q) if key == "typed" else q for q in (k, want_k))
    )


def test_gradient_of_dropout():
    def loss(x, k):
        return (jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x * x, 0)).sum()

    got = jax.grad(pbkern.jit(loss))(X, KEYS["typed"])
    same(got, jax.grad(loss)(X, KEYS["typed"]))


def test_64_bits():
    with jax.enable_x64(True):
        f = lambda k: (
            jax.random.uniform(k, SHAPE, jnp.float64),
            jax.random.bits(k, (9,), jnp.uint64),
        )
        got, want = pbkern.jit(f)(KEYS["typed"]), jax.jit(f)(KEYS["typed"])
        for g, w in zip(got, want):
            np.testing.assert_array_equal(g, w)


def test_other_generators_stay_with_xla():
    f, k = lambda k: jax.random.uniform(k, SHAPE) + 1, jax.random.key(3, impl="rbg")
    jitted = pbkern.jit(f)
    same(jitted(k), jax.jit(f)(k))
    assert {x.op for x in jitted.explain(k).left} == {"rng_bit_generator"}


def multiplying(factor):
    """A generator of the user's own, without a name that JAX knows: one word, multiplied by a number."""
    size = lambda shape: int(np.prod(shape, dtype=int))
    position = lambda shape: jnp.arange(1, size(shape) + 1, dtype=np.uint32).reshape(shape)
    bits = lambda k, width, shape: (k[0] * np.uint32(factor) * position(shape)).astype(
        f"uint{width}"
    )
    return define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.atleast_1d(seed).astype(np.uint32)[:1] * 2 + 1,
        split=lambda k, shape: bits(k, 32, shape)[..., None],
        random_bits=bits,
        fold_in=lambda k, number: k * 3 + jnp.asarray(number, np.uint32),
    )


THREEFRY_WITHOUT_NAME = define_prng_impl(
    **{
        part: getattr(threefry_prng_impl, part)
        for part in ("key_shape", "seed", "split", "random_bits", "fold_in")
    }
)
OF_KEYS = {
    "split": lambda k: jax.random.split(k, 3),
    "loop": lambda k: jax.lax.scan(
        lambda k, v: (jax.random.fold_in(k, 7), v + jax.random.uniform(k)), k, X[0]
    ),
    "branch": lambda k: jax.lax.cond(
        jax.random.bits(k) % 2 == 0, lambda k: k, lambda k: jax.random.fold_in(k, 1), k
    ),
    "vmap": lambda k: jax.vmap(lambda q, v: (q, jax.random.uniform(q, v.shape) + v))(
        jax.random.split(k, 5), X[:5]
    ),
    "gamma": lambda k: jax.random.gamma(k, X[:3, :3] ** 2 + 1),
    "seed": lambda k: jax.random.key(3, impl=k.dtype),
}


@pytest.mark.parametrize("generator", [multiplying(2654435761), THREEFRY_WITHOUT_NAME])
@pytest.mark.parametrize("name", OF_KEYS)
def test_generators_of_the_user(name, generator):
    def words(results):
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(results)], [
            x.dtype for x in jax.tree.leaves(results)
        ]

    f, k = OF_KEYS[name], jax.random.key(5, impl=generator)
    (got, types), (want, wanted) = words(pbkern.jit(f)(k)), words(jax.jit(f)(k))
    assert types == wanted
    same(got, want)


def test_two_generators_without_names_are_two():
    f = pbkern.jit(lambda k: jax.random.bits(k, (5,)) ^ np.uint32(1))
    for factor in (3, 5):
        k = jax.random.key(1, impl=multiplying(factor))
        np.testing.assert_array_equal(f(k), np.uint32(3 * factor) * np.arange(1, 6, dtype="u4") ^ 1)


def test_bitcasts():
    f = lambda x: jax.lax.bitcast_convert_type(x * 2, jnp.int32) >> 3
    np.testing.assert_array_equal(pbkern.jit(f)(X), jax.jit(f)(X))
    assert not pbkern.jit(f).explain(X).left
    g = lambda x: jax.lax.bitcast_convert_type(x * 2, jnp.int8).sum(-1)
    np.testing.assert_array_equal(pbkern.jit(g)(X), jax.jit(g)(X))
    assert [x.op for x in pbkern.jit(g).explain(X).left] == ["bitcast_convert_type"]
