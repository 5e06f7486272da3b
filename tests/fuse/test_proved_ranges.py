"""Bounds of integers that follow from iotas, constants and checks; checks that always hold are dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

import pbkern
from pbkern.core.jaxprs.walks import equations
from pbkern.dsl.primitives.in_range import in_range, outside
from pbkern.fuse.simplify.proved_ranges import drop_proved_ranges
from tests.lowered import lowered


def checks_left(f, *args) -> int:
    after = drop_proved_ranges(jax.make_jaxpr(f)(*args))
    return sum(e.primitive.name == "in_range" for e in equations(after.jaxpr))


I = jnp.arange(12, dtype=jnp.int32).reshape(3, 4) * 5 - 17
iota = lambda n: lax.iota(jnp.int32, n)
PROVED = {
    "iota": lambda i: in_range(iota(5), 0, 5),
    "sum": lambda i: in_range(iota(5) + 3, 3, 8),
    "difference": lambda i: in_range(4 - iota(5), 0, 5),
    "product": lambda i: in_range(iota(5) * -2, -8, 1),
    "remainder": lambda i: in_range(lax.rem(i, jnp.int32(7)), -6, 7),
    "remainder of Python": lambda i: in_range(iota(40) % 7, 0, 7),
    "quotient": lambda i: in_range(lax.div(iota(40), jnp.int32(8)), 0, 5),
    "clamp": lambda i: in_range(jnp.clip(i, 2, 6), 2, 7),
    "least and greatest": lambda i: in_range(jnp.minimum(jnp.maximum(i, 0), 9), 0, 10),
    "moved": lambda i: in_range(jnp.broadcast_to(iota(5)[::-1], (3, 5)).T[1:], 0, 5),
    "joined": lambda i: in_range(jnp.concatenate([iota(3), iota(8) + 1]), 0, 9),
    "chosen": lambda i: in_range(jnp.where(i > 0, jnp.clip(i, 0, 4), 9), 0, 10),
    "argmax": lambda i: in_range(jnp.argmax(i, 1), 0, 4),
    "checked before": lambda i: in_range(in_range(jnp.clip(i, 0, 3), 0, 4), 0, 4),
    "no zero": lambda i: in_range(iota(4) + 1, 1, 0),
    "below zero": lambda i: in_range(iota(4) - 9, 1, 0),
    "constant": lambda i: in_range(iota(1) * 0 + 3, 0, 4),
    "inside a loop": lambda i: lax.fori_loop(0, 3, lambda k, x: x + in_range(iota(4), 0, 4), iota(4)),
}  # fmt: skip
LEFT = {
    "an operand": lambda i: in_range(i, 0, 5),
    "one too many": lambda i: in_range(iota(6) - 1, 0, 6),
    "zero among them": lambda i: in_range(iota(4), 1, 0),
    "what may wrap": lambda i: in_range(iota(5) * jnp.int32(2**30), -(2**31), 2**31 - 1),
    "remainder by what is unknown": lambda i: in_range(lax.rem(iota(4), i[0]), 0, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVED)
def test_a_check_that_holds_is_dropped(name):
    assert checks_left(PROVED[name], I) == 0


@pytest.mark.parametrize("name", LEFT)
def test_a_check_that_may_fail_stays(name):
    assert checks_left(LEFT[name], I) == 1


def test_values_stay():
    before = jax.make_jaxpr(lambda i: [f(i) for f in PROVED.values()])(I)
    made, expected = (jax.jit(jex.jaxpr_as_fun(j))(I) for j in (drop_proved_ranges(before), before))
    for m, e in zip(made, expected, strict=True):
        np.testing.assert_array_equal(m, e)


def test_what_is_done_to_negative_indices_goes_where_there_are_none():
    f = lambda x, i: x[in_range(i, 0, 4)]
    after = drop_proved_ranges(jax.make_jaxpr(f)(jnp.ones((4, 3)), jnp.arange(3)))
    assert "select_n" not in str(after)
    assert "in_range" in str(after)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_ranges_beyond_a_type(dtype):
    x = np.arange(5).astype(dtype)
    info = np.iinfo(dtype)
    assert in_range(x, int(info.min), int(info.max) + 1) is x
    assert in_range(x, -(2**40), 2**40) is x
    assert not outside(x, max(info.min, -5), info.max).any()
    assert outside(x, 0, 3).tolist() == [False, False, False, True, True]
    assert outside(x, 1, 0).tolist() == [True, False, False, False, False]


def wrapped(n):
    """As jnp writes x[i]: negative indices count from the end."""

    def f(i):
        j = in_range(i, -n, n)
        return jnp.where(j < 0, j + n, j)

    return f


@pytest.mark.parametrize("dtype", ["int8", "int32"])
@pytest.mark.parametrize("n", [1, 5, 100])
def test_the_addition_to_negative_indices_is_checked_instead(n, dtype):
    i = np.clip(np.array([[-n - 1, -n, -1], [0, n - 1, n]]), -128, 127).astype(dtype)
    before = jax.make_jaxpr(wrapped(n))(i)
    after = drop_proved_ranges(before)
    [check] = [e for e in equations(after.jaxpr) if e.primitive.name == "in_range"]
    assert (check.params["low"], check.params["high"]) == (0, n)
    results = [jex.jaxpr_as_fun(closed)(i)[0] for closed in (before, after)]
    np.testing.assert_array_equal(*results)
    assert (outside(i, -n, n) == outside(np.asarray(results[0]), 0, n)).all()


OTHERWISE = {
    "another number is added": lambda j: jnp.where(j < 0, j + 4, j),
    "another index": lambda j: jnp.where(j < 0, j[::-1] + 5, j),
    "the other case": lambda j: jnp.where(j < 0, j, j + 5),
    "another test": lambda j: jnp.where(j < 1, j + 5, j),
    "added where it is not negative": lambda j: jnp.where(j >= 0, j + 5, j),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_choices_keep_their_check(name):
    closed = jax.make_jaxpr(lambda i: OTHERWISE[name](in_range(i, -5, 5)))(
        np.arange(-5, 5, dtype="int32")
    )
    checks = [
        e for e in equations(drop_proved_ranges(closed).jaxpr) if e.primitive.name == "in_range"
    ]
    assert [(e.params["low"], e.params["high"]) for e in checks] == [(-5, 5)]


def test_a_checked_index_is_kept_in_its_array_by_one_minimum():
    """Of 32 bits without sign, also where indices have 64: any place will do for one that is reported."""
    with jax.enable_x64(True):
        i, x = np.arange(40) % 7, np.ones(7, "float32")
        checked = lowered(lambda x, i: x[in_range(i, 0, 7)] * 2, x, i)
        plain = lowered(lambda x, i: x[i] * 2, x, i)
    assert checked.count("min(") == 1
    assert "max(" not in checked
    assert "max(" in plain or "select_n(" in plain


@pytest.mark.parametrize("narrow", ["int8", "uint8", "int16", "int32", "int64", "float32"])
def test_conversions_behind_a_check_keep_their_meaning(narrow):
    """An index that a conversion wraps is clamped as without the check."""
    with jax.enable_x64(True):
        i, x = np.array([0, 1, 127, 128, 199, 150, 64]), np.arange(200, dtype="float32")
        index = lambda i: i.astype(narrow).astype("int64")
        take = lambda x, i: jnp.take(x, index(i), mode="clip")
        made = pbkern.jit(lambda x, i: take(x, in_range(i, 0, 200)))(x, i)
        np.testing.assert_array_equal(made, jax.jit(take)(x, i))
