"""Small golden texts, one rewrite each: a fused kernel's source, and the nests that lowering makes of bodies."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pbkern
from tests.lowered import lowered, on

F32 = jnp.float32


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def blur(x):
    y = x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]
    return y[:-2] + 2 * y[1:-1] + y[2:]


def pad_and_add(x):
    p = jnp.pad(x, 1)
    return p[:-2, 1:-1] + p[2:, 1:-1]


FUNCTIONS = {
    "softmax": (lambda x: jax.nn.softmax(x, -1), array(64, 256)),
    "blur": (blur, array(66, 130)),
    "mean_of_squares": (lambda x: (x * x).mean(), array(1 << 16, 1024)),
    "bias_relu": (
        lambda a, b, c: jnp.maximum(a @ b + c, 0),
        array(24, 32),
        array(32, 64),
        array(64),
    ),
    "transpose": (lambda x, y: x.T + y, array(64, 32), array(32, 64)),
    "pad": (pad_and_add, array(40, 30)),
    "cumsum": (lambda x: lax.cumsum(x, axis=1), array(8, 40)),
    "gather": (lambda x, i: x[i] * 2, array(10, 20), array(6, dtype=jnp.int32)),
}


@pytest.mark.parametrize("name", ["softmax", "blur", "bias_relu", "mean_of_squares"])
def test_source(name, golden):
    f, *args = FUNCTIONS[name]
    f = pbkern.jit(f)
    with on():
        golden("\n".join(k.source() for k in f.kernels(*args)))


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"mean_of_squares"}))
def test_nests(name, golden):
    f, *args = FUNCTIONS[name]
    golden(lowered(f, *args))


@pytest.mark.parametrize("name", ["softmax", "bias_relu", "transpose"])
def test_schedules(name, golden):
    f, *args = FUNCTIONS[name]
    golden(lowered(f, *args, stage="schedule"))


def test_mlir_of_an_elementwise_kernel(golden):
    golden(lowered(lambda x: x * 2 + 1, array(5, 37), stage="mlir"))
