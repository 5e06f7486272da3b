"""Kernels and functions -> measured seconds: the least of several calls, those that are compared taking turns.

A kernel is measured alone, as a program of one launch on operands of its real sizes, called through
XLA with its threads. A call makes its results, which are new arrays, and costs some microseconds of
XLA's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbkern.core.options import CompileOptions
from pbkern.dsl.build_programs import kernel_program
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.targets import get_target

# Fewest timed calls of each function, however few seconds there are. Source: not recorded.
MIN_CALLS = 3


def random_operands(types: Sequence[ArrayType], seed: int = 0) -> list[jax.Array]:
    """Arrays of these types: normal floats, integers 0 and 1 (which are valid indices of most arrays), both bools."""
    rng = np.random.default_rng(seed)

    def one(array_type: ArrayType) -> jax.Array:
        if jnp.issubdtype(array_type.dtype, jnp.inexact):
            return jnp.asarray(
                rng.standard_normal(array_type.shape, np.float32).astype(array_type.dtype)
            )
        return jnp.asarray(rng.integers(0, 2, array_type.shape, np.int8).astype(array_type.dtype))

    return [one(type_) for type_ in types]


def kernel_call(kernel: Kernel, options: CompileOptions) -> Callable[..., list[jax.Array]]:
    """A function that runs a kernel alone, compiled for the options' target."""
    target = get_target(options.target)
    compiled = target.compile(kernel_program(kernel), options)
    return jax.jit(lambda *operands: target.call(compiled, *operands))


def least_seconds(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Least time of each, in alternating calls until `seconds` have passed and each was called MIN_CALLS times.

    Each is called once before, so that what is compiled or touched on a first call is not counted.
    """
    for call in calls:
        jax.block_until_ready(call())
    best = [float("inf")] * len(calls)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < MIN_CALLS or time.perf_counter() < end:
        for n, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[n] = min(best[n], time.perf_counter() - start)
        rounds += 1
    return best


def kernel_seconds(kernel: Kernel, options: CompileOptions, seconds: float = 0.2) -> float:
    """Least time of one run of a kernel alone on random operands, measured for about `seconds`."""
    run, operands = kernel_call(kernel, options), random_operands(kernel.in_types)
    return least_seconds([lambda: run(*operands)], seconds)[0]
