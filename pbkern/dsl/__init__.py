"""The kernel DSL: write, trace, verify, print and interpret kernels."""

from .atomics import atomic_add, atomic_and, atomic_cas, atomic_max, atomic_min, atomic_or, atomic_xchg, atomic_xor
from .bounded import BoundedSlice
from .breakpoints import breakpoint
from .checks import check, fail
from .interpret import interpret
from .kernel import ArrayType, Blocked, BlockMapping, Element, Kernel, Scratch, Squeezed
from .primitives import cdiv, ds, in_bounds, load, loop, multiple_of, num_programs, program_id, store, when
from .refs import Gather, Point, Range, RefAccess, ref_access
from .specs import BlockSpec, GridSpec
from .spelling import bind
from .text import rebuild, same_kernel, source
from .trace import KernelFunction, call_kernel, kernel, trace_kernel
from .verify import verify

__all__ = [
    "ArrayType",
    "BlockMapping",
    "BlockSpec",
    "Blocked",
    "BoundedSlice",
    "Element",
    "Gather",
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
