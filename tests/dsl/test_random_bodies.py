"""Random kernel bodies print as source that rebuilds them, and mean the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.dsl import same_kernel

SHAPE = (4, 6)
DTYPES = ["float32", "bfloat16", "int32", "uint8", "float16"]

UNARY = {
    "neg": lambda x: -x,
    "tanh": lambda x: jnp.tanh(x.astype(jnp.float32)).astype(x.dtype),
    "transpose": lambda x: (x.T @ x).astype(x.dtype)[:4, :1] + x,
    "reverse": lambda x: lax.rev(x, (1,)),
    "center": lambda x: x - x.max(axis=1, keepdims=True),
    "cumsum": lambda x: jnp.cumsum(x, axis=0, dtype=x.dtype),
    "roll": lambda x: jnp.roll(x, 1, axis=1),
    "where": lambda x: jnp.where(x > 1, x, jnp.zeros_like(x)),
    "index": lambda x: x * lax.broadcasted_iota(jnp.int32, SHAPE, 1).astype(x.dtype),
    "sum": lambda x: (x.sum(axis=0, dtype=x.dtype) + x[1]) * x,
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 2)))[1:, 2:] + x,
    "program": lambda x: x + pbkern.program_id(0).astype(x.dtype),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "select": None,
}
CONTROL = ["none", "cond", "switch", "fori", "while", "scan", "when"]

step = st.tuples(
    st.sampled_from([*UNARY, *BINARY, "literal"]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([0, 1, 2, 3, 0.5, 100]),
    st.sampled_from(CONTROL),
)


def apply(values: list, name: str, i: int, j: int, literal) -> jax.Array:
    x, y = values[i % len(values)], values[j % len(values)]
    if name in UNARY:
        return UNARY[name](x)
    if name == "literal":
        return x * jnp.asarray(literal).astype(x.dtype) + int(literal)
    return jnp.where(x < y, y, x) if name == "select" else BINARY[name](x, y)


def under_control(kind: str, f, values: list, x_ref, o_ref, literal):
    """f(values) computed inside a control-flow construct, with Refs used from within."""
    like = values[0]
    flag = x_ref[0, 0] > literal
    match kind:
        case "cond":
            return lax.cond(flag, lambda: f(values), lambda: like)
        case "switch":
            return lax.switch(
                x_ref[0, 1].astype(jnp.int32), [lambda: f(values), lambda: x_ref[...], lambda: like]
            )
        case "fori":
            return lax.fori_loop(
                1, 3, lambda i, c: f([c, *values[1:]]) + x_ref[pbkern.ds(i, 1)], like
            )
        case "while":
            body = lambda c: (c[0] + 1, f([c[1], *values[1:]]))
            return lax.while_loop(lambda c: c[0] < 2, body, (0, like))[1]
        case "scan":
            return lax.scan(lambda c, row: (f([c, *values[1:]]) + row, row * 2), like, x_ref[:2])[0]
        case "when":

            @pbkern.when(flag)
            def _():
                o_ref[1:3] = f(values)[1:3]

            return o_ref[...]
        case _:
            return f(values)


@pytest.mark.parametrize("examples", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_random_bodies_rebuild(examples):
    drawn = given(
        st.sampled_from(DTYPES),
        st.lists(step, min_size=1, max_size=5),
        st.booleans(),
        st.integers(0, 2**32 - 1),
    )
    settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))(
        drawn(rebuilds_and_agrees)
    )()


def rebuilds_and_agrees(dtype, steps, x64, seed):
    """A kernel's text makes the kernel again, and its machine code computes what the interpreter does."""

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.zeros(SHAPE, dtype)
        values = [x_ref[...], y_ref[...]]
        for name, i, j, literal, control in steps:
            f = lambda vs: apply(vs, name, i, j, literal)  # noqa: B023
            values.append(under_control(control, f, values, x_ref, o_ref, literal).astype(dtype))
        o_ref[...] = values[-1]

    spec = pbkern.BlockSpec(SHAPE, lambda i: (i, 0))
    array = jax.ShapeDtypeStruct((8, 6), dtype)
    options = {
        "grid": (2,),
        "in_specs": [spec, spec],
        "out_specs": spec,
        "out_shape": array,
        "x64": x64,
    }
    k = pbkern.kernel(body, **options).trace(array, array)
    text = str(k)
    again = pbkern.rebuild(text)
    assert same_kernel(k, again), text
    assert str(again) == text

    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 5, (8, 6)).astype(jnp.dtype(dtype)) for _ in range(2)]
    want = pbkern.interpret(k, *arrays)
    for a, b in zip(want, pbkern.interpret(again, *arrays)):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
    with jax.enable_x64(x64):
        native = pbkern.call_kernel(k, *arrays)
    for a, b in zip(want, native if isinstance(native, list | tuple) else [native]):
        rtol = 2e-2 if a.dtype.itemsize == 2 else 1e-5
        np.testing.assert_allclose(
            np.asarray(b, np.float64), a.astype(np.float64), rtol=rtol, atol=1e-5
        )
