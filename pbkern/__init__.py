"""pbkern: a Pallas-style kernel DSL with an auto-fusing front end."""

import gc

# A collection while modules load would look at all of JAX's objects, which takes 0.1 s.
_was_collecting = gc.isenabled()
gc.disable()

from pbkern import amdgpu, config, cpu, device_helpers, errors, nvgpu, options, pallas, testing, tpu
from pbkern.aot.decorator import polyblocks_aot_jax
from pbkern.aot.frameworks import polyblocks_aot_tf, polyblocks_aot_torch
from pbkern.api.decorators import jit, polyblocks_jit_jax, polymage_jit_jax
from pbkern.api.editing.adopt import adopt
from pbkern.api.editing.eject import eject
from pbkern.api.simulation import Simulation, simulate
from pbkern.api.stablehlo_functions import from_stablehlo
from pbkern.api.tf_functions import polyblocks_jit_tf, polymage_jit_tf
from pbkern.api.torch_functions import polyblocks_jit_torch, polymage_jit_torch
from pbkern.api.tune import tune
from pbkern.core.options import CompileOptions
from pbkern.core.version import VERSION
from pbkern.dsl import (
    Blocked,
    BlockSpec,
    BoundedSlice,
    Element,
    GridSpec,
    Kernel,
    Scratch,
    Squeezed,
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    bind,
    breakpoint,
    call_kernel,
    cdiv,
    check,
    ds,
    fail,
    in_bounds,
    interpret,
    kernel,
    load,
    loop,
    multiple_of,
    num_programs,
    program_id,
    rebuild,
    source,
    store,
    when,
)
from pbkern.simulate.launches import simulate_ptx

if _was_collecting:
    gc.enable()

__version__ = VERSION

__all__ = [
    "BlockSpec",
    "Blocked",
    "BoundedSlice",
    "CompileOptions",
    "Element",
    "GridSpec",
    "Kernel",
    "Scratch",
    "Simulation",
    "Squeezed",
    "adopt",
    "amdgpu",
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
    "config",
    "cpu",
    "device_helpers",
    "ds",
    "eject",
    "errors",
    "fail",
    "from_stablehlo",
    "in_bounds",
    "interpret",
    "jit",
    "kernel",
    "load",
    "loop",
    "multiple_of",
    "num_programs",
    "nvgpu",
    "options",
    "pallas",
    "polyblocks_aot_jax",
    "polyblocks_aot_tf",
    "polyblocks_aot_torch",
    "polyblocks_jit_jax",
    "polyblocks_jit_tf",
    "polyblocks_jit_torch",
    "polymage_jit_jax",
    "polymage_jit_tf",
    "polymage_jit_torch",
    "program_id",
    "rebuild",
    "simulate",
    "simulate_ptx",
    "source",
    "store",
    "testing",
    "tpu",
    "tune",
    "when",
]


def __dir__() -> list[str]:
    """The public names alone: folders of the compiler are attributes too, once they are imported."""
    return sorted([*__all__, "__version__"])
