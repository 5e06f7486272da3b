"""jax.random in bodies: typed PRNG keys (jax.random.key) are arrays of the words that their generator works on.

A key array of shape s is uint32[*s, *key_shape]. What moves keys moves each word alike; what a
generator does with keys is traced as JAX defines it, so that numbers are those that the same call
gives outside a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.ops.views import SHAPE_VIEWS

WORD = np.dtype(np.uint32)
Run = Callable[[jex.Jaxpr, Sequence, Sequence], list]
# Equations that move elements and know nothing of their type.
MOVES = frozenset(
    (
        *SHAPE_VIEWS,
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "transpose",
        "concatenate",
        "select_n",
        "rev",
        "split",
        "stack",
        "unstack",
        "tile",
    )
)


def is_key(dtype) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def words_of(dtype) -> tuple[int, ...]:
    """Shape of one key."""
    return tuple(_jax.key_implementation(dtype).key_shape)


def keys_of(words, dtype):
    """Keys of this type, of their words. The type has the generator itself, which JAX need not know by a name."""
    return jax.random.wrap_key_data(words, impl=_jax.key_implementation(dtype))


def held(aval) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of the memory of an array; for PRNG keys, of their words."""
    if is_key(aval.dtype):
        return (*aval.shape, *words_of(aval.dtype)), WORD
    return tuple(aval.shape), aval.dtype


def _move(eqn, operands: Sequence, bind: Callable[..., Sequence]) -> list:
    """Results of an equation that moves keys: `bind(*operands)` for each word, put together again."""
    keys = [is_key(var.aval.dtype) for var in eqn.invars]
    words = words_of(eqn.outvars[0].aval.dtype)
    split = [
        split_words(operand, len(words)) if key else None for operand, key in zip(operands, keys)
    ]
    columns = [
        bind(
            *(operand if pieces is None else pieces[n] for operand, pieces in zip(operands, split))
        )
        for n in range(math.prod(words))
    ]
    return [join_words(column, words) for column in zip(*columns)]


def split_words(x, rank: int) -> list:
    """Each word of the keys, whose words are the last `rank` dimensions of x."""
    flat = jnp.reshape(x, (*x.shape[: x.ndim - rank], -1))
    return [lax.index_in_dim(flat, n, flat.ndim - 1, keepdims=False) for n in range(flat.shape[-1])]


def join_words(words: Sequence, shape: tuple[int, ...]):
    """The keys of words; `shape` is that of one key."""
    rank = np.ndim(words[0])
    flat = lax.concatenate([lax.expand_dims(word, [rank]) for word in words], rank)
    return lax.reshape(flat, (*flat.shape[:-1], *shape))


# --- what generators do
# ---------------------------------------------------------------------------------------------


def _of_each_key(run, eqn, operands: Sequence, function: Callable[..., object], dtype) -> list:
    """function(key's words, others) of every key of an array, translated.

    A TPU's own generators take typed keys.
    """
    impl, keyed = _jax.key_implementation(dtype), [is_key(var.aval.dtype) for var in eqn.invars]
    wraps = _jax.is_tpu_generator(impl) and bool(impl.key_shape)

    def one(*args):
        args = [
            keys_of(arg, dtype) if is_keyed and wraps else arg for arg, is_keyed in zip(args, keyed)
        ]
        result = function(impl, *args)
        return jax.random.key_data(result) if is_key(result.dtype) else result

    rank = max(len(var.aval.shape) for var in eqn.invars)
    if rank and wraps:
        raise UnsupportedOp(
            f"`{eqn.primitive.name}` of an array of TPU keys",
            at=_jax.line_of_call(eqn),
            why="the generator of a core has one state",
            hint="a loop over the keys",
        )
    for _ in range(rank):
        one = jax.vmap(one)
    closed = jax.make_jaxpr(one)(
        *[jax.ShapeDtypeStruct(np.shape(operand), operand.dtype) for operand in operands]
    )
    return run(closed.jaxpr, closed.consts, operands)


def _random_seed(run, eqn, seeds) -> list:
    return _of_each_key(
        run, eqn, [seeds], lambda impl, seed: impl.seed(seed), eqn.outvars[0].aval.dtype
    )


def _random_split(run, eqn, keys) -> list:
    shape = eqn.params["shape"]
    return _of_each_key(
        run, eqn, [keys], lambda impl, key: impl.split(key, shape), eqn.invars[0].aval.dtype
    )


def _random_fold_in(run, eqn, keys, numbers) -> list:
    shape, dtype = eqn.outvars[0].aval.shape, eqn.invars[0].aval.dtype
    keys, numbers = (
        jnp.broadcast_to(keys, (*shape, *words_of(dtype))),
        jnp.broadcast_to(numbers, shape),
    )
    return _of_each_key(
        run, eqn, [keys, numbers], lambda impl, key, number: impl.fold_in(key, number), dtype
    )


def _random_bits(run, eqn, keys) -> list:
    width, shape = eqn.params["bit_width"], eqn.params["shape"]

    def bits(impl, key):  # which are int32 of the TPU's generator
        return lax.bitcast_convert_type(
            impl.random_bits(key, width, shape), np.dtype(f"uint{width}")
        )

    return _of_each_key(run, eqn, [keys], bits, eqn.invars[0].aval.dtype)


def _random_gamma(run, eqn, *operands) -> list:
    raise UnsupportedOp(
        "samples of a gamma distribution in a body",
        at=_jax.line_of_call(eqn),
        why="`random_gamma` rejects samples in loops, which compile long",
        hint="draw them outside the kernel",
    )


def _same(run, eqn, x) -> list:
    return [x]


def _rng_bit_generator(run, eqn, *operands) -> list:
    raise UnsupportedOp(
        "random numbers of XLA's generator in a body",
        at=_jax.line_of_call(eqn),
        why="`rng_bit_generator`, which rbg keys need, has no rule",
        hint='jax.random.key(seed, impl="threefry2x32")',
    )


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(k0, k1, x0, x1) -> list:
    """Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": threefry-2x32 with 20 rounds."""
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return [x0, x1]


def iota_2x32(shape: tuple[int, ...]) -> list:
    """High and low halves of the row-major position."""
    low = jnp.zeros(shape, np.uint32)
    for axis in range(len(shape)):
        low = low + lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(
            np.prod(shape[axis + 1 :], dtype=np.int64)
        )
    return [jnp.zeros(shape, np.uint32), low]


RULES: dict[str, Callable[..., list]] = {
    "random_seed": _random_seed,
    "random_split": _random_split,
    "random_fold_in": _random_fold_in,
    "random_bits": _random_bits,
    "random_gamma": _random_gamma,
    "random_wrap": _same,
    "random_unwrap": _same,
    "random_clone": _same,
    "rng_bit_generator": _rng_bit_generator,
    "threefry2x32": lambda run, eqn, *words: threefry2x32(*words),
    "iota_2x32_shape": lambda run, eqn: iota_2x32(tuple(eqn.params["shape"])),
}


def rewrite(eqn, operands: Sequence, run: Run, bind: Callable[..., Sequence]) -> list | None:
    """Results of an equation over PRNG keys or of their generators, None for any other.

    Args:
      eqn: the equation.
      operands: its operands.
      run: translates a jaxpr: (jaxpr, constants, operands) -> results.
      bind: results of `eqn` on other operands.
    """
    if eqn.primitive.name in MOVES and any(is_key(var.aval.dtype) for var in eqn.outvars):
        return _move(eqn, operands, bind)
    rule = RULES.get(eqn.primitive.name)
    return None if rule is None else rule(run, eqn, *operands)
