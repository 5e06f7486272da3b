"""Random bits: Philox in arithmetic that kernels have, other generators by lax."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.frontends.stablehlo.operation import HloOperation, tensor_type
from pbkern.frontends.stablehlo.table import check, rule

ALGORITHMS = {"DEFAULT": "RNG_DEFAULT", "THREE_FRY": "RNG_THREE_FRY"}
# Philox4x32-10: multipliers, what is added to the key from round to round, rounds. Source: Salmon,
# Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), and its library
# Random123.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Rounds of Philox 4x32 (same paper).
PHILOX_ROUNDS = 10
PHILOX_WORDS = 4  # of 32 bits per counter


@rule("stablehlo.rng_bit_generator")
def rng_bit_generator(op: HloOperation, state):
    shape, dtype = op.type(1)
    algorithm = op.choice("rng_algorithm") or "DEFAULT"
    if algorithm == "PHILOX":
        return _philox(state, shape, dtype)
    return lax.rng_bit_generator(
        state, shape, dtype=dtype, algorithm=lax.RandomAlgorithm[ALGORITHMS[algorithm]]
    )


@check("stablehlo.rng_bit_generator")
def _state_is_known(op):
    shape, dtype = tensor_type(op.operands[0])
    philox = HloOperation(op).choice("rng_algorithm") == "PHILOX"
    if philox and (dtype != np.uint64 or shape not in ((2,), (3,))):
        return f"a state of {dtype.name}{list(shape)}; Philox has one of two or three uint64"
    if not philox and (dtype.name, shape) not in (("uint64", (2,)), ("uint32", (4,))):
        return f"a state of {dtype.name}{list(shape)}"
    if tensor_type(op.results[1])[1].kind not in "iu":
        return "bits of other numbers than integers"
    return None


def _philox(state, shape, dtype):
    """(state behind, bits): a key, then a counter of 64 or 128 bits, which counts blocks of four words."""
    size = int(np.prod(shape))
    words = -(-size * max(dtype.itemsize, 4) // 4)
    count = -(-words // PHILOX_WORDS)
    low = state[1] + jnp.arange(count, dtype="uint64")
    high = (state[2] if state.shape[0] == 3 else np.uint64(0)) + (low < state[1]).astype("uint64")
    bits = jnp.stack(_block(_halves(low) + _halves(high), _halves(state[0])), -1).reshape(-1)[
        :words
    ]
    if dtype.itemsize == 8:
        pairs = bits.reshape(-1, 2).astype("uint64")
        bits = pairs[:, 0] | (pairs[:, 1] << np.uint64(32))
    behind = state[1] + np.uint64(count)
    parts = [state[0], behind]
    if state.shape[0] == 3:
        parts.append(state[2] + (behind < state[1]).astype("uint64"))
    return jnp.stack(parts), bits.astype(f"uint{dtype.itemsize * 8}").astype(dtype).reshape(shape)


def _halves(x) -> list:
    """Lower and upper 32 bits of 64."""
    return [x.astype("uint32"), (x >> np.uint64(32)).astype("uint32")]


def _block(counter: list, key: list) -> list:
    """Four words of bits of a counter of four words."""
    for _ in range(PHILOX_ROUNDS):
        (l0, h0), (l1, h1) = (
            _halves(word.astype("uint64") * np.uint64(multiplier))
            for word, multiplier in zip(counter[::2], MULTIPLIERS)
        )
        counter = [h1 ^ counter[1] ^ key[0], l1, h0 ^ counter[3] ^ key[1], l0]
        key = [k + np.uint32(step) for k, step in zip(key, KEY_STEPS)]
    return counter
