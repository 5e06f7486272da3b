"""Assertions about what pbkern makes of a function, for the tests of programs that rely on its fusion and speed.

`f` is a function decorated with pbkern.jit (polyblocks_jit_jax) or a plain one, which is decorated
here; `args` is a tuple of its arguments. Each failure is an AssertionError that says what was
expected, what is there, and why.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pbkern.api import decorators
from pbkern.core.errors import OptionError
from pbkern.targets import get_target

if TYPE_CHECKING:
    from pbkern.fuse import Explanation

__all__ = ["assert_fused", "assert_kernels", "assert_roofline"]


def assert_kernels(function: Callable, args: Sequence, n: int) -> None:
    """Asserts that `f(*args)` runs exactly `n` kernels and leaves nothing to XLA. Compiles nothing.

    Raises AssertionError with the kernels, their operations, and the fusions that were rejected.

    Args:
      function: a function decorated with pbkern.jit, or a plain one.
      args: its arguments.
      n: the number of kernels.

    Examples:
      >>> x = jax.ShapeDtypeStruct((64, 256), "float32")
      >>> pbkern.testing.assert_kernels(jax.nn.softmax, (x,), 1)
    """
    _assert_nothing_left(function, args)
    explanation = _compiled(function).explain(*args)
    count = len(explanation.kernels)
    assert count == n, (
        f"{explanation.name}: {_counted(count, 'kernel')}, expected {n}\n{_kernels(explanation)}"
    )


def assert_fused(function: Callable, args: Sequence, kernels: int | None = None) -> None:
    """Asserts that every operation of `f(*args)` is in a kernel: nothing is left to XLA.

    Compiles nothing.

    Args:
      function: a function decorated with pbkern.jit, or a plain one.
      args: its arguments.
      kernels: the most kernels accepted; None, the default, accepts any number.
    Raises AssertionError with the operations that are left, their lines and the reasons, or with
    the rejected fusions.

    Examples:
      >>> x = jax.ShapeDtypeStruct((64, 256), "float32")
      >>> pbkern.testing.assert_fused(lambda x: (x @ x.T).sum(0), (x,), kernels=2)
    """
    _assert_nothing_left(function, args)
    explanation = _compiled(function).explain(*args)
    count = len(explanation.kernels)
    if kernels is not None and count > kernels:
        raise AssertionError(
            f"{explanation.name}: {_counted(count, 'kernel')}, at most {kernels} expected\n{_kernels(explanation)}"
        )


def assert_roofline(
    function: Callable,
    args: Sequence,
    fraction: float,
    *,
    flops: float | None = None,
    nbytes: float | None = None,
    calls: int = 20,
) -> None:
    """Asserts that the fastest of `calls` calls reaches `fraction` of the machine's limit.

    The limit is max(flops / peak, nbytes / memory bandwidth) in seconds, at the rates of the
    target's machine.

    Args:
      function: a function decorated with pbkern.jit, or a plain one.
      args: its arguments.
      fraction: of the limit, above 0; 1 is all that the machine can do.
      flops: arithmetic of one call, multiply-adds counted as two; default: what the fused kernels
        do, recomputed values not counted.
      nbytes: least traffic of one call; default: every array among arguments and results once.
      calls: timed calls, after one that compiles.
    Raises OptionError for a fraction that is not above 0; AssertionError with the time, the limit
    and both its terms.

    Examples:
      >>> pbkern.testing.assert_roofline(lambda x: x * 2 + 1, (jnp.ones(1 << 16),), 0.001)
    """
    if not fraction > 0:
        raise OptionError(
            "the fraction of the limit must be positive", why=f"fraction={fraction!r}", hint="0.5"
        )
    compiled = _compiled(function)
    result = jax.block_until_ready(compiled(*args))
    if nbytes is None:
        arrays = [
            leaf
            for leaf in jax.tree.leaves((args, result))
            if isinstance(leaf, (jax.Array, np.ndarray))
        ]
        nbytes = sum(array.nbytes for array in arrays)
    explanation = compiled.explain(*args)
    if flops is None:
        flops = sum(
            kernel.cost.flops / max(kernel.cost.recompute, 1.0) for kernel in explanation.kernels
        )
    machine = get_target("cpu").machine()
    arithmetic, traffic = (
        flops / machine.flops(_widest_float(result)),
        nbytes / machine.dram_bandwidth,
    )
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    limit, best = max(arithmetic, traffic), min(seconds)
    assert limit >= fraction * best, (
        f"{explanation.name}: {limit / best:.0%} of the machine's limit, expected {fraction:.0%}\n"
        f"  measured    {best * 1e3:.3f} ms at best of {calls}, median {statistics.median(seconds) * 1e3:.3f} ms\n"
        f"  limit       {limit * 1e3:.3f} ms\n"
        f"  arithmetic  {arithmetic * 1e3:.3f} ms for {flops / 1e6:.2f} Mflop\n"
        f"  traffic     {traffic * 1e3:.3f} ms for {nbytes / 1e6:.2f} MB\n"
        f"  machine     {machine.source}\n{_kernels(explanation)}"
    )


def _compiled(function: Callable) -> Any:
    return function if hasattr(function, "explain") else decorators.jit(function)


def _assert_nothing_left(function: Callable, args: Sequence) -> None:
    explanation = _compiled(function).explain(*args)
    rows = "\n".join(f"  {x.op} at {x.at or 'unknown line'}: {x.why}" for x in explanation.left)
    count = len(explanation.left)
    assert not count, (
        f"{explanation.name}: {_counted(count, 'operation')} left to XLA, none expected\n{rows}"
    )


def _kernels(explanation: Explanation) -> str:
    """The kernels with their operations, then the fusions that were rejected."""
    rows = [
        f"  {kernel.name}: {', '.join(op for op, _ in (*kernel.ops, *kernel.finish))}"
        for kernel in explanation.kernels
    ]
    rows += [
        f"  not fused: {edge.producer.primitive.name}: {edge.why}"
        for edge in explanation.edges
        if not edge.fused
    ]
    return "\n".join(rows)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _widest_float(result) -> str:
    """Name of the widest floating dtype among results, whose peak bounds the arithmetic; float32 where none is."""
    floats = [
        np.dtype(leaf.dtype)
        for leaf in jax.tree.leaves(result)
        if jax.numpy.issubdtype(leaf.dtype, np.floating)
    ]
    return max(floats, key=lambda dtype: dtype.itemsize).name if floats else "float32"
