"""The random number generator of a TPU's core (pltpu.prng_seed, prng_random_bits): scratch that holds its state.

Numbers are threefry-2x32 of the seed, of how often it was drawn from since, and of their position.
A TPU's are others, which are not specified; as there, seed, shape and order of draws decide them.
Before the first seed of a grid's first program the state is zero. Programs that draw before they
seed run in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.dsl.kernel import Scratch
from pbkern.dsl.primitives.prng_keys import (
    WORD,
    iota_2x32,
    is_key,
    join_words,
    split_words,
    threefry2x32,
    words_of,
)

# Two words of a key, and the number of draws.
STATE_WORDS = 3


def allocation(jaxpr: jex.Jaxpr) -> Scratch | None:
    """Scratch for the state, if the body uses the generator."""
    return Scratch((STATE_WORDS,), WORD, scoped=seeds_first(jaxpr)) if uses(jaxpr) else None


def uses(jaxpr: jex.Jaxpr) -> bool:
    """Whether a body seeds the generator or draws from it."""
    return any(
        _seeds(eqn) or _draws(eqn) or any(uses(j.jaxpr) for j in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def seeds_first(jaxpr: jex.Jaxpr) -> bool:
    """Whether every program that draws has set the seed, so that nothing is left of the programs before."""
    for eqn in _without_calls(jaxpr):
        if _seeds(eqn):
            return True
        if _draws(eqn) or any(uses(j.jaxpr) for j in inner_jaxprs(eqn)):
            return False
    return True


def _without_calls(jaxpr: jex.Jaxpr) -> Iterator:
    for eqn in jaxpr.eqns:
        inner = called_jaxpr(eqn)
        yield from [eqn] if inner is None else _without_calls(inner.jaxpr)


def _seeds(eqn) -> bool:
    """Drawing from a key of the TPU's seeds the generator with that key."""
    return eqn.primitive.name == "prng_seed" or (
        _draws_from_tpu_key(eqn) and bool(words_of(eqn.invars[0].aval.dtype))
    )


def _draws(eqn) -> bool:
    return eqn.primitive.name == "prng_random_bits" or _draws_from_tpu_key(eqn)


def _draws_from_tpu_key(eqn) -> bool:
    if eqn.primitive.name != "random_bits":
        return False
    return _jax.is_tpu_generator(_jax.key_implementation(eqn.invars[0].aval.dtype))


def clear(state) -> None:
    """Before anything else in the body."""
    for n in range(STATE_WORDS):
        state[n] = WORD.type(0)


def seed(state, eqn, seeds: Sequence) -> None:
    """prng_seed: of integers, each mixed in after the other, or of the words of a key."""
    words: list = []
    for x, var in zip(seeds, eqn.invars):
        words += split_key(x) if is_key(var.aval.dtype) else [lax.convert_element_type(x, WORD)]
    high, low = WORD.type(0), WORD.type(0)
    for n, word in enumerate(words):
        high, low = threefry2x32(high, low, word, WORD.type(n))
    state[0], state[1], state[2] = high, low, WORD.type(0)


def draw(state, shape: tuple[int, ...]):
    """prng_random_bits: int32 of this shape."""
    count = state[2]
    _, position = iota_2x32(shape)
    words = threefry2x32(state[0], state[1], lax.full(shape, 0, WORD) + count, position)
    state[2] = count + WORD.type(1)
    return lax.bitcast_convert_type(lax.bitwise_xor(*words), np.int32)


def split_key(key) -> list:
    """prng_split: a key's words as scalars."""
    return split_words(lax.reshape(key, (key.size,)), 1)


def join_key(eqn, words: Sequence):
    """prng_join"""
    return join_words(
        [lax.convert_element_type(word, WORD) for word in words],
        words_of(eqn.outvars[0].aval.dtype),
    )
