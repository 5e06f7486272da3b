"""The kernel DSL: write, trace, verify, print and interpret kernels."""

from pbkern.dsl.body_rewrites.bounded_slices import BoundedSlice
from pbkern.dsl.primitives.atomics import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
)
from pbkern.dsl.primitives.breakpoint import breakpoint
from pbkern.dsl.primitives.grid import (
    cdiv,
    ds,
    in_bounds,
    load,
    loop,
    multiple_of,
    num_programs,
    program_id,
    store,
    when,
)
from pbkern.dsl.primitives.ref_access import GatheredIndex, Point, Range, RefAccess, ref_access
from pbkern.dsl.text.spelling import bind

from . import transformations  # noqa: F401  (registers rules of JAX's transformations)
from .body_checks.verify import verify
from .call import call_kernel
from .checks import check, fail
from .interpret import interpret
from .kernel import ArrayType, Blocked, BlockMapping, Element, Kernel, Scratch, Squeezed
from .printer import rebuild, same_kernel, source
from .specs import BlockSpec, GridSpec
from .trace import KernelFunction, kernel, trace_kernel

__all__ = [
    "ArrayType",
    "BlockMapping",
    "BlockSpec",
    "Blocked",
    "BoundedSlice",
    "Element",
    "GatheredIndex",
    "GridSpec",
    "Kernel",
    "KernelFunction",
    "Point",
    "Range",
    "RefAccess",
    "Scratch",
    "Squeezed",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "bind",
    "breakpoint",
    "call_kernel",
    "cdiv",
    "check",
    "ds",
    "fail",
    "in_bounds",
    "interpret",
    "kernel",
    "load",
    "loop",
    "multiple_of",
    "num_programs",
    "program_id",
    "rebuild",
    "ref_access",
    "same_kernel",
    "source",
    "store",
    "trace_kernel",
    "verify",
    "when",
]
