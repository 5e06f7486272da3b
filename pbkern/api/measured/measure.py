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

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl.build_programs import kernel_program
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.targets import get_target

# Fewest timed calls of each function, however few seconds there are. Source: not recorded.
MIN_CALLS = 3
# Parts of a comparison; a choice must be faster in each. Source: not recorded.
COMPARISON_PARTS = 2
# The part of the calls that are quicker than the time that is compared: on a busy machine the least
# time is that of a rare moment, and not each candidate has one. Source: 4620 rounds of eleven layer
# norms beside other work on two cores of an AMD EPYC, cut into 16 searches: the chosen one comes to
# 97.3 % of the best median, 95.4 % with least times, November 2026.
RARE_MOMENTS = 0.1


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


def least_seconds(
    calls: Sequence[Callable[[], Any]], seconds: float, passed_over: float = 0.0
) -> list[float]:
    """Least time of each, in alternating calls until `seconds` have passed and each was called MIN_CALLS times.

    Each is called once before, so that what is compiled or touched on a first call is not counted.
    `passed_over`: the part of the calls that are quicker and do not count.
    """
    for call in calls:
        jax.block_until_ready(call())
    times: list[list[float]] = [[] for _ in calls]
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < MIN_CALLS or time.perf_counter() < end:
        for call, measured in zip(calls, times):
            start = time.perf_counter()
            jax.block_until_ready(call())
            measured.append(time.perf_counter() - start)
        rounds += 1
    return [sorted(measured)[int(passed_over * rounds)] for measured in times]


def compared(
    calls: Sequence[Callable[[], Any]], seconds: float, gain: float
) -> tuple[list[float], list[bool]]:
    """(time of each, whether it takes at most `gain` times the first's), of alternating calls for about `seconds`.

    Rare moments do not count. Measured in COMPARISON_PARTS parts: what is faster must be so in each, or other work on the
    machine decides.
    """
    parts = [
        least_seconds(calls, seconds / COMPARISON_PARTS, RARE_MOMENTS)
        for _ in range(COMPARISON_PARTS)
    ]
    faster = [all(part[n] <= gain * part[0] for part in parts) for n in range(len(calls))]
    return [min(times) for times in zip(*parts)], faster


def kernel_seconds(kernel: Kernel, options: CompileOptions, seconds: float = 0.2) -> float:
    """Least time of one run of a kernel alone on random operands, measured for about `seconds`."""
    run, operands = kernel_call(kernel, options), random_operands(kernel.in_types)
    return least_seconds([lambda: run(*operands)], seconds)[0]


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
