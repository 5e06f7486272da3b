"""Whatever fails in the compiler, results stay right: a plainer way is taken, with one warning, or an error if asked for."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core import config, fallback
from pbkern.core.errors import FallbackWarning, KernelError
from pbkern.fuse.pipeline import FUSE_PASSES
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.targets.cpu.passes import CPU_PASSES

X = np.linspace(-2, 2, 7 * 33, dtype=np.float32).reshape(7, 33)
Y = np.cos(X)


def attention(x, y):
    return jax.nn.softmax(x @ y.T * 0.3, -1) @ y


def stencil(x, y):
    z = x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]
    return z[:-2] * 0.25 + z[1:-1] * 0.5 + z[2:] * 0.25


def loop(x, y):
    return lax.fori_loop(0, 5, lambda i, c: c * 0.9 + y * i, x)


def layer_norm(x, y):
    m = x.mean(-1, keepdims=True)
    return (x - m) * lax.rsqrt(((x - m) ** 2).mean(-1, keepdims=True) + 1e-5) * y


def scattered(x, y):
    taken = jnp.take(x, jnp.arange(5) % 3, axis=0)
    return x.at[jnp.argsort(y[:, 0])].add(y[:, :1]), jnp.sort(y, axis=1), jnp.cumsum(x, 1), taken


def convolved(x, y):
    image, w = x[None, None, :, :32], y[:2, :9].reshape(2, 1, 3, 3)
    return jax.nn.relu(lax.conv_general_dilated(image, w, (1, 1), "SAME")), (x.T @ y).astype(jnp.bfloat16)


FUNCTIONS = {f.__name__: f for f in (attention, stencil, loop, layer_norm, scattered, convolved)}
MORE = {
    "log_softmax": lambda x, y: jax.nn.log_softmax(x) - y, "median": lambda x, y: jnp.median(x * y, axis=1),
    "variance": lambda x, y: (x * y).var(1), "transposed": lambda x, y: x.T @ y + y.T @ x,
    "gelu": lambda x, y: jax.nn.gelu(x) * y,
    "argmax": lambda x, y: (jnp.argmax(x * y, 1), jnp.argmin(y, 0)), "where": lambda x, y: jnp.where(x > y, x, y[::-1]),
    "complex": lambda x, y: jnp.abs(x + 1j * y), "integers": lambda x, y: (x * 100).astype(jnp.int32) // 7 % 5,
    "scan": lambda x, y: lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), x[0], y), "outer": lambda x, y: jnp.outer(x[0], y[0]),
    "while": lambda x, y: lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 1.1 + 1, x),
    "pad": lambda x, y: jnp.pad(x, 2) * 2,
    "cond": lambda x, y: lax.cond(x[0, 0] > 0, lambda: x, lambda: y),
    "gradient": jax.grad(lambda x, y: jnp.tanh(x @ y.T).sum()),
    "top_k": lambda x, y: lax.top_k(x, 3), "repeat": lambda x, y: jnp.repeat(x, 3, axis=1),
    "flip": lambda x, y: x[:, ::-1] * y,
    "logsumexp": lambda x, y: jax.nn.logsumexp(x * 3, 1), "einsum": lambda x, y: jnp.einsum("ij,ik->jk", x, y),
}  # fmt: skip
STAGES = ("plan", "kernels", "emission", "machine code")
PASSES = [p.name for p in (*FUSE_PASSES, *SHARED_PASSES, *CPU_PASSES)]
REQUIRED = {p.name for p in (*FUSE_PASSES, *SHARED_PASSES, *CPU_PASSES) if p.required}


@functools.cache
def reference(name):
    return jax.tree.leaves(jax.jit((FUNCTIONS | MORE)[name])(X, Y))


def compiled(name, stage, **options):
    """Results with a stage that fails, and the warnings."""
    f = (FUNCTIONS | MORE)[name]
    with config.override(fallback=True, cache=False), fallback.failing(stage), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = jax.tree.leaves(pbkern.jit(lambda x, y: f(x, y), compile_options=options)(X, Y))
    return got, [str(w.message) for w in seen if issubclass(w.category, FallbackWarning)]


@pytest.mark.parametrize("stage", [*STAGES, *PASSES])
@pytest.mark.parametrize("name", [*FUNCTIONS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_results_stay_right(name, stage):
    got, seen = compiled(name, stage)
    for g, w in zip(got, reference(name)):
        rtol = 2e-2 if g.dtype == jnp.bfloat16 else 2e-5
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=rtol, atol=1e-5)
    assert len(seen) == len(set(seen)) and all(f"`{stage}` was made to fail" in text for text in seen)
    if stage in ("plan", "emission", "machine code"):
        assert seen


@pytest.mark.parametrize("stage", ["plan", "emission", "machine code", "merge nests", "pack", "simplify", "pick early"])
def test_strict_target_and_the_variable_make_it_an_error(stage):
    with pytest.raises((fallback.InjectedFailure, fallback.PassFailed)):
        compiled("attention", stage, strict_target=True)
    with config.override(fallback=False, cache=False), fallback.failing(stage), pytest.raises(fallback.InjectedFailure):
        pbkern.jit(lambda x, y: attention(x, y))(X, Y)


def test_the_warning_names_kernel_line_and_file():
    _, (text, *_) = compiled("attention", "emission")
    assert text.startswith("emission failed on kernel `") and "test_fallback.py:" in text and "repro" in text
    assert "the plain way" in text and "PBKERN_FALLBACK=0" in text


def test_mistakes_of_the_user_are_no_failures():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
    def wrong(x, o):
        o[...] = x[...].reshape(2, 2)

    with config.override(fallback=True), warnings.catch_warnings(), pytest.raises(KernelError):
        warnings.simplefilter("error")
        wrong(np.ones(4, "f4"))


def test_all_kernels_the_plain_way():
    """Emission fails for every kernel, of hand-written ones too."""
    block = pbkern.BlockSpec((8,), lambda i: (i,))

    @pbkern.kernel(grid=(4,), in_specs=[block], out_specs=[block], out_shape=jax.ShapeDtypeStruct((30,), "float32"))
    def doubled(x, o):
        o[...] = x[...] * 2 + x[...].sum() * 0

    x = np.arange(30, dtype=np.float32)
    with config.override(fallback=True, cache=False), fallback.failing("emission"), pytest.warns(FallbackWarning):
        got = np.asarray(doubled(x))
    np.testing.assert_array_equal(got[:24], x[:24] * 2)
