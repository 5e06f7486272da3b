"""jax.random in functions: typed PRNG keys -> arrays of the words that their generator works on.

Generators are then plain arithmetic and fuse with what reads the numbers: the bits of a mask or of
noise are never stored. The numbers are those of JAX (dsl/primitives/prng_keys.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.jaxprs.walks import inner_of
from pbkern.dsl.primitives.prng_keys import RULES, held, is_key, keys_of, rewrite


def keys_as_words(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites a function without typed keys, those among its operands and results too."""
    if not _has_keys(closed.jaxpr):
        return closed
    avals = [jax.ShapeDtypeStruct(*held(var.aval)) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _translated(closed.jaxpr, closed.consts, args))(*avals)


def words_of_keys(values: Sequence) -> list:
    """Key arrays as their words; other arrays as they are."""
    return [
        jax.random.key_data(value) if is_key(jax.typeof(value).dtype) else value for value in values
    ]


def keys_of_words(values: Sequence, avals: Sequence) -> list:
    """The inverse of `words_of_keys`, for values of these types."""
    return [
        keys_of(value, aval.dtype) if is_key(aval.dtype) else value
        for value, aval in zip(values, avals)
    ]


def _has_keys(jaxpr: jex.Jaxpr) -> bool:
    if any(
        is_key(var.aval.dtype)
        for var in (*jaxpr.invars, *jaxpr.outvars)
        if hasattr(var.aval, "dtype")
    ):
        return True
    return any(eqn.primitive.name in RULES for eqn in jaxpr.eqns) or any(
        _has_keys(inner.jaxpr) for inner in inner_of(jaxpr)
    )


def _translated(jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence) -> list:
    return retrace_into(jaxpr, words_of_keys(consts), args, _rewrite)


def _rewrite(eqn, *operands) -> list | None:
    if (
        eqn.primitive.name == "rng_bit_generator"
    ):  # of rbg keys: XLA's own generator, which no kernel has
        return None
    if (
        eqn.primitive.name == "random_gamma"
    ):  # its loops take long to compile: XLA's, on keys made from their words
        return _jax.bind_again(eqn, keys_of_words(operands, [var.aval for var in eqn.invars]))
    return rewrite(eqn, operands, _translated, lambda *given: _jax.bind_again(eqn, given))
