"""Large results lie in memory that is used again, and nobody can tell but by the clock."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api import result_pool
from pbkern.core import config
from tests.arrays import array

ROWS = 2048
SHAPE = (ROWS, 4096)  # 32 MB of float32, the least that is pooled


@pytest.fixture
def pool(monkeypatch):
    """A pool of this test's own."""
    fresh = result_pool.ResultPool()
    monkeypatch.setattr(result_pool, "POOL", fresh)
    return fresh


@pytest.fixture(scope="module")
def x():
    return array(np.random.default_rng(0).normal(size=SHAPE).astype("float32"))


def collected(pool) -> int:
    """Bytes in the pool. JAX drops its references to NumPy's arrays at the next transfer."""
    gc.collect()
    jax.device_put(np.zeros(64)).block_until_ready()
    return sum(m.size for m in pool.unused)


def is_stored_in(memory, array) -> bool:
    return memory.ctypes.data <= array.unsafe_buffer_pointer() < memory.ctypes.data + memory.nbytes


def test_memory_of_dropped_results_is_used_again(pool, x):
    f = pbkern.jit(lambda x, s: x * s)
    f(x, 1.0)
    first = f(x, 2.0)
    assert not pool.unused
    del first
    assert collected(pool) == 32 << 20
    memory = pool.unused[0].bytes
    again = f(x, 3.0)
    assert is_stored_in(memory, again)
    assert not pool.unused
    np.testing.assert_array_equal(again, np.asarray(x) * np.float32(3))


def test_results_that_are_held_keep_their_values(pool, x):
    f = pbkern.jit(lambda x, s: x * s)
    held = [f(x, float(s)) for s in range(4)]
    views = [np.asarray(h) for h in held[1:]]
    del held[1:]  # NumPy's views keep them
    more = [f(x, float(-s)) for s in range(3)]
    for s, view in enumerate(views, 1):
        np.testing.assert_array_equal(view, np.asarray(x) * np.float32(s))
    for s, other in enumerate(more):
        np.testing.assert_array_equal(other, np.asarray(x) * np.float32(-s))


def test_large_and_small_results_keep_their_places(pool, x):
    @pbkern.jit
    def f(x, y):
        return {
            "sum": x.sum(1),
            "both": (x + y, y),
            "one": 1.0,
            "double": (x * 2).astype(jnp.float16),
            "twice": x * 2,
        }

    y = jnp.arange(4096.0)
    for _ in range(3):
        got = f(x, y)
    a = np.asarray(x)
    np.testing.assert_allclose(got["sum"], a.sum(1, dtype=np.float64), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got["both"][0], a + np.arange(4096, dtype="float32"))
    np.testing.assert_array_equal(got["both"][1], y)
    assert got["one"] == 1.0
    assert got["double"].dtype == jnp.float16
    np.testing.assert_array_equal(got["double"], (a * 2).astype("float16"))
    np.testing.assert_array_equal(got["twice"], a * 2)
    del got
    assert collected(pool) >= 64 << 20  # two of them are large, of two calls or more


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "int8", "float64"])
def test_every_dtype(pool, dtype):
    with jax.enable_x64(True):
        count = (32 << 20) // np.dtype(jnp.dtype(dtype)).itemsize
        v = jnp.arange(count) % 2
        f = pbkern.jit(lambda v: v.astype(dtype))
        f(v)
        got = f(v)
        assert got.dtype == jnp.dtype(dtype)
        assert got.shape == (count,)
        np.testing.assert_array_equal(np.asarray(got).astype("float32")[:1001], np.arange(1001) % 2)
        del got
        assert collected(pool) == 32 << 20


def test_transformations_and_calls_inside_others_are_as_ever(pool, x):
    f = pbkern.jit(lambda x, s: x * s)
    f(x, 2.0)
    f(x, 2.0)
    np.testing.assert_array_equal(
        jax.grad(lambda x: f(x, 3.0).sum())(x), np.full(SHAPE, 3, "float32")
    )
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, 2.0), np.asarray(x) * 2)
    np.testing.assert_array_equal(jax.jit(f)(x, 2.0), np.asarray(x) * 2)
    staged = jax.make_jaxpr(lambda s: f(x, 2.0) * s)(1.0)  # concrete arguments, but inside a trace
    assert "pbkern_call" in str(staged)


def test_static_arguments_types_and_configuration_tell_calls_apart(pool, x):
    f = pbkern.jit(lambda x, n: x * n, static_argnums=1)
    for n in (2, 3, 2, 3):
        np.testing.assert_array_equal(f(x, n), np.asarray(x) * np.float32(n))
    g = pbkern.jit(lambda x, s: x + s)
    for s in (1, 1.5, np.float32(2), 1):
        np.testing.assert_array_equal(g(x, s), np.asarray(x) + np.float32(s))
    with jax.enable_x64(True):
        assert g(x, np.float64(1)).dtype == jnp.float64
    assert g(x, 1).dtype == jnp.float32


def test_results_are_committed_as_their_arguments(pool, x):
    f = pbkern.jit(lambda x: x + 1)
    f(x)
    there = jax.device_put(x, jax.devices()[0])
    assert not f(x).committed
    assert f(there).committed
    assert f(x).sharding == x.sharding


def test_donation_of_a_pooled_result(pool, x):
    f = pbkern.jit(lambda x: x + 1)
    f(x)
    for g in (
        jax.jit(lambda y: y * 2, donate_argnums=0),
        pbkern.jit(lambda y: y * 2, donate_argnums=0),
    ):
        y = f(x)
        z = g(y)
        assert y.is_deleted()
        np.testing.assert_array_equal(z, (np.asarray(x) + 1) * 2)


def test_errors_are_jaxs(pool, x):
    f = pbkern.jit(lambda x: x / 0)
    f(x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(jnp.zeros(SHAPE))
    y = x + 0
    y.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        f(y)


def test_threads_share_the_pool(pool, x):
    f = pbkern.jit(lambda x, s: x * 0 + s)
    wrong = []

    def work(k):
        for n in range(6):
            got = np.asarray(f(x, float(10 * k + n)))
            wrong.extend(got[got != 10 * k + n])

    f(x, 0.0)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_pool_keeps_no_more_than_its_limit(pool, x):
    f = pbkern.jit(lambda x: x + 1)
    f(x)
    with config.override(pool_megabytes=64):
        held = [f(x) for _ in range(4)]
        del held
        assert collected(pool) == 64 << 20


def test_no_pool(pool, x):
    f = pbkern.jit(lambda x: x + 1)
    f(x)
    with config.override(pool_megabytes=0):
        f(x)
        assert collected(pool) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [
    lambda: pbkern.jit(lambda x: x[1:]),  # smaller
    lambda: pbkern.jit(lambda x: x + 1, donate_argnums=0),
    lambda: pbkern.jit(lambda x: (jnp.fft.rfft(x[:8])[0, 0].real + x)),  # a part is XLA's
    lambda: pbkern.jit(lambda x: (y := x + 1, y)),  # one array twice
], ids=["small", "donated", "partly XLA's", "twice"])  # fmt: skip
def test_what_is_not_pooled(pool, x, make):
    f = make()
    for _ in range(3):
        f(x + 0)
    assert collected(pool) == 0
