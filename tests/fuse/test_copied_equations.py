"""`bind_again` copies equations whose operands have their types, and binds others: both give the function that `bind` gives."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pbkern import _jax
from pbkern.core.jaxprs.evaluation import evaluate
from pbkern.core.jaxprs.walks import equations
from pbkern.fuse.simplify import driver

FUNCTIONS = {
    "weak types": lambda x: (x * 2 + 1.5).astype("int8") * 3,
    "shapes": lambda x: jnp.broadcast_to(x.reshape(6, 1), (6, 4)).T[::-1],
    "constants": lambda x: (
        x + np.arange(6, dtype=np.float32).reshape(2, 3) + lax.iota("float32", 3)
    ),
    "several results": lambda x: lax.sort((x, x * x), num_keys=1),
    "loops": lambda x: lax.fori_loop(0, 3, lambda n, y: jnp.sin(y) * n, x),
    "conversions": lambda x: lax.convert_element_type(x, jnp.bfloat16) + jnp.bfloat16(2),
}


def again(closed):
    """The function, each of whose equations is bound again."""
    bind = lambda eqn, *operands: _jax.bind_again(eqn, operands)
    run = lambda *args: evaluate(closed.jaxpr, closed.consts, args, bind=bind)
    return jax.make_jaxpr(run)(*closed.in_avals)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_copies_are_what_bind_makes(name):
    closed = jax.make_jaxpr(FUNCTIONS[name])(np.ones((2, 3), np.float32))
    with mock.patch.object(_jax, "_copied", return_value=None):
        bound = again(closed)
    copied = again(closed)
    assert str(copied) == str(bound)
    assert copied.out_avals == bound.out_avals


def test_operands_of_another_type_are_bound():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + x)(np.ones(3, np.float32))
    double = jax.make_jaxpr(
        lambda x: evaluate(
            closed.jaxpr, (), [x], bind=lambda eqn, *operands: _jax.bind_again(eqn, operands)
        )
    )(np.ones(3, np.float16))
    assert double.out_avals[0].dtype == np.float16


def test_constants_are_computed_where_they_are_to_be():
    closed = jax.make_jaxpr(lambda x: x * 3)(np.int32(2))

    def fold(x):
        with jax.ensure_compile_time_eval():
            (six,) = _jax.bind_again(closed.eqns[0], [np.int32(2), np.int32(3)])
        return x + int(six)

    assert int(jax.jit(fold)(1)) == 7


def mixed(x, y):
    """Equal computations, literals, splats, known arrays, loops, branches and calls, beside what no rule concerns."""
    ones = jnp.ones(x.shape, x.dtype)
    pairs = jnp.tanh(x) * y + jnp.tanh(x) * y + jnp.where(ones > 0, x, y)
    small = jnp.asarray([[1.0, 2.0, 1.0]] * 2, x.dtype)[:, ::-1]
    looped = lax.fori_loop(0, 3, lambda n, z: jnp.sin(z) * 2 + jnp.sin(z), pairs)
    chosen = lax.cond(x[0, 0] > 0, lambda z: z.T @ z, lambda z: (z.T @ z) + 0.0, looped)
    return jax.nn.gelu(chosen) + (x.T @ y) / 2.5, pairs / (y * 0 + 3.0), small * x


def lines(closed):
    return [_jax.user_line(eqn) for eqn in equations(closed.jaxpr)]


@pytest.mark.parametrize("rewrites", ["those of simplify", "none", "of tanh", "of products"])
def test_equations_that_no_rule_concerns_are_copied_as_they_would_be_bound(rewrites, monkeypatch):
    arguments = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)
    closed = jax.make_jaxpr(mixed)(*arguments)
    rules = {
        "none": {},
        "of tanh": {"tanh": lambda eqn, operands: [lax.mul(operands[0], operands[0])]},
        "of products": {"dot_general": lambda eqn, operands: None},
    }

    def rewritten():
        if rewrites == "those of simplify":
            return driver.simplify(closed)
        return driver.retrace(driver.simplify(closed), rules[rewrites])

    copied_from, copied = driver.copied_from, []

    def counted(*given):
        results = copied_from(*given)
        copied.append(results is not None)
        return results

    monkeypatch.setattr(driver, "copied_from", counted)
    quick = rewritten()
    assert sum(copied) > 5
    monkeypatch.setattr(driver, "copied_from", lambda *given: None)
    bound = rewritten()
    assert str(quick) == str(bound)
    assert lines(quick) == lines(bound)


def test_equations_that_a_rewrite_makes_equal_are_merged():
    closed = jax.make_jaxpr(lambda x: (jnp.sin(-x), jnp.sin(x), jnp.cos(-x) * jnp.cos(x)))(
        np.ones(3, np.float32)
    )
    even = driver.retrace(closed, {"neg": lambda eqn, operands: list(operands)})
    assert [eqn.primitive.name for eqn in even.jaxpr.eqns] == ["sin", "cos", "mul"]
