"""Primitives of other libraries: traced through their own definition, or left to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import mlir

import pbkern

from .checking import planned, rand


def primitive(name, impl, result):
    """A primitive as libraries define theirs: by a function, of which its lowering is made."""
    made_of = jex.Primitive(name)
    made_of.def_impl(impl)
    made_of.def_abstract_eval(result)
    mlir.register_lowering(made_of, mlir.lower_fun(impl, multiple_results=False))
    return made_of


scalar = lambda x, **_: jax.core.ShapedArray((), x.dtype)
identity_p = primitive("nonbatchable_here", lambda x, *, msg: x, lambda x, *, msg: x)
any_p = primitive("any_of_batch_here", lambda x: jnp.any(x), scalar)
most_p = primitive("most_of_batch_here", lambda x: jnp.max(x), scalar)


def stepped(x):
    def step(state):
        x, k = state
        x = identity_p.bind(jnp.sin(x) * 1.1, msg="no batches")
        return x / (1 + most_p.bind(jnp.abs(x))), k + 1

    return lax.while_loop(lambda s: any_p.bind(s[0] > 0.01) & (s[1] < 9), step, (x, 0))[0]


def test_identities_and_reductions_of_libraries_do_not_take_loops_along():
    x = rand(40, 30)
    assert not planned(stepped, x).left_to_xla()
    np.testing.assert_allclose(pbkern.jit(stepped)(x), jax.jit(stepped)(x), rtol=1e-5, atol=1e-6)


def test_a_definition_that_needs_values_stays_with_xla():
    numpy_p = jex.Primitive("numpy_here")
    numpy_p.def_impl(lambda x: np.asarray(x) * 2)
    numpy_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(numpy_p, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    x = rand(8, 8)
    f = lambda x: numpy_p.bind(x + 1) * 3
    assert [left.op for left in planned(f, x).left_to_xla()] == ["numpy_here"]
    np.testing.assert_allclose(pbkern.jit(f)(x), (x + 1) * 6, rtol=1e-6)
