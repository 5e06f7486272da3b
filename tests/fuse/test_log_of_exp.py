"""Logarithms of exponentials (fuse/algebra/log_of_exp.py) are the exponents, or infinite where the exponential is, or zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from .checking import planned, rand


def plain(x):
    return jnp.log(jnp.exp(x))


def of_two(x):
    return jnp.log2(jnp.exp2(x))


def mixed(x):
    return jnp.log(jnp.exp2(x))


def with_other_readers(x):
    e = jnp.exp(x)
    return jnp.minimum(e, 7), e * jnp.log(e)


def repeated(x):
    return jnp.log(jnp.broadcast_to(jnp.exp(x), (3, *x.shape))) + 1


def turned(x):
    return jnp.log(jnp.exp(x).reshape(-1, 1).T)


def twice(x):
    return jnp.log(jnp.log(jnp.exp(jnp.exp(x))))


def in_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, c: jnp.log(jnp.exp(c)) + i, x)


def scanned(x):
    return jax.lax.scan(lambda c, row: (c + 1, jnp.log(jnp.exp(row))), 0, x.reshape(x.size, 1))[1]


FUNCTIONS = (plain, of_two, mixed, with_other_readers, repeated, turned, twice, in_loop, scanned)
SPECIAL = (200.0, -200.0, 1e5, 88.9, -104.0, 0.0, -0.0, 1e-30, np.inf, -np.inf, np.nan, 3.3, -0.7)


def names(f, *args, **options):
    return [e.primitive.name for e in planned(f, *args, **options).jaxpr.eqns]


def expected(f, x):
    """In NumPy's float64, rounded to the type of x where a result is. Exponentials have a range: of float32 for float16."""
    wide = x.astype(np.float64)
    type_of_range = np.result_type(x.dtype, np.float32)

    def back(exponents, exponential=np.exp):
        """The logarithm of exponentials: the exponents, where these are numbers and not zero."""
        e = exponential(exponents).astype(type_of_range)
        return np.where(e == 0, -np.inf, np.where(np.isinf(e), np.inf, exponents))

    with np.errstate(all="ignore"):
        e = np.exp(wide).astype(x.dtype).astype(np.float64)
        once, of_twos = back(wide), back(wide, np.exp2)
        found = {
            plain: lambda: [once], of_two: lambda: [of_twos], mixed: lambda: [of_twos * np.log(2.0)],
            with_other_readers: lambda: [np.minimum(e, 7), e * once], repeated: lambda: [np.stack([once] * 3) + 1],
            turned: lambda: [once[None]], twice: lambda: [np.log(back(np.exp(wide).astype(type_of_range)))],
            in_loop: lambda: [back(back(once) + 1) + 2], scanned: lambda: [once[:, None]],
        }[f]()  # fmt: skip
        return [a.astype(x.dtype) for a in found]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_exponents(f, dtype):
    with jax.enable_x64(True):
        for x in (jnp.asarray(SPECIAL, dtype), jnp.asarray([200.0], dtype), jnp.zeros(0, dtype)):
            for got, want in zip(
                jax.tree.leaves(pbkern.jit(f)(x)), expected(f, np.asarray(x)), strict=True
            ):
                assert got.shape == want.shape
                assert got.dtype == want.dtype
                np.testing.assert_allclose(got, want, rtol=8 * jnp.finfo(dtype).eps, atol=0)
                np.testing.assert_array_equal(
                    *(np.signbit(np.asarray(v)[~np.isnan(v)]) for v in (got, want))
                )


def test_nothing_is_computed():
    for f in (plain, repeated, turned):
        assert not {"exp", "log"} & set(names(f, rand(40)))
    assert names(twice, rand(40)).count("exp") == 1


def test_what_is_rounded_in_between_stays():
    assert {"exp", "log"} <= set(names(plain, rand(40).astype(jnp.bfloat16)))
    x = jnp.asarray([200.0, 3.3], jnp.bfloat16)
    np.testing.assert_array_equal(
        *(np.asarray(jit(plain)(x), np.float32) for jit in (pbkern.jit, jax.jit))
    )


def test_stays_where_rounding_may_not_change():
    assert {"exp", "log"} <= set(names(plain, rand(40), disable_unsafe_math_canonicalizations=True))


def test_parts_of_exponentials_stay():
    """As with XLA: what is padded, chosen or put beside other values is no view."""

    def f(x):
        e = jnp.exp(x)
        return jnp.log(jnp.where(x > 3, e, 1)), jnp.log(e[1:]), jnp.log(jnp.concatenate([e, e]))

    x = jnp.asarray(SPECIAL, jnp.float32)
    for got, want in zip(pbkern.jit(f)(x), jax.jit(f)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-7)
