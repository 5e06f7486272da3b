"""Calls a decorated function and jax.jit of the original in turn: checks that they agree, prints their times."""

import inspect
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np


def compare(
    compiled: Callable, *arguments, static_argnums=(), tolerance: float = 1e-4, calls: int = 15
) -> None:
    """Prints kernels, error and median milliseconds. Raises SystemExit(1) if results differ by more than `tolerance`,
    relative to the largest element."""
    plain = jax.jit(inspect.unwrap(compiled), static_argnums=static_argnums)
    got = jax.block_until_ready(compiled(*arguments))
    want = jax.block_until_ready(plain(*arguments))
    error = max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(np.asarray(b))))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )
    seconds: dict[str, list[float]] = {"pbkern": [], "jax.jit": []}
    for _ in range(calls):
        for times, function in zip(seconds.values(), (compiled, plain)):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times.append(time.perf_counter() - start)
    print(f"kernels    {len(compiled.kernels(*arguments))}")
    print(f"max error  {error:.1e}")
    for name, times in seconds.items():
        print(f"{name:10} {statistics.median(times) * 1e3:.3f} ms")
    if not error <= tolerance:
        raise SystemExit(
            f"{compiled.__name__}: results differ from jax.jit by {error:.1e}, accepted {tolerance:.0e}"
        )
