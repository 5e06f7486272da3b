"""Random kernels that hand on scratch along a sequential dimension: what lies in registers, in shared memory, or moves between
threads, against the interpreter."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern

BLOCKS = [(8, 16), (5, 12), (16, 32), (1, 40), (33, 7), (1, 1), (24, 64)]
DTYPES = ["float32", "float32", "float32", "int32", "float16", "int8"]
# How a buffer lies: as the block, a value per row, turned, a single value.
LAYOUTS = {
    "same": (lambda m, n: (m, n), lambda a, shape: a, lambda v: v),
    "row": (
        lambda m, n: (m,),
        lambda a, shape: jnp.broadcast_to(a[:, None], shape),
        lambda v: v.max(1),
    ),
    "turned": (lambda m, n: (n, m), lambda a, shape: a.T, lambda v: v.T),
    "one": (
        lambda m, n: (1, 1),
        lambda a, shape: jnp.broadcast_to(a, shape),
        lambda v: v.max(keepdims=True),
    ),
}


def limited(a):
    return jnp.clip(a, -9, 9)


# (this buffer's value, another's, the block of x, w) -> the next value
STEPS = {
    "copy": lambda a, b, v, w: b,
    "add": lambda a, b, v, w: limited(a + v),
    "multiply": lambda a, b, v, w: limited(a * v + b),
    "scale": lambda a, b, v, w: limited(a * 2 - 1),
    "product": lambda a, b, v, w: limited(a + jnp.dot(v, w).astype(a.dtype)),
    "row maximum": lambda a, b, v, w: limited(a + v.max(1, keepdims=True)),
    "maximum": lambda a, b, v, w: jnp.maximum(a, b.max()),
    "upside down": lambda a, b, v, w: b[::-1],
    "roll": lambda a, b, v, w: jnp.roll(a, 1, 1) + v,
}
CONTROL = ["plain", "plain", "plain", "when", "loop"]


def drawn(seed):
    """A kernel and its operands; the last blocks may reach over the end of x."""
    r = random.Random(seed)
    m, n = shape = r.choice(BLOCKS)
    programs, steps = r.choice([1, 2, 3]), r.choice([1, 2, 4])
    rows = max(m * programs - r.choice([0, 0, m > 1, m // 2]), m)
    columns = max(n * steps - r.choice([0, 0, n // 3]), n)
    dtype, layouts = (
        r.choice(DTYPES),
        [LAYOUTS[r.choice(["same", "same", *LAYOUTS])] for _ in range(r.randint(1, 3))],
    )
    text = [
        (
            r.choice(list(STEPS)),
            r.choice(CONTROL),
            r.randrange(len(layouts)),
            r.randrange(len(layouts)),
        )
        for _ in range(r.randint(2, 7))
    ]
    params = pbkern.nvgpu.CompilerParams(
        dimension_semantics=("parallel", "sequential"), num_warps=r.choice([None, 1, 2, 8])
    )

    def body(x, w, o, *scratch):
        @pbkern.when(pbkern.program_id(1) == 0)
        def _():
            for t in scratch:
                t[...] = jnp.ones_like(t)

        v = jnp.where(pbkern.in_bounds(x, 0)[:, None] & pbkern.in_bounds(x, 1)[None], x[...], 0)
        value = lambda k: layouts[k][1](scratch[k][...], shape)

        def step(name, i, j):
            scratch[i][...] = layouts[i][2](STEPS[name](value(i), value(j), v, w[...])).astype(
                dtype
            )

        for name, control, i, j in text:
            if control == "when":
                pbkern.when(value(j).max() > 3)(lambda: step(name, i, j))  # noqa: B023
            else:
                turn = lambda _, c: (step(name, i, j), c)[1]  # noqa: B023
                lax.fori_loop(0, 2 if control == "loop" else 1, turn, 0)

        @pbkern.when(pbkern.program_id(1) == steps - 1)
        def _():
            o[...] = sum(value(k).astype(jnp.float32) for k in range(len(layouts)))

    kernel = pbkern.kernel(
        body, grid=(programs, steps), in_specs=[pbkern.BlockSpec(shape, lambda i, k: (i, k)), pbkern.BlockSpec()],
        out_specs=pbkern.BlockSpec(shape, lambda i, k: (i, 0)), out_shape=jax.ShapeDtypeStruct((rows, n), jnp.float32),
        scratch_shapes=[pbkern.Scratch(of(m, n), jnp.dtype(dtype)) for of, *_ in layouts], compiler_params=params,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    x, w = (
        rng.integers(-3, 4, (rows, columns)).astype(dtype),
        rng.integers(-2, 3, (n, n)).astype(dtype),
    )
    return kernel.trace(x, w), x, w


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=() if s % 80 == 0 else pytest.mark.slow) for s in range(400)]
)
def test_random_scratch(seed):
    kernel, x, w = drawn(seed)
    (want,), found = pbkern.interpret(kernel, x, w), pbkern.simulate(kernel, x, w)
    assert ".local" not in found.ptx[0]  # what is meant for registers is in registers
    (got,) = found.results
    np.testing.assert_allclose(got, want, rtol=1e-2 if x.dtype == np.float16 else 1e-5, atol=1e-3)
