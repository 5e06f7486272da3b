"""Eager calls with large results: memory that is used again in place of new pages.

XLA takes arrays from malloc. glibc's malloc maps each array above 32 MB (DEFAULT_MMAP_THRESHOLD_MAX) anew, and unmaps it when
it is freed. So every call of a function with such a result touches fresh pages, which costs more than computing many such
results (decision 012). Here these results are in memory of a pool. A result is an ordinary jax.Array over that memory. When its
last reference goes, the memory returns to the pool, which keeps up to PBKERN_POOL_MEGABYTES unused.

`Dispatch` decides once per types of arguments. Other calls run as before: those under a transformation, with donated
arguments, over several devices, with small results, and of functions of which XLA runs a part.
"""

from __future__ import annotations

import functools
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax, fuse
from pbkern.core import config
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl import checks
from pbkern.dsl.kernel import ArrayType
from pbkern.targets.host.runtime.arena import HUGE_PAGE_BYTES
from pbkern.targets.target import Target


class PoolPages:
    """Pages of one size, aligned to huge pages."""

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(pages, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE_BYTES
        self.bytes = whole[start : start + size]
        self.size = size


class Lease:
    """Lends memory to one array: when nothing refers to it any more, the memory goes back to its pool."""

    def __init__(self, memory: PoolPages, pool: ResultPool):
        self.memory, self.pool = memory, pool
        self.__array_interface__ = memory.bytes.__array_interface__

    def __del__(self):
        self.pool.give(self.memory)


class ResultPool:
    """Memory that is not in use, last returned first."""

    def __init__(self) -> None:
        self.unused: deque[PoolPages] = deque()
        # Reentrant, as garbage collection may return memory while this thread takes some.
        self.lock = threading.RLock()

    def array(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array of any values in memory of the pool."""
        size = max(math.prod(shape) * dtype.itemsize, 1)
        lease = Lease(self._take(-(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES), self)
        return np.asarray(lease)[:size].view(dtype).reshape(shape)

    def _take(self, size: int) -> PoolPages:
        with self.lock:
            for memory in reversed(list(self.unused)):
                if memory.size == size:
                    self.unused.remove(memory)
                    return memory
        return PoolPages(size)

    def give(self, memory: PoolPages) -> None:
        with self.lock:
            self.unused.append(memory)
            while (
                self.unused
                and sum(block.size for block in self.unused) > config.current().pool_megabytes << 20
            ):
                self.unused.popleft()


POOL = ResultPool()


@dataclass(frozen=True)
class IntoBuffers:
    """A compiled function that writes some of its results into arrays that it is given.

    Attributes:
      run: (leaves of the arguments, places) -> (the other results, an array to wait for).
      places: type of each result that is written to a place, by its position among all results.
      structure: of the results.
    """

    run: Callable
    places: dict[int, ArrayType]
    structure: Any

    def __call__(self, leaves: Sequence, device: jax.Device | None) -> Any:
        arrays = {
            n: jax.device_put(POOL.array(place.shape, place.dtype), device)
            for n, place in self.places.items()
        }
        small_results, done = self.run(leaves, list(arrays.values()))
        jax.block_until_ready(done)
        given = iter(small_results)
        count = len(arrays) + len(small_results)
        return jax.tree.unflatten(
            self.structure, [arrays[n] if n in arrays else next(given) for n in range(count)]
        )


def into_buffers(
    traced: Any, plan: fuse.Plan, compiled: dict[str, Any], target: Target
) -> IntoBuffers | None:
    """A function, traced by jax.jit and planned, so compiled that its large results go to places.

    None where kernels of one program do not make every large result once, or write to operands.
    """
    outer, results = traced.jaxpr.jaxpr, plan.jaxpr.outvars
    if len(outer.eqns) != 1 or len(plan.segments) != 1 or not plan.segments[0].is_ours:
        return None
    signature = compiled[plan.segments[0].program.name].signature
    if signature.in_place or any(map(checks.can_fail, plan.kernels())):
        return None
    call = outer.eqns[0]
    if outer.outvars != call.outvars:
        return None
    outputs = zip(plan.segments[0].makes, signature.outputs)
    large = {var: output for var, output in outputs if output.nbytes >= target.POOLED_BYTES}
    at = {
        n: large[var] for var in large for n, result in enumerate(results) if result is var
    }  # in the order of the program's outputs
    if (
        len(at) != len(large)
        or not at
        or any(call.outvars[position].aval.weak_type for position in at)
    ):
        return None

    def run(leaves, places):
        env = dict(zip((*outer.invars, *outer.constvars), (*leaves, *traced.jaxpr.consts)))
        ends = []

        def program_into(program: Any, operands: Sequence) -> list:
            small_results, end = target.call_into(
                compiled[program.name], program.label, operands, places
            )
            ends.append(end)
            placed, small = iter(places), iter(small_results)
            return [
                next(placed if output.nbytes >= target.POOLED_BYTES else small)
                for output in signature.outputs
            ]

        operands = [
            atom.val if isinstance(atom, jex.Literal) else env[atom] for atom in call.invars
        ]
        with _jax.types_kept(traced.jaxpr):
            results = plan.evaluate(operands, program_into)
        return [result for n, result in enumerate(results) if n not in at], ends[0]

    run.__name__ = plan.name
    return IntoBuffers(jax.jit(run), at, jax.tree.structure(traced.out_info))


_dispatches: weakref.WeakSet[Dispatch] = weakref.WeakSet()


def forget() -> None:
    """Drops what all decorated functions have compiled here; with jax.clear_caches()."""
    for dispatch in list(_dispatches):
        dispatch.known.clear()


@dataclass(eq=False)
class Dispatch:
    """Chooses how eager calls of one decorated function run.

    Attributes:
      build: (args, kwargs) -> IntoPlaces, or None where results are XLA's.
      split: (args, kwargs) -> (static arguments, pytree of the others).
      known: what `build` has answered, by types, static arguments and JAX's configuration.
    """

    build: Callable[[tuple, dict], IntoBuffers | None]
    split: Callable[[tuple, dict], tuple[Any, Any]]
    known: dict[Any, IntoBuffers | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _dispatches.add(self)
        _jax.on_clear_caches(forget)

    def __call__(self, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """(whether the call has run, its results)."""
        context = _jax.eager_context()
        if context is None or config.current().pool_megabytes == 0:
            return False, None
        static, dynamic = self.split(args, kwargs)
        leaves, structure = jax.tree.flatten(dynamic)
        if not all(map(_on_only_device, leaves)):
            return False, None
        key = (static, structure, tuple(map(jax.typeof, leaves)), context, config.current())
        if key not in self.known:
            self.known[key] = self.build(args, kwargs)
        into = self.known[key]
        if into is None:
            return False, None
        committed = any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)
        return True, into(leaves, only_device() if committed else None)


@functools.cache
def only_device() -> jax.Device | None:
    """The CPU, where it is JAX's one and default device."""
    devices = jax.devices()
    return devices[0] if len(devices) == 1 and devices[0].platform == "cpu" else None


def _on_only_device(leaf: Any) -> bool:
    """Whether an argument is a number, a NumPy array, or an array that is there."""
    if isinstance(leaf, jax.core.Tracer) or only_device() is None:
        return False
    if isinstance(leaf, jax.Array):
        return not leaf.is_deleted() and leaf.devices() == {only_device()}
    return isinstance(leaf, np.ndarray | np.generic | int | float)
