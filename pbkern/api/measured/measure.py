"""Kernels and functions -> measured seconds: the least of several calls, or how calls that take turns compare.

A kernel is measured alone, as a program of one launch on operands of its real sizes, called through
XLA with its threads. A call makes its results, which are new arrays, and costs some microseconds of
XLA's own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl.build_programs import kernel_program
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.targets import get_target

# Fewest timed calls of each function, however few seconds there are. Source: not recorded.
MIN_CALLS = 3
# Parts of a comparison; a choice must be faster in each. Source: not recorded.
COMPARISON_PARTS = 2
# Seed of the order in which calls take turns.
ORDER_SEED = 0


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


def drawn(tree: Any) -> Any:
    """Random arrays in place of types."""

    def one(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return random_operands([ArrayType(leaf.shape, np.dtype(leaf.dtype))])[0]

    return jax.tree.map(one, tree)


def kernel_call(kernel: Kernel, options: CompileOptions) -> Callable[..., list[jax.Array]]:
    """A function that runs a kernel alone, compiled for the options' target."""
    target = get_target(options.target)
    compiled = target.compile(kernel_program(kernel), options)
    return jax.jit(lambda *operands: target.call(compiled, kernel.name, operands))


def alternating(calls: Sequence[Callable[[], Any]], seconds: float) -> np.ndarray:
    """Seconds[round, call]: rounds in which each is called once, until `seconds` have passed and there are MIN_CALLS.

    Each is called once before, so that what is compiled or touched on a first call is not counted.
    Each round has an order of its own: what ran before a call counts for all alike.
    """
    for call in calls:
        jax.block_until_ready(call())
    rounds: list[list[float]] = []
    order, shuffle = list(range(len(calls))), random.Random(ORDER_SEED).shuffle
    end = time.perf_counter() + seconds
    while len(rounds) < MIN_CALLS or time.perf_counter() < end:
        times = [0.0] * len(calls)
        shuffle(order)
        for n in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[n]())
            times[n] = time.perf_counter() - start
        rounds.append(times)
    return np.asarray(rounds)


def least_seconds(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Least time of each, in alternating calls for about `seconds`."""
    return alternating(calls, seconds).min(axis=0).tolist()


def typical_seconds(rounds: np.ndarray) -> list[float]:
    """The time of each call in a typical round, from Seconds[round, call].

    Each time is divided by the median of its round, as other work on the machine takes from all calls of a
    round; the median of these ratios counts, as it takes more from some. On a busy machine least times, and those of
    the quickest tenth, are of rare moments, which not each call has. Source: docs/decisions/095-kernels-that-are-edited.md.
    """
    of_rounds = np.median(rounds, axis=1, keepdims=True)
    return (np.median(rounds / of_rounds, axis=0) * np.median(of_rounds)).tolist()


def compared(
    calls: Sequence[Callable[[], Any]], seconds: float, gain: float
) -> tuple[list[float], list[bool]]:
    """(typical time of each, whether it takes at most `gain` times the first's), of alternating calls for about `seconds`.

    Measured in COMPARISON_PARTS parts: what is faster must be so in each, by the median of its ratio to the first in the
    same round, or other work on the machine decides.
    """
    parts = [alternating(calls, seconds / COMPARISON_PARTS) for _ in range(COMPARISON_PARTS)]
    ratios = [np.median(part / part[:, :1], axis=0) for part in parts]
    faster = [all(ratio[n] <= gain for ratio in ratios) for n in range(len(calls))]
    return typical_seconds(np.concatenate(parts)), faster


def kernel_seconds(kernel: Kernel, options: CompileOptions, seconds: float = 0.2) -> float:
    """Least time of one run of a kernel alone on random operands, measured for about `seconds`.

    An operand whose memory a result takes is the result of the run before: it is not copied.
    """
    donated = [operand for operand, _ in kernel.shared]
    run = jax.jit(kernel_call(kernel, options), donate_argnums=donated)
    operands = random_operands(kernel.in_types)

    def call() -> list[jax.Array]:
        results = run(*operands)
        for operand, result in kernel.shared:
            operands[operand] = results[result]
        return results

    return least_seconds([call], seconds)[0]


@dataclass(frozen=True)
class Difference:
    """The first element at which a result is not what it should be, with the most by which it may differ."""

    index: tuple[int, ...]
    value: Any
    expected: Any
    tolerance: float

    def __str__(self) -> str:
        place = f"at [{', '.join(map(str, self.index))}]"
        return f"{place} is {self.value}, not {self.expected} (tolerance {self.tolerance:.3g})"


def first_difference(got: Any, want: Any) -> Difference | None:
    """The first element that differs by more than rounding: other blocks sum in another order."""
    values, expected = np.asarray(got), np.asarray(want)
    left, right, tolerance = values, expected, 0.0
    if jnp.issubdtype(expected.dtype, jnp.inexact):
        part = float(jnp.finfo(expected.dtype).eps) ** 0.5
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        left, right = values.astype(wide), expected.astype(wide)
        tolerance = part * float(np.abs(right[np.isfinite(right)]).max(initial=0.0))
        same = np.isclose(left, right, rtol=part, atol=tolerance, equal_nan=True)
    else:
        same = left == right
    if same.all():
        return None
    index = tuple(map(int, np.unravel_index(int(np.argmin(same)), same.shape)))
    return Difference(index, values[index], expected[index], tolerance)


def agree(got: Any, want: Any) -> bool:
    """Whether two results differ by rounding at most."""
    return first_difference(got, want) is None
