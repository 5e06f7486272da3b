"""Types of benchmarks/workloads.py: what a workload is, and how its arguments are drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one argument. Integers are drawn below `high`; floats are normal, times `scale`."""

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    high: int = 0
    scale: float = 1.0

    def draw(self, rng: np.random.Generator) -> jax.Array:
        if self.high:
            return jnp.asarray(rng.integers(0, self.high, self.shape, np.int32))
        return jnp.asarray(
            rng.standard_normal(self.shape, np.float32) * np.float32(self.scale), self.dtype
        )


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
      name: as on the command line.
      function: JAX arrays -> a JAX array or a tuple of them.
      full, small: arguments as measured, and as checked against float64.
      flops: arithmetic at full size.
      numpy: the same function on NumPy arrays, in the dtype of its arguments; None where NumPy has no such thing.
      l3_bytes: bytes at full size that pass from the last-level cache because the cores' own do not hold them.
      tolerance: largest error accepted against float64, relative to the largest result.
      dtype: of the arithmetic, which decides the machine's peak.
      note: what a reader of the table should know.
    """

    name: str
    function: Callable
    full: tuple[Spec, ...]
    small: tuple[Spec, ...]
    flops: float
    numpy: Callable | None
    l3_bytes: float = 0.0
    tolerance: float = 1e-4
    dtype: str = "float32"
    note: str = ""

    def arguments(self, specs: tuple[Spec, ...], seed: int = 0) -> list[jax.Array]:
        rng = np.random.default_rng(seed)
        return [s.draw(rng) for s in specs]

    @functools.cached_property
    def compulsory_bytes(self) -> int:
        """Arguments and results at full size, once each."""
        arguments = [
            jax.ShapeDtypeStruct(s.shape, s.dtype if not s.high else jnp.int32) for s in self.full
        ]
        results = jax.tree.leaves(jax.eval_shape(self.function, *arguments))
        return sum(a.size * np.dtype(a.dtype).itemsize for a in [*arguments, *results])
