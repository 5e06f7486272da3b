"""Typed PRNG keys (jax.random.key) of Pallas kernels: arrays of the words that their generator works on.

A key array of shape s is uint32[*s, *key_shape] in memory and as a value. What moves keys moves each word alike; what a
generator does with keys is traced as JAX defines it, so that numbers are those that the same call gives outside a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from ..errors import UnsupportedOp

WORD = np.dtype(np.uint32)
# Equations that move elements and know nothing of their type.
MOVES = frozenset((
    "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "dynamic_update_slice", "gather",
    "transpose", "concatenate", "select_n", "rev", "split", "stack", "unstack", "tile",
))  # fmt: skip


def is_key(dtype) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def words_of(dtype) -> tuple[int, ...]:
    """Shape of one key."""
    return tuple(_jax.key_implementation(dtype).key_shape)


def held(aval) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of what holds an array: of keys, their words."""
    if is_key(aval.dtype):
        return (*aval.shape, *words_of(aval.dtype)), WORD
    return tuple(aval.shape), aval.dtype


def over_words(dtype, transforms: Sequence) -> list:
    """Transforms of a Ref of keys as those of the Ref of their words, whose last dimensions they leave alone."""
    words, found = words_of(dtype), []
    for t in transforms:
        match t:
            case _jax.NDIndexer():
                whole = tuple(_jax.Slice(0, n) for n in words)
                found.append(_jax.NDIndexer((*t.indices, *whole), (*t.shape, *words), t.int_indexer_shape))
            case _jax.ReshapeTransform(shape=shape):
                found.append(_jax.ReshapeTransform((*shape, *words)))
            case _jax.TransposeTransform(permutation=p):
                found.append(_jax.TransposeTransform((*p, *range(len(p), len(p) + len(words)))))
            case _:
                raise UnsupportedOp(f"{type(t).__name__} of a Ref of PRNG keys", hint="index, reshape or transpose it")
    return found


def moves_keys(eqn) -> bool:
    return eqn.primitive.name in MOVES and any(is_key(v.aval.dtype) for v in eqn.outvars)


def move(eqn, operands: Sequence, bind: Callable[..., Sequence]) -> list:
    """Results of an equation that moves keys: `bind(*operands)` for each word, put together again."""
    keys = [is_key(v.aval.dtype) for v in eqn.invars]
    words = words_of(eqn.outvars[0].aval.dtype)
    split = [_words(x, len(words)) if k else None for x, k in zip(operands, keys)]
    columns = [bind(*(x if s is None else s[n] for x, s in zip(operands, split))) for n in range(math.prod(words))]
    return [_joined(column, words) for column in zip(*columns)]


def _words(x, rank: int) -> list:
    flat = jnp.reshape(x, (*x.shape[: x.ndim - rank], -1))
    return [lax.index_in_dim(flat, n, flat.ndim - 1, keepdims=False) for n in range(flat.shape[-1])]


def _joined(words: Sequence, shape: tuple[int, ...]):
    rank = np.ndim(words[0])
    flat = lax.concatenate([lax.expand_dims(w, [rank]) for w in words], rank)
    return lax.reshape(flat, (*flat.shape[:-1], *shape))


# --- what generators do ---------------------------------------------------------------------------------------------


def _of_each_key(importer, eqn, operands: Sequence, f: Callable[..., object], dtype) -> list:
    """f(key's words, others) of every key of an array, translated. A TPU's own generators take typed keys."""
    impl, keyed = _jax.key_implementation(dtype), [is_key(v.aval.dtype) for v in eqn.invars]
    wraps = _jax.is_tpu_generator(impl) and bool(impl.key_shape)

    def one(*args):
        args = [jax.random.wrap_key_data(a, impl=impl.name) if k and wraps else a for a, k in zip(args, keyed)]
        result = f(impl, *args)
        return jax.random.key_data(result) if is_key(result.dtype) else result

    rank = max(len(v.aval.shape) for v in eqn.invars)
    if rank and wraps:
        raise UnsupportedOp(
            f"`{eqn.primitive.name}` of an array of TPU keys", at=_jax.user_line(eqn),
            why="the generator of a core has one state", hint="a loop over the keys",
        )  # fmt: skip
    for _ in range(rank):
        one = jax.vmap(one)
    closed = jax.make_jaxpr(one)(*[jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in operands])
    return importer.run(closed.jaxpr, closed.consts, operands)


def _random_seed(importer, eqn, seeds) -> list:
    return _of_each_key(importer, eqn, [seeds], lambda impl, s: impl.seed(s), eqn.outvars[0].aval.dtype)


def _random_split(importer, eqn, keys) -> list:
    shape = eqn.params["shape"]
    return _of_each_key(importer, eqn, [keys], lambda impl, k: impl.split(k, shape), eqn.invars[0].aval.dtype)


def _random_fold_in(importer, eqn, keys, numbers) -> list:
    shape, dtype = eqn.outvars[0].aval.shape, eqn.invars[0].aval.dtype
    keys, numbers = jnp.broadcast_to(keys, (*shape, *words_of(dtype))), jnp.broadcast_to(numbers, shape)
    return _of_each_key(importer, eqn, [keys, numbers], lambda impl, k, n: impl.fold_in(k, n), dtype)


def _random_bits(importer, eqn, keys) -> list:
    width, shape = eqn.params["bit_width"], eqn.params["shape"]

    def bits(impl, key):  # which are int32 of the TPU's generator
        return lax.bitcast_convert_type(impl.random_bits(key, width, shape), np.dtype(f"uint{width}"))

    return _of_each_key(importer, eqn, [keys], bits, eqn.invars[0].aval.dtype)


def _same(importer, eqn, x) -> list:
    return [x]


def _prng_split(importer, eqn, key) -> list:
    """pltpu.unwrap_pallas_seed: the words as scalars."""
    return _words(jnp.reshape(key, (-1,)), 1)


def _prng_join(importer, eqn, *words) -> list:
    """pltpu.wrap_pallas_seed"""
    return [_joined([lax.convert_element_type(w, WORD) for w in words], words_of(eqn.outvars[0].aval.dtype))]


RULES: dict[str, Callable[..., list]] = {
    "random_seed": _random_seed,
    "random_split": _random_split,
    "random_fold_in": _random_fold_in,
    "random_bits": _random_bits,
    "random_wrap": _same,
    "random_unwrap": _same,
    "random_clone": _same,
    "prng_split": _prng_split,
    "prng_join": _prng_join,
}
